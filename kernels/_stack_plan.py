"""What the launchers of a stack of MFNNRs compute before they launch: which stacks fit, sizes, tiles, and where every
tensor is in memory. The kernels are in smfr.py and _stack.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import TRITON_TYPES, compute_type, each_contiguous, row_tile
from fastmod.kernels._images import power, precision
from torch import Tensor

from fastmod.ops._checks import compute_dtype
from fastmod.ops.mfnnr import BATCH_TILE

#: Stacks with wider hidden layers go layer by layer: see mfnnr.py.
FUSED_HIDDEN = 128
#: The most blocks that a layer may read: the scores of a column are one tile.
MOST_BLOCKS = 1024
#: The arguments of a kernel may take 32,764 bytes.
MOST_POINTERS = 2000


class Layer(NamedTuple):
    route: Sequence[Tensor]
    update: Sequence[Tensor]
    tau: Tensor | None
    seed: Tensor | None

    @property
    def params(self) -> list[Tensor]:
        return [*self.route, *self.update]

    @property
    def widths(self) -> list[int]:
        """The widths of the linear layers."""
        return [bias.shape[-1] for bias in self.params[1::2]]

    @property
    def hidden(self) -> list[int]:
        return [bias.shape[-1] for bias in [*self.route[1:-1:2], *self.update[1:-1:2]]]

    @property
    def nets(self) -> torch.Size:
        """``[copies]`` if the parameters are those of many nets, else ``[]``."""
        return self.route[0].shape[:-2]


def layers_of(
    params: Sequence[Tensor], fnn_tensors: int, taus: Sequence[Tensor], seeds: Sequence[Tensor]
) -> list[Layer]:
    found = []
    for i, at in enumerate(range(0, len(params), 2 * fnn_tensors)):
        cut = at + fnn_tensors
        tau, seed = taus[i] if taus else None, seeds[i] if seeds else None
        found.append(Layer(params[at:cut], params[cut : cut + fnn_tensors], tau, seed))
    return found


def counts_of(x: Tensor, layers: Sequence[Layer]) -> list[int]:
    """The blocks that enter the first layer and those that leave each layer: one count more than there are layers."""
    counts = [x.shape[-2]]
    for layer in layers:
        counts.append(layer.route[-1].shape[-1] // counts[-1])
    return counts


def fits(x: Tensor, layers: Sequence[Layer]) -> bool:
    """Whether the kernels of smfr.py can handle a stack; this is the only place that decides it. fp64 goes layer by
    layer, as its exponentials alone take all scalar registers of an AMD GPU."""
    pointers = sum(2 * len(layer.params) + 5 for layer in layers)
    hidden = max((width for layer in layers for width in layer.hidden), default=0)
    small = hidden <= FUSED_HIDDEN and max(counts_of(x, layers)) <= MOST_BLOCKS and pointers <= MOST_POINTERS
    return small and x.dtype != torch.float64


def numbers_of(x: Tensor, layers: Sequence[Layer], context: bool) -> tuple[int, ...]:
    """The sizes that the kernels read: of layers, then of linear layers."""
    d, counts = x.shape[-1], counts_of(x, layers)
    sizes: list[int] = []
    linears: list[int] = []
    before = 0
    for layer, (m, n) in zip(layers, pairwise(counts), strict=True):
        routes = len(layer.route) // 2
        logits = sum(layer.widths[: routes - 1])
        new = sum(layer.widths[:-1]) + n * d
        sizes += [m, n, before, logits, logits + m * n, new, *layer.widths]
        at = 0  # offset of this linear layer's results in the layer's activations
        for i, width in enumerate(layer.widths):
            if i == routes:
                at += n * d  # the routed blocks
                source, kept = at - n * d, n * d
                inputs = (n + m if context else n) * d
            elif i == 0:
                source, kept, inputs = 0, 0, m * d
            else:
                kept = inputs = layer.widths[i - 1]
                source = at - kept
            linears += [width, inputs, source, kept, before + at]
            at += width
        before += at
    return (*sizes, *linears)


def tile(counts: Sequence[int], d: int) -> dict[str, int]:
    """BLOCK_B is 16, the least that tl.dot takes: a batch of 128 then runs on eight multiprocessors."""
    block_m = power(max(counts[:-1]), 2, MOST_BLOCKS)
    rows = triton.next_power_of_2(16 * max(counts))
    return {
        "BLOCK_B": 16, "BLOCK_O": 64, "BLOCK_K": 32, **row_tile(d, tl.float32, rows=rows),
        "BLOCK_M": block_m, "BLOCK_S": min(rows, 1024 // block_m),
    }  # fmt: skip


def kind(x: Tensor) -> int:
    """As for other fp32 products; reduced precision is widened to fp32, as activations are fp32."""
    return precision(x if x.dtype == torch.float32 else x.new_empty(0, dtype=torch.float32))


class Place(NamedTuple):
    """Where a tensor begins, and the distance in bytes to that of the next net: a fixed part, and bytes per row and per
    padded row. 0: one for all nets."""

    tensor: Tensor
    step: int = 0
    of_row: int = 0
    of_padded_row: int = 0


class Plan(NamedTuple):
    """Shared by forward and backward of a stack."""

    x: Tensor  # [B, M, D] for every net, or one for all nets; contiguous
    shared: bool  # one x for all nets
    rounded: Tensor | None  # where the kernel stores each net's x if it is to be read in another dtype
    seeds: list[Place]  # of layers that have one
    taus: list[Place]
    params: list[list[Place]]  # of every layer, contiguous for every net
    counts: list[int]
    copies: int
    batch: int  # rows per net
    constants: dict[str, Any]

    @property
    def first(self) -> Place:
        """What the first layer reads."""
        if self.rounded is not None:
            return self.of_rows(self.rounded)
        return Place(self.x) if self.shared else self.of_rows(self.x)

    @property
    def programs(self) -> int:
        """Programs per net."""
        return triton.cdiv(self.batch, self.constants["BLOCK_B"])

    @property
    def most_weights(self) -> int:
        return max(m * n for m, n in pairwise(self.counts))

    def scratch(self, columns: int) -> Tensor:
        """``columns`` numbers of the compute dtype for every row of every program, whether the row exists or not."""
        rows = self.copies * self.programs * self.constants["BLOCK_B"]
        return self.x.new_empty(rows * columns, dtype=compute_dtype(self.x))

    def of_rows(self, tensor: Tensor) -> Place:
        """A contiguous tensor with a part for every row of every net."""
        return Place(tensor, of_row=tensor.nbytes // (self.copies * self.batch))

    def of_padded_rows(self, tensor: Tensor) -> Place:
        padded = triton.cdiv(self.batch, BATCH_TILE) * BATCH_TILE
        return Place(tensor, of_padded_row=tensor.nbytes // (self.copies * padded))

    def of_nets(self, tensor: Tensor) -> Place:
        """A contiguous tensor with a part for every net."""
        return Place(tensor, tensor.nbytes // self.copies)

    def arguments(self, places: Sequence[Place]) -> dict[str, Any]:
        """Arguments of a kernel, which writes its table from the places of all layers."""
        size = len(places) + len(self.constants["NUMBERS"])
        return {
            "pointers": tuple(place.tensor for place in places),
            "table_ptr": self.x.new_empty(self.copies * self.programs * size, dtype=torch.int64),
            "x_ptr": self.x, "rounded_ptr": self.rounded, "B": self.batch, "DEPTH": len(self.params),
            "MOST_WEIGHTS": self.most_weights, "SHARED": self.shared,
            "STEPS": tuple(place[1:] for place in places) if self.copies > 1 else None, **self.constants,
        }  # fmt: skip


def plan(x: Tensor, layers: Sequence[Layer], mode: int, context: bool, low: torch.dtype | None) -> Plan:
    """``low``: the dtype that x and parameters are treated as, None for their own."""
    nets, d, wide = layers[0].nets, x.shape[-1], compute_type(x)
    copies, batch = nets.numel(), x.shape[len(nets) : -2].numel()
    taus = [layer.tau for layer in layers if layer.tau is not None]
    one = taus[0].dtype if taus else None  # one for all temperatures, as the kernel reads them as one type

    def dense(tensor: Tensor) -> Place:
        found, step = each_contiguous(tensor, copies)
        return Place(found, step * tensor.element_size())

    def number(tensor: Tensor) -> Place:
        return Place(tensor, tensor.stride(0) * tensor.element_size() if tensor.dim() else 0)

    counts = counts_of(x, layers)
    constants = {
        "NUMBERS": numbers_of(x, layers, context), "D": d, "ROUTE": len(layers[0].route) // 2,
        "UPDATE": len(layers[0].update) // 2, "CONTEXT": context, "MODE": mode,
        "TAU": None if one is None else TRITON_TYPES[one], **tile(counts, d), "PRECISION": kind(x),
        "PT": TRITON_TYPES[layers[0].route[0].dtype], "DT": TRITON_TYPES[low or x.dtype], "CT": wide,
    }  # fmt: skip
    blocks, step = each_contiguous(x, copies)
    size = copies * batch, *x.shape[-2:]
    return Plan(
        blocks, copies > 1 and step == 0,
        None if low in (None, x.dtype) else x.new_empty(size, dtype=low),
        [number(layer.seed) for layer in layers if layer.seed is not None], [number(tau.to(one)) for tau in taus],
        [[dense(p) for p in layer.params] for layer in layers], counts, copies, batch, constants,
    )  # fmt: skip
