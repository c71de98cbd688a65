"""``template_mix`` as the layers call it."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmod import backend
from fastmod.ops.template_mix import template_mix


def mixed(logits: Tensor, bank: Tensor, mixing: str) -> Tensor:
    """``template_mix`` in the dtype of the bank, also under autocast: layers cast what they read themselves, norms do
    not."""
    if not backend.autocasts(bank):
        return template_mix(logits, bank, mixing)
    with torch.autocast(bank.device.type, enabled=False):
        return template_mix(logits, bank, mixing)
