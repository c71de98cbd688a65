"""The end of a residual block, and of a mixture of experts: ``norm_sum``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastmod import backend
from fastmod.ops import _autograd, _checks, _images
from fastmod.ops._samples import Sample


def norm_sum(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None = None,
    residual_scale: Tensor | None = None,
    residual_shift: Tensor | None = None,
    *,
    relu: bool = True,
    gate: Tensor | None = None,
) -> Tensor:
    """``relu(scale * x + shift + residual)``; with ``gate`` its sum over the experts, weighted by the gate.

    Args:
        x: ``[B, E, C, H, W]``.
        scale, shift: ``[E, C]``, of the batch norm of x.
        residual: ``[B, E, C, H, W]``, or ``[B, C, H, W]``, added for all E experts; None: zero.
        residual_scale, residual_shift: ``[E, C]``, of a batch norm of the residual; both or none.
        relu: whether negative sums become 0.
        gate: ``[B, E]``.

    Returns:
        ``[B, E, C, H, W]``, with ``gate`` ``[B, C, H, W]``; channels innermost in memory.
    """
    chosen = backend.resolve("norm_sum", x)
    if backend.checks_first(chosen):
        _check(x, scale, shift, residual, residual_scale, residual_shift, gate, relu)
    try:
        low: tuple[Any, ...] = (x, residual, gate)
        if backend.autocasts(x):
            low = backend.lowered(*low)
        scales = [_images.affine(t, x) for t in (scale, shift, residual_scale, residual_shift)]
        tensors: tuple[Any, ...] = (low[0], *scales[:2], low[1], *scales[2:], low[2])
        if chosen == "reference":
            with backend.reference_autocast(x):
                return reference(*tensors, relu)  # type: ignore[call-arg]
        return _run(chosen == "triton", *tensors, relu)
    except Exception:
        _check(x, scale, shift, residual, residual_scale, residual_shift, gate, relu)
        raise


def _check(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    residual_shift: Tensor | None,
    gate: Tensor | None,
    relu: bool,
) -> None:
    _checks.flag("relu", relu)
    _images.check_images("x", x)
    experts = x.shape[1]
    if scale is None or shift is None:
        raise TypeError("scale, shift: expected tensors [E, C], got None")
    _images.check_affine("scale", scale, "shift", shift, x, experts, "[E, C]")
    _images.check_affine("residual_scale", residual_scale, "residual_shift", residual_shift, x, experts, "[E, C]")
    if residual is None:
        if residual_scale is not None:
            raise ValueError("residual: expected a tensor beside residual_scale and residual_shift, got None")
    else:
        _checks.float_tensor("residual", residual, 4, "[B, E, C, H, W] or [B, C, H, W]")
        _checks.same_kind("x", x, "residual", residual)
        if _checks.shape(residual) not in (_checks.shape(x), [x.shape[0], *x.shape[2:]]):
            raise ValueError(
                f"residual: expected the shape of x, {_checks.shape(x)}, or that without E, "
                f"got shape {_checks.shape(residual)}"
            )
    if gate is not None:
        _checks.float_tensor("gate", gate, 2, "[B, E]")
        _checks.same_kind("x", x, "gate", gate)
        _checks.exact_shape("gate", gate, x.shape[:2], "[B, E]")


def reference(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    residual_shift: Tensor | None,
    gate: Tensor | None,
    relu: bool,
) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(x)
    total = x.to(wide) * _images.per_channel(scale) + _images.per_channel(shift)
    if residual is not None:
        other = (residual if residual.dim() == 5 else residual.unsqueeze(1)).to(wide)
        if residual_scale is not None and residual_shift is not None:
            other = other * _images.per_channel(residual_scale) + _images.per_channel(residual_shift)
        total = total + other
    if relu:
        total = total.relu()
    if gate is not None:
        total = (total * gate.to(wide)[:, :, None, None, None]).sum(1)
    return total.to(x.dtype)


def fake_forward(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    residual_shift: Tensor | None,
    gate: Tensor | None,
    relu: bool,
) -> Tensor:
    _checks.one_device(x, scale, shift, residual, residual_scale, residual_shift, gate)
    return _images.empty(x, x.shape if gate is None else (x.shape[0], *x.shape[2:]))


def fake_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    residual_scale: Tensor | None,
    residual_shift: Tensor | None,
    gate: Tensor | None,
    relu: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    tensors = (x, scale, shift, residual, residual_scale, residual_shift, gate)
    return _images.blanks(tensors, needs, images=(0, 3))


#: x [B, E, C, H, W]; scales and shifts [E, C] in the dtype of the sums; residual [B, E, C, H, W] or [B, C, H, W]; gate
#: [B, E] -> [B, E, C, H, W], with a gate [B, C, H, W]
FORWARD = _autograd.define(
    "norm_sum_forward(Tensor x, Tensor scale, Tensor shift, Tensor? residual, Tensor? residual_scale, "
    "Tensor? residual_shift, Tensor? gate, bool relu) -> Tensor",
    fake_forward,
)
#: gradients of the seven tensors, empty where not needed
BACKWARD = _autograd.define(
    "norm_sum_backward(Tensor grad, Tensor x, Tensor scale, Tensor shift, Tensor? residual, Tensor? residual_scale, "
    "Tensor? residual_shift, Tensor? gate, bool relu, bool[7] needs) -> Tensor[]",
    fake_backward,
)

_run = _autograd.from_kernels("NormSum", FORWARD, BACKWARD, reference, 7)

SAMPLES = (
    Sample(
        "norm_sum",
        "mixture, shared residual",
        ((2, 3, 5, 3, 4), (3, 5), (3, 5), (2, 5, 3, 4), (3, 5), (3, 5), (2, 3)),
        lambda t: [norm_sum(*t[:6], gate=t[6])],
    ),
    Sample(
        "norm_sum",
        "no residual, linear",
        ((3, 1, 7, 1, 5), (1, 7), (1, 7)),
        lambda t: [norm_sum(t[0], t[1], t[2], relu=False)],
    ),
)
