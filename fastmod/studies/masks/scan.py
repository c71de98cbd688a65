"""SCAN under weight masks: do the same weights serve a command that is met in other company?

The net learns all of SCAN (the training set of the split "simple"), so its weights can do every split. A mask learned
on the training set of another split keeps what these commands need. If the net had rules, that would be enough for the
split's test set as well; the mask learned on "simple" is the control.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fastmod.data.cached import cached
from fastmod.data.scan import ACTIONS, COMMANDS, SCAN, Sequences, load_scan
from fastmod.models import LSTMEncoderDecoder, SequenceTransformer
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row
from fastmod.studies.masks import figures, masking, settings, tables
from fastmod.studies.masks.figures import bar
from fastmod.studies.masks.sequences import PAD, bucketed_by_length, exact_match, sequence_loss, trim_padding
from fastmod.studies.masks.tables import picker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = "simple"  # the split whose training set has commands of every kind: the whole problem
SPLITS = {ALL: "simple", "length": "length", "jump": "add_prim_jump", "turn_left": "add_prim_turn_left"}
_EVALUATED = 300  # test sequences per split in the course of training; all of them at the end
_ROWS = 256  # evaluated at once
_HELD = 10  # with beta=auto, one in so many is held back

#: The paper's C.6.1. The sizes and the dropout of the LSTM are those of Lake and Baroni's net, which it takes; that of
#: the Transformer is PyTorch's. The sweep that its authors published for the Transformer has a beta of 6e-4.
_STEPS = {
    "lr": 1e-3, "lr_end": 1.0, "clip": 5.0, "steps": 25_000, "batch": 256, "splits": tuple(SPLITS),
    "mask_lr": 1e-2, "mask_lr_end": 1.0, "mask_steps": 25_000, "mask_batch": 256, "mask_init": 2.0, "samples": 4,
}  # fmt: skip
PAPER: Mapping[str, Mapping[str, Any]] = {
    "LSTM": {
        **_STEPS, "beta": 3e-5, "embedding": 16, "units": 200, "lstm_layers": 2, "dropout": 0.5, "forcing": 0.5,
    },
    "Transformer": {
        **_STEPS, "beta": 1e-3, "width": 100, "inner": 200, "heads": 4, "layers": 3, "dropout": 0.1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class MaskScanConfig(settings.MaskConfig):
    steps: int = 8000
    mask_steps: int = 1500
    batch: int = 128
    mask_batch: int | None = 512
    samples: int = 8
    lr: float = 2e-3
    clip: float = 5.0
    evaluate_every: int = 500
    # A twentieth of the paper's steps, so each is longer; that asks for more examples and samples to average over. What
    # a split does not need is taken away slowly, and only from a net that has no doubts left: hence the long training.
    mask_lr: float = 5e-2
    beta: float | str = 4.6e-4  # of losses that are sums over 15 words on average
    # The Transformer's own. Its layers bear little noise: with logits of 2, an eighth of the weights missing at random,
    # masks learn to live with that, and the net of the weights they keep does not work.
    lr_transformer: float = 5e-4
    beta_transformer: float = 3e-3
    mask_init_transformer: float = 4.0
    mask_steps_transformer: int = 750
    mask_batch_transformer: int | None = 256
    lr_end: float = 0.02
    mask_lr_end: float = 0.02
    splits: tuple[str, ...] = tuple(SPLITS)
    embedding: int = 16  # the LSTM's
    units: int = 64  # the LSTM's; the paper's: 200
    lstm_layers: int = 2
    forcing: float = 1.0  # share of the batches with teacher forcing of the LSTM; the paper's: 0.5
    width: int = 64  # the Transformer's; the paper's: 100
    inner: int = 128  # 200
    heads: int = 4
    layers: int = 2  # 3
    dropout: float = 0.0
    data: str | None = None  # folder of SCAN, or SCAN.tar.xz; none: FASTMOD_DATA

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.splits)) < len(self.splits) or not {ALL} <= set(self.splits) <= set(SPLITS):
            raise StudyError(f"splits: expected {ALL} and others of {', '.join(SPLITS)}, got {self.splits}")
        for name in ("forcing", "dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise StudyError(f"{name}: expected a share, got {getattr(self, name)}")


@cached()
def _splits(root: str | None, names: tuple[str, ...]) -> dict[str, SCAN]:
    return load_scan(root, names)


def _data(config: MaskScanConfig) -> dict[str, SCAN]:
    """Split, by its name here -> its data."""
    found = _splits(config.data, tuple(SPLITS[split] for split in config.splits))
    return {split: found[SPLITS[split]] for split in config.splits}


class MaskScanTrial(masking.MaskTrial):
    config: MaskScanConfig

    def __init__(self, config: MaskScanConfig, name: str, seed: int, device: torch.device) -> None:
        self.tasks = (ALL, *(split for split in config.splits if split != ALL))
        self.data = {
            split: SCAN(*(Sequences(*(tensor.to(device) for tensor in part)) for part in parts))
            for split, parts in _data(config).items()
        }
        self.held: Sequences | None = None
        if config.auto:
            self._hold_back()
        super().__init__(config, name, seed, device)

    def _hold_back(self) -> None:
        """To pick beta on: every tenth pair of the whole problem's training set, which is then neither learned from nor
        reported on in any split."""
        pairs = self.data[ALL].train
        held = torch.arange(len(pairs.commands), device=pairs.commands.device) % _HELD == 0
        self.held = Sequences(*(tensor[held] for tensor in pairs))
        known = {_key(command) for command in self.held.commands.tolist()}
        for split, parts in self.data.items():
            self.data[split] = SCAN(*(_without(part, known) for part in parts))

    def validation_accuracy(self, model: nn.Module) -> float:
        assert self.held is not None
        return self._accuracy(model, self.held, len(self.held.commands))

    def net(self) -> nn.Module:
        config, words = self.config, (len(COMMANDS), len(ACTIONS))
        if self.name.startswith("LSTM"):
            return LSTMEncoderDecoder(*words, config.embedding, config.units, config.lstm_layers, config.dropout)
        return SequenceTransformer(*words, config.width, config.inner, config.heads, config.layers, config.dropout)

    def batches_of(self, task: str | None, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Which examples ``[chunk, B]``, which split's ``[chunk]`` and whether with teacher forcing ``[chunk]``."""
        config = self.config
        split = ALL if task is None else task
        actions = self.data[split].train.actions
        count = config.chunk * self.batch_of(task)
        drawn = torch.randint(len(actions), (count,), generator=generator, device=self.device)
        order = bucketed_by_length((actions[drawn] != PAD).sum(1), config.chunk, generator)
        forced = torch.rand(config.chunk, generator=generator, device=self.device) < config.forcing
        return drawn[order], torch.full((config.chunk,), self.tasks.index(split)), forced

    def loss_of(self, model: nn.Module, *batch: Tensor) -> Tensor:
        index, split, forced = batch
        pairs = self.data[self.tasks[int(split)]].train
        actions = trim_padding(pairs.actions[index])
        options = {"teacher_forcing": bool(forced)} if self.name.startswith("LSTM") else {}
        return sequence_loss(model(trim_padding(pairs.commands[index]), actions, **options), actions)

    def accuracies(self, model: nn.Module) -> dict[str, float]:
        """Split -> share of the sequences of its test set that are right from beginning to end."""
        most = None if self.finished else _EVALUATED
        return {split: self._accuracy(model, parts.test, most) for split, parts in self.data.items()}

    def _accuracy(self, model: nn.Module, pairs: Sequences, most: int | None) -> float:
        """Of about ``most`` of the pairs; None: of all."""
        index = torch.arange(len(pairs.actions), device=self.device)
        if most is not None:
            index = index[:: max(1, len(index) // most)]
        lengths = (pairs.actions[index] != PAD).sum(1)
        right = 0
        for some in index[lengths.argsort()].split(_ROWS):
            actions = trim_padding(pairs.actions[some])
            right += int(exact_match(model(trim_padding(pairs.commands[some]), actions), actions).sum())
        return right / len(index)

    @torch.no_grad()
    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """Also ``output_removed``: split -> action -> share of the control's output weights that its mask lacks."""
        found = super().result(last)
        masks = self.masks()
        control = masks[ALL]["output.weight"]
        removed = {}
        for split, mask in masks.items():
            share = (control & ~mask["output.weight"]).sum(1) / control.sum(1).clamp(min=1)
            removed[split] = dict(zip(ACTIONS.words[2:], share[2:].tolist(), strict=True))  # END, then the actions
        return {**found, "output_removed": removed}


def _key(sequence: Sequence[int]) -> tuple[int, ...]:
    """A sequence without its padding."""
    return tuple(word for word in sequence if word != PAD)


def _without(pairs: Sequences, known: set[tuple[int, ...]]) -> Sequences:
    """The pairs whose command is not among those."""
    kept = torch.tensor([_key(command) not in known for command in pairs.commands.tolist()])
    if not kept.any():
        raise StudyError("beta: no commands are left beside those held back for it")
    return Sequences(*(tensor[kept.to(tensor.device)] for tensor in pairs))


class MaskScan(settings.MaskStudy):
    name = "mask-scan"
    title = "SCAN under weight masks: rules, or weights for every combination?"
    paper = "Weight masks, section 4 and C.6.1, Figures 4 and 16"
    models = ("LSTM", "Transformer", "LSTM_direct", "Transformer_direct")  # the latter: Figure 16
    default_models = ("LSTM", "Transformer")
    default_seeds = "0"
    defaults = MaskScanConfig()
    read: ClassVar = {
        "LSTM": ("embedding", "units", "lstm_layers", "forcing"), "Transformer": ("width", "inner", "heads", "layers"),
    }  # fmt: skip
    presets: ClassVar = {**PAPER, **{f"{model}_direct": settings for model, settings in PAPER.items()}}
    quick: ClassVar = {
        "steps": 200, "mask_steps": 100, "evaluate_every": 100, "splits": (ALL, "jump"), "units": 32, "batch": 64,
        "mask_batch": 64,
    }  # fmt: skip

    def prepare(self, config: MaskScanConfig) -> None:
        _data(config)

    def trial(self, config: MaskScanConfig, model: str, seed: int, device: torch.device) -> MaskScanTrial:
        from fastmod.studies.masks.scan_direct import ScanDirectTrial  # it builds on this module

        kind = ScanDirectTrial if model.endswith("_direct") else MaskScanTrial
        return kind(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            note = self.note(outcome, model)
            if model.endswith("_direct"):
                for split in outcome.of(model)[0].result["direct"]:
                    name, pick = f"{split}, trained on the split alone", picker("direct", split)
                    rows.append(tables.row(outcome, model, name, "Figure 16", pick, note))
                continue
            splits = list(outcome.of(model)[0].result["accuracy"])
            for split in splits:
                rows.append(
                    tables.row(outcome, model, f"{split}, no mask", "Figure 4a", picker("accuracy", split), note)
                )
                for mask in dict.fromkeys((ALL, split)):
                    paper = "Figure 4a: keeps it" if mask == ALL else "Figure 4a: large gap"
                    rows.append(
                        tables.row(
                            outcome, model, f"{split}, mask of {mask}", paper, picker("masked", mask, split), note
                        )
                    )
            if "jump" in splits:
                name = "output weights of I_JUMP removed by the mask of jump"
                paper = "almost half" if model == "LSTM" else "-"
                rows.append(
                    tables.row(
                        outcome, model, name, paper, picker("output_removed", "jump", "I_JUMP"), f"Figure 4b; {note}"
                    )
                )
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        from fastmod.runs import draw

        found: figures.Figures = {}
        for model in outcome.models():
            records = outcome.of(model)
            if model.endswith("_direct"):
                found |= _directly(outcome, model)
                continue
            splits = list(records[0].result["accuracy"])
            groups = {
                "no mask": [bar(records, picker("accuracy", s)) for s in splits],
                "mask of all data": [bar(records, picker("masked", ALL, s)) for s in splits],
                "mask of the split": [bar(records, picker("masked", s, s)) for s in splits],
            }
            found[f"splits_{model}"] = (
                draw.bars(splits, groups, "split", "accuracy on its test set"),
                f"{model}: accuracy on each split's test set, under the mask of all data and under the split's own.",
            )
            removed = {
                split: [bar(records, picker("output_removed", split, action)) for action in ACTIONS.words[2:]]
                for split in splits
                if split != ALL
            }
            if removed:
                figure = draw.bars(ACTIONS.words[2:], removed, "action", "weights removed")
                figure.axes[0].tick_params(axis="x", labelrotation=30)
                caption = f"{model}: share of the output layer's weights per action that a split's mask removes."
                found[f"output_{model}"] = (figure, caption)
            found |= figures.all_of(model, records)
        return found


def _directly(outcome: Outcome, model: str) -> figures.Figures:
    """Figure 16: nets trained on a split alone, beside the net of all data under the split's mask if there is one."""
    from fastmod.runs import draw

    records, other = outcome.of(model), outcome.of(model.removesuffix("_direct"))
    splits = list(records[0].result["direct"])
    groups = {"trained on the split": [bar(records, picker("direct", s)) for s in splits]}
    if other and all(split in other[0].result["masked"] for split in splits):
        groups["trained on all, mask of the split"] = [bar(other, picker("masked", s, s)) for s in splits]
    figure = draw.bars(splits, groups, "split", "accuracy on its test set")
    return {f"direct_{model}": (figure, f"{model}: accuracy on each split's test set (Figure 16).")}
