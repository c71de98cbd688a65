"""CIFAR-10 from a folder with its binary version: records of one label byte and 3072 bytes of colour."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.data.idx import GZIP_MAGIC, DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
#: Where the files are looked for below $FASTMOD_DATA; the last one is what the published archive unpacks to.
FOLDERS = ("", "cifar10", "cifar-10-batches-bin")
_MOST = 100_000 * RECORD  # bytes of one file; ten times the official one, so that a gzip bomb is not unpacked


class CIFAR10(NamedTuple):
    """Small photographs and which of :data:`CLASSES` each shows, in the order of the files."""

    train_images: Tensor  # uint8 [N, 3, 32, 32]; red, green, blue. N: 10000 for each training file that is there
    train_labels: Tensor  # int64 [N]
    test_images: Tensor  # uint8 [10000, 3, 32, 32]
    test_labels: Tensor  # int64 [10000]

    @property
    def described(self) -> str:
        """How much of the data set this is."""
        return f"{len(self.train_labels)} training and {len(self.test_labels)} test images"


def load_cifar10(root: str | os.PathLike[str] | None = None) -> CIFAR10:
    """Read CIFAR-10. Looked for in ``root``; else in ``$FASTMOD_DATA`` and its folders ``cifar10`` and
    ``cifar-10-batches-bin``.

    Args:
        root: folder with ``test_batch.bin`` and at least one of ``data_batch_1.bin`` to ``data_batch_5.bin``, each
            plain or ``.gz``; all that are there are read. Where it is given, nothing else is looked at.

    Returns:
        ``train_images`` uint8 ``[N, 3, 32, 32]``, ``train_labels`` int64 ``[N]``, and the same of the test images.

    Raises:
        DataError: nothing found, or a file is missing or damaged.
    """
    if root is not None:
        return _read_folder(Path(root))
    variable = os.environ.get("FASTMOD_DATA")
    for folder in (Path(variable, name) for name in FOLDERS) if variable else ():
        if any(_file(folder, name) for name in (*TRAIN_FILES, TEST_FILE)):
            return _read_folder(folder)
    where = f" in FASTMOD_DATA={variable}" if variable else ""
    raise DataError(
        f"CIFAR-10: not found{where}; give a folder with {TEST_FILE} and at least one of {TRAIN_FILES[0]} to "
        f"{TRAIN_FILES[-1]} (the binary version, plain or .gz), or set FASTMOD_DATA to such a folder"
    )


def _read_folder(folder: Path) -> CIFAR10:
    train = [file for name in TRAIN_FILES if (file := _file(folder, name))]
    test = _file(folder, TEST_FILE)
    if not train or not test:
        missing = TEST_FILE if train else f"at least one of {TRAIN_FILES[0]} to {TRAIN_FILES[-1]}"
        what = f"expected {missing} (plain or .gz)" if folder.is_dir() else "no such folder"
        raise DataError(f"{folder}: {what}; CIFAR-10 is read from a folder with its binary version")
    parts = [_read_file(file) for file in train]
    images, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    return CIFAR10(images, labels, *_read_file(test))


def _file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _read_file(path: Path) -> tuple[Tensor, Tensor]:
    """uint8 ``[N, 3, 32, 32]`` and int64 ``[N]`` of one file, packed or not (told by its contents, not its name)."""
    with path.open("rb") as file:
        packed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        try:
            contents = (gzip.GzipFile(fileobj=file) if packed else file).read(_MOST + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: truncated or damaged gzip file: {error}") from error
    if not contents or len(contents) % RECORD or len(contents) > _MOST:
        raise DataError(
            f"{path}: wrong length: expected records of {RECORD} bytes, at most {_MOST} bytes, got {len(contents)}"
        )
    records = torch.frombuffer(bytearray(contents), dtype=torch.uint8).view(-1, RECORD)
    labels = records[:, 0].long()
    if labels.max() >= len(CLASSES):
        raise DataError(f"{path}: expected labels 0 to {len(CLASSES) - 1}, got {int(labels.max())}")
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), labels
