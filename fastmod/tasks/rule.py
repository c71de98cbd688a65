"""A rule with a condition and an assignment, applied repeatedly to five digits.

``E := A + 1 if C > D else B + 1`` (modulo 10). The task is one of five permutations that assign the
roles A..E to the five variables.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 10
VARIABLES = 5


def roles(device: torch.device | None = None) -> Tensor:
    """Variable of each role, ``[5 permutations, 5 roles]``; each permutation gives role E to another variable."""
    return (torch.arange(5, device=device)[:, None] + torch.arange(5, device=device)) % VARIABLES


def apply_rule(digits: Tensor, task: Tensor) -> Tensor:
    """Apply the rule once to ``digits [..., 5]``; ``task [...]`` is the number of the permutation."""
    role = roles(digits.device)[task]  # [..., 5]
    a, b, c, d, _ = digits.gather(-1, role).unbind(-1)
    assigned = (torch.where(c > d, a, b) + 1) % 10
    return digits.scatter(-1, role[..., 4:], assigned.unsqueeze(-1))


def sequences(count: int, applications: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Digits ``[count, 5]``, tasks ``[applications, count]`` and the digits after each ``[applications, count, 5]``."""
    device = generator.device
    digits = torch.randint(10, (count, VARIABLES), generator=generator, device=device)
    tasks = torch.randint(5, (applications, count), generator=generator, device=device)
    states, state = [], digits
    for task in tasks:
        state = apply_rule(state, task)
        states.append(state)
    return digits, tasks, torch.stack(states)
