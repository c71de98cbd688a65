"""The compositional studies: trained parameters, measures by hand, runs that resume to the same bits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod.data import DataError
from fastmod.runs import checkpoint
from fastmod.runs.config import changed
from fastmod.runs.study import Outcome, Record
from fastmod.studies import registry
from fastmod.studies.comp import reports, sources
from fastmod.studies.comp.adapt import AdaptTrial
from fastmod.studies.comp.multitask import MultitaskConfig, shares
from fastmod.studies.comp.single import SingleTrial
from fastmod.studies.comp.training import CompTrial
from tests.helpers.comp_trials import MODELS, SETTINGS, finish, trial_of
from tests.helpers.comp_trials import data as data
from tests.helpers.comp_trials import few_steps as few_steps
from tests.helpers.study_commands import in_process, refused
from tests.helpers.surroundings import no_data_folder as no_data_folder
from tests.helpers.surroundings import one_thread as one_thread

# ---------------------------------------------------------------- data


def test_tasks_are_data_sets_in_domains(data: Path) -> None:
    place = sources.Where(str(data), False)
    how: dict[str, Any] = {"side": 28, "train": 7, "test": 0, "seed": 3}
    plain = sources.task("mnist", "original", place, colours=1, **how)
    images, _, test_images, test_labels = sources.read("mnist", place)
    assert plain.train.images.equal(images[:7, None]) and plain.test.images.equal(test_images[:, None])
    assert plain.test.labels.equal(test_labels) and plain.title == "MNIST" and plain.classes == 10
    noisy = sources.task("mnist", "shot_noise", place, colours=3, **how)
    assert noisy.train.images.shape == (7, 3, 28, 28) and noisy.title == "MNIST shot noise"
    assert not noisy.train.images[:, 0].equal(images[:7]) and noisy.train.images[:, 0].equal(noisy.train.images[:, 2])


def test_images_that_are_held_back_stand_for_the_test(data: Path) -> None:
    place = sources.Where(str(data), False)
    how: dict[str, Any] = {"side": 28, "colours": 1, "test": 0, "seed": 3}
    images, labels, _, _ = sources.read("mnist", place)
    found = sources.task("mnist", "original", place, train=0, held_back=5, **how)
    assert found.train.images.equal(images[:-5, None]) and found.train.labels.equal(labels[:-5])
    assert found.test.images.equal(images[-5:, None]) and found.test.labels.equal(labels[-5:])
    assert len(sources.task("mnist", "original", place, train=7, held_back=5, **how).train.labels) == 7
    with pytest.raises(DataError, match="held_back: expected fewer than"):
        sources.task("mnist", "original", place, train=0, held_back=len(labels), **how)
    trial = trial_of("comp-adapt", data, held_back=5)
    assert isinstance(trial, AdaptTrial) and len(trial.new.test.labels) == 5


def test_a_margin_makes_digits_smaller(data: Path) -> None:
    trial = trial_of("comp-adapt", data, margin=3, side=22)
    assert isinstance(trial, AdaptTrial)
    images = trial.new.train.images[:, 0]
    own = sources.read("usps", trial.config.place)[0]
    assert images[:, 3:-3, 3:-3].equal(own) and images.sum() == own.sum()


def test_colours_become_brightness_and_sides_one(data: Path) -> None:
    place = sources.Where(str(data), False)
    found = sources.task("cifar10", "original", place, side=32, colours=1, train=0, test=0, seed=0)
    red, green, blue = sources.read("cifar10", place)[0].double().unbind(1)
    expected = (0.299 * red + 0.587 * green + 0.114 * blue + 0.5).floor()
    assert found.train.images[:, 0].double().equal(expected)
    small = sources.task("cifar10", "original", place, side=16, colours=3, train=0, test=0, seed=0)
    assert small.train.images.shape == (6, 3, 16, 16)
    assert (small.train.images[:, 0] == torch.arange(6)[:, None, None]).all(), "what is even stays so"


@pytest.mark.parametrize("study", SETTINGS)
def test_batches_are_of_their_tasks(study: str, data: Path) -> None:
    trial = trial_of(study, data)
    (index, *_) = trial.batches(trial.generator("data"))
    assert index.shape == (2, len(trial.tasks), trial.config.batch)
    first = 0
    for number, task in enumerate(trial.tasks.values()):
        own = index[:, number]
        assert int(own.min()) >= first and int(own.max()) < first + len(task.train.labels)
        images, labels = trial.data(own)
        assert images.equal(task.train.images[own - first] / 255.0) and labels.equal(task.train.labels[own - first])
        first += len(task.train.labels)
    again = trial_of(study, data).batches(trial.generator("data"))[0]
    other = trial_of(study, data, seed=1)
    assert index.equal(again) and not index.equal(other.batches(other.generator("data"))[0])


# ---------------------------------------------------------------- training


def test_loss_and_average_by_hand(data: Path) -> None:
    trial = trial_of("comp-multitask", data, "mixture", dropout=0, average=0.8, cluster=0.01)
    index = trial.batches(trial.generator("data"))[0][0]
    images, labels = trial.data(index)
    expected = 0.01 * trial.model.cluster_penalty().item()
    state = {k: v.clone() for k, v in trial.model.state_dict().items()}
    for t in range(len(trial.tasks)):
        expected += F.cross_entropy(trial.model(images[t], t), labels[t]).item()  # type: ignore[arg-type]
    trial.model.load_state_dict(state)
    assert trial.loss(index).item() == pytest.approx(expected, rel=1e-5)
    trial = trial_of("comp-multitask", data, "mixture", average=0.8)
    mean: dict[str, Tensor] = {}
    seen = CompTrial.penalty

    def kept(self: CompTrial) -> Tensor | float:  # called after the forward pass of every step
        for k, v in self.model.state_dict().items():
            if v.is_floating_point():
                mean[k] = 0.8 * mean[k] + 0.2 * v if k in mean else v.clone()
        return seen(self)

    trial.penalty = kept.__get__(trial)  # type: ignore[method-assign]
    while not trial.finished:
        trial.chunk()
    for k, v in trial.evaluated.state_dict().items():
        if v.is_floating_point():
            torch.testing.assert_close(v, mean[k], rtol=1e-4, atol=1e-6)


def test_rates(data: Path) -> None:
    trial = trial_of("comp-single", data, steps=4, lr=0.01, logit_rate=5.0)
    seen = []
    while not trial.finished:
        trial.chunk()
        seen.append([group["lr"] for group in trial.optimizer.param_groups])
    assert seen == [pytest.approx([0.01, 0.05]), pytest.approx([0.005, 0.025])]
    groups = trial.optimizer.param_groups
    assert groups[1]["params"] == [trial.model.body.logits] and groups[1]["weight_decay"] == 0.0
    assert groups[0]["weight_decay"] == 1e-5 and groups[0]["momentum"] == 0.9
    trial = trial_of("comp-single", data, schedule="paper", lr=0.01)
    trial.step = 3000
    trial.chunk()
    assert trial.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.99**2)


@pytest.mark.parametrize(("study", "model"), MODELS)
def test_every_model_trains_to_its_end(study: str, model: str, data: Path) -> None:
    record = finish(trial_of(study, data, model))
    found = registry.get(study)
    config = changed(found.defaults, {**SETTINGS[study], "data": str(data)})
    outcome = Outcome(config, [record], [])
    rows = found.table(outcome)
    assert rows and all(row.values and all(math.isfinite(v) for v in row.values) for row in rows)
    figures = found.figures(outcome)
    assert f"mixtures_{record.key}" in figures
    json.dumps(record.result)


# ---------------------------------------------------------------- one task


def test_nets_of_one_task(data: Path) -> None:
    nets = {model: trial_of("comp-single", data, model).model for model in registry.get("comp-single").models}
    assert nets["cyclic"].signature() == [0, 1, 0, 1] and nets["sequential"].signature() == [0, 0, 1, 1]
    assert sorted(nets["random"].signature()) == [0, 0, 1, 1]
    assert nets["few_layers"].signature() == [0, 1]
    assert nets["tanh"].body.mixing == "tanh" and nets["mixture"].body.mixing == "softmax"
    counts = {model: sum(p.numel() for p in net.parameters()) for model, net in nets.items()}
    assert counts["few_layers"] == counts["sequential"] == counts["progressive"] == counts["mixture"] - 4 * 2
    into = trial_of("comp-single", data, into_blocks=True).model
    assert into.adapter_into_blocks and not nets["mixture"].adapter_into_blocks


def test_regularisers_draw_shares_to_one_template(data: Path) -> None:
    def peak(model: str, **weights: float) -> float:
        trial = trial_of("comp-single", data, model, steps=20, average=0.0, seed=4, **weights)
        finish(trial)
        return min(reports.peak(trial.model.mixture(0).tolist()))

    plain = peak("mixture")
    assert peak("clustered", cluster=0.5) > plain and peak("entropy", entropy=5.0) > plain


def test_orders_of_layers_by_hand(data: Path) -> None:
    trial = trial_of("comp-single", data, "sequential", steps=10)
    record = finish(trial)
    assert isinstance(trial, SingleTrial)
    net, task = trial.evaluated, trial.tasks["fashion"]

    def accuracy(order: list[int]) -> float:
        with torch.no_grad():
            scores = net(task.test.images / 255.0, 0, order=order)
        return 100 * float((scores.argmax(-1) == task.test.labels).double().mean())  # type: ignore[union-attr]

    assert record.result["in_order"] == record.result["accuracy"] == pytest.approx(accuracy([0, 1, 2, 3]))
    assert record.result["reversed"] == pytest.approx(accuracy([3, 2, 1, 0]))
    same = [accuracy([1, 0, 2, 3]), accuracy([0, 1, 3, 2])]
    assert record.result["swapped_same"] == pytest.approx(sum(same) / 2)
    assert record.result["swapped_different"] == pytest.approx(accuracy([0, 2, 1, 3]))


def test_photographs_are_moved(data: Path) -> None:
    trial = trial_of("comp-single", data, dataset="cifar10", colours=3, side=32)
    index, places = trial.batches(trial.generator("data"))
    assert places.shape == (2, 4, 3) and places.min() >= 0 and places.max() <= 8
    images = trial.data(index[0])[0]
    assert trial.moved(images, places[0]).shape == images.shape and not trial.moved(images, places[0]).equal(images)


def test_table_beside_the_papers() -> None:
    study = registry.get("comp-single")
    results = {"mixture": 60.0, "sequential": 61.0, "cyclic": 58.0}
    records = [
        Record(model, seed, 30, 60.0, 9, {"accuracy": accuracy + seed})
        for model, accuracy in results.items()
        for seed in (0, 1)
    ]
    rows = {row.name: row for row in study.table(Outcome(study.defaults, records, []))}
    assert rows["mixture, test accuracy (%)"].paper == "64.1, CIFAR-100"
    assert (
        rows["mixture, test accuracy (%)"].mean == 60.5 and "not the paper's" in rows["mixture, test accuracy (%)"].note
    )
    assert rows["mixture - sequential (points)"].mean == -1.0 and rows["mixture - cyclic (points)"].mean == 2.0
    into = changed(study.defaults, {"into_blocks": True, "layers": 12})
    assert study.table(Outcome(into, records[:1], []))[0].paper == "67.3, CIFAR-100"


# ---------------------------------------------------------------- sharing


def test_sharing_by_hand() -> None:
    a, b = [[1.0, 0.0], [0.3, 0.7], [0.5, 0.5]], [[0.0, 1.0], [0.6, 0.4], [0.5, 0.5]]
    assert reports.sharing(a, b) == pytest.approx([0.0, 0.7, 1.0])
    assert reports.thirds([1.0, 2.0, 3.0]) == (1.0, 3.0) and reports.thirds([1.0, 3.0, 5.0, 5.0, 7.0, 9.0]) == (
        2.0,
        8.0,
    )
    assert reports.thirds([4.0, 6.0]) == (4.0, 6.0)
    assert reports.above(a, 0.6) == pytest.approx(2 / 3)


def test_tasks_that_share_a_domain_or_a_data_set() -> None:
    """The first layer has a template per domain, the last one per data set, the middle one for all."""
    pairs = MultitaskConfig().pairs
    hot = torch.eye(3).tolist()
    sets, domains = MultitaskConfig().datasets, MultitaskConfig().domains
    mixtures = {
        name: [hot[domains.index(domain)], hot[0], hot[sets.index(dataset)]]
        for name, (dataset, domain) in pairs.items()
    }
    assert shares(mixtures, pairs) == {
        "sharing_domain_first": 1.0, "sharing_domain_last": 0.0, "sharing_data_first": 0.0, "sharing_data_last": 1.0,
        "sharing_neither_first": 0.0, "sharing_neither_last": 0.0,
    }  # fmt: skip


def test_sharing_as_one_number_each() -> None:
    study = registry.get("comp-multitask")
    found = {"train_loss": 1.0, "accuracy": 90.0, "sharing_domain_first": 0.7, "sharing_data_first": 0.4,
             "sharing_neither_first": 0.5, "sharing_domain_last": 0.2, "sharing_data_last": 0.9,
             "sharing_neither_last": 0.1}  # fmt: skip
    rows = {row.name: row for row in study.table(Outcome(study.defaults, [Record("mixture", 0, 9, 1.0, 5, found)], []))}
    assert rows["mixture, sharing in the first third: same domain - neither"].mean == pytest.approx(0.2)
    assert rows["mixture, sharing in the last third: same data set - neither"].mean == pytest.approx(0.8)
    trunk = study.table(Outcome(study.defaults, [Record("trunk", 0, 9, 1.0, 5, {"train_loss": 1, "accuracy": 9})], []))
    assert len(trunk) == 2


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    ("study", "model", "steps"),
    [("comp-single", "clustered", (2,)), ("comp-multitask", "mixture_patches", (2,)),
     ("comp-transfer", "mixture", (2, 6, 24)), ("comp-transfer", "digits", (4, 14)),
     ("comp-adapt", "compositional", (2, 6, 8, 10)), ("comp-adapt", "isometric", (14,))],
)  # fmt: skip
def test_resumed_to_the_same_bits(study: str, model: str, steps: tuple[int, ...], data: Path, tmp_path: Path) -> None:
    """Stop in every kind of stage and between two stages."""

    def known(trial: CompTrial) -> str:
        return checkpoint.digest({**trial.state(), "seconds": 0.0})

    trial = trial_of(study, data, model, dropout=0.3)
    ends: dict[int, str] = {}
    while not trial.finished:
        trial.chunk()
        if trial.due or trial.finished:
            trial.after_evaluation(trial.metrics())
        ends[trial.step] = known(trial)
        if trial.step in steps:
            checkpoint.save(tmp_path / f"{trial.step}.pt", "", trial.state())
    for step in steps:
        again = trial_of(study, data, model, dropout=0.3)
        torch.manual_seed(99)
        again.load_state(checkpoint.load(tmp_path / f"{step}.pt", ""))
        assert known(again) == ends[step]
        for _ in range(3):
            if not again.finished:
                again.chunk()
                if again.due or again.finished:
                    again.after_evaluation(again.metrics())
                assert known(again) == ends[again.step], again.step


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("study", ["comp-multitask", "comp-adapt"])
def test_runs_by_command(study: str, data: Path, tmp_path: Path) -> None:
    args: list[object] = ["study", study, "--seeds", "3", "--out", tmp_path / "run"]
    args += ["--model", registry.get(study).models[-1]]
    for key, value in {**SETTINGS[study], "data": data}.items():
        args += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    done = in_process(*args)
    assert done.code == 0, done.text
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    model = registry.get(study).models[-1]
    assert [trial["trial"] for trial in found["trials"]] == [f"{model}-s3"]
    assert (tmp_path / "run" / "figures" / f"mixtures_{model}-s3.png").exists()
    assert "mixtures_" not in done.err


@pytest.mark.parametrize(
    ("study", "setting", "words"),
    [("comp-single", "dataset=mnist", "dataset: expected one of cifar10, cifar100, fashion"),
     ("comp-single", "layers=3", "layers: expected at least templates = 4"),
     ("comp-single", "cluster=-1", "cluster: expected 0 or more"),
     ("comp-single", "colours=2", "colours: expected 1 or 3"),
     ("comp-single", "side=3", "side: expected at least patch = 4"),
     ("comp-single", "dropout=1", "dropout: expected"),
     ("comp-single", "schedule=step", "schedule: expected cosine or paper"),
     ("comp-single", "data=/nowhere", "/nowhere/cifar10: no such folder"),
     ("comp-multitask", "datasets=mnist,mnist", "datasets: expected different ones"),
     ("comp-multitask", "domains=fog", "domains: expected different ones of original"),
     ("comp-transfer", "tune_steps=15", "tune_steps: expected a multiple of chunk"),
     ("comp-transfer", "new=mnist", "new none of them"),
     ("comp-transfer", "known=letters", "expected data sets"),
     ("comp-adapt", "begin=blurred", "begin: expected one of domains"),
     ("comp-adapt", "svhn=maybe", "svhn: expected auto, yes or no"),
     ("comp-adapt", "margin=-1", "margin: expected 0 to 64"),
     ("comp-adapt", "domains=shear", "domains: expected two or more"),
     ("comp-adapt", "adapt_lr=0", "adapt_lr, supervised_lr and adapter_lr: expected more than 0")],
)  # fmt: skip
def test_bad_settings_are_named(tmp_path: Path, study: str, setting: str, words: str) -> None:
    refused(in_process("study", study, "--set", setting, "--out", tmp_path / "run"), words)
