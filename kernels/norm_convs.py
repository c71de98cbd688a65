"""Launchers of several convolutions with their batch norms, see ``fastmod/ops/_norm_convs.py``, over the kernels of
``norm_conv``: one launch each forward and two backward. In Triton they do not share a launch."""

from __future__ import annotations

from collections.abc import Sequence

from fastmod.kernels.batch_affine import batch_affine_backward, batch_affine_forward
from fastmod.kernels.norm_conv import Norm, NormGrad, launch_backward, launch_forward
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype
from fastmod.ops._norm_convs import INPUTS, MOST, OUTPUTS


def norm_convs_forward(
    tensors: Sequence[Tensor | None], running: Sequence[Tensor], forms: Sequence[int], numbers: Sequence[float]
) -> tuple[Tensor, ...]:
    """The results of each convolution; running statistics are updated."""
    left, results = list(running), []
    for i in range(len(tensors) // INPUTS):
        x, weight, scale, shift, gate, bias, residual, *parameters = tensors[INPUTS * i : INPUTS * (i + 1)]
        relu, stride, depthwise, normed, tracked = forms[5 * i : 5 * (i + 1)]
        assert x is not None and weight is not None
        if residual is not None:
            raise ValueError("residual: expected none, as it is added before")
        norm, given, kept = None, [left.pop(0) for _ in range(tracked + 1 if tracked else 0)], []
        if normed:
            wide = compute_dtype(x)
            expected = tuple(weight.shape[:2])
            for t in (*parameters, *given[:2]):
                if t is not None and tuple(t.shape) != expected:
                    raise ValueError(f"norm: expected shape {expected}, got {tuple(t.shape)}")
            kept = [t.contiguous() for t in given[:2]]
            moved = [None, None] if x.shape[0] == 0 or not kept else kept
            scale_of_norm, shift_of_norm = (x.new_empty(expected, dtype=wide) for _ in range(2))
            counter = given[2] if len(given) > 2 else None
            momentum, eps = numbers[2 * i : 2 * (i + 1)]
            norm = Norm(*parameters, *moved, counter, momentum, eps, scale_of_norm, shift_of_norm)
        y, mean, var = launch_forward(
            x, weight, scale, shift, gate, bias, bool(relu), stride, bool(depthwise), bool(normed), norm
        )
        affine: tuple[Tensor, ...] = (x.new_empty(0), x.new_empty(0))
        if norm is not None:
            affine = (norm.scale, norm.shift)
            if y.numel() == 0:
                affine = batch_affine_forward(mean, var, *parameters, None, None, 0.0, 0.0, norm.eps)
                if norm.batches is not None:
                    norm.batches.add_(1)
        for own, copied in zip(given, kept, strict=False):
            if own is not copied:
                own.copy_(copied)
        results += [y, x.new_empty(0), mean, var, *affine]
    return (*results, *(results[0].new_empty(0) for _ in range(MOST * OUTPUTS - len(results))))


def norm_convs_backward(
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    forms: Sequence[int],
    numbers: Sequence[float],
    needs: Sequence[int],
) -> list[Tensor]:
    """Gradients of all tensors; empty where not needed."""
    results: list[Tensor] = []
    for i in range(len(tensors) // INPUTS):
        x, weight, scale, shift, gate, _, _, *parameters = tensors[INPUTS * i : INPUTS * (i + 1)]
        y, _, mean, var, norm_scale, _ = kept[OUTPUTS * i : OUTPUTS * (i + 1)]
        of_y, _, of_scale, of_shift = grads[4 * i : 4 * (i + 1)]
        relu, stride, depthwise, *_ = forms[5 * i : 5 * (i + 1)]
        own = [bool(need) for need in needs[INPUTS * i : INPUTS * (i + 1)]]
        assert x is not None and weight is not None and of_y is not None
        of_norm = [x.new_empty(0), x.new_empty(0)]
        norm, eps = None, numbers[2 * i + 1]
        if of_scale is not None and of_shift is not None:
            of_norm = [
                mean.new_empty(mean.shape, dtype=t.dtype) if t is not None and need else mean.new_empty(0)
                for t, need in zip(parameters, own[7:], strict=True)
            ]
            norm = NormGrad(var, norm_scale, eps, *(t if t.numel() else None for t in of_norm))
        of_statistics = (of_shift, of_scale, y, mean) if norm is not None else (None, None, None, None)
        found = launch_backward(
            of_y, *of_statistics, x, weight, scale, shift, gate, bool(relu), stride, bool(depthwise), own[:6], norm
        )
        if norm is not None and any(own[7:]) and (x.shape[0] == 0 or not (own[1] or own[5])):
            assert of_scale is not None and of_shift is not None
            *_, of_weight, of_bias = batch_affine_backward(of_scale, of_shift, mean, var, parameters[0], eps)
            for to, value in zip(of_norm, (of_weight, of_bias), strict=True):
                if to.numel():
                    to.copy_(value)
        results += [*found, x.new_empty(0), *of_norm]
    return results


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """Those of ``norm_conv``: there are no other kernels."""
    return []
