"""The isometric net of the compositional models: an input adapter, layers mixed from templates, an output adapter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fastmod.models._isometric_parts import InputAdapter, OutputAdapter, TaskHead, TaskNorm
from fastmod.nn._parts import positive_sizes
from fastmod.nn._undone import undone_on_error
from fastmod.nn.compositional import Compositional
from fastmod.nn.expert_layers import check_images
from fastmod.nn.isometric_block import IsometricBlock


class IsometricNet(nn.Module):
    """Images ``[B, in_channels, H, W]`` -> scores ``[B, classes]``; all tasks at once ``[T, B, ...]``.

    Args:
        channels: of the layers; the paper's nets have 24 or 40.
        layers, templates: L and K.
        classes: of every task, or a list with one number per task.
        tasks: T. Templates and adapters are shared; each task has its own shares, batch norm statistics and head.
        se: whether blocks have a squeeze-excite.
        output: channels c1, c2 of the output adapter; by default (128, 256), from 40 channels on (960, 1280).
        patch: side of the patches that the input adapter cuts the image into, its kernel and stride.
        bias, output_norm: ``bias=True, output_norm=False`` with ``se=False``, ``patch=2`` and ``output=(128, 256)`` is
            the net of the paper's domain adaptation (133122 parameters at K = 4 for 10 classes, besides the logits).
        dropout: before the head.
        adapter_into_blocks: each block also receives the input adapter's output: ``expand`` reads both (Table 6).
        shared_head: one head for all tasks, as domains have.
        norm, mixing, init, signature, share_layers: of :class:`fastmod.nn.Compositional`; with ``norm="per_task"`` each
            task also has its own scales and shifts in the adapters.

    Parameters: those of ``input_adapter``, ``body`` (``bank.weight`` [K, P], ``logits`` [T, L, K]), ``output_adapter``
    and ``head``. Every one has a dense gradient whichever task a batch belongs to.

    For a moving average: ``torch.optim.swa_utils.AveragedModel(net, use_buffers=True)``; ``update_bn`` knows only
    torch's own batch norms.
    """

    def __init__(
        self,
        channels: int = 24,
        layers: int = 16,
        templates: int = 4,
        classes: int | Sequence[int] = 10,
        tasks: int = 1,
        se: bool = True,
        *,
        in_channels: int = 3,
        patch: int = 4,
        output: tuple[int, int] | None = None,
        bias: bool = False,
        output_norm: bool = True,
        dropout: float = 0.2,
        adapter_into_blocks: bool = False,
        shared_head: bool = False,
        norm: str = "mixed",
        mixing: str = "softmax",
        init: str = "uniform",
        signature: str | Sequence[int] | Sequence[Sequence[int]] | None = None,
        share_layers: int | Sequence[int] = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        positive_sizes(channels=channels, in_channels=in_channels, patch=patch, tasks=tasks)
        c1, c2 = _output_channels(output, channels)
        self.in_channels, self.patch, self.adapter_into_blocks = in_channels, patch, adapter_into_blocks
        own = norm == "per_task"
        self.input_adapter = InputAdapter(in_channels, channels, patch, bias, tasks, own)
        self.body = Compositional(
            lambda: IsometricBlock(channels, se, bias=bias, second_input=adapter_into_blocks),
            templates,
            layers,
            tasks,
            norm=norm,
            mixing=mixing,
            init=init,
            signature=signature,
            share_layers=share_layers,
            generator=generator,
        )
        self.output_adapter = OutputAdapter(channels, c1, c2, output_norm, tasks, own)
        self.dropout = nn.Dropout(dropout)
        self.head = TaskHead(c2, _class_counts(classes, tasks, shared_head), shared_head)

    @property
    def tasks(self) -> int:
        return self.body.tasks

    def forward(self, x: Tensor, task: int | None = 0, order: Sequence[int] | None = None) -> Tensor | list[Tensor]:
        """``task=None``: all tasks, ``[T, B, ...]`` -> ``[T, B, classes]``, a list where tasks differ in classes."""
        return self.head(self.dropout(self.embed(x, task, order)), None if task is None else int(task))

    def embed(self, x: Tensor, task: int | None = 0, order: Sequence[int] | None = None) -> Tensor:
        """The input of the head: ``[B, T, c2]``, of one task ``[B, 1, c2]``."""
        return self.output_adapter(self.features(x, task, order), task)

    def features(self, x: Tensor, task: int | None = 0, order: Sequence[int] | None = None) -> Tensor:
        """The result of the last block: ``[B, T, C, H', W']``, of one task ``[B, 1, C, H', W']``."""
        x = self.stacked(x, task)
        x = self.input_adapter(x, task)
        extra = (x,) if self.adapter_into_blocks else ()
        return self.body.forward_stacked(x, *extra, task=task, order=order)

    def stacked(self, x: Tensor, task: int | None) -> Tensor:
        """Checked images as ``[B, T or 1, C, H, W]``."""
        if task is not None:
            self.body.check_task(task)
            check_images(x, self.in_channels)
            x = x.unsqueeze(1)
        else:
            if not isinstance(x, Tensor) or x.dim() != 5 or x.shape[0] != self.tasks:
                found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"x: expected [T, B, C, H, W] with T = {self.tasks} for all tasks, got {found}")
            x = x.transpose(0, 1)
            check_images(x, self.in_channels, self.tasks)
        if min(x.shape[-2:]) < self.patch:
            raise ValueError(f"x: expected images of at least {self.patch} pixels a side, got shape {list(x.shape)}")
        return x

    def mixture(self, task: int | None = None) -> Tensor:
        """See :meth:`fastmod.nn.Compositional.mixture`."""
        return self.body.mixture(task)

    def signature(self, task: int = 0) -> list[int]:
        """See :meth:`fastmod.nn.Compositional.signature`."""
        return self.body.signature(task)

    def sharing(self, task: int, other: int) -> Tensor:
        """See :meth:`fastmod.nn.Compositional.sharing`."""
        return self.body.sharing(task, other)

    @torch.no_grad()
    def copy_statistics(self, source: int, target: int) -> None:
        """Give one task the batch norm statistics of another, in the layers and in the adapters."""
        self.body.copy_statistics(source, target)
        for norm in self.modules():
            if isinstance(norm, TaskNorm):
                for buffer in norm.buffers():
                    buffer[target] = buffer[source]

    def cluster_penalty(self, squared: bool = False) -> Tensor:
        """See :meth:`fastmod.nn.Compositional.cluster_penalty`."""
        return self.body.cluster_penalty(squared)

    def entropy_penalty(self) -> Tensor:
        """See :meth:`fastmod.nn.Compositional.entropy_penalty`."""
        return self.body.entropy_penalty()

    def harden(self) -> IsometricNet:
        """A copy of the net at its signatures: one template a layer."""
        found = copy.deepcopy(self)
        found.body = self.body.harden()
        return found

    def add_task(
        self,
        init: int | str | Sequence[float] = "uniform",
        *,
        classes: int | None = None,
        accuracies: Sequence[float] | None = None,
        loss: Callable[[], Tensor] | None = None,
        steps: int = 100,
        lr: float = 0.1,
    ) -> int:
        """One more task, see :meth:`fastmod.nn.Compositional.add_task`; its head is new (``classes``, by default as
        task 0) unless heads are shared. Returns its number."""
        coefficients = self.body.coefficients(init, accuracies, loss, steps, lr)
        source = 0 if coefficients is None else int(coefficients.argmax())
        with undone_on_error(self):
            self.head.add_task(classes)
            self.input_adapter.norm.add_task(source)
            self.output_adapter.add_task(source)
            return self.body.add_task(init, accuracies=accuracies, loss=loss, steps=steps, lr=lr)


def _output_channels(output: tuple[int, int] | None, channels: int) -> tuple[int, int]:
    if output is None:
        return (128, 256) if channels < 40 else (960, 1280)
    if not isinstance(output, (list, tuple)) or len(output) != 2:
        raise ValueError(f"output: expected two numbers of channels (c1, c2), got {output!r}")
    positive_sizes(c1=output[0], c2=output[1])
    return output[0], output[1]


def _class_counts(classes: int | Sequence[int], tasks: int, shared: bool) -> list[int]:
    if not isinstance(classes, (int, list, tuple)):
        raise TypeError(f"classes: expected an int or one for each of {tasks} tasks, got {classes!r}")
    counts = [classes] * tasks if isinstance(classes, int) else list(classes)
    if len(counts) != tasks:
        raise ValueError(f"classes: expected a number or one for each of {tasks} tasks, got {len(counts)}")
    for count in counts:
        positive_sizes(classes=count)
    if shared and len(set(counts)) > 1:
        raise ValueError(f"classes: expected one number where tasks share a head, got {counts}")
    return counts
