"""USPS, handwritten digits from envelopes, from a folder with its two text files in LIBSVM's format."""

from __future__ import annotations

import bz2
import os
from pathlib import Path

import torch
from torch import Tensor

from fastmod.data.folders import find_folder
from fastmod.data.idx import DataError
from fastmod.data.mnist import MNIST

SIDE = 16
CLASSES = 10
FILES = ("usps", "usps.t")
#: Folders of $FASTMOD_DATA to search.
FOLDERS = ("", "usps", "USPS")
_MOST = 1 << 28  # bytes of an unpacked file, eight times the official one


def load_usps(root: str | os.PathLike[str] | None = None) -> MNIST:
    """Read USPS from ``root``, by default from ``$FASTMOD_DATA`` or its folder ``usps`` or ``USPS``.

    Args:
        root: folder with ``usps`` and ``usps.t``, each plain or ``.bz2``. Each line has a class 1 .. 10 for the digits
            0 .. 9 and ``number:value`` for the pixels (of 1 .. 256) that are not 0; values are in -1 .. 1.

    Returns:
        uint8 images ``[7291, 16, 16]`` (-1 becomes 0, and 1 becomes 255), int64 labels ``[7291]``, and the same of 2007
        test images.

    Raises:
        DataError: nothing found, or a file is missing or damaged.
    """
    content = f"{' and '.join(FILES)} (LIBSVM's format, plain or .bz2)"
    return _read_folder(find_folder("USPS", root, FOLDERS, lambda f: any(_file(f, name) for name in FILES), content))


def _file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / f"{name}.bz2", folder / name) if file.is_file()), None)


def _read_folder(folder: Path) -> MNIST:
    found: list[Tensor] = []
    for name in FILES:
        file = _file(folder, name)
        if file is None:
            what = f"expected {name} (plain or .bz2)" if folder.is_dir() else "no such folder"
            raise DataError(f"{folder}: {what}; USPS is read from a folder with {' and '.join(FILES)}")
        found += _read_file(file)
    return MNIST(*found)


def _read_file(path: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 16, 16]`` and labels int64 ``[N]``."""
    with path.open("rb") as file:
        packed = file.read(3) == b"BZh"
        file.seek(0)
        try:
            contents = (bz2.BZ2File(file) if packed else file).read(_MOST + 1)
        except (EOFError, OSError, ValueError) as error:
            raise DataError(f"{path}: truncated or damaged bzip2 file: {error}") from error
    if len(contents) > _MOST:
        raise DataError(f"{path}: expected at most {_MOST} bytes")
    lines = [line for line in contents.split(b"\n") if line.strip()]
    images = torch.zeros(len(lines), SIDE * SIDE, dtype=torch.float64)
    labels = torch.zeros(len(lines), dtype=torch.int64)
    for number, line in enumerate(lines):
        try:
            label, *pixels = line.split()
            labels[number] = int(label) - 1
            pairs = [pixel.split(b":") for pixel in pixels]
            places = torch.tensor([int(place) - 1 for place, _ in pairs], dtype=torch.int64)
            values = torch.tensor([float(value) for _, value in pairs], dtype=torch.float64)
        except (ValueError, RuntimeError) as error:
            raise DataError(f"{path}: line {number + 1}: expected a class and number:value pairs: {error}") from error
        inside = bool(((places >= 0) & (places < SIDE * SIDE) & (values >= -1) & (values <= 1)).all())
        if not inside or not 0 <= int(labels[number]) < CLASSES:
            raise DataError(
                f"{path}: line {number + 1}: expected a class 1 .. {CLASSES} and pixels 1 .. {SIDE * SIDE} of -1 .. 1"
            )
        images[number, places] = values
    if not lines:
        raise DataError(f"{path}: expected at least one line, got an empty file")
    return images.add(1).mul(127.5).round().byte().view(-1, SIDE, SIDE), labels
