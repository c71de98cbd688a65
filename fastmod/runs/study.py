"""What a study is: settings, models, trials, and the table and figures of the paper it repeats."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fastmod.runs.config import Config, changed
from fastmod.runs.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Record:
    """A finished trial."""

    model: str
    seed: int
    steps: int
    seconds: float
    parameters: int
    result: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.model}-s{self.seed}"


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def shown(mean: float, error: float | None) -> str:
    return f"{mean:.3f}" + ("" if error is None else f" ± {error:.3f}")


@dataclass(frozen=True)
class Row:
    """One figure of the paper beside ours. ``values``: ours, one per trial, or one of all ``of`` trials together."""

    name: str
    paper: str
    values: list[float]
    steps: int
    minutes: float
    note: str = ""
    of: int = 0

    @property
    def trials(self) -> int:
        return self.of or len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single trial."""
        return standard_error(self.values)

    @property
    def ours(self) -> str:
        if not self.values:
            return "-"
        return shown(self.mean, self.error)


@dataclass(frozen=True)
class Outcome:
    """All that tables and figures are made of."""

    config: Any  # the study's own Config
    records: Sequence[Record]
    metrics: Sequence[dict[str, Any]]  # lines of metrics/*.jsonl

    def of(self, model: str) -> list[Record]:
        return [record for record in self.records if record.model == model]

    def models(self) -> list[str]:
        return list(dict.fromkeys(record.model for record in self.records))

    def curves(self, model: str, name: str) -> dict[int, tuple[list[int], list[float]]]:
        """Seed -> (steps, values) of one metric."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        for line in self.metrics:
            if line["model"] == model and name in line:
                steps, values = found.setdefault(line["seed"], ([], []))
                steps.append(line["step"])
                values.append(line[name])
        return dict(sorted(found.items()))

    def row(self, name: str, paper: str, records: Sequence[Record], key: str, note: str = "") -> Row:
        values = [record.result[key] for record in records if record.result.get(key) is not None]
        steps = max((record.steps for record in records), default=0)
        return Row(name, paper, values, steps, sum(record.seconds for record in records) / 60, note)


#: Settings that say how a run goes, and nothing of what comes out.
_BOOKKEEPING = ("typed", "paper", "data", "chunk", "evaluate_every", "checkpoint_seconds")


class Study(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]  # where in the paper
    models: ClassVar[tuple[str, ...]]  # all that can be run; the first ones in `default_models` are run unasked
    default_models: ClassVar[tuple[str, ...]]
    default_seeds: ClassVar[str] = "0-2"
    defaults: ClassVar[Config]
    quick: ClassVar[dict[str, Any]]  # settings of --quick: minutes instead of hours, nothing to conclude from
    #: Model -> the paper's settings for it, where ``config.paper`` asks for them.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Settings of which the paper says nothing.
    unprinted: ClassVar[tuple[str, ...]] = ()
    #: Name -> setting -> values: grids for ``fastmod sweep STUDY --grid NAME``, such as those that a paper searched.
    grids: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = {}
    #: The measure of a trial by which ``fastmod sweep --best`` picks; validation, not what is reported. "": none of its
    #: measures is fit for that, so --best asks for --by.
    criterion: ClassVar[str] = "accuracy"
    #: Names of input and output blocks, for inspection; without any, the study has nothing to inspect.
    blocks: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = ((), ())

    def prepare(self, config: Any) -> None:  # noqa: B027 - optional
        """Check what trials need (data sets) before the first one starts."""

    def preset_of(self, config: Any, model: str) -> Mapping[str, Any]:
        """The paper's settings for a model."""
        return self.presets.get(model, {})

    def config_of(self, config: Any, model: str) -> Any:
        """The settings as a model is trained with them: those of the paper where ``config.paper`` asks for them, but
        for what was chosen."""
        if not getattr(config, "paper", False):
            return config
        stay = self.chosen_in(config, model)
        return changed(config, {k: v for k, v in self.preset_of(config, model).items() if k not in stay})

    def chosen_in(self, config: Any, model: str) -> Collection[str]:
        """Settings that a preset leaves alone. Runs of old versions do not know what was chosen: there, nothing."""
        return () if config.typed is None else self.with_grid(config.typed, model)

    def with_grid(self, typed: Collection[str], model: str) -> Collection[str]:
        """Who chooses a setting of the model's grid has chosen the architecture: no seed draws one."""
        axes = self.grids.get(model.partition("_")[0].lower(), {})
        return {*typed, "grid"} if {*typed} & {*axes} else typed

    def printed_of(self, config: Any, model: str) -> Mapping[str, Any]:
        """What a model's settings are held against: its preset, and what else makes it the paper's model."""
        return self.preset_of(config, model)

    def as_trained(self, config: Any, model: str) -> Any:
        """:meth:`config_of`, with what a model's name stands for."""
        return self.config_of(config, model)

    def setting(self, config: Any, model: str, swept: Collection[str] = ()) -> str:
        """Whether a model is trained as in the paper, and where not; ``swept``: settings that are not looked at, since
        a sweep goes over them."""
        theirs = self.printed_of(config, model)
        if not theirs:
            return "not held against the paper's setting"
        ours = self.as_trained(config, model)
        # What the preset leaves open is the paper's, as far as is known, where it is the study's default.
        left = {k: v for k, v in vars(self.defaults).items() if k not in _BOOKKEEPING and not self.is_own(k)}
        theirs = {**left, **theirs}
        apart = {k: f"{k} {getattr(ours, k)} ({v})" for k, v in theirs.items() if getattr(ours, k) != v}
        apart = {k: text for k, text in apart.items() if k not in swept}
        known = [text for k, text in apart.items() if k not in self.unprinted]
        unknown = [text for k, text in apart.items() if k in self.unprinted]
        found = f"not the paper's setting: {', '.join(known)}" if known else "the paper's setting"
        return found + (f"; not printed there, but other than by default: {', '.join(unknown)}" if unknown else "")

    def unused(self, config: Any, model: str) -> Collection[str]:
        """Settings that a model does not read, ``config`` being its own: trials that differ in these alone are one."""
        return ()

    def effective(self, config: Any, model: str) -> str:
        """All that a trial of a model is made from, but for its seed; equal for equal trials."""
        own = self.config_of(config, model)
        idle = {"typed", "paper", "checkpoint_seconds", *self.unused(own, model)}
        return repr({k: v for k, v in sorted(vars(own).items()) if k not in idle and not self.is_own(k)})

    def shortfall(self, config: Any, result: Mapping[str, Any]) -> str:
        """What a trial lacked of the paper's data, which its settings do not tell; empty: nothing."""
        return ""

    def setting_of(
        self, config: Any, model: str, results: Iterable[Mapping[str, Any]], swept: Collection[str] = ()
    ) -> str:
        """:meth:`setting`, and what the trials that came to these results lacked of the paper's data."""
        found = self.setting(config, model, swept)
        lacked = ", ".join(dict.fromkeys(text for result in results if (text := self.shortfall(config, result))))
        if not lacked:
            return found
        known, mark, unknown = found.partition("; not printed there")
        whole = "the paper's setting"
        return (f"not {whole}: {lacked}" if known == whole else f"{known}, {lacked}") + mark + unknown

    def is_own(self, setting: str) -> bool:
        """Whether a setting is only some model's value of another one, such as ``beta_lstm`` of ``beta``."""
        return False

    @abstractmethod
    def trial(self, config: Any, model: str, seed: int, device: torch.device) -> Trial: ...

    @abstractmethod
    def table(self, outcome: Outcome) -> list[Row]: ...

    def sweep_table(self, config: Any, found: Sequence[tuple[Mapping[str, Any], Record]]) -> list[Row]:
        """Rows of the paper's for all trials of a sweep, each with the settings of its cell, where it has such."""
        return []

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        """File stem -> (figure, caption)."""
        return {}

    def examples(self, config: Any, device: torch.device) -> dict[str, torch.Tensor]:
        """Task -> input blocks ``[B, M, D]``, for inspection."""
        return {}
