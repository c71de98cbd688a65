"""A whole inverted residual block, batch norms and squeeze-excite included: ``inverted_residual``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod import backend
from fastmod._compiler import in_graph
from fastmod.ops import _autograd, _checks, _images
from fastmod.ops._samples import Sample

#: Names of the convolutions in the order of ``params``; the middle two are left out without squeeze-excite.
CONVOLUTIONS = ("expand", "depthwise", "squeeze", "excite", "project")
#: Number of tensors with squeeze-excite and without: weight, and weight and bias of the batch norm, per convolution.
GATED, PLAIN = 15, 9


class InvertedResidualOutput(NamedTuple):
    """What ``inverted_residual`` returns; lists have one entry per batch norm, in the order of ``params``."""

    y: Tensor  # [B, T, C, H, W]
    means: list[Tensor]  # [T, channels], without gradients, for the running statistics
    variances: list[Tensor]  # [T, channels], with Bessel's correction, as running statistics need it


def inverted_residual(
    x: Tensor,
    params: Sequence[Tensor],
    *,
    eps: float = 1e-5,
    running: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> InvertedResidualOutput:
    """``x + project(gate * relu(depthwise(relu(expand(x)))))``, batch norm after every convolution, over the batch.

    ``gate`` is a squeeze-excite: the mean over the pixels, ``squeeze`` and ReLU, ``excite`` and sigmoid. On the CPU
    only one expanded tensor is written, the output of the depthwise convolution, and only that is kept.

    Args:
        x: ``[B, T, C, H, W]``; task t uses the weights at t.
        params: ``expand`` [T, M, C], ``depthwise`` [T, M, 3, 3], ``squeeze`` [T, R, M] and ``excite`` [T, M, R] (both
            or none), ``project`` [T, C, M], or in the shapes of convolutions, [T, M, C, 1, 1] and [T, M, 1, 3, 3]; each
            followed by weight and bias [T, channels] of its batch norm.
        eps: of all batch norms.
        running: mean and variance [T, channels] of every batch norm, in the order of ``params``, used instead of those
            of the batch. An image then passes through the whole block in cache, and no expanded tensor is written;
            gradients go through plain PyTorch.
    """
    chosen = backend.resolve("inverted_residual", x)
    _check_eps(eps)
    if backend.checks_first(chosen):
        _check(x, params, running)
    try:
        wide = _checks.compute_dtype(x)
        tensors = [p.to(wide) if p.dtype != wide and p.is_floating_point() else p for p in params]
        if backend.autocasts(x):
            (x,) = backend.lowered(x)
        if running is not None:
            y = _by_running(x, tensors, running, eps, chosen)
            return InvertedResidualOutput(y, [mean for mean, _ in running], [var for _, var in running])
        if chosen == "reference":
            with backend.reference_autocast(x):
                y, stats = reference(x, *tensors, eps=eps)
        else:
            y, stats = _run(x, tensors, eps, chosen == "triton")
    except Exception:
        _check(x, params, running)
        raise
    sizes = [tensors[i].shape[1] for i in range(1, len(tensors), 3)]
    return InvertedResidualOutput(y, list(stats[0].split(sizes, -1)), list(stats[2].split(sizes, -1)))


def _check_eps(eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < _checks.INFINITY:
        raise ValueError(f"eps: expected a finite number >= 0, got {eps!r}")


def _by_running(
    x: Tensor, params: list[Tensor], running: Sequence[tuple[Tensor, Tensor]], eps: float, chosen: str
) -> Tensor:
    stats = [value.to(_checks.compute_dtype(x)) for pair in running for value in pair]
    if chosen == "reference" or _autograd.wanted(x, *params, *stats):
        with backend.reference_autocast(x):
            return reference(x, *params, eps=eps, running=stats)[0]
    return INFERENCE[chosen == "triton"](x, params, stats, eps)


def _check(x: Tensor, params: Sequence[Tensor], running: Sequence[tuple[Tensor, Tensor]] | None = None) -> None:
    _images.check_images("x", x, "[B, T, C, H, W]")
    if 0 in x.shape[1:]:
        raise ValueError(
            f"x: expected [B, T, C, H, W] with at least one task, channel and pixel, got shape {_checks.shape(x)}"
        )
    if x.shape[0] == 1 and running is None:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {_checks.shape(x)}")
    _checks.listed("params", params, "of tensors")
    if len(params) not in (PLAIN, GATED):
        raise ValueError(f"params: expected {PLAIN} tensors, or {GATED} with squeeze-excite, got {len(params)}")
    names = [name for name in CONVOLUTIONS if len(params) == GATED or name not in ("squeeze", "excite")]
    for i, param in enumerate(params):
        kind = ("weight", "norm's weight", "norm's bias")[i % 3]
        _checks.float_tensor(f"params[{i}], {names[i // 3]}'s {kind}", param, 2, "[T, channels, ...]")
        if 0 in param.shape:
            raise ValueError(f"params[{i}]: expected no size to be 0, got shape {_checks.shape(param)}")
        if param.device != x.device:
            raise RuntimeError(f"params[{i}]: expected the device of x ({x.device}), got {param.device}")
    tasks, channels, expanded = x.shape[1], x.shape[2], params[0].shape[1]
    shapes: dict[str, list[int]] = {
        "expand": [tasks, expanded, channels],
        "depthwise": [tasks, expanded, 3, 3],
        "project": [tasks, channels, expanded],
    }
    if len(params) == GATED:
        squeezed = params[6].shape[1]
        shapes |= {"squeeze": [tasks, squeezed, expanded], "excite": [tasks, expanded, squeezed]}
    for at, name in enumerate(names):
        shape, found = shapes[name], _checks.shape(params[3 * at])
        if found not in (shape, _of_convolution(shape)):
            raise ValueError(
                f"params[{3 * at}], {name}: expected {shape} or {_of_convolution(shape)}, got shape {found}"
            )
        for i in (3 * at + 1, 3 * at + 2):
            _checks.exact_shape(f"params[{i}], {name}'s norm", params[i], shape[:2], "[T, channels]")
    if running is None:
        return
    _checks.listed("running", running, "of (mean, variance)")
    if len(running) != len(names):
        raise ValueError(f"running: expected {len(names)} pairs, one per batch norm, got {len(running)}")
    for at, (name, pair) in enumerate(zip(names, running, strict=True)):
        _checks.listed(f"running[{at}]", pair, "or tuple (mean, variance)")
        if len(pair) != 2:
            raise ValueError(f"running[{at}]: expected mean and variance, got {len(pair)} entries")
        for kind, value in zip(("mean", "variance"), pair, strict=True):
            _checks.float_tensor(f"running[{at}], {name}'s {kind}", value, 2, "[T, channels]")
            if value.device != x.device:
                raise RuntimeError(f"running[{at}]: expected the device of x ({x.device}), got {value.device}")
            _checks.exact_shape(f"running[{at}], {name}'s {kind}", value, shapes[name][:2], "[T, channels]")


def _of_convolution(shape: list[int]) -> list[int]:
    return [*shape, 1, 1] if len(shape) == 3 else [*shape[:2], 1, *shape[2:]]


def reference(x: Tensor, *params: Tensor, eps: float, running: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Plain PyTorch; reduced precision is computed in fp32. -> y and the statistics ``[3, T, channels of all norms]``:
    means, variances, variances with Bessel's correction. ``running``: means and variances to be used instead."""
    gated = len(params) == GATED
    found: list[tuple[Tensor, Tensor, int]] = []

    def normed(y: Tensor, at: int, dims: tuple[int, ...]) -> Tensor:
        """[B, T, channels, ...]"""
        shape = (y.shape[1], y.shape[2], *[1] * (y.dim() - 3))
        if running is not None:
            mean, var = (value.reshape(shape) for value in running[2 * (at // 3) : 2 * (at // 3) + 2])
        elif y.shape[0] == 0:
            mean = var = y.new_zeros(shape)
        else:
            var, mean = torch.var_mean(y, dims, correction=0, keepdim=True)
        found.append(
            (mean.detach().reshape(shape[:2]), var.detach().reshape(shape[:2]), y.numel() // max(1, y.shape[2]))
        )
        scale = params[at + 1].reshape(shape) * torch.rsqrt(var + eps)
        return (y - mean) * scale + params[at + 2].reshape(shape)

    pixels, tasks = (0, 3, 4), x.shape[1]
    matrices = {at: params[at].flatten(2) for at in range(0, len(params), 3)}  # [T, out, in], depthwise [T, M, 9]
    value = x.to(_checks.compute_dtype(x))
    y = normed(torch.einsum("btchw,tmc->btmhw", value, matrices[0]), 0, pixels).relu()
    taps = matrices[3].reshape(-1, 1, 3, 3)
    y = F.conv2d(y.flatten(1, 2), taps, padding=1, groups=taps.shape[0]).unflatten(1, (tasks, -1))
    y = normed(y, 3, pixels).relu()
    if gated:
        gate = normed(torch.einsum("btm,trm->btr", y.mean((-2, -1)), matrices[6]), 6, (0,)).relu()
        gate = normed(torch.einsum("btr,tmr->btm", gate, matrices[9]), 9, (0,)).sigmoid()
        y = y * gate[..., None, None]
    last = len(params) - 3
    y = value + normed(torch.einsum("btmhw,tcm->btchw", y, matrices[last]), last, pixels)
    counts = [count // max(1, tasks) for *_, count in found]
    corrected = [var * (n / (n - 1) if n > 1 else 1.0) for (_, var, _), n in zip(found, counts, strict=True)]
    rows = [[mean for mean, *_ in found], [var for _, var, _ in found], corrected]
    return y.to(x.dtype), torch.stack([torch.cat(row, -1) for row in rows])


def _stats_like(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    channels = sum(params[i].shape[1] for i in range(1, len(params), 3))
    return x.new_empty((3, x.shape[1], channels), dtype=_checks.compute_dtype(x))


def fake_forward(x: Tensor, params: Sequence[Tensor], eps: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    _checks.one_device(x, *params)
    batch, tasks, channels, *pixels = x.shape
    expanded, like = params[0].shape[1], x.new_empty(0, dtype=_checks.compute_dtype(x))
    saved = [_images.empty(like, (batch, tasks, expanded, *pixels)), _images.empty(like, x.shape)]
    saved.append(like.new_empty((tasks, 1 + channels, channels)))
    if len(params) == GATED:
        squeezed = params[6].shape[1]
        saved.append(like.new_empty((3, tasks, batch, expanded)))
        saved += [like.new_empty((tasks, batch, width)) for width in (squeezed, expanded, expanded, squeezed)]
    return _images.empty(x, x.shape), _stats_like(x, params), saved


def fake_inference(x: Tensor, params: Sequence[Tensor], stats: Sequence[Tensor], eps: float) -> Tensor:
    _checks.one_device(x, *params, *stats)
    return _images.empty(x, x.shape)


def fake_backward(
    grad: Tensor,
    x: Tensor,
    params: Sequence[Tensor],
    eps: float,
    stats: Tensor,
    saved: Sequence[Tensor],
    need_x: bool,
) -> list[Tensor]:
    first = _images.empty(x, x.shape) if need_x else x.new_empty(0)
    return [first, *[p.new_empty(p.shape) for p in params]]


def _nested_by_elements(overload: Any) -> _autograd.Rule:
    """:func:`fastmod.ops._autograd.by_elements` of a kernel that returns a list among its results."""

    def flat(*arguments: Any) -> tuple[Tensor, ...]:
        y, stats, saved = overload(*arguments)
        return y, stats, *saved

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        found, _ = _autograd.by_elements(flat)(info, in_dims, *arguments)
        saved = list(found[2:])
        return (found[0], found[1], saved), (0, 0, [0] * len(saved))

    return rule


#: -> y, statistics [3, T, channels of all norms], and what the backward needs: see csrc/cpu/inverted_residual.cpp
FORWARD = _autograd.define(
    "inverted_residual_forward(Tensor x, Tensor[] params, float eps) -> (Tensor, Tensor, Tensor[])",
    fake_forward,
    _nested_by_elements,
)
#: -> gradients of x, empty if not needed, and of the parameters
BACKWARD = _autograd.define(
    "inverted_residual_backward(Tensor grad, Tensor x, Tensor[] params, float eps, Tensor stats, Tensor[] saved, "
    "bool need_x) -> Tensor[]",
    fake_backward,
)
#: ``stats``: mean and variance [T, channels] of every norm, in the dtype of the sums
INFERENCE = _autograd.define(
    "inverted_residual_inference(Tensor x, Tensor[] params, Tensor[] stats, float eps) -> Tensor", fake_inference
)


class InvertedResidual(_autograd.Op):
    """``numbers``: triton, eps."""

    @staticmethod
    def forward(numbers: tuple[Any, ...], x: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        triton, eps = numbers
        y, stats, saved = FORWARD[triton](x, params, eps)
        return y, stats, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.numbers = inputs[0]
        ctx.save_for_backward(*inputs[1:], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        numbers = (*ctx.numbers, needs)
        found = _autograd.gradients(_by_kernel, _by_reference, numbers, grad, *ctx.saved_tensors)
        return None, *_autograd.spread(found, [i for i, need in enumerate(needs) if need], len(needs))


def _by_kernel(numbers: tuple[Any, ...], grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    triton, eps, needs = numbers
    count = len(needs) - 1
    params, (stats, *saved) = tensors[:count], tensors[count:]
    return _images.chosen(BACKWARD[triton](grad, x, params, eps, stats, saved, needs[0]), needs)


def _by_reference(numbers: tuple[Any, ...], grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    _, eps, needs = numbers
    places = [i for i, need in enumerate(needs) if need]

    def y(*inputs: Tensor) -> Tensor:
        return reference(*inputs, eps=eps)[0]

    return _autograd.vjp_at(y, places, grad, *tensors[: len(needs)])


@in_graph
def _run(x: Tensor, params: list[Tensor], eps: float, triton: bool) -> tuple[Tensor, Tensor]:
    if _autograd.wanted(x, *params):
        y, stats, *_ = _autograd.apply(InvertedResidual, (triton, eps), x, *params)
    else:
        y, stats, _ = FORWARD[triton](x, params, eps)
    return y, stats


def _sample(label: str, x: tuple[int, ...], expanded: int, squeezed: int) -> Sample:
    """Tensors: x, then weight and batch norm of every convolution."""
    tasks, channels = x[1:3]
    weights: list[tuple[int, ...]] = [(tasks, expanded, channels), (tasks, expanded, 3, 3)]
    weights += [(tasks, squeezed, expanded), (tasks, expanded, squeezed)] if squeezed else []
    weights += [(tasks, channels, expanded)]
    shapes = [shape for weight in weights for shape in (weight, weight[:2], weight[:2])]
    call = lambda t: [inverted_residual(t[0], list(t[1:])).y]  # noqa: E731
    return Sample("inverted_residual", label, (x, *shapes), call)


SAMPLES = (
    _sample("odd", (7, 2, 3, 3, 2), 5, 0),
    _sample("squeeze-excite", (9, 1, 2, 2, 3), 7, 3),
)
