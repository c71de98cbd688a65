"""Softmax routing of blocks: ``multiplex``."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmod import backend, noise
from fastmod.ops import _checks

#: Routing modes and the integers by which the kernels know them.
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
        seed: of the Gumbel noise, an int or an int64 0-d tensor; ``None`` draws one from torch's generator.

    Returns:
        ``[..., N, D]`` in the dtype of ``blocks``.
    """
    code = mode_code(mode)
    chosen = backend.resolve("multiplex", blocks)
    if backend.checks_first(chosen):
        _check(blocks, logits)
    tau_tensor, tau_value = _checks.positive_tau(tau, blocks)
    seed_value = noise.seed_tensor(seed, blocks.device) if mode == "gumbel" else None
    if chosen == "reference":
        with backend.reference_autocast(blocks, logits) as (blocks, logits):
            return reference(blocks, logits, tau_tensor, tau_value, seed_value, code)
    try:
        return torch.ops.fastmod.multiplex.default(
            blocks, logits, tau_tensor, tau_value, seed_value, code, chosen == "triton"
        )
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
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(map(repr, MODES))}, got {mode!r}")
    return MODES[mode]


def routing_weights(logits: Tensor, tau: Tensor | None, tau_value: float, seed: Tensor | None, mode: int) -> Tensor:
    """The weights ``[..., M, N]`` in plain PyTorch: soft, or one-hot with the gradient of the soft ones."""
    if tau is not None:
        if tau.device.type == "cpu" and not torch.compiler.is_compiling() and not tau.item() > 0:
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
    blocks: Tensor, logits: Tensor, tau: Tensor | None, tau_value: float, seed: Tensor | None, mode: int
) -> Tensor:
    return blocks.new_empty(*blocks.shape[:-2], logits.shape[-1], blocks.shape[-1])


def fake_backward(
    grad: Tensor,
    blocks: Tensor,
    logits: Tensor,
    tau: Tensor | None,
    tau_value: float,
    seed: Tensor | None,
    mode: int,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = _checks.compute_dtype(blocks)
    return (
        blocks.new_empty(blocks.shape),
        logits.new_empty(logits.shape),
        blocks.new_empty((), dtype=wide),  # gradient of tau
    )
