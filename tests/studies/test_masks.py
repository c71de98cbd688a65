"""The weight-mask studies: tasks say what the paper says, stages resume bit for bit, results are true."""

from __future__ import annotations

import copy
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastmod.models import MLP
from fastmod.runs import checkpoint, draw
from fastmod.runs.config import StudyError, changed
from fastmod.runs.engine import record_of
from fastmod.runs.study import Outcome, Record
from fastmod.studies import registry
from fastmod.studies.masks import addmul as mask_addmul
from fastmod.studies.masks import doubleadd as mask_doubleadd
from fastmod.studies.masks import figures as mask_figures
from fastmod.studies.masks.masking import MaskTrial
from fastmod.studies.masks.permuted_mnist import MaskPermutedTrial
from fastmod.tasks.arithmetic import digits_of
from tests.helpers.study_commands import fastmod, in_process, refused
from tests.helpers.study_hooks import kill, ticks, without_figures
from tests.helpers.study_runs import digits, outcome
from tests.helpers.surroundings import one_thread as one_thread

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"batch": 8, "steps": 4, "chunk": 2, "evaluate_every": 2, "samples": 2, "mask_lr": 3.0}
STUDIES: dict[str, dict[str, dict[str, Any]]] = {
    "mask-addmul": {"FNN": {"hidden": (6, 5)}, "LSTM": {"units": 4}},
    "mask-doubleadd": {"FNN": {"hidden": (6, 5)}, "LSTM": {"units": 4}, "LSTM_apart": {"units": 4}},
    "mask-permuted-mnist": {"FNN": {"hidden": (6, 5), "tasks": 3, "verify": False, "beta": 0.0}},
}
CASES = [(study, model) for study, models in STUDIES.items() for model in models]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits(tmp_path_factory.mktemp("digits"))


def trial_of(study: str, model: str, images: Path, seed: int = 0, **settings: Any) -> MaskTrial:
    wanted = {**TINY, **STUDIES[study][model], **settings}
    wanted |= {"data": str(images)} if study == "mask-permuted-mnist" else {"mask_steps": 6}
    found = registry.get(study)
    torch.manual_seed(seed)
    trial = found.trial(changed(found.defaults, wanted), model, seed, CPU)
    assert isinstance(trial, MaskTrial)
    return trial


def run(trial: MaskTrial) -> Record:
    last: dict[str, float] = {}
    while not trial.finished:
        trial.chunk()
        last = trial.metrics()
    return record_of(trial, trial.name, last)


def known(trial: MaskTrial) -> str:
    """All that a checkpoint holds of a trial, but for the time it took."""
    return checkpoint.digest({**trial.state(), "seconds": 0.0})


# ---------------------------------------------------------------- tasks


def decoded(one_hot: Tensor) -> list[int]:
    """Digits of blocks of ten."""
    blocks = one_hot.view(-1, 10)
    assert (blocks.sum(1) == 1).all() and ((blocks == 0) | (blocks == 1)).all()
    return blocks.argmax(1).tolist()


def test_addition_and_multiplication() -> None:
    for a, b, operation in [(0, 0, 0), (7, 45, 0), (99, 99, 0), (12, 34, 1), (99, 99, 1), (50, 2, 1)]:
        inputs = mask_addmul.inputs_of(torch.tensor([a, b]), torch.tensor(operation))
        assert inputs.shape == (42,)
        assert decoded(inputs[:40]) == [a % 10, a // 10, b % 10, b // 10], "least significant first"
        assert inputs[40:].tolist() == [1.0 - operation, float(operation)]
        result = (a * b if operation else a + b) % 100
        assert mask_addmul.answers_of(torch.tensor([a, b]), torch.tensor(operation)).tolist() == [
            result % 10, result // 10,
        ]  # fmt: skip


def test_double_addition() -> None:
    numbers = torch.tensor([[1, 2, 3, 4], [99, 1, 58, 77], [40, 60, 9, 9]])
    inputs, answers = mask_doubleadd.inputs_of(numbers), mask_doubleadd.answers_of(numbers)
    assert inputs.shape == (3, 80)
    for (a, b, c, d), shown, said in zip(numbers.tolist(), inputs, answers.tolist(), strict=True):
        assert decoded(shown) == [digit for number in (a, b, c, d) for digit in (number % 10, number // 10)]
        first, second = (a + b) % 100, (c + d) % 100
        assert said == [first % 10, first // 10, second % 10, second // 10]
    alone = mask_doubleadd.only(1, inputs)
    assert not alone[:, :40].any() and torch.equal(alone[:, 40:], inputs[:, 40:])


def test_a_mask_sees_only_its_operation(images: Path) -> None:
    trial = trial_of("mask-addmul", "FNN", images, batch=64)
    operations = {
        task: trial.batches_of(task, torch.Generator().manual_seed(0))[0][..., 40:].flatten(0, 1).unique(dim=0)
        for task in (None, "add", "mul")
    }
    assert len(operations[None]) == 2
    assert operations["add"].tolist() == [[1, 0]] and operations["mul"].tolist() == [[0, 1]]


class Watched(nn.Module):
    """Says nothing and keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        place = torch.arange(x.shape[1]).float().view(1, -1, 1) if x.dim() == 3 else torch.zeros(())
        return torch.arange(40.0).expand(*x.shape[:-1], 40) + 1000 * place


def test_how_nets_see_two_pairs(images: Path) -> None:
    inputs = mask_doubleadd.inputs_of(torch.tensor([[12, 34, 56, 78]]))
    first, second = mask_doubleadd.only(0, inputs), mask_doubleadd.only(1, inputs)
    said: dict[str, list[float]] = {}
    seen: dict[str, list[Tensor]] = {}
    for model in ("FNN", "LSTM", "LSTM_apart"):
        trial, net = trial_of("mask-doubleadd", model, images), Watched()
        assert isinstance(trial, mask_doubleadd.MaskDoubleAddTrial)
        scores = trial.scores_of(net, inputs, (0, 1))
        assert [s.shape for s in scores] == [(1, 20), (1, 20)]
        said[model], seen[model] = [s[0, 0].item() for s in scores], net.seen
    assert said == {"FNN": [0, 20], "LSTM": [5000, 5020], "LSTM_apart": [2000, 5020]}
    assert [torch.equal(a, b) for a, b in zip(seen["FNN"], (first, second), strict=True)] == [True, True]
    assert torch.equal(seen["LSTM"][0], inputs.expand(6, 80).unsqueeze(0))
    assert torch.equal(seen["LSTM_apart"][0][0], torch.cat([first] * 3 + [second] * 3))


@pytest.mark.parametrize("model", ["FNN", "LSTM", "LSTM_apart"])
def test_a_mask_of_one_pair_is_learned_without_the_other(images: Path, model: str) -> None:
    """In the full task both pairs are in view."""
    trial = trial_of("mask-doubleadd", model, images)
    assert isinstance(trial, mask_doubleadd.MaskDoubleAddTrial)
    inputs, answers = (tensor[0] for tensor in trial.batches_of(None, torch.Generator().manual_seed(0)))
    for stage, visible in enumerate([(True, True), (True, False), (False, True)]):
        trial.extra["stage"] = stage
        net = Watched()
        trial.loss_of(net, inputs, answers)
        halves = torch.cat([seen.reshape(-1, 2, 40) for seen in net.seen])
        assert (halves[:, 0].any().item(), halves[:, 1].any().item()) == visible


def test_sizes_of_the_paper() -> None:
    large = mask_doubleadd.MaskDoubleAdd().trial(mask_doubleadd.MaskDoubleAddConfig(), "FNN_large", 0, CPU)
    weights = sum(p.numel() for p in large.model.parameters() if p.dim() == 2)
    assert weights == 80 * 2000 + 3 * 2000**2 + 2000 * 40
    shapes = [tuple(p.shape) for p in MLP((42, 400, 400, 200, 20)).parameters() if p.dim() == 2]
    assert shapes == [(400, 42), (400, 400), (200, 400), (20, 200)]


def test_initial_weights_of_double_addition_are_torchs() -> None:
    nets = []
    for scale in (1.0, 6**0.5):
        config = changed(mask_doubleadd.MaskDoubleAddConfig(), {"hidden": "300,300", "init_scale": scale})
        torch.manual_seed(0)
        nets.append(mask_doubleadd.MaskDoubleAdd().trial(config, "FNN", 0, CPU).model)
    assert mask_doubleadd.MaskDoubleAddConfig().init_scale == 1.0
    torch.manual_seed(0)
    plain, scaled = (dict(net.named_parameters()) for net in nets)
    assert torch.equal(plain["layer1.weight"], nn.Linear(80, 300).weight)
    for name, weight in plain.items():
        torch.testing.assert_close(scaled[name], weight * (6**0.5 if weight.dim() == 2 else 1), rtol=1e-6, atol=0)


def test_initial_weights_of_the_lstm() -> None:
    """Variances, gains and biases of the paper's authors: the cell's input 5/3 as large, the forget gate open."""
    torch.manual_seed(0)
    config = mask_doubleadd.MaskDoubleAddConfig()
    weights = dict(config.net("LSTM", 80, 40).named_parameters())
    for layer, inputs in enumerate((80, 256)):
        read, state = weights[f"lstm.weight_ih_l{layer}"], weights[f"lstm.weight_hh_l{layer}"]
        for gate, gain in enumerate((1, 1, 5 / 3, 1)):
            part = slice(256 * gate, 256 * (gate + 1))
            assert read[part].std().item() == pytest.approx(gain * (1 / (inputs + 256)) ** 0.5, rel=0.03)
            assert weights[f"lstm.bias_ih_l{layer}"][part].tolist() == [float(gate == 1)] * 256
        cell = state[512:768]
        torch.testing.assert_close(cell @ cell.mT, torch.eye(256) * (25 / 18), rtol=1e-4, atol=1e-4)
        assert state[:256].std().item() == pytest.approx((1 / 512) ** 0.5, rel=0.03)
        assert not weights[f"lstm.bias_hh_l{layer}"].any()
    plain = dict(changed(config, {"lstm_init": "torch"}).net("LSTM", 80, 40).named_parameters())
    assert plain["lstm.weight_hh_l0"].abs().max() <= 1 / 16


# ---------------------------------------------------------------- stages


def test_stages(images: Path) -> None:
    trial = trial_of("mask-addmul", "FNN", images, steps=4, mask_steps=6)
    assert trial.steps == 16
    assert [trial.stage_at(step) for step in (0, 3, 4, 9, 10, 15, 16)] == [0, 0, 1, 1, 2, 2, 2]
    optimizers, tasks = set(), []
    while not trial.finished:
        before = {name: p.clone() for name, p in trial.model.named_parameters()}
        trial.chunk()
        tasks.append(trial.task)
        optimizers.add(id(trial.optimizer))
        moved = any(not torch.equal(p, before[name]) for name, p in trial.model.named_parameters())
        assert moved == (trial.task is None), "masks are trained on a frozen net"
    assert tasks == [None] * 2 + ["add"] * 3 + ["mul"] * 3
    assert list(trial.extra["masks"]) == ["add"], "the last mask is still in the logits"


@pytest.mark.parametrize(("mask_batch", "expected"), [(None, 8), (24, 24)])
def test_masks_may_have_a_batch_of_their_own(images: Path, mask_batch: int | None, expected: int) -> None:
    trial = trial_of("mask-addmul", "FNN", images, batch=8, mask_batch=mask_batch, beta=3.0)
    generator = torch.Generator()
    assert all(len(part) == 8 for tensor in trial.batches_of(None, generator) for part in tensor)
    batch = [tensor[0] for tensor in trial.batches_of("add", generator)]
    assert all(len(part) == expected for part in batch)
    while trial.task is None:
        trial.chunk()
    assert trial.masked is not None
    torch.manual_seed(5)
    data_only = trial.loss_of(trial.masked, *batch)
    torch.manual_seed(5)
    with_penalty = trial.loss(*batch)
    torch.testing.assert_close(with_penalty, data_only + trial.masked.penalty() * 3.0 / expected)


@pytest.mark.parametrize(("study", "model"), CASES)
def test_resumed_anywhere_is_the_same(study: str, model: str, images: Path, tmp_path: Path) -> None:
    """Also from a checkpoint between two stages, and of a trial that is over."""
    whole = trial_of(study, model, images)
    files = []
    while True:
        files.append(tmp_path / f"{whole.step}.pt")
        checkpoint.save(files[-1], "me", whole.state())
        if whole.finished:
            break
        whole.chunk()
        whole.metrics()  # evaluation must leave no trace
    expected, result = known(whole), record_of(whole, model, {}).result
    for file in files:
        torch.rand(7)  # somebody else's numbers
        again = trial_of(study, model, images, seed=0)
        again.load_state(checkpoint.load(file, "me"))
        while not again.finished:
            again.chunk()
        assert known(again) == expected, file.stem
    assert record_of(again, model, {}).result == result


def test_checkpoint_of_another_net(images: Path) -> None:
    trial = trial_of("mask-addmul", "FNN", images)
    while trial.task is None:
        trial.chunk()
    other = trial_of("mask-addmul", "FNN", images, hidden=(3,))
    with pytest.raises(StudyError, match="does not fit"):
        other.load_state(trial.state())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks and signals")
def test_killed_in_a_mask_stage(tmp_path: Path) -> None:
    sizes = {**TINY, "mask_steps": 6, "hidden": "6,5", "checkpoint_seconds": 2}
    words = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    args = ("study", "mask-doubleadd", "--model", "FNN", "--seeds", "1", *words)
    hooks = (ticks(), without_figures())
    assert fastmod(*args, "--out", tmp_path / "whole", hooks=hooks).code == 0
    assert fastmod(*args, "--out", tmp_path / "cut", hooks=(*hooks, kill("told FNN-s1 12"))).killed
    assert fastmod("study", "--resume", tmp_path / "cut", hooks=hooks).code == 0
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


# ---------------------------------------------------------------- results


@pytest.mark.parametrize(("study", "model"), CASES)
def test_result(study: str, model: str, images: Path) -> None:
    trial = trial_of(study, model, images)
    result = json.loads(json.dumps(run(trial).result, allow_nan=False))
    tasks, layers = list(trial.tasks), [*(n for n in result["weights"] if n != "total"), "total"]
    shapes = {name: p.numel() for name, p in trial.model.named_parameters()}
    masked_biases = any("bias" in name for name in layers)
    assert masked_biases == (study == "mask-permuted-mnist")
    assert all(result["weights"][name] == shapes[name] for name in layers[:-1])
    assert list(result["accuracy"]) == list(result["masked"]) == list(result["kept"]) == tasks
    for task in tasks:
        assert list(result["masked"][task]) == list(result["inverted"][task]) == tasks
        assert list(result["kept"][task]) == layers
        assert result["kept"][task]["total"] == sum(result["kept"][task][name] for name in layers[:-1])
        assert 0 < result["kept"][task]["total"] < result["weights"]["total"], "a test of something"
        assert sum(result["histogram"][task]) == result["weights"]["total"] and len(result["histogram"][task]) == 20
    compared = tasks[1:] if study == "mask-permuted-mnist" else tasks
    assert list(result["sharing"]) == compared
    assert all(list(result["sharing"][task]) == layers for task in compared)


@pytest.mark.parametrize(("study", "model"), [("mask-addmul", "FNN"), ("mask-doubleadd", "LSTM_apart")])
def test_accuracies_are_those_of_the_net_with_weights_set_to_zero(study: str, model: str, images: Path) -> None:
    trial = trial_of(study, model, images, mask_steps=2)
    result = run(trial).result
    for task, mask in trial.masks().items():
        for key, sign in (("masked", False), ("inverted", True)):
            net = copy.deepcopy(trial.model)
            for name, weight in net.named_parameters():
                if name in mask:
                    weight.data[mask[name] == sign] = 0
            with torch.no_grad():
                assert trial.accuracies(net) == result[key][task]


def test_which_operation_is_performed(images: Path) -> None:
    trial = trial_of("mask-addmul", "FNN", images)
    assert isinstance(trial, mask_addmul.MaskAddMulTrial)

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            numbers = (x[:, :40].view(-1, 2, 2, 10).argmax(-1) * torch.tensor([1, 10])).sum(-1)
            return nn.functional.one_hot(digits_of(numbers.sum(-1) % 100), 10).flatten(1).float()

    for asked in (0, 1):
        assert trial.performed(Adds(), asked) == {"add": 1.0, "mul": 0.0, "none": 0.0}
    assert trial.accuracies(Adds())["add"] == 1.0
    same = sum((a + b) % 100 == a * b % 100 for a in range(100) for b in range(100)) / 10000
    trial.step = trial.steps
    assert trial.accuracies(Adds())["mul"] == pytest.approx(same), "some pairs have the same sum and product"


def test_later_tasks_leave_the_weights_of_earlier_ones(images: Path) -> None:
    trial = trial_of("mask-permuted-mnist", "FNN", images)
    assert isinstance(trial, MaskPermutedTrial)
    while trial.extra["stage"] == 0:
        first = {name: p.clone() for name, p in trial.model.named_parameters()}
        trial.chunk()
    used = trial.masks()["task1"]
    result = run(trial).result
    free_moved = False
    for name, p in trial.model.named_parameters():
        assert torch.equal(p[used[name]], first[name][used[name]])
        free_moved |= not torch.equal(p[~used[name]], first[name][~used[name]])
    assert free_moved
    assert result["learned"] == result["remembered"], "nothing is forgotten"
    orders = {task: trial.permutation(task).tolist() for task in trial.tasks}
    assert len({tuple(order) for order in orders.values()}) == 3
    assert all(sorted(order) == list(range(784)) for order in orders.values())
    shares = [list(result["occupied"][task].values()) for task in trial.tasks]
    assert all(a <= b for early, late in pairwise(shares) for a, b in zip(early, late, strict=True))


def test_new_weights_may_begin_unlikely(images: Path) -> None:
    trial = trial_of("mask-permuted-mnist", "FNN", images, new_init=-1.0, mask_lr=1e-9)
    assert trial.masked is not None
    trial.masked.logits["layer1/weight"].data[0] = -5.0  # what the first task does not keep
    while trial.extra["stage"] == 0:
        trial.chunk()
    logits = trial.masked.logits["layer1/weight"]
    assert torch.allclose(logits[0], torch.tensor(-1.0)) and torch.allclose(logits[1:], torch.tensor(2.0))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"mask_steps": 75}, "mask_steps"), ({"mask_steps": 0}, "mask_steps"), ({"mask_lr": 0}, "mask_lr"),
        ({"mask_lr_end": 2.0}, "mask_lr_end"),
        ({"beta": "nan"}, "beta"), ({"mask_init": "inf"}, "mask_init"), ({"samples": 3}, "samples"),
        ({"samples": 0}, "samples"), ({"mask_batch": 6}, "mask_batch"), ({"mask_batch": 0}, "mask_batch"),
        ({"units": 0}, "units"), ({"lstm_init": "he"}, "lstm_init"), ({"lstm_layers": 0}, "lstm_layers"),
        ({"hidden": "4,0"}, "hidden"), ({"init_scale": 0}, "init_scale"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(StudyError, match=word):
        changed(registry.get("mask-addmul").defaults, settings)


# ---------------------------------------------------------------- tables and figures


@pytest.mark.slow
@pytest.mark.parametrize(("study", "model"), CASES)
def test_table_and_figures(study: str, model: str, images: Path, tmp_path: Path) -> None:
    trials = [trial_of(study, model, images, seed=seed) for seed in (0, 1)]
    records = [run(trial) for trial in trials]
    found = Outcome(trials[0].config, records, [])
    rows = registry.get(study).table(found)
    assert all(row.name.startswith(f"{model}, ") and row.paper for row in rows)
    assert len({row.name for row in rows}) == len(rows)
    assert any("shared in total" in row.name for row in rows)
    figures = registry.get(study).figures(found)
    assert len(figures) >= 4
    for stem, (figure, caption) in figures.items():
        assert caption.endswith(".")
        draw.save(figure, tmp_path / f"{stem}.png")
        assert (tmp_path / f"{stem}.png").stat().st_size > 5000


def test_bars_are_the_numbers(images: Path) -> None:
    record = run(trial_of("mask-addmul", "FNN", images))
    figure = mask_figures.accuracy_under_masks([record])
    heights = [bar.get_height() for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
    result = record.result
    expected = [
        value
        for task in ("add", "mul")
        for value in (
            result["accuracy"][task],
            *(result[key][mask][task] for key in ("masked", "inverted") for mask in ("add", "mul")),
        )
    ]
    assert heights == pytest.approx(expected)


def test_confusion_difference(tmp_path: Path) -> None:
    changes = {f"without {c}": torch.randn(3, 3).clamp(-1, 1).tolist() for c in "abc"}
    figure = mask_figures.confusion(changes, list("abc"), columns=2)
    shown = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert shown == list(changes)
    draw.save(figure, tmp_path / "confusion.png")


def test_command(tmp_path: Path) -> None:
    sizes = [
        word for key, value in {**TINY, "mask_steps": 2, "hidden": "5"}.items() for word in ("--set", f"{key}={value}")
    ]
    done = in_process("study", "mask-addmul", "--model", "FNN_small", "--seeds", "0", *sizes, "--out", tmp_path / "run")
    assert done.code == 0, done.text
    names = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert {"sharing_FNN_small.png", "accuracy_FNN_small.png", "weights_FNN_small.png"} <= names
    refused(in_process("inspect", tmp_path / "run"), "nothing to inspect")
