"""``fastmod study`` and ``fastmod inspect``: what they write, and what they say to whom mistypes."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fastmod.runs.display import Display
from fastmod.runs.engine import Progress
from fastmod.runs.folder import RunFolder
from fastmod.studies import registry
from tests.helpers.study_commands import Finished, fastmod, in_process, refused
from tests.helpers.study_hooks import (
    Hook,
    forked_jobs,
    full_disk,
    inside,
    kill,
    limit_memory,
    memory,
    no_mnist_package,
    ticks,
    unprivileged,
    without_figures,
)
from tests.helpers.study_runs import arguments, contents, digits, untouched

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, signals and /proc")
PNG = b"\x89PNG\r\n\x1a\n"


def study(*args: object, hooks: tuple[Hook, ...] = (), env: dict[str, str] | None = None) -> Finished:
    return fastmod("study", *args, hooks=hooks, env=env)


@pytest.fixture
def _little_memory() -> Iterator[None]:
    before = limit_memory(2**30)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_list() -> None:
    done = study()
    assert done.code == 0 and not done.err
    for name in ("algo", "addmul", "doubleadd", "bpmnist"):
        assert name in done.out


@pytest.mark.parametrize("command", ["study", "sweep"])
def test_help_names_the_extra(command: str) -> None:
    """What stands in brackets is a style to rich, and was not shown."""
    shown = " ".join(fastmod(command, "--help").out.replace("│", " ").split())
    assert 'ray (pip install "fastmod[ray]")' in shown


# ---- a run and its files


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("quick") / "run"
    sizes = [part for size in ("batch=2", "width=2", "depth=1", "hidden=4") for part in ("--set", size)]
    done = study("algo", "--quick", "--model", "SMFR", *sizes, "--out", run)
    assert done.code == 0 and not done.err, done.text
    assert "\x1b" not in done.out, "plain text where there is no terminal"
    assert re.search(r"^SMFR-s0  step 500/500 .* done$", done.out, re.MULTILINE)
    assert str(run / "report.html") in done.out
    return run


def test_quick_is_quick(quick: Path) -> None:
    plan = json.loads((quick / "config.json").read_text())
    assert plan["study"] == "algo" and plan["models"] == ["SMFR"] and plan["seeds"] == [0]
    assert plan["settings"]["steps"] == 500 and plan["settings"]["evaluate_every"] == 250
    assert plan["settings"]["hidden"] == 4 and plan["versions"].keys() >= {"fastmod", "torch"}
    lines = (quick / "metrics" / "SMFR-s0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [250, 500]
    names = {"config.json", "metrics", "checkpoints", "events", "figures", "result.json", "report.html"}
    assert {path.name for path in quick.iterdir()} - {".lock"} == names


def test_result(quick: Path) -> None:
    result = json.loads((quick / "result.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert list(result) == ["study", "paper", "config", "table", "trials"]
    assert result["study"] == "algo" and "Tables 2 and 7" in result["paper"]
    assert result["config"] == json.loads((quick / "config.json").read_text())
    (trial,) = result["trials"]
    assert list(trial) == ["trial", "model", "seed", "steps", "seconds", "parameters", "result"]
    assert (trial["trial"], trial["model"], trial["seed"], trial["steps"]) == ("SMFR-s0", "SMFR", 0, 500)
    assert trial["seconds"] > 0 and trial["parameters"] > 0 and 0 <= trial["result"]["ood_odd"] <= 1
    names = [row["name"] for row in result["table"]]
    assert len(names) == 10 and names[:2] == ["SMFR, OOD_even", "SMFR, OOD_odd"] and "variable E" in names[-1]
    for row in result["table"]:
        assert list(row) == ["name", "paper", "mean", "standard_error", "trials", "steps", "minutes", "note"]
        assert row["trials"] == 1 and row["standard_error"] is None and row["steps"] == 500
    assert result["table"][1]["mean"] == trial["result"]["ood_odd"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["algo", "addmul", "doubleadd", "bpmnist"])
def test_report_is_one_file_with_every_row(name: str) -> None:
    run = untouched(name)
    page, result = (run / "report.html").read_text(), json.loads((run / "result.json").read_text())
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    sources = re.findall(r"""(?:src|href)\s*=\s*["']?(.{30})""", page)
    figures = sorted(run.glob("figures/*.png"))
    assert len(sources) == len(figures) > 0 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert all(figure.read_bytes().startswith(PNG) for figure in figures)
    assert result["table"]
    for row in result["table"]:
        assert f"<td>{escape(row['name'])}</td>" in page and escape(row["paper"]) in page, row
        assert row["mean"] is None or f"{row['mean']:.3f}" in page, row
    for key in result["config"]["settings"]:
        assert escape(f'"{key}"') in page


def test_events_hold_the_metrics(quick: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(quick / "events" / "SMFR-s0"))
    events.Reload()
    lines = RunFolder(quick).metrics()
    names = lines[0].keys() - {"trial", "model", "seed", "step"}
    assert set(events.Tags()["scalars"]) == names and len(names) > 20
    for name in names:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(line["step"], pytest.approx(line[name])) for line in lines], name


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--steps", "30", "--set", "chunk=10"], (30, 10, 30)),
     (["--steps", "30", "--set", "chunk=10", "--set", "evaluate_every=20"], (30, 10, 20)),
     (["--quick", "--set", "chunk=125"], (500, 125, 250)),
     (["--quick", "--steps", "100"], (100, 50, 100)),
     (["--steps", "50", "--set", "steps=150"], (150, 50, 50))],
)  # fmt: skip
def test_steps_and_settings_go_together(tmp_path: Path, options: list[str], expected: tuple[int, ...]) -> None:
    """They are checked together, not one after the other."""
    done = study("doubleadd", "--model", "FNN", *options, "--out", tmp_path / "run", hooks=(kill("after config.json"),))
    assert done.killed, done.text
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert tuple(settings[key] for key in ("steps", "chunk", "evaluate_every")) == expected


def test_default_folder(tmp_path: Path) -> None:
    assert study(*arguments("doubleadd"), hooks=(inside(tmp_path), kill("after config.json"))).killed
    (run,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"doubleadd-\d{8}-\d{6}", run.name)


def test_folder_with_any_name(tmp_path: Path) -> None:
    """Such names are easily taken for markup, for options or for several words."""
    run = tmp_path / "[bold]a b[/bold] :smile: $HOME 'x'"
    done = study(*arguments("doubleadd"), "--out", run, hooks=(ticks(), without_figures()))
    assert done.code == 0 and f"report: {run}/report.html\n" in done.out, done.text
    done = fastmod("inspect", run)
    assert done.code == 0 and f"{run}/figures/routing-SMFR_gumbel-s3.png\n" in done.out, done.text
    refused(study("algo", "--out", run), f"--out {run}: ")


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["algebra"], ["unknown study 'algebra'", "algo, addmul, doubleadd, bpmnist"]),
        (["algo", "--model", "LSTM"], ["--model LSTM", "SMFR, FNN, Transformer"]),
        (["addmul", "--model", "FNN", "--model", "Transformer"], ["--model Transformer"]),
        (["algo", "--set", "speed=9"], ["unknown key 'speed'", "width"]),
        (["algo", "--set", "width=wide"], ["width: expected int, got 'wide'"]),
        (["algo", "--set", "width"], ["--set: expected key=value, got 'width'"]),
        (["algo", "--set", "=5"], ["--set: expected key=value"]),
        (["algo", "--set", "noisy=perhaps"], ["noisy: expected bool"]),
        (["algo", "--set", "lr=nan"], ["lr and clip"]),
        (["algo", "--set", "chunk=7"], ["multiple of chunk = 7"]),
        (["algo", "--set", "batch=99999999999999999999"], ["batch"]),
        (["addmul", "--set", "thresholds=0.9,0.8"], ["thresholds"]),
        (["addmul", "--set", "interference=30"], ["interference"]),
        (["addmul", "--noisy"], ["unknown key 'noisy'"]),
        (["algo", "--steps", "0"], ["steps"]),
        (["algo", "--steps", "75"], ["steps: expected a multiple of chunk = 50, got 75"]),
        (["algo", "--seeds", "0-"], ["--seeds"]),
        (["algo", "--seeds", "1,1"], ["--seeds", "distinct"]),
        (["algo", "--seeds", "0-99999999999"], ["--seeds"]),
        (["algo", "--seeds", "zero"], ["--seeds"]),
        (["algo", "--device", "abacus"], ["--device abacus"]),
        (["algo", "--device", "cuda:77"], ["--device cuda:77"]),
        (["algo", "--device", "meta"], ["--device meta"]),
        (["algo", "--device", "hpu"], ["--device hpu"]),
        (["algo", "--device", ""], ["--device"]),
        (["bpmnist", "--set", "data=/no/such/folder"], ["/no/such/folder", "no such folder"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and len(value) > 1 else "",
)
@pytest.mark.usefixtures("_little_memory")
def test_mistyped(tmp_path: Path, options: list[str], words: list[str]) -> None:
    refused(in_process("study", *options, "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists(), "found before anything is written"


@pytest.mark.parametrize(
    ("model", "setting"),
    [("SMFR", "width=0"), ("SMFR", "hidden=-1"), ("SMFR", "layers=-3"), ("FNN", "fnn_width=-1"),
     ("Transformer", "heads=0"), ("Transformer", "inner=-1")],
)  # fmt: skip
def test_model_that_cannot_be_built(tmp_path: Path, model: str, setting: str) -> None:
    refused(study("algo", "--model", model, "--set", setting, "--out", tmp_path / "run"), setting.partition("=")[0])


def test_model_beyond_all_numbers(tmp_path: Path) -> None:
    refused(
        study("algo", "--model", "FNN", "--set", "fnn_width=99999999999999999999", "--out", tmp_path / "run"), "FNN"
    )


def test_model_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    sizes = ("--set", "fnn_width=100000", "--set", "fnn_depth=3")
    refused(study("algo", "--model", "FNN", *sizes, "--out", tmp_path / "run", hooks=(memory(2**31),)), "FNN")


def test_batch_that_does_not_fit_into_memory(tmp_path: Path) -> None:
    done = study(*arguments("doubleadd"), "--set", "batch=200000000", "--out", tmp_path / "run", hooks=(memory(2**31),))
    refused(done, "SMFR_gumbel-s3", "memory")


def test_no_data(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "run")
    nowhere = {"FASTMOD_DATA": str(tmp_path / "nowhere")}
    refused(study("bpmnist", *out, hooks=(no_mnist_package(),), env=nowhere), "MNIST", "nowhere", "FASTMOD_DATA")
    refused(study("bpmnist", *out, hooks=(no_mnist_package(),), env={"FASTMOD_DATA": ""}), "MNIST", "FASTMOD_DATA")
    data = digits(tmp_path / "digits")
    refused(study("bpmnist", "--set", f"data={data}", *out), "sha256")
    (data / "train-labels-idx1-ubyte").unlink()
    refused(study("bpmnist", "--set", f"data={data}", *out), "train-labels-idx1-ubyte")
    assert not (tmp_path / "run").exists()


def test_data_gone_when_resumed(tmp_path: Path) -> None:
    data = digits(tmp_path / "digits")
    args = (*arguments("bpmnist"), "--set", f"data={data}", "--out", tmp_path / "run")
    assert study(*args, hooks=(ticks(), kill("told SMFR_bias-s0 6"))).killed
    shutil.rmtree(data)
    before = contents(tmp_path / "run")
    refused(study("--resume", tmp_path / "run"), str(data))
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("jobs", [1, 2])
def test_loss_that_is_no_number(tmp_path: Path, jobs: int) -> None:
    args = ["doubleadd", "--model", "FNN", "--seeds", "0-1", "--set", "lr=1e25", "--set", "batch=2"]
    hooks = (forked_jobs(),) if jobs > 1 else ()
    done = study(*args, "--jobs", str(jobs), "--out", tmp_path / "run", hooks=hooks)
    refused(done, "FNN-s0: the loss is ", "at step 50", "lr")
    assert not list((tmp_path / "run" / "checkpoints").iterdir()), "nothing of it is kept"


def test_out_that_is_in_use(tmp_path: Path) -> None:
    before = contents(untouched("doubleadd"))
    refused(study("algo", "--out", untouched("doubleadd")), "not an empty folder", "--resume")
    assert contents(untouched("doubleadd")) == before
    (tmp_path / "file").write_text("mine")
    refused(study("algo", "--out", tmp_path / "file"), "not an empty folder")
    refused(study("algo", "--out", tmp_path / "file" / "run"), "Not a directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_empty_and_missing_folders_are_used(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "not" / "yet" / "there"):
        assert study(*arguments("doubleadd"), "--out", out, hooks=(kill("after config.json"),)).killed
        assert (out / "config.json").exists()
        (out / "config.json").unlink()
        shutil.rmtree(out / "checkpoints")
        shutil.rmtree(out / "figures")
        shutil.rmtree(out / "metrics")


def test_parent_that_takes_no_folders() -> None:
    refused(study("algo", "--out", "/proc/run"), "/proc/run")


def test_folder_that_may_not_be_written(read_only: Path) -> None:
    refused(
        study("algo", "--out", read_only / "run", hooks=(unprivileged(),)), "Permission denied", str(read_only / "run")
    )


def test_run_that_may_not_be_written(read_only: Path) -> None:
    read_only.chmod(0o755)
    run = shutil.copytree(untouched("doubleadd"), read_only / "run")
    for path in [read_only, run, *run.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = contents(run)
    refused(study("--resume", run, hooks=(unprivileged(),)), "Permission denied", f"--resume {run}")
    refused(fastmod("inspect", run, hooks=(unprivileged(),)), "Permission denied")
    assert contents(run) == before


# ---- resume


@pytest.mark.parametrize(
    "option",
    [("--model", "FNN"), ("--seeds", "1"), ("--steps", "50"), ("--set", "lr=1"), ("--quick",), ("--noisy",),
     ("--out", "/tmp/x"), ("--jobs", "2"), ("--jobs", "1"), ("--device", "cpu")],
    ids=" ".join,
)  # fmt: skip
def test_resume_takes_no_other_option(option: tuple[str, ...]) -> None:
    before = contents(untouched("doubleadd"))
    refused(in_process("study", "--resume", untouched("doubleadd"), *option), "--resume", "no other option")
    assert contents(untouched("doubleadd")) == before


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", Path("/no/such/run")):
        refused(study("--resume", path), "no config.json")
    (tmp_path / "file").touch()
    refused(study("--resume", tmp_path / "file"), "Not a directory")
    (tmp_path / "config.json").write_text("{}")
    refused(study("--resume", tmp_path), "config.json")


def test_resume_with_the_name_of_the_study(tmp_path: Path) -> None:
    run = shutil.copytree(untouched("doubleadd"), tmp_path / "run")
    refused(study("algo", "--resume", run), "is a run of 'doubleadd', not of 'algo'")
    assert study("doubleadd", "--resume", run, hooks=(without_figures(),)).code == 0


@pytest.mark.parametrize("args", [("--jobs", "0"), ("--jobs", "two"), ("--steps", "many"), ("--nonsense",), ("a", "b")])
def test_usage(args: tuple[str, ...], tmp_path: Path) -> None:
    done = in_process("study", "algo", *args, "--out", tmp_path / "run")
    assert done.code == 2 and "Traceback" not in done.err and not (tmp_path / "run").exists(), done.text


# ---- display


def progress(step: int, steps: int = 100, **others: Any) -> Progress:
    return Progress("SMFR-s0", step, steps, seconds=1.0, rate=50.0, **others)


@pytest.mark.parametrize("terminal", [True, False])
def test_display(terminal: bool) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=terminal, record=True, width=200)
        with Display(console, 1) as display:
            display(progress(50))
            display(progress(60, metrics={"loss": 0.25, "accuracy": 0.5, "hidden": 1.0}))
            display(progress(70, steps=70, metrics={"loss": float("nan")}, finished=True))  # it shrinks in addmul
        shown = console.export_text()
    assert "SMFR-s0" in shown and "70/70" in shown and "50 steps/s" in shown and "loss nan" in shown
    if not terminal:
        first, last = shown.splitlines()
        assert first.endswith("0:01 left") and last.endswith("done"), "a line now and then, and one at the end"


def test_display_that_fails_ends_all_jobs(tmp_path: Path) -> None:
    """As a pipe that is closed; otherwise the jobs would wait for ever for somebody to listen."""
    run = tmp_path / "run"
    args = (*arguments("doubleadd"), "--steps", "4000", "--set", "evaluate_every=4000", "--jobs", "2", "--out", run)
    refused(study(*args, hooks=(forked_jobs(), full_disk("told .*", 3))), "No space left", f"--resume {run}")
    steps = [line["step"] for line in RunFolder(run).metrics()]
    assert 4000 not in steps


# ---- inspect


@pytest.mark.slow
def test_inspect(quick: Path) -> None:
    done = fastmod("inspect", quick)
    assert done.code == 0 and not done.err, done.text
    path = quick / "figures" / "routing-SMFR-s0.png"
    assert f"heat maps: {path}\n" in done.out
    assert path.read_bytes().startswith(PNG)
    rules = [line for line in done.out.splitlines() if ":= " in line]
    assert len(rules) == 10 and all(len(re.findall(r" \d\.\d\d", rule)) == 6 for rule in rules)
    # Shares of all routing, so they are 1 together but for rounding.
    assert sum(float(share) for share in re.findall(r" (\d\.\d\d)", rules[0])) == pytest.approx(1, abs=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["addmul", "bpmnist"])
def test_inspect_other_studies(tmp_path: Path, name: str) -> None:
    run = shutil.copytree(untouched(name), tmp_path / "run")
    done = fastmod("inspect", run)
    assert done.code == 0, done.text
    assert [path.name for path in (run / "figures").glob("routing-SMFR_*.png")], done.text
    tasks = registry.get(name).blocks[0]
    assert all(task in done.out for task in tasks)


def test_inspect_refuses(tmp_path: Path) -> None:
    refused(fastmod("inspect", tmp_path), "no config.json")
    refused(fastmod("inspect", tmp_path / "nothing"), "no config.json")
    refused(fastmod("inspect", untouched("doubleadd"), "--trial", "FNN-s3"), "--trial FNN-s3", "SMFR_gumbel-s3")
    refused(fastmod("inspect", untouched("doubleadd"), "--trial", "SMFR_gumbel-s9"), "--trial SMFR_gumbel-s9")
    fresh = tmp_path / "fresh"
    assert study(*arguments("doubleadd"), "--out", fresh, hooks=(ticks(), kill("told SMFR_gumbel-s3 4"))).killed
    refused(fastmod("inspect", fresh), "no SMFR with a checkpoint")
    refused(fastmod("inspect", fresh, "--trial", "SMFR_gumbel-s3"), "no such checkpoint")
    plain = tmp_path / "plain"
    sizes = [part for size in ("batch=2", "chunk=2", "evaluate_every=2") for part in ("--set", size)]
    args = ("doubleadd", "--model", "FNN", "--seeds", "0", "--steps", "2", *sizes, "--out", plain)
    assert study(*args, hooks=(without_figures(),)).code == 0
    refused(fastmod("inspect", plain), "no SMFR with a checkpoint")
    refused(fastmod("inspect", plain, "--trial", "FNN-s0"), "--trial FNN-s0", "none")
