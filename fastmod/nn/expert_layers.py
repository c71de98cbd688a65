"""The layers of experts: convolutions, batch norms and residual blocks with parameters stacked over the experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastmod._private import transformed
from fastmod.nn import _parts
from fastmod.nn._pending import Pending, convolve, count_batch, finish, moved_by, reading
from fastmod.ops import _conv_chain as chain
from fastmod.ops._norm_convs import Conv, Found, Norm, norm_convs, served
from fastmod.ops.batch_affine import Affine, batch_affine


class ExpertConv(nn.Module):
    """E convolutions side by side: ``weight`` [E, Cout, Cin, k, k] and, if asked for, ``bias`` [E, Cout].

    Padded by k // 2 zeros, k 1 or 3. Weights are initialised as by He et al., normal with variance 2 / (k * k * Cout),
    independently for each expert; biases are 0.
    """

    def __init__(
        self, in_channels: int, out_channels: int, experts: int, kernel: int = 3, stride: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        _parts.positive_sizes(in_channels=in_channels, out_channels=out_channels, experts=experts)
        check_stride("stride", stride)
        if kernel not in (1, 3):
            raise ValueError(f"kernel: expected 1 or 3, got {kernel!r}")
        self.stride = stride
        self.weight = nn.Parameter(torch.empty(experts, out_channels, in_channels, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(experts, out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.weight:
            nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return convolve(x, self.weight, self.bias, stride=self.stride, stats=False).y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertConv:
        """``net.to(memory_format=torch.channels_last)`` is meant for images; torch refuses it for weights of five
        dimensions, which therefore are converted as matrices."""

        def as_matrix(tensor: Tensor) -> Tensor:
            return fn(tensor.flatten(1)).unflatten(1, tensor.shape[1:]) if tensor.dim() == 5 else fn(tensor)

        return super()._apply(as_matrix, recurse)

    def extra_repr(self) -> str:
        experts, outputs, inputs, kernel, _ = self.weight.shape
        return f"{inputs}, {outputs}, experts={experts}, kernel={kernel}, stride={self.stride}"


class ExpertNorm(nn.Module):
    """Batch norm of every expert's channels, as a scale and a shift that the next layer applies while it reads.

    ``weight``, ``bias``, ``running_mean``, ``running_var`` [E, C] and ``num_batches_tracked``, as
    :class:`torch.nn.BatchNorm2d` has them. Without gradients, eval computes scale and shift once, and again after
    ``train()``, ``eval()`` or a change in place of a parameter or statistic (not through ``.data``, which torch does
    not count: call ``eval()`` after it).

    Not a subclass of torch's batch norms, so ``torch.optim.swa_utils.update_bn`` skips it: average the buffers too,
    ``AveragedModel(net, use_buffers=True)``.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, experts: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(experts, channels))
        self.bias = nn.Parameter(torch.zeros(experts, channels))
        self.register_buffer("running_mean", torch.zeros(experts, channels))
        self.register_buffer("running_var", torch.ones(experts, channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))
        self._known: tuple[Affine, list[tuple[Tensor, int, int]]] | None = None

    def after(self, conv: ExpertConv, x: Tensor | Pending, *, relu: bool = False) -> Pending:
        """``relu(norm(conv(x)))``, with norm and ReLU pending."""
        return side_by_side([self.step(conv, x, relu=relu)])[0]

    def step(self, conv: ExpertConv, x: Tensor | Pending, *, relu: bool = False) -> Step:
        """The same, to be computed together with others."""
        return step(x, conv.weight, conv.bias, conv.stride, self, relu=relu)

    def by_batch(self, x: Tensor) -> Norm | None:
        """The form that the convolution of ``x`` before it takes, in training."""
        if not self.training:
            return None
        counted = served(x)  # otherwise the batch was counted before
        batches = self.num_batches_tracked
        momentum = moved_by(self.momentum, batches + 1 if counted and self.momentum is None else batches)
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        return Norm(*tensors, batches if counted else None, momentum, self.eps)

    def affine(self, found: Found) -> Affine:
        """Scale and shift for the result of a convolution: in training by its statistics, else by the running ones."""
        if found.scale is None or found.shift is None:
            return self.by_running_statistics()
        return Affine(found.scale, found.shift)

    def by_running_statistics(self) -> Affine:
        """Scale and shift in eval."""
        tensors = (self.weight, self.bias, self.running_mean, self.running_var)
        if transformed() or torch.is_grad_enabled() or any(t.is_inference() for t in tensors):
            return self._batch_affine()
        known = self._known
        if known is None or any(
            a is not b or a._version != version or a.data_ptr() != place
            for a, (b, version, place) in zip(tensors, known[1], strict=True)
        ):
            known = self._batch_affine(), [(t, t._version, t.data_ptr()) for t in tensors]
            object.__setattr__(self, "_known", known)
        return known[0]

    def _batch_affine(self) -> Affine:
        parameters = (self.weight, self.bias)
        running = (self.running_mean, self.running_var)
        return batch_affine(None, None, *parameters, *running, count=0, training=False, momentum=0.0, eps=self.eps)

    def train(self, mode: bool = True) -> ExpertNorm:
        self._known = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": None}

    def extra_repr(self) -> str:
        experts, channels = self.weight.shape
        return f"{channels}, experts={experts}, eps={self.eps}, momentum={self.momentum}"


class Step(NamedTuple):
    """``relu(norm(conv))``, to be computed by :func:`side_by_side`."""

    conv: Conv
    norm: ExpertNorm | None
    relu: bool


def step(
    x: Tensor | Pending,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    norm: ExpertNorm | None,
    *,
    relu: bool = False,
) -> Step:
    """With statistics in training only."""
    of_batch = None if norm is None else norm.by_batch(x.images if isinstance(x, Pending) else x)
    return Step(reading(x, weight, bias, stride=stride, norm=of_batch), norm, relu)


def side_by_side(steps: list[Step]) -> list[Pending]:
    """Computes them all, in one launch where the CUDA kernels serve; batch norm and ReLU stay pending."""
    results = []
    for (_, norm, relu), found in zip(steps, norm_convs([s.conv for s in steps]), strict=True):
        scale, shift = (None, None) if norm is None else norm.affine(found)
        results.append(Pending(found.y, scale, shift, relu))
    return results


def chained(
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    norm: ExpertNorm | None,
    source: int,
    *,
    relu: bool = False,
    residual: int = -1,
) -> chain.Layer:
    """A convolution with the batch norm after it as a layer of :func:`fastmod.ops._conv_chain.conv_chain`."""
    scale = None
    if norm is not None:
        scale, shift = norm.by_running_statistics()
        bias = shift if bias is None else scale * bias + shift
    return chain.Layer(weight, scale, bias, stride, relu, source, residual)


class _Residual(nn.Module):
    """A residual block: adds its input at the end or, where the shape changes, a 1x1 convolution of it."""

    conv1: ExpertConv
    norm1: ExpertNorm

    def __init__(self, in_channels: int, out_channels: int, experts: int, stride: int) -> None:
        super().__init__()
        changes = stride != 1 or in_channels != out_channels
        self.shortcut = ExpertConv(in_channels, out_channels, experts, 1, stride) if changes else None
        self.shortcut_norm = ExpertNorm(out_channels, experts) if changes else None

    def begin(self, x: Tensor) -> list[Step]:
        """The convolutions that read x: the first, followed by a ReLU, and that of the shortcut, if there is one."""
        steps = [self.norm1.step(self.conv1, x, relu=True)]
        if self.shortcut is not None and self.shortcut_norm is not None:
            steps.append(self.shortcut_norm.step(self.shortcut, x))
        return steps


class ExpertBlock(_Residual):
    """He's basic block of every expert: two 3x3 convolutions and a shortcut, a 1x1 one where the shape changes.

    Shapes: ``[B, Cin, H, W]``, shared, or ``[B, E, Cin, H, W]`` -> ``[B, E, Cout, H', W']``, with a gate ``[B, E]`` the
    mixture ``[B, Cout, H', W']``.
    """

    def __init__(self, in_channels: int, out_channels: int, experts: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, experts, stride)
        self.conv1 = ExpertConv(in_channels, out_channels, experts, 3, stride)
        self.norm1 = ExpertNorm(out_channels, experts)
        self.conv2 = ExpertConv(out_channels, out_channels, experts, 3)
        self.norm2 = ExpertNorm(out_channels, experts)

    def chained(self, source: int, first: int) -> list[chain.Layer]:
        """The block as layers of a chain: it reads value ``source``, its first layer gives value ``first``."""
        layers = [chained(self.conv1.weight, None, self.conv1.stride, self.norm1, source, relu=True)]
        shortcut = source
        if self.shortcut is not None:
            shortcut = first + 1
            layers.append(chained(self.shortcut.weight, None, self.shortcut.stride, self.shortcut_norm, source))
        layers.append(chained(self.conv2.weight, None, 1, self.norm2, first, relu=True, residual=shortcut))
        return layers

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y, *shortcut = side_by_side(self.begin(x))
        return finish(self.norm2.after(self.conv2, y), shortcut[0] if shortcut else x, gate=gate)


class ExpertBottleneck(_Residual):
    """He's bottleneck of every expert: 1x1, 3x3 (which has the stride) and 1x1 to four times the width."""

    def __init__(self, in_channels: int, width: int, experts: int, stride: int = 1) -> None:
        super().__init__(in_channels, 4 * width, experts, stride)
        self.conv1 = ExpertConv(in_channels, width, experts, 1)
        self.norm1 = ExpertNorm(width, experts)
        self.conv2 = ExpertConv(width, width, experts, 3, stride)
        self.norm2 = ExpertNorm(width, experts)
        self.conv3 = ExpertConv(width, 4 * width, experts, 1)
        self.norm3 = ExpertNorm(4 * width, experts)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y, *shortcut = side_by_side(self.begin(x))
        y = self.norm2.after(self.conv2, y, relu=True)
        return finish(self.norm3.after(self.conv3, y), shortcut[0] if shortcut else x, gate=gate)


def count_batches(x: Tensor, *modules: nn.Module) -> None:
    """Count a batch ``x`` in training, for the batch norms of all these modules at once."""
    if served(x):
        return  # the kernels of the convolutions do it
    children = [child for module in modules for child in module._modules.values()]
    count_batch([norm.num_batches_tracked for norm in children if isinstance(norm, ExpertNorm) and norm.training])


def in_training(module: nn.Module) -> bool:
    """Whether this module, or a batch norm in it, uses the statistics of the batch."""
    return any(isinstance(norm, ExpertNorm) and norm.training for norm in (module, *module._modules.values()))


def check_stride(name: str, stride: int) -> None:
    if isinstance(stride, bool) or stride not in (1, 2):
        raise ValueError(f"{name}: expected 1 or 2, got {stride!r}")


def check_images(x: Tensor, channels: int, experts: int | None = None) -> None:
    """``x`` is ``[B, C, H, W]`` or, where there are experts, ``[B, E, C, H, W]``, with at least one pixel."""
    form = "[B, C, H, W]" if experts is None else "[B, C, H, W] or [B, E, C, H, W]"
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a tensor {form}, got {type(x).__name__}")
    if x.dim() != 4 and (experts is None or x.dim() != 5):
        raise ValueError(f"x: expected {form}, got shape {list(x.shape)}")
    if x.shape[-3] != channels:
        raise ValueError(f"x: expected {form} with C = {channels}, got shape {list(x.shape)}")
    if x.dim() == 5 and x.shape[1] != experts:
        raise ValueError(f"x: expected {form} with E = {experts}, got shape {list(x.shape)}")
