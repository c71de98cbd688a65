"""The paper's recipe for the strength of the regulariser (its appendix C.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple


class BetaTrial(NamedTuple):
    """A strength that was tried, and the score of the resulting mask."""

    beta: float
    score: float


def pick_beta(
    train: Callable[[float], float],
    original: float,
    *,
    betas: Sequence[float] | None = None,
    keep: float = 0.95,
) -> tuple[float, list[BetaTrial]]:
    """Find the strongest regulariser that leaves the whole task intact.

    A mask for the *full* task needs everything that the net does; a regulariser under which even that mask loses is too
    strong to tell anything about a part. Strengths are raised until the score falls below ``keep * original``; the last
    one before that is the result.

    Args:
        train: trains a mask on the full task with the beta it is given, returns the masked score.
        original: score of the net without masks.
        betas: rising strengths to try; default: 1e-5 to 1, about three per decade.
        keep: share of the original score that must stay.

    Returns:
        The beta, and all trials in order.
    """
    strengths = [1e-5 * 10 ** (i / 3) for i in range(16)] if betas is None else list(betas)
    if not strengths or any(b <= a for a, b in pairwise(strengths)) or strengths[0] <= 0:
        raise ValueError(f"betas: expected rising numbers > 0, got {strengths}")
    if not 0 < keep <= 1:
        raise ValueError(f"keep: expected a number in (0, 1], got {keep}")
    tried: list[BetaTrial] = []
    for beta in strengths:
        tried.append(BetaTrial(beta, train(beta)))
        if not tried[-1].score >= keep * original:
            break
    good = [trial.beta for trial in tried if trial.score >= keep * original]
    if not good:
        raise ValueError(
            f"betas: already the weakest, {strengths[0]:g}, scores {tried[0].score:g}, "
            f"below {keep:g} of the original {original:g}; begin with a smaller one"
        )
    return good[-1], tried
