"""The benchmarks run, on tiny cases: the check before the clock, the command, its JSON and the page made from it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner, Result

from fastmod import backend, cli, race
from fastmod.bench import baselines, checkout, clock, record, report, table
from fastmod.bench.checkout import BenchError
from fastmod.bench.record import Machine, Record
from fastmod.bench.steps import Case, RandomStep, Step

ROOT = Path(__file__).resolve().parents[2]
TINY = 1e-3  # seconds


def steps_of(ours: Tensor, plain: Tensor | None = None) -> Mapping[str, Step]:
    return {"eager": lambda: [torch.zeros(2) if plain is None else plain], "fastmod": lambda: [ours]}


def fake(label: str, ours: Tensor, target: float | None = None) -> Case:
    return Case("fake", label, target, lambda *, compiled: steps_of(ours))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The command's cases are these."""
    cases = [*checkout.smoke(), fake("wrong", torch.ones(2), 2.0)]
    monkeypatch.setattr(checkout, "cases", lambda: cases)
    return cases


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the command would have set: this process keeps its own."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    return chosen


def fastmod(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


# Cases


@pytest.mark.parametrize("case", checkout.smoke(), ids=lambda case: case.name)
def test_contenders_agree(case: Case) -> None:
    steps = case.steps(compiled=False)
    assert tuple(steps) == (("eager", "eager-last", "fastmod") if case.layouts else ("eager", "fastmod"))
    assert clock.worst_error(steps) < 1e-5


def test_cases_are_found() -> None:
    cases = checkout.cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.op for case in cases} == {
        *backend.OPS,
        "masked_model",
        "optim.Adam",
        "nn.Ensemble",
        "ResMixNet",
        "IsometricNet",
    }
    assert {case.op for case in checkout.smoke()} == {case.op for case in cases}


@pytest.mark.slow
def test_files_run() -> None:
    """The same cases under pytest-benchmark, its clock switched off."""
    words = ["bench", "-q", "--smoke", "--benchmark-disable", "-p", "no:xdist", "-k", "not compile"]
    result = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    contenders = sum(not name.startswith("compile") for case in checkout.smoke() for name in case.contenders)
    assert f"{contenders} passed" in result.stdout


# Clock


@pytest.mark.parametrize(
    ("ours", "error"),
    [
        (torch.tensor([0.0, 0.5]), 0.5),
        (torch.tensor([0.0, math.nan]), math.inf),
        (torch.zeros(3), math.inf),
    ],
)
def test_mismatch_gets_no_figure(ours: Tensor, error: float) -> None:
    found = clock.run(fake("wrong", ours, 2.0), compiled=False, seconds=TINY)
    assert found.error == error and not found.matches
    assert (found.times, found.ratio, found.missed, found.noisy) == ({}, None, False, False)
    assert [table.milliseconds(found, "eager"), table.ratio(found)] == ["-", "-"]


def test_a_random_step_is_compared_by_its_twin() -> None:
    steps = {name: RandomStep(lambda: [torch.rand(2)], lambda: [torch.ones(2)]) for name in ("eager", "fastmod")}
    assert clock.worst_error(steps) == 0


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def step(name: str, nanoseconds: int) -> Step:
        def run() -> list[Tensor]:
            calls.append(name)
            now[0] += nanoseconds / 1e9
            return []

        return run

    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    times = clock.interleaved({"a": step("a", 2000), "b": step("b", 10_000)}, seconds=TINY, per_call=2)
    assert {name: (t.lower, t.median, t.upper) for name, t in times.items()} == {"a": (1e-6,) * 3, "b": (5e-6,) * 3}
    turns = calls[10:]  # after the warm-up: five calls in a row, one of them not timed
    assert {turns[i : i + 5].count(turns[i]) for i in range(0, len(turns), 5)} == {5}
    assert times["a"].iterations == times["b"].iterations == 2 * len(turns) // 2 * 4 // 5 >= 60
    assert now[0] >= 2 * TINY


def result(label: str = "B1", *, ours: float = 1e-3, target: float | None = None, spread: float = 1.1) -> clock.Result:
    times = {"eager": 3e-3, "compile": 2e-3, "fastmod": ours}
    quartiles = {name: clock.Times(t, t, t * spread, 40) for name, t in times.items()}
    return clock.Result("fake", label, target, 1e-7, 1e-4, quartiles)


def test_ratio_is_against_the_better_baseline() -> None:
    assert result().ratio == pytest.approx(2)
    assert result(target=2.1).missed and not result(target=1.9).missed and not result().missed


def test_noisy() -> None:
    assert result(spread=1.6).noisy and not result(spread=1.4).noisy
    assert table.ratio(result(spread=1.6)) == "~2.00"
    assert "busy" in str(table.of([result(spread=1.6)], ["eager", "fastmod"]).caption)


@pytest.mark.parametrize(("seconds", "text"), [(0.2149, "215"), (4.2e-6, "0.00420"), (1e-3, "1.00"), (1.234, "1234")])
def test_milliseconds_have_three_digits(seconds: float, text: str) -> None:
    assert table.milliseconds(result(ours=seconds), "fastmod") == text


# Command


def test_whole_path(tiny: list[Case], threads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words, three contenders, table, JSON, page."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # without a compiler
    file = tmp_path / "new" / "figures.json"
    done = fastmod("bench", "multiplex", "linear", "algo", "--seconds", TINY, "--threads", 1, "--out", file)
    assert done.exit_code == 0, done.output
    assert threads == [1] and f"saved: {file}" in done.output and "yes" in done.output

    kept = json.loads(file.read_text())
    assert {row["op"] for row in kept["results"]} == {"multiplex", "masked_linear", "optim.Adam"}
    assert kept["threads"] == torch.get_num_threads() and kept["seconds"] == TINY and kept["isa"] != "none"
    assert kept["torch"] == torch.__version__ and set(kept["machine"]) == {"cpu", "cores", "os"}
    assert {"commit", "dirty", "date", "fastmod"} < set(kept)
    for row in kept["results"]:
        compiles = ["compile"] * (row["op"] != "optim.Adam")
        assert list(row["seconds"]) == ["eager", *compiles, "fastmod"]
        medians = {name: times["median"] for name, times in row["seconds"].items()}
        ratio = min(value for name, value in medians.items() if name != "fastmod") / medians["fastmod"]
        assert row["ratio"] == pytest.approx(ratio, abs=1e-3)
        assert row["matches"] and row["error"] <= row["tolerance"] and row["noisy"] in (True, False)
        for times in row["seconds"].values():
            assert 0 < times["lower"] <= times["median"] <= times["upper"] and times["iterations"] >= 30

    read = record.read(file)
    assert record.as_dict(read) == kept
    assert all(f"`{row['op']}` {row['label']} |" in report.page([read]) for row in kept["results"])


def test_a_wrong_result_is_told(tiny: list[Case], threads: list[int], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = fastmod("bench", "wrong", "--no-compile", "--seconds", TINY, "--out", file)
    assert done.exit_code == 1 and "NO 1e+00" in done.output
    (row,) = json.loads(file.read_text())["results"]
    assert (row["seconds"], row["ratio"], row["matches"], row["error"]) == ({}, None, False, 1.0)


def test_what_was_measured_before_a_crash_is_kept(tiny: list[Case], threads: list[int], tmp_path: Path) -> None:
    def crash(*, compiled: bool) -> Mapping[str, Step]:
        raise KeyboardInterrupt

    tiny[:] = [fake("first", torch.zeros(2)), Case("fake", "second", None, crash)]
    assert fastmod("bench", "--no-compile", "--seconds", TINY, "--out", tmp_path / "x.json").exit_code != 0
    assert [r.label for r in record.read(tmp_path / "x.json").results] == ["first"]


def test_words() -> None:
    cases = [fake("B1 M2", torch.zeros(2)), fake("B3", torch.zeros(2)), dataclasses.replace(race.CASES[0])]
    assert checkout.chosen(cases, []) == cases
    assert checkout.chosen(cases, ["m2", "SMFR"]) == [cases[0], cases[2]]
    with pytest.raises(BenchError, match=r"WORDS: expected part of an op or a label, got B9; ops: fake, smfr"):
        checkout.chosen(cases, ["B9"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing-like-it",), "error: WORDS: expected part of an op or a label, got nothing-like-it; ops: "),
        (("--seconds", "0"), "error: --seconds: expected a number above 0, got 0\n"),
        (("--seconds", "nan"), "error: --seconds: expected a number above 0, got nan\n"),
        (("--device", "tpu"), "error: --device: expected cpu or cuda, got tpu\n"),
        (("--report", "--save"), "error: --report: expected nothing beside it, as it measures nothing\n"),
        (("--out", str(ROOT / "bench")), f"error: --out: expected a file that can be written, got {ROOT / 'bench'}\n"),
    ],
)
def test_bad_arguments(tiny: list[Case], threads: list[int], words: tuple[str, ...], message: str) -> None:
    done = fastmod("bench", *words)
    assert done.exit_code == 2 and done.stderr.startswith(message), done.output
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(tiny: list[Case], threads: list[int]) -> None:
    done = fastmod("bench", "--device", "cuda")
    assert done.exit_code == 2 and done.stderr.startswith("error: --device cuda: expected a GPU, but "), done.output


def test_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed step begins and ends with an idle GPU."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))

    def step() -> list[Tensor]:
        told.append("step")
        return []

    clock.interleaved({"a": step}, seconds=TINY, least=4, device="cuda")
    after = told[told.index("wait") + 1 :]  # what comes before it warms up
    assert after[:5] == ["step", "wait", "step", "wait", "wait"]


def test_needs_a_checkout(tmp_path: Path) -> None:
    """Where a wheel puts it: there is no bench/ beside the package."""
    shutil.copytree(ROOT / "fastmod", tmp_path / "fastmod", ignore=shutil.ignore_patterns("__pycache__"))
    for words in (("-m", "fastmod", "bench"), ("-m", "fastmod.bench.report")):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: fastmod bench needs a checkout") and done.stderr.count("\n") == 1


@pytest.fixture
def small_race(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (3, 2, 4, 3, 1)
    monkeypatch.setattr(race, "CASES", (race.smfr(sizes, 5, 1.5, hidden=6), race.smfr(sizes, 5, threshold=0.1)))
    monkeypatch.setattr(cli, "console", Console(width=120))


@pytest.mark.usefixtures("small_race")
def test_race() -> None:
    done = fastmod("race", "--seconds", TINY)
    assert done.exit_code == 0, done.output
    assert done.output.count("yes ") == 2
    assert "3,2,4 w3 d1 h6 B5" in done.output


@pytest.mark.usefixtures("small_race")
def test_race_gives_no_figure_for_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "multiplex", lambda blocks, logits: logits.sigmoid().mT @ blocks)
    done = fastmod("race", "--seconds", TINY)
    assert done.exit_code == 1
    assert done.output.count("NO ") == 2
    assert "yes" not in done.output


# Record


def made(*results: clock.Result, **changes: Any) -> Record:
    one = Record(
        date="2026-01-02T03:04:05",
        commit="a" * 40,
        dirty=False,
        fastmod="0.1.0",
        torch="2.6.0",
        machine=Machine("Some CPU @ 3 GHz", 2, "Some OS"),
        isa="avx2",
        threads=2,
        seconds=3.0,
        results=results,
    )
    return dataclasses.replace(one, **changes)


def test_round_trip(tmp_path: Path) -> None:
    wrong = clock.Result("fake", "B2", None, math.inf, 1e-4, {})
    one = made(result(target=2.2), wrong, dirty=None, commit="unknown")
    record.write(tmp_path / "x.json", one)
    assert record.read(tmp_path / "x.json") == one
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_names_are_not_taken_twice(tmp_path: Path) -> None:
    for name in ("some-cpu-3-ghz-2026-01-02.json", "some-cpu-3-ghz-2026-01-02-2.json"):
        file = record.default_file(tmp_path, made())
        assert file.name == name
        file.touch()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": 1}', "KeyError"),
        ('{"format": 9}', "format 1, got 9"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BenchError, match=rf"^x\.json: expected .*{why}"):
        report.read_all(tmp_path)


def test_commit(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "docs").mkdir(parents=True)
    assert checkout.commit(top) == ("unknown", None)

    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return subprocess.run(["git", "-C", top, *who, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    assert checkout.commit(top) == ("unknown", None)
    (top / "code").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    sha = git("rev-parse", "HEAD").strip()
    assert checkout.commit(top) == (sha, False)
    (top / "docs" / "figures").write_text("1")
    assert checkout.commit(top) == (sha, False), "docs have no part in the speed"
    (top / "code").write_text("2")
    assert checkout.commit(top) == (sha, True)
    assert checkout.commit(top / "docs") == ("unknown", None), "somebody else's repository"


# Page


def test_page_of_nothing(tmp_path: Path) -> None:
    assert "No measurements yet" in report.page(report.read_all(tmp_path / "missing"))


def test_page(tmp_path: Path) -> None:
    wrong = clock.Result("fake", "B4", 1.5, 1.0, 1e-4, {})
    eager_alone = dataclasses.replace(result("B5"), times={k: v for k, v in result().times.items() if k != "compile"})
    files = {
        "old": made(result("B0"), result("B1"), commit="b" * 40, date="2026-01-01T00:00:00"),
        "first": made(result("B1", target=2.5), result("B2", target=3.0, spread=2)),
        "second": made(result("B1", ours=5e-4, target=2.5), wrong, eager_alone, date="2026-01-03T00:00:00"),
        "other": made(result("B6"), isa="avx512", dirty=True),
        "dirty": made(result("B7"), isa="avx512", dirty=True, date="2026-01-05T00:00:00"),
    }
    for name, one in files.items():
        record.write(tmp_path / f"{name}.json", one)
    page = report.page(report.read_all(tmp_path))
    assert page.startswith("<!-- Generated by")
    _, avx2, avx512 = page.split("\n## ")
    assert avx2 == (
        "Some CPU @ 3 GHz, 2 cores, Some OS; avx2 kernels, 2 threads\n"
        "\n"
        "Commit aaaaaaaaaaaa; fastmod 0.1.0, torch 2.6.0; 2026-01-02 to 2026-01-03.\n"
        "\n"
        "| case | eager | compile | fastmod | ratio | aim |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| `fake` B1 | 3.00 | 2.00 | 0.500 | 4.00 | 2.5 |\n"
        "| `fake` B2 | 3.00 | 2.00 | 1.00 | **~2.00** | 3 |\n"
        "| `fake` B4 | - | - | - | - | 1.5 |\n"
        "| `fake` B5 | 3.00 | - | 1.00 | 3.00 | - |\n"
        "\n"
        "Aims: 1 of 3 met. **Missed:** `fake` B2 (~2.00 of 3).\n"
        "\n"
        "Results differ, so no figures: `fake` B4.\n"
        "\n"
        "Commit bbbbbbbbbbbb; fastmod 0.1.0, torch 2.6.0; 2026-01-01. Not measured since:\n"
        "\n"
        "| case | eager | compile | fastmod | ratio | aim |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| `fake` B0 | 3.00 | 2.00 | 1.00 | 2.00 | - |\n"
        "\n"
        "No aim was set for any of these.\n"
    )
    assert "changes that are not committed" in avx512 and "B7" in avx512 and "B6" not in avx512


def test_the_page_is_what_the_files_give() -> None:
    written = (ROOT / report.PAGE).read_text(encoding="utf-8")
    assert written == report.page(report.read_all(ROOT / report.FOLDER)), "run `fastmod bench --report`"


def test_report_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bench/__init__.py", "pyproject.toml", "docs/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(checkout, "_BESIDE", tmp_path)
    record.check_place(tmp_path / "docs/speed/x.json")
    record.write(tmp_path / "docs/speed/x.json", made(result()))
    assert fastmod("bench", "--report").exit_code == 0
    assert "`fake` B1 | 3.00" in (tmp_path / "docs/speed.md").read_text()
