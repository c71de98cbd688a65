"""Commands on existing runs: ``fastmod compare``, ``export`` and ``results``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fastmod.runs import compare as comparing
from fastmod.runs import draw, loading
from fastmod.runs import results as rows
from fastmod.runs.command import clear_errors, console, say
from fastmod.runs.config import StudyError
from fastmod.runs.folder import RunFolder
from fastmod.terminal import folded


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    measure: Annotated[str | None, typer.Option(help="What the figure shows; default: the first one measured.")] = None,
    out: Annotated[Path, typer.Option(help="The figure.")] = Path("compare.png"),
) -> None:
    """Set several runs side by side: one table, what differs in their settings, one figure."""
    with clear_errors():
        if out.suffix.lower() != ".png":
            raise StudyError(f"--out {out}: expected a name that ends in .png")
        several = comparing.read(runs)
        names = [run.name for run in several]
        spelt = (lambda text: text.replace("±", "+-")) if console.options.ascii_only else str
        table = Table("", "paper", *names, caption=spelt("ours: mean ± standard error (trials)"))
        for line in comparing.table(several):
            table.add_row(*map(spelt, line))
        console.print(folded(table))
        apart = comparing.differences(several)
        if apart:
            settings = Table("differs", *names)
            for line in apart:
                settings.add_row(*line)
            console.print(folded(settings))
        if draw.available():
            try:
                figure, chosen = comparing.figure(several, measure)
            except comparing.NoFigureError as why:
                say(f"no figure: {why}")
                return
            draw.save(figure, out)
            say(f"figure of {chosen}: {out}")
        else:
            say('no figure: pip install "fastmod[study]" adds it')


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    trial: Annotated[str | None, typer.Option(help="Such as SMFR-s0; default: all that have a checkpoint.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to; default: export/ in the run's folder.")] = None,
) -> None:
    """Write trained models as safetensors with their settings, and their masks."""
    with clear_errors():
        for done in loading.export(RunFolder(run), trial, out):
            masks = f", masks of {', '.join(done.masks)}" if done.masks else ""
            say(f"{done.trial}: {done.folder}{masks}")


def results(
    runs: Annotated[list[Path] | None, typer.Argument(help="Folders of finished runs and sweeps.")] = None,
    write: Annotated[Path | None, typer.Option(help="Page with marks, such as docs/results.md.")] = None,
) -> None:
    """Rows of docs/results.md out of run folders; --write keeps them and makes the page's tables again."""
    with clear_errors():
        new = [rows.record(run) for run in runs or []]
        if write is None:
            if not new:
                raise StudyError("expected run folders, or --write PAGE to make its tables again")
            say("\n\n".join(table for kept in new for table in rows.tables_of(kept)))
            for kept in new:
                if "sweep" in kept:
                    count, axes = len(kept["sweep"]["cells"]), "|".join(kept["sweep"]["axes"])
                    mark = f"<!-- results study={kept['study']} cells=MEASURE across={axes} -->"
                    say(f"{kept['run']}: {count} cells, as a grid: {mark} in a page")
            return
        homeless = rows.write(write, new)
        for name in homeless:
            say(f"{name}: no table of {write} takes it; see the marks that the help of fastmod.runs.results shows")
        say(f"{write}: tables made again, {len(new)} new record{'' if len(new) == 1 else 's'}")
