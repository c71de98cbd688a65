"""Small trials of the compositional studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastmod.runs.config import changed
from fastmod.runs.engine import record_of
from fastmod.runs.study import Record
from fastmod.studies import registry
from fastmod.studies.comp import adapt, stages, transfer
from fastmod.studies.comp.training import CompTrial
from tests.data.test_data_masks import cifar_folder
from tests.data.test_domains import usps_folder
from tests.helpers.study_runs import digits
from tests.helpers.surroundings import no_data_folder as no_data_folder
from tests.helpers.surroundings import one_thread as one_thread

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"channels": 8, "layers": 4, "templates": 2, "chunk": 2, "evaluate_every": 2, "verify": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "comp-single": {**TINY, "steps": 4, "batch": 4, "dataset": "fashion", "colours": 1, "side": 8},
    "comp-multitask": {**TINY, "steps": 4, "batch": 2, "side": 8, "layers": 3, "templates": 3},
    "comp-transfer": {**TINY, "steps": 4, "tune_steps": 4, "batch": 2, "side": 8, "tune_images": 20},
    "comp-adapt": {**TINY, "steps": 4, "adapt_steps": 4, "batch": 2, "side": 8},
}
MODELS = [(study, model) for study in SETTINGS for model in registry.get(study).models]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_BATCHES", 2)
    monkeypatch.setattr(transfer, "_LEARNING_STEPS", 3)
    monkeypatch.setattr(adapt, "_WARM_UP", 3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("mnist", "fashion_mnist", "kmnist"):
        digits(folder / name)
    usps_folder(folder / "usps")
    cifar_folder(folder / "cifar10", count=6)
    return folder


def trial_of(study: str, data: Path, model: str | None = None, seed: int = 0, **settings: Any) -> CompTrial:
    found = registry.get(study)
    torch.manual_seed(seed)
    config = changed(found.defaults, {**SETTINGS[study], "data": str(data), **settings})
    trial = found.trial(config, model or found.models[0], seed, CPU)
    assert isinstance(trial, CompTrial)
    return trial


def finish(trial: CompTrial) -> Record:
    last: dict[str, float] = {}
    while not trial.finished:
        loss = float(trial.chunk())
        if trial.due or trial.finished:
            last = {"loss": loss, **trial.metrics()}
            trial.after_evaluation(last)
    return record_of(trial, trial.name, last)
