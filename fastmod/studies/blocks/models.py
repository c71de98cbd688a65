"""The models of the block-operations studies by name, built from a study's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from fastmod.models import FNN, BlockTransformer, PlainSMFR
from fastmod.nn import SMFR
from fastmod.runs.config import Config, StudyError

PENALTIES = ("mean", "sum", "off")
#: The paper's A.2 and A.3. It prints neither batch nor steps nor loss, but for the steps of BPMNIST.
PAPER: Mapping[str, Any] = {
    "lr": 3e-4, "clip": 0.1, "hidden": 100, "penalty": "mean", "penalty_weight": 1.0, "penalty_threshold": 20.0,
}  # fmt: skip


UNPRINTED = ("steps", "batch")


@dataclass(frozen=True)
class ModelConfig(Config):
    width: int = 8  # SMFR: blocks between layers, layers of the stack, units and layers of the FNNs inside
    depth: int = 1
    hidden: int = 100
    layers: int = 1
    fnn_width: int = 200
    fnn_depth: int = 3
    heads: int = 1  # Transformer: attention heads, feed-forward width, encoder (and decoder) layers
    inner: int = 400
    transformer_layers: int = 2
    # Of SMFRs: the loss on routing and gate logits beyond the threshold (A.3). mean: the paper's mean squared error,
    # over all logits of a forward; sum: the squared errors added up; off: none, which the paper thinks may do as well.
    penalty: str = "mean"
    penalty_weight: float = 1.0
    penalty_threshold: float = 20.0
    paper: bool = False  # the paper's settings, as far as it prints them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.penalty not in PENALTIES:
            raise StudyError(f"penalty: expected {', '.join(PENALTIES)}, got {self.penalty!r}")
        for name in ("penalty_weight", "penalty_threshold"):
            if not 0 <= getattr(self, name) < math.inf:
                raise StudyError(f"{name}: expected a finite number, 0 or more, got {getattr(self, name)}")
        least = {"depth": 0, "fnn_depth": 0}
        for name in (
            "width",
            "depth",
            "hidden",
            "layers",
            "fnn_width",
            "fnn_depth",
            "heads",
            "inner",
            "transformer_layers",
        ):
            value = getattr(self, name)  # None: the study draws one
            if value is not None and value < least.get(name, 1):
                raise StudyError(f"{name}: expected {least.get(name, 1)} or more, got {value}")


def build(config: ModelConfig, name: str, in_blocks: int, out_blocks: int, block: int) -> nn.Module:
    """``SMFR`` (also with _softmax, _gumbel, _bias, _no_context, _large, _plain), ``FNN`` or ``Transformer``.

    ``SMFR_large`` contains FNNs of the size of the FNN that stands alone.
    """
    sizes = (in_blocks, out_blocks, block)
    kind, _, variant = name.partition("_")
    inside: dict[str, Any] = {
        "hidden": config.fnn_width if variant == "large" else config.hidden,
        "layers": config.fnn_depth if variant == "large" else config.layers,
        "threshold": None if config.penalty == "off" else config.penalty_threshold,
    }
    if kind == "FNN":
        return FNN(*sizes, config.fnn_width, config.fnn_depth)
    if kind == "Transformer":
        return BlockTransformer(*sizes, config.heads, config.inner, config.transformer_layers)
    if name == "SMFR_plain":
        return PlainSMFR(*sizes, config.width, config.depth, **inside)
    if kind == "SMFR" and variant in ("", "softmax", "gumbel", "bias", "no_context", "large"):
        mode = "gumbel" if variant == "gumbel" else "softmax"
        return SMFR(*sizes, config.width, config.depth, **inside, mode=mode, context=variant != "no_context")
    raise StudyError(f"unknown model {name!r}")


_READ = {
    "SMFR": ("width", "depth", "hidden", "layers", "penalty", "penalty_weight", "penalty_threshold"),
    "FNN": ("fnn_width", "fnn_depth"),
    "Transformer": ("heads", "inner", "transformer_layers"),
}  # fmt: skip


def unused(config: ModelConfig, name: str) -> set[str]:
    """Settings that the model of this name does not read."""
    read = {*_READ[name.partition("_")[0]]}
    if name == "SMFR_large":
        read = read - {"hidden", "layers"} | {*_READ["FNN"]}
    if config.depth == 0:  # no blocks between layers
        read -= {"width"}
    if config.penalty == "off":
        read -= {"penalty_weight", "penalty_threshold"}
    return {setting for settings in _READ.values() for setting in settings} - read


def mappable(model: nn.Module) -> bool:
    """Whether trials of it can train side by side: no Gumbel noise, which would not be that of each trial alone, and no
    attention, which torch.vmap takes copy by copy on a CPU."""
    return isinstance(model, FNN | PlainSMFR) or (isinstance(model, SMFR) and model.mode == "softmax")


class RangePenalty:
    """The loss that keeps an SMFR's logits in range, by a study's settings; 0 for models that have none."""

    def __init__(self, config: ModelConfig, in_blocks: int, out_blocks: int) -> None:
        counts = [in_blocks, *[config.width] * config.depth, out_blocks]
        logits = sum(m * n + n for m, n in pairwise(counts))  # of one example: routing and gates of every layer
        self._scale = 0.0 if config.penalty == "off" else config.penalty_weight
        self._divisor = logits if config.penalty == "mean" else None

    def __call__(self, model: nn.Module, batch: int) -> Tensor | float:
        """Of the last forward, which had ``batch`` examples."""
        if not self._scale or not isinstance(model, SMFR | PlainSMFR):
            return 0.0
        return model.penalty() * (self._scale / (1 if self._divisor is None else self._divisor * max(batch, 1)))


def gates(model: nn.Module) -> dict[str, float]:
    """``gate_0`` and so on: by layer, the mean gate of the last forward of an SMFR; 0 copies, 1 rewrites."""
    if not isinstance(model, SMFR):
        return {}
    return {f"gate_{i}": routing.gates.mean().item() for i, routing in enumerate(model.routing())}
