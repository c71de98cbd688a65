"""What the tests of ``masked_conv2d`` share: the layer as a function of tensors, its inputs and options."""

from __future__ import annotations

import torch

from fastmod import ops

# What torch.nn.functional.conv2d takes, in the form it takes it.
OPTIONS = {
    "plain": {},
    "stride": {"stride": 2},
    "strides": {"stride": (1, 3)},
    "padding": {"padding": 1},
    "paddings": {"padding": (0, 2)},
    "same": {"padding": "same"},
    "same, dilated": {"padding": "same", "dilation": (2, 3)},
    "valid": {"padding": "valid", "stride": 2},
    "dilation": {"dilation": (2, 1)},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "all": {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2), "groups": 2},
}
# In fp16 and bf16 torch's own convolutions serve the reference and the kernels alike, but in other pieces.
HALF_ROUNDINGS = 2.0


def draw(
    samples: int = 3,
    images: int = 2,
    channels: int = 4,
    outputs: int = 8,
    size: tuple[int, int] = (7, 9),
    kernel: tuple[int, int] = (3, 3),
    groups: int = 1,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> list[torch.Tensor]:
    """x, weight, logits, bias, bias_logits."""
    weight = (outputs, channels // groups, *kernel)
    shapes = [(samples * images, channels, *size), weight, weight, (outputs,), (outputs,)]
    return [(torch.randn(shape) * scale).to(dtype) for shape in shapes]


def layer(samples: int = 3, *, seed: int = 11, tau: float = 1.0, **options):
    """masked_conv2d of three to five tensors."""

    def function(x, weight, logits, bias=None, bias_logits=None):
        return ops.masked_conv2d(
            x, weight, logits, samples, bias=bias, bias_logits=bias_logits, seed=seed, tau=tau, **options
        )

    return function
