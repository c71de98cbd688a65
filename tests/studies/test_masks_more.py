"""Mask studies beside the main ones: stability, sensitivity to beta, nets trained directly, reuse in permuted MNIST."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastmod.masks import iou
from fastmod.runs.config import StudyError, changed
from fastmod.runs.study import Outcome, Record, Study
from fastmod.studies import registry
from fastmod.studies.masks import addmul, permuted_mnist, sensitivity, stability
from fastmod.studies.masks.masking import MaskTrial
from fastmod.studies.masks.scan_direct import ScanDirectTrial
from tests.data.test_data_masks import cifar_folder
from tests.helpers.study_runs import digits
from tests.studies.test_masks_sequence import scan_words

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "batch": 8, "mask_batch": None, "chunk": 2, "evaluate_every": 2, "steps": 4, "mask_steps": 4, "samples": 2,
    "mask_lr": 3.0,
}  # fmt: skip


def run(study: Study, settings: dict[str, Any], model: str, seed: int = 0) -> tuple[MaskTrial, Record, Outcome]:
    """To its end, as a run that is killed and resumed on the way."""
    config = changed(study.defaults, {**TINY, **settings})
    torch.manual_seed(seed)
    trial = study.trial(config, model, seed, CPU)
    while not trial.finished:
        trial.chunk()
        if trial.step == trial.steps // 4 * 2:
            state = trial.state()
            torch.manual_seed(99)
            trial = study.trial(config, model, seed, CPU)
            trial.load_state(state)
    assert isinstance(trial, MaskTrial)
    result = json.loads(json.dumps(trial.result(trial.metrics()), allow_nan=False))
    record = Record(model, seed, trial.step, 1.0, 1, result)
    outcome = Outcome(config, [record], [])
    rows = study.table(outcome)
    assert rows and all("the paper's setting" in row.note for row in rows)
    assert all(caption.endswith(".") for _, caption in study.figures(outcome).values())
    return trial, record, outcome


def test_two_masks_of_a_pair_are_compared(tmp_path: Path) -> None:
    study = registry.get("mask-stability")
    settings = {"channels": (2, 2, 2, 4), "pairs": 2, "data": str(cifar_folder(tmp_path, count=20)), "mask_lr": 1.0}
    trial, record, outcome = run(study, settings, "CNN")
    first, second = trial.tasks[:2]
    pair = first.partition(",")[0]
    assert trial.steps == 4 + 4 * 4 and second == f"{pair}, second"
    assert isinstance(trial, stability.MaskStabilityTrial)
    labels = {stability.cifar.CLASSES[n] for n in trial.data.train_labels[trial.images_of[first]].tolist()}
    assert labels == set(pair.split("+"))
    masks = trial.masks()
    by_hand = {name: None if share != share else share for name, share in iou(masks[first], masks[second]).items()}
    assert record.result["iou"][pair] == by_hand
    assert 0 < record.result["iou"][pair]["total"] < 1, "chance has a part in them"
    row = study.table(outcome)[0]
    assert row.paper.startswith("0.9326") and row.trials == 2
    other = stability.MaskStabilityTrial(trial.config, "CNN", 1, CPU)
    assert other.tasks != trial.tasks, "each net has pairs of its own"
    with pytest.raises(StudyError, match="pairs"):
        changed(study.defaults, {"pairs": 0})


def test_one_net_under_several_betas() -> None:
    study = registry.get("mask-beta")
    trial, record, outcome = run(study, {"hidden": "6,5", "betas": "1e-6,100"}, "FNN_small")
    assert trial.tasks == tuple(f"{kind} at {beta}" for beta in ("1e-06", "100") for kind in ("all", "add", "mul"))
    result = record.result
    assert result["kept"]["all at 100"]["total"] < result["kept"]["all at 1e-06"]["total"]
    assert result["sensitivity"]["1e-06"]["shared"] == result["sharing"]["add at 1e-06"]["total"]
    assert "all at 100" not in result["sharing"]
    assert [row.name for row in study.table(outcome)][:2] == [
        "FNN_small, beta 1e-06, accuracy, mask of the whole task", "FNN_small, beta 1e-06, shared by add",
    ]  # fmt: skip
    with pytest.raises(StudyError, match="beta"):
        changed(study.defaults, {"beta": "auto"})


def test_the_beta_of_a_stage_is_that_of_its_mask() -> None:
    config = changed(sensitivity.MaskBetaConfig(), {**TINY, "hidden": "4", "betas": "1,2"})
    trial = sensitivity.MaskBetaTrial(config, "FNN_small", 0, CPU)
    found = []
    while not trial.finished:
        trial.chunk()
        if trial.masked is not None:
            inputs, _ = (tensor[0] for tensor in trial.batches(trial.generator("data", trial.step)))
            found.append((trial.task, trial.beta, len(inputs[:, 40:].unique(dim=0))))
    assert found[::2] == [
        ("all at 1", 1, 2), ("add at 1", 1, 1), ("mul at 1", 1, 1),
        ("all at 2", 2, 2), ("add at 2", 2, 1), ("mul at 2", 2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("model", ["LSTM_direct", "Transformer_direct"])
def test_a_fresh_net_for_every_split(tmp_path: Path, model: str) -> None:
    study = registry.get("mask-scan")
    sizes = {"units": 8, "width": 8, "inner": 8, "layers": 1, "heads": 2}
    settings = {**sizes, "splits": ("simple", "jump"), "data": str(scan_words(tmp_path))}
    trial, record, outcome = run(study, settings, model)
    assert isinstance(trial, ScanDirectTrial) and trial.masked is None and trial.steps == 4
    assert set(record.result["direct"]) == {"jump"}
    assert [row.paper for row in study.table(outcome)] == ["Figure 16"]
    index, split, _ = trial.batches(torch.Generator().manual_seed(0))
    assert index.shape == (2, 8) and split.tolist() == [1, 1], "batches of the net's size, from the split"


def test_direct_nets_begin_anew(tmp_path: Path) -> None:
    settings = {**TINY, "units": 8, "splits": ("simple", "jump"), "data": str(scan_words(tmp_path))}
    study = registry.get("mask-scan")
    trial = study.trial(changed(study.defaults, settings), "LSTM_direct", 0, CPU)
    assert isinstance(trial, ScanDirectTrial)
    before = {name: weight.clone() for name, weight in trial.model.named_parameters()}
    optimizer = trial.optimizer
    trial._set_up()
    assert trial.optimizer is not optimizer
    assert all(not torch.equal(weight, before[name]) for name, weight in trial.model.named_parameters())


@pytest.mark.parametrize(("model", "logit"), [("FNN", 2.0), ("FNN_reuse", 0.0), ("FNN_reuse_more", -1.0)])
def test_new_weights_of_figure_15(tmp_path: Path, model: str, logit: float) -> None:
    settings = {**TINY, "hidden": "6,5", "tasks": 2, "verify": False, "data": str(digits(tmp_path)), "mask_lr": 1e-9}
    config = changed(permuted_mnist.MaskPermutedConfig(), settings)
    trial = permuted_mnist.MaskPermutedTrial(config, model, 0, CPU)
    assert trial.masked is not None
    trial.masked.logits["layer1/weight"].data[0] = -5.0  # what the first task does not keep
    while trial.extra["stage"] == 0:
        trial.chunk()
    logits = trial.masked.logits["layer1/weight"]
    assert torch.allclose(logits[0], torch.tensor(logit)) and torch.allclose(logits[1:], torch.tensor(2.0))


def test_free_weights_begin_as_xavier_has_them(tmp_path: Path) -> None:
    """With the gain of ReLU in all layers but the last, and no biases; again before the second task."""
    settings = {**TINY, "hidden": "300,200", "tasks": 2, "verify": False, "data": str(digits(tmp_path))}
    config = changed(
        permuted_mnist.MaskPermutedConfig(), {**settings, "lr": 1e-12, "mask_lr": 1e-12, "mask_init": -9.0}
    )
    torch.manual_seed(0)
    trial = permuted_mnist.MaskPermutedTrial(config, "FNN", 0, CPU)
    first = None
    while not trial.finished:
        for layer, (gain, inputs, outputs) in enumerate(((2, 784, 300), (2, 300, 200), (1, 200, 10)), start=1):
            weight = trial.model.get_parameter(f"layer{layer}.weight")
            assert weight.std().item() == pytest.approx((gain * 2 / (inputs + outputs)) ** 0.5, rel=0.05)
            assert trial.model.get_parameter(f"layer{layer}.bias").abs().max() < 1e-9
        now = trial.model.get_parameter("layer1.weight").detach().clone()
        if first is None:
            first = now
        trial.chunk()
    assert first is not None and not torch.allclose(now, first, atol=1e-6), "nothing was kept, so all is new"


def test_figures_9_and_12(tmp_path: Path) -> None:
    study = addmul.MaskAddMul()
    runs = [run(study, {"hidden": hidden}, model) for model, hidden in (("FNN_small", "4"), ("FNN", "6"))]
    outcome = Outcome(runs[0][2].config, [record for _, record, _ in runs], [])
    figures = study.figures(outcome)
    heights = [bar.get_height() for bar in figures["sizes"][0].axes[0].patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([r.result["sharing"]["add"]["total"] for _, r, _ in runs])
    performed = runs[0][1].result["performed"]
    assert set(performed) == {"none", "add", "mul"}
    shown = figures["performed_FNN_small"][0].axes[1].images[0].get_array()
    expected = [[performed["add"][asked][done] for done in ("add", "mul", "none")] for asked in ("add", "mul")]
    assert torch.tensor(shown.tolist()).allclose(torch.tensor(expected))
