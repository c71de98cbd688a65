"""Hard masks as sets of weights: a dict from parameter names to bool tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Masks = Mapping[str, Tensor]


def check_masks(masks: Masks, model: nn.Module, argument: str = "masks") -> None:
    """Check that every mask is a bool tensor with the shape of the parameter of its name."""
    parameters = dict(model.named_parameters())
    if not isinstance(masks, Mapping):
        raise TypeError(f"{argument}: expected a dict of parameter names and bool tensors, got {type(masks).__name__}")
    for name, mask in masks.items():
        if name not in parameters:
            raise ValueError(f"{argument}: the model has no parameter {name!r}")
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"{argument}[{name!r}]: expected a bool tensor, got {found}")
        if mask.shape != parameters[name].shape:
            raise ValueError(
                f"{argument}[{name!r}]: expected shape {list(parameters[name].shape)}, got {list(mask.shape)}"
            )


def inverted(masks: Masks) -> dict[str, Tensor]:
    """The complement: every weight that ``masks`` switches off."""
    return {name: ~mask for name, mask in masks.items()}


def union(*masks: Masks) -> dict[str, Tensor]:
    """The weights that any of the masks keeps."""
    if not masks:
        raise ValueError("masks: expected at least one, got none")
    result = dict(masks[0])
    for other in masks[1:]:
        _same_layers(result, other)
        result = {name: mask | other[name] for name, mask in result.items()}
    return result


def sharing(target: Masks, reference: Masks) -> dict[str, float]:
    """Per layer and in ``"total"``: the share of the target's weights that the reference keeps as well.

    NaN where the target keeps nothing.
    """
    return _per_layer(target, reference, lambda t, r: t)


def iou(a: Masks, b: Masks) -> dict[str, float]:
    """Per layer and in ``"total"``: size of the intersection over size of the union; NaN where both are empty."""
    return _per_layer(a, b, lambda t, r: t | r)


def _per_layer(a: Masks, b: Masks, whole: Callable[[Tensor, Tensor], Tensor]) -> dict[str, float]:
    """``|a and b| / |whole(a, b)|`` by layer name and in total."""
    _same_layers(a, b)
    both = {name: int((a[name] & b[name]).sum()) for name in a}
    size = {name: int(whole(a[name], b[name]).sum()) for name in a}
    both["total"], size["total"] = sum(both.values()), sum(size.values())
    return {name: both[name] / size[name] if size[name] else float("nan") for name in both}


def _same_layers(a: Masks, b: Masks) -> None:
    if set(a) != set(b):
        raise ValueError(f"masks: expected the same layers, got {sorted(set(a) ^ set(b))} in one of them only")
    for name in a:
        if a[name].shape != b[name].shape:
            raise ValueError(
                f"masks[{name!r}]: expected the same shape, got {list(a[name].shape)} and {list(b[name].shape)}"
            )
