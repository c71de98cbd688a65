"""Settings of a study: a frozen dataclass, changed by ``--set key=value`` and kept in config.json."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints


class StudyError(Exception):
    """Something the user can mend; shown as one line, with exit code 2."""


@dataclass(frozen=True)
class Config:
    """What every study has. ``steps``, ``evaluate_every`` are multiples of ``chunk``: all that is not a step happens
    between chunks."""

    steps: int = 1000
    batch: int = 128
    lr: float = 3e-4
    clip: float = 0.1  # norm of all gradients together
    chunk: int = 50  # steps whose data are made at once
    evaluate_every: int = 500
    checkpoint_seconds: float = 20.0
    #: Names of the settings that were chosen, which presets leave alone; none: not known, as of runs of old versions.
    typed: tuple[str, ...] | None = None

    #: Settings for which 0 has a meaning of its own.
    may_be_zero: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "chunk", "evaluate_every"):
            least = 0 if name in self.may_be_zero else 1
            if not least <= getattr(self, name) < 2**31:
                raise StudyError(f"{name}: expected {least} or more, below 2**31, got {getattr(self, name)}")
        free = "lr" in self.may_be_zero and self.lr == 0
        if not (self.lr > 0 or free) or not self.clip > 0:
            raise StudyError(f"lr and clip: expected more than 0, got {self.lr} and {self.clip}")
        if not self.checkpoint_seconds >= 0:
            raise StudyError(f"checkpoint_seconds: expected 0 or more, got {self.checkpoint_seconds}")
        for name in ("steps", "evaluate_every"):
            if getattr(self, name) % self.chunk:
                raise StudyError(f"{name}: expected a multiple of chunk = {self.chunk}, got {getattr(self, name)}")

    @property
    def length(self) -> str:
        """Of the training, for people."""
        return f"{self.steps:,}"


C = TypeVar("C", bound=Config)


def changed(config: C, settings: Mapping[str, Any]) -> C:
    """The config with some values replaced; values may be text, as typed on a command line."""
    types_of = get_type_hints(type(config))
    known = {field.name for field in dataclasses.fields(config)}
    for key in settings:
        if key not in known:
            raise StudyError(f"unknown key {key!r}; known: {', '.join(sorted(known - {'typed'}))}")
    return dataclasses.replace(config, **{k: _read(k, v, types_of[k]) for k, v in settings.items()})


def chosen(config: C, settings: Mapping[str, Any]) -> C:
    """As :func:`changed`, and the config knows that these were chosen: no preset replaces them."""
    if "typed" in settings:
        raise StudyError("typed: keeps the names of the settings that were chosen, and is not one of them")
    return changed(config, {**settings, "typed": sorted({*(config.typed or ()), *settings})})


def settings_of(pairs: Sequence[str]) -> dict[str, str]:
    """``["width=8", ...]`` as a dict."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise StudyError(f"--set: expected key=value, got {pair!r}")
        found[key.strip()] = value.strip()
    return found


def seeds_of(text: str) -> list[int]:
    """``"0-2,7"`` as ``[0, 1, 2, 7]``."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        # Nine digits: more are no seed for torch, or a range that fills the memory.
        if not all(end.isdecimal() and len(end) <= 9 for end in (first, last)) or int(first) > int(last):
            raise StudyError(f"--seeds: expected something like 0-4 or 0,3,7, got {text!r}")
        if int(last) - int(first) >= _MOST_SEEDS:
            raise StudyError(f"--seeds: expected {_MOST_SEEDS} at most, got {text!r}")
        seeds += range(int(first), int(last) + 1)
    if len(set(seeds)) != len(seeds):
        raise StudyError(f"--seeds: expected distinct seeds, got {text!r}")
    return seeds


_MOST_SEEDS = 10_000


def _read(key: str, value: Any, kind: Any) -> Any:
    """Text or a JSON value as the type that the field is declared with."""
    try:
        return _as(value, kind)
    except (TypeError, ValueError, KeyError, OverflowError):
        wanted = getattr(kind, "__name__", None) if get_origin(kind) is None else None
        raise StudyError(f"{key}: expected {wanted or kind}, got {value!r}") from None


def _as(value: Any, kind: Any) -> Any:
    if get_origin(kind) in (types.UnionType,):  # "int | None"
        if type(None) in get_args(kind) and (value is None or value == "none"):
            return None
        *others, last = (k for k in get_args(kind) if k is not type(None))
        for other in others:  # "float | str": the first that fits
            with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError):
                return _as(value, other)
        return _as(value, last)
    if get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(_as(part, get_args(kind)[0]) for part in parts)
    if kind is bool:
        if isinstance(value, bool):
            return value
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[str(value).lower()]
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError
    return kind(value)
