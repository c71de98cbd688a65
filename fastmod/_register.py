"""Registers the fakes (shape functions) of the C++ schemas; they live beside the references in ``fastmod/ops``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from fastmod import _extension
from fastmod.backend import OPS


def register_fakes() -> None:
    """Each op's file holds ``fake_forward`` and ``fake_backward``; the public op's fake follows from the former."""
    if not _extension.LOADED:
        return
    for op in OPS:
        module = importlib.import_module(f"fastmod.ops.{op}")
        for suffix in ("", ".triton"):
            torch.library.register_fake(f"fastmod::{op}_forward{suffix}", module.fake_forward)
            torch.library.register_fake(f"fastmod::{op}_backward{suffix}", module.fake_backward)
        torch.library.register_fake(f"fastmod::{op}", _public_fake(op, module.fake_forward))


def _public_fake(op: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def fake(*args: Any) -> Any:  # the last argument, `triton`, does not change shapes
        if op in ("mfnnr", "smfr"):  # nothing is saved
            return forward(*args[:-1], False)[:4]
        return forward(*args[:-1])

    return fake
