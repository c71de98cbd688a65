"""Changes to a module that are undone if they fail halfway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Restore attributes, parameters and buffers of ``model`` and its submodules if the block raises.

    Values written in place into a tensor are not restored.
    """
    before = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, attributes, parameters, buffers in before:
            module.__dict__.clear()
            module.__dict__.update(attributes, _parameters=parameters, _buffers=buffers)
        raise
