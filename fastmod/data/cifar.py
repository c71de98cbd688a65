"""CIFAR-10 and CIFAR-100 from folders with their binary versions: records of labels and 3072 bytes of pixels."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastmod.data.folders import find_folder
from fastmod.data.idx import GZIP_MAGIC, DataError
from fastmod.data.photographs import Photographs

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES_100 = ("train.bin", "test.bin")
FINE_CLASSES = 100  # of CIFAR-100, whose files do not name them
SIDE = 32
PIXELS = 3 * SIDE * SIDE
RECORD = 1 + PIXELS  # bytes of one image of CIFAR-10
#: Folders of $FASTMOD_DATA to search; the published archive unpacks to the last.
FOLDERS = ("", "cifar10", "cifar-10-batches-bin")
FOLDERS_100 = ("", "cifar100", "cifar-100-binary")
_MOST = 100_000  # images per file, at least twice as many as the official ones: a limit for gzip bombs


class CIFAR10(Photographs):
    """Small photographs and their :data:`CLASSES`; each training file found adds 10000."""


class CIFAR100(Photographs):
    """Small photographs and which of 100 classes (fine labels) each shows."""


def load_cifar10(root: str | os.PathLike[str] | None = None) -> CIFAR10:
    """Read CIFAR-10 from ``root``, by default from ``$FASTMOD_DATA`` or its folder ``cifar10`` or
    ``cifar-10-batches-bin``.

    Args:
        root: folder with ``test_batch.bin`` and at least one of ``data_batch_1.bin`` to ``data_batch_5.bin``, each
            plain or ``.gz``; training files may be missing. If given, no other place is searched.

    Returns:
        ``train_images`` uint8 ``[N, 3, 32, 32]``, ``train_labels`` int64 ``[N]``, and the same of the test images.

    Raises:
        DataError: nothing found, or a file is missing or damaged.
    """
    content = (
        f"{TEST_FILE} and at least one of {TRAIN_FILES[0]} to {TRAIN_FILES[-1]} (the binary version, plain or .gz)"
    )
    files = (*TRAIN_FILES, TEST_FILE)
    return _read_folder(find_folder("CIFAR-10", root, FOLDERS, lambda f: any(_file(f, n) for n in files), content))


def load_cifar100(root: str | os.PathLike[str] | None = None) -> CIFAR100:
    """Read CIFAR-100 with its fine labels from ``root``, by default from ``$FASTMOD_DATA`` or its folder
    ``cifar100`` or ``cifar-100-binary``.

    Args:
        root: folder with ``train.bin`` and ``test.bin``, each plain or ``.gz``. If given, no other place is searched.

    Returns:
        ``train_images`` uint8 ``[N, 3, 32, 32]``, ``train_labels`` int64 ``[N]``, and the same of the test images.

    Raises:
        DataError: nothing found, or a file is missing or damaged.
    """
    content = f"{' and '.join(FILES_100)} (the binary version, plain or .gz)"
    folder = find_folder("CIFAR-100", root, FOLDERS_100, lambda f: any(_file(f, n) for n in FILES_100), content)
    return _read_folder_100(folder)


def _read_folder(folder: Path) -> CIFAR10:
    train = [file for name in TRAIN_FILES if (file := _file(folder, name))]
    test = _file(folder, TEST_FILE)
    if not train or not test:
        missing = TEST_FILE if train else f"at least one of {TRAIN_FILES[0]} to {TRAIN_FILES[-1]}"
        what = f"expected {missing} (plain or .gz)" if folder.is_dir() else "no such folder"
        raise DataError(f"{folder}: {what}; CIFAR-10 is read from a folder with its binary version")
    return CIFAR10(*_read_files(train, 1, len(CLASSES)), *_read_files([test], 1, len(CLASSES)))


def _read_folder_100(folder: Path) -> CIFAR100:
    train, test = (_file(folder, name) for name in FILES_100)
    if not train or not test:
        what = f"expected {' and '.join(FILES_100)} (plain or .gz)" if folder.is_dir() else "no such folder"
        raise DataError(f"{folder}: {what}; CIFAR-100 is read from a folder with its binary version")
    # Each record starts with two labels, coarse and then fine.
    return CIFAR100(*_read_files([train], 2, FINE_CLASSES), *_read_files([test], 2, FINE_CLASSES))


def _file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _read_files(paths: Sequence[Path], label_bytes: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 3, 32, 32]`` and labels int64 ``[N]`` of several files, in order."""
    images, labels = zip(*(_read_file(path, label_bytes, classes) for path in paths), strict=True)
    return torch.cat(images), torch.cat(labels)


def _read_file(path: Path, label_bytes: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 3, 32, 32]`` and labels int64 ``[N]`` of a file; its contents show whether it is packed."""
    record = label_bytes + PIXELS
    most = _MOST * record
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        try:
            contents = (gzip.GzipFile(fileobj=file) if packed else file).read(most + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: truncated or damaged gzip file: {error}") from error
    if not contents or len(contents) % record or len(contents) > most:
        raise DataError(
            f"{path}: wrong length: expected records of {record} bytes, at most {most} bytes, got {len(contents)}"
        )
    records = torch.frombuffer(bytearray(contents), dtype=torch.uint8).view(-1, record)
    labels = records[:, label_bytes - 1].long()
    if labels.max() >= classes:
        raise DataError(f"{path}: expected labels 0 to {classes - 1}, got {int(labels.max())}")
    return records[:, label_bytes:].reshape(-1, 3, SIDE, SIDE), labels
