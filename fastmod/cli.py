"""The ``fastmod`` command."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from fastmod import doctor as doctor_module
from fastmod import race as race_module
from fastmod.studies import command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fast layers for modular neural networks.",
)
console = Console()
app.command()(command.study)
app.command()(command.inspect)
app.command()(command.live)
_COLOURS = {doctor_module.OK: "green", doctor_module.UNAVAILABLE: "dim", doctor_module.FAILED: "bold red"}


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable report.")] = False,
) -> None:
    """Show versions and build, run every op on every backend; exit 1 when something that should work does not."""
    report = doctor_module.examine()
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _show(report)
    raise typer.Exit(0 if report.healthy else 1)


def _show(report: doctor_module.Report) -> None:
    facts = Table(show_header=False, box=None, padding=(0, 2))
    for key, value in report.versions.items():
        facts.add_row(key, value)
    facts.add_row("extension", report.extension)
    for key, value in report.stamp.items():
        facts.add_row(f"  built: {key}", value)
    facts.add_row("  CPU kernels in use", report.cpu_isa)
    console.print(facts)
    table = Table(
        "op", "device", "backend", "state", "detail", caption="each executed forward and backward against fp64"
    )
    for line in report.lines:
        colour = _COLOURS[line.state]
        table.add_row(line.op, line.device, line.backend, f"[{colour}]{line.state}[/]", line.detail)
    console.print(table)
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
    results = []
    with console.status("racing ..."):
        for case in race_module.SMFR_CASES:
            steps = race_module.smfr_steps(case, compiled=compiled)
            results.append(race_module.run(case.label, steps, target=case.target, seconds=seconds))
    console.print(race_table(results, contenders))
    raise typer.Exit(0 if all(result.matches for result in results) else 1)


def race_table(results: list[race_module.Result], contenders: list[str], what: str = "SMFR step") -> Table:
    """One row per case: median milliseconds, ratio of the best baseline to fastmod, the ratio aimed at, Match."""
    table = Table(what, *contenders, "ratio", "target", "Match", title="median milliseconds")
    if any(result.noisy for result in results):
        table.caption = "~ the machine was busy with something else: this figure is worth little"
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        times = [f"{result.seconds[name] * 1e3:.3f}" if result.seconds else "-" for name in contenders]
        ratio = "-" if result.ratio is None else f"{'~' if result.noisy else ''}{result.ratio:.2f}"
        target = "-" if result.target is None else f"{result.target:g}"
        match = f"{'yes' if result.matches else '[bold red]NO[/]'} {result.error:.0e}"
        table.add_row(result.label, *times, ratio, target, match)
    return table


def main() -> None:
    app()
