"""The command on poor terminals: ASCII alone, and twenty columns."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fastmod
from fastmod import _extension
from fastmod.runs.display import table
from fastmod.runs.study import Row
from tests.helpers.study_commands import ROOT, in_process
from tests.helpers.study_runs import SMALL

POOR = {"PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C", "COLUMNS": "20"}
# One process for all of them: importing torch takes most of the time.
SEVERAL = """
import sys
from fastmod import cli

for args in ([], ["--version"], ["--help"], ["study", "--help"], ["study"], ["doctor"], ["nonsense"], ["study", "nope"],
             ["inspect", "/no\\u00eb\\udcff"]):
    sys.argv = ["fastmod", *args]
    try:
        cli.main()
    except SystemExit as end:
        print("\\nended", end.code)
"""


@pytest.mark.slow
def test_ascii_and_narrow() -> None:
    done = subprocess.run([sys.executable, "-c", SEVERAL], cwd=ROOT, env={**os.environ, **POOR}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    shown = done.stdout.decode("ascii")  # rich counts on it
    codes = [line.split()[1] for line in shown.splitlines() if line.startswith("ended")]
    assert codes == ["2", "0", "0", "0", "0", "0", "2", "2", "2"], shown + done.stderr.decode()
    assert "Traceback" not in done.stderr.decode("ascii")
    assert "/no\\xeb\\udcff: not the folder of a run" in done.stderr.decode("ascii")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a terminal of its own")
def test_study_on_a_narrow_ascii_terminal(tmp_path: Path) -> None:
    import fcntl
    import pty
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 20, 0, 0))
    environment = {**os.environ, **POOR, "TERM": "xterm"}
    del environment["COLUMNS"]
    command = [sys.executable, "-m", "fastmod", "study", *SMALL["algo"], "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # how a terminal says that nobody writes any more
        pass
    os.close(ours)
    assert process.wait() == 0, shown.decode(errors="replace")
    text = shown.decode("ascii")
    assert "\x1b[" in text and "SMFR" in text and "report: " in text.replace("\r\n", ""), text


@pytest.mark.parametrize(("encoding", "sign"), [("ascii", "+-"), ("utf-8", "±")])
def test_table_is_straight(encoding: str, sign: str) -> None:
    rows = [Row("one", "1.000 ± 0.1", [0.5, 0.25], 10, 1.0), Row("two", "-", [0.5], 10, 1.0)]
    console = Console(file=open(os.devnull, "w", encoding=encoding), width=100, record=True)  # noqa: SIM115
    console.print(table("title", rows, ascii_only=console.options.ascii_only))
    lines = console.export_text().splitlines()[1:]
    assert len({len(line) for line in lines}) == 1, lines
    assert sum(f"0 {sign} 0" in line for line in lines) == 1 and f"mean {sign} standard" in lines[1], lines
    console.file.close()


def test_version() -> None:
    done = in_process("--version")
    assert done.code == 0 and done.out.count("\n") == 1 and not done.err, done.text
    for word in (fastmod.__version__, torch.__version__, _extension.STATUS):
        assert word in done.out
