"""``fastmod doctor``: what it says, and with which exit code."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from fastmod import _extension, backend, cli, doctor
from fastmod.gpu import measure
from fastmod.samples import SAMPLES

run = CliRunner().invoke


def lines(report: doctor.Report) -> dict[tuple[str, str, str], doctor.Line]:
    return {(line.op, line.backend, line.device): line for line in report.lines}


def test_healthy_here() -> None:
    report = doctor.examine()
    assert report.healthy, report
    found = lines(report)
    assert len(found) == len(backend.OPS) * 3 * 2
    for op in backend.OPS:
        assert found[op, "native", "cpu"].state == doctor.OK
        assert "auto" in found[op, "native", "cpu"].detail
        assert found[op, "reference", "cpu"].state == doctor.OK


def test_every_op_has_samples() -> None:
    assert {sample.op for sample in SAMPLES} == set(backend.OPS)


@pytest.mark.slow
def test_triton_lines_run_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "fastmod", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    report = json.loads(result.stdout)
    states = {line["op"]: line for line in report["lines"] if (line["backend"], line["device"]) == ("triton", "cpu")}
    missing = {"inverted_residual"}  # has no Triton kernels
    expected = {op: doctor.UNAVAILABLE if op in missing else doctor.OK for op in backend.OPS}
    assert {op: line["state"] for op, line in states.items()} == expected, states
    assert result.returncode == 0


def test_table() -> None:
    result = run(cli.app, ["doctor"])
    assert result.exit_code == 0, result.output
    for word in ("torch", torch.__version__, "built: compiler", "multiplex", "mfnnr", "ok", "unavailable"):
        assert word in result.output


def test_json() -> None:
    report = json.loads(run(cli.app, ["doctor", "--json"]).output)
    assert report["healthy"] is True
    assert report["stamp"]["torch"] == torch.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert {line["state"] for line in report["lines"]} <= {doctor.OK, doctor.UNAVAILABLE}


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("fastmod.ops.gated_residual")
    right = module.reference

    def wrong(x: torch.Tensor, new: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return right(x, new, gate) * (1 if x.dtype == torch.float64 else 1.001)

    monkeypatch.setattr(module, "reference", wrong)
    line = doctor.examine_op("gated_residual", "reference", "cpu")
    assert line.state == doctor.FAILED
    assert "off by" in line.detail
    assert run(cli.app, ["doctor"]).exit_code == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_are_wrong(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    module = importlib.import_module("fastmod.ops.range_penalty")
    right = module.reference
    monkeypatch.setattr(
        module, "reference", lambda t, limit: right(t, limit) * (1 if t[0].dtype == torch.float64 else value)
    )
    assert doctor.examine_op("range_penalty", "reference", "cpu").state == doctor.FAILED


def test_an_exception_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no luck\nat all")

    monkeypatch.setattr(importlib.import_module("fastmod.ops.multiplex"), "reference", broken)
    line = doctor.examine_op("multiplex", "reference", "cpu")
    assert (line.state, line.detail) == (doctor.FAILED, "softmax: RuntimeError: no luck")


def test_no_extension_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_extension, "MODULE", None)
    monkeypatch.setattr(_extension, "LOADED", False)
    monkeypatch.setattr(_extension, "STATUS", "no compiled extension; build it with: make")
    report = doctor.examine()
    assert not report.healthy
    assert report.problems == [_extension.STATUS]
    found = lines(report)
    assert found["mfnnr", "native", "cpu"].state == doctor.FAILED
    assert found["mfnnr", "triton", "cpu"].state == doctor.UNAVAILABLE
    assert found["mfnnr", "reference", "cpu"].state == doctor.OK
    assert run(cli.app, ["doctor", "--json"]).exit_code == 1


def test_a_stamp_of_another_build_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = _extension.built_stamp()
    assert stamp is not None
    monkeypatch.setattr(_extension, "built_stamp", lambda: {**stamp, "compiler": "another"})
    (problem,) = doctor.examine().problems
    assert "compiler" in problem
    assert "pip install" in problem


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Report(doctor.versions(), "", {}, "", [], []))


def test_full_report(brief: None) -> None:
    """One file with values, launches and times; without a GPU, of the CPU."""
    result = run(cli.app, ["doctor", "--full", "--op", "batch_affine", "--op", "multiplex"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["healthy"] and told["versions"]["torch"] == torch.__version__
    rows = {(row["op"], row["shape"], row["dtype"], row["contender"]): row for row in told["measured"]}
    row = rows["multiplex", "B128 M6 N8 D10", "fp32", "native"]
    assert row["error"] < 1e-5 and row["plain_error"] < 1e-5
    assert 0 < row["quartiles"][0] <= row["quartiles"][1] <= row["quartiles"][2]
    assert rows["multiplex", "B128 M6 N8 D10", "fp32", "plain"]["quartiles"]
    assert rows["multiplex", "B128 M6 N8 D10", "bf16", "native"]["error"] < 0.02
    assert not any(row["problem"] for row in rows.values())
    if not torch.cuda.is_available():
        assert told["graph_noise"] == {} and all(row["launches"] is None for row in rows.values())


def test_full_report_tells_what_fails(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = next(shape for shape in measure.SHAPES if shape.op == "batch_affine")

    def broken(tensors: object) -> list[torch.Tensor]:
        raise RuntimeError("it does not work\nat all")

    monkeypatch.setattr(measure, "SHAPES", (dataclasses.replace(shape, call=broken),))
    result = run(cli.app, ["doctor", "--full"])
    assert result.exit_code == 1
    problems = {row["contender"]: row["problem"] for row in json.loads(result.stdout)["measured"]}
    assert problems["native"] == "RuntimeError: it does not work" and problems["plain"] == ""


def test_a_wrong_value_is_a_problem() -> None:
    assert measure.judged(1e-6, 1e-6, torch.float32) == {"error": 1e-6, "plain_error": 1e-6}
    assert measure.judged(1e-3, 1e-6, torch.float32)["problem"].startswith("off by 1.0e-03")
    assert "problem" in measure.judged(float("nan"), 1e-6, torch.float32)


def test_full_report_of_an_unknown_op(brief: None) -> None:
    result = run(cli.app, ["doctor", "--full", "--op", "nothing"])
    assert result.exit_code == 2 and "--op nothing: expected one of batch_affine" in result.stderr
