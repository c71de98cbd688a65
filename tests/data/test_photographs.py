"""CIFAR-100, SVHN and MATLAB files, tested on tiny files."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastmod.data import DataError, load_cifar100, load_svhn
from fastmod.data.mat import read_mat
from tests.helpers.surroundings import no_data_folder as no_data_folder

# ---- MATLAB files, written by hand

CODES = {torch.uint8: (2, "B", 9), torch.int16: (3, "h", 10), torch.float64: (9, "d", 6), torch.int64: (12, "q", 14)}


def element(order: str, kind: int, contents: bytes) -> bytes:
    if 0 < len(contents) <= 4:  # type and size share a word
        return struct.pack(order + "I", len(contents) << 16 | kind) + contents.ljust(4, b"\0")
    return struct.pack(order + "II", kind, len(contents)) + contents + bytes(-len(contents) % 8)


def array(name: str, numbers: Tensor, order: str = "<", flags: int = 0) -> bytes:
    kind, letter, of_class = CODES[numbers.dtype]
    first_dimension_first = numbers.permute(*reversed(range(numbers.dim()))).flatten().tolist()
    parts = (
        (6, struct.pack(order + "II", of_class | flags, 0)),
        (5, struct.pack(f"{order}{numbers.dim()}i", *numbers.shape)),
        (1, name.encode()),
        (kind, struct.pack(f"{order}{len(first_dimension_first)}{letter}", *first_dimension_first)),
    )
    contents = b"".join(element(order, *part) for part in parts)
    return struct.pack(order + "II", 14, len(contents)) + contents


def mat_file(*arrays: bytes, order: str = "<", packed: bool = False) -> bytes:
    if packed:
        arrays = tuple(struct.pack(order + "II", 15, len(z := zlib.compress(one))) + z for one in arrays)
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(order + "H", 0x0100) + (b"IM" if order == "<" else b"MI")
    return header + b"".join(arrays)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_mat_arrays(tmp_path: Path, order: str, packed: bool) -> None:
    expected = {
        "X": torch.randint(256, (4, 3, 2, 5), dtype=torch.uint8),
        "y": torch.randint(-9, 9, (7, 1), dtype=torch.int16),
        "a_longer_name": torch.randn(2, 3, dtype=torch.float64),
        "big": torch.tensor([[-(2**40), 2**62]]),
        "none": torch.zeros(0, 3, dtype=torch.float64),
        "b": torch.tensor([[7]], dtype=torch.uint8),
    }
    file = tmp_path / "some.mat"
    file.write_bytes(mat_file(*(array(n, t, order) for n, t in expected.items()), order=order, packed=packed))
    found = read_mat(file)
    assert list(found) == list(expected)
    for name, numbers in expected.items():
        assert found[name].dtype == numbers.dtype and found[name].equal(numbers), name


def test_mat_leaves_out_what_is_no_array_of_real_numbers(tmp_path: Path) -> None:
    numbers = torch.ones(2, 2, dtype=torch.float64)
    complex_numbers = array("c", numbers, flags=0x0800)
    text = element("<", 6, struct.pack("<II", 4, 0)) + element("<", 5, struct.pack("<2i", 1, 9))
    text += element("<", 1, b"text") + element("<", 4, "some text".encode("utf-16-le"))
    words = struct.pack("<II", 14, len(text)) + text
    (tmp_path / "some.mat").write_bytes(mat_file(words, complex_numbers, array("x", numbers)))
    assert list(read_mat(tmp_path / "some.mat")) == ["x"]


@pytest.mark.parametrize("packed", [False, True])
def test_mat_cut_anywhere(tmp_path: Path, packed: bool) -> None:
    whole = mat_file(array("x", torch.arange(6.0, dtype=torch.float64).view(2, 3)), packed=packed)
    file = tmp_path / "cut.mat"
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        if length == 128:
            assert read_mat(file) == {}
            continue
        with pytest.raises(DataError, match=r"cut\.mat: (truncated|not a MATLAB 5 file)"):
            read_mat(file)


@given(place=st.integers(128, 231), value=st.integers(0, 255))
def test_mat_with_a_wrong_byte_ends_in_arrays_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    contents = bytearray(mat_file(array("x", torch.arange(6.0, dtype=torch.float64).view(2, 3))))
    assert len(contents) == 232
    contents[place] = value
    file = tmp_path_factory.mktemp("mat") / "wrong.mat"
    file.write_bytes(contents)
    try:
        read_mat(file)
    except DataError as error:
        assert "wrong.mat" in str(error)  # noqa: PT017 - either is right


# ---- SVHN


def svhn_folder(folder: Path, count: int = 12, train: str = "train_32x32.mat", test: str = "test_32x32.mat") -> Path:
    """Image i has red i, green its row, blue its column; its label is i % 10, with 10 for 0."""
    folder.mkdir(parents=True, exist_ok=True)
    along = torch.arange(32, dtype=torch.uint8)
    for name, number in ((train, count), (test, 5)):
        images = torch.zeros(32, 32, 3, number, dtype=torch.uint8)
        images[:, :, 0], images[:, :, 1] = torch.arange(number, dtype=torch.uint8), along[:, None, None]
        images[:, :, 2] = along[None, :, None]
        labels = torch.tensor([[i % 10 or 10] for i in range(number)], dtype=torch.uint8)
        (folder / name).write_bytes(mat_file(array("X", images), array("y", labels), packed=True))
    return folder


def test_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_svhn(svhn_folder(tmp_path / "svhn"))
    assert found.described == "12 training and 5 test images"
    assert found.train_images.shape == (12, 3, 32, 32) and found.train_images.dtype == torch.uint8
    assert found.train_labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1] and found.test_labels.tolist() == list(
        range(5)
    )
    assert found.train_images[7, :, 3, 4].tolist() == [7, 3, 4]
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    assert load_svhn().train_images.equal(found.train_images)


def test_svhn_of_other_names(tmp_path: Path) -> None:
    folder = svhn_folder(tmp_path, train="train_32x32_first12.mat", test="test_32x32_first5.mat")
    assert len(load_svhn(folder).train_labels) == 12
    svhn_folder(tmp_path, 3, "train_32x32_other.mat", "test_32x32.mat")
    with pytest.raises(
        DataError, match=r"expected train_32x32\.mat, found train_32x32_first12\.mat, train_32x32_other"
    ):
        load_svhn(folder)


def test_svhn_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"SVHN: not found; .*FASTMOD_DATA"):
        load_svhn()
    with pytest.raises(DataError, match="no such folder"):
        load_svhn(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"expected train_32x32\.mat;"):
        load_svhn(tmp_path)
    folder, images = svhn_folder(tmp_path), torch.zeros(32, 32, 3, 2, dtype=torch.uint8)
    labels = torch.ones(2, 1, dtype=torch.uint8)
    for arrays, words in [
        ([array("X", images)], "expected arrays X and y, got X"),
        ([array("X", images[:16]), array("y", labels)], r"X: expected bytes \[32, 32, 3, N\]"),
        ([array("X", images), array("y", labels[:1])], "y: expected a label for each of 2 images, got 1"),
        ([array("X", images), array("y", labels * 11)], "y: expected 1 to 10, got 11"),
    ]:
        (folder / "test_32x32.mat").write_bytes(mat_file(*arrays))
        with pytest.raises(DataError, match=rf"test_32x32\.mat: {words}"):
            load_svhn(folder)


# ---- CIFAR-100


def cifar100_folder(folder: Path, count: int = 4, packed: bool = False) -> Path:
    """Image i: coarse label i, fine label 99 - i, red all i, green and blue 0."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "test.bin"):
        records = b"".join(bytes([i, 99 - i]) + bytes([i]) * 1024 + bytes(2048) for i in range(count))
        (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(records) if packed else records)
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["", "cifar100", "cifar-100-binary"])
def test_cifar100(tmp_path: Path, packed: bool, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cifar100_folder(tmp_path / place, packed=packed)
    found = load_cifar100(folder)
    assert found.train_labels.tolist() == [99, 98, 97, 96] == found.test_labels.tolist(), "the fine ones"
    assert found.test_images.shape == (4, 3, 32, 32) and found.test_images[2, 0].eq(2).all()
    assert not found.test_images[:, 1:].any()
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    assert load_cifar100().train_images.equal(found.train_images)


def test_cifar100_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"CIFAR-100: not found; .*FASTMOD_DATA"):
        load_cifar100()
    with pytest.raises(DataError, match="no such folder"):
        load_cifar100(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"expected train\.bin and test\.bin"):
        load_cifar100(tmp_path)
    folder = cifar100_folder(tmp_path)
    (folder / "test.bin").write_bytes(bytes(3073))
    with pytest.raises(DataError, match=r"test\.bin: wrong length: expected records of 3074"):
        load_cifar100(folder)
    (folder / "test.bin").write_bytes(bytes([0, 100]) + bytes(3072))
    with pytest.raises(DataError, match=r"test\.bin: expected labels 0 to 99, got 100"):
        load_cifar100(folder)
