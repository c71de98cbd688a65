"""The input of a squeeze-excite: ``norm_pool``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastmod import backend
from fastmod.ops import _autograd, _checks, _images
from fastmod.ops._samples import Sample


def norm_pool(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = True) -> Tensor:
    """Mean over the pixels of ``relu(scale * x + shift)``, in one pass over x.

    Args:
        x: ``[B, E, C, H, W]``.
        scale, shift: ``[E, C]``, of the batch norm of x.
        relu: whether negative values become 0.

    Returns:
        ``[B, E, C]``.
    """
    chosen = backend.resolve("norm_pool", x)
    _check(x, scale, shift, relu)
    wide = _images.affine(scale, x), _images.affine(shift, x)
    if backend.autocasts(x):
        (x,) = backend.lowered(x)
    if chosen == "reference":
        with backend.reference_autocast(x):
            return reference(x, *wide, relu)  # type: ignore[arg-type]
    return _run(chosen == "triton", x, *wide, relu)


def _check(x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> None:
    _checks.flag("relu", relu)
    _images.check_images("x", x)
    if 0 in x.shape[3:]:
        raise ValueError(f"x: expected [B, E, C, H, W] with at least one pixel, got shape {_checks.shape(x)}")
    if scale is None or shift is None:
        raise TypeError("scale, shift: expected tensors [E, C], got None")
    _images.check_affine("scale", scale, "shift", shift, x, x.shape[1], "[E, C]")


def reference(x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    value = x.to(_checks.compute_dtype(x)) * _images.per_channel(scale) + _images.per_channel(shift)
    return (value.relu() if relu else value).mean((-2, -1)).to(x.dtype)


def fake_forward(x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> Tensor:
    _checks.one_device(x, scale, shift)
    return x.new_empty(x.shape[:3])


def fake_backward(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool, needs: Sequence[bool]
) -> list[Tensor]:
    return _images.blanks((x, scale, shift), needs, images=(0,))


#: x [B, E, C, H, W]; scale and shift [E, C] in the dtype of the sums -> [B, E, C]
FORWARD = _autograd.define("norm_pool_forward(Tensor x, Tensor scale, Tensor shift, bool relu) -> Tensor", fake_forward)
#: gradients of the three tensors, empty where not needed
BACKWARD = _autograd.define(
    "norm_pool_backward(Tensor grad, Tensor x, Tensor scale, Tensor shift, bool relu, bool[3] needs) -> Tensor[]",
    fake_backward,
)

_run = _autograd.from_kernels("NormPool", FORWARD, BACKWARD, reference, 3)

SAMPLES = (
    Sample("norm_pool", "odd", ((2, 3, 5, 3, 2), (3, 5), (3, 5)), lambda t: [norm_pool(t[0], t[1], t[2])]),
    Sample(
        "norm_pool",
        "no relu",
        ((2, 1, 17, 2, 2), (1, 17), (1, 17)),
        lambda t: [norm_pool(t[0], t[1], t[2], relu=False)],
    ),
)
