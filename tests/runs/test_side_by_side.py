"""``--together``: trials in one batched step end as they do alone, and so do those of a run that was killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fastmod.runs.config import changed
from fastmod.runs.engine import Course, Task, bundles, prepare_trial, train_all
from fastmod.runs.folder import Plan
from fastmod.runs.parallel import Silent
from fastmod.runs.side_by_side import SideBySide
from fastmod.runs.trial import Trial
from fastmod.studies import registry
from tests.helpers.study_commands import Finished, fastmod, in_process, refused
from tests.helpers.study_hooks import kill, ticks, without_figures
from tests.helpers.study_runs import digits, outcome

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks and signals")
SIZES: dict[str, Any] = {
    "batch": 4, "chunk": 2, "steps": 8, "evaluate_every": 4, "width": 4, "depth": 1, "hidden": 4, "layers": 1,
    "fnn_width": 6, "fnn_depth": 1,
}  # fmt: skip


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def plan_of(study: str, model: str, seeds: list[int], **settings: Any) -> Plan:
    config = changed(registry.get(study).defaults, {**SIZES, **settings})
    return Plan(study, [model], seeds, asdict(config), together=len(seeds))


def trials_of(plan: Plan) -> list[Trial]:
    return [prepare_trial(registry.get(plan.study), plan, model, seed) for model, seed in plan.trials()]


# clip: far below the norms, which differ from copy to copy. penalty_threshold: most logits are beyond it.
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("doubleadd", "SMFR_softmax", {"clip": 1e-3, "penalty_threshold": 0.01}),
    ("doubleadd", "FNN", {"clip": 1e-3}),
    ("algo", "SMFR", {"clip": 1e-3, "penalty": "sum", "penalty_threshold": 0.01}),
    ("algo", "SMFR_plain", {}),
    ("bpmnist", "SMFR_bias", {"bias_steps": 3, "verify": False}),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("study", "model", "settings"), MODELS, ids=lambda value: value if type(value) is str else "")
def test_every_trial_ends_as_alone(study: str, model: str, settings: dict[str, Any], tmp_path: Path) -> None:
    if study == "bpmnist":
        settings = {**settings, "data": str(digits(tmp_path))}
    plan = plan_of(study, model, [5, 0, 3], **settings)
    alone, crew = trials_of(plan), trials_of(plan)
    before = [p.clone() for trial in crew for p in trial.model.parameters()]
    together = SideBySide(crew)
    for _ in range(3):
        losses = torch.stack([trial.chunk() for trial in alone])
        torch.testing.assert_close(together.chunk(), losses, rtol=1e-12, atol=1e-14)
    after = [p for trial in crew for p in trial.model.parameters()]
    assert all(not torch.equal(p, q) for p, q in zip(before, after, strict=True)), "all have learned"
    for one, other in zip(alone, crew, strict=True):
        assert one.step == other.step == 6
        got, want = other.state(), one.state()
        torch.testing.assert_close(got["model"], want["model"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(got["optimizer"]["state"], want["optimizer"]["state"], rtol=1e-9, atol=1e-12)
        assert other.metrics() == pytest.approx(one.metrics(), rel=1e-9)


def test_those_that_are_behind_catch_up_and_those_that_end_leave() -> None:
    """Bit for bit, since the kernel does for every copy of an SMFR what it does for one."""
    plan = plan_of("algo", "SMFR", [0, 1, 2])
    want = trials_of(plan)
    for trial in want:
        while not trial.finished:
            trial.chunk()
    courses = [Course(plan, model, seed, Silent()) for model, seed in plan.trials()]
    courses[1].chunk()  # ahead of the others
    courses[2].trial.extra["solved_at"] = 4  # which is its end
    told: list[tuple[str, int]] = []
    train_all(courses, lambda now: told.append((now.key, now.step)), lambda: False)
    assert [step for key, step in told if key == "SMFR-s2"] == [2, 4]
    assert [step for key, step in told if key == "SMFR-s1"] == [4, 6, 8]
    for course, one in zip(courses[:2], want, strict=False):
        for p, q in zip(course.trial.model.parameters(), one.model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_bundles_differ_in_the_seed_alone() -> None:
    plan = Plan("algo", ["SMFR", "FNN"], [0, 1, 2], {}, together=2)
    tasks = [Task(Path(cell), plan, model, seed) for cell in "ab" for model, seed in plan.trials()]
    found = [[(str(t.path), t.model, t.seed) for t in bundle] for bundle in bundles(tasks)]
    assert found[:4] == [
        [("a", "SMFR", 0), ("a", "SMFR", 1)], [("a", "SMFR", 2)], [("a", "FNN", 0), ("a", "FNN", 1)], [("a", "FNN", 2)]
    ]  # fmt: skip
    assert [len(bundle) for bundle in found] == [2, 1] * 4


def test_why_not() -> None:
    assert SideBySide.why_not(trials_of(plan_of("doubleadd", "SMFR_softmax", [0, 1]))) is None
    assert "mapped" in str(SideBySide.why_not(trials_of(plan_of("doubleadd", "SMFR_gumbel", [0, 1]))))
    assert "mapped" in str(SideBySide.why_not(trials_of(plan_of("algo", "SMFR", [0, 1], noisy=True))))
    assert "settings" in str(SideBySide.why_not(trials_of(plan_of("doubleadd", "FNN", [0, 1], grid=True))))


# ---- as a command

COMMAND = [
    "doubleadd", "--model", "SMFR_softmax", "--model", "SMFR_gumbel", "--seeds", "0-2", "--steps", "8",
    *(f"--set={key}={value}" for key, value in SIZES.items() if key != "steps"), "--set=checkpoint_seconds=2",
]  # fmt: skip


def study(*args: object, hooks: tuple[Any, ...] = ()) -> Finished:
    return fastmod("study", *args, hooks=(ticks(), without_figures(), *hooks))


def ends(folder: Path) -> dict[str, Any]:
    found = outcome(folder)
    found["result"]["config"].pop("together")
    return found


@LINUX
def test_run_is_the_same_killed_or_not(tmp_path: Path) -> None:
    """Gumbel trials go one after the other, which one line says. The kill leaves one checkpoint older than another."""
    for name, more in (("alone", []), ("whole", ["--together", 3]), ("killed", ["--together", 2])):
        hooks = (kill("half SMFR_softmax-s1.pt.new", 2),) if name == "killed" else ()
        done = study(*COMMAND, *more, "--out", tmp_path / name, hooks=hooks)
        assert done.killed if name == "killed" else done.code == 0, done.text
        said = done.err.count("SMFR_gumbel trains one trial after the other")
        assert said == done.err.count("\n") == (name == "whole"), done.text
    done = study("--resume", tmp_path / "killed")
    assert done.code == 0, done.text
    want = ends(tmp_path / "alone")
    for name in ("whole", "killed"):
        got = ends(tmp_path / name)
        for part in want:
            assert got[part] == want[part], f"{name}, {part}"
    sizes = [(tmp_path / name / "checkpoints" / "SMFR_softmax-s1.pt").stat().st_size for name in ("alone", "whole")]
    assert sizes[0] == sizes[1], "a checkpoint holds its own trial alone"


@LINUX
def test_sweep(tmp_path: Path) -> None:
    command = [*COMMAND[:3], "--grid", "depth=0,1", *COMMAND[5:]]
    for name, more in (("alone", []), ("whole", ["--together", 3, "--jobs", 1])):
        done = fastmod("sweep", *command, *more, "--out", tmp_path / name, hooks=(ticks(), without_figures()))
        assert done.code == 0, done.text
    alone, whole = ((tmp_path / name / "cells.csv").read_text() for name in ("alone", "whole"))
    assert alone == whole


def test_refused(tmp_path: Path) -> None:
    refused(in_process("study", "--resume", tmp_path, "--together", 2), "--resume")
    done = in_process("study", "algo", "--together", 2, "--on", "ray", "--out", tmp_path / "run")
    refused(done, "--on ray")
    assert not (tmp_path / "run").exists()
