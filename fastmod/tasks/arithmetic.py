"""One-hot digits and two-digit numbers; pairs of digits, all or a restricted half."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DIGIT = 10  # values of a digit
BLOCK = DIGIT
LIMIT = 100  # numbers have two digits


def one_hot(digits: Tensor, size: int = BLOCK) -> Tensor:
    """Whole numbers ``[...]`` as one-hot fp32 ``[..., size]``; reading a unit matrix is faster than ``F.one_hot``."""
    return F.embedding(digits, torch.eye(size, device=digits.device))


def one_hot_blocks(digits: Tensor, task: Tensor) -> Tensor:
    """``digits [..., K]`` and ``task [...]`` as one-hot blocks ``[..., K + 1, 10]``, the task's block last."""
    return one_hot(torch.cat([digits, task.unsqueeze(-1)], -1))


def uniform_pairs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """``[*shape, 2]``, all 100 pairs equally likely."""
    return torch.randint(10, (*shape, 2), generator=generator, device=generator.device)


def restricted_pairs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """``[*shape, 2]``: one digit low (0-4) and the other high (5-9), in either order."""
    pairs = torch.randint(5, (*shape, 2), generator=generator, device=generator.device)
    high = torch.randint(2, (*shape, 1), generator=generator, device=generator.device)
    return pairs + 5 * torch.cat([high, 1 - high], -1)


def all_pairs(device: torch.device) -> Tensor:
    """``[100, 2]``."""
    digits = torch.arange(10, device=device)
    return torch.cartesian_prod(digits, digits)


def allowed_pairs(device: torch.device) -> Tensor:
    """``[50, 2]``: one digit low, the other high; the pairs ``restricted_pairs`` draws from."""
    pairs = all_pairs(device)
    return pairs[(pairs[:, 0] < 5) != (pairs[:, 1] < 5)]


def excluded_pairs(device: torch.device) -> Tensor:
    """``[50, 2]``: both digits low or both high; the pairs ``restricted_pairs`` never draws."""
    pairs = all_pairs(device)
    return pairs[(pairs[:, 0] < 5) == (pairs[:, 1] < 5)]


def digits_of(numbers: Tensor) -> Tensor:
    """Numbers below 100 ``[...]`` as their two digits ``[..., 2]``, the least significant first."""
    return torch.stack([numbers % DIGIT, numbers // DIGIT], -1)


def one_hot_digits(numbers: Tensor) -> Tensor:
    """Numbers below 100 ``[..., K]`` as ``[..., K * 20]``: two digits each, the least significant first."""
    return one_hot(digits_of(numbers)).flatten(-3)
