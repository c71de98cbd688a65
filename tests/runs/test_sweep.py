"""``fastmod sweep``: grids, the tables of cells and of the best trials, files, and how it goes on after a kill."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

from fastmod.runs import command, tables
from fastmod.runs import sweep as sweeps
from fastmod.runs.config import StudyError, changed, chosen
from fastmod.runs.folder import Plan, RunFolder
from fastmod.runs.study import Record
from fastmod.runs.sweep import Cell, grid_of
from fastmod.studies import registry
from fastmod.studies.blocks.doubleadd import DoubleAdd
from tests.helpers.study_commands import Finished, fastmod, in_process, refused
from tests.helpers.study_hooks import Hook, forked_jobs, kill, ticks
from tests.helpers.study_runs import digits

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks and signals")
SIZES = ("batch=4", "chunk=2", "hidden=4", "layers=1", "fnn_width=6", "fnn_depth=1", "evaluate_every=4")
SMALL = [
    "doubleadd", "--grid", "width=2..3", "--grid", "depth=0,1", "--seeds", "0-2", "--model", "SMFR_softmax",
    "--steps", "8", "--best", "5", *(f"--set={size}" for size in SIZES),
]  # fmt: skip


def sweep(*args: object, hooks: tuple[Hook, ...] = ()) -> Finished:
    return fastmod("sweep", *args, hooks=hooks)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- grids


def test_grids() -> None:
    study = registry.get("doubleadd")
    assert grid_of(["width=2..4", "lr=1e-3,3e-4"], study) == {"width": ["2", "3", "4"], "lr": ["1e-3", "3e-4"]}
    assert grid_of(["width=-1..1,7"], study) == {"width": ["-1", "0", "1", "7"]}
    assert grid_of(["thresholds=0.5,1; 0.7"], study) == {"thresholds": ["0.5,1", "0.7"]}, "values with commas"


def test_grids_of_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DoubleAdd, "grids", {"paper": {"width": range(5, 8), "depth": (1, 2)}})
    study = registry.get("doubleadd")
    assert grid_of(["paper"], study) == {"width": [5, 6, 7], "depth": [1, 2]}
    assert grid_of(["paper", "width=9"], study) == {"width": ["9"], "depth": [1, 2]}, "the last word counts"
    with pytest.raises(StudyError, match="a grid of doubleadd: paper"):
        grid_of(["papers"], study)


@pytest.mark.parametrize(
    ("words", "match"),
    [([], "at least one"), (["width"], "key=values"), (["width=1,,2"], "width=1,,2"), (["width="], "width="),
     (["width=3..1"], "FIRST..LAST"), (["width=0..5000"], "1000"), (["width=2,2"], "distinct")],
)  # fmt: skip
def test_bad_grids(words: list[str], match: str) -> None:
    with pytest.raises(StudyError, match=match):
        grid_of(words, registry.get("doubleadd"))


@pytest.mark.parametrize(
    ("args", "words"),
    [(["doubleadd"], ("--grid", "at least one")), (["nonsense", "--grid", "width=1"], ("unknown study",)),
     (["doubleadd", "--grid", "breadth=1,2"], ("breadth=1", "unknown key")),
     (["doubleadd", "--grid", "width=1..3", "--set", "depth=-1"], ("depth",)),
     (["doubleadd", "--grid", "width=1,x"], ("width=x", "expected int")),
     (["doubleadd", "--grid", "width=1..40", "--grid", "depth=1..40"], ("at most 1000 cells", "1600")),
     ([], ("name of a study",)), (["--resume", "nowhere"], ("nowhere", "sweep.json")),
     (["doubleadd", "--grid", "width=1", "--on", "mars"], ("--on mars", "here or ray")),
     (["doubleadd", "--grid", "width=1", "--address", "auto", "--on", "here"], ("--address auto", "--on ray")),
     (["--resume", "nowhere", "--seeds", "1"], ("as begun",))],
)  # fmt: skip
def test_refused_before_anything_is_there(tmp_path: Path, args: list[str], words: tuple[str, ...]) -> None:
    where = [] if "--resume" in args else ["--out", tmp_path / "sweep"]
    refused(in_process("sweep", *args, *where), *words)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("study", ["addmul", "mask-addmul", "mask-scan", "mask-cifar", "resmix-cifar", "comp-adapt"])
def test_best_of_no_measure_is_refused_before_training(
    tmp_path: Path, study: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(registry.get(study)), "prepare", lambda *_: None)
    args = ["sweep", study, "--grid", "lr=0.1,0.2", "--best", "2", "--out", tmp_path / "sweep"]
    refused(in_process(*args), f"--best: none of {study}'s measures", "--by MEASURE")
    assert not (tmp_path / "sweep").exists()


#: Study -> a model and settings of a small trial.
CRITERIA: dict[str, tuple[str, dict[str, Any]]] = {
    "algo": ("FNN", {"batch": 4, "chunk": 2, "fnn_width": 4}),
    "doubleadd": ("FNN", {"batch": 4, "chunk": 2, "fnn_width": 4}),
    "bpmnist": ("FNN", {"batch": 4, "chunk": 2, "fnn_width": 4, "verify": False}),
    "resmix-pentomino": ("ResNet26", {"images": 4, "batch": 4, "valid_images": 4, "test_images": 4, "epochs": 1}),
    "resmix-parity": ("ResNet26", {"images": 4, "batch": 4, "valid_images": 4, "test_images": 4, "epochs": 1,
                                   "verify": False}),
    "comp-single": ("cyclic", {"dataset": "fashion", "colours": 1, "side": 28, "batch": 4, "test_images": 4}),
    "comp-multitask": ("trunk", {"datasets": ("mnist",), "domains": ("original",), "batch": 4, "test_images": 4,
                                 "layers": 2, "verify": False}),
}  # fmt: skip


def test_every_study_with_a_criterion_is_among_these() -> None:
    assert {name for name in registry.names() if registry.get(name).criterion} == CRITERIA.keys()


@pytest.mark.parametrize("study", CRITERIA)
def test_the_criterion_is_among_the_results(study: str, tmp_path: Path) -> None:
    model, settings = CRITERIA[study]
    found = registry.get(study)
    if study in ("bpmnist", "resmix-parity", "comp-single", "comp-multitask"):
        for name in ("mnist", "fashion_mnist"):
            digits(tmp_path / name)
        settings = {**settings, "data": str(tmp_path / ("" if study.startswith("comp") else "mnist"))}
    trial = found.trial(changed(found.defaults, settings), model, 0, torch.device("cpu"))
    result = trial.result(trial.metrics())
    assert found.criterion in sweeps.numbers(result)


@pytest.mark.parametrize(
    ("study", "model", "settings", "idle", "read"),
    [("doubleadd", "SMFR_softmax", {"depth": 0}, {"width": 3}, {"layers": 2}),
     ("doubleadd", "SMFR_softmax", {}, {"fnn_width": 3}, {"width": 3}),
     ("doubleadd", "SMFR_softmax", {"penalty": "off"}, {"penalty_threshold": 3}, {"penalty": "sum"}),
     ("doubleadd", "FNN", {}, {"width": 3}, {"fnn_width": 3}),
     ("algo", "FNN", {"grid": True}, {"fnn_width": 3}, {"lr": 0.5}),
     ("bpmnist", "SMFR_large", {}, {"hidden": 3}, {"fnn_width": 3}),
     ("mask-addmul", "LSTM", {}, {"hidden": "3"}, {"units": 3}),
     ("mask-doubleadd", "LSTM", {}, {"hidden": "3"}, {"beta_lstm": 0.5}),
     ("mask-scan", "LSTM", {}, {"beta_transformer": 0.5}, {"units": 3}),
     ("mask-beta", "FNN", {}, {"beta": 0.5}, {"betas": "0.5"}),
     ("mask-cifar", "CNN", {}, {"depth": 8}, {"beta": 0.5})],
)  # fmt: skip
def test_settings_that_a_model_does_not_read(
    study: str, model: str, settings: dict[str, Any], idle: dict[str, Any], read: dict[str, Any]
) -> None:
    found = registry.get(study)
    config = changed(found.defaults, settings)
    same, other = (found.effective(changed(config, more), model) for more in (idle, read))
    assert same == found.effective(config, model) != other
    assert found.effective(chosen(config, read), model) == other, "whether it was typed or not"
    assert found.effective(chosen(config, idle), model) == same or settings.get("grid"), "drawn, but typed"


# ---- a sweep and its files


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("sweep") / "sweep"
    finished = sweep(*SMALL, "--out", folder, hooks=(ticks(),))
    assert finished.code == 0 and not finished.err, finished.text
    return folder, finished.out


def test_cells_are_runs(done: tuple[Path, str]) -> None:
    folder, _ = done
    cells = sorted((folder / "cells").iterdir())
    assert [cell.name for cell in cells] == [f"{i:03d}-width={2 + i // 2}_depth={i % 2}" for i in range(4)]
    for i, cell in enumerate(cells):
        plan = RunFolder(cell).plan()
        assert (plan.settings["width"], plan.settings["depth"], plan.seeds) == (2 + i // 2, i % 2, [0, 1, 2])
        result = json.loads((cell / "result.json").read_text())
        assert [trial["trial"] for trial in result["trials"]] == [f"SMFR_softmax-s{seed}" for seed in range(3)]


def test_a_cell_trains_as_the_same_run_alone(done: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = done
    sizes = [f"--set={size}" for size in (*SIZES, "width=3", "depth=1")]
    options = ["doubleadd", "--seeds", "0-2", "--model", "SMFR_softmax", "--steps", "8"]
    assert fastmod("study", *options, *sizes, "--out", tmp_path / "run", hooks=(ticks(),)).code == 0
    assert RunFolder(tmp_path / "run").metrics() == RunFolder(folder / "cells" / "003-width=3_depth=1").metrics()


def test_tables(done: tuple[Path, str]) -> None:
    """Every figure of cells.csv once more, from the result.json of the cells."""
    folder, out = done
    trials = []
    for cell in sorted((folder / "cells").iterdir()):
        settings = RunFolder(cell).plan().settings
        for trial in json.loads((cell / "result.json").read_text())["trials"]:
            trials.append({"width": settings["width"], "depth": settings["depth"], **trial, **trial["result"]})
    rows = read(folder / "trials.csv")
    assert len(rows) == len(trials) == 12
    for row, trial in zip(rows, trials, strict=True):
        for key in ("width", "depth", "seed", "steps", "parameters", "loss", "accuracy", "ood_accuracy"):
            assert float(row[key]) == trial[key], key
    lines = {(x["kind"], x["width"], x["depth"], x["measure"]): x for x in read(folder / "cells.csv")}
    assert (
        len([x for x in lines if not x[3].startswith("gate_")]) == (4 + 1) * 3
    )  # cells and the best, three measures each
    assert ("cell", "2", "0", "gate_0") in lines and ("cell", "2", "0", "gate_1") not in lines  # of each layer there is
    for measure in ("accuracy", "ood_accuracy", "loss"):
        for width, depth in ((2, 0), (2, 1), (3, 0), (3, 1)):
            some = [t[measure] for t in trials if (t["width"], t["depth"]) == (width, depth)]
            line = lines["cell", str(width), str(depth), measure]
            assert float(line["mean"]) == pytest.approx(sum(some) / 3) and line["trials"] == "3"
            assert float(line["standard_error"]) == pytest.approx(statistics.stdev(some) / math.sqrt(3))
            assert (float(line["lowest"]), float(line["highest"])) == (min(some), max(some))
        once = [trial for trial in trials if (trial["width"], trial["depth"]) != (3, 0)]  # no width without a depth
        best = sorted(once, key=lambda trial: -trial["accuracy"])[:5]
        line = lines["best 5 by accuracy", "", "", measure]
        assert float(line["mean"]) == pytest.approx(sum(t[measure] for t in best) / 5) and line["trials"] == "5"
    assert "best 5 by" in out and str(folder / "cells.csv") in out and (folder / "figure.png").exists()


def test_parquet_is_the_csv(done: tuple[Path, str]) -> None:
    folder, out = done
    assert "no parquet" not in out
    for stem in ("trials", "cells"):
        as_text = [
            {key: "" if value is None else str(value) for key, value in line.items()}
            for line in parquet.read_table(folder / f"{stem}.parquet").to_pylist()
        ]
        assert as_text == read(folder / f"{stem}.csv")


def test_words_among_numbers_in_parquet(tmp_path: Path) -> None:
    """As of a sweep over beta=auto,1e-4."""
    lines = [{"beta": "auto", "x": 1}, {"beta": 1e-4, "x": 2.5}, {"beta": None, "x": None}]
    tables.write_parquet(tmp_path / "x.parquet", lines)
    found = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert [line["beta"] for line in found] == ["auto", "0.0001", None] and [line["x"] for line in found] == [
        1,
        2.5,
        None,
    ]


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    with pytest.raises(StudyError, match=r"fastmod\[parquet\]"):
        tables.write_parquet(tmp_path / "x.parquet", [{"a": 1}])
    done = in_process("sweep", *SMALL, "--grid", "depth=0", "--grid", "width=2", "--out", tmp_path / "sweep")
    assert done.code == 0 and 'pip install "fastmod[parquet]"' in done.out, done.text
    assert not list(tmp_path.rglob("*.parquet")) and (tmp_path / "sweep" / "cells.csv").exists()


def test_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    for words in (["sweep", *SMALL], ["study", "doubleadd"]):
        done = in_process(*words, "--on", "ray", "--out", tmp_path / "run")
        refused(done, "--on ray", 'pip install "fastmod[ray]"')
    assert not (tmp_path / "run").exists()


def test_not_by_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(in_process("sweep", *SMALL, "--out", tmp_path / "sweep"), "torchrun", "fastmod study")


# ---- going on


def same(folder: Path, other: Path) -> None:
    def numbers(path: Path) -> list[dict[str, Any]]:
        return [{key: value for key, value in line.items() if key != "seconds"} for line in read(path / "trials.csv")]

    assert numbers(folder) == numbers(other)
    assert (folder / "cells.csv").read_text() == (other / "cells.csv").read_text()


@pytest.mark.parametrize("label", ["after sweep.json", "before config.json", "told .*width=2 depth=1.*", "half line"])
def test_killed_and_resumed(done: tuple[Path, str], tmp_path: Path, label: str) -> None:
    folder = tmp_path / "sweep"
    nth = 2 if label in ("before config.json", "half line") else 1
    assert sweep(*SMALL, "--out", folder, hooks=(ticks(), kill(label, nth))).killed
    again = sweep("--resume", folder, hooks=(ticks(),))
    assert again.code == 0, again.text
    same(folder, done[0])


def test_jobs(done: tuple[Path, str], tmp_path: Path) -> None:
    finished = sweep(*SMALL, "--jobs", "2", "--out", tmp_path / "sweep", hooks=(ticks(), forked_jobs()))
    assert finished.code == 0, finished.text
    same(tmp_path / "sweep", done[0])


def test_another_choice_of_the_best(done: tuple[Path, str], tmp_path: Path) -> None:
    finished = sweep(*SMALL, "--by", "nonsense", "--out", tmp_path / "sweep")
    refused(finished, "--by nonsense", "ood_accuracy", "--resume")
    again = sweep("--resume", tmp_path / "sweep", "--best", "2", "--by", "loss", "--measure", "loss")
    assert again.code == 0 and "best 2 by" in again.out, again.text
    best = [line for line in read(tmp_path / "sweep" / "cells.csv") if line["kind"] == "best 2 by loss"]
    trials = [
        trial for trial in read(tmp_path / "sweep" / "trials.csv") if (trial["width"], trial["depth"]) != ("3", "0")
    ]
    losses = sorted(float(trial["loss"]) for trial in trials)
    (line,) = [line for line in best if line["measure"] == "loss"]
    assert float(line["mean"]) == pytest.approx(sum(losses[:2]) / 2), "of a loss the lowest are the best"


def test_best_are_picked_per_model_and_nested_numbers_count() -> None:
    plan = Plan("doubleadd", ["A", "B"], [0, 1], {})
    cells = [Cell(f"x={x}", {"x": x}, plan, RunFolder(Path())) for x in (1, 2)]
    scores = {("A", 1): (0.1, 0.9), ("A", 2): (0.8, 0.2), ("B", 1): (0.3, 0.4), ("B", 2): (0.6, 0.5)}
    found = [
        (cell, Record(model, seed, 1, 1.0, 1, {"valid": scores[model, x][seed], "of": {"test": x}}))
        for cell, x in zip(cells, (1, 2), strict=True) for model in "AB" for seed in (0, 1)
    ]  # fmt: skip
    lines = {(line["model"], line["measure"]): line for line in tables.best_lines(found, 2, "valid")}
    assert lines["A", "valid"]["mean"] == pytest.approx(0.85) and lines["A", "of.test"]["mean"] == 1.5
    assert lines["B", "valid"]["mean"] == pytest.approx(0.55) and lines["B", "of.test"]["mean"] == 2
    assert sweeps.numbers({"a": 1, "b": True, "c": [1], "d": {"e": None, "f": 2.5}}) == {"a": 1.0, "d.f": 2.5}
