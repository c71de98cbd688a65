"""The ResMixNet studies: the paper's data, schedule and optimiser; runs that resume to the same bits; results."""

from __future__ import annotations

import json
import math
import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastmod
from fastmod.runs import checkpoint, display, draw
from fastmod.runs.config import StudyError, changed
from fastmod.runs.engine import Progress, record_of
from fastmod.runs.study import Outcome, Record
from fastmod.studies import registry
from fastmod.studies.resmix import cifar as resmix_cifar
from fastmod.studies.resmix import nets
from fastmod.studies.resmix import parity as resmix_parity
from fastmod.studies.resmix import pentomino as resmix_pentomino
from fastmod.studies.resmix.training import ResMixTrial
from fastmod.tasks import sprites
from tests.data.test_data_masks import cifar_folder
from tests.data.test_image_tasks import coded_digits
from tests.data.test_photographs import cifar100_folder, svhn_folder
from tests.helpers.study_commands import Finished, in_process, refused
from tests.helpers.study_commands import fastmod as fastmod_command
from tests.helpers.study_hooks import kill, ticks, without_figures
from tests.helpers.study_runs import outcome
from tests.helpers.surroundings import no_data_folder as no_data_folder
from tests.helpers.surroundings import one_thread as one_thread

CPU = torch.device("cpu")
STUDIES = ("resmix-pentomino", "resmix-parity", "resmix-cifar")
TINY: dict[str, Any] = {"batch": 4, "epochs": 2, "chunk": 3}
RELATION: dict[str, Any] = {"images": 26, "valid_images": 9, "test_images": 30}  # two of the 26 are dropped


class Small(nn.Module):
    """A small, fast net; as a mixture, its gates are the brightness of each half of an image."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 5, stride=4)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))

    def gates(self, x: Tensor) -> list[Tensor]:
        assert not self.training
        halves = torch.stack([half.mean((1, 2, 3)) for half in x.chunk(2, 2)], 1)
        return [halves.softmax(1), (-halves).softmax(1)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nets, "build", lambda name, classes, stem_stride: Small(classes))


def settings_of(study: str, folder: Path) -> dict[str, Any]:
    if study == "resmix-pentomino":
        return {**TINY, **RELATION}
    if study == "resmix-parity":
        return {**TINY, **RELATION, "data": str(coded_digits(folder / "digits")), "verify": False}
    return {**TINY, "data": str(cifar_folder(folder / "cifar", count=26))}


def trial_of(study: str, folder: Path, model: str | None = None, seed: int = 0, **settings: Any) -> ResMixTrial:
    found = registry.get(study)
    torch.manual_seed(seed)
    config = changed(found.defaults, {**settings_of(study, folder), **settings})
    trial = found.trial(config, model or found.models[0], seed, CPU)
    assert isinstance(trial, ResMixTrial)
    return trial


def finish(trial: ResMixTrial) -> Record:
    last: dict[str, float] = {}
    while not trial.finished:
        trial.chunk()
        if trial.due or trial.finished:
            last = trial.metrics()
            trial.after_evaluation(last)
    return record_of(trial, trial.name, last)


# ---------------------------------------------------------------- the nets


@pytest.mark.parametrize(
    ("name", "count"),
    [("ResNet26", 369_170), ("ResNet50", 758_034), ("ResNet152", 3_663_250), ("VGG19_BN", 20_036_418),
     ("ResMixNet_2_2", 273_750), ("ResMixNet_4_1", 192_730)],
)  # fmt: skip
def test_sizes_of_the_papers_nets(name: str, count: int) -> None:
    assert sum(p.numel() for p in nets.build(name, 2, 2).parameters()) == count


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [("ResNet50", 10, 758_554), ("ResNet50", 100, 764_404), ("ResMixNet_3_5", 10, 748_256),
     ("ResMixNet_3_5", 100, 754_106)],
)  # fmt: skip
def test_sizes_for_photographs(name: str, classes: int, count: int) -> None:
    assert sum(p.numel() for p in nets.build(name, classes, 1).parameters()) == count


@pytest.mark.parametrize("study", STUDIES)
def test_every_model_has_a_title_and_can_be_built(study: str) -> None:
    for model in registry.get(study).models:
        assert nets.TITLES[model]
        assert nets.modular(model) == hasattr(nets.build(model, 2, 2), "gates")


# ---------------------------------------------------------------- data


def shown(trial: ResMixTrial, steps: int) -> list[list[int]]:
    """Indices of the images in the first steps."""
    found: list[list[int]] = []
    while len(found) < steps:
        index = trial.batches(trial.generator("data", trial.step))[0]
        trial.step += len(index)
        found += index.tolist()
    trial.step = 0
    return found


@pytest.mark.usefixtures("small")
def test_epochs_show_every_image_once(tmp_path: Path) -> None:
    trial = trial_of("resmix-pentomino", tmp_path, epochs=3)
    assert trial.per_epoch == 6 and trial.steps == 18
    batches = shown(trial, 18)
    assert len(batches) == 18 and all(len(batch) == 4 for batch in batches)
    epochs = [list(chain(*batches[start : start + 6])) for start in (0, 6, 12)]
    for epoch in epochs:
        assert len(set(epoch)) == 24 and set(epoch) <= set(range(26))
    assert epochs[0] != epochs[1] != epochs[2]
    assert shown(trial_of("resmix-pentomino", tmp_path, epochs=3, chunk=50), 18) == batches, "chunks change nothing"
    assert shown(trial_of("resmix-pentomino", tmp_path, epochs=3, seed=1), 18) != batches


@pytest.mark.usefixtures("small")
def test_chunks_end_where_something_happens(tmp_path: Path) -> None:
    def lengths(**settings: Any) -> list[tuple[int, bool]]:
        trial, found = trial_of("resmix-pentomino", tmp_path, **settings), []
        while not trial.finished:
            before = trial.step
            trial.chunk()
            found.append((trial.step - before, trial.due))
        return found

    assert lengths(chunk=4) == [(4, False), (2, True)] * 2
    assert lengths(chunk=100) == [(6, True)] * 2
    assert lengths(chunk=4, steps=8) == [(4, False), (2, True), (2, False)]
    assert lengths(chunk=4, steps=8, evaluate_every=4) == [(4, True), (2, False), (2, True)]


def test_parts_are_of_different_seeds() -> None:
    seeds = [
        seed for data_seed in range(4) for seed in resmix_pentomino.PentominoConfig(data_seed=data_seed).seeds.values()
    ]
    assert len(set(seeds)) == 12


@pytest.mark.usefixtures("small")
def test_pentomino_data(tmp_path: Path) -> None:
    trial = trial_of("resmix-pentomino", tmp_path, placement="jitter", data_seed=2)
    for part, count, seed in (("train", 26, 6), ("valid", 9, 7), ("test", 30, 8)):
        expected = fastmod.tasks.pentomino(count, seed, "jitter")
        assert trial.parts[part].images.equal(expected.images) and trial.parts[part].labels.equal(expected.labels)


@pytest.mark.usefixtures("small")
def test_parity_data(tmp_path: Path) -> None:
    trial = trial_of("resmix-parity", tmp_path)
    for part, count, seed in (("train", 26, 0), ("valid", 9, 1), ("test", 30, 2)):
        expected = fastmod.tasks.mnist_parity(count, part, seed, tmp_path / "digits", verify=False)
        assert trial.parts[part].images.equal(expected.images) and trial.parts[part].labels.equal(expected.labels)


@pytest.mark.usefixtures("small")
def test_images_become_zero_to_one_or_standard(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    trial = trial_of("resmix-pentomino", tmp_path)
    trial.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    trial.loss(torch.arange(4))
    assert seen[0].equal(trial.parts["train"].images[:4] / 255.0)
    trial = trial_of("resmix-cifar", tmp_path)
    trial.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    trial.loss(torch.arange(26))  # no augmentation
    deviation, mean = torch.std_mean(seen[1], (0, 2, 3))
    torch.testing.assert_close(mean, torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(deviation[[0, 2]], torch.ones(2), atol=1e-3, rtol=0)


@pytest.mark.usefixtures("small")
def test_cifar_is_cropped_and_mirrored_svhn_is_not(tmp_path: Path) -> None:
    folders = {
        "cifar10": cifar_folder(tmp_path / "10", count=26), "cifar100": cifar100_folder(tmp_path / "100", 26),
        "svhn": svhn_folder(tmp_path / "svhn", 26),
    }  # fmt: skip
    for dataset, folder in folders.items():
        trial = trial_of("resmix-cifar", tmp_path, dataset=dataset, data=str(folder), chunk=200, batch=13, epochs=100)
        index, *moves = trial.batches(trial.generator("data"))
        assert index.shape == (2, 13)
        images = trial.parts["train"].images[index[0]].float()
        if dataset == "svhn":
            assert not moves and trial.moved(images).equal(images)
        else:
            assert moves[0].shape == (2, 13, 3) and moves[0].min() >= 0 and moves[0].max() <= 8
            moved = trial.moved(images, moves[0][0])
            assert moved.shape == images.shape and not moved.equal(images)


# ---------------------------------------------------------------- schedule and optimiser


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("study", "settings", "epochs", "decays"),
    [("resmix-pentomino", {}, 200, (100, 140)), ("resmix-parity", {}, 200, (100, 140)),
     ("resmix-cifar", {}, 200, (100, 150)), ("resmix-cifar", {"dataset": "svhn"}, 40, (20, 30))],
)  # fmt: skip
def test_the_papers_schedule_is_one_flag_away(
    tmp_path: Path, study: str, settings: dict[str, Any], epochs: int, decays: tuple[int, int]
) -> None:
    if settings:
        settings = {**settings, "data": str(svhn_folder(tmp_path / "svhn", 26))}
    trial = trial_of(study, tmp_path, paper=True, **settings)
    assert trial.steps == epochs * trial.per_epoch
    first = trial.lr
    for decay, after in zip(decays, (0.1, 0.01), strict=True):
        trial.step = decay * trial.per_epoch - 1
        assert trial.lr == pytest.approx(first * after * 10)
        trial.step += 1
        assert trial.lr == pytest.approx(first * after)
    defaults = registry.get(study).defaults
    assert (defaults.batch, defaults.momentum, defaults.weight_decay) == (64, 0.9, 1e-4)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("small")
def test_the_papers_rates(tmp_path: Path) -> None:
    table = {  # Table 4: Pentomino, Parity
        "ResNet26": (0.1, 0.05), "ResNet50": (0.1, 0.1), "ResNet152": (0.1, 0.05), "VGG19_BN": (0.1, 0.01),
        "ResMixNet_4_1": (0.01, None), "ResMixNet_2_2": (None, 0.1),
    }  # fmt: skip
    for model, rates in table.items():
        for study, rate in zip(STUDIES, rates, strict=False):
            if rate is not None:
                assert trial_of(study, tmp_path, model).optimizer.param_groups[0]["lr"] == rate
    assert trial_of("resmix-parity", tmp_path, "ResNet26", lr=0.3).optimizer.param_groups[0]["lr"] == 0.3
    assert trial_of("resmix-cifar", tmp_path, dataset="svhn", data=str(svhn_folder(tmp_path / "s"))).rate == 0.01


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("clip", [math.inf, 0.05])
def test_sgd_by_hand(tmp_path: Path, clip: float) -> None:
    settings = {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.03, "clip": clip, "chunk": 2}
    trial = trial_of("resmix-pentomino", tmp_path, **settings)
    batches = shown(trial, 12)
    net = Small(2)
    net.load_state_dict(trial.model.state_dict())
    while not trial.finished:
        trial.chunk()
    velocity = [torch.zeros_like(p) for p in net.parameters()]
    images, labels = trial.parts["train"]
    for step, batch in enumerate(batches):
        rate = 0.05 * (1.0 if step < 6 else 0.1 if step < 8 else 0.01)
        loss = F.cross_entropy(net(images[batch] / 255.0), labels[batch])
        slopes = torch.autograd.grad(loss, list(net.parameters()))
        norm = torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt()
        assert norm > 0.05, "or there would be nothing to clip"
        with torch.no_grad():
            for parameter, speed, slope in zip(net.parameters(), velocity, slopes, strict=True):
                slope = slope * min(1.0, clip / norm.item()) + 0.03 * parameter
                speed.mul_(0.8).add_(slope)
                parameter.sub_(rate * speed)
    for got, expected in zip(trial.model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- measures


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("study", STUDIES)
def test_measures_by_hand(tmp_path: Path, study: str) -> None:
    trial = trial_of(study, tmp_path, epochs=1, chunk=2)
    losses = [float(trial.chunk()) for _ in range(3)]
    metrics = trial.metrics()
    assert metrics["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
    assert metrics["epoch"] == 1.0 and trial.model.training
    trial.after_evaluation(metrics)
    record = record_of(trial, trial.name, metrics)
    assert trial.model.training
    trial.model.eval()
    watched = "test" if study == "resmix-cifar" else "valid"
    for part, found in ((watched, metrics), ("test", record.result)):
        images, labels = trial.parts[part]
        with torch.no_grad():
            scores = trial.model((images - trial.shift) / trial.divisor)
        wrong = sum(int(a != b) for a, b in zip(scores.argmax(1).tolist(), labels.tolist(), strict=True))
        assert found[f"error_{part}"] == pytest.approx(100 * wrong / len(labels))
        assert found[f"{part}_loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-5)


@pytest.mark.usefixtures("small")
def test_gates_by_hand(tmp_path: Path) -> None:
    trial = trial_of("resmix-pentomino", tmp_path, epochs=1)
    gates = finish(trial).result["gates"]
    images, labels = trial.parts["test"]
    bright = [(image[:, :32].float().mean() / 255, image[:, 32:].float().mean() / 255) for image in images]
    top = [1 / (1 + math.exp(below - above)) for above, below in bright]
    for name, label in (("one class", 0), ("one odd", 1)):
        mean = sum(t for t, k in zip(top, labels.tolist(), strict=True) if k == label) / int((labels == label).sum())
        assert gates["M1"][name] == pytest.approx([mean, 1 - mean], abs=1e-6)
        assert gates["M2"][name] == pytest.approx([1 - mean, mean], abs=1e-6)
    assert "gates" not in finish(trial_of("resmix-pentomino", tmp_path, "ResNet26", epochs=1)).result


def test_groups() -> None:
    scene = sprites.scene(500, 3)
    groups = resmix_pentomino.groups_of(scene)
    for i, classes in enumerate(scene.classes.tolist()):
        expected = {f"all {sprites.CLASSES[classes[0]]}", "one class"} if len(set(classes)) == 1 else {"one odd"}
        assert {name for name, which in groups.items() if which[i]} == expected
    digits = torch.cartesian_prod(torch.arange(10), torch.arange(10))
    parities = resmix_parity.groups_of(digits)
    for i, (a, b) in enumerate(digits.tolist()):
        expected = {"different parity"} if (a + b) % 2 else {"same parity", "both odd" if a % 2 else "both even"}
        assert {name for name, which in parities.items() if which[i]} == expected


@pytest.mark.usefixtures("small")
def test_fewer_test_images_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resmix_cifar.ResMixCifarTrial, "most", 7)
    trial = trial_of("resmix-cifar", tmp_path)
    seen: list[int] = []
    trial.model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    trial.metrics()
    trial.step = trial.steps
    trial.metrics()
    assert seen == [7, 26]


# ---------------------------------------------------------------- table


def result(**values: Any) -> dict[str, Any]:
    return {"epoch": 3.0, "error_valid": 9.0, "images": "26 images", **values}


def test_table_beside_the_papers() -> None:
    records = [
        Record("ResMixNet_4_1", seed, 30, 60.0, 192_730, result(error_test=error))
        for seed, error in enumerate((1, 2, 6))
    ]
    records.append(Record("ResNet26", 0, 30, 60.0, 369_170, result(error_test=40.0)))
    study = registry.get("resmix-pentomino")
    rows = {row.name: row for row in study.table(Outcome(study.defaults, records, []))}
    mean, spread = rows["ResMixNet(4,1), test error (%)"], rows["ResMixNet(4,1), test error (%), deviation over seeds"]
    assert (mean.paper, mean.mean, mean.trials) == ("0.88 ± 0.12", 3.0, 3)
    assert (spread.paper, spread.trials) == ("0.12", 3) and spread.mean == pytest.approx(math.sqrt(7))
    assert "192,730 parameters, 3 epochs" in mean.note and "200 epochs" in mean.note
    assert rows["ResNet26, test error (%)"].ours == "40.000"
    assert "ResNet26, test error (%), deviation over seeds" not in rows
    study = registry.get("resmix-cifar")
    records = [Record("ResMixNet_3_5", 0, 30, 60.0, 748_256, result(error_test=10.0))]
    for dataset, paper in (("cifar10", "92.74"), ("cifar100", "66.35"), ("svhn", "95.58")):
        (row,) = study.table(Outcome(changed(study.defaults, {"dataset": dataset}), records, []))
        assert (row.paper, row.mean) == (paper, 90.0)


# ---------------------------------------------------------------- the command


def command(study: str, folder: Path, *more: object) -> list[object]:
    found: list[object] = ["study", study, *more]
    for key, value in settings_of(study, folder).items():
        found += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_quick_runs_of_the_real_nets(tmp_path: Path, study: str) -> None:
    first = registry.get(study).models[0]
    models = ["--model", first, "--model", "ResNet26"]
    done = in_process(
        *command(
            study, tmp_path, *models, "--seeds", "0-1", "--epochs", "1", "--set", "batch=13", "--out", tmp_path / "run"
        )
    )
    assert done.code == 0, done.text
    assert nets.TITLES[first].partition("(")[0] in done.out and "report.html" in done.out
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["config"]["settings"]["epochs"] == 1
    trials = {trial["trial"]: trial for trial in found["trials"]}
    assert list(trials) == [f"{first}-s0", f"{first}-s1", "ResNet26-s0", "ResNet26-s1"]
    experts = int(first.split("_")[1])
    for module in ("M1", "M2"):
        for weights in trials[f"{first}-s1"]["result"]["gates"][module].values():
            assert len(weights) == experts and sum(weights) == pytest.approx(1, abs=1e-5)
    assert trials[f"{first}-s0"]["result"]["gates"] != trials[f"{first}-s1"]["result"]["gates"]
    assert "gates" not in trials["ResNet26-s0"]["result"]
    drawn = {file.name for file in (tmp_path / "run" / "figures").iterdir()}
    assert {f"gates_{first}-s0.png", f"gates_{first}-s1.png", "train_loss.png"} <= drawn
    assert any(row["name"].endswith("deviation over seeds") and row["trials"] == 2 for row in found["table"])


@pytest.mark.parametrize("model", ["ResMixNet_4_1", "ResNet26"])
def test_a_checkpoint_holds_all_of_a_real_net(tmp_path: Path, model: str) -> None:
    def known(trial: ResMixTrial) -> str:
        return checkpoint.digest({**trial.state(), "seconds": 0.0})

    def begin() -> ResMixTrial:
        return trial_of("resmix-pentomino", tmp_path, model, batch=3, epochs=1, steps=4, chunk=2)

    trial = begin()
    trial.chunk()
    checkpoint.save(tmp_path / "trial.pt", "", trial.state())
    halfway = known(trial)
    trial.chunk()
    torch.manual_seed(99)
    again = begin()
    for parameter in again.model.parameters():
        parameter.data.zero_()
    again.load_state(checkpoint.load(tmp_path / "trial.pt", ""))
    assert known(again) == halfway
    again.chunk()
    assert known(again) == known(trial) != halfway


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Study -> outcome of an uninterrupted run of the small nets."""
    return {}


def stop_at(monkeypatch: pytest.MonkeyPatch, key: str, step: int) -> None:
    """Send Ctrl-C when this trial reaches this step."""
    show = display.Display.__call__

    def show_and_stop(self: display.Display, now: Progress) -> None:
        show(self, now)
        if now.key == key and now.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(display.Display, "__call__", show_and_stop)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("step", [3, 6, 9])
@pytest.mark.parametrize("study", STUDIES)
def test_interrupted_and_resumed_to_the_same_bits(
    tmp_path: Path, study: str, step: int, whole: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop within an epoch, between two, and after the first decay (at step 6)."""
    first = registry.get(study).models[0]
    args = command(study, tmp_path, "--model", first, "--model", "ResNet26", "--seeds", "3")

    def run(*args: object) -> Finished:
        torch.manual_seed(int.from_bytes(os.urandom(6), "big"))
        return in_process(*args)

    if study not in whole:
        assert run(*args, "--out", tmp_path / "whole").code == 0
        whole[study] = outcome(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, "ResNet26-s3", step)
        stopped = run(*args, "--out", tmp_path / "run")
    assert stopped.code == 130, stopped.text
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "ResNet26-s3.pt")
    assert state["step"] == step and "momentum_buffer" in state["optimizer"]["state"][0]
    done = run("study", "--resume", tmp_path / "run")
    assert done.code == 0, done.text
    got = outcome(tmp_path / "run")
    for settings in (got["result"]["config"]["settings"], whole[study]["result"]["config"]["settings"]):
        settings.pop("data", None)  # another folder of the same images
    for part in whole[study]:
        assert got[part] == whole[study][part], part


@pytest.mark.slow
def test_killed_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    """kill -9 of a process that trains the real nets, after a checkpoint within an epoch."""
    args = command(
        "resmix-pentomino", tmp_path, "--model", "ResMixNet_4_1", "--seeds", "0", "--set", "checkpoint_seconds=1"
    )
    hooks = (ticks(), without_figures())
    assert fastmod_command(*args, "--out", tmp_path / "whole", hooks=hooks).code == 0
    killed = fastmod_command(*args, "--out", tmp_path / "run", hooks=(*hooks, kill("told ResMixNet_4_1-s0 6")))
    assert killed.killed, killed.text
    assert checkpoint.load(tmp_path / "run" / "checkpoints" / "ResMixNet_4_1-s0.pt")["step"] == 3
    done = fastmod_command("study", "--resume", tmp_path / "run", hooks=hooks)
    assert done.code == 0, done.text
    got, expected = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    for part in expected:
        assert got[part] == expected[part], part


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("study", STUDIES)
def test_another_seed_is_another_run(tmp_path: Path, study: str) -> None:
    digests = {checkpoint.digest(finish(trial_of(study, tmp_path, seed=seed, epochs=1)).result) for seed in (0, 1, 1)}
    assert len(digests) == 2


def test_epochs_belong_to_studies_that_count_them(tmp_path: Path) -> None:
    refused(in_process("study", "algo", "--epochs", "2", "--out", tmp_path / "run"), "epochs")
    refused(in_process("study", "--resume", tmp_path, "--epochs", "2"), "--resume")
    done = in_process("study")
    assert all(study in done.out for study in STUDIES) and "epochs" in done.out


@pytest.mark.parametrize(
    ("study", "setting", "words"),
    [("resmix-pentomino", "epochs=0", "epochs: expected 1 or more"),
     ("resmix-pentomino", "momentum=1", "momentum: expected"),
     ("resmix-pentomino", "weight_decay=-1", "weight_decay: expected"),
     ("resmix-pentomino", "decays=0.5,1.5", "decays: expected"),
     ("resmix-pentomino", "images=0", "images: expected"),
     ("resmix-pentomino", "data_seed=-1", "data_seed: expected"),
     ("resmix-pentomino", "placement=middle", "placement: expected one of center, corner, jitter"),
     ("resmix-pentomino", "lr=-1", "lr and clip"),
     ("resmix-pentomino", "steps=-50", "steps: expected 0 or more"),
     ("resmix-cifar", "dataset=mnist", "dataset: expected one of cifar10, cifar100, svhn"),
     ("resmix-cifar", "data=/nowhere", "/nowhere: no such folder"),
     ("resmix-parity", "data=/nowhere", "/nowhere: no such folder")],
)  # fmt: skip
def test_bad_settings_are_named(tmp_path: Path, study: str, setting: str, words: str) -> None:
    refused(in_process("study", study, "--set", setting, "--out", tmp_path / "run"), words)


def test_quick_photographs_are_few(tmp_path: Path) -> None:
    study = registry.get("resmix-cifar")
    assert (study.quick["train_images"], study.quick["test_images"]) == (640, 250)
    trial = trial_of("resmix-cifar", tmp_path, train_images=20, test_images=7)
    assert len(trial.parts["train"].labels) == 20 and len(trial.parts["test"].labels) == 7
    whole = trial_of("resmix-cifar", tmp_path)
    assert torch.equal(trial.parts["test"].images, whole.parts["test"].images[:7])
    assert all(len(which) == 7 for which in trial.groups.values())
    assert resmix_cifar._data(trial.config).described == "20 training and 7 test images"
    with pytest.raises(StudyError, match="test_images: expected 0 or more"):
        trial_of("resmix-cifar", tmp_path, test_images=-1)


def test_a_batch_larger_than_the_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="batch: expected at most the 26 training images, got 27"):
        trial_of("resmix-pentomino", tmp_path, batch=27)


def test_a_hundred_classes_fit_a_figure() -> None:
    gates = {module: {str(c): [0.2, 0.3, 0.5] for c in range(100)} for module in ("M1", "M2")}
    record = Record("ResMixNet_3_5", 0, 1, 1.0, 1, result(error_test=1.0, gates=gates))
    study = registry.get("resmix-cifar")
    figure, _ = study.figures(Outcome(study.defaults, [record], []))["gates_ResMixNet_3_5-s0"]
    axes = figure.axes
    assert [len(one.get_yticks()) for one in axes] == [100, 100] and not axes[0].texts
    assert draw.available()
