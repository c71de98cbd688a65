"""The launch functions of csrc/cuda/mfnnr*.cu on the host, put together as csrc/cuda/mfnnr_binding.cpp does."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.ops._checks import compute_dtype
from fastmod.ops.mfnnr import LEAKY_SLOPE, NO_PENALTY
from fastmod.ops.mfnnr import reference as mfnnr_reference
from tests.helpers.cuda_host import Harness, InOut, Out
from tests.helpers.cuda_host.checks import F32, F64, SEED, SOFTMAX, Results, assert_draws_close, linears, random


class Mfnnr(NamedTuple):
    sizes: tuple[int, int, int, int]  # B, M, N, D
    route: tuple[int, ...] = ()  # hidden widths
    update: tuple[int, ...] = ()
    dtype: torch.dtype = F32
    mode: int = SOFTMAX
    context: bool = True
    threshold: float = 1.0
    scale: float = 1.0

    @property
    def wide(self) -> torch.dtype:
        return compute_dtype(torch.empty(0, dtype=self.dtype))

    def id(self) -> str:
        widths = f"route{'-'.join(map(str, self.route))}-update{'-'.join(map(str, self.update))}"
        options = f"mode{self.mode}" + ("" if self.context else "-alone")
        return "B{}-M{}-N{}-D{}".format(*self.sizes) + f"-{widths}-{str(self.dtype)[6:]}-{options}-x{self.scale:g}"


class Forward(NamedTuple):
    out: Tensor
    penalty: Tensor
    logits: Tensor
    gate: Tensor
    route_kept: list[Tensor]  # hidden layers, then the logits; of the compute dtype, as those that follow
    routed: Tensor
    update_kept: list[Tensor]  # hidden layers, then new values and gates


#: A matrix that a linear layer reads: a part of the compute dtype and one of that of x, side by side.
Joined = tuple[Tensor | None, Tensor | None]


def joined_sizes(parts: Joined) -> tuple[int, int]:
    first, rest = (0 if part is None else part.shape[1] for part in parts)
    return first, first + rest


def update_input(case: Mfnnr, routed: Tensor, x: Tensor) -> Joined:
    return routed, x.flatten(1) if case.context else None


def launched_forward(
    harness: Harness, case: Mfnnr, x: Tensor, route: list[Tensor], update: list[Tensor], tau: float
) -> Forward:
    batch, m, n, d = case.sizes
    dtype, wide = case.dtype, case.wide

    def fnn(parts: Joined, params: list[Tensor], copied: bool) -> tuple[list[Tensor], list[Tensor]]:
        kept, copies = [], []
        for i in range(0, len(params), 2):
            last, width = i + 2 == len(params), params[i + 1].numel()
            copy = Out(batch, width, dtype=dtype) if last and copied else None
            found, *copies = harness.call(
                "mfnnr_linear", *parts, *params[i : i + 2], Out(batch, width, dtype=wide), copy,
                ints=[batch, *joined_sizes(parts), width, int(not last), 0], dtype=dtype,
            )  # fmt: skip
            kept.append(found)
            parts = found, None
        return kept, copies

    route_kept, (logits,) = fnn((None, x.flatten(1)), route, copied=True)
    _, routed = harness.call(
        "mfnnr_route", x, route_kept[-1], Out(batch, m * n, dtype=wide), Out(batch, n * d, dtype=wide), None, None,
        ints=[*case.sizes, case.mode, SEED], floats=[tau], dtype=dtype,
    )  # fmt: skip
    update_kept, _ = fnn(update_input(case, routed, x), update, copied=False)
    out, gate, _, penalty = harness.call(
        "mfnnr_gate", routed, update_kept[-1], route_kept[-1], Out(batch, n * d, dtype=dtype),
        Out(batch, n, dtype=dtype), Out(batch, dtype=wide), InOut(torch.zeros(1, dtype=wide)),
        ints=[*case.sizes, 1], floats=[case.threshold], dtype=dtype,
    )  # fmt: skip
    return Forward(out, penalty[0], logits, gate, route_kept, routed, update_kept)


def launched_backward(
    harness: Harness, case: Mfnnr, kept: Forward, grad_out: Tensor | None, grad_penalty: Tensor | None, x: Tensor,
    route: list[Tensor], update: list[Tensor], tau: float,
) -> list[Tensor]:  # fmt: skip
    """[x, tau, route.., update..]"""
    batch, m, n, d = case.sizes
    dtype, wide = case.dtype, case.wide

    def linear(
        grads: Tensor, weight: Tensor, *buffers: Tensor | Out | InOut | None, first: int, add: bool = False
    ) -> list[Tensor]:
        sizes = [batch, *weight.shape, first, int(add), 0]
        return harness.call("mfnnr_linear_backward", grads, weight, *buffers, ints=sizes, dtype=dtype)

    def fnn(grad: Tensor, params: list[Tensor], hidden: list[Tensor]) -> list[Tensor]:
        """Gradients of every linear layer's output."""
        grads = [grad]
        for weight, below in zip(params[-2:0:-2], reversed(hidden), strict=True):
            size = below.shape[1]
            found = linear(grads[0], weight, below, None, Out(batch, size, dtype=wide), None, None, first=size)
            grads = [*found, *grads]
        return grads

    grad_routed, grad_updated = harness.call(
        "mfnnr_gate_backward", grad_out, kept.routed, kept.update_kept[-1], Out(batch, n * d, dtype=wide),
        Out(batch, n * d + n, dtype=wide), grad_penalty, ints=case.sizes, floats=[case.threshold], dtype=dtype,
    )  # fmt: skip
    update_grads = fnn(grad_updated, update, kept.update_kept[:-1])
    rest = Out(batch, m * d, dtype=wide) if case.context else None
    grad_routed, *grad_context = linear(
        update_grads[0], update[0], None, None, InOut(grad_routed), None, rest, first=n * d, add=True
    )
    grad_logits, _, grad_blocks, tau_partials = harness.call(
        "mfnnr_route_backward", grad_routed, x, kept.route_kept[-1], Out(batch, m * n, dtype=wide),
        Out(batch, m * n, dtype=wide), InOut(grad_context[0]) if grad_context else Out(batch, m * d, dtype=wide),
        Out(batch, dtype=wide), None, None, grad_penalty,
        ints=[*case.sizes, case.mode, SEED, int(case.context)], floats=[tau, case.threshold], dtype=dtype,
    )  # fmt: skip
    route_grads = fnn(grad_logits, route, kept.route_kept[:-1])
    x_out = Out(batch, m * d, dtype=dtype)
    (grad_x,) = linear(route_grads[0], route[0], None, grad_blocks, None, x_out, None, first=m * d)

    tensors: list[Tensor | Out | None] = []
    sizes = []
    each = (
        (route, route_grads, (None, x.flatten(1)), kept.route_kept),
        (update, update_grads, update_input(case, kept.routed, x), kept.update_kept),
    )
    for params, grads, first, outputs in each:
        below: list[Joined] = [first, *((t, None) for t in outputs[:-1])]
        for weight, grad, parts in zip(params[::2], grads, below, strict=True):
            tensors += [grad, *parts, Out(*weight.shape, dtype=dtype), Out(weight.shape[0], dtype=dtype)]
            sizes += [weight.shape[0], *joined_sizes(parts)]
    grad_tau, *found = harness.call(
        "mfnnr_weights", tau_partials, Out(1, dtype=wide), *tensors, ints=[batch, len(sizes) // 3, 0, *sizes],
        dtype=dtype,
    )  # fmt: skip
    return [grad_x.view(x.shape), grad_tau[0], *found]


def plain_mfnnr(
    case: Mfnnr, x: Tensor, route: list[Tensor], update: list[Tensor], tau: float, dtype: torch.dtype, with_grads: bool,
    grad_out: Tensor | None, grad_penalty: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """[out, penalty, logits, gate] of the reference in ``dtype``, then its gradients by autograd."""
    leaves = [t.to(dtype).requires_grad_() for t in [x, torch.tensor(tau, dtype=F64), *route, *update]]
    split = 2 + len(route)
    result = mfnnr_reference(
        leaves[0], leaves[2:split], leaves[split:], leaves[1], 1.0, torch.tensor(SEED), case.mode, case.context,
        case.threshold,
    )  # fmt: skip
    values = [t.detach().flatten(1) if t.dim() > 1 else t.detach() for t in result]
    if not with_grads:
        return values
    loss = leaves[0].sum() * 0  # without a penalty, its gradient reaches nothing
    for value, grad in ((result.out.flatten(1), grad_out), (result.penalty, grad_penalty)):
        if grad is not None:
            loss = loss + (value * grad.to(value.dtype)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return values + [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)]


def check_mfnnr(harness: Harness, case: Mfnnr, grad_of: str = "both", draws: int = 1) -> None:
    found = [mfnnr_results(harness, case, grad_of, seed) for seed in range(draws if case.dtype == F32 else 1)]
    assert_draws_close(found, grad_tau=case.scale * case.sizes[0] * case.sizes[2])


def mfnnr_results(harness: Harness, case: Mfnnr, grad_of: str, draw: int) -> Results:
    batch, m, n, d = case.sizes
    dtype, tau = case.dtype, 0.75
    x = random(batch, m, d, dtype=dtype, scale=case.scale, seed=100 * draw)
    route = linears(m * d, [*case.route, m * n], dtype, seed=100 * draw + 10)
    update = linears((n + m if case.context else n) * d, [*case.update, n * d + n], dtype, seed=100 * draw + 20)
    grad_out = random(batch, n * d, dtype=dtype, seed=100 * draw + 5) if grad_of != "penalty" else None
    penalised = case.threshold != NO_PENALTY and grad_of != "out"
    grad_penalty = torch.tensor(0.3, dtype=case.wide) if penalised else None

    kept = launched_forward(harness, case, x, route, update, tau)
    exact, usual = (
        plain_mfnnr(case, x, route, update, tau, kind, batch > 0, grad_out, grad_penalty) for kind in (F64, dtype)
    )
    got = [kept.out, kept.penalty, kept.logits, kept.gate]
    names = ["out", "penalty", "logits", "gate"]
    if batch > 0:  # an empty batch never reaches a backward kernel
        usual[5] = usual[5].to(case.wide)  # gradient of tau
        got += launched_backward(harness, case, kept, grad_out, grad_penalty, x, route, update, tau)
        names += ["grad_x", "grad_tau"]
        names += [f"grad_route[{i}]" for i in range(len(route))] + [f"grad_update[{i}]" for i in range(len(update))]
        for layer, hidden in enumerate(kept.route_kept[:-1]):
            below = kept.route_kept[layer - 1] if layer else x.flatten(1).to(case.wide)
            weight, bias = (p.to(case.wide) for p in route[2 * layer : 2 * layer + 2])
            want = F.leaky_relu(F.linear(below, weight, bias), LEAKY_SLOPE)
            torch.testing.assert_close(hidden, want, rtol=1e-4, atol=1e-5 * case.scale)
    return {name: (a, b, c) for name, a, b, c in zip(names, got, exact, usual, strict=True)}


SMALL_MFNNR = Mfnnr((17, 3, 4, 5), (9,), (6, 7))
