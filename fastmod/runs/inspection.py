"""Looks inside a trained SMFR: which blocks are routed where, and which are rewritten, for each task."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fastmod.nn import SMFR
from fastmod.runs import checkpoint, draw
from fastmod.runs.config import StudyError
from fastmod.runs.engine import prepare_trial
from fastmod.runs.folder import Plan, RunFolder, trial_key
from fastmod.runs.study import Study
from fastmod.runs.trial import Trial
from fastmod.studies import registry


def inspect(folder: RunFolder, key: str | None = None) -> tuple[Path | None, list[str]]:
    """Draws figures/routing-<trial>.png and, if gates were recorded, gates-<trial>.png: their means over time.
    Returns the path of the first (None without matplotlib), and lines: per task what the first layer reads, per layer
    how its gates developed."""
    plan = folder.plan()
    study = registry.get(plan.study)
    if not study.blocks[0]:
        raise StudyError(f"{folder.path}: {plan.study} has nothing to inspect, it routes no blocks; see report.html")
    key, trial = _smfr_of(study, plan, folder, key)
    trial.model.eval()
    assert isinstance(trial.model, SMFR)
    rows, lines = [], [trial.inspection_note] if trial.inspection_note else []
    for task, blocks in study.examples(trial.config, trial.device).items():
        with torch.no_grad():
            trial.model(trial.inspected(blocks))
        layers = [(r.weights.float().mean(0).cpu(), r.gates.float().mean(0).cpu()) for r in trial.model.routing()]
        rows.append((task, _panels(study, layers)))
        lines.append(f"{task}: {_most_read(study, layers[0][0])}")
    history = _gates(folder, key)
    for layer, curves in history.items():
        for _, values in curves.values():
            lines.append(f"gates of {layer}: {values[0]:.2f} at first, {values[-1]:.2f} in the end")
    if not draw.available():
        return None, lines
    path = folder.figures / f"routing-{key}.png"
    folder.figures.mkdir(exist_ok=True)
    draw.save(draw.heat_maps(rows), path)
    if history:
        draw.save(draw.curves(history, "mean gate"), folder.figures / f"gates-{key}.png")
    return path, lines


def _gates(folder: RunFolder, key: str) -> dict[str, dict[int, tuple[list[float], list[float]]]]:
    """Layer -> seed -> (steps, its mean gate), of one trial, from its metrics."""
    found: dict[str, dict[int, tuple[list[float], list[float]]]] = {}
    for line in folder.metrics():
        for name in (name for name in line if line["trial"] == key and name.startswith("gate_")):
            layer = found.setdefault(f"layer {name.removeprefix('gate_')}", {})
            steps, values = layer.setdefault(line["seed"], ([], []))
            steps.append(line["step"])
            values.append(line[name])
    return found


def _smfr_of(study: Study, plan: Plan, folder: RunFolder, key: str | None) -> tuple[str, Trial]:
    candidates = {trial_key(*t): t for t in plan.trials() if t[0].startswith("SMFR") and t[0] != "SMFR_plain"}
    present = [k for k in candidates if folder.checkpoint_file(k).exists()]
    if key is None and not present:
        raise StudyError(f"{folder.path}: no SMFR with a checkpoint in this run")
    key = key or present[0]
    if key not in candidates:
        raise StudyError(f"--trial {key}: this run has the SMFRs {', '.join(candidates) or 'none'}")
    trial = prepare_trial(study, plan, *candidates[key])
    trial.load_state(checkpoint.load(folder.checkpoint_file(key), plan.owner(*candidates[key])))
    return key, trial


def _panels(study: Study, layers: list[tuple[Tensor, Tensor]]) -> list[tuple[str, Tensor, list[str], list[str]]]:
    """Per layer one map: a column per output block, a row per input block, and the gate as the last row."""
    panels = []
    for i, (weights, gates) in enumerate(layers):
        m, n = weights.shape
        sources = list(study.blocks[0]) if i == 0 else [f"{i}.{b}" for b in range(m)]
        targets = list(study.blocks[1]) if i == len(layers) - 1 else [f"{i + 1}.{b}" for b in range(n)]
        panels.append((f"layer {i}", torch.cat([weights, gates[None]]), [*sources, "rewritten"], targets))
    return panels


def _most_read(study: Study, weights: Tensor) -> str:
    """Input blocks by their share of the routing in the first layer."""
    share = weights.mean(1)
    order = share.argsort(descending=True).tolist()
    return "  ".join(f"{study.blocks[0][b]} {share[b]:.2f}" for b in order)
