"""Small runs of studies to test with, and what is compared of them."""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from tests.helpers.study_commands import fastmod, server
from tests.helpers.study_hooks import ticks, trace


def _settings(**values: Any) -> list[str]:
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


_TINY = _settings(batch=4, hidden=4, width=2, depth=1, layers=1, chunk=2, fnn_width=6, fnn_depth=1)
SMALL: dict[str, list[str]] = {
    "doubleadd": [
        "doubleadd", "--model", "SMFR_gumbel", "--model", "FNN", "--seeds", "3", "--steps", "12", *_TINY,
        *_settings(evaluate_every=4, checkpoint_seconds=3),
    ],
    # Passed at once, passed by the same preparation, never passed: every way from one stage to another.
    "addmul": [
        "addmul", "--model", "SMFR_gumbel", "--model", "FNN", "--seeds", "0", "--steps", "8", *_TINY,
        *_settings(evaluate_every=2, interference=4, thresholds="0,0.0001,1", lr=0.01, checkpoint_seconds=3),
    ],
    "algo": [
        "algo", "--model", "SMFR", "--seeds", "0-1", "--steps", "8", *_TINY,
        *_settings(evaluate_every=4, noisy="true", checkpoint_seconds=3),
    ],
    # The routing loss ends in the middle of a chunk and of the run.
    "bpmnist": [
        "bpmnist", "--model", "SMFR_bias", "--model", "Transformer", "--seeds", "0", "--steps", "8", *_TINY,
        *_settings(evaluate_every=4, width=4, bias_steps=3, verify="false", checkpoint_seconds=3, inner=4, heads=1,
                   transformer_layers=1),
    ],
}  # fmt: skip


def digits(folder: Path, train: int = 30, test: int = 20, side: int = 28) -> Path:
    """Made-up images in the files of MNIST."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        pixels = hashlib.shake_128(name.encode()).digest(count * side * side)
        header = struct.pack(">BBBBIII", 0, 0, 8, 3, count, side, side)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + pixels)
        labels = bytes(i % 10 for i in range(count))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels)
    return folder


def arguments(study: str) -> list[str]:
    return [*SMALL[study], *(["--set", f"data={_digits()}"] if study == "bpmnist" else [])]


@functools.cache
def _digits() -> Path:
    return digits(Path(server().folder, "digits"))


@functools.cache
def untouched(study: str) -> Path:
    """The small run of a study, from its beginning to its end in one go."""
    folder = Path(server().folder, f"untouched-{study}")
    done = fastmod("study", *arguments(study), "--out", folder, hooks=(ticks(), trace(folder.with_suffix(".moments"))))
    assert done.code == 0, done.text
    return folder


def moments(study: str) -> list[str]:
    """What happens in :func:`untouched`, in this order."""
    return untouched(study).with_suffix(".moments").read_text().splitlines()


# ---- what is compared


def states(folder: Path) -> dict[str, dict[str, Any]]:
    """Trial -> all that its checkpoint holds, except for the time it took."""
    import torch

    found = {}
    for file in sorted(folder.glob("checkpoints/*")):
        assert file.suffix == ".pt", f"left behind: {file}"
        state = torch.load(file, weights_only=True)["state"]
        state.pop("seconds")
        found[file.stem] = state
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """All that two equal runs have in common, byte for byte."""
    from fastmod.runs import checkpoint
    from fastmod.runs.folder import RunFolder

    result = json.loads((folder / "result.json").read_text())
    for trial in result["trials"]:
        del trial["seconds"]
    for row in result["table"]:
        del row["minutes"]
    del result["config"]["jobs"]
    result["config"]["versions"].pop("commit", None)  # files may be edited while tests run
    return {
        "metrics": [json.dumps(line) for line in RunFolder(folder).metrics()],
        "states": {name: checkpoint.digest(state) for name, state in states(folder).items()},
        "result": result,
        "figures": {file.name: file.read_bytes() for file in sorted(folder.glob("figures/*"))},
        "files": sorted(file.name for file in folder.iterdir()),
    }


def contents(folder: Path) -> dict[str, str]:
    """File -> hash, the lock aside, which says nothing."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "folder"
        for file in sorted(folder.rglob("*"))
        if file.name != ".lock"
    }
