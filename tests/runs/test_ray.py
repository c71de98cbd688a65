"""``--on ray``: trials on a real cluster of two nodes, one of which is killed in the middle of its trial."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from fastmod.runs import engine, on_ray, report
from fastmod.runs.config import StudyError, changed
from fastmod.runs.folder import Plan, RunFolder
from fastmod.runs.signals import Stop, stop_on_signals
from fastmod.studies import registry
from tests.helpers.study_runs import outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a local cluster of several nodes"),
]
SIZES = {"batch": 4, "chunk": 2, "fnn_width": 6, "fnn_depth": 1, "evaluate_every": 20, "checkpoint_seconds": 0.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # On busy cores Ray's 15 would starve its workers beside the other tests.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its own spelling
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def plan(on: str, **more: Any) -> Plan:
    study = registry.get("doubleadd")
    config = changed(study.defaults, {**SIZES, **more})
    return Plan("doubleadd", ["FNN"], [0, 1], asdict(config), threads=1, on=on)


def local(path: Path, wanted: Plan) -> Path:
    """The same run in this process."""
    here = replace(wanted, on="here")
    folder = RunFolder.create(path, here)
    report.finish(folder, here, engine.run(folder, here, lambda now: None))
    return path


def placed(folder: RunFolder) -> list[dict[str, Any]]:
    file = folder.path / "nodes.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_node_that_dies_costs_what_was_done_since_the_checkpoint(cluster: Any, tmp_path: Path) -> None:
    other = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    wanted = plan("ray", steps=400)
    folder = RunFolder.create(tmp_path / "run", wanted)
    lost: dict[str, Any] = {}

    def kill_the_other_node(now: engine.Progress) -> None:
        mine = [line for line in placed(folder) if line["trial"] == now.key and line["node"] == other.node_id]
        if not lost and mine and folder.checkpoint_file(now.key).exists() and now.step >= 40:
            lost.update(trial=now.key, process=mine[0]["process"])
            cluster.remove_node(other, allow_graceful=False)

    records = engine.run(folder, wanted, kill_the_other_node)
    report.finish(folder, wanted, records)
    assert lost, "no trial was on the second node"
    places = [line for line in placed(folder) if line["trial"] == lost["trial"]]
    assert len(places) == 2 and places[0]["node"] == other.node_id != places[1]["node"]
    assert places[0]["step"] == 0 and 0 < places[1]["step"] < 400, "it went on from a checkpoint"
    assert len(placed(folder)) == 3, "the other trial was not touched"
    got, expected = outcome(folder.path), outcome(local(tmp_path / "local", wanted))
    for run in (got, expected):
        for key in ("on", "address"):
            run["result"]["config"].pop(key)
        run["files"] = [name for name in run["files"] if name != "nodes.jsonl"]
    for part in expected:
        assert got[part] == expected[part], part
    assert [record.seed for record in records] == [0, 1]


def test_stopped_and_resumed(cluster: Any, tmp_path: Path) -> None:
    """One trial runs, the other waits for room; both are there after a stop, and the run goes on here."""
    wanted = plan("ray", steps=100_000, evaluate_every=100, checkpoint_seconds=1000.0)
    folder = RunFolder.create(tmp_path / "run", wanted)
    stop = Stop()
    with pytest.raises(engine.Interrupted), folder.alone():
        engine.run_tasks(engine.begin(folder, wanted), lambda now: stop.set(), stop)
    (file,) = folder.checkpoints.iterdir()
    from fastmod.runs import checkpoint

    step = checkpoint.load(file)["step"]
    assert 0 < step < 100_000, "saved when it was stopped, long before the next checkpoint was due"


def test_what_a_trial_raises_arrives(cluster: Any, tmp_path: Path) -> None:
    wanted = plan("ray", steps=8, evaluate_every=4, lr=1e30)
    folder = RunFolder.create(tmp_path / "run", wanted)
    with pytest.raises(StudyError, match=r"FNN-s\d: the loss is (nan|inf) at step \d+; try a smaller lr"):
        engine.run(folder, wanted, lambda now: None)


def test_an_address_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(**options: Any) -> None:
        assert options["address"] == "10.0.0.1:6379"
        raise ConnectionError("Could not find any running Ray instance.\nMore.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", away)
    wanted = replace(plan("ray", steps=8, evaluate_every=4), address="10.0.0.1:6379")
    with pytest.raises(StudyError, match=r"^--address 10.0.0.1:6379: Could not find any running Ray instance.$"):
        engine.run(RunFolder.create(tmp_path / "run", wanted), wanted, lambda now: None)


def test_signals_still_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handlers, in place after its start, would end the process without a checkpoint."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with stop_on_signals() as stop, on_ray._cluster(ray, None):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5) and stop.number == signal.SIGTERM
