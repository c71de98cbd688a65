"""result.json, the figures and the single-file report.html of a run."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from string import Template
from typing import TYPE_CHECKING, Any

from fastmod.runs import checkpoint, draw
from fastmod.runs.config import StudyError, changed
from fastmod.runs.folder import Plan, RunFolder
from fastmod.runs.study import Outcome, Record, Row, Study
from fastmod.studies import registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } figure { margin: 2rem 0; } img { max-width: 100%; }
figcaption, .dim { color: #666; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
</style></head><body>
<h1>$title</h1>
<p class="dim">$paper. Study <code>$study</code>, $trials trials, $minutes minutes in all.</p>
<table><thead><tr><th></th><th>paper</th><th>ours (mean ± standard error)</th><th>trials</th><th>steps</th>
<th>minutes</th><th></th></tr></thead><tbody>
$rows
</tbody></table>
$remarks
$figures
<h2>Settings</h2><pre>$settings</pre>
</body></html>
""")


def finish(
    folder: RunFolder,
    plan: Plan,
    records: list[Record],
    remarks: Sequence[str] = (),
    more_figures: Mapping[str, tuple[Figure, str]] | None = None,
) -> list[Row]:
    """Write result.json, figures/*.png and report.html; the table's rows."""
    study = registry.get(plan.study)
    outcome, rows = write_result(folder, plan, records)
    figures = []
    drawn = {**(more_figures or {}), **study.figures(outcome)} if draw.available() else {}
    for stem, (figure, caption) in drawn.items():
        path = folder.figures / f"{stem}.png"
        draw.save(figure, path)
        figures.append((path.name, path.read_bytes(), caption))
    page = _page(plan, study, records, rows, figures, remarks)
    checkpoint.write_atomically(folder.report_file, page.encode())
    return rows


def write_result(folder: RunFolder, plan: Plan, records: list[Record]) -> tuple[Outcome, list[Row]]:
    """result.json alone."""
    study = registry.get(plan.study)
    outcome = Outcome(changed(study.defaults, plan.settings), records, folder.metrics())
    rows = study.table(outcome)
    checkpoint.write_atomically(folder.result_file, _result(plan, study, records, rows).encode())
    return outcome, rows


def _result(plan: Plan, study: Study, records: list[Record], rows: list[Row]) -> str:
    table = [{**row_of(row), "note": row.note} for row in rows]
    trials = [{"trial": record.key, **asdict(record)} for record in records]
    result = {"study": study.name, "paper": study.paper, "config": asdict(plan), "table": table, "trials": trials}
    return json.dumps(result, indent=2)


def row_of(row: Row) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "name": row.name,
        "paper": row.paper,
        "mean": row.mean if row.values else None,
        "standard_error": row.error,
        "trials": row.trials,
        "steps": row.steps,
        "minutes": row.minutes,
    }


def _page(
    plan: Plan,
    study: Study,
    records: list[Record],
    rows: list[Row],
    figures: list[tuple[str, bytes, str]],
    remarks: Sequence[str],
) -> str:
    def cells(row: Row) -> str:
        shown = [row.name, row.paper, row.ours, str(row.trials), f"{row.steps:,}", f"{row.minutes:.1f}", row.note]
        kinds = ["", ' class="n"', ' class="n"', ' class="n"', ' class="n"', ' class="n"', ' class="dim"']
        parts = (f"<td{kind}>{html.escape(text)}</td>" for kind, text in zip(kinds, shown, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    def figure(name: str, png: bytes, caption: str) -> str:
        data = base64.b64encode(png).decode()
        text = html.escape(caption)
        return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'

    return _PAGE.substitute(
        title=html.escape(study.title),
        paper=html.escape(study.paper),
        study=study.name,
        trials=len(records),
        minutes=f"{sum(record.seconds for record in records) / 60:.1f}",
        rows="\n".join(cells(row) for row in rows),
        remarks="\n".join(f"<p>{html.escape(remark)}</p>" for remark in remarks),
        figures="\n".join(figure(*one) for one in figures),
        settings=html.escape(json.dumps(asdict(plan), indent=2)),
    )


def read_result(folder: RunFolder) -> dict[str, Any]:
    try:
        found = json.loads(folder.result_file.read_text())
        if not isinstance(found, dict) or not found.keys() >= {"study", "config", "table", "trials"}:
            raise ValueError("not the result of a study")
        return found
    except FileNotFoundError:
        raise StudyError(f"{folder.path}: not finished, it has no result.json") from None
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{folder.result_file}: damaged ({error})") from None
