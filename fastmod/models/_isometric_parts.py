"""The adapters and heads around the layers of an isometric net, for several tasks at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.nn._parts import positive_sizes
from fastmod.nn._pending import Pending, finish, values_per_channel
from fastmod.nn._stacked import batch_statistics
from fastmod.ops._checks import compute_dtype
from fastmod.ops.batch_affine import Affine, batch_affine
from fastmod.ops.norm_conv import norm_conv
from fastmod.ops.norm_pool import norm_pool


def of_task(values: Tensor, task: int | None) -> Tensor:
    """``[T, ...]`` -> that of one task, ``[1, ...]``, or all."""
    return values if task is None or values.shape[0] == 1 else values[task : task + 1]


class TaskNorm(nn.Module):
    """Batch norm with statistics per task ``[T, C]``; ``weight`` and ``bias`` [1, C], shared by all tasks, or [T,
    C]."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, tasks: int, own: bool, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum, self.own = eps, momentum, own
        rows = tasks if own else 1
        self.weight = nn.Parameter(torch.ones(rows, channels))
        self.bias = nn.Parameter(torch.zeros(rows, channels))
        self.register_buffer("running_mean", torch.zeros(tasks, channels))
        self.register_buffer("running_var", torch.ones(tasks, channels))
        self.register_buffer("num_batches_tracked", torch.zeros(tasks, dtype=torch.long))

    def affine(self, mean: Tensor | None, var: Tensor | None, count: int, task: int | None) -> Affine:
        """Scale and shift ``[T or 1, C]``; in training, updates the statistics of the task."""
        tasks = self.running_mean.shape[0]
        where = slice(None) if task is None else slice(task, task + 1)
        weight, bias = (of_task(p, task) for p in (self.weight, self.bias))
        if task is None and weight.shape[0] != tasks:
            weight, bias = weight.expand(tasks, -1), bias.expand(tasks, -1)
        if self.training:
            self.num_batches_tracked[where] += 1
        return batch_affine(
            mean,
            var,
            weight,
            bias,
            self.running_mean[where],
            self.running_var[where],
            count=count,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )

    def add_task(self, source: int) -> None:
        for name, buffer in list(self._buffers.items()):
            assert buffer is not None
            self._buffers[name] = torch.cat([buffer, buffer[source : source + 1]])
        if self.own:
            for name, p in list(self._parameters.items()):
                assert p is not None
                values = torch.cat([p.detach(), p.detach()[source : source + 1]])
                self._parameters[name] = nn.Parameter(values, requires_grad=p.requires_grad)


class InputAdapter(nn.Module):
    """``[B, T, C, H, W]`` -> ``[B, T, C', H / patch, W / patch]``: a convolution whose stride is its kernel, batch norm
    and ReLU. ``weight`` [C', C, patch, patch] is shared by the tasks."""

    def __init__(self, in_channels: int, channels: int, patch: int, bias: bool, tasks: int, own: bool) -> None:
        super().__init__()
        self.patch = patch
        self.weight = nn.Parameter(torch.empty(channels, in_channels, patch, patch))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        self.norm = TaskNorm(channels, tasks, own)
        nn.init.kaiming_normal_(self.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, x: Tensor, task: int | None) -> Tensor:
        side, tasks = self.patch, x.shape[1]
        high, wide = (size // side for size in x.shape[-2:])
        cut = x[..., : high * side, : wide * side].unflatten(-1, (wide, side)).unflatten(-3, (high, side))
        # [B, T, C, H', side, W', side] -> [B, T, C * side * side, H', W']; pixel_unshuffle leaves an empty batch alone
        patches = cut.permute(0, 1, 2, 4, 6, 3, 5).flatten(2, 4)
        # A 1x1 convolution of the patches, whose pixels are channels now.
        weight = self.weight.flatten(1)[None, :, :, None, None].expand(tasks, -1, -1, -1, -1)
        bias = None if self.bias is None else self.bias.expand(tasks, -1)
        found = norm_conv(patches, weight, bias=bias, stats=self.norm.training)
        count = values_per_channel(found.y, self.norm.training)
        return finish(Pending(found.y, *self.norm.affine(found.mean, found.var, count, task)), relu=True)


class OutputAdapter(nn.Module):
    """``[B, T, C, H, W]`` -> ``[B, T, c2]``: a 1x1 convolution to c1, the mean over the pixels, a linear layer to c2.

    Both with batch norm (or, without it, biases) and ReLU: ``weight1`` [c1, C], ``weight2`` [c2, c1].
    """

    def __init__(self, channels: int, c1: int, c2: int, norm: bool, tasks: int, own: bool) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.empty(c1, channels))
        self.weight2 = nn.Parameter(torch.empty(c2, c1))
        self.bias1 = None if norm else nn.Parameter(torch.zeros(c1))
        self.bias2 = None if norm else nn.Parameter(torch.zeros(c2))
        self.norm1 = TaskNorm(c1, tasks, own) if norm else None
        self.norm2 = TaskNorm(c2, tasks, own) if norm else None
        for weight in (self.weight1, self.weight2):
            nn.init.kaiming_normal_(weight, mode="fan_in", nonlinearity="relu")

    def forward(self, x: Tensor, task: int | None) -> Tensor:
        tasks = x.shape[1]
        weight = self.weight1[None, :, :, None, None].expand(tasks, -1, -1, -1, -1)
        if self.norm1 is None or self.norm2 is None:
            assert self.bias1 is not None and self.bias2 is not None
            y = norm_conv(x, weight, stats=False).y
            shift = self.bias1.to(compute_dtype(y)).expand(tasks, -1)
            pooled = norm_pool(y, torch.ones_like(shift), shift, relu=True)
            return F.linear(pooled, self.weight2.to(pooled.dtype), self.bias2.to(pooled.dtype)).relu()
        found = norm_conv(x, weight, stats=self.norm1.training)
        count = values_per_channel(found.y, self.norm1.training)
        pooled = norm_pool(found.y, *self.norm1.affine(found.mean, found.var, count, task), relu=True)
        vectors = F.linear(pooled, self.weight2.to(pooled.dtype))  # [B, T, c2]
        wide = vectors.to(compute_dtype(vectors))
        mean = var = None
        if self.norm2.training:
            mean, var = batch_statistics(wide)
        scale, shift = self.norm2.affine(mean, var, wide.shape[0], task)
        return (wide * scale + shift).relu().to(vectors.dtype)

    def add_task(self, source: int) -> None:
        for norm in (self.norm1, self.norm2):
            if norm is not None:
                norm.add_task(source)


class TaskHead(nn.Module):
    """``[B, T, F]`` -> scores ``[T, B, classes]``, of one task ``[B, 1, F]`` -> ``[B, classes]``.

    ``weight`` [sum of classes, F] and ``bias``: the heads of all tasks in one tensor, so that each always has a
    gradient.
    """

    def __init__(self, features: int, classes: Sequence[int], shared: bool) -> None:
        super().__init__()
        self.classes, self.shared = list(classes), shared
        rows = self.classes[0] if shared else sum(self.classes)
        self.weight = nn.Parameter(torch.empty(rows, features))
        self.bias = nn.Parameter(torch.empty(rows))
        for p in (self.weight, self.bias):  # initialised as nn.Linear
            nn.init.uniform_(p, -(features**-0.5), features**-0.5)

    def forward(self, x: Tensor, task: int | None) -> Tensor | list[Tensor]:
        if self.shared:
            found = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))  # [B, T, classes]
            return found.transpose(0, 1) if task is None else found.squeeze(1)
        weights, biases = self.weight.split(self.classes), self.bias.split(self.classes)
        if task is not None:
            return F.linear(x.squeeze(1), weights[task].to(x.dtype), biases[task].to(x.dtype))
        all_tasks = zip(x.unbind(1), weights, biases, strict=True)
        scores = [F.linear(own, w.to(x.dtype), b.to(x.dtype)) for own, w, b in all_tasks]
        return torch.stack(scores) if len(set(self.classes)) == 1 else scores

    def add_task(self, classes: int | None) -> None:
        count = self.classes[0] if classes is None else classes
        positive_sizes(classes=count)
        if self.shared and count != self.classes[0]:
            raise ValueError(f"classes: expected {self.classes[0]} as of the shared head, got {count}")
        self.classes = [*self.classes, count]
        if self.shared:
            return
        bound = self.weight.shape[1] ** -0.5
        for name, p in list(self._parameters.items()):
            assert p is not None
            new = torch.empty(count, *p.shape[1:], dtype=p.dtype, device=p.device).uniform_(-bound, bound)
            self._parameters[name] = nn.Parameter(torch.cat([p.detach(), new]), requires_grad=p.requires_grad)
