"""Masks on disk: safetensors, one bit a weight."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fastmod.masks.sets import Masks, check_masks

_FORMAT = "fastmod masks 1"
_BITS = 2 ** torch.arange(8, dtype=torch.uint8)


def pack(mask: Tensor) -> Tensor:
    """A bool tensor as bytes, eight weights each, the first in the lowest bit."""
    flat = mask.detach().cpu().flatten().to(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 8))
    return (padded.view(-1, 8) * _BITS).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: list[int]) -> Tensor:
    size = torch.Size(shape).numel()
    return ((packed.unsqueeze(1) & _BITS) != 0).flatten()[:size].view(shape)


def save(path: str | Path, masks: Masks) -> None:
    """Write hard masks, with their shapes."""
    for name, mask in masks.items():
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"masks[{name!r}]: expected a bool tensor")
    shapes = json.dumps({name: list(mask.shape) for name, mask in masks.items()})
    packed = {name: pack(mask) for name, mask in masks.items()}
    save_file(packed, str(path), metadata={"format": _FORMAT, "shapes": shapes})


def load(path: str | Path, model: nn.Module) -> dict[str, Tensor]:
    """Read hard masks and check them against the model's parameters; they lie on the parameters' devices."""
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            packed = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    except SafetensorError as error:
        raise ValueError(f"{path}: not a file of masks ({error})") from None
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path}: not a file of masks (format {metadata.get('format')!r}, expected {_FORMAT!r})")
    shapes: dict[str, list[int]] = json.loads(metadata["shapes"])
    masks = {}
    for name, values in packed.items():
        shape = shapes.get(name)
        if shape is None or values.dtype != torch.uint8 or values.numel() != (torch.Size(shape).numel() + 7) // 8:
            raise ValueError(f"{path}: the mask of {name!r} is damaged")
        masks[name] = unpack(values, shape)
    check_masks(masks, model, str(path))
    parameters = dict(model.named_parameters())
    return {name: mask.to(parameters[name].device) for name, mask in masks.items()}
