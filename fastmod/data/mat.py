"""Numeric arrays from MATLAB 5 files (the format of SVHN), packed or not, in either byte order.

A file has a header of 128 bytes and then elements: a type, a size, and that many bytes, padded to a multiple of eight.
An array is an element made of elements: flags, sizes, name, numbers. The first dimension varies fastest.
"""

from __future__ import annotations

import math
import os
import struct
import sys
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fastmod.data.idx import DataError

_HEADER = 128
_MOST = 1 << 32  # bytes of an unpacked array: a limit, as a small file could fill the memory
_MATRIX, _COMPRESSED, _INT8, _INT32, _UINT32 = 14, 15, 1, 5, 6
#: Type of an element -> dtype; other types are not read.
_NUMBERS = {
    1: torch.int8, 2: torch.uint8, 3: torch.int16, 4: torch.uint16, 5: torch.int32, 6: torch.uint32, 7: torch.float32,
    9: torch.float64, 12: torch.int64, 13: torch.uint64,
}  # fmt: skip
_NUMERIC = range(6, 16)  # classes of numeric arrays, double to uint64
_COMPLEX = 0x0800


def read_mat(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The arrays of real numbers in a MATLAB 5 file, by name and with MATLAB's shapes.

    The dtype is the stored one: MATLAB stores a double array of whole numbers as bytes.

    Raises:
        DataError: not a MATLAB 5 file, or damaged.
    """
    with open(path, "rb") as file:
        contents = memoryview(file.read())
    order = {b"IM": "<", b"MI": ">"}.get(bytes(contents[126:128]))
    if len(contents) < _HEADER or order is None:
        raise DataError(f"{path}: not a MATLAB 5 file: expected a header of {_HEADER} bytes that ends in IM or MI")
    try:
        return dict(_arrays(contents[_HEADER:], order))
    except (EOFError, struct.error, zlib.error, RuntimeError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: truncated or damaged MATLAB file: {error}") from error


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and contents of each element."""
    place = 0
    while place < len(data):
        kind, size = struct.unpack_from(order + "II", data, place)
        if kind >> 16:  # up to four bytes, with type and size in one word
            kind, size = kind & 0xFFFF, kind >> 16
            begin, end = place + 4, place + 8
        else:
            begin = place + 8
            end = begin + size
            if kind != _COMPRESSED:  # packed elements have no padding
                end += -size % 8
        if begin + size > len(data):
            raise EOFError(f"an element of {size} bytes, {len(data) - begin} are left")
        yield kind, data[begin : begin + size]
        place = end


def _arrays(data: memoryview, order: str) -> Iterator[tuple[str, Tensor]]:
    for kind, contents in _elements(data, order):
        if kind == _COMPRESSED:
            unpacking = zlib.decompressobj()
            unpacked = unpacking.decompress(contents, _MOST)
            if not unpacking.eof:
                raise EOFError("a packed array without an end")
            yield from _arrays(memoryview(unpacked), order)
        elif kind == _MATRIX:
            yield from _array(contents, order)


def _array(data: memoryview, order: str) -> Iterator[tuple[str, Tensor]]:
    """Name and numbers of an array; nothing for text, cells and structures."""
    parts = _elements(data, order)
    kind, flags = next(parts, (0, memoryview(b"")))
    if kind != _UINT32:
        raise ValueError("an array without flags")
    (word,) = struct.unpack_from(order + "I", flags)
    if word & 0xFF not in _NUMERIC or word & _COMPLEX:
        return
    fields = list(parts)
    if [kind for kind, _ in fields[:2]] != [_INT32, _INT8] or len(fields) != 3 or fields[2][0] not in _NUMBERS:
        raise ValueError("an array that is not sizes, name and numbers")
    (_, sizes), (_, name), (kind, numbers) = fields
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes)
    dtype = _NUMBERS[kind]
    if min(shape, default=-1) < 0 or math.prod(shape) * dtype.itemsize != len(numbers):
        raise ValueError(f"an array of shape {list(shape)} and {dtype} with {len(numbers)} bytes")
    yield (
        bytes(name).decode("ascii"),
        _tensor(numbers, dtype, order).view(*reversed(shape)).permute(*reversed(range(len(shape)))),
    )


def _tensor(numbers: memoryview, dtype: torch.dtype, order: str) -> Tensor:
    if not len(numbers):
        return torch.empty(0, dtype=dtype)
    data = torch.frombuffer(bytearray(numbers), dtype=torch.uint8)
    if dtype.itemsize > 1 and (order == "<") != (sys.byteorder == "little"):
        data = data.view(-1, dtype.itemsize).flip(1).flatten()
    return data.view(dtype)
