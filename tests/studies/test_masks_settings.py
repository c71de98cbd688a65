"""The settings of the weight-mask studies: the paper's presets against what it prints, beta=auto, frozen nets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastmod.runs.config import StudyError, changed
from fastmod.runs.engine import record_of
from fastmod.runs.study import Outcome
from fastmod.studies import registry
from fastmod.studies.masks import addmul, cifar, math, scan
from fastmod.studies.masks.masking import FULL, SEARCH, MaskTrial, Stage
from fastmod.studies.masks.settings import MaskStudy
from tests.data.test_data_masks import cifar_folder
from tests.studies.test_masks_sequence import scan_words, sums

CPU = torch.device("cpu")
MASKS = tuple(name for name in registry.names() if name.startswith("mask-"))

#: C.1: Adam, batch 128, rate 1e-3, clipping 1, four masks a batch; logits begin at 2 (C.5). Rates are constant.
COMMON: dict[str, Any] = {
    "batch": 128, "lr": 1e-3, "lr_end": 1, "clip": 1, "mask_batch": None, "mask_lr_end": 1, "samples": 4,
    "mask_init": 2,
}  # fmt: skip
#: C.3 and C.4.
ARITHMETIC = {**COMMON, "steps": 20_000, "mask_steps": 20_000, "mask_lr": 1e-2, "init_scale": 1, "hidden": None}
RECURRENT = {**ARITHMETIC, "units": 256, "lstm_layers": 2, "lstm_init": "xavier", "time_steps": 3}
#: C.6.1.
SCAN = {
    **COMMON, "steps": 25_000, "mask_steps": 25_000, "batch": 256, "mask_batch": 256, "clip": 5, "mask_lr": 1e-2,
    "splits": ("simple", "length", "jump", "turn_left"),
}  # fmt: skip
#: C.6.2 and its Table 1.
MATHEMATICS = {
    **COMMON, "width": 256, "inner": 512, "heads": 4, "layers": 3, "dropout": 0.1, "lr": 1e-4, "samples": 8,
    "warmup": 0, "validation": 10_000,
}  # fmt: skip
#: C.7.
CNN = {
    **COMMON, "steps": 20_000, "mask_steps": 20_000, "mask_lr": 1e-3, "beta": 1e-4, "channels": (32, 64, 128, 256),
}  # fmt: skip
PRINTED: dict[str, dict[str, dict[str, Any]]] = {
    "mask-addmul": {
        **{name: {**ARITHMETIC, "beta": 1e-4} for name in ("FNN_small", "FNN", "FNN_large", "FNN_huge")},
        "LSTM": {**RECURRENT, "beta": 1e-4},
    },
    "mask-doubleadd": {
        "FNN": {**ARITHMETIC, "beta": 4e-4}, "FNN_large": {**ARITHMETIC, "beta": 4e-4},
        "LSTM": {**RECURRENT, "beta": 1e-4}, "LSTM_apart": {**RECURRENT, "beta": 1e-4},
    },
    "mask-permuted-mnist": {
        name: {
            **COMMON, "steps": 30_000, "tasks": 11, "hidden": (800, 800, 64), "lr": 1e-2, "mask_lr": 1e-2,
            "beta": 128 * 1e-5, "samples": 8, "new_init": None,
        }
        for name in ("FNN", "FNN_reuse", "FNN_reuse_more")
    },
    "mask-beta": dict.fromkeys(("FNN_small", "FNN", "FNN_large"), ARITHMETIC),
    "mask-stability": {"CNN": {**CNN, "pairs": 10}},
    "mask-scan": {
        f"{name}{direct}": {**SCAN, **own}
        for direct in ("", "_direct")
        for name, own in {
            "LSTM": {"beta": 3e-5, "embedding": 16, "units": 200, "lstm_layers": 2, "dropout": 0.5, "forcing": 0.5},
            "Transformer": {"beta": 1e-3, "width": 100, "inner": 200, "heads": 4, "layers": 3, "dropout": 0.1},
        }.items()
    },
    "mask-math": {
        "add_or_sub": {
            **MATHEMATICS, "batch": 256, "beta": 2e-5, "steps": 30_000, "mask_steps": 30_000, "mask_lr": 0.03,
        },
        "linear_1d": {
            **MATHEMATICS, "batch": 512, "mask_batch": 400, "beta": 1e-6, "steps": 200_000, "mask_steps": 50_000,
            "mask_lr": 0.02, "warmup": 5000,
        },
        "differentiate": {
            **MATHEMATICS, "batch": 128, "beta": 1e-5, "steps": 40_000, "mask_steps": 40_000, "mask_lr": 0.03,
        },
        "sort": {**MATHEMATICS, "batch": 256, "beta": 3e-6, "steps": 30_000, "mask_steps": 30_000, "mask_lr": 0.03},
        "collect": {
            **MATHEMATICS, "batch": 128, "mask_batch": 256, "beta": 1e-6, "steps": 200_000, "mask_steps": 50_000,
            "mask_lr": 0.02, "warmup": 5000,
        },
    },
    "mask-cifar": {
        "CNN": CNN, "CNN_dropout": CNN,
        "ResNet110": {
            **COMMON, "steps": 64_000, "mask_steps": 30_000, "mask_batch": 256, "mask_lr": 0.03, "beta": 2e-5,
            "depth": 110,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_presets_are_what_the_paper_prints(name: str) -> None:
    study = registry.get(name)
    assert isinstance(study, MaskStudy)
    config = changed(study.defaults, {"paper": "true"})
    assert set(PRINTED[name]) == set(study.presets) == set(study.models)
    for model, printed in PRINTED[name].items():
        trained = study.config_of(config, model)
        assert {key: getattr(trained, key) for key in printed} == printed, model
        size = {("mask-doubleadd", "FNN"): (800,) * 4, ("mask-beta", "FNN_small"): (400, 400, 200)}.get((name, model))
        apart = f"not the paper's setting: hidden {size} ({(2000,) * 4})"  # C.4 and Figure 8
        assert study.setting(config, model) == ("the paper's setting" if size is None else apart)
        assert study.setting(study.defaults, model).startswith("not the paper's setting: ")


def test_what_is_set_beside_the_preset_stays() -> None:
    study = addmul.MaskAddMul()
    config = changed(study.defaults, {"paper": "true", "mask_steps": 10_000})
    trained = study.config_of(config, "FNN_large")
    assert (trained.steps, trained.mask_steps, trained.mask_lr) == (20_000, 10_000, 1e-2)
    assert study.setting(config, "FNN_large") == "not the paper's setting: mask_steps 10000 (20000)"


def test_a_net_as_large_as_the_papers_is_the_papers() -> None:
    study = registry.get("mask-doubleadd")
    config = changed(study.defaults, {"paper": "true", "hidden": "2000,2000,2000,2000"})
    assert study.setting(config, "FNN") == study.setting(config, "FNN_large") == "the paper's setting"
    other = study.setting(changed(config, {"hidden": "800,800"}), "FNN_large")
    assert other == f"not the paper's setting: hidden (800, 800) ({(2000,) * 4})"


def test_the_ratio_of_figure_11_stands_beside_its_nets() -> None:
    found = {}
    for model in addmul.MaskAddMul.models:
        config = changed(addmul.MaskAddMul.defaults, {**TINY, "hidden": "4", "units": "4", "lstm_layers": 1})
        torch.manual_seed(0)
        trial = addmul.MaskAddMul().trial(config, model, 0, CPU)
        while not trial.finished:
            trial.chunk()
        rows = addmul.MaskAddMul().table(Outcome(config, [record_of(trial, model, trial.metrics())], []))
        (found[model],) = (row.paper for row in rows if row.name.endswith("weights of mul / weights of add"))
    assert found == {"FNN_small": "-", "FNN": "-", "LSTM": "3.8", "FNN_large": "3.8", "FNN_huge": "-"}


# ---- the net under masks is frozen


TINY: dict[str, Any] = {
    "batch": 8, "mask_batch": None, "chunk": 2, "evaluate_every": 2, "steps": 2, "mask_steps": 4, "samples": 2,
}  # fmt: skip


def sequence_trial(model: str, folder: Path, **settings: Any) -> MaskTrial:
    sizes = {"units": 8, "width": 8, "inner": 8, "layers": 1, "heads": 2, "splits": ("simple", "jump")}
    own = {"mask_steps_transformer": TINY["mask_steps"], "mask_batch_transformer": None}
    study = scan.MaskScan()
    config = changed(study.defaults, {**TINY, **sizes, **own, "data": str(scan_words(folder)), **settings})
    torch.manual_seed(0)
    return study.trial(config, model, 0, CPU)


@pytest.mark.parametrize("model", ["LSTM", "Transformer"])
def test_there_is_no_dropout_while_masks_are_learned(tmp_path: Path, model: str) -> None:
    """Logits so large that every mask keeps everything: what is left of chance is dropout."""
    certain = {"mask_init": 40.0, "mask_init_transformer": 40.0, "beta": 0.0, "beta_transformer": 0.0}
    trial = sequence_trial(model, tmp_path, dropout=0.5, **certain)
    batch = [tensor[0] for tensor in trial.batches(trial.generator("data"))]
    assert trial.loss(*batch) != trial.loss(*batch), "dropout in the full training"
    while trial.masked is None:
        trial.chunk()
    trial.metrics()  # puts everything back into training mode
    assert trial.masked.training
    losses = [trial.loss(*batch) for _ in range(2)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    losses[0].backward()
    assert any(logits.grad is not None for logits in trial.masked.parameters())
    assert not any(m.training for m in trial.model.modules() if isinstance(m, nn.Dropout))


# ---- beta=auto


def auto_trial(accuracies: dict[float, float], **settings: Any) -> MaskTrial:
    """One whose masks of the whole problem reach these accuracies, where the plain net has 1."""

    class Known(addmul.MaskAddMulTrial):
        def validation_accuracy(self, model: nn.Module) -> float:
            return 1.0 if self.masked is None else accuracies[self.beta]

    config = changed(addmul.MaskAddMulConfig(), {**TINY, "hidden": "4", "beta": "auto", "betas": "1,2,4,8", **settings})
    torch.manual_seed(0)
    return Known(config, "FNN", 0, CPU)


def test_auto_raises_beta_until_the_whole_problem_suffers() -> None:
    trial = auto_trial({1: 0.99, 2: 0.96, 4: 0.9})
    seen = []
    while not trial.finished:
        trial.chunk()
        seen.append((trial.stage, trial.beta if trial.masked else 0))
        state = trial.state()  # as if killed here and resumed
        trial = auto_trial({1: 0.99, 2: 0.96, 4: 0.9})
        trial.load_state(state)
    masks = [Stage("add", True)] * 2 + [Stage("mul", True)] * 2
    assert [stage for stage, _ in seen] == [FULL, *[SEARCH] * 6, *masks]
    assert [beta for _, beta in seen[1:]] == [1, 1, 2, 2, 4, 4, 2, 2, 2, 2]
    result = record_of(trial, "FNN", {}).result
    assert result["picked"] == {"beta": 2, "tried": [[1, 0.99], [2, 0.96], [4, 0.9]], "original": 1.0}
    assert set(result["masked"]) == {"add", "mul"}
    assert addmul.MaskAddMul().table(Outcome(trial.config, [record_of(trial, "FNN", {})], []))


def test_auto_without_a_beta_that_is_weak_enough() -> None:
    trial = auto_trial({1: 0.5})
    for _ in range(3):
        trial.chunk()
    with pytest.raises(StudyError, match=r"beta: .*weakest, 1, scores 0.5"):
        trial.chunk()


def test_auto_is_not_measured_on_what_is_reported(tmp_path: Path) -> None:
    config = changed(addmul.MaskAddMulConfig(), {"beta": "auto"})
    held, rest = ({tuple(p) for p in config.pairs(CPU, held=h).tolist()} for h in (True, False))
    assert len(held) == 1000 and len(rest) == 9000 and not held & rest
    assert len(addmul.MaskAddMulConfig().pairs(CPU)) == 10_000

    images = {"channels": (2, 2, 2, 4), "data": str(cifar_folder(tmp_path / "cifar", count=20)), "beta": "auto"}
    photographs = cifar.MaskCifarTrial(changed(cifar.MaskCifarConfig(), {**TINY, **images}), "CNN", 0, CPU)
    assert photographs.held.tolist() == [18, 19]
    assert all(not set(shown.tolist()) & {18, 19} for shown in photographs.images_of.values())

    sequences = sequence_trial("LSTM", tmp_path / "scan", beta="auto")
    assert isinstance(sequences, scan.MaskScanTrial) and sequences.held is not None
    aside = {scan._key(command) for command in sequences.held.commands.tolist()}
    shown = [command for s in sequences.data.values() for part in s for command in part.commands.tolist()]
    assert len(aside) == 2 and not aside & {scan._key(command) for command in shown}

    settings = {"questions": 10, "validation": 4, "beta": "auto", "data": str(sums(tmp_path / "sums"))}
    learned, measured = math.texts_of(changed(math.MaskMathConfig(), settings), "add_or_sub")

    def texts(pairs: math.Texts) -> set[tuple[int, ...]]:
        return {tuple(word for word in row if word) for row in pairs.questions.tolist()}

    picking = texts(measured.pop("picking"))
    assert picking and not any(picking & texts(pairs) for pairs in (*learned.values(), *measured.values()))


@pytest.mark.parametrize("model", ["LSTM", "Transformer"])
def test_auto_picks_on_the_validation_examples(tmp_path: Path, model: str) -> None:
    """A net that knows the held examples has an accuracy of 1 on them, one that knows all others of 0."""
    trial = sequence_trial(model, tmp_path, beta="auto")
    assert trial.config.auto and isinstance(trial, scan.MaskScanTrial) and trial.held is not None
    aside = {scan._key(command) for command in trial.held.commands.tolist()}

    class Knows(nn.Module):
        def __init__(self, held: bool) -> None:
            super().__init__()
            self.held = held

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            known = torch.tensor([(scan._key(command) in aside) == self.held for command in source.tolist()])
            return nn.functional.one_hot(torch.where(known[:, None], target, 0), 20).float()

    assert [trial.validation_accuracy(Knows(held)) for held in (True, False)] == [1.0, 0.0]
    assert trial.accuracies(Knows(False)) == {"simple": 1.0, "jump": 1.0}, "and nothing else is reported on"


def test_auto_needs_a_net_that_knows_something() -> None:
    trial = auto_trial({1: 0.0})
    trial.validation_accuracy = lambda model: 0.0  # type: ignore[method-assign]
    trial.chunk()
    with pytest.raises(StudyError, match="beta: without masks"):
        trial.chunk()


def test_auto_where_weights_are_trained_along() -> None:
    with pytest.raises(StudyError, match="beta"):
        changed(registry.get("mask-permuted-mnist").defaults, {"beta": "auto"})
    with pytest.raises(StudyError, match="beta: expected 0 or more, or auto"):
        changed(registry.get("mask-addmul").defaults, {"beta": "automatic"})
    with pytest.raises(StudyError, match="betas"):
        changed(registry.get("mask-addmul").defaults, {"betas": "2,1"})
