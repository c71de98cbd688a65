"""Cuts a batch into one part per mask sample, and joins the outputs of the parts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


def leaves(value: Any, found: list[Any] | None = None) -> list[Any]:
    """Everything inside tuples, lists, dicts and dataclasses, in order."""
    found = [] if found is None else found
    rebuilt(value, lambda leaf: found.append(leaf))
    return found


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with ``change(leaf)`` for every leaf."""
    if isinstance(value, (Tensor, PackedSequence, str)) or value is None:
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: rebuilt(getattr(value, f.name), change) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        items = {key: rebuilt(item, change) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return items
        result = copy.copy(value)
        result.update(items)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[rebuilt(item, change) for item in value])
    if isinstance(value, (tuple, list)):
        return type(value)(rebuilt(item, change) for item in value)
    return change(value)


def holds_tensors(leaf: Any, depth: int = 5) -> bool:
    """Whether an object that is none of these structures holds tensors, such as a cache of keys and values."""
    if isinstance(leaf, (Tensor, PackedSequence)):
        return depth < 5
    if depth == 0 or isinstance(leaf, (type(None), bool, int, float, complex, str, type)):
        return False
    if isinstance(leaf, Mapping):
        return any(holds_tensors(item, depth - 1) for item in leaf.values())
    if isinstance(leaf, (list, tuple, set)):
        return any(holds_tensors(item, depth - 1) for item in leaf)
    return any(holds_tensors(item, depth - 1) for item in getattr(leaf, "__dict__", {}).values())


def batch_size(values: Sequence[Any], dims: Sequence[int | None], batch_dim: int) -> int:
    """Size of the batch: that of the first tensor with more than one example; 1 if there is none."""
    sizes = []
    for value, dim in zip(values, dims, strict=True):
        if isinstance(value, PackedSequence):
            sizes.append(int(value.batch_sizes[0]))
        elif isinstance(value, Tensor) and dim is not None and value.dim() > dim:
            sizes.append(value.shape[dim])
    if not sizes:
        raise ValueError(f"input: expected a tensor with the batch in dimension {batch_dim}, got none")
    return next((size for size in sizes if size != 1), 1)


def has_batch(value: Any, dim: int | None, batch: int, *, named: bool) -> bool:
    """Whether a leaf of the input holds the batch; leaves with another size there are shared by all parts.

    ``named``: the caller named the batch dimension, so several rows per example are no accident.
    """
    if isinstance(value, PackedSequence):
        return True
    if not isinstance(value, Tensor) or dim is None or value.dim() <= dim:
        return False
    size = value.shape[dim]
    return size == batch or (named and batch > 0 and size % batch == 0)


def cut(value: Any, dim: int, sizes: Sequence[int]) -> list[Any]:
    """The parts of a leaf that holds the batch."""
    if isinstance(value, PackedSequence):
        return _cut_packed(value, sizes)
    rows = value.shape[dim] // max(sum(sizes), 1)
    return list(value.split([rows * size for size in sizes], dim))


def _cut_packed(value: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
    sequences, lengths = pad_packed_sequence(value, batch_first=True)
    pieces = zip(sequences.split(list(sizes)), lengths.split(list(sizes)), strict=True)
    return [pack_padded_sequence(s, n, batch_first=True, enforce_sorted=False) for s, n in pieces]


def _join_packed(values: Sequence[PackedSequence]) -> PackedSequence:
    padded = [pad_packed_sequence(value, batch_first=True) for value in values]
    longest = max(sequences.shape[1] for sequences, _ in padded)
    whole = [torch.nn.functional.pad(s, (0, 0) * (s.dim() - 2) + (0, longest - s.shape[1])) for s, _ in padded]
    lengths = torch.cat([n for _, n in padded])
    return pack_padded_sequence(torch.cat(whole), lengths, batch_first=True, enforce_sorted=False)


def part_sizes(batch: int, samples: int) -> list[int]:
    """Examples of each part: equal, or one more in the first ones if the batch is not a multiple of the samples. A
    batch smaller than the samples does not use the last ones."""
    small, more = divmod(batch, samples)
    return [1] * batch if 0 < batch < samples else [small + (s < more) for s in range(samples)]


def join(values: Sequence[Any], axis: int | None, sizes: Sequence[int]) -> Any:
    """One leaf of the output from those of the parts; without an axis, the mean over the examples."""
    first = values[0]
    if isinstance(first, PackedSequence):
        return _join_packed(values)
    if isinstance(first, Tensor):
        if axis is not None:
            return torch.cat(list(values), axis)
        if not (first.is_floating_point() or first.is_complex()):
            return first if all(torch.equal(first, other) for other in values[1:]) else torch.stack(list(values))
        total = sum(sizes)
        return torch.stack([value * (size / total) for value, size in zip(values, sizes, strict=True)]).sum(0)
    if holds_tensors(first):
        return None
    return first if all(other is first or _equal(other, first) for other in values[1:]) else list(values)


def join_stacked(value: Any, axis: int | None) -> Any:
    """The same for outputs of equal parts that are stacked, ``[S, ...]``."""
    if not isinstance(value, Tensor):
        return value
    if axis is not None:
        return value.movedim(0, axis).flatten(axis, axis + 1)
    if value.is_floating_point() or value.is_complex():
        return value.mean(0)
    return value[0] if (value == value[:1]).all() else value


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b


def certain_axis(shape: Sequence[int], rows: int, batch_dim: int) -> int | None:
    """The batch dimension of an output of a part, if exactly one dimension has that size, and it is that of the input;
    else None."""
    found = [dim for dim, size in enumerate(shape) if size == rows]
    return batch_dim if found == [batch_dim] else None


def axis_between(small: Sequence[int], large: Sequence[int], rows: int, batch: int) -> int | None:
    """The dimension that grew from ``rows`` to ``batch`` examples; None if none did: there is no batch in it."""
    changed = [dim for dim, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    if len(small) != len(large) or len(changed) > 1:
        raise ValueError(
            f"output: expected one dimension to grow with the batch, got {list(small)} for {rows} examples and "
            f"{list(large)} for {batch}"
        )
    if not changed:
        return None
    [axis] = changed
    if (small[axis], large[axis]) != (rows, batch):
        raise ValueError(
            f"output: expected one row an example in dimension {axis}, got {list(small)} for {rows} examples and "
            f"{list(large)} for {batch}: in which order examples lie there cannot be told. Return it with a dimension "
            "of its own for what each example has, such as [batch, steps, ...]"
        )
    return axis
