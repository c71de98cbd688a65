"""Whole nets under MaskedModel, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bench._suite import measure
from bench.masked_nets import ViT, bert, depthwise, gpt2, llama, mlp, steps, tokens
from fastmod.bench.steps import Case

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def masked_model(label: str, target: float | None, make: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Case:
    return Case("masked_model", label, target, partial(steps, make, inputs))


CASES = (
    masked_model("GPT-2 4x256 B16 T8", 3.0, gpt2, tokens(8)),
    masked_model("GPT-2 4x256 B16 T32", 3.0, gpt2, tokens(32)),
    masked_model("BERT 4x256 B16 T8", 3.0, bert, tokens(8)),
    masked_model("Llama 4x256 B16 T8", 3.0, llama, tokens(8)),
    masked_model("Llama 4x256 B16 T32", 3.0, llama, tokens(32)),
    masked_model("ViT 4x256 B16 32 px", 3.0, ViT, lambda: torch.randn(16, 3, 32, 32)),
    masked_model("MLP 3x1024 B128", None, mlp, lambda: torch.randn(128, 1024)),
    masked_model("depthwise CNN B32", None, depthwise, lambda: torch.randn(32, 3, 32, 32)),
)
SMOKE = (masked_model("MLP 2x8 B8", None, lambda: mlp(2, 8), lambda: torch.randn(8, 8)),)


def test_masked_model(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
