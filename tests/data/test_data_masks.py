"""Loaders of the mask studies, tested on tiny files; the Mathematics package only if it is installed."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from fastmod.data import DataError, mathematics
from fastmod.data.cifar import RECORD, load_cifar10
from fastmod.data.scan import ACTIONS, COMMANDS, SPLITS, load_scan
from tests.helpers.surroundings import no_data_folder as no_data_folder


def one_line(error: pytest.ExceptionInfo[DataError], *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


# ---- SCAN

LINES = {
    "train": "IN: jump twice OUT: I_JUMP I_JUMP\nIN: turn left OUT: I_TURN_LEFT\n",
    "test": "IN: walk after look OUT: I_LOOK I_WALK\n",
}


def scan_folder(folder: Path) -> Path:
    for name in SPLITS.values():
        for part, text in LINES.items():
            file = folder / name.format(part=part)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return folder


def scan_archive(folder: Path, names: tuple[str, ...] = tuple(SPLITS)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "SCAN.tar.xz", "w:xz") as archive:
        for name in names:
            for part, text in LINES.items():
                member = tarfile.TarInfo("SCAN/" + SPLITS[name].format(part=part))
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    return folder


def test_scan_lines_become_padded_numbers(tmp_path: Path) -> None:
    train, test = load_scan(scan_folder(tmp_path), ("add_prim_jump",))["add_prim_jump"]
    jump, twice = COMMANDS.words.index("jump"), COMMANDS.words.index("twice")
    assert train.commands.tolist()[0] == [jump, twice, 2]
    i_jump, i_left = ACTIONS.words.index("I_JUMP"), ACTIONS.words.index("I_TURN_LEFT")
    assert train.actions.tolist() == [[i_jump, i_jump, 2], [i_left, 2, 0]]
    assert COMMANDS.decode(test.commands[0].tolist()) == ["walk", "after", "look"]
    assert ACTIONS.decode(test.actions[0].tolist()) == ["I_LOOK", "I_WALK"]
    assert len(COMMANDS) == 13 + 3 and len(ACTIONS) == 6 + 3


@pytest.mark.parametrize("place", ["", "scan", "SCAN"])
def test_scan_is_found_below_the_variable(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    scan_folder(tmp_path / place)
    assert set(load_scan()) == set(SPLITS)


def test_scan_archive_is_the_same_as_its_folder(tmp_path: Path) -> None:
    unpacked = load_scan(scan_folder(tmp_path / "folder" / "SCAN").parent)
    packed = load_scan(scan_archive(tmp_path / "packed"))
    named = load_scan(tmp_path / "packed" / "SCAN.tar.xz")
    for split in SPLITS:
        for one, two, three in zip(unpacked[split], packed[split], named[split], strict=True):
            assert one.commands.equal(two.commands) and one.actions.equal(two.actions)
            assert one.commands.equal(three.commands)


def test_scan_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as error:
        load_scan()
    one_line(error, "SCAN", "FASTMOD_DATA", "SCAN.tar.xz")
    with pytest.raises(DataError) as error:
        load_scan(tmp_path / "nowhere")
    one_line(error, "no such folder")
    with pytest.raises(DataError) as error:
        load_scan(tmp_path)
    one_line(error, "simple_split")
    with pytest.raises(DataError) as error:
        load_scan(scan_archive(tmp_path / "some", ("simple",)))
    one_line(error, "length_split/tasks_train_length.txt")
    with pytest.raises(DataError) as error:
        load_scan(tmp_path, ("easy",))
    one_line(error, "easy", "add_prim_jump")


@pytest.mark.parametrize("line", ["IN: fly OUT: I_JUMP", "jump OUT: I_JUMP", "IN: jump", "IN: jump OUT: I_FLY", ""])
def test_scan_lines_that_are_none(tmp_path: Path, line: str) -> None:
    file = scan_folder(tmp_path) / SPLITS["simple"].format(part="train")
    file.write_text(line + "\n")
    with pytest.raises(DataError) as error:
        load_scan(tmp_path, ("simple",))
    one_line(error, "tasks_train_simple.txt", "IN:")


def test_scan_damaged_archive(tmp_path: Path) -> None:
    file = scan_archive(tmp_path) / "SCAN.tar.xz"
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DataError) as error:
        load_scan(tmp_path)
    one_line(error, "SCAN.tar.xz", "damaged")


# ---- CIFAR-10


def cifar_folder(folder: Path, batches: tuple[int, ...] = (1,), count: int = 4, packed: bool = False) -> Path:
    """Image i of batch b: label (i + b) % 10, red all i, green all b, blue 0, 1, 2 ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, batch in [*((f"data_batch_{b}.bin", b) for b in batches), ("test_batch.bin", 9)]:
        blue = bytes(place % 256 for place in range(1024))
        records = b"".join(
            bytes([(i + batch) % 10]) + bytes([i]) * 1024 + bytes([batch]) * 1024 + blue for i in range(count)
        )
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(records))
        else:
            (folder / name).write_bytes(records)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_reads_the_batches_that_are_there(tmp_path: Path, packed: bool) -> None:
    data = load_cifar10(cifar_folder(tmp_path, (1, 3), packed=packed))
    assert data.train_labels.tolist() == [1, 2, 3, 4, 3, 4, 5, 6] and data.test_labels.tolist() == [9, 0, 1, 2]
    assert data.train_images.shape == (8, 3, 32, 32) and data.train_images.dtype == torch.uint8
    assert data.train_images[5, 0].eq(1).all() and data.train_images[5, 1].eq(3).all()
    assert data.test_images[0, 2, 1, :3].tolist() == [32, 33, 34]
    assert data.described == "8 training and 4 test images"


def test_cifar_is_found_below_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    with pytest.raises(DataError) as error:
        load_cifar10()
    one_line(error, "CIFAR-10", str(tmp_path), "data_batch_1.bin")
    cifar_folder(tmp_path / "cifar10")
    assert len(load_cifar10().train_labels) == 4


def test_cifar_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load_cifar10()
    one_line(error, "FASTMOD_DATA", "test_batch.bin")
    with pytest.raises(DataError) as error:
        load_cifar10(cifar_folder(tmp_path / "none", ()))
    one_line(error, "data_batch_1.bin")
    folder = cifar_folder(tmp_path / "short")
    (folder / "data_batch_1.bin").write_bytes(bytes(RECORD - 1))
    with pytest.raises(DataError) as error:
        load_cifar10(folder)
    one_line(error, "wrong length", str(RECORD))
    (folder / "data_batch_1.bin").write_bytes(bytes([10]) * RECORD)
    with pytest.raises(DataError) as error:
        load_cifar10(folder)
    one_line(error, "labels 0 to 9")
    folder = cifar_folder(tmp_path / "cut", packed=True)
    file = folder / "test_batch.bin.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError) as error:
        load_cifar10(folder)
    one_line(error, "damaged")


# ---- Mathematics

#: The parts of the package that the loader uses, with the three things removed from newer libraries.
PACKAGE = {
    "__init__.py": "",
    "sample/__init__.py": "",
    "modules/__init__.py": "",
    "sample/polynomials.py": """
import numpy as np
from sympy.solvers.diophantine import base_solution_linear

def table(value):
    index, values = (0,), [value, 1]
    cells = np.empty(1, dtype=np.object)
    cells.itemset(index, values)
    return cells
""",
    "modules/algebra.py": """
import random
import numpy as np
from mathematics_dataset.sample import polynomials

class Problem:
    def __init__(self, question, answer):
        self.question, self.answer = question, answer

def train(entropy):
    low, high = entropy((0, 9))
    def linear_1d():
        number = int(low + (high - low) * np.random.rand())
        words = "".join({"a", "b", "c", "d"})  # in an order that depends on the hash seed
        value = polynomials.table(number)[0][0]
        return Problem(f"{words} {value} {random.randrange(100)}", value)
    return {"linear_1d": linear_1d}
""",
}


@pytest.fixture
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in PACKAGE.items():
        file = tmp_path / "site" / "mathematics_dataset" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@pytest.mark.slow
@pytest.mark.usefixtures("_package")
def test_mathematics_makes_the_same_questions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = mathematics.load_mathematics("algebra__linear_1d", "medium", 20)
    assert len({question for question, _ in pairs}) == 20
    assert {answer for _, answer in pairs} <= {"3", "4", "5"}  # the middle third of 0..9
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert mathematics.load_mathematics("algebra__linear_1d", "medium", 12) == pairs[:12]
    assert mathematics.load_mathematics("algebra__linear_1d", "medium", 12, seed=1) != pairs[:12]
    with pytest.raises(DataError) as error:
        mathematics.load_mathematics("algebra__linear_1d", "easy", 1000)
    one_line(error, "algebra__linear_1d", "1000 different questions")
    with pytest.raises(DataError) as error:
        mathematics.load_mathematics("geometry__circle", "easy", 1)
    one_line(error, "geometry__circle", "mathematics_dataset")


def test_mathematics_reads_the_published_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train-hard" / "comparison__sort.txt"
    file.parent.mkdir()
    file.write_text("Sort 2, 1.\n1, 2\nSort 2, 1.\n1, 2\nSort 4, 3.\n3, 4\n")
    expected = [("Sort 2, 1.", "1, 2"), ("Sort 4, 3.", "3, 4")]
    assert mathematics.load_mathematics("comparison__sort", "hard", 2, tmp_path) == expected
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    assert mathematics.load_mathematics("comparison__sort", "hard", 1) == expected[:1]
    with pytest.raises(DataError) as error:
        mathematics.load_mathematics("comparison__sort", "hard", 3, tmp_path)
    one_line(error, "expected 3", "there are 2")
    with pytest.raises(DataError) as error:
        mathematics.load_mathematics("comparison__sort", "easy", 1, tmp_path)
    one_line(error, "train-easy")
    file.write_text("Sort 2, 1.\n")
    with pytest.raises(DataError) as error:
        mathematics.load_mathematics("comparison__sort", "hard", 1, tmp_path)
    one_line(error, "truncated")


def test_mathematics_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "PACKAGE", "fastmod_no_such_package")
    with pytest.raises(DataError) as error:
        mathematics.load_mathematics("comparison__sort", "easy", 1)
    one_line(error, "fastmod[mathematics]", "FASTMOD_DATA")
    with pytest.raises(DataError) as error:
        mathematics.load_mathematics("comparison__sort", "brutal", 1)
    one_line(error, "easy, medium, hard", "brutal")


def test_mathematics_text_as_numbers() -> None:
    texts = mathematics.as_tensors([("1+1", "2"), ("2", "~ ")])
    plus = mathematics.CHARACTERS.words.index("+")
    assert texts.questions.shape == (2, 4) and texts.questions[0, 1] == plus and texts.questions[0, 3] == 2
    assert texts.questions[1].tolist()[1:] == [2, 0, 0]
    assert "".join(mathematics.CHARACTERS.decode(texts.answers[1].tolist())) == "~ "
    with pytest.raises(DataError, match="unknown character"):
        mathematics.as_tensors([("é", "1")])


def test_the_package_is_never_imported_here() -> None:
    assert not any(name.startswith(mathematics.PACKAGE) for name in sys.modules)


@pytest.mark.slow
@pytest.mark.parametrize("task", mathematics.TASKS)
def test_mathematics_of_the_real_package(task: str) -> None:
    pairs = mathematics.generate(task, "easy", 3)
    assert pairs == mathematics.generate(task, "easy", 3) and len(set(pairs)) == 3
