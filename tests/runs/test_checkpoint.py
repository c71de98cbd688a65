"""Checkpoints: plain files that torch loads safely, written whole or not at all; bad and foreign ones are refused."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastmod.runs import checkpoint
from fastmod.runs.config import StudyError
from fastmod.runs.folder import RunFolder
from tests.helpers.study_commands import fastmod, in_process, refused
from tests.helpers.study_hooks import kill, ticks, without_figures
from tests.helpers.study_runs import arguments, contents, untouched

STATE = {
    "step": 7,
    "none": None,
    "text": "é\n",
    "numbers": [1, 2.5, float("inf"), True, (3, "x")],
    "weights": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "strided": torch.arange(12.0).view(3, 4).t(),
    "scalar": torch.tensor(4.0, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "half": torch.full((2,), 0.1, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "nested": {0: {"a": [torch.tensor([1, 2])]}, "b": {}},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "one.pt", "owner", STATE)
    return tmp_path / "one.pt"


# ---- reading and writing


def test_reads_what_was_written(file: Path) -> None:
    found = checkpoint.load(file, "owner")
    assert list(found) == list(STATE)
    assert checkpoint.digest(found) == checkpoint.digest(STATE)
    for name, value in STATE.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert found["numbers"] == STATE["numbers"] and found["text"] == "é\n"
    assert checkpoint.load(file)["step"] == 7, "without an owner, anybody's"
    assert os.listdir(file.parent) == ["one.pt"]


def test_plain_torch_reads_it(file: Path) -> None:
    found = torch.load(file, weights_only=True)
    assert found["format"] == checkpoint.FORMAT and found["owner"] == "owner" and found["state"]["step"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("study", ["doubleadd", "addmul", "bpmnist"])
def test_plain_torch_reads_a_run(study: str) -> None:
    """Also what studies keep beyond model and optimiser."""
    files = list((untouched(study) / "checkpoints").iterdir())
    assert len(files) == 2
    for one in files:
        state = torch.load(one, weights_only=True)["state"]
        assert {"step", "model", "optimizer", "generator", "extra", "metrics"} <= state.keys()
        assert all(isinstance(value, torch.Tensor) for value in state["model"].values())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(values, values)
def test_digest_tells_values_apart(one: Any, other: Any) -> None:
    assert (checkpoint.digest(one) == checkpoint.digest(other)) == (repr(one) == repr(other))


def test_digest_tells_tensors_apart() -> None:
    base = torch.zeros(4)
    variants = [
        base, base.double(), base.int(), base.view(2, 2), base[:3], torch.tensor([0.0, 0.0, 0.0, 1e-45]), -base,
        [base, base], torch.zeros(()), torch.zeros(0), torch.zeros(0, 4), base.to(torch.bfloat16), [0.0] * 4,
    ]  # fmt: skip
    assert len({checkpoint.digest(one) for one in variants}) == len(variants)
    assert checkpoint.digest(torch.arange(6.0).view(2, 3).t()) == checkpoint.digest(
        torch.arange(6.0).view(2, 3).t().contiguous()
    ), "a file does not keep strides"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_digest_is_that_of_the_bytes(dtype: torch.dtype) -> None:
    """As numpy has them, which the first checkpoints were sealed with."""
    made = torch.randn(3, 5).to(dtype)
    for value in (made, made.t(), made[:1, 2], torch.tensor(2.0).to(dtype)):
        head = f"tensor {dtype} {tuple(value.shape)}".encode()
        content = value.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        assert checkpoint.digest(value) == hashlib.sha256(head + content).hexdigest()


def test_digest_sees_a_sign_that_is_not_yet_in_the_bytes() -> None:
    number = torch.tensor([1 + 2j])
    assert number.conj().imag.is_neg() and number.conj().is_conj()
    assert checkpoint.digest(number.conj().imag) == checkpoint.digest(torch.tensor([-2.0]))
    assert checkpoint.digest(number.conj()) == checkpoint.digest(torch.tensor([1 - 2j]))


# ---- written whole or not at all


class Failing:
    """The module ``os`` with one function that fails."""

    def __init__(self, name: str, error: BaseException) -> None:
        self._name, self._error = name, error

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> None:
            raise self._error

        return fail if name == self._name else getattr(os, name)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    before = file.read_bytes()
    monkeypatch.setattr(checkpoint, "os", Failing(step, error))
    with pytest.raises(type(error)):
        checkpoint.save(file, "owner", {"step": 8})
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == ["one.pt"], "no half of a file stays behind"


def test_what_a_crash_left_is_no_obstacle(file: Path) -> None:
    file.with_name("one.pt.new").write_bytes(b"half a checkpo")
    checkpoint.save(file, "owner", {"step": 8})
    assert checkpoint.load(file, "owner") == {"step": 8}
    assert os.listdir(file.parent) == ["one.pt"]


def test_contents_reach_the_disk_before_the_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a file that has its name but not yet its contents would be lost."""
    calls: list[str] = []

    class Watching:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                what = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[0])
                calls.append(f"{name} {Path(what).name}")
                return getattr(os, name)(*args)

            return call if name in ("fsync", "replace") else getattr(os, name)

    monkeypatch.setattr(checkpoint, "os", Watching())
    checkpoint.save(file, "owner", {"step": 8})
    assert calls == ["fsync one.pt.new", "replace one.pt.new", f"fsync {file.parent.name}"]


# ---- damaged


def damages(content: bytes) -> dict[str, bytes]:
    text = io.BytesIO()
    torch.save({"weights": torch.ones(3)}, text)
    return {
        "empty": b"",
        "one byte": content[:1],
        "half": content[: len(content) // 2],
        "without its end": content[:-1],
        "text": b"step,loss\n1,0.5\n",
        "a word": b"hello",
        "zeros": bytes(len(content)),
        "a foreign checkpoint": text.getvalue(),
        "a bare tensor": saved(torch.ones(2)),
        "a list": saved([1, 2]),
        "another format": saved({"format": "fastmod-checkpoint-0", "owner": "owner", "digest": "", "state": {}}),
        "no state": saved({"format": checkpoint.FORMAT, "owner": "owner", "digest": ""}),
        "no digest": saved({"format": checkpoint.FORMAT, "owner": "owner", "state": {"step": 1}}),
        "a sparse tensor": saved(
            {"format": checkpoint.FORMAT, "owner": "owner", "digest": "0", "state": {"a": torch.ones(2, 2).to_sparse()}}
        ),
        "a pickle": pickle.dumps({"format": checkpoint.FORMAT}),
        "a zip file": zipped({"a.txt": b"hello"}),
        "an empty zip file": zipped({}),
    }


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return buffer.getvalue()


KINDS = tuple(damages(b"x" * 100))


@pytest.mark.parametrize("kind", KINDS)
def test_damaged(file: Path, kind: str) -> None:
    bad = damages(file.read_bytes())[kind]
    file.write_bytes(bad)
    with pytest.raises(StudyError, match=r"one\.pt") as caught:
        checkpoint.load(file, "owner")
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == bad


def test_no_flipped_bit_is_read(file: Path) -> None:
    """Wherever it is: refused, or in bytes that mean nothing, and then all is as it was."""
    content, expected, draw = file.read_bytes(), checkpoint.digest(STATE), random.Random(0)
    refusals = 0
    for place in draw.sample(range(len(content)), 250):
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        try:
            assert checkpoint.digest(checkpoint.load(file, "owner")) == expected, place
        except StudyError:
            refusals += 1
    assert refusals > 60


def test_no_flipped_bit_of_the_pickle_is_read(file: Path) -> None:
    """With the checksums of the zip file made right again: what torch unpickles then may be anything."""
    with zipfile.ZipFile(file) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    draw = random.Random(0)
    for place in draw.sample(range(len(members[name])), 250):
        changed = bytearray(members[name])
        changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(zipped(members | {name: bytes(changed)}))
        try:
            found = checkpoint.load(file, "owner")
        except StudyError:
            continue
        assert checkpoint.digest(found) == checkpoint.digest(STATE), place


def test_changed_number_in_a_sound_file(file: Path) -> None:
    """A file that torch finds in order, with one other weight."""
    whole = torch.load(file, weights_only=True)
    whole["state"]["weights"][0, 0] += 1e-3
    torch.save(whole, file)
    with pytest.raises(StudyError, match="damaged"):
        checkpoint.load(file, "owner")


def test_of_somebody_else(file: Path) -> None:
    with pytest.raises(StudyError, match="belongs to another run or other settings"):
        checkpoint.load(file, "other")


def test_missing_and_not_a_file(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.pt", tmp_path):
        with pytest.raises(StudyError, match=str(path)):
            checkpoint.load(path)


# ---- malicious


class Malice:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("container", ["torch", "legacy", "pickle", "state"])
def test_malicious_pickle_is_not_executed(tmp_path: Path, container: str) -> None:
    mark, file = tmp_path / "executed", tmp_path / "one.pt"
    evil: Any = Malice(mark)
    if container == "state":
        evil = {"format": checkpoint.FORMAT, "owner": "owner", "digest": "", "state": {"step": evil}}
    if container == "pickle":
        file.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, file, _use_new_zipfile_serialization=container != "legacy")
    with pytest.raises(StudyError):
        checkpoint.load(file)
    assert not mark.exists()
    torch.load(file, weights_only=False) if container != "pickle" else pickle.loads(file.read_bytes())
    assert mark.exists(), "the trap is one"


# ---- what a run makes of them


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first trial is finished and whose second is not; its metrics go beyond its checkpoint."""
    run = tmp_path_factory.mktemp("halfway") / "run"
    done = fastmod("study", *arguments("doubleadd"), "--out", run, hooks=(ticks(), kill("told FNN-s3 10")))
    assert done.killed
    return run


def assert_refused_untouched(run: Path, *words: str) -> None:
    before = contents(run)
    refused(in_process("study", "--resume", run), *words)
    assert contents(run) == before


@pytest.mark.parametrize("kind", KINDS)
def test_run_with_a_damaged_checkpoint(tmp_path: Path, halfway: Path, kind: str) -> None:
    """Of the second trial: the first must not be touched either."""
    run = shutil.copytree(halfway, tmp_path / "run")
    file = run / "checkpoints" / "FNN-s3.pt"
    file.write_bytes(damages(file.read_bytes())[kind])
    assert_refused_untouched(run, str(file))


def test_run_with_a_flipped_weight(tmp_path: Path, halfway: Path) -> None:
    run = shutil.copytree(halfway, tmp_path / "run")
    file = run / "checkpoints" / "FNN-s3.pt"
    weights = torch.load(file, weights_only=True)["state"]["model"]["layers.0.weight"].numpy().tobytes()
    content = bytearray(file.read_bytes())
    content[content.index(weights) + 5] ^= 4
    file.write_bytes(content)
    assert_refused_untouched(run, str(file))


def test_run_with_the_checkpoint_of_another_trial(tmp_path: Path, halfway: Path) -> None:
    run = shutil.copytree(halfway, tmp_path / "run")
    shutil.copy(run / "checkpoints" / "SMFR_gumbel-s3.pt", run / "checkpoints" / "FNN-s3.pt")
    assert_refused_untouched(run, "belongs to another run")


@pytest.mark.parametrize("option", [("--seeds", "4"), ("--set", "lr=0.5"), ("--set", "alternate_split=true")])
def test_run_with_the_checkpoint_of_another_run(tmp_path: Path, halfway: Path, option: tuple[str, str]) -> None:
    other = tmp_path / "other"
    args = ("study", *arguments("doubleadd"), *option, "--out", other)
    assert fastmod(*args, hooks=(ticks(), kill("told FNN-.* 8"))).killed
    run = shutil.copytree(halfway, tmp_path / "run")
    (foreign,) = other.glob("checkpoints/FNN-*.pt")
    shutil.copy(foreign, run / "checkpoints" / "FNN-s3.pt")
    assert_refused_untouched(run, "belongs to another run or other settings")


def test_run_with_other_settings_than_its_checkpoints(tmp_path: Path, halfway: Path) -> None:
    run = shutil.copytree(halfway, tmp_path / "run")
    plan = json.loads((run / "config.json").read_text())
    plan["settings"]["fnn_width"] = 7
    (run / "config.json").write_text(json.dumps(plan))
    assert_refused_untouched(run, "other settings")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("models", ["SMFR"], "SMFR"), ("device", "cuda:77", "cuda:77"), ("study", "nope", "unknown study"),
     ("seeds", "3", "config.json"), ("settings", {"lr": "fast"}, "lr"), ("settings", {"speed": 1}, "speed")],
)  # fmt: skip
def test_run_with_a_plan_that_cannot_be(tmp_path: Path, halfway: Path, key: str, value: Any, words: str) -> None:
    run = shutil.copytree(halfway, tmp_path / "run")
    plan = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(plan | {key: value}))
    refused(in_process("study", "--resume", run), words)


def test_run_with_malice(tmp_path: Path, halfway: Path) -> None:
    run = shutil.copytree(halfway, tmp_path / "run")
    torch.save(Malice(tmp_path / "executed"), run / "checkpoints" / "FNN-s3.pt")
    assert_refused_untouched(run, "FNN-s3.pt")
    done = fastmod("inspect", run)
    assert done.code == 0, "the SMFR is sound"
    torch.save(Malice(tmp_path / "executed"), run / "checkpoints" / "SMFR_gumbel-s3.pt")
    refused(fastmod("inspect", run), "SMFR_gumbel-s3.pt")
    assert not (tmp_path / "executed").exists()


def test_deleting_a_damaged_checkpoint_helps(tmp_path: Path, halfway: Path) -> None:
    """As the message says: the trial begins again."""
    from tests.runs.test_resume import assert_same_end

    run = shutil.copytree(halfway, tmp_path / "run")
    (run / "checkpoints" / "FNN-s3.pt").unlink()
    assert fastmod("study", "--resume", run, hooks=(ticks(), without_figures())).code == 0
    assert_same_end(run)


# ---- metrics


def line(trial: str, step: int) -> dict[str, Any]:
    return {"trial": trial, "model": "FNN", "seed": 0, "step": step, "loss": 0.1 * step}


@pytest.mark.parametrize("written", [0, 1, 30, -1])
def test_cut_line_does_not_take_others_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    """The disk is full for a moment: one job fails in the middle of its line, another goes on."""
    from fastmod.runs import folder as module

    class Filling:
        def write(self, handle: int, content: bytes) -> int:
            monkeypatch.setattr(self, "write", self.full, raising=False)
            return os.write(handle, content[:written])

        def full(self, handle: int, content: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    folder = RunFolder(tmp_path)
    folder.append(line("FNN-s0", 1))
    with monkeypatch.context() as patch:
        patch.setattr(module, "os", Filling())
        with pytest.raises(OSError, match="No space"):
            folder.append(line("FNN-s0", 2))
    for step in (1, 2, 3):
        folder.append(line("FNN-s1", step))
    expected = [line("FNN-s0", 1), *(line("FNN-s1", step) for step in (1, 2, 3))]
    whole = [line("FNN-s0", 2)] if written == -1 else []  # only its end was missing
    assert folder.metrics() == [*expected[:1], *whole, *expected[1:]]
    folder.rewind({"FNN-s0": 1, "FNN-s1": 2})
    assert folder.metrics() == expected[:3]
    assert folder.metrics_file("FNN-s0").read_text() == json.dumps(expected[0]) + "\n"


@pytest.mark.parametrize("rubbish", [b"\xff\xfe\x00", b"\x00" * 50, b"{", b"null", b"[1]", b'{"step": 1}', b"[" * 9999])
def test_rubbish_in_the_metrics(tmp_path: Path, rubbish: bytes) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.append(line("FNN-s0", step))
        with folder.metrics_file("FNN-s0").open("ab") as file:
            file.write(rubbish + b"\n")
    assert folder.metrics() == [line("FNN-s0", 1), line("FNN-s0", 2)]
    folder.rewind({"FNN-s0": 1})
    assert folder.metrics_file("FNN-s0").read_bytes() == json.dumps(line("FNN-s0", 1)).encode() + b"\n"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5))),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)),
)
def test_rewind_keeps_what_is_in_checkpoints(lines: list[tuple[str, int]], saved: dict[str, int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(Path(path))
        for trial, step in lines:
            folder.append(line(trial, step))
        folder.rewind(saved)
        kept = [line(trial, step) for trial, step in lines if step <= saved.get(trial, -1)]
        assert folder.metrics() == sorted(kept, key=lambda one: one["trial"]), "trial after trial, each in its order"
        before = {file: file.stat().st_ino for file in folder.metrics_folder.glob("*")}
        folder.rewind(saved)
        after = {file: file.stat().st_ino for file in folder.metrics_folder.glob("*")}
        assert after == before, "nothing to drop, nothing written"


def test_jobs_have_files_of_their_own(tmp_path: Path) -> None:
    """Lines of processes that write at the same time stay whole."""
    folder = RunFolder(tmp_path)
    children = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                for step in range(200):
                    folder.append(line(f"FNN-s{number}", step))
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    found = folder.metrics()
    assert len(found) == 600 and len(list(folder.metrics_folder.iterdir())) == 3
    for number, step in itertools.product(range(3), range(200)):
        assert [one for one in found if one["trial"] == f"FNN-s{number}"][step]["step"] == step
