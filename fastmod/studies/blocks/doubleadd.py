"""Double addition: two pairs of digits, the task block says which to add; the second pair is restricted in training.

The restricted pair has one low digit (0-4) and one high (5-9), in either order. Out of distribution are the pairs with
both low or both high: whichever digit is held, its sums in training and in the test do not overlap, so a net that does
not reuse what it learned on the first pair gets 0.0, less than guessing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.runs.config import changed
from fastmod.runs.study import Outcome, Record, Row, Study
from fastmod.runs.trial import Trial
from fastmod.studies.blocks import grids, models
from fastmod.studies.blocks.models import PAPER, UNPRINTED
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
    # The paper's Table 6 has an "alternate split" and does not say what it is. Here: the second pair is restricted only
    # where it is the task; else always. Either way a net that does not reuse what it learned gets 0.
    alternate_split: bool = False
    grid: bool = False  # each seed draws an architecture and a split, of the 120 for either attention behind Table 6


def blocks_of(first: Tensor, second: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
    """Input blocks ``[..., 5, 10]`` and the digit ``[...]`` that is the sum of the pair named by ``task [...]``."""
    chosen = torch.where(task.unsqueeze(-1).bool(), second, first)
    return arithmetic.one_hot_blocks(torch.cat([first, second], -1), task), chosen.sum(-1) % 10


class DoubleAddTrial(Trial):
    config: DoubleAddConfig

    def __init__(self, config: DoubleAddConfig, name: str, seed: int, device: torch.device) -> None:
        self.architecture: dict[str, Any] = {}
        if config.grid and name.partition("_")[0] in grids.DOUBLEADD:
            self.architecture = grids.drawn(grids.DOUBLEADD, config, name, seed)
            config = changed(config, self.architecture)
        super().__init__(config, name, models.build(config, name, 5, 1, BLOCK), seed, device)
        self.penalty = models.RangePenalty(config, 5, 1)

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        shape = (self.config.chunk, self.config.batch)
        task = torch.randint(2, shape, generator=generator, device=self.device)
        first = arithmetic.uniform_pairs(shape, generator)
        second = arithmetic.restricted_pairs(shape, generator)
        if self.config.alternate_split:
            second = torch.where(task.unsqueeze(-1).bool(), second, arithmetic.uniform_pairs(shape, generator))
        blocks, digit = blocks_of(first, second, task)
        return blocks, arithmetic.one_hot(digit)

    @property
    def side_by_side(self) -> bool:
        return models.mappable(self.model)

    def loss(self, blocks: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        answer = self.model(blocks)[:, 0]
        return F.mse_loss(answer, target) + self.penalty(self.model, len(blocks))

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
            **models.gates(self.model),
        }

    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """Also ``architecture``: what the grid gave it."""
        return {**last, "architecture": self.architecture}

    def _accuracy(self, pairs: Tensor, task: int, generator: torch.Generator) -> float:
        """Of the sum of ``pairs [B, 2]`` in the place that ``task`` names."""
        count = (len(pairs),)
        uniform = arithmetic.uniform_pairs(count, generator)
        other = arithmetic.restricted_pairs(count, generator) if task == 0 else uniform
        first, second = (pairs, other) if task == 0 else (other, pairs)
        blocks, digit = blocks_of(first, second, torch.full(count, task, device=self.device))
        return (self.model(blocks)[:, 0].argmax(-1) == digit).float().mean().item()


#: The 25 trials of 240 with an OOD accuracy of 1.0: alternate split, attention, depth, width, FNN layers, parameters.
TABLE_6 = (
    (True, "softmax", 1, 9, 2, 95364), (True, "softmax", 1, 5, 1, 36096), (False, "softmax", 1, 9, 1, 54964),
    (False, "softmax", 1, 8, 1, 50247), (False, "softmax", 1, 10, 1, 59681), (False, "softmax", 1, 7, 1, 45530),
    (False, "gumbel", 1, 8, 1, 50249), (False, "softmax", 1, 6, 1, 40813), (True, "softmax", 1, 10, 1, 59681),
    (True, "softmax", 1, 9, 1, 54964), (True, "softmax", 1, 8, 1, 50247), (True, "softmax", 1, 7, 1, 45530),
    (True, "softmax", 1, 6, 1, 40813), (False, "gumbel", 1, 10, 1, 59683), (True, "softmax", 2, 10, 1, 111091),
    (True, "gumbel", 1, 6, 1, 40815), (False, "gumbel", 1, 7, 1, 45532), (False, "gumbel", 1, 6, 1, 40815),
    (True, "softmax", 1, 6, 2, 81213), (True, "softmax", 1, 8, 2, 90647), (True, "gumbel", 1, 9, 1, 54966),
    (True, "softmax", 1, 10, 2, 100081), (True, "softmax", 2, 9, 2, 160944), (True, "softmax", 2, 5, 2, 119976),
    (False, "gumbel", 1, 9, 1, 54966),
)  # fmt: skip


def _share(outcome: Outcome, name: str, paper: str, records: Sequence[Record], note: str) -> Row:
    """The share of the trials that are perfect out of distribution."""
    row = outcome.row(name, paper, records, "ood_accuracy", note)
    return replace(row, values=[float(value == 1.0) for value in row.values])


def _shallow_and_wide(record: Record) -> bool:
    """Whether it is one of the architectures that section 5.2 counts apart."""
    architecture = record.result["architecture"]
    return architecture["depth"] == 1 and architecture["width"] >= 8


class DoubleAdd(Study):
    name = "doubleadd"
    title = "Double addition: is a subnetwork reused where it was never trained?"
    paper = "Block-Operations, section 5.2, Table 6, Figure 3"
    models = ("SMFR_softmax", "SMFR_gumbel", "FNN", "Transformer")
    default_models = ("SMFR_softmax", "SMFR_gumbel", "FNN")
    default_seeds = "0-7"
    defaults = DoubleAddConfig()
    unprinted = UNPRINTED
    presets: ClassVar = {model: {**PAPER, "grid": True} for model in models}
    quick: ClassVar = {"steps": 500, "evaluate_every": 250}
    grids: ClassVar = grids.named(grids.DOUBLEADD)
    blocks = (("A1", "A2", "B1", "B2", "task"), ("sum",))

    _MEAN: ClassVar = {"FNN": "0.000"}
    _SHARE: ClassVar = {
        "SMFR_softmax": "0.75 (9 of 12)",
        "SMFR_gumbel": "0.33 (4 of 12)",
        "FNN": "0.00",
    }

    def unused(self, config: DoubleAddConfig, model: str) -> Collection[str]:
        drawn = self.grids.get(model.partition("_")[0].lower(), {}) if config.grid else {}
        return {*models.unused(config, model), *({*drawn} - {*(config.typed or ())})}

    def trial(self, config: DoubleAddConfig, model: str, seed: int, device: torch.device) -> DoubleAddTrial:
        return DoubleAddTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        drawn = [model for model in outcome.models() if self.config_of(outcome.config, model).grid]
        rows = []
        if drawn:
            records = [record for record in outcome.records if record.model in drawn]
            rows += self._grid_rows(replace(outcome, records=records))
        for model in (model for model in outcome.models() if model not in drawn):
            records = outcome.of(model)
            note = f"{records[0].parameters:,} parameters"
            mean = outcome.row(f"{model}, OOD accuracy", self._MEAN.get(model, "-"), records, "ood_accuracy", note)
            paper = self._SHARE.get(model, "-").replace(")", "; depth 1, width >= 8)")
            share = _share(outcome, f"{model}, share at 1.0", paper, records, note)
            rows += [mean, share, outcome.row(f"{model}, trained pairs", "-", records, "accuracy", note)]
        return rows

    def sweep_table(self, config: Any, found: Sequence[tuple[Mapping[str, Any], Record]]) -> list[Row]:
        """Table 6, of a sweep over its grid."""
        if not found or {*found[0][0]} not in map(set, self.grids.values()):
            return []
        return self._grid_rows(Outcome(config, grids.as_drawn(found), []))

    def _grid_rows(self, outcome: Outcome) -> list[Row]:
        """Section 5.2's averages over the whole grid, and Table 6 as far as there are trials of its architectures."""
        smfr = [record for record in outcome.records if record.model.startswith("SMFR")]
        done = {(record.model, *sorted(record.result["architecture"].items())) for record in smfr}
        part = f"SMFR, {'all' if len(done) == 240 else len(done)} of the grid's 240 cells"
        mean, share = ("0.205", "0.104 (25 of 240)") if len(done) == 240 else ("-", "-")  # of all of them
        rows = [
            outcome.row(f"{part}, OOD accuracy", mean, smfr, "ood_accuracy", "section 5.2"),
            _share(outcome, f"{part}, share at 1.0", share, smfr, "section 5.2"),
            *[
                _share(
                    outcome,
                    f"{model}, depth 1, width >= 8, share at 1.0",
                    self._SHARE[model],
                    [record for record in outcome.of(model) if _shallow_and_wide(record)],
                    "section 5.2",
                )
                for model in ("SMFR_softmax", "SMFR_gumbel")
            ],
            outcome.row("FNN, all sizes, OOD accuracy", "0.000", outcome.of("FNN"), "ood_accuracy", "section 5.2"),
        ]
        for alternate, attention, depth, width, layers, printed in TABLE_6:
            wanted = {"alternate_split": alternate, "depth": depth, "width": width, "layers": layers}
            some = [r for r in outcome.of(f"SMFR_{attention}") if r.result["architecture"] == wanted]
            split = "alternate" if alternate else "plain"
            name = f"{split} split, {attention}, depth {depth}, width {width}, {layers} layers"
            rows.append(outcome.row(name, "1.0", some, "ood_accuracy", f"Table 6; {printed:,} parameters"))
        return [row for row in rows if row.values]

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
