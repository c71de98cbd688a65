"""Checks of the CUDA C++ kernels of ``masked_linear`` against fp64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmod import noise
from fastmod.ops._checks import compute_dtype
from fastmod.ops.masked_linear import reference
from tests.helpers.cuda_host import Harness, Out
from tests.helpers.cuda_host.checks import F32, F64, INF, NAN, SEED, Results, assert_draws_close, gradients, random


class MaskedLinear(NamedTuple):
    sizes: tuple[int, int, int]  # rows of a sample, out, in
    dtype: torch.dtype = F32
    samples: int = 2
    tau: float = 1.0
    biased: bool = True
    pointer: bool = False  # the seed in device memory
    needs: tuple[bool, bool] = (True, True)  # gradients of weight and logits
    first: int = 0  # sample of the noise
    special: bool = False  # NaN and infinite logits, a weight that is NaN

    def id(self) -> str:
        options = f"S{self.samples}-tau{self.tau:g}{'-biased' * self.biased}{'-special' * self.special}"
        return "R{}-O{}-I{}".format(*self.sizes) + f"-{str(self.dtype)[6:]}-{options}"


def check_masked_linear(harness: Harness, case: MaskedLinear, draws: int = 1) -> None:
    found = [masked_linear_results(harness, case, draw) for draw in range(draws if case.dtype == F32 else 1)]
    assert_draws_close(found)


def masked_linear_results(harness: Harness, case: MaskedLinear, draw: int) -> Results:
    """Of the product with its bias, and of the gradients of x, weight and logits."""
    (rows, outputs, inputs), samples, dtype = case.sizes, case.samples, case.dtype
    shapes = [(samples, rows, inputs), (outputs, inputs), (outputs, inputs), (samples, outputs)]
    x, weight, logits, biases = (random(*shape, dtype=dtype, seed=10 * draw + i) for i, shape in enumerate(shapes))
    grad = random(samples, rows, outputs, dtype=dtype, seed=10 * draw + 5)
    if case.special:
        logits.view(-1)[:4] = torch.tensor([NAN, INF, -INF, 1e4], dtype=dtype)
        weight.view(-1)[-1] = NAN
    offsets = biases if case.biased else None
    seed = torch.tensor(SEED) if case.pointer else None
    noise_ints = [0, case.first, samples, noise.STREAM_MASK, 0 if case.pointer else SEED, rows, outputs, inputs, 0]
    options: dict[str, Any] = {"ints": noise_ints, "dtype": dtype}
    (out,) = harness.call(
        "masked_linear_forward", x, weight, logits, offsets, Out(samples, rows, outputs, dtype=dtype), seed, **options
    )
    (dx,) = harness.call(
        "masked_linear_backward_x", grad, weight, logits, Out(samples, rows, inputs, dtype=dtype), seed, **options
    )
    wanted = [Out(outputs, inputs, dtype=dtype) if needed else None for needed in case.needs]
    got = [out, dx]
    got += harness.call(
        "masked_linear_backward_weight", grad, x, weight, logits, *wanted, seed, floats=[case.tau], **options
    )

    def plain(*inputs: Tensor) -> Tensor:
        wide_x, *wide = (t.to(compute_dtype(t)) for t in inputs)
        flat = reference(wide_x.flatten(0, 1), *wide, None, None, torch.tensor(SEED), samples, case.tau, case.first)
        result = flat.view(samples, rows, outputs)
        return (result if offsets is None else result + offsets.to(result.dtype).unsqueeze(1)).to(inputs[0].dtype)

    exact, usual = (gradients(plain, [x, weight, logits, grad], kind) for kind in (F64, dtype))
    names = ["out", "grad_x", "grad_weight", "grad_logits"]
    kept = [True, True, *case.needs]
    results = [[value for value, keep in zip(values, kept, strict=True) if keep] for values in (exact, usual)]
    names = [name for name, keep in zip(names, kept, strict=True) if keep]
    return {name: (a, b, c) for name, a, b, c in zip(names, got, *results, strict=True)}
