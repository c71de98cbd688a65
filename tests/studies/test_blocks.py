"""The tasks of the block-operations studies say what the paper says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.models import FNN, BlockTransformer
from fastmod.nn import SMFR
from fastmod.runs.config import StudyError, changed
from fastmod.runs.study import Outcome, Record, Row
from fastmod.studies.blocks import addmul, algo, bpmnist, doubleadd, models
from fastmod.tasks import arithmetic, rule

CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", ["SMFR", "SMFR_gumbel", "SMFR_no_context", "SMFR_plain", "FNN", "Transformer"])
def test_models_map_blocks_to_blocks(name: str) -> None:
    model = models.build(models.ModelConfig(heads=4), name, 6, 5, 10)
    out = model(torch.randn(3, 6, 10))
    assert out.shape == (3, 5, 10)
    (out.sum() + models.RangePenalty(models.ModelConfig(), 6, 5)(model, 3)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_unknown_model() -> None:
    for name in ("RNN", "SMFR_typo", "FNN2"):
        with pytest.raises(StudyError, match=name):
            models.build(models.ModelConfig(), name, 6, 5, 10)


def test_sizes() -> None:
    """(i+1) h + (L-1) (h+1) h + (h+1) o parameters; the Transformer's range is the paper's 20k to 500k."""
    count = sum(p.numel() for p in FNN(6, 5, 10, 300, 4).parameters())
    assert count == 61 * 300 + 3 * 301 * 300 + 301 * 50
    small, large = (BlockTransformer(6, 5, 10, 1, inner, layers) for inner, layers in ((400, 1), (2000, 6)))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (small, large)]
    assert 15_000 < sizes[0] < 25_000 and 450_000 < sizes[1] < 550_000
    about_four_million = [
        sum(p.numel() for p in models.build(bpmnist.BPMNISTConfig(), name, 5, 1, 196).parameters())
        for name in bpmnist.BPMNIST.default_models
    ]
    assert all(3.3e6 < size < 4.7e6 for size in about_four_million), about_four_million


# ---------------------------------------------------------------- ALGO


def rule_by_hand(digits: list[int], task: int) -> list[int]:
    a, b, c, d, e = ((role + task) % 5 for role in range(5))
    after = list(digits)
    after[e] = ((digits[a] if digits[c] > digits[d] else digits[b]) + 1) % 10
    return after


def test_algo_rule() -> None:
    digits = torch.randint(10, (500, 5), generator=generator())
    task = torch.randint(5, (500,), generator=generator(1))
    expected = [rule_by_hand(d, t) for d, t in zip(digits.tolist(), task.tolist(), strict=True)]
    assert rule.apply_rule(digits, task).tolist() == expected


def test_algo_sequences_chain() -> None:
    digits, tasks, states = rule.sequences(64, 9, generator())
    for task, state in zip(tasks, states, strict=True):
        digits = rule.apply_rule(digits, task)
        assert torch.equal(digits, state)


def test_algo_trains_on_two_applications_fed_back() -> None:
    """The loss is the squared error after exactly two calls of the model, the second on the first's raw output."""
    config = changed(algo.AlgoConfig(), {"batch": 4, "width": 2, "depth": 0, "hidden": 8})
    trial = algo.AlgoTrial(config, "SMFR", 0, CPU)
    seen: list[tuple[Tensor, Tensor]] = []
    trial.model.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    start, tasks, goal = (t[0] for t in trial.batches(generator()))
    loss = trial.loss(start, tasks, goal)
    assert len(seen) == 2
    assert torch.equal(seen[1][0][:, :5], seen[0][1])
    for (given, _), task in zip(seen, tasks, strict=True):
        assert torch.equal(given[:, 5], task) and (task.sum(-1) == 1).all()
    torch.testing.assert_close(loss, F.mse_loss(seen[1][1], goal))  # fresh logits are in range: no penalty
    digits = rule.apply_rule(start.argmax(-1), tasks[0].argmax(-1))
    assert torch.equal(rule.apply_rule(digits, tasks[1].argmax(-1)), goal.argmax(-1))


class Oracle(nn.Module):
    """Applies the rule to one-hot blocks exactly; ``wrong`` spoils one variable of a share of the inputs."""

    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__()
        self.wrong, self.weight = wrong, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        digits = rule.apply_rule(x[:, :5].argmax(-1), x[:, 5].argmax(-1))
        digits[: round(self.wrong * len(x)), 0] += 1
        return F.one_hot(digits % 10, 10).float()


def test_algo_accuracy_counts_whole_states() -> None:
    trial = algo.AlgoTrial(algo.AlgoConfig(width=2, depth=0), "SMFR", 0, CPU)
    trial.model = Oracle()
    perfect = trial.metrics()
    assert perfect["ood_odd"] == perfect["ood_even"] == perfect["accuracy"] == 1.0
    trial.model = Oracle(wrong=0.5)
    spoiled = trial.metrics()
    assert spoiled["accuracy_1"] == pytest.approx(0.5, abs=0.01)
    assert spoiled["variables_1"] == pytest.approx(0.9, abs=0.01)
    assert spoiled["ood_odd"] == pytest.approx(sum(spoiled[f"accuracy_{n}"] for n in (1, 3, 5, 7, 9)) / 5)
    assert spoiled["ood_even"] == pytest.approx(sum(spoiled[f"accuracy_{n}"] for n in (4, 6, 8)) / 3)


def test_algo_noisy_permutes_neurons_before_each_application() -> None:
    config = changed(algo.AlgoConfig(), {"noisy": True, "width": 2, "depth": 0, "hidden": 8})
    trial, twin = (algo.AlgoTrial(config, "SMFR", 3, CPU) for _ in range(2))
    assert trial.noise is not None and torch.equal(trial.noise, twin.noise)
    assert sorted(trial.noise.tolist()) == list(range(50)) and trial.noise.tolist() != list(range(50))
    seen: list[Tensor] = []
    trial.model.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    state, task = torch.randn(2, 5, 10), torch.randn(2, 10)
    trial.advance(state, task)
    assert torch.equal(seen[0][:, :5].flatten(1), state.flatten(1)[:, trial.noise])
    assert torch.equal(seen[0][:, 5], task)


# ---------------------------------------------------------------- arithmetic


def test_restricted_and_excluded_pairs_divide_all_pairs() -> None:
    drawn = {tuple(p) for p in arithmetic.restricted_pairs((5000,), generator()).tolist()}
    excluded = {tuple(p) for p in arithmetic.excluded_pairs(CPU).tolist()}
    assert drawn | excluded == set(itertools.product(range(10), range(10)))
    assert not drawn & excluded and len(drawn) == len(excluded) == 50


def test_a_net_without_reuse_gets_nothing_right() -> None:
    """Why the paper's FNNs get 0.0: for each digit, sums in training and in the test have no value in common."""
    for digit in range(10):
        trained = {(digit + other) % 10 for other in range(10) if (digit < 5) != (other < 5)}
        tested = {(digit + other) % 10 for other in range(10) if (digit < 5) == (other < 5)}
        assert not trained & tested


def test_doubleadd_blocks() -> None:
    first, second = (torch.randint(10, (40, 2), generator=generator(s)) for s in (0, 1))
    task = torch.arange(40) % 2
    blocks, digit = doubleadd.blocks_of(first, second, task)
    assert blocks.shape == (40, 5, 10) and (blocks.sum(-1) == 1).all()
    assert torch.equal(blocks.argmax(-1), torch.cat([first, second, task[:, None]], 1))
    pairs = [(b if t else a) for t, a, b in zip(task.tolist(), first.tolist(), second.tolist(), strict=True)]
    assert digit.tolist() == [sum(pair) % 10 for pair in pairs]


@pytest.mark.parametrize("always", [True, False])
def test_doubleadd_trains_the_second_pair_restricted(always: bool) -> None:
    config = changed(doubleadd.DoubleAddConfig(), {"alternate_split": not always, "width": 2, "hidden": 8})
    blocks, goal = doubleadd.DoubleAddTrial(config, "SMFR_softmax", 0, CPU).batches(generator())
    digits = blocks.argmax(-1).flatten(0, 1)  # [N, 5]
    mixed = (digits[:, 2] < 5) != (digits[:, 3] < 5)
    chosen = digits[:, 4] == 1
    assert mixed[chosen].all() and mixed[~chosen].all().item() is always
    assert ((digits[:, 0] < 5) == (digits[:, 1] < 5)).any()
    first, second = digits[:, :2].sum(1) % 10, digits[:, 2:4].sum(1) % 10
    assert torch.equal(goal.flatten(0, 1).argmax(-1), torch.where(chosen, second, first))


@pytest.mark.parametrize(("left", "limited"), [(0, addmul.MULTIPLY), (100, addmul.ADD)])
def test_addmul_stages(left: int, limited: int) -> None:
    config = changed(addmul.AddMulConfig(), {"width": 1, "depth": 1, "layers": 1, "hidden": 8})
    trial = addmul.AddMulTrial(config, "SMFR_softmax", 0, CPU)
    trial.extra["left"] = left
    blocks, digit = trial.batches(generator())
    x, y, task = blocks.argmax(-1).flatten(0, 1).unbind(-1)
    mixed = (x < 5) != (y < 5)
    assert mixed[task == limited].all() and not mixed[task != limited].all()
    assert torch.equal(digit.flatten(), torch.where(task == addmul.ADD, x + y, x * y) % 10)


def test_addmul_sets_aside_interferes_and_returns() -> None:
    config = changed(
        addmul.AddMulConfig(),
        {
            "thresholds": (0.0, 1e-6),
            "interference": 100,
            "steps": 100,
            "width": 1,
            "depth": 1,
            "layers": 1,
            "hidden": 8,
        },
    )
    trial = addmul.AddMulTrial(config, "SMFR_softmax", 0, CPU)
    at_switch = None
    found = []
    while not trial.finished:
        trial.chunk()
        metrics = trial.metrics()
        found.append((trial.extra["left"], metrics["preparation_accuracy"]))
        before = trial.extra["left"]
        trial.after_evaluation(metrics)
        weights = [p.detach().clone() for p in trial.model.parameters()]
        if before == 0 and trial.extra["left"] == 100:
            at_switch = weights
        elif before == 50:  # interference has just ended: the model is what it was at the switch
            assert at_switch is not None
            assert all(torch.equal(a, b) for a, b in zip(weights, at_switch, strict=True))
    measured = [accuracy for left, accuracy in found if left == 50]
    assert trial.extra["accuracies"] == measured and measured
    assert trial.extra["prepared"] <= config.steps


def test_addmul_grid_is_the_papers() -> None:
    config = addmul.AddMulConfig()
    smfr = {tuple(addmul.architecture(config, "SMFR_softmax", seed).items()) for seed in range(63)}
    assert len(smfr) == 63  # every architecture once
    assert {dict(a)["width"] for a in smfr} == set(range(1, 8)) and {dict(a)["layers"] for a in smfr} == {1, 2, 3}
    assert len({tuple(addmul.architecture(config, "FNN", seed).items()) for seed in range(9)}) == 9
    chosen = changed(config, {"width": 5})
    assert "width" not in addmul.architecture(chosen, "SMFR_gumbel", 0)


# ---------------------------------------------------------------- BPMNIST


def test_bpmnist_permutations_are_balanced() -> None:
    assert len(set(bpmnist.PERMUTATIONS)) == 8
    for position in range(4):
        blocks = [order[position] for order in bpmnist.PERMUTATIONS]
        assert all(blocks.count(b) == 2 for b in range(4))
        assert all(blocks[4:].count(b) == 1 for b in range(4))


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten images of each digit, dark but for the first pixel of each block: digit / 10 + block / 100."""
    labels = torch.arange(100) % 10
    blocks = torch.zeros(100, 4, 196)
    blocks[:, :, 0] = (10 * labels[:, None] + torch.arange(4)) / 100
    rows = bpmnist._as_blocks(255 * blocks)
    monkeypatch.setattr(bpmnist, "_images", lambda *_: (rows, labels, rows, labels))


def bpmnist_trial(name: str = "SMFR", **settings: object) -> bpmnist.BPMNISTTrial:
    torch.manual_seed(0)
    config = changed(bpmnist.BPMNISTConfig(), {"hidden": 8, "layers": 1, "batch": 64, **settings})
    return bpmnist.BPMNISTTrial(config, name, 0, CPU)


@pytest.mark.usefixtures("digits")
def test_bpmnist_removes_a_digit_from_each_test_permutation() -> None:
    trial = bpmnist_trial()
    places, labels, task = (t.flatten(0, 1) for t in trial.batches(generator()))
    torch.testing.assert_close(labels, trial.train_labels[(places[:, 0] - 8) // 4])
    for number in range(8):
        present = set(labels[task == number].tolist())
        assert present == set(range(10)) - ({bpmnist.REMOVED[number - 4]} if number >= 4 else set())


@pytest.mark.usefixtures("digits")
def test_bpmnist_blocks_are_permuted_as_the_task_says() -> None:
    trial = bpmnist_trial()
    task = torch.arange(8)
    blocks = trial.train_blocks[bpmnist.places_of(torch.arange(8), task)]
    for number, order in enumerate(bpmnist.PERMUTATIONS):
        assert (100 * blocks[number, :4, 0] % 10).round().tolist() == list(order)
        assert blocks[number, 4].argmax() == number and blocks[number, 4].sum() == 1


@pytest.mark.slow
@pytest.mark.usefixtures("digits")
def test_bpmnist_bias_pulls_routing_to_the_inverse_for_its_steps_only() -> None:
    trial = bpmnist_trial("SMFR_bias", bias_steps=300, lr=1e-2, clip=1.0, hidden=32)
    for _ in range(6):
        trial.chunk()
    assert trial.step == 300
    other = bpmnist_trial("SMFR", lr=1e-2, clip=1.0, hidden=32)
    for _ in range(6):
        other.chunk()
    places, labels, task = (t[0] for t in trial.batches(generator()))
    blocks = trial.train_blocks[places]
    assert trial._routing_loss(blocks, task) < 0.1 < 1.0 < other._routing_loss(blocks, task)
    assert trial.metrics()["difference"] < 0.05
    scores = trial.model(blocks)[:, 0, :10]
    plain = F.cross_entropy(scores, labels) + trial.penalty(trial.model, len(blocks))
    torch.testing.assert_close(trial.loss(places, labels, task), plain)  # the bias is over


def test_bpmnist_indicators_of_known_routings() -> None:
    permutations = torch.tensor(bpmnist.PERMUTATIONS)
    ideal = torch.zeros(8, 3, 5, 4)
    fixed = torch.zeros(8, 3, 5, 4)
    for number, order in enumerate(bpmnist.PERMUTATIONS):
        for target in range(4):
            ideal[number, :, order.index(target), target] = 1  # reads the image's block wherever it stands
            fixed[number, :, target, target] = 1  # reads the same position always
    found = bpmnist.indicators(ideal, permutations)
    assert found["sharpness"] == pytest.approx(1) and found["difference"] == pytest.approx(0)
    assert found["fairness"] == pytest.approx(1)
    found = bpmnist.indicators(fixed, permutations)
    assert found["sharpness"] == pytest.approx(1) and found["difference"] > 0.5
    found = bpmnist.indicators(torch.full((8, 3, 5, 4), 0.2), permutations)
    assert found["sharpness"] == pytest.approx(0, abs=1e-6) and found["difference"] == pytest.approx(0)
    ideal[:, :, :, 0] = 0
    for number, order in enumerate(bpmnist.PERMUTATIONS):
        ideal[number, :, order.index(1), 0] = 1  # block 0 is never read
    assert bpmnist.indicators(ideal, permutations)["fairness"] == 0


@pytest.mark.usefixtures("digits")
def test_bpmnist_test_accuracy_is_over_the_last_four() -> None:
    trial = bpmnist_trial()

    class Knows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            digit = (10 * x[:, :4, 0].amin(1) + 0.01).long()
            digit = torch.where(x[:, 4].argmax(-1) < 4, digit, (digit + 1) % 10)  # wrong on the test permutations
            return F.one_hot(digit, 196)[:, None].float()

    trial.model = Knows()
    found = trial.evaluate()
    assert found["accuracy"] == 1.0 and found["accuracy_test"] == 0.0 and found["accuracy_removed"] == 0.0


# ---------------------------------------------------------------- tables


def test_row_statistics() -> None:
    row = Row("x", "-", [1.0, 2.0, 3.0], 10, 1.0)
    assert row.mean == 2.0 and row.error == pytest.approx(1 / math.sqrt(3))
    assert Row("x", "-", [1.0], 10, 1.0).error is None and Row("x", "-", [], 10, 1.0).ours == "-"


def test_tables_have_the_printed_values_beside_ours() -> None:
    records = [Record("SMFR", s, 100, 6.0, 5, {"ood_even": 1.0, "ood_odd": 0.5 + s, "accuracy": 1.0}) for s in (0, 1)]
    rows = algo.Algo().table(Outcome(algo.AlgoConfig(), records, []))
    odd = next(row for row in rows if "OOD_odd" in row.name)
    assert odd.paper == "1.000 ± 0.000" and odd.mean == 1.0 and odd.steps == 100 and odd.minutes == pytest.approx(0.2)
    results = {f"preparation_{t:g}": 0.1 for t in (0.7, 0.8)} | {"architecture": {"layers": 2}}
    some = [Record("SMFR_softmax", 0, 100, 6.0, 250_000, results), Record("FNN", 0, 100, 6.0, 20_000, results)]
    rows = addmul.AddMul().table(Outcome(addmul.AddMulConfig(), some, []))
    by_name = {row.name: row for row in rows}
    assert by_name["threshold 0.7, FNN"].paper == "0.032 ± 0.0034"
    assert by_name["threshold 0.8, SMFR_softmax, HIGH"].paper == "0.186"
    assert by_name["threshold 0.7, FNN, LOW"].paper == "0.035"
    assert by_name["threshold 0.7, SMFR, 2 hidden layers"].paper == "0.134"
    assert by_name["threshold 1, FNN"].values == []  # not reached


@pytest.mark.parametrize("study", [algo.Algo(), addmul.AddMul(), doubleadd.DoubleAdd()])
def test_examples_fit_the_model(study) -> None:  # type: ignore[no-untyped-def]
    config = changed(study.defaults, {"width": 2, "depth": 1, "layers": 1, "hidden": 8})
    trial = study.trial(config, study.models[0], 0, CPU)
    assert isinstance(trial.model, SMFR)
    for blocks in study.examples(config, CPU).values():
        assert blocks.shape[1:] == (len(study.blocks[0]), 10) and len(blocks) > 10
        assert trial.model(blocks).shape[1] == len(study.blocks[1])


# ---------------------------------------------------------------- settings that cannot be


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (algo.AlgoConfig(), {"applications": 0}),
        (algo.AlgoConfig(), {"width": 0}),
        (algo.AlgoConfig(), {"depth": -1}),
        (algo.AlgoConfig(), {"transformer_layers": 0}),
        (algo.AlgoConfig(), {"fnn_width": 0}),
        (algo.AlgoConfig(), {"fnn_depth": -1}),
        (algo.AlgoConfig(), {"checkpoint_seconds": "nan"}),
        (addmul.AddMulConfig(), {"thresholds": "0.5,0.5"}),
        (addmul.AddMulConfig(), {"thresholds": "nan"}),
        (addmul.AddMulConfig(), {"thresholds": "0.5,1.5"}),
        (addmul.AddMulConfig(), {"interference": 75}),
        (addmul.AddMulConfig(), {"loss": "hinge"}),
        (bpmnist.BPMNISTConfig(), {"bias_steps": -1}),
    ],
)
def test_settings_that_cannot_be(config, settings) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(StudyError, match=next(iter(settings))):
        changed(config, settings)


@pytest.mark.usefixtures("digits")
def test_bias_needs_a_block_for_every_quarter() -> None:
    with pytest.raises(StudyError, match="width >= 4"):
        bpmnist_trial("SMFR_bias", width=3)
