"""What the ResMixNet studies share: epochs over a fixed set of images, SGD whose rate falls twice, errors, gates."""

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
_AT_ONCE = 250  # images in an evaluation


@dataclass(frozen=True)
class ResMixConfig(Config):
    steps: int = 0  # 0: as many as the epochs have
    batch: int = 64
    lr: float = 0.0  # to begin with; 0: the paper's, by model
    clip: float = math.inf  # the paper clips nothing
    chunk: int = 10  # steps are long here, and Ctrl-C waits for the last of them
    evaluate_every: int = 0  # steps; 0: an epoch
    epochs: int = 20
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decays: tuple[float, ...] = (0.5, 0.7)  # shares of the training after which the rate is a tenth
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
    """A study's trial gives it the images and, if they are to be moved, :meth:`moved`.

    Images are shown in a new order in each epoch; those that do not fill a batch are left out of it. Chunks end with
    epochs, so that evaluations do.
    """

    config: ResMixConfig
    most: ClassVar[int | None] = None  # images that are evaluated before the end

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
        """``parts``: ``train``, ``test``, and the one ``watched`` in the course of training, if it is a third.
        ``groups``: name -> which test images, bool ``[N]``, to tell gate weights apart. ``scale``: what is taken from
        bytes and what they are divided by; without it they become 0 to 1."""
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
        """Of the next chunk."""
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
        """Which images ``[chunk, B]``, and what :meth:`moves` says of them."""
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
        """Random choices for images on the fly, each ``[*shape, ...]``; see :meth:`moved`."""
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
        """Of the part that is watched, and the mean loss of training since the last time."""
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
        """Mean loss and errors in percent, of the first images if there are more; the model is in eval mode."""
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
        """The last metrics, ``test_loss`` and ``error_test`` of all test images, and of a net with experts ``gates``:
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
