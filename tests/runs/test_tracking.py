"""Trackers: what each is told, that resumed trials keep their line, and that none of them can end a run.

TensorBoard's events are read back (also in test_command.py). The others are stood in for by objects with those calls of
their documented interfaces that are used; ``test_real`` uses the packages themselves, without a network.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sqlite3
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastmod.runs import tracking
from fastmod.runs.config import StudyError
from fastmod.runs.folder import Plan, RunFolder
from fastmod.runs.ledger import FolderLedger
from tests.helpers.study_commands import in_process, refused

SETTINGS = {"steps": 8, "lr": 0.1}
METRICS = {"loss": 0.5, "accuracy_a+b": 0.25}
SMALL = ["doubleadd", "--model", "FNN", "--seeds", "3", "--steps", "8", "--set=evaluate_every=4", "--set=chunk=2"]


def plan(*track: str) -> Plan:
    return Plan("doubleadd", ["FNN"], [3], SETTINGS, track=list(track))


def about(folder: Path, *track: str, step: int = 0) -> tracking.About:
    return tracking.About(folder, plan(*track), "FNN", 3, step)


class Calls:
    """Every call of it and of what it returns is noted; ``answers``: what a call gives instead."""

    def __init__(self, noted: list[Any], name: str = "", answers: dict[str, Any] | None = None) -> None:
        self._noted, self._name, self._answers = noted, name, answers or {}

    def __getattr__(self, name: str) -> Any:
        return Calls(self._noted, f"{self._name}.{name}".strip("."), self._answers)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._noted.append((self._name, args, options))
        return self._answers.get(self._name, Calls(self._noted, self._name, self._answers))


def install(monkeypatch: pytest.MonkeyPatch, name: str, module: Any) -> None:
    monkeypatch.setitem(sys.modules, name, module)
    known = tracking.find_spec
    monkeypatch.setattr(tracking, "find_spec", lambda wanted: object() if wanted == name else known(wanted))


def session(folder: Path, *track: str, step: int) -> None:
    """A ledger as the engine uses it, for one evaluation."""
    ledger = FolderLedger(RunFolder(folder), plan(*track), "FNN", 3)
    ledger.add(step, METRICS)
    ledger.save({"step": step})
    ledger.close()


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    install(monkeypatch, "wandb", Calls(noted))
    RunFolder(tmp_path).lay_out(plan("wandb"))
    session(tmp_path, "wandb", step=4)
    session(tmp_path, "wandb", step=8)
    (_, _, first), log, finish, (_, _, again), *_ = noted
    assert [name for name, _, _ in noted] == ["init", "init.log", "init.finish"] * 2
    assert first["project"] == "fastmod-doubleadd" and first["name"] == "FNN-s3" and first["group"] == tmp_path.name
    assert first["config"] == {"model": "FNN", "seed": 3, **SETTINGS} and first["resume"] == "allow"
    assert first["id"] == again["id"] and first["reinit"] == "create_new"
    assert log[1:] == ((METRICS,), {"step": 4})


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    answers = {
        "set_experiment": SimpleNamespace(experiment_id="7"),
        "MlflowClient.create_run": SimpleNamespace(info=SimpleNamespace(run_id="abc")),
    }
    entities = SimpleNamespace(Metric=lambda *args: ("metric", *args), Param=lambda *args: ("param", *args))
    install(monkeypatch, "mlflow", Calls(noted, "", answers))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    RunFolder(tmp_path).lay_out(plan("mlflow"))
    session(tmp_path, "mlflow", step=4)
    session(tmp_path, "mlflow", step=8)
    by_name = {name: (args, options) for name, args, options in noted}
    assert [name.rpartition(".")[2] for name, _, _ in noted] == [
        "MlflowClient", "set_experiment", "create_run", "log_batch", "log_batch", "set_terminated",
        "MlflowClient", "update_run", "log_batch", "set_terminated",
    ]  # fmt: skip
    assert by_name["set_experiment"][0] == ("fastmod-doubleadd",)
    assert by_name["MlflowClient.create_run"] == (("7",), {"run_name": f"{tmp_path.name} FNN-s3"})
    assert by_name["MlflowClient.update_run"] == (("abc",), {"status": "RUNNING"})
    (number,), options = by_name["MlflowClient.log_batch"]
    assert number == "abc"
    told = [(name, value, step) for _, name, value, _, step in options["metrics"]]
    assert told == [("loss", 0.5, 8), ("accuracy_a_b", 0.25, 8)], "a name that MLflow takes"


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    install(monkeypatch, "trackio", Calls(noted))
    RunFolder(tmp_path).lay_out(plan("trackio"))
    session(tmp_path, "trackio", step=4)
    session(tmp_path, "trackio", step=8)
    assert [name for name, _, _ in noted] == ["init", "init.log", "init.finish"] * 2
    first, again = noted[0][2], noted[3][2]
    assert first["name"] == again["name"] and (first["resume"], again["resume"]) == ("never", "must")
    assert noted[4][1:] == ((METRICS,), {"step": 8})


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    sinks = tracking.Sinks(about(tmp_path, "tensorboard"))
    sinks.add(METRICS, 4)
    sinks.add({"loss": 0.25}, 8)
    sinks.close()
    events = EventAccumulator(str(tmp_path / "events" / "FNN-s3"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(4, 0.5), (8, 0.25)]


@pytest.mark.parametrize("place", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise ConnectionError("the server is away")

    run = SimpleNamespace(log=lambda *args, **options: None, finish=lambda: None)
    setattr(run, place, fail)
    install(monkeypatch, "wandb", SimpleNamespace(init=fail if place == "init" else lambda **options: run))

    def told() -> tracking.Sinks:
        sinks = tracking.Sinks(about(tmp_path, "wandb"))
        sinks.add(METRICS, 4)
        sinks.close()
        return sinks

    with pytest.warns(RuntimeWarning, match="FNN-s3: wandb is not told any more: the server is away"):
        sinks = told()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinks.flush()


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    for name, extra in (("wandb", "wandb"), ("mlflow", "mlflow"), ("trackio", "trackio"), ("tensorboard", "study")):
        done = in_process("study", *SMALL, "--track", name, "--out", tmp_path / "run")
        refused(done, f"--track {name}", f'pip install "fastmod[{extra}]"')
    refused(in_process("study", *SMALL, "--track", "paper", "--out", tmp_path / "run"), "--track paper", "mlflow")
    assert not (tmp_path / "run").exists()
    with pytest.raises(StudyError, match="wandb is missing"):
        tracking.check(["wandb"])


def test_plan_keeps_the_trackers(tmp_path: Path) -> None:
    tiny = ["--set=batch=4", "--set=fnn_width=6", "--set=fnn_depth=1"]
    options = ["--track", "tensorboard", "--track", "tensorboard"]
    done = in_process("study", *SMALL, *tiny, *options, "--out", tmp_path / "run")
    assert done.code == 0 and RunFolder(tmp_path / "run").plan().track == ["tensorboard"], done.text
    assert list((tmp_path / "run" / "events").rglob("*tfevents*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The package itself, told twice with a resume between; what can be read back without a network is."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    RunFolder(folder).lay_out(plan(name))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not told any more.*")
        session(folder, name, step=4)
        session(folder, name, step=8)
    if name == "mlflow":
        client = importlib.import_module("mlflow").MlflowClient()
        number = (folder / "tracking" / "FNN-s3.mlflow").read_text()
        assert [(m.step, m.value) for m in client.get_metric_history(number, "loss")] == [(4, 0.5), (8, 0.5)]
        found = client.get_run(number)
        assert found.data.params["lr"] == "0.1" and found.info.status == "FINISHED"
    elif name == "wandb":
        assert list(folder.rglob("*.wandb")), "files of an offline run"
    else:
        with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "fastmod-doubleadd.db")) as base:
            told = base.execute("select run_id, step, metrics from metrics order by step").fetchall()
        assert [(step, json.loads(metrics)["loss"]) for _, step, metrics in told] == [(4, 0.5), (8, 0.5)]
        assert len({number for number, _, _ in told}) == 1, "one run, resumed"
