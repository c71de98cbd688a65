"""How readers find the folder of a data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fastmod.data.idx import DataError


def find_folder(
    title: str,
    root: str | os.PathLike[str] | None,
    folders: Sequence[str],
    holds: Callable[[Path], object],
    content: str,
    variable_is: str = "such a folder",
) -> Path:
    """``root`` if given, else the first of ``folders`` in ``$FASTMOD_DATA`` for which ``holds`` is true.

    Raises:
        DataError: there is none; the message describes the folder by ``content``.
    """
    if root is not None:
        return Path(root)
    variable = os.environ.get("FASTMOD_DATA")
    for folder in (Path(variable, name) for name in folders) if variable else ():
        if holds(folder):
            return folder
    where = f" in FASTMOD_DATA={variable}" if variable else ""
    raise DataError(f"{title}: not found{where}; give a folder with {content}, or set FASTMOD_DATA to {variable_is}")
