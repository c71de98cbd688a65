"""``fastmod compare`` and ``fastmod results``: tables out of run folders."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastmod.runs import compare, report, results, tables
from fastmod.runs import sweep as sweeps
from fastmod.runs.config import StudyError, changed
from fastmod.runs.folder import Plan, RunFolder
from fastmod.runs.study import Record, shown
from fastmod.studies import registry
from tests.helpers.study_commands import ROOT, in_process, refused
from tests.helpers.study_runs import untouched

PAGE = """# Found
By hand, before.
<!-- results study=doubleadd rows="OOD" -->
old
<!-- end of results -->
Between.
<!-- results study=algo -->
<!-- end of results -->
After.
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two finished runs, the second with another rate and other figures."""
    place = tmp_path_factory.mktemp("compare")
    for name in ("first", "second"):
        shutil.copytree(untouched("doubleadd"), place / name)
    plan = json.loads((place / "second" / "config.json").read_text())
    plan["settings"]["lr"] = 0.5
    (place / "second" / "config.json").write_text(json.dumps(plan))
    result = json.loads((place / "second" / "result.json").read_text())
    result["table"] = result["table"][:3]
    result["table"][0] |= {"mean": 0.25, "standard_error": 0.125, "trials": 8}
    (place / "second" / "result.json").write_text(json.dumps(result))
    return [place / "first", place / "second"]


# ---- compare


def test_table(runs: list[Path]) -> None:
    lines = compare.table(compare.read(runs))
    first = json.loads((runs[0] / "result.json").read_text())["table"]
    assert [line[0] for line in lines] == [row["name"] for row in first]
    assert lines[0] == [
        first[0]["name"],
        first[0]["paper"],
        f"{shown(first[0]['mean'], None)} (1)",
        "0.250 ± 0.125 (8)",
    ]
    assert lines[3][3] == "-", "a row that only one run has"
    several = compare.read(runs)
    assert compare.differences(several) == [["lr", "0.0003", "0.5"]]
    several[1].plan.settings["typed"] = ["lr"]
    assert compare.differences(several) == [["lr", "0.0003", "0.5"]], "names of settings are none"


def test_command(runs: list[Path], tmp_path: Path) -> None:
    done = in_process("compare", *runs, "--out", tmp_path / "figure.png", "--measure", "loss")
    assert done.code == 0 and "0.250" in done.out and "lr" in done.out, done.text
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG") and "figure of loss" in done.out


def test_figure_has_every_trial(runs: list[Path]) -> None:
    figure, measure = compare.figure(compare.read(runs), None)
    assert measure == "accuracy"
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {
        f"{run} {model}" for run in ("first", "second") for model in ("SMFR_gumbel", "FNN")
    }
    found = [line["accuracy"] for line in RunFolder(runs[0]).metrics() if line["trial"] == "FNN-s3"]
    assert [list(line.get_ydata()) for line in axes.lines].count(found) == 2, "both runs have the same metrics"


def test_more_models_than_colours_have_tables_alone(runs: list[Path], tmp_path: Path) -> None:
    many = []
    for number in range(4):
        many.append(shutil.copytree(runs[0], tmp_path / f"run{number}"))
    done = in_process("compare", *many, "--out", tmp_path / "figure.png")
    assert done.code == 0 and "no figure: it has 7 colours, and the runs 8 models" in done.out, done.text
    assert "OOD" in done.out and not (tmp_path / "figure.png").exists()


def test_a_stage_is_not_what_the_figure_shows(runs: list[Path], tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(runs[0], tmp_path / "run"))
    for file in run.metrics_folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        first = {"stage": 1.0, "lr": 0.1, "epoch": 2.0}
        rest = ("trial", "model", "seed", "step", "loss")
        lines = [{**{k: line[k] for k in rest}, **first, **line} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare.figure(compare.read([run.path, runs[0]]), None)[1] == "accuracy"
    assert compare.figure(compare.read([run.path, runs[0]]), "stage")[1] == "stage"


def test_compare_refuses(runs: list[Path], tmp_path: Path) -> None:
    refused(in_process("compare", runs[0], runs[0]), "different runs")
    refused(in_process("compare", runs[0], tmp_path), "not the folder of a run")
    refused(in_process("compare", *runs, "--measure", "x", "--out", tmp_path / "x.png"), "--measure x", "ood_accuracy")
    refused(in_process("compare", *runs, "--out", tmp_path / "x.jpg"), "ends in .png")
    (tmp_path / "run").mkdir()
    shutil.copy(runs[0] / "config.json", tmp_path / "run")
    refused(in_process("compare", runs[0], tmp_path / "run"), "not finished")


# ---- results


def rows_of(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "result.json").read_text())["table"]


def test_a_table_says_all(runs: list[Path]) -> None:
    kept = results.record(runs[1])
    kept["versions"] = {"commit": "0123456789abcdef with changes"}
    (table,) = results.tables_of(kept)
    above, empty, header, _, line, *_ = table.splitlines()
    assert not empty and header.startswith("| row |")
    assert above.startswith("`doubleadd`, commit 0123456789ab +; not the paper's setting: lr 0.5 (0.0003)")
    assert above.endswith("; not printed there, but other than by default: steps 12 (20000), batch 4 (128):")
    name, paper = rows_of(runs[1])[0]["name"], rows_of(runs[1])[0]["paper"]
    minutes = f"{rows_of(runs[1])[0]['minutes']:.1f}"
    cells = [name, paper, "0.250 ± 0.125", "3 (8 trials)", "12", minutes]
    assert line == f"| {' | '.join(cells)} |"
    assert kept["apart"]["lr"] == 0.5 and "width" in kept["apart"] and not {"data", "typed"} & kept["apart"].keys()
    assert len(results.tables_of(kept, "trained pairs$")[0].splitlines()) == 5
    kept["rows"][1]["setting"] = "another"
    assert len(results.tables_of(kept)) == 2 + (len(kept["rows"]) > 2), "a table for each setting"


def test_page_keeps_what_was_written_by_hand(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "found.md"
    page.write_text(PAGE)
    done = in_process("results", *runs, "--write", page)
    assert done.code == 0, done.text
    tables = [table for run in runs for table in results.tables_of(results.record(run), "OOD")]
    assert "\n".join(tables).count("\n| ") == 3 + 2 * len(tables)
    expected = PAGE.replace("old", "\n\n".join(tables)).replace("algo -->\n", "algo -->\n(no run yet)\n")
    assert page.read_text() == expected
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["first.json", "second.json"]
    assert in_process("results", "--write", page).code == 0
    assert page.read_text() == expected, "made again from what is kept"
    before = (tmp_path / "found" / "first.json").read_text()
    shutil.rmtree(tmp_path / "found")
    assert in_process("results", runs[0], "--write", page).code == 0
    assert page.read_text().count("`doubleadd`") == 1 and (tmp_path / "found" / "first.json").read_text() == before


def test_sweep(tmp_path: Path) -> None:
    """A row per cell, model and measure, and of the best; each figure as the sweep's own table has it."""
    sizes = [f"--set={size}" for size in ("batch=4", "chunk=2", "fnn_depth=1", "evaluate_every=4")]
    options = ["--grid", "fnn_width=2,3", "--seeds", "0-1", "--steps", "8", "--best", "3", "--model", "FNN"]
    done = in_process("sweep", "doubleadd", *options, *sizes, "--out", tmp_path / "sweep")
    assert done.code == 0, done.text
    with (tmp_path / "sweep" / "cells.csv").open() as file:
        every = list(csv.DictReader(file))
    rows = results.record(tmp_path / "sweep")["rows"]
    lines = [line for line in every if line["measure"] != "loss"]  # the files have it, the page the usual measures
    assert len(rows) == len(lines) == 6 and len(every) == 9
    for row, line in zip(rows, lines, strict=True):
        assert (row["mean"], row["trials"]) == (float(line["mean"]), int(line["trials"])) and row["steps"] == 8
        where = f"fnn_width={line['fnn_width']}" if line["kind"] == "cell" else line["kind"]
        assert row["name"] == f"FNN, {line['measure']}, {where}"
    assert rows[0]["setting"].startswith("not the paper's setting: fnn_width 2 (200)")
    assert rows[-1]["setting"] == "over the grid fnn_width=2,3"
    assert rows[-1]["minutes"] == pytest.approx(rows[0]["minutes"] + rows[2]["minutes"]), "of all that were searched"
    page = tmp_path / "found.md"
    page.write_text('<!-- results study=algo,doubleadd rows="ood.*best" -->\n<!-- end of results -->\n')
    assert in_process("results", tmp_path / "sweep", "--write", page).code == 0
    assert page.read_text().count("`doubleadd`") == 1 and "best 3 by accuracy" in page.read_text()


GRID = "<!-- results study=doubleadd cells=ood_accuracy across=width at=1.0 -->\n<!-- end of results -->\n"


def trained(folder: Path, ood: dict[tuple[int, int], list[float]], seeds: Sequence[int] = (0, 1)) -> Path:
    """A finished sweep over (width, depth), with trials that were never trained."""
    study = registry.get("doubleadd")
    settings = {"layers": [1], "alternate_split": [False], "width": [8, 9], "depth": [1, 2]}
    plan = Plan("doubleadd", ["SMFR_softmax"], [*seeds], vars(changed(study.defaults, {"steps": 100})))
    sweep = sweeps.Sweep(plan, settings)
    for cell in sweeps.SweepFolder.create(folder, sweep) and sweep.cells(folder / "cells"):
        cell.folder.lay_out(cell.plan)
        values = ood[cell.values["width"], cell.values["depth"]]
        trials = [
            Record("SMFR_softmax", seed, 100, 60.0, 5, {"ood_accuracy": v, "gate_0": 0.5})
            for seed, v in zip(seeds, values, strict=True)
        ]
        report.write_result(cell.folder, cell.plan, trials)
    return folder


def test_cells_as_a_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FEW_CELLS", 3)
    folder = trained(tmp_path / "sweep", {(8, 1): [1, 0.5], (8, 2): [0, 0], (9, 1): [1, 1], (9, 2): [0.25, 0.5]})
    rows = results.record(folder)["rows"]
    assert [(row["name"], row["paper"], row["mean"], row["trials"]) for row in rows] == [
        ("SMFR, 4 of the grid's 240 cells, OOD accuracy", "-", 4.25 / 8, 8),
        ("SMFR, 4 of the grid's 240 cells, share at 1.0", "-", 3 / 8, 8),
        ("SMFR_softmax, depth 1, width >= 8, share at 1.0", "0.75 (9 of 12)", 3 / 4, 4),
        ("plain split, softmax, depth 1, width 9, 1 layers", "1.0", 1.0, 2),
        ("plain split, softmax, depth 1, width 8, 1 layers", "1.0", 0.75, 2),
    ], "no row a cell: they are too many"
    setting = "the paper's setting; not printed there, but other than by default: steps 100 (20000)"
    assert rows[0]["setting"].startswith(f"{setting}; over the grid layers=1 alternate_split=False width=8,9 depth=1,2")
    page = tmp_path / "found.md"
    page.write_text(GRID)
    done = in_process("results", folder, "--write", page)
    assert done.code == 0 and "no table" not in done.out, done.text
    assert page.read_text().splitlines()[1:-1] == [
        "`doubleadd` SMFR_softmax, ood_accuracy: mean over the trials of a cell, in brackets the trials at 1.0. "
        f"Seeds 0-1, commit unknown, 100 steps, 8 minutes in all; {setting}.",
        "",
        "| layers | alternate_split | depth | width 8 | width 9 |",
        "| --- | --- | --- | --- | --- |",
        "| 1 | False | 1 | 0.750 (1) | 1.000 (2) |",
        "| 1 | False | 2 | 0.000 (0) | 0.375 (0) |",
    ]
    again = shutil.copytree(folder, tmp_path / "sweep2")
    assert in_process("results", again, "--write", page).code == 0
    assert page.read_text().count("width 9 |\n") == page.read_text().count("\n\n") - 1 == 2, (
        "each below a line of its own"
    )
    shown_only = in_process("results", folder)
    assert shown_only.code == 0 and "sweep: 4 cells, as a grid: <!-- results study=doubleadd" in shown_only.out
    for wrong, word in (("ood_accuracy", "x"), ("width", "y")):
        page.write_text(GRID.replace(wrong, word))
        refused(in_process("results", folder, "--write", page), f"={word}", wrong)


def test_sweeps_of_other_seeds_are_one_grid(tmp_path: Path) -> None:
    page = tmp_path / "found.md"
    page.write_text(GRID)
    first = trained(tmp_path / "sweep", {(8, 1): [1, 0.5], (8, 2): [0, 0], (9, 1): [1, 1], (9, 2): [0.25, 0.5]})
    third = trained(tmp_path / "third", {(8, 1): [0], (8, 2): [0.75], (9, 1): [1], (9, 2): [0]}, seeds=[2])
    done = in_process("results", first, third, "--write", page)
    assert done.code == 0 and "no table" not in done.out, done.text
    text = page.read_text()
    assert text.count("Seeds") == 1 and "Seeds 0-2, commit unknown, 100 steps, 12 minutes in all" in text
    assert "| 1 | False | 1 | 0.500 (1) | 1.000 (3) |\n| 1 | False | 2 | 0.250 (0) | 0.250 (0) |" in text


def test_choice_of_runs_and_records_without_a_place(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "found.md"
    page.write_text('<!-- results study=doubleadd runs="sec*" -->\n<!-- end of results -->\n')
    done = in_process("results", *runs, "--write", page)
    assert done.code == 0 and "first: no table" in done.out and "second: no table" not in done.out, done.text
    assert "0.250 ± 0.125" in page.read_text()


@pytest.mark.parametrize(
    ("text", "match"),
    [("<!-- results study=algo -->\n", "end of results"),
     ("<!-- results algo -->\n<!-- end of results -->", "study=NAME"),
     ("<!-- results study=algo -->\n<!-- results study=algo -->\n<!-- end of results -->", "end of results"),
     ("<!-- results study=algo row=x -->\n<!-- end of results -->", "study=NAME"),
     ('<!-- results study=algo rows="(" -->\n<!-- end of results -->', "rows:"),
     ("<!-- results study=algo cells=accuracy -->\n<!-- end of results -->", "across=SETTING"),
     ("<!-- results study=algo cells=accuracy across=width rows=x -->\n<!-- end of results -->", "across=SETTING"),
     ("<!-- results study=algo cells=accuracy across=width at=x -->\n<!-- end of results -->", "at:")],
)  # fmt: skip
def test_marks_that_are_wrong(runs: list[Path], tmp_path: Path, text: str, match: str) -> None:
    page = tmp_path / "found.md"
    page.write_text(text)
    refused(in_process("results", runs[0], "--write", page), match)
    assert page.read_text() == text and not (tmp_path / "found").exists(), "nothing is half done"


def test_results_refuses(runs: list[Path], tmp_path: Path) -> None:
    refused(in_process("results"), "run folders")
    refused(in_process("results", runs[0], "--write", tmp_path / "no.md"), "no such file")
    page = tmp_path / "found.md"
    page.write_text(PAGE)
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "x.json").write_text("{}")
    refused(in_process("results", "--write", page), "x.json", "not the record of a run")


def test_paper_setting_or_not() -> None:
    study = registry.get("resmix-pentomino")
    model = study.default_models[0]
    assert study.setting(changed(study.defaults, {"paper": True}), model) == "the paper's setting"
    other = study.setting(changed(study.defaults, {"epochs": 3}), model)
    assert other.startswith("not the paper's setting: epochs 3 (")
    another = study.setting(changed(study.defaults, {"paper": True, "momentum": 0.5, "chunk": 7}), model)
    assert another == "not the paper's setting: momentum 0.5 (0.9)", "also what the preset leaves open"
    settings = {"SMFR": "a", "SMFR_bias": "b", "FNN": "c"}
    assert results._setting("threshold 0.7, SMFR_bias, HIGH", settings) == "b"
    assert results._setting("SMFR, OOD", settings) == "a"
    assert results._setting("all of them", settings) == "a; b; c"


def test_the_page_of_this_project_is_made_from_its_records() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "results.md"
    text, homeless = results.filled(page.read_text(), results.read_records(page))
    assert text == page.read_text(), "run: fastmod results --write docs/results.md"
    assert not homeless


def test_a_commit_that_nobody_has_is_marked(runs: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    config = json.loads((run / "config.json").read_text())
    here = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    for commit, shown_as in (
        (here.stdout.strip(), f"commit {here.stdout[:12]};"),
        ("0123456789abcdef" * 2 + "01234567 with changes", "commit 0123456789ab + (not in the repository);"),
    ):
        config["versions"]["commit"] = commit
        (run / "config.json").write_text(json.dumps(config))
        assert shown_as in results.tables_of(results.record(run))[0]


def test_a_sweep_writes_the_usual_measures(tmp_path: Path) -> None:
    folder = trained(tmp_path / "sweep", {(8, 1): [1, 0.5], (8, 2): [0, 0], (9, 1): [1, 1], (9, 2): [0.25, 0.5]})
    names = [row["name"] for row in results.record(folder)["rows"]]
    assert any("ood_accuracy, layers=1" in name for name in names) and not any("gate_0" in name for name in names)
    assert tables.usual(["loss", "architecture.width", "gate_0", "accuracy"]) == ["accuracy"]


@pytest.mark.parametrize(("study", "model"), [("mask-cifar", "CNN"), ("mask-stability", "CNN")])
def test_some_of_the_images_are_not_the_papers_setting(study: str, model: str) -> None:
    found = registry.get(study)
    config = changed(found.defaults, {"paper": True})
    few, all_of_them = ({"images": f"{n} training and 10000 test images"} for n in (10_000, 50_000))
    assert found.setting_of(config, model, [all_of_them]) == "the paper's setting"
    lacks = "10000 training and 10000 test images (50000 and 10000)"
    assert found.setting_of(config, model, [few, few]) == f"not the paper's setting: {lacks}"
    other = found.setting_of(found.defaults, model, [few])
    assert other.startswith("not the paper's setting: steps") and other.endswith(f", {lacks}")
    svhn = registry.get("resmix-cifar")
    config = changed(svhn.defaults, {"paper": True, "dataset": "svhn"})
    assert svhn.setting_of(config, "ResNet50", [few]).startswith("not the paper's setting: 10000 training")
    tasks = registry.get("comp-multitask")
    paper = changed(tasks.defaults, {"paper": True})
    assert tasks.setting_of(paper, "mixture", [{}]) == "not the paper's setting: not the paper's data"


def test_a_finished_run_says_what_it_lacked(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(registry.get("doubleadd")), "shortfall", lambda *_: "half of the digits")
    assert all("half of the digits" in row["setting"] for row in results.record(runs[0])["rows"])


def test_seeds() -> None:
    assert [results._seeds(s, len(s)) for s in ([4], [0, 1, 2], [0, 2, 3])] == ["4", "0-2", "0, 2, 3"]
    with pytest.raises(StudyError, match="expected different runs"):
        compare.read([Path(), Path()])
