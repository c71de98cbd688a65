"""Trials that pretrain a net once and then add a new task to it in several stages, each from the same net."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.models import IsometricNet
from fastmod.runs.config import StudyError
from fastmod.studies.comp.sources import Task
from fastmod.studies.comp.training import CompConfig, CompTrial, Images, measure, scaled

_BATCHES = 40  # for new statistics of batch norm; the old ones then have a weight of 1.5 %
_WATCHED = 1000  # test images in evaluations before the end of a stage


class Stage(NamedTuple):
    name: str
    steps: int


class StagedTrial(CompTrial):
    """The first stage trains on all tasks, like :class:`CompTrial`; each later one starts from its averaged net and
    learns the additional task ``new``.

    ``extra`` keeps the number of the stage, the pretrained net and the results of each stage.
    """

    def __init__(
        self,
        config: CompConfig,
        name: str,
        seed: int,
        device: torch.device,
        tasks: Mapping[str, Task],
        new: Task,
        stages: Sequence[Stage],
    ) -> None:
        for stage in stages:
            if stage.steps < 1 or stage.steps % config.chunk:
                raise StudyError(f"steps of {stage.name}: expected a multiple of chunk = {config.chunk}")
        self.stages, self.new = list(stages), new
        self.new_data = Images({"new": new}, device)
        self.extra = {"stage": 0}  # make_optimizer reads it
        super().__init__(config, name, self.build(config, name, seed), seed, device, tasks)
        self.extra = {"stage": 0, "results": {}}

    # ---- for studies to override

    def build(self, config: Any, name: str, seed: int) -> IsometricNet:
        """The net of the first stage."""
        raise NotImplementedError

    def add_new(self, stage: Stage, resumed: bool) -> None:
        """Add the new task to ``self.model`` and choose the parameters this stage trains.

        If ``resumed``, only shapes matter, as the state will be loaded.
        """
        raise NotImplementedError

    def new_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch of the new task."""
        return F.cross_entropy(self.scores(self.model, images), labels)

    def outcome(self) -> dict[str, Any]:
        """Results to keep at the end of a stage; the evaluated net is in eval mode."""
        return {"accuracy": measure(self.predict, self.new, self.number, None, self.device)[1]}

    def predict(self, images: Tensor, number: int) -> Tensor:
        """Scores to measure a task by."""
        return self.scores(self.evaluated, images)

    # ---- stages

    @property
    def number(self) -> int:
        """Number of the new task."""
        return len(self.tasks)

    @property
    def stage(self) -> Stage:
        return self.stages[self.extra["stage"]]

    @property
    def begin(self) -> int:
        return sum(stage.steps for stage in self.stages[: self.extra["stage"]])

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def progress(self) -> tuple[int, int]:
        return self.step - self.begin, self.stage.steps

    @property
    def at_end(self) -> bool:
        return self.step - self.begin >= self.stage.steps

    @property
    def due(self) -> bool:
        return self.at_end or self.step % self.config.evaluate_every == 0

    def after_evaluation(self, metrics: dict[str, float]) -> None:
        if not self.at_end:
            return
        number = self.extra["stage"]
        if number == 0:
            self.extra["pretrained"] = {k: v.detach().clone() for k, v in self.evaluated.state_dict().items()}
            self.extra["results"]["pretrained"] = dict(metrics)
            self.extra["mixtures"] = self.mixtures()
            self.after_pretraining()
        else:
            with torch.no_grad():
                self.extra["results"].setdefault(self.stage.name, {}).update(self.outcome())
        if number + 1 < len(self.stages):
            self.start(number + 1)

    def after_pretraining(self) -> None:
        """Measure the net after the first stage."""

    def start(self, number: int, resumed: bool = False) -> None:
        self.extra["stage"] = number
        self.model = self.pretrained()
        self.add_new(self.stage, resumed)
        self.optimizer = self.make_optimizer()
        self.average = self.new_average()

    def pretrained(self) -> IsometricNet:
        """A new copy of the first stage's net, in training mode."""
        net = self.build(self.config, self.name, self.seed).to(self.device)
        net.load_state_dict(self.extra["pretrained"])
        return net.train()

    # ---- training and measures

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        if not self.extra["stage"]:
            return super().batches(generator)
        return (self.new_data.draw(self.config.chunk, self.config.batch * len(self.tasks), generator),)

    def loss(self, index: Tensor, *moves: Tensor) -> Tensor:  # type: ignore[override]
        if not self.extra["stage"]:
            return super().loss(index, *moves)
        images, labels = self.new_data(index[0])
        loss = self.new_loss(images, labels)
        self.average.update_parameters(self.model)
        return loss

    def scores(self, net: IsometricNet, images: Tensor) -> Tensor:
        found = net(images, self.number)
        assert isinstance(found, Tensor)
        return found

    def evaluate(self) -> dict[str, float]:
        if not self.extra["stage"]:
            return super().evaluate()
        most = None if self.at_end else _WATCHED
        loss, accuracy = measure(self.predict, self.new, self.number, most, self.device)
        return {f"loss_{self.stage.name}": loss, f"accuracy_{self.stage.name}": accuracy}

    def result(self, last: dict[str, float]) -> dict[str, Any]:
        return {"results": self.extra["results"], "mixtures": self.extra["mixtures"]}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["extra"]["stage"]:
            self.extra["pretrained"] = state["extra"]["pretrained"]
            self.start(state["extra"]["stage"], resumed=True)
        super().load_state(state)


@torch.no_grad()
def recalibrate(net: IsometricNet, number: int, images: Tensor, batch: int, seed: int) -> None:
    """Estimate a task's batch-norm statistics from its own images (uint8 ``[N, C, S, S]``)."""
    generator = torch.Generator().manual_seed(seed)
    training = net.training
    net.train()
    for _ in range(_BATCHES):
        some = torch.randint(len(images), (batch,), generator=generator)
        net(scaled(images[some.to(images.device)]), number)
    net.train(training)
