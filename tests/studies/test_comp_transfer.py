"""The compositional studies of a new task and of a new domain: trained parameters, losses by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastmod.studies import registry
from fastmod.studies.comp import adapt, alignment, sources
from fastmod.studies.comp.adapt import AdaptTrial
from fastmod.studies.comp.stages import StagedTrial
from tests.data.test_photographs import svhn_folder
from tests.helpers.comp_trials import data as data
from tests.helpers.comp_trials import few_steps as few_steps
from tests.helpers.comp_trials import finish, trial_of
from tests.helpers.surroundings import no_data_folder as no_data_folder
from tests.helpers.surroundings import one_thread as one_thread

# ---------------------------------------------------------------- a new task


@pytest.mark.parametrize("model", ["mixture", "trunk_patches", "digits"])
def test_a_new_task_changes_nothing_of_the_others(model: str, data: Path) -> None:
    trial = trial_of("comp-transfer", data, model)
    assert isinstance(trial, StagedTrial)
    seen = []
    while not trial.finished:
        trial.chunk()
        if trial.due or trial.finished:
            if trial.at_end and trial.extra["stage"]:
                seen.append(trial.stage.name)
                before = trial.extra["pretrained"]
                after = trial.model.state_dict()
                count = len(trial.tasks)
                for name, value in before.items():
                    if name.startswith("head.") and model != "digits":
                        assert after[name][: len(value)].equal(value) and not after[name][len(value) :].equal(value)
                    elif name in ("body.logits", "body.templates_of"):  # a row per task
                        assert after[name][:count].equal(value) and len(after[name]) == count + 1
                    elif name == "body.norm_weight":
                        assert after[name][:, :count].equal(value)
                    elif "norm" in name or name.startswith("body.state"):
                        pass  # rows of tasks, below
                    else:
                        assert after[name].equal(value), name
                net = trial.pretrained().eval()
                images = next(iter(trial.tasks.values())).test.images[:5] / 255.0
                with torch.no_grad():
                    assert trial.model.eval()(images, 1).equal(net(images, 1)), "the other tasks are as they were"  # type: ignore[union-attr]
                trial.model.train()
            trial.after_evaluation(trial.metrics())
    expected = {
        "mixture": [n + s for s in ("", "_frozen") for n in (*trial.config.known, "random")],  # type: ignore[attr-defined]
        "trunk_patches": ["mnist"],
        "digits": ["random", "accuracy", "learned", "best"],
    }
    assert seen == expected[model]


def test_frozen_shares_stay_and_begin_where_they_should(data: Path) -> None:
    trial = trial_of("comp-transfer", data, "mixture")
    assert isinstance(trial, StagedTrial)
    first: dict[str, Tensor] = {}
    while not trial.finished:
        if trial.extra["stage"]:
            first.setdefault(trial.stage.name, trial.model.mixture(4))
        trial.chunk()
        if trial.due or trial.finished:
            if trial.at_end and trial.extra["stage"]:
                stays = trial.model.mixture(4).equal(first[trial.stage.name])
                assert stays == trial.stage.name.endswith("_frozen")
            trial.after_evaluation(trial.metrics())
    known = trial.pretrained().mixture()
    for number, name in enumerate(trial.config.known):  # type: ignore[attr-defined]
        assert first[name].equal(known[number]) and first[f"{name}_frozen"].equal(known[number])
    assert not any(first["random"].equal(xi) for xi in known)


def test_how_many_parameters_a_new_task_has(data: Path) -> None:
    trial = trial_of("comp-transfer", data, "mixture", steps=2, tune_steps=2)
    found = finish(trial).result["results"]
    channels, wide = 8, 48  # of a layer, before and after expansion
    norms = 4 * (2 * (wide + wide + wide // 4 + wide + channels)) + 2 * (channels + 128 + 256)
    assert found["mnist_frozen"]["trained"] == norms + 256 * 10 + 10
    assert found["mnist"]["trained"] - found["mnist_frozen"]["trained"] == 4 * 2
    assert (
        finish(trial_of("comp-transfer", data, "digits", tune_steps=2)).result["results"]["learned"]["trained"] == 4 * 2
    )


# ---------------------------------------------------------------- a new domain


@pytest.mark.parametrize("model", registry.get("comp-adapt").models)
def test_only_a_few_parameters_adapt(model: str, data: Path) -> None:
    trial = trial_of("comp-adapt", data, model)
    assert isinstance(trial, AdaptTrial) and list(trial.tasks) == ["original", "shear", "scale", "shot_noise"]
    while not trial.finished:
        if trial.extra["stage"] and trial.progress[0] == 0:
            begin = {k: v.clone() for k, v in trial.model.named_parameters()}
            assert trial.model.mixture(4).equal(trial.model.mixture(1)), "it begins with those of shear"
        trial.chunk()
        if not (trial.due or trial.finished):
            continue
        if trial.at_end and trial.extra["stage"]:
            moved = {k for k, v in trial.model.named_parameters() if not v.equal(begin[k])}
            if model == "isometric":
                assert moved == {"input_adapter.weight", "input_adapter.bias", "input_adapter.norm.weight",
                                 "input_adapter.norm.bias"} - ({"input_adapter.bias"} - moved)  # fmt: skip
            else:
                assert moved == {"body.logits"}
                changed_rows = (trial.model.body.logits != begin["body.logits"]).any(-1)  # type: ignore[union-attr]
                assert not changed_rows[:4].any() and changed_rows[4, 2:].all()
                assert changed_rows[4, :2].any() == (model != "half_shared")
        trial.after_evaluation(trial.metrics())
    results = trial.extra["results"]
    assert set(results) == {"pretrained", "source_only", "adversarial", "moments", "supervised"}
    assert set(results["source_only"]) == {"source", "target"}
    counts = {"isometric": 8 * 4 + 8 + 16, "compositional": 8, "half_shared": 4}
    assert all(results[method]["trained"] == counts[model] for method in ("adversarial", "moments", "supervised"))


def test_svhn_where_its_files_are(data: Path, tmp_path: Path) -> None:
    for name in ("mnist", "usps"):
        (tmp_path / name).symlink_to(data / name)
    assert "svhn" not in trial_of("comp-adapt", tmp_path).tasks
    svhn_folder(tmp_path / "svhn")
    sources.read.cache_clear()
    assert list(trial_of("comp-adapt", tmp_path).tasks)[-1] == "svhn"
    assert "svhn" not in trial_of("comp-adapt", tmp_path, svhn="no").tasks


def test_the_discriminator_learns_before_shares_listen_to_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained opponent would move shares at random, so it is trained alone first."""
    monkeypatch.setattr(adapt, "_WARM_UP", 30)
    trial = trial_of("comp-adapt", data, "compositional", steps=2, adapt_steps=2)
    losses: list[float] = []
    train = AdaptTrial._train_opponent
    monkeypatch.setattr(
        AdaptTrial, "_train_opponent", lambda self, loss: (losses.append(loss.item()), train(self, loss))[1]
    )
    trial.chunk()
    trial.after_evaluation(trial.metrics())
    assert isinstance(trial, AdaptTrial) and trial.stage.name == "adversarial"
    assert len(losses) == 30 and sum(losses[-5:]) < sum(losses[:5])
    assert trial.model.mixture(4).equal(trial.model.mixture(1))
    rates = {}
    for number, stage in enumerate(trial.stages[1:], 1):
        trial.start(number)
        rates[stage.name] = trial.optimizer.param_groups[0]["lr"]
    assert rates == {"adversarial": 0.003, "moments": 0.003, "supervised": 0.03}


def test_moment_distance_by_hand() -> None:
    known, new = torch.randn(3, 5, 4).double(), torch.randn(7, 4).double()
    total = 0.0
    for power in (1, 2):
        means = [
            [sum(row[f] ** power for row in d) / len(d) for f in range(4)] for d in (*known.tolist(), new.tolist())
        ]

        def apart(a: list[float], b: list[float]) -> float:
            return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

        total += sum(apart(m, means[3]) for m in means[:3]) / 3
        total += 2 / (3 * 2) * sum(apart(a, b) for a, b in itertools.combinations(means[:3], 2))
    assert float(alignment.moment_distance(known, new)) == pytest.approx(total / 2)


def test_adversary_and_heads_by_hand() -> None:
    known, new = torch.randn(6).double(), torch.randn(4).double()
    torch.manual_seed(3)
    found = float(alignment.discriminator_loss(known, new))
    torch.manual_seed(3)
    expected = 0.0
    for scores, goal in ((known, 0.0), (new, 1.0)):
        goals = goal + 0.1 * torch.rand_like(scores)
        p = scores.sigmoid()
        expected -= float((goals * p.log() + (1 - goals) * (1 - p).log()).mean()) / 2
    assert found == pytest.approx(expected)
    assert float(alignment.fooling_loss(new)) == pytest.approx(float(-(1 - new.sigmoid()).log().mean()))
    heads = alignment.TwoHeads(torch.randn(3, 5), torch.randn(3))
    features = torch.randn(6, 5)
    first, second = heads.first(features).softmax(-1), heads.second(features).softmax(-1)
    assert alignment.discrepancy(heads(features)).item() == pytest.approx((first - second).abs().mean().item())
    torch.testing.assert_close(heads.together(features).exp(), (first + second) / 2)
    assert [alignment.linear_rate((2.0, 1.0), step, 4) for step in (0, 2, 4)] == [2.0, 1.5, 1.0]


def test_opponents_learn_to_tell_domains_apart(data: Path) -> None:
    """The discriminator is trained on its own loss only, not on the net's fooling loss."""
    trial = trial_of("comp-adapt", data, "compositional", adapt_steps=20)
    while trial.extra["stage"] == 0:
        trial.chunk()
        if trial.due:
            trial.after_evaluation(trial.metrics())
    assert isinstance(trial, AdaptTrial) and trial.opponent is not None
    before = {k: v.clone() for k, v in trial.opponent.state_dict().items()}
    (new, known) = trial.batches(trial.generator("data"))
    images, labels = trial.new_data(new[0][0])
    theirs, right = trial.data(known[0])
    seen: list[Tensor] = []
    train = trial._train_opponent
    trial._train_opponent = lambda loss: (seen.append(loss.detach()), train(loss))[1]  # type: ignore[assignment, func-returns-value]
    trial._adversarial(images, labels, theirs, right).backward()
    after = {k: v.clone() for k, v in trial.opponent.state_dict().items()}
    assert len(seen) == 1 and any(not before[k].equal(after[k]) for k in before)
    trial.optimizer.step()
    assert all(after[k].equal(v) for k, v in trial.opponent.state_dict().items()), "the net's step leaves it alone"
