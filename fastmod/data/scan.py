"""SCAN from its text files: commands such as ``jump twice`` and their actions, ``I_JUMP I_JUMP``."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fastmod.data.idx import DataError

#: Split -> its file; ``part`` is ``train`` or ``test``.
SPLITS = {
    "simple": "simple_split/tasks_{part}_simple.txt",
    "length": "length_split/tasks_{part}_length.txt",
    "add_prim_jump": "add_prim_split/tasks_{part}_addprim_jump.txt",
    "add_prim_turn_left": "add_prim_split/tasks_{part}_addprim_turn_left.txt",
}
ARCHIVE = "SCAN.tar.xz"
#: Folders of $FASTMOD_DATA to search.
FOLDERS = ("", "scan", "SCAN")


class Vocabulary:
    """Words as numbers from 3; 0 pads, 1 starts and 2 ends a sequence."""

    PAD, START, END = 0, 1, 2

    def __init__(self, words: Sequence[str]) -> None:
        self.words = ("<pad>", "<start>", "<end>", *words)
        self._number = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """The words' numbers followed by END; KeyError for an unknown word."""
        return [*(self._number[word] for word in words), self.END]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The words before END."""
        found: list[str] = []
        for number in numbers:
            if number == self.END:
                break
            found.append(self.words[number])
        return found


#: All words of the grammar, so that all splits use the same numbers.
COMMANDS = Vocabulary(
    ("walk", "look", "run", "jump", "turn", "left", "right", "opposite", "around", "twice", "thrice", "and", "after")
)
ACTIONS = Vocabulary(("I_WALK", "I_LOOK", "I_RUN", "I_JUMP", "I_TURN_LEFT", "I_TURN_RIGHT"))


class Sequences(NamedTuple):
    """Pairs in the order of their file; every sequence ends with END and is padded with PAD."""

    commands: Tensor  # int64 [N, longest command + 1]
    actions: Tensor  # int64 [N, longest action + 1]


class SCAN(NamedTuple):
    train: Sequences
    test: Sequences


def load_scan(root: str | os.PathLike[str] | None = None, splits: Sequence[str] = tuple(SPLITS)) -> dict[str, SCAN]:
    """Read splits of SCAN from ``root``, by default from ``$FASTMOD_DATA`` or its folder ``scan`` or ``SCAN``.

    Args:
        root: folder with ``simple_split/tasks_train_simple.txt`` and so on, or with ``SCAN.tar.xz``, or that file
            itself; the archive takes some seconds longer. If given, no other place is searched.
        splits: any of ``simple``, ``length``, ``add_prim_jump``, ``add_prim_turn_left``.

    Returns:
        Split -> its training and test pairs; see :class:`Sequences` for the shapes.

    Raises:
        DataError: nothing found, or a file is missing, damaged or not SCAN.
    """
    unknown = [split for split in splits if split not in SPLITS]
    if unknown:
        raise DataError(f"SCAN: unknown split {unknown[0]!r}; known: {', '.join(SPLITS)}")
    if root is not None:
        source = _source(Path(root))
        if source is None:
            what = "no SCAN in it" if Path(root).exists() else "no such folder"
            raise DataError(f"{root}: {what}; expected {SPLITS['simple'].format(part='train')} and so on, or {ARCHIVE}")
    else:
        variable = os.environ.get("FASTMOD_DATA")
        tried = [_source(Path(variable, folder)) for folder in FOLDERS] if variable else []
        source = next(filter(None, tried), None)
        if source is None:
            where = f" in FASTMOD_DATA={variable}" if variable else ""
            raise DataError(
                f"SCAN: not found{where}; give a folder with {SPLITS['simple'].format(part='train')} and so on or with "
                f"{ARCHIVE}, or set FASTMOD_DATA to such a folder"
            )
    names = [SPLITS[split].format(part=part) for split in splits for part in ("train", "test")]
    texts = _from_folder(source, names) if source.is_dir() else _from_archive(source, names)
    found = {name: parse(texts[name], f"{source}: {name}") for name in names}
    return {
        split: SCAN(*(found[SPLITS[split].format(part=part)] for part in ("train", "test"))) for split in splits
    }  # fmt: skip


def _source(place: Path) -> Path | None:
    """The folder with the splits' folders, or the archive."""
    if place.is_file():
        return place
    for folder in (place, place / "SCAN"):
        if any((folder / name).parent.is_dir() for name in SPLITS.values()):
            return folder
    return place / ARCHIVE if (place / ARCHIVE).is_file() else None


def _from_folder(folder: Path, names: Sequence[str]) -> dict[str, str]:
    for name in names:
        if not (folder / name).is_file():
            raise DataError(f"{folder}: expected {name}")
    try:
        return {name: (folder / name).read_text("ascii") for name in names}
    except UnicodeDecodeError as error:
        raise DataError(f"{folder}: not SCAN: {error}") from error


def _from_archive(archive: Path, names: Sequence[str]) -> dict[str, str]:
    """Read files in the archive's order: going back would unpack it again from its start."""
    found: dict[str, str] = {}
    try:
        with tarfile.open(archive) as members:
            for member in members:
                name = next((name for name in names if ("/" + member.name).endswith("/" + name)), None)
                file = members.extractfile(member) if name else None
                if name and file:
                    found[name] = file.read().decode("ascii")
                if len(found) == len(set(names)):
                    break
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{archive}: truncated or damaged archive: {str(error).splitlines()[0]}") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{archive}: expected {missing[0]} in it")
    return found


def parse(text: str, origin: str) -> Sequences:
    """Lines ``IN: jump twice OUT: I_JUMP I_JUMP`` as tensors; ``origin`` is for messages."""
    commands, actions = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        head, out, action = line.partition(" OUT: ")
        try:
            if not head.startswith("IN: ") or not out:
                raise KeyError
            commands.append(COMMANDS.encode(head.removeprefix("IN: ").split()))
            actions.append(ACTIONS.encode(action.split()))
        except KeyError:
            raise DataError(f"{origin}, line {number}: expected IN: commands OUT: actions, got {line[:60]!r}") from None
    if not commands:
        raise DataError(f"{origin}: expected lines IN: commands OUT: actions, got none")
    return Sequences(padded(commands), padded(actions))


def padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """int64 ``[N, longest]``, padded with PAD."""
    longest = max(map(len, sequences))
    return torch.tensor([[*numbers, *[Vocabulary.PAD] * (longest - len(numbers))] for numbers in sequences])
