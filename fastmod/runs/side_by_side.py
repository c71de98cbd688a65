"""Trials that differ only in the seed, trained in one batched step.

The models are the copies of a :class:`fastmod.nn.Ensemble`: a step is one forward and one backward for all, every copy
with the data of its own seed. Everything else belongs to the trial: its parameters become views of those of the
ensemble, so that its optimiser steps, clips and counts, its model is evaluated and its state is saved as if it were
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.nn import Ensemble
from fastmod.runs.trial import Trial


class SideBySide:
    """Trials of one class, config and step, for which :meth:`why_not` has no reason."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials = list(trials)
        models = iter([copy.deepcopy(trial.model) for trial in trials])
        self._nets = Ensemble(lambda: next(models), len(trials))
        self._any = copy.copy(trials[0])  # whose loss is mapped
        self._any.model = self._nets.model
        for i, trial in enumerate(trials):
            _share(trial.model, self._nets.model, i)
        self._stacked = list(self._nets.parameters())
        self._own = list(zip(*[trial.model.parameters() for trial in trials], strict=True))  # by parameter, by trial

    @staticmethod
    def why_not(trials: Sequence[Trial]) -> str | None:
        """Why these trials cannot be trained together."""
        if not all(trial.side_by_side for trial in trials):
            return "as its loss cannot be mapped over them"
        if any(trial.config != trials[0].config for trial in trials):
            return "as every seed has settings of its own"
        return None

    def chunk(self) -> Tensor:
        """Train for ``config.chunk`` steps; the mean losses ``[trials]``, still on the device."""
        trials = self.trials
        each = [trial.batches(trial.generator("data", trial.step)) for trial in trials]
        data = [torch.stack(several, 1) for several in zip(*each, strict=True)]  # [chunk, trials, ...]
        total = torch.zeros(len(trials), device=trials[0].device)
        for batch in zip(*data, strict=True):
            self._any.step = trials[0].step
            losses = self._nets.map(self._loss, *batch, each=True)
            losses.sum().backward()
            for own, stacked in zip(self._own, self._stacked, strict=True):
                if stacked.grad is not None:
                    for parameter, grad in zip(own, stacked.grad.unbind(), strict=True):
                        parameter.grad = grad
                    stacked.grad = None
            for trial in trials:
                trial.optimizer.step()
                trial.optimizer.zero_grad()
                trial.step += 1
            total += losses.detach()
        return total / len(data[0])

    def _loss(self, net: nn.Module, *batch: Any) -> Tensor:
        return self._any.loss(*batch)  # its model is the net


def _share(model: nn.Module, copies: nn.Module, index: int) -> None:
    """Replace parameters and buffers of the model by those of the copy, which have the same values."""
    mine, theirs = ((*net.parameters(), *net.buffers()) for net in (model, copies))
    for own, stacked in zip(mine, theirs, strict=True):
        own.data = stacked.data[index]
