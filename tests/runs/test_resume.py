"""A run that was killed, stopped or out of disk goes on to the very same end, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastmod.runs.folder import RunFolder
from tests.helpers.study_commands import ROOT, Finished, cleaned_up, fastmod, group_lives, refused, start, until
from tests.helpers.study_hooks import (
    Hook,
    forked_jobs,
    full_disk,
    hold,
    hold_jobs,
    interrupt,
    kill,
    largest_file,
    patience,
    terminate,
    ticks,
    without_figures,
)
from tests.helpers.study_runs import SMALL, arguments, contents, moments, outcome, states, untouched

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, signals and /proc")
STUDIES = tuple(SMALL)


def begin(study: str, folder: Path, *hooks: Hook) -> Finished:
    return fastmod("study", *arguments(study), "--out", folder, hooks=(ticks(), without_figures(), *hooks))


def resume(folder: Path, *hooks: Hook) -> Finished:
    return fastmod("study", "--resume", folder, hooks=(ticks(), without_figures(), *hooks))


def assert_same_end(
    folder: Path, study: str = "doubleadd", *, whole: Path | None = None, figures: bool = False
) -> None:
    """``whole``: the run to compare with; default: the small run of the study, untouched."""
    got, expected = (outcome(run) for run in (folder, whole or untouched(study)))
    for part in expected:
        if part != "figures" or figures:
            assert got[part] == expected[part], part


def resume_command(done: Finished) -> list[str]:
    """What the output says to type."""
    lines = [line[line.index("fastmod study --resume") :] for line in done.text.splitlines() if "--resume" in line]
    assert len(lines) == 1, done.text
    program, *words = shlex.split(lines[0])
    return words


# ---- killed


@pytest.mark.slow
def test_same_run_twice_is_the_same(tmp_path: Path) -> None:
    """Otherwise the other tests would compare nothing; the figures are part of it."""
    assert fastmod("study", *arguments("algo"), "--out", tmp_path / "run", hooks=(ticks(),)).code == 0
    assert_same_end(tmp_path / "run", "algo", figures=True)
    assert len(outcome(tmp_path / "run")["figures"]) == 3


def test_comparison_sees_the_last_bit(tmp_path: Path) -> None:
    import torch

    from fastmod.runs import checkpoint

    run = shutil.copytree(untouched("doubleadd"), tmp_path / "run")
    file = run / "checkpoints" / "FNN-s3.pt"
    whole = torch.load(file, weights_only=True)
    moving = whole["state"]["optimizer"]["state"][0]["exp_avg"]
    moving.view(-1)[0] = torch.nextafter(moving.view(-1)[0], torch.tensor(1.0))
    checkpoint.save(file, whole["owner"], whole["state"])
    with pytest.raises(AssertionError, match="states"):
        assert_same_end(run)


KILLS = [
    ("after config.json", 1),
    ("told SMFR_gumbel-s3 2", 1),  # before there is any checkpoint
    ("half line", 2),
    ("line", 2),  # measured, not yet in a checkpoint
    ("half SMFR_gumbel-s3.pt.new", 1),
    ("half SMFR_gumbel-s3.pt.new", 2),
    ("before SMFR_gumbel-s3.pt", 2),
    ("after SMFR_gumbel-s3.pt", 1),
    ("told SMFR_gumbel-s3 10", 1),
    ("finished SMFR_gumbel-s3", 1),
    ("finished FNN-s3", 1),
    ("half result.json.new", 1),
    ("before report.html", 1),
]


@pytest.mark.parametrize(("label", "nth"), KILLS)
def test_killed_once(tmp_path: Path, label: str, nth: int) -> None:
    run = tmp_path / "run"
    killed = begin("doubleadd", run, kill(label, nth))
    assert killed.killed, killed.text
    done = resume(run)
    assert done.code == 0, done.text
    assert_same_end(run)


def test_killed_while_drawing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = ("study", *arguments("doubleadd"), "--out", run)
    assert fastmod(*args, hooks=(ticks(), kill("half ood.png"))).killed
    assert fastmod("study", "--resume", run).code == 0
    assert_same_end(run, figures=True)


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_killed_again_and_again(tmp_path: Path, study: str) -> None:
    """Each time a little later, until nothing is left to kill; thus also in what a resume does first."""
    run = tmp_path / "run"
    assert begin(study, run, kill("told .*", 2)).killed
    for later in itertools.count(2, 4):
        done = resume(run, kill(nth=later))
        if not done.killed:
            break
    assert done.code == 0 and later > 10, done.text
    assert_same_end(run, study)


def test_addmul_is_killed_in_every_stage() -> None:
    """The run of the tests above crosses all stages, with a checkpoint inside of each kind."""
    found = RunFolder(untouched("addmul")).metrics()
    stages = [line["interfering"] for line in found if line["model"] == "FNN"]
    assert stages == [0, 1, 1, 1, 1, 0, 0, 0]
    saved = [label for label in moments("addmul") if label.startswith(("told FNN", "after FNN"))]
    assert saved[3:5] == ["after FNN-s0.pt", "told FNN-s0 8"], "a checkpoint at step 6, inside of interference"
    extra = states(untouched("addmul"))["FNN-s0"]["extra"]
    assert (extra["reached"], extra["prepared"], len(extra["accuracies"])) == (2, 8, 2)


@pytest.mark.parametrize("label", ["half FNN-s3.jsonl.new", "before FNN-s3.jsonl", "after FNN-s3.jsonl"])
def test_killed_while_metrics_are_rewound(tmp_path: Path, label: str) -> None:
    run = tmp_path / "run"
    assert begin("doubleadd", run, kill("told FNN-s3 10")).killed
    assert resume(run, kill(label)).killed, "the line of step 8 is younger than the checkpoint of step 6"
    assert resume(run).code == 0
    assert_same_end(run)


def test_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """It has the lines of all trials in one file, here with some that are younger than their checkpoint."""
    run = tmp_path / "run"
    assert begin("doubleadd", run, kill("told FNN-s3 10")).killed
    before = RunFolder(run).metrics()
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in before))
    shutil.rmtree(run / "metrics")
    assert resume(run).code == 0
    assert [line["step"] for line in RunFolder(run).metrics() if line["trial"] == "FNN-s3"] == [4, 8, 12]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == len(before) - 1, "step 8 is measured again"
    got, expected = outcome(run), outcome(untouched("doubleadd"))
    for part in ("states", "result"):
        assert got[part] == expected[part]
    assert sorted(got["metrics"]) == sorted(expected["metrics"])


def test_killed_before_there_is_a_plan(tmp_path: Path) -> None:
    assert begin("doubleadd", tmp_path / "run", kill("before config.json")).killed
    refused(resume(tmp_path / "run"), "no config.json")


def test_resume_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run = shutil.copytree(untouched("doubleadd"), tmp_path / "run")
    assert resume(run).code == 0
    changed = [name for name, value in contents(untouched("doubleadd")).items() if contents(run)[name] != value]
    assert set(changed) <= {"report.html"}, "made without figures here"
    assert contents(run).keys() == contents(untouched("doubleadd")).keys()


def test_unfinished_copy_goes_on_elsewhere(tmp_path: Path) -> None:
    """No path is kept inside of a run."""
    assert begin("doubleadd", tmp_path / "run", kill("told FNN-s3 8")).killed
    moved = (tmp_path / "run").rename(tmp_path / "mo ved")
    assert resume(moved).code == 0
    assert_same_end(moved)


# ---- TensorBoard


def test_events_after_kills_hold_every_metric_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    run = tmp_path / "run"
    # Killed right after the checkpoint of an evaluated step. Then an error after evaluations without a checkpoint: the
    # file of events is closed, so it tells of steps that are going to be repeated.
    args = ("study", *arguments("doubleadd"), "--set", "evaluate_every=2", "--out", run)
    assert fastmod(*args, hooks=(ticks(), kill("after SMFR_gumbel-s3.pt"))).killed
    refused(resume(run, full_disk("told FNN-s3 10")), "No space left")
    assert resume(run).code == 0
    assert len(list((run / "events" / "FNN-s3").iterdir())) == 2
    lines = RunFolder(run).metrics()
    assert len(lines) == 12
    for key in ("SMFR_gumbel-s3", "FNN-s3"):
        events = EventAccumulator(str(run / "events" / key))
        events.Reload()
        names = ["loss", "accuracy", "ood_accuracy", *(["gate_0", "gate_1"] if key.startswith("SMFR") else [])]
        assert sorted(events.Tags()["scalars"]) == sorted(names)
        for name in names:
            expected = [(line["step"], pytest.approx(line[name])) for line in lines if line["trial"] == key]
            assert [(event.step, event.value) for event in events.Scalars(name)] == expected, (key, name)


# ---- Ctrl-C

INTERRUPTS = [
    ("told SMFR_gumbel-s3 2", 1),
    ("half line", 2),
    ("half SMFR_gumbel-s3.pt.new", 1),
    ("finished SMFR_gumbel-s3", 1),
    ("told FNN-s3 10", 1),
    ("before result.json", 1),
]


@pytest.mark.parametrize(("label", "nth"), INTERRUPTS)
def test_interrupted(tmp_path: Path, label: str, nth: int) -> None:
    run = tmp_path / "a [red]run[/red] of :smile:"  # a name that must not be taken for markup
    stopped = begin("doubleadd", run, interrupt(label, nth))
    assert stopped.code == 130, stopped.text
    assert not stopped.err, stopped.err
    assert resume_command(stopped) == ["study", "--resume", str(run)]
    done = fastmod(*resume_command(stopped), hooks=(ticks(), without_figures()))
    assert done.code == 0, done.text
    assert_same_end(run)


def test_interrupt_saves_the_chunk_at_hand(tmp_path: Path) -> None:
    assert begin("doubleadd", tmp_path / "run", interrupt("told SMFR_gumbel-s3 4")).code == 130
    assert states(tmp_path / "run")["SMFR_gumbel-s3"]["step"] == 4


def test_second_interrupt_does_not_wait_for_the_chunk(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = begin("doubleadd", run, interrupt("half line", 2), interrupt("line", 2))
    assert stopped.code == 130, stopped.text
    assert resume_command(stopped) == ["study", "--resume", str(run)]
    assert states(run)["SMFR_gumbel-s3"]["step"] == 6, "the checkpoint before"
    assert resume(run).code == 0
    assert_same_end(run)


@pytest.mark.parametrize("label", ["told SMFR_gumbel-s3 4", "half FNN-s3.pt.new", "half result.json.new"])
def test_terminated(tmp_path: Path, label: str) -> None:
    """As by Ctrl-C: in a trial, in its checkpoint, and after all trials."""
    run = tmp_path / "run"
    stopped = begin("doubleadd", run, terminate(label))
    assert stopped.code == 143 and not stopped.err, stopped.text
    assert resume_command(stopped) == ["study", "--resume", str(run)]
    assert resume(run).code == 0
    assert_same_end(run)


def test_second_termination_does_not_wait_for_the_chunk(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped = begin("doubleadd", run, interrupt("half line", 2), terminate("line", 2))
    assert stopped.code == 143 and not stopped.err, stopped.text
    assert states(run)["SMFR_gumbel-s3"]["step"] == 6, "the checkpoint before"
    assert resume(run).code == 0
    assert_same_end(run)


LONGER = [
    "doubleadd", "--model", "FNN", "--steps", "1200", "--set", "batch=2", "--set", "fnn_width=4", "--set",
    "fnn_depth=1", "--set", "chunk=10", "--set", "evaluate_every=100",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("jobs", [1, 2])
def test_real_process_interrupted(tmp_path: Path, jobs: int, number: signal.Signals) -> None:
    """Nothing forked, nothing patched: the command itself, its own jobs, a signal as a terminal sends it, to all."""
    run = tmp_path / "run"
    seeds = ["--seeds", f"0-{jobs - 1}"]
    command = [sys.executable, "-m", "fastmod", "study", *LONGER, *seeds, "--out", str(run)]
    command += ["--jobs", str(jobs)] if jobs > 1 else []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or _evaluated(run))
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        if group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    stopped = Finished(process.returncode, out, err)
    assert stopped.code == 128 + number, stopped.text
    assert not err
    assert "stopped, everything is saved; go on with:\n" in out
    assert any(state["step"] < 1200 for state in states(run).values())
    forked = (forked_jobs(),) if jobs > 1 else ()
    assert fastmod(*resume_command(stopped), hooks=(*forked, without_figures())).code == 0
    whole = tmp_path / "whole"
    assert fastmod("study", *LONGER, *seeds, "--out", whole, hooks=(without_figures(),)).code == 0
    assert_same_end(run, whole=whole)


def _evaluated(run: Path) -> bool:
    return bool(RunFolder(run).metrics())


# ---- several jobs


def test_jobs_do_not_change_a_bit(tmp_path: Path) -> None:
    done = fastmod(
        "study", *arguments("addmul"), "--jobs", "2", "--out", tmp_path / "run", hooks=(ticks(), forked_jobs())
    )
    assert done.code == 0 and not done.err, done.text
    assert_same_end(tmp_path / "run", "addmul", figures=True)
    assert done.out.count("done") == 2, "the last word of each job arrives"


def test_jobs_interrupted(tmp_path: Path) -> None:
    run, held = tmp_path / "run", tmp_path / "held"
    args = ("study", *arguments("doubleadd"), "--jobs", "2", "--out", run)
    # Both jobs are held in the middle of their first checkpoints.
    running = start(*args, hooks=(ticks(), forked_jobs(), hold(held, "half .*pt.new")))
    with cleaned_up(running):
        until(lambda: len(list(run.glob("checkpoints/*.new"))) == 2 and held.exists())
        os.killpg(running.pid, signal.SIGINT)
        time.sleep(0.5)
        held.unlink()
        stopped = running.finish()
        assert stopped.code == 130 and not stopped.err, stopped.text
        until(lambda: not group_lives(running.pid), 5)
    assert all(6 <= state["step"] <= 8 for state in states(run).values()), "both stopped soon"
    assert fastmod(*resume_command(stopped), hooks=(ticks(), forked_jobs(), without_figures())).code == 0
    assert_same_end(run)


def test_jobs_interrupted_while_they_start(tmp_path: Path) -> None:
    """Importing torch takes a job seconds, in which a Ctrl-C reaches it too."""
    run, held = tmp_path / "run", tmp_path / "held"
    args = ("study", *arguments("doubleadd"), "--jobs", "2", "--out", run)
    running = start(*args, hooks=(forked_jobs(), hold_jobs(held)))
    with cleaned_up(running):
        until(held.exists)
        os.killpg(running.pid, signal.SIGINT)
        time.sleep(0.3)
        held.unlink()
        stopped = running.finish()
        assert stopped.code == 130 and not stopped.err, stopped.text
        until(lambda: not group_lives(running.pid), 5)
    assert fastmod(*resume_command(stopped), hooks=(ticks(), forked_jobs(), without_figures())).code == 0
    assert_same_end(run)


@pytest.mark.parametrize("label", ["half SMFR_gumbel-s3.pt.new", "finished .*"])
def test_jobs_end_when_the_main_process_is_killed(tmp_path: Path, label: str) -> None:
    """First: one job in the middle of a checkpoint, the other perhaps without work. Second: between two trials."""
    run, held = tmp_path / "run", tmp_path / "held"
    args = ("study", *arguments("doubleadd"), "--seeds", "3,4", "--jobs", "2", "--out", run)
    running = start(*args, hooks=(ticks(), forked_jobs(), hold(held, label)))
    with cleaned_up(running):
        until(held.exists)
        os.kill(running.pid, signal.SIGKILL)
        assert running.finish().killed
        held.unlink()
        until(lambda: not group_lives(running.pid), 10)
    done = resume(run, forked_jobs())
    assert done.code == 0, done.text
    whole = tmp_path / "whole"
    args = ("study", *arguments("doubleadd"), "--seeds", "3,4", "--out", whole)
    assert fastmod(*args, hooks=(ticks(), without_figures())).code == 0
    assert_same_end(run, whole=whole)


def test_killed_job_is_told_and_resumed(tmp_path: Path) -> None:
    """As the system does when memory runs out."""
    run = tmp_path / "run"
    args = ("study", *arguments("doubleadd"), "--jobs", "2", "--out", run)
    running = start(*args, hooks=(ticks(), forked_jobs(), kill("half FNN-s3.pt.new")))
    with cleaned_up(running):
        ended = running.finish()
        refused(ended, "job", shlex.join(["fastmod", "study", "--resume", str(run)]))
        until(lambda: not group_lives(running.pid), 5)
    assert resume(run, forked_jobs()).code == 0
    assert_same_end(run)


def test_second_process_is_refused(tmp_path: Path) -> None:
    run, held = tmp_path / "run", tmp_path / "held"
    running = start("study", *arguments("doubleadd"), "--out", run, hooks=(ticks(), hold(held, "told FNN-s3 8")))
    with cleaned_up(running):
        until(held.exists)
        before = contents(run)
        refused(resume(run, patience(0.3)), "another process is at work")
        refused(begin("doubleadd", run), "not an empty folder")
        assert contents(run) == before
        held.unlink()
        assert running.finish().code == 0
    assert_same_end(run)


def test_second_process_is_refused_while_a_job_lives(tmp_path: Path) -> None:
    """Held by its jobs too, for the moment between the end of the main process and theirs."""
    from fastmod.runs.config import StudyError

    folder = RunFolder(tmp_path)
    with folder.together(), pytest.raises(StudyError, match="another process"), folder.alone(patience=0.0):
        pass
    with folder.alone(patience=0.0), folder.together():
        pass


# ---- full disk


@pytest.mark.parametrize(
    ("label", "nth"), [("half line", 2), ("half SMFR_gumbel-s3.pt.new", 2), ("before FNN-s3.pt", 1),
                       ("half result.json.new", 1), ("half report.html.new", 1)],
)  # fmt: skip
def test_full_disk(tmp_path: Path, label: str, nth: int) -> None:
    run = tmp_path / "run"
    refused(begin("doubleadd", run, full_disk(label, nth)), "No space left on device", f"--resume {run}")
    assert not list(run.rglob("*.new"))
    states(run)  # readable, all that are there
    assert resume(run).code == 0
    assert_same_end(run)


def test_full_disk_in_a_job(tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = ("study", *arguments("doubleadd"), "--jobs", "2", "--out", run)
    done = fastmod(*args, hooks=(ticks(), forked_jobs(), full_disk("half FNN-s3.pt.new")))
    refused(done, "No space left on device", f"--resume {run}")
    assert not list(run.rglob("*.new"))
    assert resume(run, forked_jobs()).code == 0
    assert_same_end(run)


@pytest.mark.parametrize("size", [150, 250, 5000])
def test_limit_by_the_system(tmp_path: Path, size: int) -> None:
    """Too little for the second of the metrics, for the events, for a checkpoint."""
    run = tmp_path / "run"
    assert begin("doubleadd", run, kill("after config.json")).killed
    refused(resume(run, largest_file(size)), "File too large", f"--resume {run}")
    assert not list(run.rglob("*.new"))
    assert resume(run).code == 0
    assert_same_end(run)


@pytest.mark.parametrize("name", ["checkpoints/FNN-s3.pt.new", "result.json.new", "figures/ood.png"])
def test_full_device(tmp_path: Path, name: str) -> None:
    """A device that has no space left, by a link in the place of the file."""
    run = tmp_path / "run"
    assert begin("doubleadd", run, kill("finished SMFR_gumbel-s3")).killed
    (run / name).symlink_to("/dev/full")
    hooks = (ticks(),) if name.startswith("figures") else (ticks(), without_figures())
    refused(fastmod("study", "--resume", run, hooks=hooks), "No space left on device", f"--resume {run}")
    assert not list(run.rglob("*.new"))
    (run / name).unlink(missing_ok=True)
    assert fastmod("study", "--resume", run, hooks=hooks).code == 0
    assert_same_end(run, figures=name.startswith("figures"))
