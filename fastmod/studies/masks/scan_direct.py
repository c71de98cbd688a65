"""SCAN without masks: a fresh net for every split, trained on the split's own training set (Figure 16)."""

from __future__ import annotations

from typing import Any

import torch

from fastmod.studies.masks.masking import Stage
from fastmod.studies.masks.scan import ALL, MaskScanTrial


class ScanDirectTrial(MaskScanTrial):
    """A stage per split but the simple one. ``extra`` also has ``direct``: the accuracy on each split's test set."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(Stage(split, masked=False) for split in self.tasks if split != ALL)

    def batch_of(self, task: str | None) -> int:
        return self.config.batch

    def _set_up(self) -> None:
        self.model.load_state_dict(self.net().to(self.device).state_dict())
        self.optimizer = self.make_optimizer()

    @torch.no_grad()
    def _end_stage(self) -> None:
        assert self.task is not None
        self._mode(training=False)
        accuracy = self._accuracy(self.model, self.data[self.task].test, None)
        self._mode(training=True)
        self.extra.setdefault("direct", {})[self.task] = accuracy

    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """``direct``: split -> accuracy."""
        self._end_stage()
        weights = {name: weight.numel() for name, weight in self.model.named_parameters()}
        return {"direct": dict(self.extra["direct"]), "weights": {"total": sum(weights.values())}}
