"""mfnnr, forward + backward: eager, torch.compile, fastmod."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fastmod
from bench._suite import measure
from fastmod.bench import baselines
from fastmod.bench.steps import Case, Step, module_steps

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture


def mfnnr(b: int, m: int, n: int, d: int, **options: Any) -> Case:
    def steps(*, compiled: bool) -> dict[str, Step]:
        torch.manual_seed(0)
        ours = fastmod.nn.MFNNR(m, n, d, threshold=None, **options)
        x, grad = torch.randn(b, m, d, requires_grad=True), torch.randn(b, n, d)

        def twin() -> nn.Module:
            return baselines.MFNNR(m, n, d, threshold=None, **{"hidden": 100, "layers": 1, **options})

        def forward(module: Callable[..., Any]) -> list[Tensor]:
            out = module(x)
            return [out[0] if isinstance(out, tuple) else out]

        return module_steps(ours, twin, forward, [grad], [x], compiled=compiled)

    extra = "".join(f" {name}={value}" for name, value in options.items())
    return Case("mfnnr", f"B{b} M{m} N{n} D{d}{extra}", None, steps)


CASES = (mfnnr(128, 8, 8, 10), mfnnr(1024, 8, 8, 10), mfnnr(128, 5, 4, 196, hidden=400, layers=4))
SMOKE = (mfnnr(3, 2, 3, 5),)


def test_mfnnr(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    measure(benchmark, case, contender)
