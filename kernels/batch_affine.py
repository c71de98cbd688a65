"""Triton kernels and launchers of ``batch_affine``: one element per channel."""

from __future__ import annotations

import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, compute_type, divide, guard
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation

BLOCK = 128
#: One warp per program: a net has a few hundred channels.
SMALL_OPTIONS = {**OPTIONS, "num_warps": 1}


@triton.jit
def inverse_root(v):
    """``1 / sqrt(v)``, both rounded to nearest."""
    one = tl.full([], 1.0, v.dtype)
    return divide(one, tl.sqrt(v) if v.dtype == tl.float64 else tl.sqrt_rn(v))


@triton.jit
def moved(ptr, i, mask, value, momentum, RT: tl.constexpr):
    """Updates a running statistic towards ``value``, like torch.lerp. RT: dtype of the computation."""
    value = value.to(ptr.dtype.element_ty).to(RT)
    old = tl.load(ptr + i, mask=mask, other=0.0).to(RT)
    part = tl.full([], momentum, RT)
    way = value - old
    new = tl.where(part < 0.5, old + part * way, value - way * (1 - part))
    tl.store(ptr + i, new, mask=mask)


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    mean_ptr, var_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, scale_ptr, shift_ptr,
    bessel: tl.float64, momentum: tl.float64, eps: tl.float64, N: tl.int64,
    BLOCK: tl.constexpr, RT: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    mean = tl.load(mean_ptr + i, mask=mask, other=0.0)
    var = tl.load(var_ptr + i, mask=mask, other=1.0)
    scale = inverse_root(var + tl.full([], eps, CT))
    if weight_ptr is not None:
        scale *= tl.load(weight_ptr + i, mask=mask, other=0.0).to(CT)
    shift = -mean * scale
    if bias_ptr is not None:
        shift += tl.load(bias_ptr + i, mask=mask, other=0.0).to(CT)
    tl.store(scale_ptr + i, scale, mask=mask)
    tl.store(shift_ptr + i, shift, mask=mask)
    if running_mean_ptr is not None:
        moved(running_mean_ptr, i, mask, mean, momentum, RT)
        moved(running_var_ptr, i, mask, var * tl.full([], bessel, CT), momentum, RT)


@triton.jit(do_not_specialize=["N"])
def backward_kernel(
    grad_scale_ptr, grad_shift_ptr, mean_ptr, var_ptr, weight_ptr, dmean_ptr, dvar_ptr, dweight_ptr, dbias_ptr,
    eps: tl.float64, N: tl.int64, BLOCK: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    of_shift = tl.load(grad_shift_ptr + i, mask=mask, other=0.0)
    mean = tl.load(mean_ptr + i, mask=mask, other=0.0)
    of_scale = tl.load(grad_scale_ptr + i, mask=mask, other=0.0) - mean * of_shift
    inverse = inverse_root(tl.load(var_ptr + i, mask=mask, other=1.0) + tl.full([], eps, CT))
    scale = inverse
    if weight_ptr is not None:
        scale *= tl.load(weight_ptr + i, mask=mask, other=0.0).to(CT)
    tl.store(dmean_ptr + i, -scale * of_shift, mask=mask)
    tl.store(dvar_ptr + i, -0.5 * of_scale * scale * inverse * inverse, mask=mask)
    tl.store(dweight_ptr + i, of_scale * inverse, mask=mask)
    tl.store(dbias_ptr + i, of_shift, mask=mask)


def _flat(shape: tuple[int, ...], *tensors: Tensor | None) -> list[Tensor | None]:
    """Contiguous; refuses other shapes, which would be read beyond their end."""
    for tensor in tensors:
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"expected tensors of shape {list(shape)}, got {list(tensor.shape)}")
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def batch_affine_forward(
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: float,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """All of one shape -> scale and shift; running statistics are updated if they are given and count > 0."""
    scale, shift = mean.new_empty(mean.shape), mean.new_empty(mean.shape)
    moves = running_mean is not None and running_var is not None and count > 0
    running = (running_mean, running_var) if moves else (None, None)
    means, variances, weights, biases, *kept = _flat(mean.shape, mean, var, weight, bias, *running)
    if mean.numel() == 0:
        return scale, shift
    with guard(mean):
        forward_kernel[(triton.cdiv(mean.numel(), BLOCK),)](
            mean_ptr=means, var_ptr=variances, weight_ptr=weights, bias_ptr=biases, running_mean_ptr=kept[0],
            running_var_ptr=kept[1], scale_ptr=scale, shift_ptr=shift, bessel=count / (count - 1) if moves else 1.0,
            momentum=momentum, eps=eps, N=mean.numel(), BLOCK=BLOCK, CT=compute_type(mean),
            RT=tl.float32 if kept[0] is None else compute_type(kept[0]), **SMALL_OPTIONS,
        )  # fmt: skip
    for given, written in zip(running, kept, strict=True):
        if given is not None and written is not None and not given.is_contiguous():
            given.copy_(written)
    return scale, shift


def batch_affine_backward(
    grad_scale: Tensor, grad_shift: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of mean, var, weight and bias, in the dtype of mean."""
    found = [mean.new_empty(mean.shape) for _ in range(4)]
    tensors = _flat(mean.shape, grad_scale, grad_shift, mean, var, weight)
    if mean.numel() > 0:
        names = ("grad_scale_ptr", "grad_shift_ptr", "mean_ptr", "var_ptr", "weight_ptr")
        results = ("dmean_ptr", "dvar_ptr", "dweight_ptr", "dbias_ptr")
        with guard(mean):
            backward_kernel[(triton.cdiv(mean.numel(), BLOCK),)](
                **dict(zip(names, tensors, strict=True)), **dict(zip(results, found, strict=True)), eps=eps,
                N=mean.numel(), BLOCK=BLOCK, CT=compute_type(mean), **SMALL_OPTIONS,
            )  # fmt: skip
    return found[0], found[1], found[2], found[3]


# ---- What `fastmod compile` builds of this file, and the tests check


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Parameters have the dtype, statistics that of the sums; with and without running statistics."""
    p, w = dtype.pointer, dtype.wide_pointer
    shared = {"mean_ptr": w, "var_ptr": w, "weight_ptr": p, "BLOCK": BLOCK, "CT": dtype.compute}
    forward = {**shared, "bias_ptr": p, "scale_ptr": w, "shift_ptr": w, "RT": dtype.compute}
    backward = {**shared, **dict.fromkeys(("grad_scale_ptr", "grad_shift_ptr", "dmean_ptr", "dvar_ptr"), w)}
    backward = {**backward, "dweight_ptr": w, "dbias_ptr": w}
    moves = {**forward, "running_mean_ptr": p, "running_var_ptr": p}
    rests = {**forward, "running_mean_ptr": None, "running_var_ptr": None}
    return [
        Specialisation(forward_kernel, moves, SMALL_OPTIONS, "running"),
        Specialisation(forward_kernel, rests, SMALL_OPTIONS),
        Specialisation(backward_kernel, backward, SMALL_OPTIONS),
    ]
