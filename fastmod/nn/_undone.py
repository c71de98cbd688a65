"""Changes of a module that take place as a whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Give ``model`` and all inside of it the attributes, parameters and buffers back that they had, should the block
    raise. What was written into a tensor in place stays."""
    before = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, attributes, parameters, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes, _parameters=parameters, _buffers=buffers)
        raise
