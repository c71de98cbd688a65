"""Trials that train a net, freeze it, and then learn which of its weights each task needs.

Stages: the plain net on the whole problem, then one per task, each with fresh mask logits and a new Adam on the frozen
net. With ``beta=auto`` there are stages in between, each with a mask of the whole problem under a larger beta, until
one loses on validation examples (appendix C.2). The stage follows from the step; masks that are done are kept as bits
in ``extra``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastmod.masks import MaskedModel, inverted, sharing, union
from fastmod.masks.files import pack, unpack
from fastmod.optim import Adam
from fastmod.runs.config import StudyError
from fastmod.runs.trial import Trial
from fastmod.studies.masks import measures
from fastmod.studies.masks.settings import MaskConfig

Masks = dict[str, Tensor]  # name of a parameter -> bool, of its shape


class Stage(NamedTuple):
    """What is trained: the plain net or a mask over it, on a task or, for None, on the whole problem."""

    task: str | None
    masked: bool


FULL, SEARCH = Stage(None, masked=False), Stage(None, masked=True)


class MaskTrial(Trial):
    """Subclasses say what the net is, what the tasks are, and how to draw, to lose and to measure.

    ``model`` is the plain net in every stage; ``masked`` is its MaskedModel, from the first mask's stage on. ``extra``:
    ``stage`` (which one model and optimiser are set up for), ``masks`` (task -> parameter -> packed bits) and
    ``histograms`` (task -> counts) of the stages that are over; for ``beta=auto`` also ``original`` (the plain net's
    validation accuracy), ``tried`` (pairs of beta and accuracy) and, when it is found, ``beta``.
    """

    config: MaskConfig
    tasks: Sequence[str]

    def __init__(self, config: MaskConfig, name: str, seed: int, device: torch.device) -> None:
        self.config, self.name, self.seed, self.device = config, name, seed, device  # net() may look at them
        super().__init__(config, name, self.net(), seed, device)
        self.masked: MaskedModel | None = None
        self.extra = {"stage": 0, "masks": {}, "histograms": {}, "tried": []}
        if self.stages[0].masked:
            self._set_up()

    # ---- what a study's trial says

    @abstractmethod
    def net(self) -> nn.Module:
        """The plain net, freshly initialised."""

    @abstractmethod
    def batches_of(self, task: str | None, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Data of the next ``chunk`` steps, each tensor ``[chunk, batch, ...]``; of the whole problem for None."""

    @abstractmethod
    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Scalar loss of one step; ``model`` is the plain net or the masked one."""

    @abstractmethod
    def accuracies(self, model: nn.Module) -> dict[str, float]:
        """Task -> accuracy; called without gradients, in eval mode."""

    def validation_accuracy(self, model: nn.Module) -> float:
        """Of the whole problem, on examples that are neither learned from nor reported; called as ``accuracies`` is."""
        raise StudyError(f"beta: {type(self).__name__} has no validation examples to pick it on, expected a number")

    def mask_options(self) -> dict[str, Any]:
        """More arguments of MaskedModel, such as ``mask_bias``."""
        return {}

    def begin_mask(self, task: str) -> None:
        """After the fresh logits of a task were made: where some of them may be set or fixed. Called anew on resuming,
        before the logits are loaded."""

    def make_mask_optimizer(self, masked: MaskedModel) -> torch.optim.Optimizer:
        """Of a task's fresh logits; ``make_optimizer`` is the one of the full training."""
        return Adam(masked.parameters(), self.config.mask_lr, max_norm=self.config.clip)

    def references(self) -> dict[str, list[str]]:
        """Task -> the tasks whose weights together it is compared with, to tell what it shares."""
        return {task: [other for other in self.tasks if other != task] for task in self.tasks}

    # ---- stages

    @property
    def stages(self) -> tuple[Stage, ...]:
        searches = len(self.extra["tried"]) + ("beta" not in self.extra) if self.config.auto else 0
        return (FULL, *[SEARCH] * searches, *(Stage(task, masked=True) for task in self.tasks))

    def steps_of(self, stage: Stage) -> int:
        return self.config.mask_steps if stage.masked else self.config.steps

    @property
    def steps(self) -> int:
        return sum(map(self.steps_of, self.stages))

    @property
    def stage(self) -> Stage:
        """The one that is set up."""
        return self.stages[self.extra["stage"]]

    @property
    def task(self) -> str | None:
        """The task of the stage that is set up."""
        return self.stage.task

    def stage_at(self, step: int) -> int:
        """Number of the stage that this step is in; the last one for the end."""
        ends = accumulate(map(self.steps_of, self.stages))
        return min(sum(step >= end for end in ends), len(self.stages) - 1)

    def chunk(self) -> Tensor:
        # Here and not after an evaluation: stages may end where nothing is evaluated.
        while self.extra["stage"] < self.stage_at(self.step):
            self._end_stage()
            self.extra["stage"] += 1
            self.next_stage()
            self._set_up()
        self.set_rates()
        return super().chunk()

    def set_rates(self) -> None:
        """The learning rates of the next chunk."""
        groups = self.optimizer.param_groups
        if not self.stage.masked:
            for group in groups:
                group["lr"] = self.lr * self.share_left(self.config.lr_end)
            return
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * self.share_left(self.config.mask_lr_end)

    @property
    def lr(self) -> float:
        """Of the full training, before it falls."""
        return self.config.lr

    def share_left(self, end: float) -> float:
        """Of a learning rate that falls to the share ``end`` in the second half of a stage."""
        stage = self.extra["stage"]
        done = self.step - sum(map(self.steps_of, self.stages[:stage]))
        left = min(1.0, 2 * (1 - done / self.steps_of(self.stages[stage])))
        return end * (1 - left) + left

    def next_stage(self) -> None:
        """Between two stages, the last one's mask being kept: where weights may change."""

    def _set_up(self) -> None:
        """Fresh logits over the frozen net, for the stage at hand."""
        config = self.config
        self.masked = MaskedModel(self.model, samples=config.samples, init=config.mask_init, **self.mask_options())
        self.masked.to(self.device)
        self._mode(training=True)
        if self.task is not None:
            self.begin_mask(self.task)
        self.optimizer = self.make_mask_optimizer(self.masked)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    @torch.no_grad()
    def _end_stage(self) -> None:
        """Keep what the stage has found."""
        if self.task is not None:
            assert self.masked is not None
            self.extra["masks"][self.task] = {name: pack(mask) for name, mask in self.masked.hard_masks().items()}
            self.extra["histograms"][self.task] = measures.histogram(self.masked)
        elif self.config.auto:
            self._mode(training=False)
            accuracy = self.validation_accuracy(self.model if self.masked is None else self.masked)
            if self.masked is None:
                self.extra["original"] = accuracy
            else:
                self.extra["tried"].append([self.beta, accuracy])
                picked, _ = self._search()
                if picked is not None:
                    self.extra["beta"] = picked

    def _search(self) -> tuple[float | None, float | None]:
        return measures.settle(self.config.betas, self.extra["original"], dict(self.extra["tried"]))

    def masks(self) -> dict[str, Masks]:
        """Task -> its mask, of the stages that are over; the last one's too, when all steps are done."""
        shapes = {name: list(parameter.shape) for name, parameter in self.model.named_parameters()}
        found = {
            task: {name: unpack(bits, shapes[name]).to(self.device) for name, bits in mask.items()}
            for task, mask in self.extra["masks"].items()
        }
        if self.finished and self.masked is not None and self.task is not None and self.task not in found:
            found[self.task] = self.masked.hard_masks()
        return found

    # ---- training

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return self.batches_of(self.task, generator)

    def batch_of(self, task: str | None) -> int:
        """Examples a step: of a task's mask, or for None of the stage at hand."""
        masked = task is not None or self.stage.masked
        return self.config.mask_batch if masked and self.config.mask_batch is not None else self.config.batch

    def loss(self, *batch: Tensor) -> Tensor:
        if self.masked is None:
            return self.loss_of(self.model, *batch)
        penalty = self.masked.penalty() * (self.beta / self.batch_of(self.task))
        return self.loss_of(self.masked, *batch) + penalty

    @property
    def beta(self) -> float:
        """Of the stage at hand."""
        if not self.config.auto:
            return float(self.config.beta)
        if "beta" in self.extra:
            return self.extra["beta"]
        return self._search()[1] or math.nan

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        model = self.model if self.masked is None else self.masked
        self._mode(training=False)
        try:
            found = self.evaluate()
        finally:
            self._mode(training=True)
        if isinstance(model, MaskedModel):
            kept = model.hard_masks().values()
            found["kept"] = sum(int(mask.sum()) for mask in kept) / sum(mask.numel() for mask in kept)
        return found

    def evaluate(self) -> dict[str, float]:
        accuracies = self.accuracies(self.model if self.masked is None else self.masked)
        return {"stage": float(self.extra["stage"])} | {f"accuracy_{task}": a for task, a in accuracies.items()}

    def _mode(self, *, training: bool) -> None:
        self.model.train(training)
        if self.masked is not None:
            self.masked.train(training)
            if training and not self.mask_options().get("train_weights"):
                freeze(self.model)

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        return super().state() | {"logits": None if self.masked is None else self.masked.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        logits = state["logits"]
        self.extra = state["extra"]  # begin_mask may look at the masks of earlier tasks
        if self.stage.masked:
            self._set_up()
        super().load_state(state)
        if self.masked is not None:
            try:
                self.masked.load_state_dict(logits)
            except (RuntimeError, TypeError) as error:
                raise StudyError(f"the checkpoint does not fit the masks: {str(error).splitlines()[0]}") from None

    # ---- results

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """What tables and figures need; see the keys of the last lines. Every number of weights has one entry per
        parameter and a ``total``."""
        self._end_stage()
        self._mode(training=False)
        masks = self.masks()
        some = next(iter(masks.values()))
        picked = {"picked": {key: self.extra[key] for key in ("beta", "tried", "original")}} if self.config.auto else {}
        return {
            **picked,
            "accuracy": self.accuracies(self.model),
            "masked": {task: self._under(mask) for task, mask in masks.items()},
            "inverted": {task: self._under(inverted(mask)) for task, mask in masks.items()},
            "weights": measures.with_total({name: mask.numel() for name, mask in some.items()}),
            "kept": {
                task: measures.with_total({name: int(part.sum()) for name, part in mask.items()})
                for task, mask in masks.items()
            },
            "sharing": {
                task: measures.shares(sharing(masks[task], union(*(masks[o] for o in others))))
                for task, others in self.references().items()
                if others
            },
            "histogram": dict(self.extra["histograms"]),
        }

    def _under(self, mask: Masks) -> dict[str, float]:
        assert self.masked is not None
        with self.masked.using(mask):
            return self.accuracies(self.masked)


def freeze(net: nn.Module) -> None:
    """Evaluation mode: what a mask is learned for is the net as it is used, without dropout and with the statistics
    that batch norm has collected."""
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.RNNBase):
            # cuDNN has no backward in evaluation mode; without dropout the two modes are the same.
            module.dropout = 0.0
            module.train()
