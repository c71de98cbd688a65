"""SVHN, house numbers cropped to single digits, from a folder with its MATLAB files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from fastmod.data.folders import find_folder
from fastmod.data.idx import DataError
from fastmod.data.mat import read_mat
from fastmod.data.photographs import Photographs

SIDE = 32
CLASSES = tuple("0123456789")
#: Folders of $FASTMOD_DATA to search.
FOLDERS = ("", "svhn", "SVHN")
_PARTS = ("train_32x32", "test_32x32")


class SVHN(Photographs):
    """Digits of house numbers and their labels, 0 to 9."""


def load_svhn(root: str | os.PathLike[str] | None = None) -> SVHN:
    """Read SVHN, "Format 2", from ``root``, by default from ``$FASTMOD_DATA`` or its folder ``svhn`` or ``SVHN``.

    Args:
        root: folder with ``train_32x32.mat`` and ``test_32x32.mat``; instead of either, there may be a single
            file with a longer name, such as ``train_32x32_first7000.mat``. If given, no other place is searched.

    Returns:
        ``train_images`` uint8 ``[N, 3, 32, 32]``, ``train_labels`` int64 ``[N]`` (the digit 0 has label 0, in
        the files 10), and the same of the test images.

    Raises:
        DataError: nothing found, or a file is missing or damaged.
    """
    content = "train_32x32.mat and test_32x32.mat"
    return _read_folder(find_folder("SVHN", root, FOLDERS, lambda f: any(_files(f, part) for part in _PARTS), content))


def _files(folder: Path, part: str) -> list[Path]:
    exact = folder / f"{part}.mat"
    return [exact] if exact.is_file() else sorted(folder.glob(f"{part}*.mat"))


def _read_folder(folder: Path) -> SVHN:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; SVHN is read from a folder with its MATLAB files")
    found: list[Tensor] = []
    for part in _PARTS:
        files = _files(folder, part)
        if len(files) != 1:
            several = f", found {', '.join(file.name for file in files)}" if files else ""
            raise DataError(f"{folder}: expected {part}.mat{several}; SVHN is read from a folder with its MATLAB files")
        found += _read_file(files[0])
    return SVHN(*found)


def _read_file(path: Path) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 3, 32, 32]`` and labels int64 ``[N]``."""
    arrays = read_mat(path)
    for name in ("X", "y"):
        if name not in arrays:
            raise DataError(f"{path}: expected arrays X and y, got {', '.join(arrays) or 'none'}")
    images, labels = arrays["X"], arrays["y"].flatten().long()
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[:3] != (SIDE, SIDE, 3):
        raise DataError(f"{path}: X: expected bytes [32, 32, 3, N], got {images.dtype} {list(images.shape)}")
    if len(labels) != images.shape[3] or not len(labels):
        raise DataError(f"{path}: y: expected a label for each of {images.shape[3]} images, got {len(labels)}")
    if labels.min() < 0 or labels.max() > len(CLASSES):
        raise DataError(f"{path}: y: expected 1 to 10, got {int(labels.min())} to {int(labels.max())}")
    return images.permute(3, 2, 0, 1).contiguous(), labels % len(CLASSES)
