"""What the ops on images of several experts share: layout, checks of per-channel tensors, gradients on demand.

Images are ``[B, E, C, H, W]``; results lie in memory as ``[B, E, H, W, C]``, so that the channels of a pixel, which a
convolution reads together, are neighbours. Images ``[B, C, H, W]`` are shared by all experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmod.ops import _checks


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """``[..., C, H, W]`` with the channels innermost in memory.

    Not a permuted view of another tensor: autograd forbids writing in place into a view returned by one of our ops.
    """
    strides, step = [0] * len(shape), 1
    for dim in (-3, -1, -2, *range(-4, -len(shape) - 1, -1)):
        strides[dim] = step
        step = step * (shape[dim] if isinstance(shape[dim], torch.SymInt) else max(shape[dim], 1))
    return like.new_empty_strided(tuple(shape), tuple(strides))


def per_channel(value: Tensor) -> Tensor:
    """``[..., C]`` in a shape that multiplies images ``[..., C, H, W]``."""
    return value[..., None, None]


def check_images(name: str, value: Tensor, form: str = "[B, E, C, H, W]") -> None:
    _checks.float_tensor(name, value, 5, form)
    if value.dim() != 5:
        raise ValueError(f"{name}: expected {form}, got shape {_checks.shape(value)}")


def check_affine(
    scale_name: str, scale: Tensor | None, shift_name: str, shift: Tensor | None, x: Tensor, experts: int, form: str
) -> None:
    """Check scale and shift: both or none, ``[E, C]`` (``[C]`` for shared images), of any floating-point dtype."""
    if (scale is None) != (shift is None):
        raise ValueError(f"{scale_name}, {shift_name}: expected both or none, got only one")
    channels = x.shape[-3]
    for name, value in ((scale_name, scale), (shift_name, shift)):
        if value is None:
            continue
        _checks.float_tensor(name, value, 1, form)
        if value.device != x.device:
            raise RuntimeError(f"{name}: expected the device of the images ({x.device}), got {value.device}")
        allowed = [[experts, channels]] + ([[channels]] if x.dim() == 4 else [])
        if _checks.shape(value) not in allowed:
            raise ValueError(f"{name}: expected {form} = {allowed[0]}, got shape {_checks.shape(value)}")


def affine(value: Tensor | None, x: Tensor) -> Tensor | None:
    """In the form that kernels take: ``[E or 1, C]`` in the compute dtype."""
    if value is None:
        return None
    wide = _checks.compute_dtype(x)
    value = value if value.dtype == wide else value.to(wide)
    return value if value.dim() == 2 else value.unsqueeze(0)


def blanks(tensors: Sequence[Tensor | None], needs: Sequence[bool], images: Sequence[int]) -> list[Tensor]:
    """For the fakes: gradients of ``tensors``, channels innermost for those at ``images``; empty where not needed."""
    first = tensors[0]
    assert first is not None
    found = []
    for i, (tensor, need) in enumerate(zip(tensors, needs, strict=True)):
        if not need or tensor is None:
            found.append(first.new_empty(0))
        else:
            found.append(empty(tensor, tensor.shape) if i in images else tensor.new_empty(tensor.shape))
    return found


def chosen(values: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(value for value, need in zip(values, needs, strict=True) if need)


def zeros_unless(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad
