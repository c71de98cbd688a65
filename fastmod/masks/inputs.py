"""Finds the batch in the arguments of a net, and cuts it into parts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fastmod.masks import parts


@dataclass(frozen=True)
class Places:
    """``batch_dim``, and exceptions by name or position of an argument."""

    batch_dim: int
    exceptions: dict[str | int, int | None]

    def __post_init__(self) -> None:
        for key, dim in self.exceptions.items():
            if not isinstance(key, (str, int)) or not (dim is None or (isinstance(dim, int) and dim >= 0)):
                raise ValueError(
                    f"in_dims: expected names or positions and dimensions >= 0 or None, got {key!r}: {dim!r}"
                )

    def of(self, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int | None, bool]]:
        """Per leaf of the arguments: the batch dimension, and whether the caller named it."""
        names: list[str | None] = [None] * len(args)
        if self.exceptions or self.batch_dim:  # otherwise names do not matter
            names = _positional_names(net, len(args))
        result: list[tuple[int | None, bool]] = []
        both: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in both:
            name = names[key] if isinstance(key, int) else key
            told = [k for k in (key, name) if k is not None and k in self.exceptions]
            place = (self.exceptions[told[0]], True) if told else self._usual(net, name, value)
            result += [place] * len(parts.leaves(value))
        return result

    def _usual(self, net: nn.Module, name: str | None, value: Any) -> tuple[int | None, bool]:
        """Torch's own attention takes masks batch first, even where sequences are not."""
        if name is not None and name.endswith("key_padding_mask"):
            return 0, True
        if isinstance(net, nn.MultiheadAttention) and name == "attn_mask":
            return (0, True) if isinstance(value, Tensor) and value.dim() == 3 else (None, True)
        return self.batch_dim, False


def check_batch_dim(net: nn.Module, batch_dim: int) -> None:
    """Torch's own layers say where they expect the batch."""
    if isinstance(net, (nn.RNNBase, nn.MultiheadAttention)) and batch_dim != (0 if net.batch_first else 1):
        raise ValueError(
            f"batch_dim: expected {1 - batch_dim}, where {type(net).__name__} with batch_first={net.batch_first} has "
            f"the batch, got {batch_dim}"
        )


def check_sequences(net: nn.Module, leaves: list[Any]) -> None:
    """A single sequence has no batch to cut, but another dimension in its place."""
    if isinstance(net, (nn.RNNBase, nn.MultiheadAttention)):
        first = leaves[0] if leaves else None
        if isinstance(first, Tensor) and first.dim() != 3:
            raise ValueError(f"input: expected a batch of sequences (3 dimensions), got shape {list(first.shape)}")


def _positional_names(net: nn.Module, count: int) -> list[str | None]:
    try:
        parameters = list(inspect.signature(net.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names: list[str | None] = [p.name for p in parameters if p.kind in kinds]
    return (names + [None] * count)[:count]


class Batch:
    """The arguments of one forward, cut into parts."""

    def __init__(
        self, places: Places, net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self.leaves = parts.leaves((args, kwargs))
        check_sequences(net, self.leaves)
        found = places.of(net, args, kwargs)
        dims = [dim for dim, _ in found]
        self.size = parts.batch_size(self.leaves, dims, places.batch_dim)
        self.sizes = parts.part_sizes(self.size, samples)
        #: Per leaf the batch dimension; None for leaves that all parts share.
        self.dims = [
            (dim or 0) if parts.has_batch(leaf, dim, self.size, named=named) else None
            for leaf, (dim, named) in zip(self.leaves, found, strict=True)
        ]
        packed = any(isinstance(leaf, PackedSequence) for leaf in self.leaves)
        #: Whether all parts have the same size, so that they can run together.
        self.even = len(self.sizes) == samples and self.size % samples == 0 and not packed

    def with_leaves(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with their tensors replaced."""
        rest = iter(leaves)
        args, kwargs = parts.rebuilt((self.args, self.kwargs), lambda _: next(rest))
        return args, kwargs

    def parts(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        columns = [
            [leaf] * len(self.sizes) if dim is None else parts.cut(leaf, dim, self.sizes)
            for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        return [self.with_leaves([column[s] for column in columns]) for s in range(len(self.sizes))]
