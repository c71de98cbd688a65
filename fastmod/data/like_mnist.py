"""Fashion-MNIST and KMNIST: other images in files named like those of MNIST."""

from __future__ import annotations

import os
from pathlib import Path

from fastmod.data.folders import find_folder
from fastmod.data.idx import DataError
from fastmod.data.mnist import CHECKSUMS, MNIST, find_file, read_files

#: Folders of $FASTMOD_DATA to search; not that folder itself, which may hold MNIST.
FASHION_FOLDERS = ("fashion_mnist", "fashion-mnist", "FashionMNIST/raw")
KMNIST_FOLDERS = ("kmnist", "KMNIST/raw")


def load_fashion_mnist(root: str | os.PathLike[str] | None = None) -> MNIST:
    """Read Fashion-MNIST from ``root``, by default from the folder ``fashion_mnist`` of ``$FASTMOD_DATA``.

    Args:
        root: folder with the four files of :func:`fastmod.data.mnist`, plain or ``.gz``. The two training files may
            instead be in its only subfolder that has both, for example one with fewer images.

    Returns:
        uint8 images ``[60000, 28, 28]``, int64 labels ``[60000]``, and the same of 10000 test images.

    Raises:
        DataError: nothing found, or a file is missing or damaged.
    """
    return _load("Fashion-MNIST", FASHION_FOLDERS, root)


def load_kmnist(root: str | os.PathLike[str] | None = None) -> MNIST:
    """Read KMNIST, cursive Japanese characters of ten classes, in the way of :func:`load_fashion_mnist`."""
    return _load("KMNIST", KMNIST_FOLDERS, root)


def _load(title: str, folders: tuple[str, ...], root: str | os.PathLike[str] | None) -> MNIST:
    content = f"{', '.join(CHECKSUMS)} (plain or .gz)"
    return _read(title, find_folder(title, root, folders, Path.is_dir, content, f"the folder that {folders[0]} is in"))


def _read(title: str, folder: Path) -> MNIST:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; {title} is read from a folder with {', '.join(CHECKSUMS)}")
    inner = sorted(path for path in folder.iterdir() if path.is_dir())
    part = [path for path in inner if all(find_file(path, name) for name in list(CHECKSUMS)[:2])]
    files: dict[str, Path] = {}
    for images, labels in (list(CHECKSUMS)[:2], list(CHECKSUMS)[2:]):
        # Both from one folder: the labels here may be of all images while a subfolder has fewer.
        places = [folder, *(part if len(part) == 1 and images.startswith("train") else ())]
        place = next((place for place in places if find_file(place, images)), folder)
        for name in (images, labels):
            file = find_file(place, name)
            if file is None:
                raise DataError(f"{place}: expected {name} (plain or .gz), a file of {title}")
            files[name] = file
    return read_files(files, verify=False)
