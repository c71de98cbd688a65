"""Double addition modulo 100: is the same function, wanted twice, kept in the same weights?

Input: two pairs of numbers, two one-hot digits each, the least significant first: 80. Output: the digits of both sums,
40. Inputs and outputs of the pairs are apart; what lies between could be shared. The FNN runs twice, each time with the
other pair zeroed. The LSTM sees both pairs in all of its six steps and answers in the last; as ``LSTM_apart`` it sees
the first pair in three steps and the second in the next three, and answers at the end of each three. While the mask
of a pair is learned, every net sees the other pair zeroed; accuracy is measured with both in view, as they are in the
full task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fastmod.runs.study import Outcome, Row
from fastmod.studies.masks import arithmetic, figures, masking, tables
from fastmod.studies.masks.arithmetic import ROWS, SPARSE
from fastmod.tasks.arithmetic import LIMIT, digits_of, one_hot_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAIRS = ("pair1", "pair2")
_INPUTS, _OUTPUTS = 80, 40


@dataclass(frozen=True)
class MaskDoubleAddConfig(arithmetic.ArithmeticConfig):
    steps: int = 2000
    mask_steps: int = 1500
    beta: float | str = 4e-4  # the paper's for the FNN
    beta_lstm: float = 1e-4


def inputs_of(numbers: Tensor) -> Tensor:
    """``numbers [..., 4]`` (a, b of the first pair, c, d of the second) as ``[..., 80]``."""
    return one_hot_digits(numbers)


def answers_of(numbers: Tensor) -> Tensor:
    """The digits ``[..., 4]`` of a + b and c + d modulo 100, the least significant of each first."""
    sums = numbers.unflatten(-1, (2, 2)).sum(-1) % LIMIT
    return digits_of(sums).flatten(-2)


def only(pair: int, inputs: Tensor) -> Tensor:
    """``inputs [..., 80]`` with the other pair zeroed."""
    kept = torch.zeros(len(PAIRS), _INPUTS // 2, device=inputs.device)
    kept[pair] = 1.0
    return inputs * kept.flatten()


def part_of(pair: int, both: Tensor) -> Tensor:
    """The half of the last dimension that belongs to the pair."""
    return both.chunk(len(PAIRS), -1)[pair]


class MaskDoubleAddTrial(masking.MaskTrial):
    config: MaskDoubleAddConfig
    tasks = PAIRS

    def net(self) -> nn.Module:
        return self.config.net(self.name, _INPUTS, _OUTPUTS)

    def batches_of(self, task: str | None, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (self.config.chunk, self.batch_of(task), 4)
        numbers = torch.randint(LIMIT, shape, generator=generator, device=self.device)
        return inputs_of(numbers), answers_of(numbers)

    def scores_of(self, model: nn.Module, inputs: Tensor, pairs: tuple[int, ...]) -> list[Tensor]:
        """``inputs [B, 80]`` -> for each of the pairs asked for, what the net says of its sum, ``[B, 20]``."""
        if self.name == "LSTM":
            scores = model(inputs.unsqueeze(1).expand(-1, 2 * self.config.time_steps, -1))[:, -1]
            return [part_of(pair, scores) for pair in pairs]
        if self.name == "LSTM_apart":
            steps = self.config.time_steps
            every = torch.stack([only(pair, inputs) for pair in range(len(PAIRS))], 1)  # [B, 2, 80]
            # After the last pair that is asked for, nothing is read.
            scores = model(every[:, : max(pairs) + 1].repeat_interleave(steps, 1))
            return [part_of(pair, scores[:, (pair + 1) * steps - 1]) for pair in pairs]
        return [part_of(pair, model(only(pair, inputs))) for pair in pairs]

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Of both pairs in the full training, else of the pair that the mask is for."""
        inputs, digits = batch
        pairs = (0, 1) if self.task is None else (PAIRS.index(self.task),)
        if self.task is not None:
            # In view, the other pair would be an input that the mask has to learn to ignore.
            inputs = only(pairs[0], inputs)
        scores = self.scores_of(model, inputs, pairs)
        losses = [arithmetic.digit_loss(s, part_of(pair, digits)) for s, pair in zip(scores, pairs, strict=True)]
        return torch.stack(losses).mean()

    def accuracies(self, model: nn.Module) -> dict[str, float]:
        """On all sums of either pair (some of them before the end), the other pair having sums in another order."""
        return self._accuracies(model, self.config.pairs(self.device), 1 if self.finished else SPARSE)

    def validation_accuracy(self, model: nn.Module) -> float:
        found = self._accuracies(model, self.config.pairs(self.device, held=True))
        return sum(found.values()) / len(found)

    def _accuracies(self, model: nn.Module, every: Tensor, apart: int = 1) -> dict[str, float]:
        other = every[torch.randperm(len(every), generator=self.generator("evaluation"), device=self.device)]
        numbers = torch.cat([every, other], -1)[::apart]
        right: dict[str, list[Tensor]] = {name: [] for name in PAIRS}
        for some in numbers.split(ROWS):
            digits = answers_of(some)
            for pair, scores in enumerate(self.scores_of(model, inputs_of(some), (0, 1))):
                right[PAIRS[pair]].append((arithmetic.predicted_digits(scores) == part_of(pair, digits)).all(-1))
        return {name: torch.cat(found).float().mean().item() for name, found in right.items()}


class MaskDoubleAdd(arithmetic.ArithmeticStudy):
    name = "mask-doubleadd"
    title = "Double addition under weight masks: the same weights for the same function?"
    paper = "Weight masks, section 3.2 and C.4, Figures 2, 13 and 14"
    models = ("FNN", "LSTM", "LSTM_apart", "FNN_large")
    default_models = ("FNN", "LSTM", "LSTM_apart")
    default_seeds = "0"
    defaults = MaskDoubleAddConfig()
    presets: ClassVar = {
        "FNN": {**arithmetic.PAPER, "beta": 4e-4},
        "FNN_large": {**arithmetic.PAPER, "beta": 4e-4},
        "LSTM": {**arithmetic.PAPER, "beta": 1e-4},
        "LSTM_apart": {**arithmetic.PAPER, "beta": 1e-4},
    }
    printed_hidden: ClassVar = {"FNN": (2000,) * 4}  # C.4 has C.3's net
    quick: ClassVar = {"steps": 1000, "mask_steps": 500, "evaluate_every": 500, "hidden": (200, 200), "units": 64}

    def trial(self, config: MaskDoubleAddConfig, model: str, seed: int, device: torch.device) -> MaskDoubleAddTrial:
        return MaskDoubleAddTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            note = self.note(outcome, model)
            rows += tables.accuracy_rows(outcome, model, PAIRS, note)
            for task in PAIRS:
                rows += tables.sharing_rows(outcome, model, task, "low; 0 in outer layers (Figure 13)", note)
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        found: figures.Figures = {}
        for model in outcome.models():
            found |= figures.all_of(model, outcome.of(model))
            for stem, number in (
                (f"accuracy_{model}", "14" if model == "LSTM_apart" else "2"),
                (f"sharing_{model}", "13"),
            ):
                figure, caption = found[stem]
                found[stem] = (figure, f"{caption.removesuffix('.')} (Figure {number}).")
        return found
