"""The launch functions of a stack of MFNNRs on the host: see csrc/cuda/smfr.cu."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.ops.mfnnr import BATCH_TILE
from fastmod.ops.smfr import reference
from tests.helpers.cuda_host import Harness, InOut, Out
from tests.helpers.cuda_host.checks import F32, F64, SOFTMAX, linears, random

TILE = 16  # rows of a block


class Stack(NamedTuple):
    batch: int
    counts: tuple[int, ...] = (3, 4, 2)
    d: int = 5
    hidden: tuple[int, ...] = (9,)
    dtype: torch.dtype = F32
    context: bool = True
    threshold: float = 0.5
    copies: int = 1  # each with an x of its own too

    def id(self) -> str:
        options = ("" if self.context else "-alone") + (f"-{self.copies}copies" if self.copies > 1 else "")
        counts, hidden = ("-".join(map(str, sizes)) for sizes in (self.counts, self.hidden))
        return f"B{self.batch}-{counts}-D{self.d}-hidden{hidden}-{str(self.dtype)[6:]}{options}"


def check_stack(harness: Harness, case: Stack) -> None:
    """All three launches: that they run, and that they compute what the reference does; tests/ops has the digits."""
    batch, d, dtype, copies = case.batch, case.d, case.dtype, case.copies
    nets: list[list[Tensor]] = []
    for copy in range(copies):
        nets.append([])
        for layer, (m, n) in enumerate(pairwise(case.counts)):
            seed = 1000 * copy + 100 * layer
            nets[copy] += linears(m * d, [*case.hidden, m * n], dtype, seed=seed)
            nets[copy] += linears((n + m * case.context) * d, [*case.hidden, n * d + n], dtype, seed=seed + 50)
    params = [torch.stack(same) for same in zip(*nets, strict=True)]
    per_layer, depth = 2 * len(case.hidden) + 2, len(case.counts) - 1
    x = random(copies, batch, case.counts[0], d, dtype=dtype)
    grad_out = random(copies, batch, case.counts[-1], d, dtype=dtype, seed=1)
    taus = [0.7 + 0.1 * i + 0.05 * torch.arange(copies) for i in range(depth)]
    of_penalty = 0.3 + torch.arange(copies)
    widths = [
        sum(b.shape[1] for b in params[2 * per_layer * i + 1 : 2 * per_layer * (i + 1) : 2]) for i in range(depth)
    ]
    sizes = [batch, copies, case.counts[0], d, depth, per_layer // 2, per_layer // 2, SOFTMAX, case.context, True]
    ints = [*map(int, sizes), *case.counts[1:], *(size for weight in params[::2] for size in weight.shape[1:])]

    def launch(name: str, layers: list[list[Tensor | Out | InOut | None]], weights: list, *own: object) -> list[Tensor]:
        buffers = [x, *(b for layer in layers for b in layer), *weights, *own]
        return harness.call(name, *buffers, ints=ints, floats=[case.threshold], dtype=dtype)

    rows = batch * copies
    kept_rows = (copies - 1) * -(-batch // BATCH_TILE) * BATCH_TILE + batch  # the last needs no padding
    forward = [
        [Out(rows, n * d, dtype=dtype), Out(rows, m * n, dtype=dtype), Out(rows, n, dtype=dtype),
         Out(kept_rows * (widths[i] + n * d), dtype=F32), None, taus[i]]
        for i, (m, n) in enumerate(pairwise(case.counts))
    ]  # fmt: skip
    *found, penalty = launch("smfr_forward", forward, params, Out(copies, dtype=F32))
    outs, saved = found[::4], found[3::4]
    kept = [
        [outs[i] if i + 1 < depth else None, None, None, saved[i], Out(rows * widths[i], dtype=F32), taus[i]]
        for i in range(depth)
    ]
    partials = Out(copies, depth, -(-batch // TILE), dtype=F32)
    *grads, grad_x, tau_partials = launch(
        "smfr_backward", kept, params, grad_out, of_penalty, Out(rows, case.counts[0] * d, dtype=dtype), partials
    )
    left = [[*layer[:4], grads[i], Out(copies, dtype=F32)] for i, layer in enumerate(kept)]
    got = launch("smfr_backward_weight", left, [Out(*p.shape, dtype=dtype) for p in params], tau_partials)

    ours = [outs[-1].view_as(grad_out), penalty, grad_x.view_as(x), *got]
    for copy in range(copies):
        leaves = [t[copy].to(F64).requires_grad_() for t in (x, *taus, *params)]
        want = reference(
            leaves[0], leaves[1 + depth :], per_layer, leaves[1 : 1 + depth], [], SOFTMAX, case.context, case.threshold
        )
        exact = torch.autograd.grad((want.out * grad_out[copy]).sum() + of_penalty[copy] * want.penalty, leaves)
        for result, expected in zip(ours, [want.out, want.penalty, *exact], strict=True):
            limit = 3e-2 if dtype != F32 else 1e-4
            torch.testing.assert_close(result[copy].double(), expected.detach(), rtol=limit, atol=limit)


STACKS = [
    Stack(18),
    Stack(3, context=False, hidden=(9, 6, 7)),
    Stack(5, (2, 3), 4, (8,)),  # weights copied four at a time
    Stack(5, dtype=torch.bfloat16),
    Stack(18, (2, 3, 2), 3, copies=3),
]
