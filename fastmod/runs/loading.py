"""A trained model out of a run folder or an export, for a notebook, and exports: safetensors, settings, masks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from fastmod.masks import files as mask_files
from fastmod.runs import checkpoint
from fastmod.runs.config import StudyError
from fastmod.runs.engine import prepare_trial
from fastmod.runs.folder import Plan, RunFolder, file_name, trial_key
from fastmod.runs.trial import Trial
from fastmod.studies import registry

_FORMAT = "fastmod export 1"
_MODEL = "model.safetensors"


def load(run: str | Path, trial: str | None = None, device: str = "cpu") -> nn.Module:
    """The trained model of a run folder, or of a folder that ``fastmod export`` wrote, in eval mode.

    Args:
        run: the folder.
        trial: such as ``"SMFR-s0"``; may be left out where there is one trial alone.
        device: where to put it, wherever it was trained.
    """
    if (Path(run) / _MODEL).exists():
        return _load_export(Path(run), device).eval()
    return load_trial(run, trial, device).model.eval()


def load_trial(run: str | Path, trial: str | None = None, device: str = "cpu") -> Trial:
    """As its checkpoint left it: ``.model``, ``.config``, ``.step``, ``.evaluate()``, and of mask studies ``.masks()``.
    Torch's generators are left as they are."""
    folder = RunFolder(Path(run))
    plan = folder.plan()
    keys = trials_of(folder, plan)
    if trial is None and len(keys) != 1:
        raise StudyError(f"{run}: expected a trial, one of {', '.join(keys) or 'none yet, no checkpoint is there'}")
    key = trial or next(iter(keys))
    if key not in keys:
        raise StudyError(f"{run}: no trial {key!r} with a checkpoint, only {', '.join(keys) or 'none'}")
    return _restored(folder, plan, *keys[key], device)[0]


def trials_of(folder: RunFolder, plan: Plan) -> dict[str, tuple[str, int]]:
    """Key -> (model, seed) of the trials that have a checkpoint."""
    found = {trial_key(*trial): trial for trial in plan.trials()}
    return {key: trial for key, trial in found.items() if folder.checkpoint_file(key).exists()}


def _restored(folder: RunFolder, plan: Plan, model: str, seed: int, device: str) -> tuple[Trial, dict[str, float]]:
    """The trial and its last metrics."""
    state = checkpoint.load(folder.checkpoint_file(trial_key(model, seed)), plan.owner(model, seed))
    with torch.random.fork_rng():
        trial = prepare_trial(registry.get(plan.study), replace(plan, device=device), model, seed)
        trial.load_state({**state, "device_generator": None})  # trained on another device, perhaps
    return trial, state["metrics"]


@dataclass(frozen=True)
class Export:
    trial: str
    folder: Path
    masks: Sequence[str]


def export(folder: RunFolder, trial: str | None = None, out: Path | None = None) -> list[Export]:
    """Every trial that has a checkpoint, or one: model.safetensors, config.json and masks/TASK.safetensors each, in
    ``out/TRIAL``."""
    plan = folder.plan()
    keys = trials_of(folder, plan)
    if not keys:
        raise StudyError(f"{folder.path}: no trial has a checkpoint yet")
    if trial is not None and trial not in keys:
        raise StudyError(f"--trial {trial}: expected one of {', '.join(keys)}")
    return [_export(folder, plan, key, (out or folder.path / "export") / key) for key in ([trial] if trial else keys)]


def _export(folder: RunFolder, plan: Plan, key: str, to: Path) -> Export:
    model, seed = trials_of(folder, plan)[key]
    restored, metrics = _restored(folder, plan, model, seed, "cpu")
    to.mkdir(parents=True, exist_ok=True)
    kind = f"{type(restored.model).__module__}.{type(restored.model).__qualname__}"
    about = {
        "format": _FORMAT, "trial": key, "model": model, "seed": seed, "class": kind,
        "step": restored.step, "finished": restored.finished, "metrics": metrics, "plan": asdict(plan),
    }  # fmt: skip
    save_model(restored.model, str(to / _MODEL), metadata={"format": "pt", "trial": key})
    checkpoint.write_atomically(to / "config.json", json.dumps(about, indent=2).encode())
    masks = restored.masks()
    for task, mask in masks.items():
        (to / "masks").mkdir(exist_ok=True)
        mask_files.save(to / "masks" / f"{file_name(task)}.safetensors", mask)
    return Export(key, to, list(masks))


def _load_export(folder: Path, device: str) -> nn.Module:
    try:
        about: dict[str, Any] = json.loads((folder / "config.json").read_text())
        if about["format"] != _FORMAT:
            raise ValueError(f"format {about['format']!r}, expected {_FORMAT!r}")
        plan = replace(Plan(**about["plan"]), device=device)
        with torch.random.fork_rng():
            model = prepare_trial(registry.get(plan.study), plan, about["model"], about["seed"]).model
        load_model(model, str(folder / _MODEL), device=device)
    except (OSError, TypeError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise StudyError(f"{folder}: not an export that can be read ({error})") from None
    return model
