"""What the tests of the mask ops share: the noise contract written out once more, threads, processes of their own."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastmod
from fastmod import noise

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SEEDS = (0, 7, -3, 2**32 + 5, 2**63 - 1, -(2**63))
TAUS = (1.0, 0.5, 2.0)


def drawn(samples: int, numel: int, seed: int, *, stream: int = 1, first: int = 0) -> Tensor:
    """``word >> 9`` of every sample and weight, [S, P]: the contract without :func:`fastmod.noise.words`."""
    index = torch.arange(samples * numel)
    # In Python's integers, which cannot overflow: far out the index has more than 64 bits in a careless product.
    group = torch.tensor([(first * numel + i) // 4 for i in index.tolist()], dtype=torch.int64)
    place = torch.tensor([(first * numel + i) % 4 for i in index.tolist()], dtype=torch.int64)
    key = torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32 & 0xFFFFFFFF)
    counter = (group & 0xFFFFFFFF, group >> 32, torch.full_like(group, stream), torch.zeros_like(group))
    words = torch.stack(noise.philox4x32(counter, key), -1)
    return (words.gather(1, place[:, None]) >> 9).view(samples, numel)


def relaxed(logits: Tensor, samples: int, seed: int, tau: float, *, stream: int = 1) -> Tensor:
    """The relaxed sample in fp64, whose derivative the masks carry, [S, *logits.shape]."""
    u = (drawn(samples, logits.numel(), seed, stream=stream).double() + 0.5) * 2.0**-23
    return torch.sigmoid((logits.double() + (u / (1 - u)).log().view(samples, *logits.shape)) / tau)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_a_process(code: str) -> str:
    """What ``code`` prints in a process of its own: there a crash is a failed test and not the end of all tests."""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    return result.stdout


def random_tensor(choose: random.Random, *shapes: tuple[int, ...]) -> Tensor | None:
    """None, a tensor of one of ``shapes``, or one of any shape; mostly, not always, of floats on the CPU."""
    if choose.random() < 0.1:
        return None
    shape = choose.choice(shapes) if choose.random() < 0.8 else tuple(choose.choices(range(6), k=choose.randint(0, 4)))
    dtype = choose.choice([torch.float32] * 12 + [torch.float64, torch.bfloat16, torch.int64, torch.bool])
    return torch.zeros(shape, dtype=dtype, device="meta" if choose.random() < 0.03 else "cpu")


def random_seed(choose: random.Random) -> Tensor:
    return choose.choice([torch.tensor(3)] * 8 + [torch.tensor(3.0), torch.tensor([3]), torch.tensor(3, device="meta")])


def random_tau(choose: random.Random) -> float:
    return choose.choice([1.0] * 5 + [0.5, 0.0, -1.0, float("nan"), float("inf")])


def random_needs(choose: random.Random) -> list[bool]:
    """Which gradients are wanted, of five; sometimes one too few."""
    return [choose.random() < 0.7 for _ in range(choose.choice([5] * 9 + [4]))]


def fuzzed(choose: random.Random, calls: Sequence[Callable[[], object]]) -> None:
    """Calls of the raw ops, mostly wrong ones: each ends in a result or in an error."""
    results = 0
    for _ in range(1500):
        try:
            choose.choice(calls)()
            results += 1
        except Exception:  # any error will do, a crash will not
            continue
    assert results > 20, "hardly any call was right: the fuzz misses the kernels"


Wrong = tuple[Callable[[], object], type[Exception], str]  # a call, and the error that it ends in


def assert_message(case: Wrong, backend: str) -> None:
    call, error, pattern = case
    with fastmod.use_backend(backend), pytest.raises(error, match=pattern):
        call()


def _told(name: str, error: type[Exception], value: object) -> str:
    """A message names the argument, what was expected, and the value, or its type where that is wrong."""
    if error is ValueError:
        return f"{name}.*expected.*{re.escape(str(value))}"
    return f"{name}.*expected.*{'int' if name == 'samples' else 'float'}.*{type(value).__name__}"


def wrong_numbers(call: Callable[..., object], good: int = 2) -> dict[str, Wrong]:
    """Samples, temperatures and seeds that every mask op refuses alike; ``call(samples, **options)``."""
    samples: dict[type[Exception], Any] = {ValueError: (0, -1), TypeError: (True, 2.0, "2", None)}
    taus: dict[type[Exception], Any] = {
        ValueError: (0.0, -1, float("nan"), float("inf")),
        TypeError: ("1", True, torch.tensor(1.0)),
    }
    seeds: tuple[tuple[Any, type[Exception], str], ...] = (
        (1.5, TypeError, "seed.*float"),
        ("1", TypeError, "seed.*str"),
        (torch.tensor([1]), TypeError, r"seed.*0-d.*\[1\]"),
        (torch.tensor(1, device="meta"), RuntimeError, "seed.*cpu.*meta"),
        (2**63, ValueError, "seed.*64 bits"),
    )
    return {
        **{f"samples {v!r}": (lambda v=v: call(v), e, _told("samples", e, v)) for e, vs in samples.items() for v in vs},
        **{f"tau {v!r}": (lambda v=v: call(good, tau=v), e, _told("tau", e, v)) for e, vs in taus.items() for v in vs},
        **{f"seed {v!r}": (lambda v=v: call(good, seed=v), e, m) for v, e, m in seeds},
    }
