"""Double addition: two pairs of digits, the task block says which to add; the second pair is restricted in training.

The restricted pair has one low digit (0-4) and one high (5-9), in either order. Out of distribution are the pairs with
both low or both high: whichever digit is held, its sums in training and in the test do not overlap, so a net that does
not reuse what it learned on the first pair gets 0.0, less than guessing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.runs.study import Outcome, Row, Study
from fastmod.runs.trial import Trial
from fastmod.studies.blocks import models
from fastmod.tasks import arithmetic
from fastmod.tasks.arithmetic import BLOCK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REPEATS = 20  # of every pair of interest, with other digits in the pair that does not count


@dataclass(frozen=True)
class DoubleAddConfig(models.ModelConfig):
    steps: int = 20_000
    evaluate_every: int = 1000
    width: int = 8
    depth: int = 1
    restrict_always: bool = True  # False: the second pair is restricted only where it is the task


def blocks_of(first: Tensor, second: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
    """Input blocks ``[..., 5, 10]`` and the digit ``[...]`` that is the sum of the pair named by ``task [...]``."""
    chosen = torch.where(task.unsqueeze(-1).bool(), second, first)
    return arithmetic.one_hot_blocks(torch.cat([first, second], -1), task), chosen.sum(-1) % 10


class DoubleAddTrial(Trial):
    config: DoubleAddConfig

    def __init__(self, config: DoubleAddConfig, name: str, seed: int, device: torch.device) -> None:
        super().__init__(config, name, models.build(config, name, 5, 1, BLOCK), seed, device)

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (self.config.chunk, self.config.batch)
        task = torch.randint(2, shape, generator=generator, device=self.device)
        first = arithmetic.uniform_pairs(shape, generator)
        second = arithmetic.restricted_pairs(shape, generator)
        if not self.config.restrict_always:
            second = torch.where(task.unsqueeze(-1).bool(), second, arithmetic.uniform_pairs(shape, generator))
        blocks, digit = blocks_of(first, second, task)
        return blocks, arithmetic.one_hot(digit)

    def loss(self, blocks: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        answer = self.model(blocks)[:, 0]
        return F.mse_loss(answer, target) + models.penalty(self.model)

    def evaluate(self) -> dict[str, float]:
        generator = self.generator("evaluation")
        every = arithmetic.all_pairs(self.device)
        new = arithmetic.excluded_pairs(self.device)
        known = arithmetic.allowed_pairs(self.device)
        first = self._accuracy(every.repeat(_REPEATS, 1), 0, generator)
        second = self._accuracy(known.repeat(_REPEATS, 1), 1, generator)
        return {
            "accuracy": (first + second) / 2,
            "ood_accuracy": self._accuracy(new.repeat(_REPEATS, 1), 1, generator),
        }

    def _accuracy(self, pairs: Tensor, task: int, generator: torch.Generator) -> float:
        """Of the sum of ``pairs [B, 2]`` in the place that ``task`` names."""
        count = (len(pairs),)
        uniform = arithmetic.uniform_pairs(count, generator)
        other = arithmetic.restricted_pairs(count, generator) if task == 0 else uniform
        first, second = (pairs, other) if task == 0 else (other, pairs)
        blocks, digit = blocks_of(first, second, torch.full(count, task, device=self.device))
        return (self.model(blocks)[:, 0].argmax(-1) == digit).float().mean().item()


class DoubleAdd(Study):
    name = "doubleadd"
    title = "Double addition: is a subnetwork reused where it was never trained?"
    paper = "Block-Operations, section 5.2, Figure 3"
    models = ("SMFR_softmax", "SMFR_gumbel", "FNN", "Transformer")
    default_models = ("SMFR_softmax", "SMFR_gumbel", "FNN")
    default_seeds = "0-7"
    defaults = DoubleAddConfig()
    quick: ClassVar = {"steps": 500, "evaluate_every": 250}
    blocks = (("A1", "A2", "B1", "B2", "task"), ("sum",))

    _MEAN: ClassVar = {"FNN": "0.000"}
    _SHARE: ClassVar = {
        "SMFR_softmax": "0.75 (9 of 12; depth 1, width >= 8)",
        "SMFR_gumbel": "0.33 (4 of 12)",
        "FNN": "0.00",
    }

    def trial(self, config: DoubleAddConfig, model: str, seed: int, device: torch.device) -> DoubleAddTrial:
        return DoubleAddTrial(config, model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            records = outcome.of(model)
            note = f"{records[0].parameters:,} parameters"
            mean = outcome.row(f"{model}, OOD accuracy", self._MEAN.get(model, "-"), records, "ood_accuracy", note)
            perfect = [float(value == 1.0) for value in mean.values]
            share = Row(f"{model}, share at 1.0", self._SHARE.get(model, "-"), perfect, mean.steps, mean.minutes, note)
            rows += [mean, share, outcome.row(f"{model}, trained pairs", "-", records, "accuracy", note)]
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        from fastmod.runs import draw

        groups = {model: outcome.curves(model, "ood_accuracy") for model in outcome.models()}
        figure = draw.curves(groups, "OOD accuracy")
        return {"ood": (figure, "OOD accuracy in training, one line per trial (Figure 3).")}

    def examples(self, config: DoubleAddConfig, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        first, second = (arithmetic.uniform_pairs((512,), generator) for _ in range(2))
        tasks = {"A1 + A2": 0, "B1 + B2": 1}
        return {
            name: blocks_of(first, second, torch.full((512,), task, device=device))[0] for name, task in tasks.items()
        }
