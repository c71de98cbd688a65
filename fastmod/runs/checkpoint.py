"""Checkpoints: written atomically, sealed with a digest, read with ``weights_only=True``."""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastmod.runs.config import StudyError

FORMAT = "fastmod-checkpoint-1"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that, whatever happens, either the old one or the new one is there."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name must reach the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save(path: Path, owner: str, state: dict[str, Any]) -> None:
    """``owner`` says whose checkpoint it is; loading it for another owner is refused."""
    write_atomically(path, content_of(owner, state))


def content_of(owner: str, state: dict[str, Any]) -> bytes:
    """The contents of the file."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, "owner": owner, "digest": digest(state), "state": _alone(state)}, buffer)
    return buffer.getvalue()


def _alone(value: Any) -> Any:
    """Copies tensors that are part of a larger one: torch would save all of it with each."""
    if isinstance(value, Tensor):
        whole = value.layout != torch.strided or value.untyped_storage().nbytes() == value.nbytes
        return value if whole else value.detach().clone()
    if isinstance(value, dict):
        return {key: _alone(entry) for key, entry in value.items()}
    return type(value)(map(_alone, value)) if isinstance(value, list | tuple) else value


def load(path: Path, owner: str | None = None, content: bytes | None = None) -> dict[str, Any]:
    """The state; a damaged or foreign file raises :class:`StudyError` and nothing is changed. ``content``: of a file
    that is on another machine."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings about foreign pickles
            source = path if content is None else io.BytesIO(content)
            found = torch.load(source, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise StudyError(f"{path}: no such checkpoint") from None
    except Exception as error:  # a damaged file makes torch raise almost anything
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        if isinstance(error, pickle.UnpicklingError):  # the advice of torch would not help
            reason = "damaged, or not only numbers, text and tensors"
        raise StudyError(f"{path}: not a readable checkpoint ({reason}); {_REMEDY}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("state"), dict):
        raise StudyError(f"{path}: not a checkpoint of a fastmod study (expected format {FORMAT}); {_REMEDY}")
    try:
        intact = found.get("digest") == digest(found["state"])
    except (RuntimeError, TypeError, ValueError):  # kinds of tensors that are never saved here
        intact = False
    if not intact:
        raise StudyError(f"{path}: damaged, its contents do not match its digest; {_REMEDY}")
    if owner is not None and found.get("owner") != owner:
        raise StudyError(f"{path}: belongs to another run or other settings ({found.get('owner')!r}, not {owner!r})")
    return found["state"]


_REMEDY = "delete it to begin this trial again"


def digest(value: Any) -> str:
    """SHA-256 over nested dicts, lists, numbers, text and tensors."""
    seal = hashlib.sha256()
    _feed(seal, value)
    return seal.hexdigest()


def _feed(seal: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        seal.update(f"tensor {plain.dtype} {tuple(plain.shape)}".encode())
        if plain.layout != torch.strided:
            raise TypeError(f"checkpoint: expected dense tensors, got one of layout {plain.layout}")
        size = plain.numel() * plain.element_size()
        if size:  # read in place, without numpy, which is needed nowhere else
            seal.update((ctypes.c_char * size).from_address(plain.data_ptr()))
    elif isinstance(value, dict):
        seal.update(f"dict {len(value)}".encode())
        for key, entry in value.items():
            seal.update(repr(key).encode())
            _feed(seal, entry)
    elif isinstance(value, list | tuple):
        seal.update(f"list {len(value)}".encode())
        for entry in value:
            _feed(seal, entry)
    else:
        seal.update(f"{type(value).__name__} {value!r}".encode())
