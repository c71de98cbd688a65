"""The ``fastmod`` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import fastmod
from fastmod import _extension, terminal
from fastmod import doctor as doctor_module
from fastmod import race as race_module
from fastmod.bench import clock, table
from fastmod.bench import command as bench_command
from fastmod.gpu import command as gpu_command
from fastmod.gpu import report as gpu_report
from fastmod.runs import command, run_commands, sweep_command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fast layers for modular neural networks.",
)
console = Console()
app.command()(command.study)
app.command()(sweep_command.sweep)
app.command()(run_commands.compare)
app.command()(run_commands.export)
app.command()(run_commands.results)
app.command()(command.inspect)
app.command()(command.live)
app.command()(command.show)
app.command()(bench_command.bench)
app.command("compile")(gpu_command.compile_kernels)
app.command("gpu-report")(gpu_report.gpu_report)
_COLOURS = {doctor_module.OK: "green", doctor_module.UNAVAILABLE: "dim", doctor_module.FAILED: "bold red"}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fastmod {fastmod.__version__}, torch {torch.__version__}, extension: {_extension.STATUS}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Version, torch and build in one line.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable report.")] = False,
    full: Annotated[
        bool,
        typer.Option("--full", help="JSON with values, launches and times at the papers' shapes too; minutes."),
    ] = False,
    op: Annotated[list[str] | None, typer.Option(help="Of --full: only this op; repeat for several.")] = None,
) -> None:
    """Show versions and build, run every op on every backend; exit 1 if something that should work does not.

    On a machine with a GPU, `fastmod doctor --full > report.json` is the one file to send in."""
    report = doctor_module.examine()
    if full:
        raise typer.Exit(_full(report, op or []))
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report)
    raise typer.Exit(0 if report.healthy else 1)


def _full(report: doctor_module.Report, ops: list[str]) -> int:
    from fastmod.gpu import measure

    known = sorted({shape.op for shape in measure.SHAPES})
    for name in ops:
        if name not in known:
            Console(stderr=True).print(f"error: --op {name}: expected one of {', '.join(known)}", markup=False)
            return 2
    rows = [asdict(row) for row in measure.measured(ops, lambda name: print(name, "...", file=sys.stderr, flush=True))]
    told = {**report.as_dict(), "graph_noise": measure.fresh_noise(), "measured": rows}
    print(json.dumps(told, indent=1))
    stale = [name for name, fresh in told["graph_noise"].items() if fresh is not True]
    bad = [row for row in rows if row["problem"] or row["graph_problem"]]
    return 0 if report.healthy and not bad and not stale else 1


def _show(report: doctor_module.Report) -> None:
    facts = Table(show_header=False, box=None, padding=(0, 2))
    for key, value in report.versions.items():
        facts.add_row(key, value)
    facts.add_row("extension", report.extension)
    for key, value in report.stamp.items():
        facts.add_row(f"  built: {key}", value)
    facts.add_row("  CPU kernels in use", report.cpu_isa)
    console.print(terminal.folded(facts))
    table = Table(
        "op", "device", "backend", "state", "detail", caption="each executed forward and backward against fp64"
    )
    for line in report.lines:
        colour = _COLOURS[line.state]
        table.add_row(line.op, line.device, line.backend, f"[{colour}]{line.state}[/]", line.detail)
    console.print(terminal.folded(table))
    for problem in report.problems:
        console.print(f"[bold red]problem:[/] {problem}", soft_wrap=True)


@app.command()
def race(
    compiled: Annotated[bool, typer.Option("--compile", help="Race torch.compile too (compiles for minutes).")] = False,
    seconds: Annotated[float, typer.Option(help="Time per case and contender.")] = 1.5,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
) -> None:
    """Race an SMFR step (forward + backward) against plain PyTorch; results are checked equal before they are timed."""
    torch.set_num_threads(threads)
    contenders = ["eager", "compile", "fastmod"] if compiled else ["eager", "fastmod"]
    with console.status("racing ..."):
        results = [clock.run(case, compiled=compiled, seconds=seconds) for case in race_module.CASES]
    console.print(table.of(results, contenders, "SMFR step"))
    raise typer.Exit(0 if all(result.matches for result in results) else 1)


def main() -> None:
    terminal.be_lenient()
    app()
