"""Progress of a run: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich import progress as bars
from rich.console import Console
from rich.table import Table

from fastmod.runs.engine import Progress
from fastmod.runs.study import Row
from fastmod.terminal import folded

_SECONDS_BETWEEN_LINES = 15.0


class Display:
    """A listener of the engine, and a context manager. ``keep``: bars of finished trials stay."""

    def __init__(self, console: Console, trials: int, *, keep: bool = True) -> None:
        self._console, self._trials, self._keep = console, trials, keep
        self._live = _bars(console) if console.is_terminal else None
        self._rows: dict[str, bars.TaskID] = {}
        self._shown: dict[str, float] = {}
        self._last_metrics: dict[str, dict[str, float]] = {}

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, now: Progress) -> None:
        if now.metrics is not None:
            self._last_metrics[now.key] = now.metrics
        if self._live is not None:
            self._update_bar(self._live, now)
        elif now.finished or time.monotonic() - self._shown.get(now.key, -1e9) > _SECONDS_BETWEEN_LINES:
            self._shown[now.key] = time.monotonic()
            left = "done" if now.finished else f"{_clock((now.steps - now.step) / now.rate)} left"
            self._console.print(
                f"{now.key}  step {now.step}/{now.steps}  {_speed(now.rate)}  {self._metrics(now.key)}  {left}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip

    def _update_bar(self, live: bars.Progress, now: Progress) -> None:
        if now.key not in self._rows:
            self._rows[now.key] = live.add_task(now.key, total=now.steps, completed=now.step, metrics="", rate="")
        live.update(
            self._rows[now.key], completed=now.step, total=now.steps, metrics=self._metrics(now.key),
            rate=_speed(now.rate), visible=self._keep or not now.finished,
        )  # fmt: skip

    def _metrics(self, key: str) -> str:
        known = self._last_metrics.get(key, {})
        chosen = [name for name in known if name == "loss" or name.startswith(("accuracy", "error", "ood"))][:5]
        return "  ".join(f"{name} {known[name]:.4g}" for name in chosen)


def _bars(console: Console) -> bars.Progress:
    return bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=20),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[rate]}"),
        bars.TextColumn("{task.fields[metrics]}"),
        bars.TimeRemainingColumn(),
        console=console,
    )


def _speed(rate: float) -> str:
    return f"{rate:.{0 if rate >= 10 else 1}f} steps/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def table(title: str, rows: list[Row], *, ascii_only: bool = False) -> Table:
    """``ascii_only``: spelt here already, because the columns are as wide as what is in them."""

    def spelt(text: str) -> str:
        return text.replace("±", "+-") if ascii_only else text

    header = ("", "paper", spelt("ours (mean ± standard error)"), "trials", "steps", "minutes")
    shown = Table(*header, title=title)
    for column in shown.columns[1:]:
        column.justify = "right"
    for row in rows:
        figures = (str(row.trials), f"{row.steps:,}", f"{row.minutes:.1f}")
        shown.add_row(row.name, spelt(row.paper), spelt(row.ours), *figures)
    return folded(shown)
