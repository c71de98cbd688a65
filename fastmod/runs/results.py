"""Rows of docs/results.md out of run folders: what was found, with how many trials and steps, by which commit, and
whether with the paper's settings.

Run folders are large and stay where they are. What the page needs of one is kept as a record, a small JSON file in the
folder beside the page (docs/results/ of docs/results.md), so that its tables can be made again at any time. They stand
between two marks, and all text around them is left alone::

    <!-- results study=bpmnist rows="test accuracy" runs="bpmnist-25k*" -->
    <!-- end of results -->

``study``: one, or several with commas between; ``rows``: what to find in the names of rows, a regular expression;
``runs``: a pattern of record names; the last two may be left out. A sweep has the rows that its study makes of all
trials, those of its best trials and, if it has few cells, a row per cell, model and measure. All cells as a grid::

    <!-- results study=doubleadd cells=ood_accuracy across=width at=1.0 -->

Sweeps over one grid that differ only in seeds and commit are one there. ``cells``: the measure; ``across``: the setting
whose values are the columns; ``at``: the value to count trials at, or left out.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastmod.bench import checkout
from fastmod.runs import grid_table, report, tables
from fastmod.runs import sweep as sweeps
from fastmod.runs.checkpoint import write_atomically
from fastmod.runs.config import StudyError, changed
from fastmod.runs.folder import Plan, RunFolder, file_name
from fastmod.runs.study import Study, shown
from fastmod.studies import registry

FORMAT = "fastmod result 1"
FEW_CELLS = 12
HEADER = (
    "| row | paper | ours (mean ± standard error) | seeds | steps | minutes |\n| --- | --- | --- | --- | --- | --- |"
)
_BEGIN = re.compile(r"<!-- results (?P<words>[^\n]*?) -->\n")
_END = "<!-- end of results -->"


def record(path: Path) -> dict[str, Any]:
    """What the page needs of a finished run or sweep."""
    if (path / "sweep.json").exists():
        return _record_of_sweep(path)
    folder = RunFolder(path)
    found = report.read_result(folder)
    plan = folder.plan()
    study = registry.get(plan.study)
    config = changed(study.defaults, plan.settings)
    trials = {model: [one["result"] for one in found["trials"] if one["model"] == model] for model in plan.models}
    settings = {model: study.setting_of(config, model, trials[model]) for model in plan.models}
    rows = [
        {**{key: row[key] for key in row if key != "note"}, "setting": _setting(row["name"], settings)}
        for row in found["table"]
    ]
    return _record(path, study, plan, rows)


def _record(path: Path, study: Study, plan: Plan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": FORMAT, "run": path.resolve().name, "study": plan.study, "paper": study.paper,
        "seeds": plan.seeds, "device": plan.device, "versions": _versions(plan), "apart": _apart(study, plan.settings),
        "rows": rows,
    }  # fmt: skip


_LOST = " not in the repository"


def _versions(plan: Plan) -> dict[str, str]:
    """Those of the plan; a commit that nobody can look at, in a checkout of this project, is marked."""
    commit = plan.versions.get("commit")
    if commit is None:
        return plan.versions
    try:
        top = checkout.root()
    except checkout.BenchError:  # nothing to look in
        return plan.versions
    command = ["git", "for-each-ref", "--contains", commit.partition(" ")[0], "--count=1"]
    try:
        found = subprocess.run(command, cwd=top, capture_output=True, text=True, check=True).stdout
    except OSError:
        return plan.versions
    except subprocess.CalledProcessError:
        found = ""
    return plan.versions if found.strip() else {**plan.versions, "commit": commit + _LOST}


def _record_of_sweep(path: Path) -> dict[str, Any]:
    """What the study makes of all trials, a row per cell, model and measure where cells are few, and those of the best
    trials; and the cells, for a grid of them."""
    sweep, found = sweeps.read(sweeps.SweepFolder(path))
    study = registry.get(sweep.plan.study)
    best = tables.best_lines(tables.distinct(study, found), sweep.best, sweep.by) if sweep.best else []
    few = tables.cell_lines(found) if len({cell.name for cell, _ in found}) <= FEW_CELLS else []
    shown = tables.usual(list(dict.fromkeys(line["measure"] for line in [*few, *best])))
    trials = {model: [one.result for _, one in found if one.model == model] for model in sweep.plan.models}
    settings = {model: _swept_setting(study, sweep, model, trials[model]) for model in sweep.plan.models}
    grid = " ".join(f"{key}={','.join(map(str, values))}" for key, values in sweep.grid.items())
    config = changed(study.defaults, sweep.plan.settings)
    rows = [
        {**report.row_of(row), "setting": f"{_setting(row.name, settings)}; over the grid {grid}"}
        for row in study.sweep_table(config, [(cell.values, one) for cell, one in found])
    ]
    for line in (line for line in [*few, *best] if line["measure"] in shown):
        inside = [(cell, one) for cell, one in found if one.model == line["model"] and _within(cell.values, line)]
        cell, _ = inside[0]
        if line["kind"] == "cell":
            config = changed(study.defaults, cell.plan.settings)
            where, setting = cell.name, study.setting_of(config, line["model"], [one.result for _, one in inside])
        else:
            where, setting = line["kind"], f"over the grid {grid}"
        rows.append(
            {"name": f"{line['model']}, {line['measure']}, {where}", "paper": "-", "setting": setting,
             **{key: line[key] for key in ("mean", "standard_error", "trials")},
             "steps": max(one.steps for _, one in inside), "minutes": sum(one.seconds for _, one in inside) / 60}
        )  # fmt: skip
    cells = grid_table.cells(sweep, found, settings)
    return {**_record(path, study, sweep.plan, rows), "sweep": cells}


def _swept_setting(study: Study, sweep: sweeps.Sweep, model: str, trials: Sequence[Mapping[str, Any]]) -> str:
    """Of a model in all cells. Where the axes are those of a grid that the study has, so that seeds can draw from it
    too, it does not matter that here they did not."""
    swept = {*sweep.grid} | ({"grid"} if {*sweep.grid} in map(set, study.grids.values()) else set())
    return study.setting_of(changed(study.defaults, sweep.plan.settings), model, trials, swept)


def _within(values: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Whether a cell is the one that a line is about; every cell is, where it is about the best of all."""
    return line["kind"] != "cell" or tables.plain(values).items() <= line.items()


def _setting(row: str, settings: Mapping[str, str]) -> str:
    """Of the model that the row is about, the longest of those it names; of all models if it names none."""
    named = [model for model in settings if re.search(rf"(?<![\w-]){re.escape(model)}(?![\w-])", row)]
    several = [settings[max(named, key=len)]] if named else list(dict.fromkeys(settings.values()))
    return "; ".join(several)


def _apart(study: Study, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are not the study's defaults."""
    defaults = json.loads(json.dumps(vars(study.defaults)))
    given = json.loads(json.dumps(settings))
    kept = ("typed", "checkpoint_seconds", "data")  # say nothing about the result, or where somebody's files are
    return {key: value for key, value in given.items() if key not in kept and defaults.get(key) != value}


def tables_of(kept: Mapping[str, Any], rows: str = "") -> list[str]:
    """A table in Markdown for the rows of each setting, below a line that says study, commit and setting; rows without
    a figure of ours are left out."""
    found = [row for row in kept["rows"] if row["mean"] is not None and re.search(rows, row["name"])]
    made = []
    for setting, several in itertools.groupby(found, lambda row: row["setting"]):
        above = f"`{kept['study']}`, commit {_commit(kept['versions'])}; {setting}:"
        made.append("\n".join([above, "", HEADER, *(_line(row, kept["seeds"]) for row in several)]))
    return made


def _line(row: Mapping[str, Any], seeds: Sequence[int]) -> str:
    cells = [
        row["name"], row["paper"], shown(row["mean"], row["standard_error"]), _seeds(seeds, row["trials"]),
        f"{row['steps']:,}", f"{row['minutes']:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _rows(records: Sequence[Mapping[str, Any]], rows: str) -> str:
    return "\n\n".join(table for kept in records for table in tables_of(kept, rows))


def _grids(records: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]) -> str:
    """The cells of those that are sweeps, in a table for each model; sweeps that differ only in seeds are one."""
    found = []
    for kept in grid_table.together([kept for kept in records if "sweep" in kept]):
        commits = ", ".join(dict.fromkeys(map(_commit, kept["commits"])))
        about = f"Seeds {_seeds(kept['seeds'], len(kept['seeds']))}, commit {commits}"
        found += grid_table.tables_of(kept, about, wanted["cells"], wanted["across"], wanted.get("at"))
    return "\n\n".join(found)


def _seeds(seeds: Sequence[int], trials: int) -> str:
    """``0-4``; with the number of trials where it is another one."""
    text = (
        f"{seeds[0]}-{seeds[-1]}" if list(seeds) == list(range(seeds[0], seeds[-1] + 1)) else ", ".join(map(str, seeds))
    )
    text = str(seeds[0]) if len(seeds) == 1 else text
    return text if trials == len(seeds) else f"{text} ({trials} trials)"


def _commit(versions: Mapping[str, str]) -> str:
    commit = versions.get("commit", "unknown")
    sha, _, changes = commit.removesuffix(_LOST).partition(" ")
    return sha[:12] + (" +" if changes else "") + (" (not in the repository)" if commit.endswith(_LOST) else "")


# ---- the page


def records_folder(page: Path) -> Path:
    return page.with_suffix("")


def read_records(page: Path) -> dict[str, dict[str, Any]]:
    """Name -> record, of all that are kept for the page."""
    found = {}
    for file in sorted(records_folder(page).glob("*.json"), key=lambda file: file.stem):
        try:
            kept = json.loads(file.read_text())
            if kept["format"] != FORMAT:
                raise ValueError(f"format {kept['format']!r}, expected {FORMAT!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise StudyError(f"{file}: not the record of a run ({error})") from None
        found[file.stem] = kept
    return found


def write(page: Path, new: Sequence[dict[str, Any]]) -> list[str]:
    """Keep the new records, and make all tables of the page again; the names of records that have no place on it."""
    named = read_records(page) | {file_name(kept["run"]): kept for kept in new}
    records = dict(sorted(named.items()))  # as they are read the next time
    text, homeless = filled(_text(page), records)
    folder = records_folder(page)
    for kept in new:
        folder.mkdir(exist_ok=True)
        content = json.dumps(kept, indent=1, ensure_ascii=False) + "\n"
        write_atomically(folder / f"{file_name(kept['run'])}.json", content.encode())
    write_atomically(page, text.encode())
    return homeless


def _text(page: Path) -> str:
    try:
        return page.read_text()
    except FileNotFoundError:
        raise StudyError(f"--write {page}: no such file; it needs marks such as <!-- results study=algo -->") from None


def filled(text: str, records: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The text with its tables made anew, and the names of records that none of them takes."""
    parts, at, homeless = [], 0, dict.fromkeys(records)
    for mark in _BEGIN.finditer(text):
        wanted = _wanted(mark["words"])
        end = text.find(_END, mark.end())
        if end < 0 or "<!-- results " in text[mark.end() : end]:
            raise StudyError(f"{mark[0].strip()}: expected {_END} after it")
        chosen = []
        for name, kept in records.items():
            if kept["study"] in wanted["study"].split(",") and fnmatch.fnmatch(name, wanted["runs"]):
                homeless.pop(name, None)
                chosen.append(kept)
        table = _grids(chosen, wanted) if "cells" in wanted else _rows(chosen, wanted["rows"])
        parts += [text[at : mark.end()], table or "(no run yet)", "\n"]
        at = end
    return "".join([*parts, text[at:]]), list(homeless)


def _wanted(words: str) -> dict[str, str]:
    try:
        given = dict(word.split("=", 1) for word in shlex.split(words))
    except ValueError:
        given = {}
    rows_of_runs, grids = {"study", "runs", "rows"}, {"study", "runs", "cells", "across", "at"}
    right = given.keys() <= rows_of_runs or ({"cells", "across"} <= given.keys() <= grids)
    if "study" not in given or not right:
        ways = 'study=NAME, and perhaps rows="...", or cells=MEASURE across=SETTING, and runs="..."'
        raise StudyError(f"<!-- results {words} -->: expected {ways}")
    try:
        re.compile(given.get("rows", ""))
        float(given.get("at", "0"))
    except (re.error, ValueError) as error:
        raise StudyError(f"<!-- results {words} -->: {'at' if 'at' in given else 'rows'}: {error}") from None
    return {"rows": "", "runs": "*", **given}
