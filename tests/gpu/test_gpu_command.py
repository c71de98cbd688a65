"""``fastmod compile``: its manifest, what a second run spares, and what it says when something is missing."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

pytest.importorskip("triton", reason="Triton is for Linux")

from fastmod.gpu import compile as compiling
from fastmod.gpu import discover, manifest, tools, worker
from fastmod.gpu.targets import TARGETS
from tests.helpers.study_commands import Finished, in_process, refused

TARGET_OPTIONS = ("--target", "sm_90", "--target", "gfx942")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


def compile_into(folder: Path, *options: object) -> Finished:
    return in_process("compile", "--out", folder, "--op", "range_penalty", "--jobs", 1, *(options or TARGET_OPTIONS))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One op for two makers, compiled by two processes."""
    folder = tmp_path_factory.mktemp("made") / "kernels"
    done = compile_into(folder, *TARGET_OPTIONS, "--jobs", 2)
    assert done.code == 0, done.text
    assert "gfx942" in done.out and " 0 reused" in done.out, done.text
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / manifest.NAME).read_text())


def test_the_manifest_is_complete(made: Path) -> None:
    found = told(made)
    assert found["failed"] == {} and found["versions"]["triton"] and found["versions"]["ptxas for sm_90"]
    names = {name for name in discover.specialisations() if name.startswith("range_penalty.")}
    for target in ("sm_90", "gfx942"):
        assert {k["name"] for k in found["kernels"] if k["target"] == target and k["source"] == "triton"} == names
    for kernel in found["kernels"]:
        assert set(kernel) == {field.name for field in fields(manifest.Kernel)}
        assert kernel["registers"] > 0 and kernel["spills"] == 0 and kernel["symbol"]
        assert manifest.sha256(made / kernel["file"]) == kernel["sha256"]
        assert (made / kernel["file"]).read_bytes()[:4] == b"\x7fELF"
        if kernel["source"] == "triton":
            assert kernel["signature"]["SIZE"] == "i64" and kernel["constants"]["BLOCK"] == 1024
    named = {made / kernel["file"] for kernel in found["kernels"]} | {made / manifest.NAME}
    assert named == {path for path in made.rglob("*") if path.is_file()}  # nothing else is left behind


@needs_nvcc
def test_the_manifest_has_the_cuda_part(made: Path) -> None:
    found = {k["name"] for k in told(made)["kernels"] if k["source"] == "cuda"}
    assert {f"range_penalty.finish_kernel<{t}>" for t in ("float", "double")} < found
    assert len(found) == 10 and told(made)["left_out"] == []
    assert {k["target"] for k in told(made)["kernels"] if k["source"] == "cuda"} == {"sm_90"}


def test_a_second_run_compiles_nothing(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "run", None)
    before = told(copy)
    done = compile_into(copy)
    assert done.code == 0 and "0 compiled, 1" in done.out, done.text
    assert told(copy) == before
    done = compile_into(copy, "--target", "gfx942")  # what is there of other targets stays
    assert done.code == 0 and "kernels by calls of compilers, 0 compiled, 8 reused" in done.out, done.text
    assert told(copy)["kernels"] == before["kernels"]


@pytest.mark.parametrize("harm", ["gone", "damaged", "key"])
def test_what_changed_is_compiled_again(copy: Path, harm: str) -> None:
    before = told(copy)
    victim = next(k for k in before["kernels"] if k["name"] == "range_penalty.forward_kernel.fp32")
    file = copy / victim["file"]
    if harm == "gone":
        file.unlink()
    elif harm == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    else:  # as if another version had made it
        changed = json.loads(json.dumps(before).replace(victim["key"], "0" * 64))
        (copy / manifest.NAME).write_text(json.dumps(changed))
    done = compile_into(copy)
    assert done.code == 0 and "1 compiled, 1" in done.out, done.text
    assert manifest.sha256(file) == victim["sha256"]
    assert told(copy) == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "kernels": [{}]}', '{"format": 0, "kernels": []}'])
def test_a_damaged_manifest_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.NAME).write_text(text)
    assert manifest.read(tmp_path) == []


def test_a_stopped_run_keeps_what_it_has(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = told(copy)["kernels"]
    for kernel in kept:
        if kernel["target"] == "gfx942":
            (copy / kernel["file"]).unlink()
    calls: list[worker.Job] = []
    run = worker.run

    def stopping(job: worker.Job, folder: Path) -> worker.Done:
        calls.append(job)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(job, folder)

    monkeypatch.setattr(worker, "run", stopping)
    done = compile_into(copy)
    assert done.code == 130 and "stopped; what was compiled is kept" in done.out, done.text
    assert len([k for k in told(copy)["kernels"] if k["target"] == "gfx942"]) == 2


def test_a_failure_is_told_and_the_rest_is_made(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "gfx942/triton/range_penalty.forward_kernel.fp32.hsaco").unlink()

    def failing(*_: object) -> None:
        raise ValueError("at 3:4:\nerror: no such thing")

    monkeypatch.setattr(worker, "_triton", failing)
    done = compile_into(copy)
    assert done.code == 1, done.text
    assert done.err == "failed: range_penalty.forward_kernel.fp32 for gfx942: error: no such thing\n"
    assert list(told(copy)["failed"]) == ["range_penalty.forward_kernel.fp32 for gfx942"]


def test_spills_are_told(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = manifest.read(copy)
    (copy / manifest.NAME).write_text((copy / manifest.NAME).read_text().replace('"spills": 0', '"spills": 8', 1))
    done = compile_into(copy)
    assert done.code == 0 and done.err == f"spills: {kernels[0].name} for {kernels[0].target}, 8 bytes\n", done.text


# ---- what is missing or wrong: one line


def test_unknown_target(tmp_path: Path) -> None:
    refused(compile_into(tmp_path, "--target", "sm_42"), "--target sm_42", ", ".join(TARGETS))


def test_unknown_op(tmp_path: Path) -> None:
    refused(in_process("compile", "--target", "sm_90", "--out", tmp_path, "--op", "nope"), "--op nope", "multiplex")


def test_no_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    refused(compile_into(tmp_path), "no triton", "fastmod[triton]")


def test_the_interpreter_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refused(compile_into(tmp_path), "TRITON_INTERPRET is set")


@pytest.mark.parametrize(
    ("tool", "target"), [("ptxas", "sm_90"), ("ptxas-blackwell", "sm_120"), ("cuobjdump", "sm_90")]
)
def test_no_assembler(tool: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs, name = tools.triton().knobs, tool.replace("-", "_")
    knob = vars(type(knobs.nvidia)).get(name)
    if knob is None:
        pytest.skip(f"this triton has one ptxas, and no {tool}")
    monkeypatch.setattr(knob, "default_path", str(tmp_path / "nowhere"))
    refused(compile_into(tmp_path, "--target", target), f"no {tool}", f"TRITON_{name.upper()}_PATH")


def test_no_nvcc(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(copy))
    done = compile_into(copy)
    assert done.code == 0 and not done.err, done.text
    assert "left out: CUDA C++ kernels: no nvcc: put the CUDA toolkit on PATH or set CUDA_HOME\n" in done.out
    assert "0 compiled, 16 reused" in done.out, done.text


@needs_nvcc
def test_nvcc_of_another_age(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "nvcc_targets", lambda _: frozenset({"sm_80"}))
    done = compile_into(copy)
    assert done.code == 0 and "CUDA C++ kernels for sm_90: nvcc " in done.out and " does not know it" in done.out


def test_no_sources(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "CUDA_SOURCES", copy / "nowhere")
    done = compile_into(copy)
    assert done.code == 0 and "left out: CUDA C++ kernels: no csrc/cuda beside the package" in done.out, done.text


def test_triton_begins_with_sm_80(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "CUDA_SOURCES", tmp_path / "nowhere")
    done = compile_into(tmp_path, "--target", "sm_75")
    assert done.code == 0 and "left out: Triton kernels for sm_75: Triton begins with sm_80" in done.out, done.text
    assert told(tmp_path)["kernels"] == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(compile_into(tmp_path / "file"), "--out", "file: File exists")
    refused(compile_into(tmp_path / "file" / "folder"), "--out", "Not a directory")


def test_a_folder_without_permission(read_only: Path) -> None:
    own = os.geteuid()
    if own == 0:  # who may write anywhere
        os.seteuid(65534)
    try:
        refused(compile_into(read_only / "folder"), "--out", "Permission denied")
        refused(compile_into(read_only), "--out", "Permission denied")
    finally:
        os.seteuid(own)


def test_progress_is_told(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    compiling.build(
        ["gfx942"], tmp_path, ops=["range_penalty"], listener=lambda *now: seen.append(now)
    )  # fmt: skip
    assert [done for done, _, _ in seen] == list(range(1, 9))
    assert {total for _, total, _ in seen} == {8} and all(name.endswith(" gfx942") for _, _, name in seen)
