"""The idx format of MNIST: a magic number, the sizes, then the numbers row by row."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

#: Two zeros and the code of unsigned bytes; the fourth byte of a file is its number of dimensions.
MAGIC = b"\x00\x00\x08"
GZIP_MAGIC = b"\x1f\x8b"
MAX_DIMS = 64  # torch refuses many operations on more
CHUNK = 1 << 20


class DataError(ValueError):
    """Data is missing, damaged or not as expected; the message names the file."""


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """Read an idx file of unsigned bytes, plain or gzipped, whatever its name.

    Returns:
        uint8 ``[size_0, size_1, ...]`` as the header says: ``[N, H, W]`` for images, ``[N]`` for labels.

    Raises:
        DataError: not an idx file of unsigned bytes, damaged, or shorter or longer than its header says.
    """
    return to_tensor(read_contents(path))


def read_contents(path: str | os.PathLike[str]) -> bytearray:
    """The unpacked contents of an idx file, header included, exactly as long as the header says."""
    with open(path, "rb") as file:
        packed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        if not packed:
            return _read(file, path, os.fstat(file.fileno()).st_size)
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _read(unpacked, path, None)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: truncated or damaged gzip file: {error}") from error


def _read(stream: BinaryIO | gzip.GzipFile, path: str | os.PathLike[str], length: int | None) -> bytearray:
    contents = bytearray(stream.read(4))
    if len(contents) < 4:
        raise DataError(f"{path}: truncated: expected an idx header, got {len(contents)} bytes")
    if contents[:3] != MAGIC:
        raise DataError(
            f"{path}: wrong magic number: expected {MAGIC.hex()} (idx of unsigned bytes), got {contents[:3].hex()}"
        )
    dims = contents[3]
    if not 1 <= dims <= MAX_DIMS:
        raise DataError(f"{path}: wrong header: expected 1 to {MAX_DIMS} dimensions, got {dims}")
    contents += stream.read(4 * dims)
    if len(contents) < 4 + 4 * dims:
        raise DataError(f"{path}: truncated: expected a header of {4 + 4 * dims} bytes, got {len(contents)}")
    sizes = _sizes(contents)
    # A size of 0 means no bytes follow, but the other sizes may still overflow in torch.
    if math.prod(max(size, 1) for size in sizes) >= 2**63:
        raise DataError(f"{path}: wrong header: sizes {sizes} are too large for a tensor")
    expected = len(contents) + math.prod(sizes)
    needs = f"{path}: wrong length: sizes {sizes} need {expected} bytes with the header"
    if length is not None and length != expected:
        raise DataError(f"{needs}, the file has {length}")
    # Read in chunks, so that a wrong header cannot claim a lot of memory. The one byte more makes gzip reach the
    # end, where it compares its checksum.
    while len(contents) <= expected and (chunk := stream.read(min(CHUNK, expected + 1 - len(contents)))):
        contents += chunk
    if len(contents) != expected:
        found = "more" if len(contents) > expected else str(len(contents))
        raise DataError(f"{needs}, the file has {found}")
    return contents


def _sizes(contents: bytearray) -> list[int]:
    return [int.from_bytes(contents[4 + 4 * dim : 8 + 4 * dim], "big") for dim in range(contents[3])]


def blank(sizes: Sequence[int]) -> bytearray:
    """Contents of an idx file of these sizes, filled with zeros."""
    header = MAGIC + bytes([len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
    return bytearray(header) + bytearray(math.prod(sizes))


def to_tensor(contents: bytearray) -> Tensor:
    """The numbers of an idx file, uint8 ``[size_0, size_1, ...]``, in the memory of ``contents``."""
    sizes = _sizes(contents)
    if 0 in sizes:  # frombuffer refuses an empty buffer
        return torch.empty(sizes, dtype=torch.uint8)
    return torch.frombuffer(contents, dtype=torch.uint8, offset=4 + 4 * len(sizes)).view(sizes)
