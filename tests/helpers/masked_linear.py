"""What the tests of ``masked_linear`` share: the layer as a function of tensors, and its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from fastmod import ops
from tests.helpers import backends

NAN, INF, SEED = float("nan"), float("inf"), 0x1234_5678_9ABC_DEF0
NAMES = ("x", "weight", "logits", "bias", "bias_logits")
MASKED_LINEAR = import_module("fastmod.ops.masked_linear")
ROW_LIMIT = MASKED_LINEAR.row_limit


def native() -> bool:
    """Whether the CPU's own kernels serve; GPU kernels take any number of rows."""
    chosen = backends.current()
    return chosen is None or chosen.name.startswith("native-")


@pytest.fixture(scope="module")
def one_row_limit() -> Iterator[None]:
    """The same for all weights, so that small ones go both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MASKED_LINEAR, "FEW_ROWS", 0)  # tests may set lower limits
        patch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton: 256 if native() else None)
        yield


def draw(
    samples: int, rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> list[torch.Tensor]:
    """x, weight, logits, bias, bias_logits."""
    shapes = [(samples * rows, inputs), (outputs, inputs), (outputs, inputs), (outputs,), (outputs,)]
    return [(torch.randn(shape) * scale).to(dtype) for shape in shapes]


def layer(samples: int, *, seed: int = 11, tau: float = 1.0):
    """masked_linear of three to five tensors."""

    def function(x, weight, logits, bias=None, bias_logits=None):
        return ops.masked_linear(x, weight, logits, samples, bias=bias, bias_logits=bias_logits, seed=seed, tau=tau)

    return function
