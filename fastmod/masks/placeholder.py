"""A placeholder for a masked weight: layers with a fused op never see masked copies.

The net runs as it is written. Where it passes the placeholder to ``F.linear``, a convolution, ``torch.addmm`` (GPT-2's
Conv1D) or ``F.embedding``, the fused op takes over; anything else gets the masked weight as an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod import noise, ops
from fastmod._private import tree_map_only
from fastmod.masks.draw import Draw
from fastmod.ops.masked_linear import _masked_linear

#: Attributes that do not depend on the values of a tensor.
_FACTS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "grad")
)
_FACT_METHODS = frozenset(
    [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.stride]
    + [Tensor.is_contiguous, Tensor.ndimension, Tensor.nelement, Tensor.__len__, Tensor.element_size]
)


class Placeholder(Tensor):
    """Shape, dtype and device of a parameter, and how to draw it."""

    draw: Draw

    @staticmethod
    def of(draw: Draw) -> Placeholder:
        weight = draw.weight.t() if draw.transposed else draw.weight
        result = Tensor._make_wrapper_subclass(
            Placeholder,
            weight.shape,
            strides=weight.stride(),
            dtype=weight.dtype,
            device=weight.device,
            requires_grad=draw.logits.requires_grad and torch.is_grad_enabled(),
        )
        assert isinstance(result, Placeholder)
        result.draw = draw
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS or func in _FACT_METHODS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
        args, kwargs = tree_map_only(Placeholder, lambda p: p.draw.dense(), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"fastmod.masks: {func} was given a masked weight in a way that masks cannot follow")


def _shares_noise(weight: Draw, bias: Draw) -> bool:
    return bias.seed is weight.seed and bias.stream == noise.STREAM_MASK_BIAS


def _layer(weight: Draw, bias: Tensor | None) -> tuple[dict[str, Any], Tensor | None]:
    """The arguments of a masked layer for all samples, and a bias that the op cannot add."""
    arguments: dict[str, Any] = {
        "weight": weight.weight,
        "logits": weight.logits,
        "samples": weight.samples,
        "seed": weight.seed,
        "tau": weight.tau,
    }
    if isinstance(bias, Placeholder):
        if not _shares_noise(weight, bias.draw):
            return arguments, bias.draw.dense()
        return arguments | {"bias": bias.draw.weight, "bias_logits": bias.draw.logits}, None
    if bias is None or weight.is_hidden(bias) or bias.dtype != weight.weight.dtype:
        return arguments, bias
    return arguments | {"bias": bias}, None


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, Placeholder) or weight.draw.transposed:
        return NotImplemented
    return _product(input, weight.draw, bias)


def _addmm(input: Tensor, mat1: Tensor, mat2: Any, **scales: Any) -> Any:
    """``bias + x @ weight``: the Conv1D of GPT-2."""
    if scales or not isinstance(mat2, Placeholder) or not mat2.draw.transposed:
        return NotImplemented
    return _product(mat1, mat2.draw, input)


def _product(x: Tensor, weight: Draw, bias: Tensor | None) -> Any:
    if isinstance(x, Placeholder) or x.dim() == 0:
        return NotImplemented
    parts = weight.unhidden(x) if weight.first is None else x.unsqueeze(0)
    if parts is None or x.dtype != weight.weight.dtype or weight.again():
        return NotImplemented
    arguments, rest = _layer(weight, bias)
    if weight.first is None:
        out = weight.hide(lambda: _masked_linear(parts, **arguments))
    else:
        out = _masked_linear(parts, **(arguments | {"samples": 1, "first": weight.first}))[0]
    return out if rest is None else out + rest


def _convolution(
    dimensions: int,
    input: Tensor,
    weight: Any,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Any:
    """All samples together; a single part is an ordinary convolution with the drawn weight."""
    if not isinstance(weight, Placeholder) or isinstance(input, Placeholder) or weight.draw.first is not None:
        return NotImplemented
    draw = weight.draw
    parts = draw.unhidden(input)
    if parts is None or input.dim() != dimensions + 2 or input.dtype != draw.weight.dtype or draw.again():
        return NotImplemented
    steps, spread = _tuple(stride, dimensions), _tuple(dilation, dimensions)
    margin = _tuple(0 if isinstance(padding, str) else padding, dimensions)
    arguments, rest = _layer(draw, bias)
    if dimensions == 1:
        arguments |= {name: arguments[name].unsqueeze(2) for name in ("weight", "logits")}
        steps, spread, margin = (1, *steps), (1, *spread), (0, *margin)

    def run() -> Tensor:
        images = parts.flatten(0, 1)
        if padding == "same":  # odd totals pad one more at the end, as in torch
            totals = [d * (k - 1) for d, k in zip(spread[-dimensions:], draw.weight.shape[2:], strict=True)]
            images = F.pad(images, [side for total in reversed(totals) for side in (total // 2, total - total // 2)])
        if dimensions == 1:  # of height one
            images = images.unsqueeze(2)
        out = ops.masked_conv2d(images, **arguments, stride=steps, padding=margin, dilation=spread, groups=groups)
        return (out.squeeze(2) if dimensions == 1 else out).unflatten(0, (draw.samples, -1))

    out = draw.hide(run)
    return out if rest is None else out + rest.view(-1, *[1] * dimensions)


def _tuple(value: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dimensions
    return tuple(value) * (dimensions if len(value) == 1 else 1)


def _conv1d(input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Any:
    return _convolution(1, input, weight, *args, **kwargs)


def _conv2d(input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Any:
    return _convolution(2, input, weight, *args, **kwargs)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """With fixed statistics, a scale and a shift: one pass, where vmap takes three and moves the batch dimension."""
    known = [value.draw for value in (weight, bias) if isinstance(value, Placeholder)]
    if training or running_mean is None or running_var is None or not known or known[0].first is not None:
        return NotImplemented
    parts = known[0].unhidden(input)
    if parts is None or any(value is not None and known[0].is_hidden(value) for value in (running_mean, running_var)):
        return NotImplemented

    def stacked(value: Any) -> Tensor | None:  # [S, C] or [C]
        return value.draw.sample(0, value.draw.samples) if isinstance(value, Placeholder) else value

    def run() -> Tensor:
        scale, shift = torch.rsqrt(running_var + eps), stacked(bias)
        weights = stacked(weight)
        scale = scale if weights is None else scale * weights
        shift = -running_mean * scale if shift is None else shift - running_mean * scale
        shape = (-1, 1, running_mean.numel(), *[1] * (input.dim() - 2))
        return torch.addcmul(shift.to(input.dtype).view(shape), parts, scale.to(input.dtype).view(shape))

    return known[0].hide(run)


def _embedding(input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Sample by sample: a table of words is the largest weight of a net, so only one copy is made at a time."""
    if not isinstance(weight, Placeholder) or weight.draw.first is not None:
        return NotImplemented
    draw = weight.draw
    parts = draw.unhidden(input)
    if parts is None:
        return NotImplemented
    samples = range(draw.samples)
    return draw.hide(
        lambda: torch.stack([F.embedding(parts[s], draw.sample(s, 1)[0], *args, **kwargs) for s in samples])
    )


_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.conv1d: _conv1d,
    F.conv2d: _conv2d,
    F.embedding: _embedding,
    F.batch_norm: _batch_norm,
}
