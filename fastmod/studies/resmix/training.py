"""Common parts of the ResMixNet studies: epochs over fixed images, SGD with two rate drops, errors, gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.runs.config import Config, StudyError
from fastmod.runs.trial import Trial
from fastmod.studies.resmix import nets
from fastmod.tasks import Labelled

MODULES = ("M1", "M2")
_AT_ONCE = 250  # images per batch of an evaluation


@dataclass(frozen=True)
class ResMixConfig(Config):
    steps: int = 0  # 0: all steps of the epochs
    batch: int = 64
    lr: float = 0.0  # initial rate; 0: the paper's for the model
    clip: float = math.inf  # no clipping, as in the paper
    chunk: int = 10  # small, because steps are long and Ctrl-C waits for the end of a chunk
    evaluate_every: int = 0  # steps; 0: an epoch
    epochs: int = 20
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decays: tuple[float, ...] = (0.5, 0.7)  # fractions of the training after which the rate is divided by 10
    paper: bool = False  # the paper's epochs

    may_be_zero: ClassVar = ("steps", "lr", "evaluate_every")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.epochs < 2**31:
            raise StudyError(f"epochs: expected 1 or more, below 2**31, got {self.epochs}")
        if not 0 <= self.momentum < 1:
            raise StudyError(f"momentum: expected 0 or more, below 1, got {self.momentum}")
        if not 0 <= self.weight_decay < math.inf:
            raise StudyError(f"weight_decay: expected 0 or more, got {self.weight_decay}")
        if not all(0 < share < 1 for share in self.decays):
            raise StudyError(f"decays: expected shares between 0 and 1, got {self.decays}")

    @property
    def length(self) -> str:
        return f"{self.epochs} epochs"


class ResMixTrial(Trial):
    """Base of the studies' trials, which pass in the images and may override :meth:`moved` to augment them.

    Each epoch has a new order of images and drops those that do not fill a batch. Chunks do not cross the end of an
    epoch, as evaluations are due there.
    """

    config: ResMixConfig
    most: ClassVar[int | None] = None  # images in evaluations before the end

    def __init__(
        self,
        config: ResMixConfig,
        name: str,
        seed: int,
        device: torch.device,
        *,
        rate: float,
        classes: int,
        stem_stride: int,
        parts: Mapping[str, Labelled],
        watched: str,
        groups: Mapping[str, Tensor],
        scale: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """``parts``: ``train``, ``test`` and perhaps a third; ``watched`` is evaluated during training.

        ``groups``: name -> bool ``[N]``, test images to average gate weights over. ``scale``: shift and divisor of
        the pixels' bytes; by default they are scaled to 0 .. 1.
        """
        self.rate, self.watched = config.lr or rate, watched
        self.parts = {part: Labelled(*(tensor.to(device) for tensor in data)) for part, data in parts.items()}
        self.groups = groups
        zero, whole = torch.zeros((), device=device), torch.full((), 255.0, device=device)
        self.shift, self.divisor = (zero, whole) if scale is None else (part.to(device) for part in scale)
        self.per_epoch = len(self.parts["train"].labels) // config.batch
        if not self.per_epoch:
            count = len(self.parts["train"].labels)
            raise StudyError(f"batch: expected at most the {count} training images, got {config.batch}")
        super().__init__(config, name, nets.build(name, classes, stem_stride), seed, device)
        self.after_evaluation({})

    def make_optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        sgd = torch.optim.SGD(
            self.model.parameters(), self.rate, config.momentum, weight_decay=config.weight_decay, fused=True
        )
        if math.isfinite(config.clip):
            parameters = list(self.model.parameters())
            sgd.register_step_pre_hook(lambda *_: _clip(parameters, config.clip))
        return sgd

    # ---- training

    @property
    def steps(self) -> int:
        return self.config.steps or self.config.epochs * self.per_epoch

    @property
    def due(self) -> bool:
        return self.step % (self.config.evaluate_every or self.per_epoch) == 0

    @property
    def lr(self) -> float:
        """Rate of the next chunk."""
        return self.rate / 10 ** sum(self.step >= round(self.steps * share) for share in self.config.decays)

    def chunk(self) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        begin = self.step
        loss = super().chunk()
        count = self.step - begin
        self.extra["loss"] = self.extra["loss"].to(self.device) + loss.double() * count
        self.extra["since"] += count
        return loss

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Indices of images ``[chunk, B]``, and the random choices of :meth:`moves`."""
        epoch, done = divmod(self.step, self.per_epoch)
        every = self.config.evaluate_every or self.per_epoch
        count = min(self.config.chunk, self.per_epoch - done, self.steps - self.step, every - self.step % every)
        batch = self.config.batch
        order = torch.randperm(
            len(self.parts["train"].labels), generator=self.generator("epoch", epoch), device=self.device
        )
        index = order[done * batch : (done + count) * batch].view(count, batch)
        return index, *self.moves((count, batch), generator)

    def moves(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random choices for augmentation, each ``[*shape, ...]``, passed to :meth:`moved`."""
        return ()

    def moved(self, images: Tensor, *moves: Tensor) -> Tensor:
        return images

    def loss(self, index: Tensor, *moves: Tensor) -> Tensor:  # type: ignore[override]
        images, labels = self.parts["train"]
        return F.cross_entropy(self.model(self.moved(self._scaled(images[index]), *moves)), labels[index])

    def _scaled(self, images: Tensor) -> Tensor:
        return (images - self.shift) / self.divisor

    # ---- measures

    def evaluate(self) -> dict[str, float]:
        """Metrics of the watched part, and the mean training loss since the last evaluation."""
        loss, error = self.measure(self.watched, None if self.finished else self.most)
        return {
            "epoch": self.step / self.per_epoch,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": float(self.extra["loss"]) / max(1, self.extra["since"]),
            f"{self.watched}_loss": loss,
            f"error_{self.watched}": error,
        }

    def after_evaluation(self, metrics: dict[str, float]) -> None:
        self.extra |= {"loss": torch.zeros((), dtype=torch.float64, device=self.device), "since": 0}

    def measure(self, part: str, most: int | None = None) -> tuple[float, float]:
        """Mean loss and errors in percent on the first ``most`` images (None: all); the model is in eval mode."""
        images, labels = (tensor[:most] for tensor in self.parts[part])
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for some, right in zip(images.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True):
            scores = self.model(self._scaled(some))
            loss += F.cross_entropy(scores, right, reduction="sum").double()
            wrong += (scores.argmax(-1) != right).sum()
        return loss.item() / len(labels), 100 * wrong.item() / len(labels)

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """The last metrics, ``test_loss`` and ``error_test`` on all test images and, for a net with experts, ``gates``:
        module -> group -> mean weight of each expert."""
        self.model.eval()
        loss, error = self.measure("test")
        found: dict[str, Any] = {**last, "test_loss": loss, "error_test": error}
        if nets.modular(self.name):
            found["gates"] = self.gates()
        self.model.train()
        return found

    def gates(self) -> dict[str, dict[str, list[float]]]:
        images = self.parts["test"].images
        several = [self.model.gates(self._scaled(some)) for some in images.split(_AT_ONCE)]  # type: ignore[operator]
        found = {}
        for module, weights in zip(MODULES, zip(*several, strict=True), strict=True):
            whole = torch.cat(weights).double().cpu()  # [N, E]
            found[module] = {
                group: whole[which].mean(0).tolist() for group, which in self.groups.items() if which.any()
            }
        return found


def _clip(parameters: Sequence[Tensor], norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, norm)
