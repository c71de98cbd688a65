"""The models of the block-operations studies by name, built from a study's settings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fastmod.models import FNN, BlockTransformer, PlainSMFR
from fastmod.nn import SMFR
from fastmod.runs.config import Config, StudyError


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

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """``SMFR`` (also with _softmax, _gumbel, _bias, _no_context, _plain), ``FNN`` or ``Transformer``."""
    sizes = (in_blocks, out_blocks, block)
    kind, _, variant = name.partition("_")
    inside = {"hidden": config.hidden, "layers": config.layers}
    if kind == "FNN":
        return FNN(*sizes, config.fnn_width, config.fnn_depth)
    if kind == "Transformer":
        return BlockTransformer(*sizes, config.heads, config.inner, config.transformer_layers)
    if name == "SMFR_plain":
        return PlainSMFR(*sizes, config.width, config.depth, **inside)
    if kind == "SMFR" and variant in ("", "softmax", "gumbel", "bias", "no_context"):
        mode = "gumbel" if variant == "gumbel" else "softmax"
        return SMFR(
            *sizes, config.width, config.depth, hidden=config.hidden, layers=config.layers, mode=mode,
            context=variant != "no_context",
        )  # fmt: skip
    raise StudyError(f"unknown model {name!r}")


def penalty(model: nn.Module) -> Tensor | float:
    """The range penalty of the last forward; 0 for models that have none."""
    return model.penalty() if isinstance(model, SMFR | PlainSMFR) else 0.0
