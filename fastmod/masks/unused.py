"""Finds masks that have no effect on an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fastmod.masks import parts
from fastmod.masks.together import without_hidden_dimensions


def find_unused(logits: Mapping[str, Tensor], outputs: Any) -> list[str]:
    """Names of the logits that no gradient of ``outputs`` would reach."""
    waiting = {id(value): name for name, value in logits.items() if value.requires_grad}
    tensors = [leaf for leaf in parts.leaves(outputs) for leaf in _tensors(leaf)]
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(stack)
    while stack and waiting:
        node = stack.pop()
        if node.name() == "CheckpointFunctionBackward":  # a reentrant checkpoint, whose inside only the backward shows
            return []
        waiting.pop(id(getattr(node, "variable", None)), None)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(waiting.values())


def _tensors(leaf: Any) -> list[Tensor]:
    if isinstance(leaf, Tensor):
        return [without_hidden_dimensions(leaf)]
    data = getattr(leaf, "data", None)  # a PackedSequence
    return [data] if isinstance(data, Tensor) else []
