"""Triton kernels and launchers of ``sample_mask``: a program takes BLOCK weights through all samples.

Element p of sample s, of P weights, has the noise of index ``(first + s) * P + p``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import (
    OPTIONS,
    compute_type,
    divide,
    guard,
    key,
    noise_word,
    philox,
    seed_args,
    uniform_of,
)
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops.sample_mask import WORDS

ALL_WORDS = tl.constexpr(WORDS)
LN2_LOW = tl.constexpr(float.fromhex("-0x1.bd01p-13"))

#: Without fused products and sums: only then do masks agree with other backends bit for bit.
EXACT_OPTIONS: dict[str, Any] = {**OPTIONS, "enable_fp_fusion": False}


@triton.jit
def words_off(logit):
    """How many of the 2**23 noise values switch off a weight with this fp32 logit, as int32; for NaN all of them.

    The formula of ``csrc/constants.h``, operation by operation.
    """
    size = tl.abs(logit)
    d = tl.where(size < 32.0, size, 32.0)  # 32 for a NaN too, which must not be converted to an integer
    n = (d * 1.44269504088896341 + 0.5).to(tl.int32)
    whole = n.to(tl.float32)
    x = (whole * 0.693359375 - d) + whole * LN2_LOW
    p = x * 1.9875691500e-4 + 1.3981999507e-3
    p = p * x + 8.3334519073e-3
    p = p * x + 4.1665795894e-2
    p = p * x + 1.6666665459e-1
    p = p * x + 5.0000001201e-1
    p = (p * (x * x) + x) + 1.0
    a = p * ((127 - n) << 23).to(tl.float32, bitcast=True)  # 2**-n
    off = (tl.div_rn(a, a + 1.0) * 8388608.0 + 0.5).to(tl.int32)
    off = tl.where(logit < 0, ALL_WORDS - off, off)
    return tl.where(logit == logit, off, ALL_WORDS)


@triton.jit
def noise_words(seed, start, stream, QUADS: tl.constexpr, BLOCK: tl.constexpr):
    """The words of elements ``start .. start + BLOCK - 1``. QUADS: start is a multiple of 4, so that one Philox call
    gives the words of four elements."""
    if QUADS:
        c0, c1, c2, c3 = philox(seed, start // 4 + tl.arange(0, BLOCK // 4), stream)
        return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    return noise_word(seed, start + tl.arange(0, BLOCK), stream)


@triton.jit(do_not_specialize=["first"])  # masked layers increase it: each value would be compiled again
def forward_kernel(
    logits_ptr, weight_ptr, out_ptr, seed_ptr, seed_value: tl.int64, stream: tl.int64, first: tl.int64,
    samples: tl.int64, P: tl.int64, QUADS: tl.constexpr, BLOCK: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``out[s, p] = mask * weight[p]``, or the mask alone."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    inside = i < P
    logit = tl.load(logits_ptr + i, mask=inside, other=0.0).to(tl.float32)
    off = words_off(logit)
    seed = key(seed_ptr, seed_value)
    value = tl.full([BLOCK], 1.0, CT)
    if weight_ptr is not None:
        value = tl.load(weight_ptr + i, mask=inside, other=0.0).to(CT)
    value = tl.where(logit == logit, value, float("nan"))  # a NaN must not become a confident mask
    for s in range(samples):
        words = noise_words(seed, (first + s) * P + begin, stream, QUADS, BLOCK)
        keep = tl.where((words >> 9).to(tl.int32) >= off, 1.0, 0.0).to(CT)
        # A product, not a choice: 0 * inf is NaN as in torch.
        tl.store(out_ptr + s * P + i, keep * value, mask=inside)


@triton.jit
def slope_at_one(u, logit, decay):
    """``s * (1 - s)`` at temperature 1: with ``decay = exp(-|l|)`` and u measured from the side that l favours,
    ``s = u / (u + decay * (1 - u))``."""
    low = logit < 0
    v = 1.0 - u  # exact
    favoured, against = tl.where(low, v, u), tl.where(low, u, v)
    total = favoured + decay * against
    return divide(favoured * against * decay, total * total)


@triton.jit
def slope_at(u, logit, tau):
    """``s * (1 - s) / tau`` of ``s = sigmoid((l + log(u / (1 - u))) / tau)``."""
    z = divide(logit + (tl.log(u) - tl.log(1.0 - u)), tau)
    e = tl.exp(-tl.abs(z))
    return divide(divide(e, (1.0 + e) * (1.0 + e)), tau)


@triton.jit(do_not_specialize=["first"])
def backward_kernel(
    grad_ptr, logits_ptr, weight_ptr, base_ptr, dlogits_ptr, seed_ptr, seed_value: tl.int64, stream: tl.int64,
    first: tl.int64, samples: tl.int64, tau: tl.float64, P: tl.int64,
    AT_ONE: tl.constexpr, QUADS: tl.constexpr, BLOCK: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """``dlogits[p] = base[p] + weight[p] * sum over s of grad[s, p] * slope``; AT_ONE: tau is 1."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    inside = i < P
    logit = tl.load(logits_ptr + i, mask=inside, other=0.0).to(CT)
    decay = tl.exp(-tl.abs(logit))
    seed = key(seed_ptr, seed_value)
    total = tl.zeros([BLOCK], CT)
    for s in range(samples):
        u = uniform_of(noise_words(seed, (first + s) * P + begin, stream, QUADS, BLOCK), CT)
        slope = slope_at_one(u, logit, decay) if AT_ONE else slope_at(u, logit, tl.full([], tau, CT))
        total += tl.load(grad_ptr + s * P + i, mask=inside, other=0.0).to(CT) * slope
    if weight_ptr is not None:
        total *= tl.load(weight_ptr + i, mask=inside, other=0.0).to(CT)
    if base_ptr is not None:
        total += tl.load(base_ptr + i, mask=inside, other=0.0).to(CT)
    tl.store(dlogits_ptr + i, total, mask=inside)


def tile(weights: int, wide: tl.dtype) -> dict[str, Any]:
    """Constants for a launch over ``weights`` elements."""
    return {"QUADS": weights % 4 == 0, "BLOCK": 512 if wide == tl.float64 else 1024, "CT": wide}


def sample_mask_forward(
    logits: Tensor, weight: Tensor | None, first: int, samples: int, seed: Tensor, stream: int
) -> Tensor:
    """logits and weight of one shape -> ``[samples, *shape]``."""
    out = torch.empty((samples, *logits.shape), dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    weights = logits.numel()
    constants = tile(weights, compute_type(logits))
    with guard(logits):
        forward_kernel[(triton.cdiv(weights, constants["BLOCK"]),)](
            logits_ptr=logits.contiguous(), weight_ptr=None if weight is None else weight.contiguous(), out_ptr=out,
            stream=stream, first=first, samples=samples, P=weights, **seed_args(seed), **constants, **EXACT_OPTIONS,
        )  # fmt: skip
    return out


def sample_mask_backward(
    grad: Tensor,
    logits: Tensor,
    weight: Tensor | None,
    first: int,
    samples: int,
    seed: Tensor,
    stream: int,
    tau: float,
    base: Tensor | None,
) -> Tensor:
    """grad ``[samples, *shape]`` -> gradient of the logits, plus ``base``."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel() == 0:
        return out
    weights = logits.numel()
    constants = tile(weights, compute_type(logits))
    with guard(logits):
        backward_kernel[(triton.cdiv(weights, constants["BLOCK"]),)](
            grad_ptr=grad.contiguous(), logits_ptr=logits.contiguous(),
            weight_ptr=None if weight is None else weight.contiguous(),
            base_ptr=None if base is None else base.contiguous(), dlogits_ptr=out, stream=stream, first=first,
            samples=samples, tau=tau, P=weights, AT_ONE=tau == 1.0, **seed_args(seed), **constants, **OPTIONS,
        )  # fmt: skip
    return out


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """One Philox call per weight or, in quads, per four weights."""
    p = dtype.pointer
    found = []
    for weights in (1000, 1001):
        quads = weights % 4 == 0
        name = "quads" if quads else "words"
        shared = {"logits_ptr": p, "seed_ptr": "*i64" if quads else None, **tile(weights, dtype.compute)}
        forward = {**shared, "weight_ptr": p if quads else None, "out_ptr": p}
        found.append(Specialisation(forward_kernel, forward, EXACT_OPTIONS, name))
        for at_one in (True, False):
            optional = p if quads == at_one else None
            backward = {
                **shared, "grad_ptr": p, "weight_ptr": optional, "base_ptr": optional, "dlogits_ptr": p,
                "AT_ONE": at_one,
            }  # fmt: skip
            found.append(Specialisation(backward_kernel, backward, OPTIONS, f"{name}-{'one' if at_one else 'any'}"))
    return found
