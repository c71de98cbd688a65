"""Softmax routing of blocks: ``multiplex``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod._compiler import in_graph
from fastmod._private import transformed
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample

#: Routing modes and their numbers in the kernels.
MODES = {"softmax": 0, "gumbel": 1, "argmax": 2}


def multiplex(
    blocks: Tensor,
    logits: Tensor,
    *,
    mode: str = "softmax",
    tau: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Route M blocks to N outputs, each a weighted average of all M blocks.

    Args:
        blocks: ``[..., M, D]``.
        logits: ``[..., M, N]``; the weights are ``softmax(logits / tau)`` over M.
        mode: ``"softmax"``; ``"gumbel"``: straight-through Gumbel-softmax, the forward picks one block per output,
            the gradient is that of the relaxed sample; ``"argmax"``: the same without noise, for evaluation.
        tau: temperature, a float or a 0-d tensor that may require grad.
        seed: of the Gumbel noise, an int or an int64 0-d tensor; ``None`` draws one from torch's generator. A tensor
            may be advanced in place after the backward, which reads it again, and not before.

    Returns:
        ``[..., N, D]`` in the dtype of ``blocks``.
    """
    code = mode_code(mode)
    chosen = backend.resolve("multiplex", blocks)
    if backend.checks_first(chosen):
        _check(blocks, logits)
    tau_tensor, tau_value = _checks.positive_tau(tau, blocks)
    seed_value = seed_for(mode, seed, blocks)
    if chosen == "reference":
        with backend.reference_autocast(blocks, logits) as (blocks, logits):
            return reference(blocks, logits, tau_tensor, tau_value, seed_value, code)
    try:
        low, triton = None, chosen == "triton"
        if backend.autocasts(blocks):
            low = backend.rounded_by_kernel(blocks, logits)
            if low is None:
                blocks, logits = backend.lowered(blocks, logits)
        return _run(blocks, logits, tau_tensor, tau_value, seed_value, code, triton, low)
    except Exception:
        _check(blocks, logits)
        raise


def _check(blocks: Tensor, logits: Tensor) -> None:
    _checks.float_tensor("blocks", blocks, 2, "[..., M, D]")
    _checks.float_tensor("logits", logits, 2, "[..., M, N]")
    _checks.same_kind("blocks", blocks, "logits", logits)
    if blocks.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"logits: expected [..., M, N] with the leading sizes of blocks {_checks.shape(blocks)[:-1]}, "
            f"got shape {_checks.shape(logits)}"
        )
    if blocks.shape[-2] == 0:
        raise ValueError(f"blocks: expected [..., M, D] with M >= 1, got shape {_checks.shape(blocks)}")


def mode_code(mode: str) -> int:
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(map(repr, MODES))}, got {mode!r}")
    return MODES[mode]


def seed_for(mode: str, seed: int | Tensor | None, like: Tensor) -> Tensor | None:
    """The seed of a routing with noise; without noise, a given seed is checked all the same."""
    if mode == "gumbel":
        return noise.seed_tensor(seed, like.device)
    if seed is not None:
        noise.seed_tensor(seed, like.device)
    return None


def routing_weights(logits: Tensor, tau: Tensor | None, tau_value: float, seed: Tensor | None, mode: int) -> Tensor:
    """The weights ``[..., M, N]`` in plain PyTorch: soft, or one-hot with the gradient of the soft ones."""
    if tau is not None:
        if tau.device.type == "cpu" and not transformed() and not tau.item() > 0:
            raise ValueError(f"tau: expected a number > 0, got {tau.item()}")
        temperature: Tensor | float = tau.to(logits.dtype)
    else:
        temperature = tau_value
    if mode == MODES["gumbel"]:
        assert seed is not None
        logits = logits + noise.gumbel(
            seed, logits.shape, stream=noise.STREAM_MULTIPLEX, dtype=logits.dtype, device=logits.device
        )
    scaled = logits / temperature
    soft = scaled.softmax(dim=-2)
    if mode == MODES["softmax"]:
        return soft
    hard = torch.zeros_like(soft).scatter(-2, scaled.argmax(dim=-2, keepdim=True), 1.0)
    return hard + (soft - soft.detach())  # a NaN in `soft` stays a NaN


def reference(
    blocks: Tensor, logits: Tensor, tau: Tensor | None, tau_value: float, seed: Tensor | None, mode: int
) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(blocks)
    weights = routing_weights(logits.to(wide), tau, tau_value, seed, mode)  # [..., M, N]
    return (weights.transpose(-1, -2) @ blocks.to(wide)).to(blocks.dtype)


def fake_forward(
    blocks: Tensor,
    logits: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    low: torch.dtype | None = None,
) -> Tensor:
    _checks.one_device(blocks, logits, tau)
    return blocks.new_empty(*blocks.shape[:-2], logits.shape[-1], blocks.shape[-1], dtype=low or blocks.dtype)


def fake_backward(
    grad: Tensor,
    blocks: Tensor,
    logits: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        blocks.new_empty(blocks.shape),
        logits.new_empty(logits.shape),
        blocks.new_empty(copies_of(tau, seed), dtype=_checks.tau_dtype(tau, blocks)),  # gradient of tau
    )


def copies_of(tau: Tensor | None, seed: Tensor | None) -> torch.Size:
    """``[copies]`` for a call with many copies: temperature and seed, where given, then have one entry per copy, all
    other tensors the copies as leading dimension. Otherwise empty."""
    return next((t.shape for t in (seed, tau) if t is not None), torch.Size())


def _rule(overload: Any, tensors: int, *, keep_tau: bool) -> _autograd.Rule:
    """All elements in one call: as a larger batch, or as copies, which the kernels keep apart, where noise depends on
    the position or, in the backward, the gradient of a temperature sums over the batch."""
    fold, loop = _autograd.folded(overload, tensors), _autograd.by_elements(overload)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        tau, _, _, mode, *_ = arguments[tensors:]
        apart = mode == MODES["gumbel"] or _autograd.batched(in_dims[tensors]) or (keep_tau and tau is not None)
        numbers = slice(tensors, tensors + 3, 2)  # tau and seed
        pairs = zip(arguments[numbers], in_dims[numbers], strict=True)
        one = all(t is None or t.dim() == _autograd.batched(dim) for t, dim in pairs)
        if apart and one:
            fronts = [_autograd.with_copies(info, a, d) for a, d in zip(arguments, in_dims, strict=True)]
            return overload(*fronts), (0, 0, 0) if keep_tau else 0
        if apart:
            return loop(info, in_dims, *arguments)
        found, dims = fold(info, in_dims, *arguments)
        return (found, (0, 0, None)) if keep_tau else (found, dims)  # the third would be the gradient of a temperature

    return rule


FORWARD = _autograd.define(
    "multiplex_forward(Tensor blocks, Tensor logits, Tensor? tau, float tau_value, Tensor? seed, int mode, "
    "ScalarType? low=None) -> Tensor",
    fake_forward,
    lambda overload: _rule(overload, 2, keep_tau=False),
)
BACKWARD = _autograd.define(
    "multiplex_backward(Tensor grad, Tensor blocks, Tensor logits, Tensor? tau, float tau_value, Tensor? seed, "
    "int mode, ScalarType? low=None) -> (Tensor, Tensor, Tensor)",
    fake_backward,
    lambda overload: _rule(overload, 3, keep_tau=True),
)


class Multiplex(_autograd.Op):
    @staticmethod
    def forward(
        triton: bool,
        tau_value: float,
        mode: int,
        rounding: tuple[torch.dtype, ...],
        blocks: Tensor,
        logits: Tensor,
        tau: Tensor | None,
        seed: Tensor | None,
    ) -> Tensor:
        return FORWARD[triton](blocks, logits, tau, tau_value, seed, mode, *rounding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.numbers = inputs[:4]
        ctx.save_for_backward(*inputs[4:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = _autograd.gradients(_by_kernel, _by_reference, ctx.numbers, grad, *ctx.saved_tensors)
        return None, None, None, None, found[0], found[1], found[2] if len(found) == 3 else None, None


def _by_kernel(
    numbers: tuple[Any, ...], grad: Tensor, blocks: Tensor, logits: Tensor, tau: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of blocks, logits and, if it is there, tau."""
    triton, tau_value, mode, rounding = numbers
    found = BACKWARD[triton](grad, blocks, logits, tau, tau_value, seed, mode, *rounding)
    return found[:2] if tau is None else (found[0], found[1], found[2].to(tau.dtype))


def _by_reference(numbers: tuple[Any, ...], grad: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    _, tau_value, mode, rounding = numbers

    def plain(blocks: Tensor, logits: Tensor, tau: Tensor | None, seed: Tensor | None) -> Tensor:
        blocks, logits = _checks.in_dtype(rounding[0] if rounding else None, blocks, logits)
        return reference(blocks, logits, tau, tau_value, seed, mode)

    return _autograd.vjp_at(plain, (0, 1) if tensors[2] is None else (0, 1, 2), grad, *tensors)


@in_graph
def _run(
    blocks: Tensor,
    logits: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
    triton: bool,
    low: torch.dtype | None,
) -> Tensor:
    rounding = () if low is None else (low,)
    if _autograd.wanted(blocks, logits, tau):
        return _autograd.apply(Multiplex, triton, tau_value, mode, rounding, blocks, logits, tau, seed)
    return FORWARD[triton](blocks, logits, tau, tau_value, seed, mode, *rounding)


SAMPLES = (
    Sample("multiplex", "softmax", ((3, 5, 7), (3, 5, 3), ()), lambda t: [multiplex(t[0], t[1], tau=t[2])]),
    Sample("multiplex", "one block", ((2, 3, 1, 1), (2, 3, 1, 5)), lambda t: [multiplex(t[0], t[1])]),
    Sample(
        "multiplex",
        "gumbel",
        ((7, 3, 5), (7, 3, 9), ()),
        lambda t: [multiplex(t[0], t[1], mode="gumbel", tau=t[2], seed=7)],
    ),
    Sample(
        "multiplex",
        "argmax, permuted",
        ((5, 3, 4), (9, 3, 4)),
        lambda t: [multiplex(t[0].permute(2, 1, 0), t[1].permute(2, 1, 0), mode="argmax")],
    ),
)
