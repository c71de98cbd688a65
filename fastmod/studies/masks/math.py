"""The Mathematics Dataset under weight masks: are hard questions answered by the weights that answer easy ones?

One net per task, taught easy, medium and hard questions alike. The mask learned on all of them is the control; the
mask learned on easy ones keeps what these need. All questions of a task follow the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fastmod.data import mathematics
from fastmod.data.cached import cached
from fastmod.data.mathematics import CHARACTERS, LEVELS, Texts
from fastmod.models import SequenceTransformer
from fastmod.optim import Adam
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row
from fastmod.studies.masks import figures, masking, settings, tables
from fastmod.studies.masks.figures import bar
from fastmod.studies.masks.sequences import PAD, bucketed_by_length, exact_match, sequence_loss, trim_padding
from fastmod.studies.masks.tables import picker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = "all"  # the control: every level
EASY = "easy"
PICKING = "picking"  # questions of all levels that beta=auto is picked on
TASKS = {task.partition("__")[2]: task for task in mathematics.TASKS}  # model -> task
_EVALUATED = 100  # questions per level in the course of training; all of them at the end
_ROWS = 256  # evaluated at once

#: The paper's Table 1 and C.6.2; its dropout is PyTorch's.
_NET = {
    "width": 256, "inner": 512, "heads": 4, "layers": 3, "dropout": 0.1, "questions": 600_000, "validation": 10_000,
    "lr": 1e-4, "lr_end": 1.0, "clip": 1.0, "warmup": 0, "mask_lr_end": 1.0, "mask_batch": None, "mask_init": 2.0,
    "samples": 8,
}  # fmt: skip
_TASKS: Mapping[str, Mapping[str, Any]] = {
    "add_or_sub": {"batch": 256, "beta": 2e-5, "steps": 30_000, "mask_steps": 30_000, "mask_lr": 0.03},
    "linear_1d": {
        "batch": 512, "mask_batch": 400, "beta": 1e-6, "steps": 200_000, "mask_steps": 50_000, "mask_lr": 0.02,
        "warmup": 5000,
    },
    "differentiate": {"batch": 128, "beta": 1e-5, "steps": 40_000, "mask_steps": 40_000, "mask_lr": 0.03},
    "sort": {"batch": 256, "beta": 3e-6, "steps": 30_000, "mask_steps": 30_000, "mask_lr": 0.03},
    "collect": {
        "batch": 128, "mask_batch": 256, "beta": 1e-6, "steps": 200_000, "mask_steps": 50_000, "mask_lr": 0.02,
        "warmup": 5000,
    },
}  # fmt: skip
PAPER = {model: {**_NET, **own} for model, own in _TASKS.items()}


@dataclass(frozen=True)
class MaskMathConfig(settings.MaskConfig):
    steps: int = 12_000
    mask_steps: int = 500
    batch: int = 64
    # With 8 examples a mask, as in a batch of 64, the logits walk at random and the control loses what it had.
    mask_batch: int | None = 256
    lr: float = 1e-3
    lr_end: float = 0.02
    evaluate_every: int = 500
    mask_lr: float = 5e-2
    mask_lr_end: float = 0.02
    # With 2, an eighth of the weights missing at random, masks learn to live with that and not which ones they need.
    mask_init: float = 4.0
    beta: float | str = 5.6e-3  # of losses that are sums over 19 characters on average (sort)
    samples: int = 8
    warmup: int = 500  # steps of the full training in which the learning rate rises
    width: int = 64
    inner: int = 128
    heads: int = 4
    layers: int = 2
    dropout: float = 0.0
    questions: int = 10_000  # per level, to learn from
    validation: int = 500  # per level, to measure on
    data: str | None = None  # folder of the published files; none: FASTMOD_DATA or the package mathematics_dataset

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("questions", "validation", "width", "inner", "heads", "layers"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name}: expected 1 or more, got {getattr(self, name)}")
        if self.warmup < 0 or not 0 <= self.dropout < 1:
            raise StudyError(f"warmup, dropout: expected 0 or more, a share; got {self.warmup} and {self.dropout}")


@cached()
def _pairs(task: str, level: str, count: int, root: str | None) -> list[tuple[str, str]]:
    return mathematics.load_mathematics(task, level, count, root)


def texts_of(config: MaskMathConfig, model: str) -> tuple[dict[str, Texts], dict[str, Texts]]:
    """What to learn from, by the mask's task (``all``, ``easy``), and what to measure on, by level; where beta is
    picked, also what to pick it on, as ``picking``.

    Harder levels may repeat an easier one: no question that is measured is learned, and none is learned twice.
    """
    aside = config.validation * (2 if config.auto else 1)
    count = config.questions + aside
    levels = {level: _pairs(TASKS[model], level, count, config.data) for level in LEVELS}
    held = {level: pairs[: config.validation] for level, pairs in levels.items()}
    seen = {question for pairs in held.values() for question, _ in pairs}
    if config.auto:
        rest = [pair for pairs in levels.values() for pair in pairs[config.validation : aside] if pair[0] not in seen]
        held[PICKING] = rest
        seen |= {question for question, _ in rest}
    learned: dict[str, list[tuple[str, str]]] = {}
    for level, pairs in levels.items():
        learned[level] = [pair for pair in pairs[aside:] if pair[0] not in seen]
        seen |= {question for question, _ in learned[level]}
    if not learned[EASY]:
        raise StudyError(f"{model}: no easy question is left to learn from; try more questions")
    everything = [pair for pairs in learned.values() for pair in pairs]
    return (
        {ALL: mathematics.as_tensors(everything), EASY: mathematics.as_tensors(learned[EASY])},
        {level: mathematics.as_tensors(pairs) for level, pairs in held.items()},
    )


class MaskMathTrial(masking.MaskTrial):
    config: MaskMathConfig
    tasks = (ALL, EASY)

    def __init__(self, config: MaskMathConfig, name: str, seed: int, device: torch.device) -> None:
        learned, measured = texts_of(config, name)
        self.texts = {task: Texts(*(t.to(device) for t in texts)) for task, texts in learned.items()}
        self.validation = {level: Texts(*(t.to(device) for t in texts)) for level, texts in measured.items()}
        super().__init__(config, name, seed, device)

    def make_optimizer(self) -> Adam:
        return Adam(self.model.parameters(), self.config.lr, (0.9, 0.995), 1e-9, max_norm=self.config.clip)

    def net(self) -> nn.Module:
        config, characters = self.config, len(CHARACTERS)
        return SequenceTransformer(
            characters, characters, config.width, config.inner, config.heads, config.layers, config.dropout, tied=True
        )

    def begin_mask(self, task: str) -> None:
        self.model.requires_grad_(False)  # else the tied output would still collect a gradient

    def make_mask_optimizer(self, masked: nn.Module) -> Adam:
        return Adam(masked.parameters(), self.config.mask_lr, (0.9, 0.995), 1e-9, max_norm=self.config.clip)

    @property
    def lr(self) -> float:
        return self.config.lr * min(1.0, (self.step + self.config.chunk) / max(1, self.config.warmup))

    def batches_of(self, task: str | None, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Which pairs ``[chunk, B]``, of like lengths, and whether they are of the easy ones ``[chunk]``."""
        config, texts = self.config, self.texts[task or ALL]
        drawn = torch.randint(
            len(texts.questions), (config.chunk * self.batch_of(task),), generator=generator, device=self.device
        )
        order = bucketed_by_length((texts.questions[drawn] != PAD).sum(1), config.chunk, generator)
        return drawn[order], torch.full((config.chunk,), task == EASY)

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        index, easy = batch
        texts = self.texts[EASY if easy else ALL]
        answers = trim_padding(texts.answers[index])
        return sequence_loss(model(trim_padding(texts.questions[index]), answers), answers)

    def accuracies(self, model: nn.Module) -> dict[str, float]:
        """Level -> share of its questions that are answered right to the last character."""
        most = None if self.finished else _EVALUATED
        return {level: self._accuracy(model, self.validation[level], most) for level in LEVELS}

    def validation_accuracy(self, model: nn.Module) -> float:
        return self._accuracy(model, self.validation[PICKING], None)

    def _accuracy(self, model: nn.Module, texts: Texts, most: int | None) -> float:
        index = torch.arange(len(texts.questions), device=self.device)[:most]
        right = 0
        for some in index[(texts.questions[index] != PAD).sum(1).argsort()].split(_ROWS):
            answers = trim_padding(texts.answers[some])
            right += int(exact_match(model(trim_padding(texts.questions[some]), answers), answers).sum())
        return right / len(index)


class MaskMath(settings.MaskStudy):
    name = "mask-math"
    title = "The Mathematics Dataset under weight masks: other weights for harder questions?"
    paper = "Weight masks, section 4 and C.6.2, Figure 5"
    models = tuple(TASKS)  # one Transformer per task
    default_models = ("sort",)  # what a small net learns in a quarter of an hour
    default_seeds = "0"
    defaults = MaskMathConfig()
    presets = PAPER
    quick: ClassVar = {
        "steps": 100, "mask_steps": 50, "mask_batch": 64, "evaluate_every": 50, "questions": 500,
        "validation": 50, "width": 32, "inner": 64, "layers": 1,
    }  # fmt: skip

    def prepare(self, config: MaskMathConfig) -> None:
        """One question: whether there are any, not yet all that a trial needs."""
        mathematics.load_mathematics(mathematics.TASKS[0], EASY, 1, config.data)

    def trial(self, config: MaskMathConfig, model: str, seed: int, device: torch.device) -> MaskMathTrial:
        return MaskMathTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            note = self.note(outcome, model)
            for level in LEVELS:
                printed = "Figure 5" if level == "hard" else "-"
                rows.append(tables.row(outcome, model, f"{level}, no mask", printed, picker("accuracy", level), note))
                for mask in (ALL, EASY):
                    name = f"{level}, mask of {mask}"
                    expected = f"{printed}: a drop" if (level, mask) == ("hard", EASY) else printed
                    rows.append(tables.row(outcome, model, name, expected, picker("masked", mask, level), note))
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        from fastmod.runs import draw

        found: figures.Figures = {}
        models = outcome.models()
        for level in LEVELS if models else ():
            groups = {
                "no mask": [bar(outcome.of(m), picker("accuracy", level)) for m in models],
                "mask of all questions": [bar(outcome.of(m), picker("masked", ALL, level)) for m in models],
                "mask of easy questions": [bar(outcome.of(m), picker("masked", EASY, level)) for m in models],
            }
            found[level] = (draw.bars(models, groups, "task", "accuracy"), f"Accuracy on {level} questions.")
        for model in models:
            found |= figures.all_of(model, outcome.of(model))
        return found
