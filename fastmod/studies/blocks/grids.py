"""The architectures that the paper on block-operations searched, its appendix A.2: kind of model -> setting -> values.

A trial's seed names one of them, or ``fastmod sweep`` goes over all.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from fastmod.runs.study import Record

Grid = Mapping[str, Sequence[Any]]

_FNN: Grid = {"fnn_width": (100, 200, 300), "fnn_depth": (2, 3, 4)}
ADDMUL: Mapping[str, Grid] = {
    "SMFR": {"width": tuple(range(1, 8)), "depth": (1, 2, 3), "layers": (1, 2, 3)},
    "FNN": _FNN,
}
#: For each of softmax and Gumbel 120 trials, 240 in all.
DOUBLEADD: Mapping[str, Grid] = {
    "SMFR": {
        "width": tuple(range(1, 11)), "depth": (0, 1, 2), "layers": (1, 2), "alternate_split": (False, True),
    },
    "FNN": _FNN,
}  # fmt: skip
ALGO: Mapping[str, Grid] = {
    "SMFR": {"width": (6, 8, 10), "depth": tuple(range(11)), "layers": (1, 2, 3)},
    "FNN": {"fnn_width": (100, 200, 300), "fnn_depth": (2, 3, 4, 5, 6)},
    "Transformer": {"heads": (1, 4, 8), "inner": (400, 1200, 2000), "transformer_layers": tuple(range(1, 7))},
}
SIZES = ("HIGH", "MID", "LOW")
_LARGE, _SMALL = 200_000, 50_000  # parameters: the paper's HIGH and LOW


def named(grids: Mapping[str, Grid]) -> dict[str, Grid]:
    """As ``fastmod sweep`` calls them: ``--grid smfr``."""
    return {kind.lower(): grid for kind, grid in grids.items()}


def architecture(grids: Mapping[str, Grid], model: str, seed: int) -> dict[str, Any]:
    """The architecture of the grid that this seed names; neighbouring seeds have different ones, so that few trials
    cover the grid."""
    grid = grids[model.partition("_")[0]]
    combinations = list(product(*grid.values()))
    random.Random(0).shuffle(combinations)
    return dict(zip(grid, combinations[seed % len(combinations)], strict=True))


def drawn(grids: Mapping[str, Grid], config: Any, model: str, seed: int) -> dict[str, Any]:
    """The architecture that this seed names, but for settings that were chosen."""
    chosen = {key: getattr(config, key) for key in config.typed or ()}
    return {key: chosen.get(key, value) for key, value in architecture(grids, model, seed).items()}


def as_drawn(found: Sequence[tuple[Mapping[str, Any], Record]]) -> list[Record]:
    """Trials of a sweep as if their seeds had drawn the architectures of their cells."""
    return [replace(record, result={**record.result, "architecture": dict(values)}) for values, record in found]


def size(record: Record) -> str:
    """HIGH, MID or LOW by the number of parameters (A.2.1)."""
    return "HIGH" if record.parameters >= _LARGE else "LOW" if record.parameters < _SMALL else "MID"


def best(records: Sequence[Record], key: str, count: int = 5) -> list[Record]:
    """The trials with the highest ``key``, as the paper's tables have the five best by validation; none if there are
    not more than that."""
    found = [record for record in records if record.result.get(key) is not None]
    return sorted(found, key=lambda record: -record.result[key])[:count] if len(found) > count else []
