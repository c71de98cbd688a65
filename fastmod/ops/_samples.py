"""What the file of an op says about inputs: ``SAMPLES``, small and odd sizes, and ``SHAPES``, those of the papers.

:mod:`fastmod.samples` and :mod:`fastmod.gpu.shapes` find them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Call = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Sample:
    """One call of an op: the shapes of its tensors and how to call it with them."""

    op: str
    label: str
    shapes: tuple[tuple[int, ...], ...]
    call: Call  # tensors -> differentiable outputs

    def tensors(self, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[Tensor]:
        """Leaves that require grad, the same values for every dtype and device; 0-d ones (temperatures) are > 0."""
        generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=generator) for shape in self.shapes]
        values = [value if value.dim() else value.abs() + 0.5 for value in values]
        return [value.to(device=device, dtype=dtype).requires_grad_() for value in values]

    def run(self, tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Forward and backward with fixed output gradients: named outputs and gradients, detached."""
        outputs = list(self.call(tensors))
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
        found = torch.autograd.grad(outputs, list(tensors), grads)
        named = [(f"output {i}", out.detach()) for i, out in enumerate(outputs)]
        return named + [(f"gradient {i}", grad) for i, grad in enumerate(found)]


@dataclass(frozen=True)
class Shape(Sample):
    """``label`` is what tables show; without commas, as they are also csv."""

    products: int = 0  # multiply-adds of the forward that are matrix products; the backward has twice as many
    wide: tuple[int, ...] = ()  # tensors that are fp32 where others are bf16 or fp16: those of batch norm
    #: The same written without fastmod. It launches what users would launch; where there is noise, values differ.
    plain: Call | None = None
    copies: int = 0  # of nets: all tensors have them in front

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}"

    def tensors(self, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[Tensor]:
        """Matrices of an FNN are scaled as a layer initialises them; otherwise outputs of a stack would be chaotic."""
        values = super().tensors(dtype=dtype, device=device, seed=seed)
        for i, value in enumerate(values):
            wide = i in self.wide and dtype.itemsize == 2
            matrix = value.dim() == (3 if self.copies else 2)
            scale = value.shape[-1] ** -0.5 if self.op in ("smfr", "mfnnr") and matrix else 1.0
            variance = self.op == "batch_affine" and i == 1
            if wide or variance or scale != 1.0:
                made = value.detach().to(torch.float32 if wide else dtype) * scale
                values[i] = (made.square() + 0.5 if variance else made).requires_grad_()
        return values

    def bytes_moved(self, dtype: torch.dtype) -> tuple[int, int]:
        """In forward and backward, if every input is read once and every result written once."""
        kinds = [torch.float32 if i in self.wide else dtype for i in range(len(self.shapes))]
        tensors = [torch.empty(size, dtype=kind, device="meta") for size, kind in zip(self.shapes, kinds, strict=True)]
        inputs, outputs = (sum(value.nbytes for value in some) for some in (tensors, self.call(tensors)))
        return inputs + outputs, 2 * inputs + outputs


def fnn_shapes(*sizes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(shape for i, o in pairwise(sizes) for shape in ((o, i), (o,)))
