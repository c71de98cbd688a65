"""``python -m fastmod``."""

from fastmod.cli import main

main()
