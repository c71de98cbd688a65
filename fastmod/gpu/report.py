"""``fastmod gpu-report``: what kernels need, and how long a step would take. Predictions, not measurements."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fastmod.gpu import compile as compiling
from fastmod.gpu import launch_table, manifest, predict, tools
from fastmod.gpu.machines import GRAPH_LAUNCH, HOST_LAUNCH, MULTIPROCESSORS
from fastmod.gpu.targets import TargetError
from fastmod.terminal import folded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

console = Console()
_errors = Console(stderr=True)
STATED = (
    f"predictions, not measurements: no GPU has run this. Each launch costs {HOST_LAUNCH * 1e6:.0f} us from the host, "
    f"{GRAPH_LAUNCH * 1e6:.0f} us in a CUDA graph; then the larger of bytes at full bandwidth and flops at peak"
)


def gpu_report(
    target: Annotated[
        list[str] | None, typer.Option(help=f"Compile for {', '.join(MULTIPROCESSORS)}; repeat for several.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this op; repeat for several.")] = None,
    kernels: Annotated[
        Path | None, typer.Option(help="Folder of `fastmod compile`, which keeps what is compiled for --target.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for predictions.csv, kernels.csv and predictions.png.")
    ] = None,
) -> None:
    """Predict the time of every op at the papers' shapes on five GPUs; with --target, tell what its kernels need."""
    ops, targets = op or [], target or []
    known = {row.op for row in launch_table.read()}
    for name in ops:
        if name not in known:
            _fail(f"--op {name}: expected one of {', '.join(sorted(known))}")
    for name in targets:
        if name not in MULTIPROCESSORS:
            _fail(f"--target {name}: expected one of {', '.join(MULTIPROCESSORS)}")
    predicted = predict.predictions(ops)
    found = _launched(targets, ops, kernels)
    console.print(_predictions_table(predicted))
    if found:
        console.print(_kernels_table(found))
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            _write(out / "predictions.csv", predict.Prediction, predicted)
            _write(out / "kernels.csv", predict.Launched, found)
            _draw(predicted, out / "predictions.png")
        except OSError as error:
            _fail(f"--out {out}: {error.strerror or error}")
        _say(f"wrote {out}")


def _fail(message: str) -> None:
    _say(f"error: {message}", _errors)
    raise typer.Exit(2)


def _say(text: str, where: Console = console) -> None:
    where.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _launched(targets: Sequence[str], ops: Sequence[str], folder: Path | None) -> list[predict.Launched]:
    """The kernels for ``targets``, compiled into ``folder``, or for this report only."""
    if not targets:
        return []
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            return _launched(targets, ops, Path(scratch))
    stems = {g.kernel.partition(".")[0] for g in launch_table.read_geometry() if not ops or g.op in ops}
    try:
        report = compiling.build(targets, folder, jobs=1, ops=sorted(stems), triton=False)
    except (TargetError, tools.MissingToolError) as error:
        _fail(f"--target: {error}")
    for line in [*report.left_out, *[f"{name}: {why}" for name, why in report.failed.items()]]:
        _say(f"left out: {line}", _errors)
    return predict.launched([k for k in manifest.read(folder) if k.target in targets], ops)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _predictions_table(predicted: Sequence[predict.Prediction]) -> Table:
    names = ("op", "shape", "dtype", "GPU", "launches", "MB", "Mflop", "binds", "fastmod", "fastmod graph")
    title = "predicted microseconds, forward + backward"
    table = Table(*names, "eager", "eager graph", title=title, caption=STATED)
    for column in table.columns[4:]:
        column.justify = "right"
    for p in predicted:
        launches = f"{p.launches} / {'-' if p.eager_launches is None else p.eager_launches}"
        sizes = f"{p.bytes / 1e6:.2f}", f"{p.flops / 1e6:.1f}"
        times = (_us(p.fastmod), _us(p.fastmod_graph), _us(p.eager), _us(p.eager_graph))
        table.add_row(p.op, p.shape, p.dtype, p.machine, launches, *sizes, p.binds, *times)
    return folded(table)


def _kernels_table(found: Sequence[predict.Launched]) -> Table:
    names = ("target", "op", "shape", "kernel", "launches", "blocks x threads", "registers", "spilled", "shared")
    table = Table(*names, "tensor core", "blocks a SM", "occupancy", title="what the kernels need")
    for column in table.columns[4:]:
        column.justify = "right"
    for k in found:
        table.add_row(
            k.target, k.op, f"{k.shape} {k.dtype}", k.kernel, str(k.launches), f"{k.blocks} x {k.threads}",
            str(k.registers), str(k.spills), str(k.shared), str(k.tensor_core), str(k.resident), f"{k.occupancy:.0%}",
        )  # fmt: skip
    return folded(table)


def _write(path: Path, kind: Any, rows: Sequence[Any]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(kind._fields)
        writer.writerows(rows)


def _draw(predicted: Sequence[predict.Prediction], path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        _say(f"{path.name}: not drawn, as matplotlib is missing: pip install fastmod[study]", _errors)
        return
    figure = _figure(predicted, pyplot)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _figure(predicted: Sequence[predict.Prediction], pyplot: Any) -> Figure:
    """A panel per GPU, fp32: a row of dots per shape, on a logarithmic axis."""
    machines = list(dict.fromkeys(p.machine for p in predicted))
    rows = list(dict.fromkeys(f"{p.op} {p.shape}" for p in predicted))
    size = (3.2 * len(machines) + 3, 0.3 * len(rows) + 1.6)
    figure, axes = pyplot.subplots(1, len(machines), figsize=size, sharey=True, squeeze=False, layout="constrained")
    marks = {"fastmod_graph": "o", "fastmod": "s", "eager_graph": "v", "eager": "^"}
    for axis, machine in zip(axes[0], machines, strict=True):
        own = {f"{p.op} {p.shape}": p for p in predicted if p.machine == machine and p.dtype == "fp32"}
        for name, mark in marks.items():
            pairs = [(getattr(own[row], name), y) for y, row in enumerate(rows) if getattr(own[row], name) is not None]
            axis.plot(*zip(*pairs, strict=True), mark, label=name.replace("_graph", " in a graph"), alpha=0.8)
        axis.set(xscale="log", title=machine, xlabel="predicted us")
        axis.grid(alpha=0.3)
    axes[0][0].set_yticks(range(len(rows)), rows, fontsize=7)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(fontsize=7)
    figure.suptitle("Predictions, not measurements: forward + backward, fp32")
    return figure
