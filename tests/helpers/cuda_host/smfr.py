"""The launch functions of a stack of MFNNRs on the host: see csrc/cuda/smfr.cu."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

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

    def id(self) -> str:
        options = "" if self.context else "-alone"
        counts, hidden = ("-".join(map(str, sizes)) for sizes in (self.counts, self.hidden))
        return f"B{self.batch}-{counts}-D{self.d}-hidden{hidden}-{str(self.dtype)[6:]}{options}"


def check_stack(harness: Harness, case: Stack) -> None:
    """All three launches: that they run, and that they compute what the reference does; tests/ops has the digits."""
    batch, d, dtype = case.batch, case.d, case.dtype
    params: list[Tensor] = []
    for layer, (m, n) in enumerate(pairwise(case.counts)):
        params += linears(m * d, [*case.hidden, m * n], dtype, seed=100 * layer)
        params += linears((n + m * case.context) * d, [*case.hidden, n * d + n], dtype, seed=100 * layer + 50)
    per_layer, depth = 2 * len(case.hidden) + 2, len(case.counts) - 1
    x, grad_out = random(batch, case.counts[0], d, dtype=dtype), random(batch, case.counts[-1], d, dtype=dtype, seed=1)
    taus = [torch.tensor(0.7 + 0.1 * i) for i in range(depth)]
    widths = [sum(b.numel() for b in params[2 * per_layer * i + 1 : 2 * per_layer * (i + 1) : 2]) for i in range(depth)]
    sizes = [batch, case.counts[0], d, depth, per_layer // 2, per_layer // 2, SOFTMAX, case.context, True]
    ints = [*map(int, sizes), *case.counts[1:], *(size for weight in params[::2] for size in weight.shape)]

    def launch(name: str, layers: list[list[Tensor | Out | InOut | None]], weights: list, *own: object) -> list[Tensor]:
        buffers = [x, *(b for layer in layers for b in layer), *weights, *own]
        return harness.call(name, *buffers, ints=ints, floats=[case.threshold], dtype=dtype)

    forward = [
        [Out(batch, n * d, dtype=dtype), Out(batch, m * n, dtype=dtype), Out(batch, n, dtype=dtype),
         Out(batch * (widths[i] + n * d), dtype=F32), None, taus[i]]
        for i, (m, n) in enumerate(pairwise(case.counts))
    ]  # fmt: skip
    *found, penalty = launch("smfr_forward", forward, params, Out(1, dtype=F32))
    outs, saved = found[::4], found[3::4]
    kept = [
        [outs[i] if i + 1 < depth else None, None, None, saved[i], Out(batch * widths[i], dtype=F32), taus[i]]
        for i in range(depth)
    ]
    partials = Out(depth, -(-batch // TILE), dtype=F32)
    *grads, grad_x, tau_partials = launch(
        "smfr_backward",
        kept,
        params,
        grad_out,
        torch.tensor(0.3),
        Out(batch, case.counts[0] * d, dtype=dtype),
        partials,
    )
    left = [[*layer[:4], grads[i], Out(1, dtype=F32)] for i, layer in enumerate(kept)]
    got = launch("smfr_backward_weight", left, [Out(*p.shape, dtype=dtype) for p in params], tau_partials)

    leaves = [t.to(F64).requires_grad_() for t in (x, *taus, *params)]
    want = reference(
        leaves[0], leaves[1 + depth :], per_layer, leaves[1 : 1 + depth], [], SOFTMAX, case.context, case.threshold
    )
    exact = torch.autograd.grad((want.out * grad_out).sum() + 0.3 * want.penalty, leaves)
    ours = [outs[-1].view_as(want.out), penalty[0], grad_x.view_as(x), *(t.view(()) for t in got[:depth]), *got[depth:]]
    for result, expected in zip(ours, [want.out, want.penalty, *exact], strict=True):
        limit = 3e-2 if dtype != F32 else 1e-4
        torch.testing.assert_close(result.double(), expected.detach(), rtol=limit, atol=limit)


STACKS = [
    Stack(18),
    Stack(3, context=False, hidden=(9, 6, 7)),
    Stack(5, (2, 3), 4, (8,)),  # weights copied four at a time
    Stack(5, dtype=torch.bfloat16),
]
