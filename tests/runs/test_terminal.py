"""The command on poor terminals: ASCII alone, and twenty columns."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

import fastmod
from fastmod import _extension
from fastmod.bench import table as bench_table
from fastmod.bench.clock import Result
from fastmod.gpu import command, predict, report
from fastmod.gpu.manifest import Kernel
from fastmod.runs import sweep_command
from fastmod.runs.display import table
from fastmod.runs.folder import Plan
from fastmod.runs.study import Row
from fastmod.runs.sweep import Sweep
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


def _shown(table: Table) -> str:
    """As it goes to a pipe, or a terminal of 80 columns."""
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(table)
    return console.export_text()


def test_nothing_is_cut_off_at_80_columns() -> None:
    """Rows that differ in the end of a name alone can be told apart."""
    names = [f"LSTM_apart,_pair1,_shared_in_lstm.weight_{kind}_l{layer}" for kind in ("ih", "hh") for layer in (0, 1)]
    lines = [{"kind": "cell", "alternate_split": False, "a_setting_with_a_long_name": number, "model": "SMFR_softmax",
              "measure": name, "trials": 3, "mean": 0.5, "standard_error": 0.1}
             for number in (1, 2) for name in names]  # fmt: skip
    grid = {"alternate_split": [False], "a_setting_with_a_long_name": [1, 2]}
    kernel: dict[str, Any] = {"source": "cuda", "registers": 1, "spills": 0, "shared": 1, "tensor_core": 0}
    kernel |= {"symbol": "", "signature": {}, "constants": {}, "options": {}, "file": "", "sha256": "", "key": ""}
    launched = predict.Launched("multiplex", "B4096 M16 N16 D32", "fp32", "sm_90", "multiplex.forward_kernel<float>",
                                1, 1024, 256, 64, 0, 49152, 0, 4, 0.5)  # fmt: skip
    tables = {
        "study": (table("title", [Row(name, "1.000 ± 0.1", [0.5, 0.25], 20_000, 1.0) for name in names]), names),
        "sweep": (
            sweep_command._table(Sweep(Plan("doubleadd", [], [], {}), grid), lines, names, ascii_only=False), names,
        ),
        "compile": (command._table([Kernel("multiplex.forward", target="sm_90", **kernel)]), ["sm_90"]),
        "predictions": (report._predictions_table(predict.predictions(["multiplex"])), ["multiplex"]),
        "bench": (
            bench_table.of([Result("inverted_residual_training_inference", "B128", None, 0.0, 1.0, {})],
                           ["eager", "channels_last", "inductor_default", "reduce-overhead", "fastmod"]),
            ["inverted_residual_training_inference", "inductor_default"],
        ),
        "kernels": (report._kernels_table([launched]), ["multiplex.forward_kernel<float>"]),
    }  # fmt: skip
    for name, (made, words) in tables.items():
        text = _shown(made)
        assert "…" not in text, f"{name}\n{text}"
        columns = _columns(text)
        for word in words:
            assert any(word in column for column in columns), f"{name}: {word}\n{text}"
    heads = [str(column.header) for column in tables["predictions"][0].columns]
    assert len(set(heads)) == len(heads) and "eager graph" in heads


def _columns(text: str) -> list[str]:
    """What stands in each column, its lines put together."""
    rows = [line.replace("┃", "│").split("│")[1:-1] for line in text.splitlines() if "│" in line or "┃" in line]
    return ["".join(row[i].strip() for row in rows) for i in range(len(rows[0]))]


def test_version() -> None:
    done = in_process("--version")
    assert done.code == 0 and done.out.count("\n") == 1 and not done.err, done.text
    for word in (fastmod.__version__, torch.__version__, _extension.STATUS):
        assert word in done.out
