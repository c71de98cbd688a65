"""Weights of many layers as mixtures of few templates: ``template_mix``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastmod import backend
from fastmod.ops import _autograd, _checks, _images
from fastmod.ops._samples import Sample, Shape

#: The index is the number in the kernels.
MIXINGS = ("softmax", "tanh", "none")


def template_mix(logits: Tensor, bank: Tensor, mixing: str = "softmax") -> Tensor:
    """``mixing(logits) @ bank``: forward one pass over the bank for all rows of logits, backward one over the gradient.

    Args:
        logits: ``[..., K]``, for example of tasks and layers.
        bank: ``[K, P]``: K templates of P parameters each.
        mixing: ``"softmax"`` over K, ``"tanh"`` of each logit, or ``"none"``: the logits are the weights.

    Returns:
        ``[..., P]``.
    """
    chosen = backend.resolve("template_mix", logits)
    if backend.checks_first(chosen):
        _check(logits, bank, mixing)
    if chosen == "reference":
        with backend.reference_autocast(logits, bank) as (low_logits, low_bank):
            return reference(low_logits, low_bank, MIXINGS.index(mixing))
    try:
        number = MIXINGS.index(mixing)
        if backend.autocasts(bank):
            logits, bank = backend.lowered(logits, bank)
        return _run(chosen == "triton", logits, bank, number)
    except Exception:
        _check(logits, bank, mixing)
        raise


def check_mixture(logits: Tensor, bank: Tensor) -> None:
    """``logits`` ``[..., K]`` and ``bank`` ``[K, P]``."""
    check_logits(logits)
    _checks.float_tensor("bank", bank, 2, "[K, P]")
    if bank.dim() != 2:
        raise ValueError(f"bank: expected [K, P], got shape {_checks.shape(bank)}")
    _checks.same_kind("logits", logits, "bank", bank)
    if bank.shape[0] != logits.shape[-1]:
        raise ValueError(
            f"bank: expected [K, P] with the K = {logits.shape[-1]} of logits, got shape {_checks.shape(bank)}"
        )


def check_logits(logits: Tensor) -> None:
    _checks.float_tensor("logits", logits, 1, "[..., K]")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits: expected [..., K] with K >= 1, got shape {_checks.shape(logits)}")


def _check(logits: Tensor, bank: Tensor, mixing: str) -> None:
    if mixing not in MIXINGS:
        raise ValueError(f"mixing: expected one of {', '.join(map(repr, MIXINGS))}, got {mixing!r}")
    check_mixture(logits, bank)


def reference(logits: Tensor, bank: Tensor, mixing: int) -> Tensor:
    """Plain PyTorch; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(bank)
    weights = logits.to(wide)  # [..., K]
    if mixing == 0:
        weights = weights.softmax(-1)
    elif mixing == 1:
        weights = weights.tanh()
    return (weights @ bank.to(wide)).to(bank.dtype)


def fake_forward(logits: Tensor, bank: Tensor, mixing: int) -> Tensor:
    _checks.one_device(logits, bank)
    return bank.new_empty((*logits.shape[:-1], bank.shape[1]))


def fake_backward(grad: Tensor, logits: Tensor, bank: Tensor, mixing: int, needs: Sequence[bool]) -> list[Tensor]:
    return _images.blanks((logits, bank), needs, images=())


def _forward_rule(overload: Any) -> _autograd.Rule:
    each = _autograd.by_elements(overload)

    def rule(info: Any, in_dims: tuple[Any, ...], logits: Tensor, bank: Tensor, mixing: int) -> tuple[Any, Any]:
        if in_dims[1] is not None:
            return each(info, in_dims, logits, bank, mixing)
        return overload(_autograd.in_front(info, logits, in_dims[0]), bank, mixing), 0

    return rule


#: logits [..., K], bank [K, P] -> [..., P]
FORWARD = _autograd.define(
    "template_mix_forward(Tensor logits, Tensor bank, int mixing) -> Tensor", fake_forward, _forward_rule
)
#: gradients of logits and bank, empty where not needed
BACKWARD = _autograd.define(
    "template_mix_backward(Tensor grad, Tensor logits, Tensor bank, int mixing, bool[2] needs) -> Tensor[]",
    fake_backward,
)

_run = _autograd.from_kernels("TemplateMix", FORWARD, BACKWARD, reference, 2)

SAMPLES = (
    Sample("template_mix", "odd", ((3, 5), (5, 7)), lambda t: [template_mix(t[0], t[1])]),
    Sample(
        "template_mix",
        "tanh, permuted",
        ((5, 2, 3), (9, 5)),
        lambda t: [template_mix(t[0].permute(1, 2, 0), t[1].T, mixing="tanh")],
    ),
    Sample("template_mix", "none", ((3,), (3, 21)), lambda t: [template_mix(t[0], t[1], mixing="none")]),
)
SHAPES = (
    Shape(
        "template_mix",
        "L16 K4 P20000",
        ((16, 4), (4, 20000)),
        lambda t: [template_mix(t[0], t[1])],
        products=16 * 4 * 20000,
    ),
)
