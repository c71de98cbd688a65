"""Heights of bars in the figures of mask studies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from fastmod.studies.study import Record


def bar(records: Sequence[Record], pick: Callable[[dict[str, Any]], float | None]) -> tuple[float, float]:
    """Mean and standard deviation of what ``pick`` finds in each trial's result; None does not count."""
    values = [value for record in records if (value := pick(record.result)) is not None]
    if not values:
        return 0.0, 0.0
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
