"""Common parts of the compositional studies: tasks side by side, RMSprop, averaged weights, accuracies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fastmod.models import IsometricNet
from fastmod.nn.compositional import logit_groups
from fastmod.runs.config import Config, StudyError
from fastmod.runs.trial import Trial
from fastmod.studies.comp import sources
from fastmod.studies.comp.sources import Task

_AT_ONCE = 500  # images per batch of an evaluation
_WATCHED = 1000  # test images per task in evaluations before the end


@dataclass(frozen=True)
class CompConfig(Config):
    batch: int = 32  # per task
    lr: float = 0.002
    clip: float = math.inf  # no clipping, as in the paper
    chunk: int = 10  # small, because steps are long and Ctrl-C waits for the end of a chunk
    channels: int = 24
    layers: int = 8
    templates: int = 4
    se: bool = True  # squeeze-excite in the blocks
    patch: int = 4  # side of the input adapter's patches
    side: int = 28  # pixels of an image
    colours: int = 1
    dropout: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 1e-5  # not for the logits
    logit_rate: float = 20.0  # rate of logits as a multiple of lr; their product is the paper's 0.04
    schedule: str = "cosine"  # of the rate: cosine to 0, or "paper": times 0.99 every 1500 steps
    average: float = 0.95  # decay per step of the averaged weights that are evaluated; 0: the current weights
    train_images: int = 0  # per task; 0: all
    test_images: int = 0
    held_back: int = 0  # training images to use as test images, for choosing settings
    data: str | None = None  # folder with a folder per data set; none: FASTMOD_DATA
    data_seed: int = 0  # of noise in the images
    verify: bool = True  # check that MNIST is the official one
    paper: bool = False  # the paper's settings, where it prints them

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("channels", "layers", "templates", "patch", "side"):
            if not 1 <= getattr(self, name) <= 4096:
                raise StudyError(f"{name}: expected 1 to 4096, got {getattr(self, name)}")
        if self.colours not in (1, 3):
            raise StudyError(f"colours: expected 1 or 3, got {self.colours}")
        if self.side < self.patch:
            raise StudyError(f"side: expected at least patch = {self.patch}, got {self.side}")
        for name in ("dropout", "momentum", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise StudyError(f"{name}: expected 0 or more, below 1, got {getattr(self, name)}")
        for name in ("weight_decay", "logit_rate", "train_images", "test_images", "held_back", "data_seed"):
            if not 0 <= getattr(self, name) < 2**31:
                raise StudyError(f"{name}: expected 0 or more, below 2**31, got {getattr(self, name)}")
        if self.schedule not in ("cosine", "paper"):
            raise StudyError(f"schedule: expected cosine or paper, got {self.schedule!r}")

    @property
    def place(self) -> sources.Where:
        return sources.Where(self.data, self.verify)

    def task(self, dataset: str, domain: str = "original", margin: int = 0) -> Task:
        return sources.task(
            dataset, domain, self.place, side=self.side, colours=self.colours, train=self.train_images,
            test=self.test_images, seed=self.data_seed, held_back=self.held_back, margin=margin,
        )  # fmt: skip


class Images:
    """The training images of several tasks in one tensor, for one gather per step."""

    def __init__(self, tasks: Mapping[str, Task], device: torch.device) -> None:
        parts = [task.train for task in tasks.values()]
        self.images = torch.cat([part.images for part in parts]).to(device)
        self.labels = torch.cat([part.labels for part in parts]).to(device)
        self.sizes = [len(part.labels) for part in parts]

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensor:
        """Draw indices of images ``[steps, T, batch]``, with replacement."""
        found, first = [], 0
        for size in self.sizes:
            found.append(first + torch.randint(size, (steps, batch), generator=generator, device=self.labels.device))
            first += size
        return torch.stack(found, 1)

    def __call__(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return scaled(self.images[index]), self.labels[index]


def scaled(images: Tensor) -> Tensor:
    return images.float().div_(255)


class CompTrial(Trial):
    """Train several tasks in one IsometricNet: a batch of each per step, cross-entropies summed.

    Evaluations use ``self.average``, a moving average of weights and statistics.
    """

    config: CompConfig
    model: IsometricNet
    batch_dims: ClassVar[tuple[int, ...]] = (1,)  # indices of images, [T, B]
    #: Settings of RMSprop that the paper leaves open.
    alpha: ClassVar[float] = 0.9
    eps: ClassVar[float] = 1e-3

    def __init__(
        self,
        config: CompConfig,
        name: str,
        net: IsometricNet,
        seed: int,
        device: torch.device,
        tasks: Mapping[str, Task],
    ) -> None:
        self.tasks = dict(tasks)
        self.data = Images(tasks, device)
        super().__init__(config, name, net, seed, device)
        self.average = self.new_average()

    def new_average(self) -> AveragedModel:
        """An average that starts at the current weights; with decay 0 it follows them."""
        return AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(self.config.average), use_buffers=True)

    def nets(self) -> list[nn.Module]:
        return [self.model, self.average]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.rmsprop(self.model, self.config.lr)

    def rmsprop(self, net: IsometricNet, lr: float) -> torch.optim.Optimizer:
        config = self.config
        if net.body.logits is None:
            groups: list[dict[str, Any]] = [{"params": list(net.parameters()), "lr": lr}]
        else:
            groups = logit_groups(net, lr, config.logit_rate)
            groups[1]["weight_decay"] = 0.0
        for group in groups:
            group["params"] = [p for p in group["params"] if p.requires_grad]
            group["first"] = group["lr"]
        groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.RMSprop(
            groups, lr, self.alpha, self.eps, config.weight_decay, config.momentum, foreach=True
        )
        if math.isfinite(config.clip):
            several = [p for group in groups for p in group["params"]]
            optimizer.register_step_pre_hook(lambda *_: _clip(several, config.clip))
        return optimizer

    # ---- training

    @property
    def progress(self) -> tuple[int, int]:
        """Steps done and in total, for the schedule of the rate."""
        return self.step, self.steps

    def chunk(self) -> Tensor:
        done, whole = self.progress
        factor = 0.99 ** (done // 1500)
        if self.config.schedule == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * done / whole))
        for group in self.optimizer.param_groups:
            group["lr"] = group["first"] * factor
        return super().chunk()

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        return (self.data.draw(self.config.chunk, self.config.batch, generator),)

    def loss(self, index: Tensor, *moves: Tensor) -> Tensor:  # type: ignore[override]
        images, labels = self.data(index)  # [T, B, C, S, S]
        scores = self.model(self.moved(images, *moves), None)
        loss = sum(F.cross_entropy(s, right) for s, right in zip(scores, labels, strict=True))
        self.average.update_parameters(self.model)  # before the step: averages the weights used for this loss
        return torch.as_tensor(loss) + self.penalty()

    def moved(self, images: Tensor, *moves: Tensor) -> Tensor:
        """Augment images; ``moves`` are what :meth:`batches` returns besides indices."""
        return images

    def penalty(self) -> Tensor | float:
        return 0.0

    # ---- measures

    @property
    def evaluated(self) -> IsometricNet:
        """The net with averaged weights, in eval mode."""
        net = self.average.module.eval()
        assert isinstance(net, IsometricNet)
        return net

    def evaluate(self) -> dict[str, float]:
        most = None if self.finished else _WATCHED
        found = {"lr": self.optimizer.param_groups[0]["lr"]}
        for number, (name, task) in enumerate(self.tasks.items()):
            loss, accuracy = measure(self.evaluated, task, number, most, self.device)
            found |= {f"loss_{name}": loss, f"accuracy_{name}": accuracy}
        found["accuracy"] = sum(found[f"accuracy_{name}"] for name in self.tasks) / len(self.tasks)
        found["test_loss"] = sum(found[f"loss_{name}"] for name in self.tasks)
        return found

    def mixtures(self) -> dict[str, list[list[float]]]:
        """Task -> shares of the templates ``[layers][templates]``."""
        xi = self.evaluated.mixture()
        return {name: xi[number].tolist() for number, name in enumerate(self.tasks)}

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        return {**last, "mixtures": self.mixtures()}

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        return {**super().state(), "average": self.average.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        try:
            self.average.load_state_dict(state["average"])
        except (RuntimeError, KeyError) as error:
            raise StudyError(f"the checkpoint does not fit the model: {str(error).splitlines()[0]}") from None


@torch.no_grad()
def measure(
    net: Callable[..., Any], task: Task, number: int, most: int | None, device: torch.device, **how: Any
) -> tuple[float, float]:
    """Mean loss and accuracy in percent on the first ``most`` test images (None: all), as task ``number``."""
    images, labels = (tensor[:most].to(device) for tensor in task.test)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    for some, expected in zip(images.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True):
        scores = net(scaled(some), number, **how)
        assert isinstance(scores, Tensor)
        loss += F.cross_entropy(scores, expected, reduction="sum").double()
        right += (scores.argmax(-1) == expected).sum()
    return loss.item() / len(labels), 100 * right.item() / len(labels)


def _clip(parameters: list[Tensor], norm: float) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, norm)
