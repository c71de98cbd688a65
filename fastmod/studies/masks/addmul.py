"""Addition and multiplication modulo 100: does a net keep different functions in different weights?

Input: two numbers of two one-hot digits each, the least significant first, and the operation: 4 * 10 + 2. Output: the
two digits of the result. A number is right when both of its digits are.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fastmod.runs import draw
from fastmod.runs.study import Outcome, Record, Row
from fastmod.studies.masks import arithmetic, figures, masking, tables
from fastmod.studies.masks.arithmetic import ROWS, SPARSE
from fastmod.tasks.arithmetic import LIMIT, digits_of, one_hot, one_hot_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPERATIONS = ("add", "mul")
_INPUTS, _OUTPUTS = 42, 20
_FIGURE_11 = ("FNN_large", "LSTM")  # the nets of C.3; the other sizes are Figure 9's


@dataclass(frozen=True)
class MaskAddMulConfig(arithmetic.ArithmeticConfig):
    steps: int = 8000
    mask_steps: int = 4000


def inputs_of(numbers: Tensor, operation: Tensor) -> Tensor:
    """``numbers [..., 2]`` and ``operation [...]`` (0 adds, 1 multiplies) as ``[..., 42]``."""
    return torch.cat([one_hot_digits(numbers), one_hot(operation, 2)], -1)


def answers_of(numbers: Tensor, operation: Tensor) -> Tensor:
    """The digits ``[..., 2]`` of the sum or product modulo 100, the least significant first."""
    sums, products = numbers.sum(-1), numbers.prod(-1)
    return digits_of(torch.where(operation == 0, sums, products) % LIMIT)


class MaskAddMulTrial(masking.MaskTrial):
    config: MaskAddMulConfig
    tasks: Sequence[str] = OPERATIONS

    def net(self) -> nn.Module:
        return self.config.net(self.name, _INPUTS, _OUTPUTS)

    def batches_of(self, task: str | None, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (self.config.chunk, self.batch_of(task))
        numbers = torch.randint(LIMIT, (*shape, 2), generator=generator, device=self.device)
        if task is None:
            operation = torch.randint(2, shape, generator=generator, device=self.device)
        else:
            operation = torch.full(shape, OPERATIONS.index(task), device=self.device)
        return inputs_of(numbers, operation), answers_of(numbers, operation)

    def scores_of(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """``[B, 42]`` -> ``[B, 20]``; the LSTM sees its input for some steps and answers in the last."""
        if self.name != "LSTM":
            return model(inputs)
        return model(inputs.unsqueeze(1).expand(-1, self.config.time_steps, -1))[:, -1]

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        inputs, digits = batch
        return arithmetic.digit_loss(self.scores_of(model, inputs), digits)

    def _pairs(self) -> Tensor:
        """All pairs of numbers ``[10000, 2]`` that are reported on, some of them before the end."""
        return self.config.pairs(self.device)[:: 1 if self.finished else SPARSE]

    def _predictions(self, model: nn.Module, numbers: Tensor, operation: int) -> Tensor:
        which = torch.full(numbers.shape[:-1], operation, device=self.device)
        inputs = inputs_of(numbers, which)
        return torch.cat([arithmetic.predicted_digits(self.scores_of(model, some)) for some in inputs.split(ROWS)])

    def performed(self, model: nn.Module, asked: int) -> dict[str, float]:
        """Of which operation the answer is the right one, asked for this one: shares of the pairs on which the two
        differ, and ``none``."""
        numbers = self._pairs()
        each = [answers_of(numbers, torch.full_like(numbers[:, 0], op)) for op in range(len(OPERATIONS))]
        apart = (each[0] != each[1]).any(-1)
        predictions = self._predictions(model, numbers[apart], asked)
        shares = {
            op: (predictions == right[apart]).all(-1).float().mean().item()
            for op, right in zip(OPERATIONS, each, strict=True)
        }
        return {**shares, "none": max(0.0, 1.0 - sum(shares.values()))}

    def accuracies(self, model: nn.Module) -> dict[str, float]:
        return self._accuracies(model, self._pairs())

    def validation_accuracy(self, model: nn.Module) -> float:
        found = self._accuracies(model, self.config.pairs(self.device, held=True))
        return sum(found.values()) / len(found)

    def _accuracies(self, model: nn.Module, numbers: Tensor) -> dict[str, float]:
        found = {}
        for number, name in enumerate(OPERATIONS):
            right = answers_of(numbers, torch.full_like(numbers[:, 0], number))
            found[name] = (self._predictions(model, numbers, number) == right).all(-1).float().mean().item()
        return found

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """Also ``performed``: mask (``none``: the plain net) -> operation asked for -> operation performed -> share."""
        found = super().result(last)
        performed = {"none": {op: self.performed(self.model, i) for i, op in enumerate(OPERATIONS)}}
        for task, mask in self.masks().items():
            assert self.masked is not None
            with self.masked.using(mask):
                performed[task] = {op: self.performed(self.masked, i) for i, op in enumerate(OPERATIONS)}
        return {**found, "performed": performed}


class MaskAddMul(arithmetic.ArithmeticStudy):
    name = "mask-addmul"
    title = "Addition and multiplication under weight masks: different weights for different functions?"
    paper = "Weight masks, section 3.1 and C.3, Figures 1, 7 and 9 to 12"
    models = ("FNN_small", "FNN", "LSTM", "FNN_large", "FNN_huge")
    default_models = ("FNN_small", "FNN")
    default_seeds = "0"
    defaults = MaskAddMulConfig()
    presets: ClassVar = {model: {**arithmetic.PAPER, "beta": 1e-4} for model in models}
    quick: ClassVar = {"steps": 1000, "mask_steps": 500, "evaluate_every": 500, "hidden": (200, 200)}

    def trial(self, config: MaskAddMulConfig, model: str, seed: int, device: torch.device) -> MaskAddMulTrial:
        return MaskAddMulTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            note = self.note(outcome, model)
            rows += tables.accuracy_rows(outcome, model, OPERATIONS, note)
            for mask, asked in (("add", "mul"), ("mul", "add")):
                ignores, fails = "most of the FNN's" if model != "LSTM" else "-", "most of the LSTM's"
                name = f"asked for {asked} under the mask of {mask}: {mask} is performed"
                pick = tables.picker("performed", mask, asked, mask)
                rows.append(tables.row(outcome, model, name, ignores, pick, f"Figure 12; {note}"))
                pick = tables.picker("performed", mask, asked, "none")
                name, paper = name.replace(f"{mask} is performed", "neither"), fails if model == "LSTM" else "-"
                rows.append(tables.row(outcome, model, name, paper, pick, f"Figure 12; {note}"))
            name, printed = "weights of mul / weights of add", "3.8" if model in _FIGURE_11 else "-"
            rows.append(tables.row(outcome, model, name, printed, _ratio, f"Figure 11; {note}"))
            for task in OPERATIONS:
                rows += tables.sharing_rows(outcome, model, task, "Figure 1: more in the outer layers", note)
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        found: figures.Figures = {}
        models = outcome.models()
        for model in models:
            records = outcome.of(model)
            found |= figures.all_of(model, records)
            panels = {f"mask: {mask}": _performed(records, mask) for mask in records[0].result["performed"]}
            found[f"performed_{model}"] = (
                figures.confusion(panels, OPERATIONS, 3, predicted=(*OPERATIONS, "none"), signed=False),
                f"{model}: the operation asked for (rows) and the one performed, under each mask (Figure 12).",
            )
        sizes = [model for model in arithmetic.HIDDEN if model in models]
        if len(sizes) > 1:
            bars = [figures.bar(outcome.of(model), tables.picker("sharing", "add", "total")) for model in sizes]
            figure = draw.bars(sizes, {"add": bars}, "net", "shared weights")
            found["sizes"] = (figure, "Share of add's weights that mul keeps too, by the size of the net (Figure 9).")
        return found


def _performed(records: Sequence[Record], mask: str) -> list[list[float]]:
    """``[asked for, performed]`` under a mask, the mean over trials."""
    names = (*OPERATIONS, "none")
    return [
        [statistics.fmean(record.result["performed"][mask][asked][done] for record in records) for done in names]
        for asked in OPERATIONS
    ]


def _ratio(result: Mapping[str, Any]) -> float | None:
    add, mul = (result["kept"][task]["total"] for task in OPERATIONS)
    return mul / add if add else None
