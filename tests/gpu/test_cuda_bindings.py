"""The bindings of csrc/cuda themselves, over the host harness, on CPU tensors: values against the fp64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastmod.ops._checks import FLOAT_DTYPES, compute_dtype
from fastmod.ops.mfnnr import NO_PENALTY
from tests.helpers.cuda_host import build_bindings
from tests.helpers.cuda_host.checks import (
    ARGMAX,
    F64,
    GUMBEL,
    SEED,
    Mask,
    assert_close,
    assert_same_masks,
    linears,
    mask_logits,
    random,
)
from tests.helpers.cuda_host.mfnnr import SMALL_MFNNR, Mfnnr, plain_mfnnr


@pytest.fixture(scope="module")
def bindings() -> Any:
    torch.ops.load_library(str(build_bindings()))
    return torch.ops.fastmod_cuda_host


def permuted(tensor: Tensor) -> Tensor:
    """The same values, dense but in another order in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_bound_sample_mask_off_the_grid(bindings: Any, dtype: torch.dtype) -> None:
    """A dense view may begin anywhere in memory: four weights at a time would be misaligned."""
    case = Mask(24, dtype)
    arguments = (0, case.samples, torch.tensor(SEED), case.stream)

    def shifted(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    logits, weight, grad = mask_logits(case), random(24, dtype=dtype), random(3, 24, dtype=dtype)
    want = bindings.sample_mask_forward(logits, weight, *arguments)
    assert_same_masks(bindings.sample_mask_forward(shifted(logits), weight, *arguments), want)
    assert_same_masks(bindings.sample_mask_forward(logits, shifted(weight), *arguments), want)
    inputs = [grad, logits, weight, weight]
    want = bindings.sample_mask_backward(*inputs[:3], *arguments, 1.0, inputs[3])
    for i in range(4):
        moved = [shifted(t) if i == j else t for j, t in enumerate(inputs)]
        got = bindings.sample_mask_backward(*moved[:3], *arguments, 1.0, moved[3])
        torch.testing.assert_close(got, want, equal_nan=True, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_bound_sample_mask_refuses(bindings: Any) -> None:
    logits, seed = random(4, 3), torch.tensor(SEED)
    noise = (0, 2, seed, 1)
    with pytest.raises(ValueError, match="weight: expected the shape of logits"):
        bindings.sample_mask_forward(logits, logits[1:], *noise)
    with pytest.raises(TypeError, match="seed: expected an int64 0-d tensor"):
        bindings.sample_mask_forward(logits, None, 0, 2, torch.tensor(1.0), 1)
    with pytest.raises(ValueError, match="samples: expected at least 1"):
        bindings.sample_mask_forward(logits, None, 0, 0, seed, 1)
    for grad in (random(3, 4, 3), random(2, 3, 4), random(4, 3)):
        with pytest.raises(ValueError, match="grad: expected"):
            bindings.sample_mask_backward(grad, logits, None, *noise, 1.0, None)
    with pytest.raises(ValueError, match="tau: expected a number > 0"):
        bindings.sample_mask_backward(random(2, 4, 3), logits, None, *noise, 0.0, None)
    with pytest.raises(ValueError, match="base: expected the shape of logits"):
        bindings.sample_mask_backward(random(2, 4, 3), logits, None, *noise, 1.0, logits[1:])


@pytest.fixture
def tf32_as_before() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("tf32_as_before")
def test_bound_masked_linear_uses_tf32_where_torch_allows_it(bindings: Any) -> None:
    x, weight, grad, seed = random(32, 64), random(24, 64, seed=1), random(32, 24, seed=2), torch.tensor(SEED)
    sure = torch.full_like(weight, 50.0)  # every weight is kept
    exact = [x.double() @ weight.double().T, grad.double() @ weight.double(), grad.double().T @ x.double()]
    errors = []
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        found = bindings.masked_linear_forward(x, weight, sure, None, seed, 2, 0, None)
        gradients = bindings.masked_linear_backward(grad, x, weight, sure, seed, 2, 1.0, [True, True, False], 0, None)
        got = [found, gradients[0], gradients[1]]
        errors.append([(a - b).abs().max().item() for a, b in zip(got, exact, strict=True)])
    for precise, coarse, values in zip(*errors, exact, strict=True):
        assert 20 * precise < coarse < 2**-9 * values.abs().max().item()


def test_bound_masked_linear_refuses(bindings: Any) -> None:
    x, weight, seed = random(4, 3), random(5, 3), torch.tensor(SEED)
    with pytest.raises(ValueError, match=r"biases: expected \[2, 5\]"):
        bindings.masked_linear_forward(x, weight, weight, random(5), seed, 2, 0, None)
    with pytest.raises(ValueError, match="multiple of 3 samples"):
        bindings.masked_linear_forward(x, weight, weight, None, seed, 3, 0, None)
    with pytest.raises(ValueError, match="grad: expected"):
        bindings.masked_linear_backward(random(4, 4), x, weight, weight, seed, 2, 1.0, [True] * 3, 0, None)
    with pytest.raises(ValueError, match="tau: expected a number > 0"):
        bindings.masked_linear_backward(random(4, 5), x, weight, weight, seed, 2, 0.0, [True] * 3, 0, None)


BOUND_MFNNR = [
    SMALL_MFNNR,
    SMALL_MFNNR._replace(dtype=F64, mode=GUMBEL),
    SMALL_MFNNR._replace(dtype=F64, context=False, mode=ARGMAX),
    SMALL_MFNNR._replace(threshold=NO_PENALTY),
    SMALL_MFNNR._replace(route=(130,), update=(140, 3)),
    SMALL_MFNNR._replace(route=(130,), update=(140, 3), dtype=F64, mode=GUMBEL, context=False),
    SMALL_MFNNR._replace(route=(130,), threshold=NO_PENALTY),
    SMALL_MFNNR._replace(sizes=(0, 3, 4, 5)),
    SMALL_MFNNR._replace(dtype=torch.bfloat16),
    SMALL_MFNNR._replace(dtype=torch.bfloat16, route=(130,), update=(132, 140), context=False),
    SMALL_MFNNR._replace(dtype=torch.float16, route=(130,)),
]


@pytest.mark.parametrize("case", BOUND_MFNNR, ids=Mfnnr.id)
def test_bound_mfnnr(bindings: Any, case: Mfnnr) -> None:
    draws = [bound_mfnnr(bindings, case, 100 * i) for i in range(4 if case.dtype == torch.float32 else 1)]
    for name in draws[0]:
        # Some gradients are of few numbers: test_cuda_host.py compares more draws.
        scale = float(case.sizes[0] * case.sizes[2]) if name.endswith("grad_tau") else 0.0
        looser = {"factor": 4, "roundings": 4} if "grad" in name else {}
        assert_close(name, [draw[name] for draw in draws], scale=scale, **looser)


def bound_mfnnr(bindings: Any, case: Mfnnr, draw: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Results by name, each as ``assert_close`` wants it."""
    results: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    batch, m, n, d = case.sizes
    dtype, tau, seed = case.dtype, torch.tensor(0.75), torch.tensor(SEED)
    wide = compute_dtype(torch.empty(0, dtype=dtype))
    x = permuted(random(batch, m, d, dtype=dtype, seed=draw))
    route = linears(m * d, [*case.route, m * n], dtype, seed=draw + 10)
    update = linears((n + m if case.context else n) * d, [*case.update, n * d + n], dtype, seed=draw + 20)
    grad_out = random(1, dtype=dtype, seed=draw).expand(batch, n, d)
    grad_penalty = torch.tensor(0.3, dtype=wide)
    routing = (tau, 1.0, seed, case.mode, case.context, case.threshold)
    *values, saved = bindings.mfnnr_forward(x, route, update, *routing, True, None)
    rows = sum(bias.numel() for bias in [*route[1::2], *update[1::2]]) + n * d
    assert saved.shape == (rows * -(-batch // 64) * 64,)
    assert saved.dtype == wide
    *again, nothing = bindings.mfnnr_forward(x, route, update, *routing, False, None)
    assert nothing.numel() == 0
    assert all(map(torch.equal, values, again))

    before = saved.clone()
    for grads in ((grad_out, grad_penalty), (grad_out, None), (None, grad_penalty)):
        got = bindings.mfnnr_backward(*grads, x, route, update, *routing, saved, True, True, None)
        grad_of_x, grad_of_tau = bindings.mfnnr_backward(*grads, x, route, update, *routing, saved, True, False, None)
        assert torch.equal(grad_of_x, got[0])
        assert torch.equal(grad_of_tau, got[1])
        empty, *rest = bindings.mfnnr_backward(*grads, x, route, update, *routing, saved, False, True, None)
        assert empty.numel() == 0
        assert all(map(torch.equal, rest, got[1:]))
        no_x, only_tau = bindings.mfnnr_backward(*grads, x, route, update, *routing, saved, False, False, None)
        assert no_x.numel() == 0
        assert torch.equal(only_tau, got[1])
        assert saved.nan_to_num().equal(before.nan_to_num())  # its padding may hold anything
        flat = None if grads[0] is None else grad_out.flatten(1)
        exact, usual = (plain_mfnnr(case, x, route, update, 0.75, kind, True, flat, grads[1]) for kind in (F64, dtype))
        usual[5] = usual[5].to(wide)  # gradient of tau
        names = ["out", "penalty", "logits", "gate", "grad_x", "grad_tau"]
        names += [f"grad_route[{i}]" for i in range(len(route))] + [f"grad_update[{i}]" for i in range(len(update))]
        values = [t.flatten(1) if t.dim() > 1 else t for t in values]
        for name, *three in zip(names, [*values, *got], exact, usual, strict=True):
            assert three[0].dtype == three[2].dtype, name
            if name == "grad_tau" and three[0].dtype == torch.float32:  # as above
                torch.testing.assert_close(three[0].double(), three[1].double(), rtol=1e-5, atol=1e-5)
            else:
                of = " and ".join(["out"] * (grads[0] is not None) + ["penalty"] * (grads[1] is not None))
                results[f"{of}: {name}"] = (three[0], three[1], three[2])
    return results
