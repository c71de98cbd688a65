"""The table on the terminal, and the format of figures everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from fastmod.bench.clock import Result
from fastmod.bench.steps import LAST
from fastmod.terminal import folded


def milliseconds(result: Result, contender: str) -> str:
    """The median with three significant digits, of the better memory layout, "-" where there is none."""
    found = [result.times[name].median for name in (contender, contender + LAST) if name in result.times]
    if not found:
        return "-"
    value = min(found) * 1e3
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{max(0, digits)}f}"


def ratio(result: Result) -> str:
    return "-" if result.ratio is None else f"{'~' if result.noisy else ''}{result.ratio:.2f}"


def target(result: Result) -> str:
    return "-" if result.target is None else f"{result.target:g}"


def of(results: Sequence[Result], contenders: Sequence[str], what: str = "forward + backward") -> Table:
    """One row per case: median milliseconds, ratio of the best baseline to fastmod, the ratio aimed at, Match."""
    table = Table(what, *contenders, "ratio", "target", "Match", title="median milliseconds")
    if any(result.noisy for result in results):
        table.caption = "~ the machine was busy with something else: this figure is worth little"
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        match = f"{'yes' if result.matches else '[bold red]NO[/]'} {result.error:.0e}"
        times = [milliseconds(result, name) for name in contenders]
        table.add_row(escape(result.name), *times, ratio(result), target(result), match)
    return folded(table)
