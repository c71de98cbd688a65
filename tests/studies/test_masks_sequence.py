"""The mask studies on SCAN, mathematics and CIFAR-10: their nets, their data, and tiny trials through all stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastmod.masks import MaskedModel
from fastmod.models import CNN, LSTMEncoderDecoder, ResNet, SequenceTransformer
from fastmod.models.encoder_decoders import positional_encoding, shifted_right
from fastmod.runs.config import StudyError, changed
from fastmod.runs.study import Outcome, Record, Study
from fastmod.studies import registry
from fastmod.studies.masks import cifar as mask_cifar
from fastmod.studies.masks import class_removal
from fastmod.studies.masks import math as mask_math
from fastmod.studies.masks import scan as mask_scan
from fastmod.studies.masks.masking import MaskTrial
from fastmod.studies.masks.sequences import bucketed_by_length, exact_match, sequence_loss, trim_padding
from tests.data.test_data_masks import cifar_folder

CPU = torch.device("cpu")
SOURCE = torch.tensor([[3, 4, 2, 0], [5, 2, 0, 0], [3, 5, 4, 2], [4, 2, 0, 0]])
TARGET = torch.tensor([[3, 3, 4, 2], [4, 2, 0, 0], [5, 2, 0, 0], [3, 4, 2, 0]])


# ---- nets


def nets() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [
        LSTMEncoderDecoder(6, 6, 4, 8).eval(),
        SequenceTransformer(6, 6, 8, 16, 2, 1).eval(),
        SequenceTransformer(6, 6, 8, 16, 2, 1, tied=True).eval(),
    ]


@pytest.mark.parametrize("number", range(3))
def test_padding_says_nothing(number: int) -> None:
    net = nets()[number]
    whole = net(SOURCE, TARGET)
    assert whole.shape == (4, 4, 6)
    for i in range(len(SOURCE)):
        source, target = trim_padding(SOURCE[i : i + 1]), trim_padding(TARGET[i : i + 1])
        torch.testing.assert_close(net(source, target)[0], whole[i, : target.shape[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", range(3))
def test_a_place_sees_only_what_comes_before(number: int) -> None:
    net = nets()[number]
    other = TARGET.clone()
    other[0, 2] = 5
    one, two = net(SOURCE, TARGET)[0], net(SOURCE, other)[0]
    assert one[:3].equal(two[:3]) and not one[3].equal(two[3])


def test_the_encoder_is_the_lstm_of_each_sequence() -> None:
    net = nets()[0]
    assert isinstance(net, LSTMEncoderDecoder)
    hidden, cell = net.encode(SOURCE)
    for i, source in enumerate(SOURCE):
        _, (h, c) = net.encoder(net.read(source[source != 0].unsqueeze(0)))
        torch.testing.assert_close(hidden[:, i], h[:, 0])
        torch.testing.assert_close(cell[:, i], c[:, 0])


def test_unforced_it_sees_its_own_words() -> None:
    net = nets()[0]
    predictions = net(SOURCE, TARGET, teacher_forcing=False)
    torch.testing.assert_close(net(SOURCE, predictions.argmax(-1)), predictions, rtol=1e-4, atol=1e-5)


def test_right_by_the_target_is_right_by_itself() -> None:
    """What the accuracy rests on: the net's own answer, given as the target, is all right."""
    net = nets()[0]
    predictions = net(SOURCE, TARGET, teacher_forcing=False).argmax(-1)
    assert exact_match(net(SOURCE, predictions), predictions).all()


def test_one_sequence_meets_one_mask() -> None:
    """Equal sequences in one part of the batch get equal scores, in different parts different ones."""
    for net in nets():
        masked = MaskedModel(net, samples=2, init=0.0)
        masked.train()
        source, target = SOURCE[:1].expand(4, -1), TARGET[:1].expand(4, -1)
        for options in ({}, {"teacher_forcing": False}) if isinstance(net, LSTMEncoderDecoder) else ({},):
            net.eval()
            scores = _without_dropout(masked)(source, target, **options)
            torch.testing.assert_close(scores[0], scores[1])
            torch.testing.assert_close(scores[2], scores[3])
            assert not torch.allclose(scores[0], scores[2])


def _without_dropout(masked: MaskedModel) -> MaskedModel:
    for module in masked.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
    return masked


def test_loss_and_accuracy_pass_over_padding() -> None:
    scores = torch.full((2, 3, 5), -10.0)
    target = torch.tensor([[3, 2, 0], [4, 4, 2]])
    for row, column, word in ((0, 0, 3), (0, 1, 2), (0, 2, 4), (1, 0, 4), (1, 1, 3), (1, 2, 2)):
        scores[row, column, word] = 10.0
    assert exact_match(scores, target).tolist() == [True, False]
    # One word is wrong, in one of two sequences: the sum over places, divided by the batch.
    assert sequence_loss(scores, target).item() == pytest.approx(20 / 2, abs=1e-3)
    assert shifted_right(target).tolist() == [[1, 3, 2], [1, 4, 4]]


def test_position_waves_by_hand() -> None:
    encoding = positional_encoding(5, 6)
    for place in range(5):
        for pair in range(3):
            angle = torch.tensor(place / 10_000 ** (2 * pair / 6))
            expected = torch.stack([angle.sin(), angle.cos()])
            torch.testing.assert_close(encoding[place, 2 * pair : 2 * pair + 2], expected)


def test_batches_of_like_lengths() -> None:
    lengths = torch.tensor([5, 1, 3, 1, 5, 3, 2, 2])
    order = bucketed_by_length(lengths, 4, torch.Generator().manual_seed(0))
    assert sorted(order.flatten().tolist()) == list(range(8))
    assert sorted(sorted(lengths[row].tolist()) for row in order) == [[1, 1], [2, 2], [3, 3], [5, 5]]


def test_every_part_of_a_batch_has_short_and_long_sequences() -> None:
    """Parts are contiguous: sorted, the first mask would see the shortest of a batch only."""
    lengths = torch.arange(64) % 16
    order = bucketed_by_length(lengths, 2, torch.Generator().manual_seed(0))
    means = lengths[order].view(2, 4, 8).float().mean(-1)
    assert (means.amax(1) - means.amin(1)).max() < 6  # sorted: 12
    assert not any(row.equal(row.sort().values) for row in lengths[order])


def test_sizes_of_the_papers_nets() -> None:
    count = sum(p.numel() for p in CNN().parameters())
    assert count == 28 * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 128 + (9 * 128 + 1) * 256 + 257 * 10
    assert CNN()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in ResNet(20).parameters()) == pytest.approx(0.27e6, rel=0.03)  # He et al., Table 6
    assert ResNet(8)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(ValueError, match="depth"):
        ResNet(9)


def test_crops_by_hand() -> None:
    images = torch.arange(2 * 3 * 32 * 32.0).view(2, 3, 32, 32)
    assert mask_cifar.crop_and_flip(images, torch.tensor([[4, 4, 0], [4, 4, 2]])).equal(images)
    moved = mask_cifar.crop_and_flip(images, torch.tensor([[0, 6, 0], [4, 4, 1]]))
    assert moved[0, :, 4:, :-2].equal(images[0, :, :-4, 2:]) and moved[0, :, :4].eq(0).all()
    assert moved[1].equal(images[1].flip(-1))


# ---- tiny trials


def run(study: Study, settings: dict[str, Any], model: str) -> tuple[MaskTrial, Record, Outcome]:
    config = changed(study.defaults, settings)
    torch.manual_seed(0)
    trial = study.trial(config, model, 0, CPU)
    assert isinstance(trial, MaskTrial)
    while not trial.finished:
        assert trial.chunk().isfinite()
        if trial.step == trial.steps // 2:  # as a run that is killed here and resumed
            state = trial.state()
            torch.manual_seed(1)
            trial = study.trial(config, model, 0, CPU)
            assert isinstance(trial, MaskTrial)
            trial.load_state(state)
    metrics = trial.metrics()
    record = Record(model, 0, trial.step, 1.0, 1, trial.result(metrics))
    json.dumps(record.result)
    outcome = Outcome(config, [record], [])
    rows = study.table(outcome)
    assert rows and all("paper" in row.note and row.steps == trial.steps for row in rows)
    return trial, record, outcome


def check_figures(study: Study, outcome: Outcome) -> None:
    assert all(caption for _, caption in study.figures(outcome).values())


TINY: dict[str, Any] = {
    "batch": 8,
    "mask_batch": None,
    "chunk": 2,
    "evaluate_every": 2,
    "steps": 4,
    "mask_steps": 4,
    "samples": 2,
}


def scan_words(folder: Path) -> Path:
    """Some commands; the training set of jump has it alone."""
    verbs = {"walk": "I_WALK", "look": "I_LOOK", "run": "I_RUN", "jump": "I_JUMP"}
    pairs = {}
    for verb, action in verbs.items():
        pairs |= {verb: action, f"{verb} twice": f"{action} {action}", f"turn left and {verb}": f"I_TURN_LEFT {action}"}
    lines = {command: f"IN: {command} OUT: {actions}" for command, actions in pairs.items()}
    compounds = [line for command, line in lines.items() if "jump" in command and command != "jump"]
    others = [line for line in lines.values() if line not in compounds]
    for name in ("simple_split/tasks_{}_simple.txt", "add_prim_split/tasks_{}_addprim_jump.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        parts = (list(lines.values()), others) if "simple" in name else (others, compounds)
        for part, text in zip(("train", "test"), parts, strict=True):
            (folder / name.format(part)).write_text("\n".join(text) + "\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model", ["LSTM", "Transformer"])
def test_scan_trial(tmp_path: Path, model: str) -> None:
    study = registry.get("mask-scan")
    sizes = {"units": 8, "width": 8, "inner": 8, "layers": 1, "heads": 2}
    own = {f"{name}_transformer": TINY[name] for name in ("mask_steps", "mask_batch")}
    settings = {**TINY, **sizes, **own, "splits": ("simple", "jump"), "data": str(scan_words(tmp_path))}
    trial, record, outcome = run(study, settings, model)
    assert trial.steps == 12 and trial.tasks == ("simple", "jump")
    assert set(record.result["masked"]) == set(record.result["accuracy"]) == {"simple", "jump"}
    assert set(record.result["output_removed"]["jump"]) == {
        "<end>", "I_WALK", "I_LOOK", "I_RUN", "I_JUMP", "I_TURN_LEFT", "I_TURN_RIGHT",
    }  # fmt: skip
    assert not any("read" in name for name in record.result["weights"])  # embeddings have no masks
    check_figures(study, outcome)


def rates_of(trial: MaskTrial, steps: int) -> list[float]:
    rates = []
    while trial.step < steps:
        trial.chunk()
        rates.append(trial.optimizer.param_groups[0]["lr"])
    return rates


def test_scan_rates_fall_in_the_second_half_of_every_stage(tmp_path: Path) -> None:
    settings = {**TINY, "steps": 8, "mask_steps": 4, "chunk": 1, "evaluate_every": 4, "units": 8, "lr": 1.0}
    settings |= {"mask_lr": 2.0, "lr_end": 0.5, "mask_lr_end": 0.0, "splits": ("simple", "jump")}
    config = changed(mask_scan.MaskScanConfig(), {**settings, "data": str(scan_words(tmp_path))})
    trial = mask_scan.MaskScanTrial(config, "LSTM", 0, CPU)
    assert rates_of(trial, trial.steps) == [1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 2, 2, 2, 1, 2, 2, 2, 1]


def test_scan_batches_come_from_the_splits_training_set(tmp_path: Path) -> None:
    settings = {**TINY, "splits": ("simple", "jump"), "data": str(scan_words(tmp_path)), "units": 4}
    config = changed(mask_scan.MaskScanConfig(), settings)
    trial = mask_scan.MaskScanTrial(config, "LSTM", 0, CPU)
    assert trial.data["jump"].train.commands.shape[0] == 10 and trial.data["jump"].test.commands.shape[0] == 2
    jump = mask_scan.COMMANDS.words.index("jump")
    index, split, forced = trial.batches_of("jump", torch.Generator().manual_seed(0))
    assert index.shape == (2, 8) and split.tolist() == [1, 1] and forced.shape == (2,)
    commands = trial.data["jump"].train.commands[index.flatten()]
    alone = commands[(commands == jump).any(1)]
    assert ((alone != 0).sum(1) == 2).all()  # the word and the end
    again = trial.batches_of("jump", torch.Generator().manual_seed(0))
    assert all(one.equal(two) for one, two in zip((index, split, forced), again, strict=True))


def test_cifar_trial(tmp_path: Path) -> None:
    study = registry.get("mask-cifar")
    settings = {**TINY, "channels": (2, 2, 2, 4), "removed": ("ship",), "data": str(cifar_folder(tmp_path, count=20))}
    trial, record, outcome = run(study, settings, "CNN_dropout")
    assert trial.tasks == ("all", "ship")
    masks = trial.masks()
    for name in ("output.weight", "output.bias"):
        assert masks["ship"][name].equal(masks["all"][name])
    assert len(record.result["confusion"]["ship"]) == 10 and record.result["images"].startswith("20 training")
    assert {"drops", "others", "control", "confusion_CNN_dropout"} <= set(study.figures(outcome))
    check_figures(study, outcome)


@pytest.mark.parametrize("model", ["CNN", "ResNet110"])
def test_cifar_shows_all_but_the_class(tmp_path: Path, model: str) -> None:
    settings = {**TINY, "depth": 8, "channels": (2, 2, 2, 4), "data": str(cifar_folder(tmp_path, count=20))}
    trial = mask_cifar.MaskCifarTrial(changed(mask_cifar.MaskCifarConfig(), settings), model, 0, CPU)
    labels = trial.data.train_labels
    assert labels.bincount().tolist() == [2] * 10
    for task, expected in (("all", set(range(10))), ("dog", set(range(10)) - {5})):
        assert set(labels[trial.images_of[task]].tolist()) == expected
        index, *_ = trial.batches_of(task, torch.Generator().manual_seed(0))
        assert set(labels[index].flatten().tolist()) <= expected
    assert trial.chunk().isfinite() and trial.step == 2


def test_cifar_output_masks_stay(tmp_path: Path) -> None:
    """Also when the control has removed some of them: no draw brings one back."""
    settings = {**TINY, "channels": (2, 2, 2, 4), "removed": ("ship",), "data": str(cifar_folder(tmp_path, count=20))}
    trial = mask_cifar.MaskCifarTrial(changed(mask_cifar.MaskCifarConfig(), settings), "CNN", 0, CPU)
    while trial.step < 8:
        trial.chunk()
    assert trial.masked is not None
    with torch.no_grad():
        dict(trial.masked.named_logits())["output.weight"][3] = -1.0
    trial.chunk()
    assert trial.task == "ship" and not trial.masked.hard_masks()["output.weight"][3].any()
    assert trial.masked.hard_masks()["output.weight"][4].all()
    grown = dict(trial.masked.named_logits())["output.weight"]
    assert not grown.requires_grad and grown.abs().min() >= 30


def test_the_resnet_steps_down_twice(tmp_path: Path) -> None:
    settings = {**TINY, "depth": 8, "steps": 8, "data": str(cifar_folder(tmp_path, count=20))}
    trial = mask_cifar.MaskCifarTrial(changed(mask_cifar.MaskCifarConfig(), settings), "ResNet110", 0, CPU)
    assert rates_of(trial, 8) == pytest.approx([0.1, 0.1, 0.01, 0.001])


def test_cifar_drops_by_hand() -> None:
    control = dict.fromkeys(("all", *mask_cifar.CLASSES), 0.8)
    without = {**control, "cat": 0.2, "dog": 0.7, "ship": 0.9}
    result = {"masked": {"all": control, "cat": without}}
    assert class_removal.relative("cat")(result) == pytest.approx(0.75)
    assert class_removal.drops(result, "cat")["ship"] == pytest.approx(-0.1)
    assert class_removal.lose_most(result) == 1.0


def test_who_loses_most_is_told_by_shares() -> None:
    """Figure 6: of 0.9 and of 0.4; the cat loses more, the dog a larger share."""
    control = dict.fromkeys(("all", *mask_cifar.CLASSES), 0.8) | {"cat": 0.9, "dog": 0.4}
    masked = {"all": control, "cat": {**control, "cat": 0.5, "dog": 0.1}, "dog": {**control, "cat": 0.5, "dog": 0.1}}
    assert class_removal.lose_most({"masked": masked}) == 0.5
    never = {"all": {**control, "cat": 0.0}, "cat": {**control, "cat": 0.0}}
    assert class_removal.lose_most({"masked": never}) == 0.0, "it had nothing to lose"


def test_the_largest_other_drop_is_relative_to_the_removed_classes() -> None:
    """Figure 6b; drops are shares of what the control has: here 0.2 of 0.5 against 0.6 of 0.8."""
    control = dict.fromkeys(("all", *mask_cifar.CLASSES), 0.8) | {"dog": 0.5}
    without = {**control, "cat": 0.2, "dog": 0.3, "ship": 0.65}
    result = {"masked": {"all": control, "cat": without}}
    assert class_removal.other("cat")(result) == pytest.approx((0.2 / 0.5) / (0.6 / 0.8))
    gains = {"masked": {"all": control, "cat": {name: value + 0.1 for name, value in control.items()} | {"cat": 0.0}}}
    assert class_removal.other("cat")(gains) == 0.0
    assert class_removal.other("cat")({"masked": {"all": control, "cat": control}}) is None


def test_the_controls_confusion_is_drawn() -> None:
    shares, other = (torch.rand(10, 10).tolist() for _ in range(2))
    records = [Record("CNN", 0, 1, 1.0, 1, {"confusion": {"all": shares, "cat": other}})]
    assert class_removal.mean_confusion(records) == shares
    change = torch.tensor(class_removal.mean_confusion(records, "cat"))
    torch.testing.assert_close(change, torch.tensor(other) - torch.tensor(shares))


def sums(folder: Path, count: int = 30) -> Path:
    """Sums of small numbers as published files; the first questions of all levels are the same."""
    for number, level in enumerate(("easy", "medium", "hard")):
        text = "".join(f"{i} + {n}\n{i + n}\n" for i, n in ((i, 0 if i < 3 else 7 * number) for i in range(count)))
        (folder / f"train-{level}").mkdir(parents=True)
        (folder / f"train-{level}" / "arithmetic__add_or_sub.txt").write_text(text)
    return folder


def test_mathematics_trial(tmp_path: Path) -> None:
    study = registry.get("mask-math")
    sizes = {"width": 8, "inner": 8, "layers": 1, "heads": 2, "questions": 20, "validation": 5, "warmup": 4}
    trial, record, outcome = run(study, {**TINY, **sizes, "data": str(sums(tmp_path))}, "add_or_sub")
    assert trial.tasks == ("all", "easy") and set(record.result["accuracy"]) == {"easy", "medium", "hard"}
    assert not any("read" in name for name in record.result["weights"])
    check_figures(study, outcome)


def test_mathematics_warms_up(tmp_path: Path) -> None:
    sizes = {"width": 8, "inner": 8, "layers": 1, "heads": 2, "questions": 20, "validation": 5}
    settings = {**TINY, **sizes, "steps": 8, "lr": 1.0, "lr_end": 1.0, "warmup": 6, "data": str(sums(tmp_path))}
    trial = mask_math.MaskMathTrial(changed(mask_math.MaskMathConfig(), settings), "add_or_sub", 0, CPU)
    assert rates_of(trial, 8) == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_mathematics_measures_what_it_did_not_learn(tmp_path: Path) -> None:
    config = changed(mask_math.MaskMathConfig(), {"questions": 20, "validation": 2, "data": str(sums(tmp_path))})
    learned, measured = mask_math.texts_of(config, "add_or_sub")

    def questions(rows: Tensor) -> list[str]:
        return ["".join(mask_math.CHARACTERS.decode(row.tolist())) for row in rows]

    easy, everything = questions(learned["easy"].questions), questions(learned["all"].questions)
    assert easy == [f"{i} + 0" for i in range(2, 22)]
    assert len(everything) == len(set(everything)) == 20 + 19 + 19 and set(easy) <= set(everything)  # "2 + 0" once
    for texts in measured.values():
        assert questions(texts.questions) == ["0 + 0", "1 + 0"] and not set(questions(texts.questions)) & set(
            everything
        )


@pytest.mark.parametrize(
    ("study", "setting", "words"),
    [
        ("mask-scan", {"splits": ("jump",)}, "simple"),
        ("mask-scan", {"splits": ("simple", "left")}, "turn_left"),
        ("mask-scan", {"forcing": 2.0}, "forcing"),
        ("mask-cifar", {"channels": (1, 2)}, "four sizes"),
        ("mask-cifar", {"removed": ("plane",)}, "airplane"),
        ("mask-math", {"validation": 0}, "validation"),
        ("mask-math", {"mask_batch": 12}, "samples"),
    ],
)
def test_settings_that_cannot_be(study: str, setting: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyError, match=words):
        changed(registry.get(study).defaults, setting)


def test_the_transformer_of_scan_has_settings_of_its_own() -> None:
    names = ("lr", "beta", "mask_init", "mask_steps", "mask_batch")
    own = {"lr": 0.25, "beta": 0.5, "mask_init": 3.0, "mask_steps": 50, "mask_batch": 16}
    config = changed(mask_scan.MaskScanConfig(), {f"{name}_transformer": own[name] for name in names})
    sized = mask_scan.MaskScan().config_of(config, "Transformer")
    assert {name: getattr(sized, name) for name in names} == own
    assert mask_scan.MaskScan().config_of(config, "LSTM") == config
    paper = mask_scan.MaskScan().config_of(changed(config, {"paper": "true"}), "Transformer")
    assert (paper.lr, paper.beta, paper.mask_init, paper.mask_batch) == (1e-3, 1e-3, 2.0, 256)
