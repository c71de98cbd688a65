"""Settings of the weight-mask studies, and how they compare with the paper's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar

from fastmod.runs.config import Config, StudyError, changed
from fastmod.runs.study import Outcome, Study

AUTO = "auto"  # beta: the largest under which a mask of the whole problem keeps 95 % of the validation accuracy


@dataclass(frozen=True)
class MaskConfig(Config):
    """``steps``: of the full training; ``mask_steps``: of every mask. Defaults: the paper's C.1 and C.3."""

    steps: int = 20_000
    lr: float = 1e-3
    lr_end: float = 1.0  # share of lr left at the end of the full training; it falls in the second half
    clip: float = 1.0
    evaluate_every: int = 1000
    mask_steps: int = 20_000
    mask_batch: int | None = None  # examples a step of a mask's training; none: batch
    mask_lr: float = 1e-2
    mask_lr_end: float = 1.0  # share of mask_lr left at the end of a mask's training; it falls in the second half
    beta: float | str = 1e-4  # the loss gets beta / batch * sum of the logits; "auto": picked on validation examples
    betas: tuple[float, ...] = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # that auto tries, in order
    samples: int = 4  # masks per batch
    mask_init: float = 2.0  # logits to begin with: kept with probability 0.88
    paper: bool = False  # the paper's sizes and steps

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.mask_steps < 2**31 or self.mask_steps % self.chunk:
            raise StudyError(f"mask_steps: expected a multiple of chunk = {self.chunk}, got {self.mask_steps}")
        if not self.mask_lr > 0:
            raise StudyError(f"mask_lr: expected more than 0, got {self.mask_lr}")
        for name in ("lr_end", "mask_lr_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise StudyError(f"{name}: expected a share, got {getattr(self, name)}")
        if self.beta != AUTO and (isinstance(self.beta, str) or not 0 <= self.beta < math.inf):
            raise StudyError(f"beta: expected 0 or more, or {AUTO}, got {self.beta}")
        if not self.betas or self.betas[0] <= 0 or any(b <= a for a, b in pairwise(self.betas)):
            raise StudyError(f"betas: expected rising numbers above 0, got {self.betas}")
        if not math.isfinite(self.mask_init):
            raise StudyError(f"mask_init: expected a finite number, got {self.mask_init}")
        masked = "batch" if self.mask_batch is None else "mask_batch"
        batch = getattr(self, masked)
        if self.samples < 1 or batch < 1 or batch % self.samples:
            raise StudyError(f"{masked}: expected a multiple of samples = {self.samples}, got {batch}")

    @property
    def auto(self) -> bool:
        """Whether beta is picked: then some examples are held back for it, which nothing else is measured on."""
        return self.beta == AUTO


class MaskStudy(Study):
    """Presets for ``--set paper=true``, and what to say of a run beside the paper's."""

    def config_of(self, config: Any, model: str) -> Any:
        """Settings whose name ends in the kind of the model, such as ``beta_lstm``, are its own. What counts is, in
        this order: its own one if it was chosen, the common one if that was, with ``paper`` the model's preset, its
        own default."""
        kind = "_" + model.partition("_")[0].lower()
        own = [field.name for field in fields(config) if field.name.endswith(kind)]
        settings = {name.removesuffix(kind): getattr(config, name) for name in own}
        if config.typed is None:
            return self._of_old(config, model, settings)
        settings = {k: v for k, v in settings.items() if k + kind in config.typed or k not in config.typed}
        if config.paper:
            stay = {*config.typed, *(key for key in settings if key + kind in config.typed)}
            settings = {key: value for key, value in settings.items() if key in stay}
            settings |= {key: value for key, value in self.presets[model].items() if key not in stay}
        return changed(config, settings)

    def _of_old(self, config: Any, model: str, settings: Mapping[str, Any]) -> Any:
        """Of a run that does not say what was chosen: as it was begun."""
        if not config.paper:
            return changed(config, {**settings, **({"beta": AUTO} if config.auto else {})})
        left = {key for key in self.presets[model] if getattr(config, key) == getattr(self.defaults, key)}
        return changed(config, {key: self.presets[model][key] for key in left})

    criterion = ""  # all that it measures is what it reports
    #: Kind of net -> the settings that it reads and others do not.
    read: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def unused(self, config: Any, model: str) -> Collection[str]:
        own = self.read.get(model.partition("_")[0], ())
        others = {name for names in self.read.values() for name in names} - {*own}
        return others if config.auto else {*others, "betas"}

    def is_own(self, setting: str) -> bool:
        base, _, kind = setting.rpartition("_")
        kinds = {model.partition("_")[0].lower() for model in self.models}
        return kind in kinds and hasattr(self.defaults, base)

    def note(self, outcome: Outcome, model: str) -> str:
        """For the rows of a model."""
        weights = outcome.of(model)[0].result["weights"]["total"]
        setting = self.setting_of(outcome.config, model, [record.result for record in outcome.of(model)])
        return f"{weights:,} masked weights; {setting}"
