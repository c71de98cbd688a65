"""The residual block of isometric nets: as ordinary modules and, for weights of several tasks, on the fused ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod import backend
from fastmod.nn import _parts
from fastmod.nn._pending import Pending, finish
from fastmod.nn._stacked import Sum, Tensors, convolved, convolved_sum, norm_of, transformed
from fastmod.ops import _squeeze_excite as squeeze_excite
from fastmod.ops._autograd import wanted
from fastmod.ops._norm_convs import served
from fastmod.ops.inverted_residual import inverted_residual
from fastmod.ops.norm_pool import norm_pool


class IsometricBlock(nn.Module):
    """``[B, C, H, W]`` -> ``[B, C, H, W]``, like the block of MobileNetV3, with batch norm after every convolution.

    1x1 ``expand`` and ReLU, 3x3 ``depthwise`` and ReLU, squeeze-excite (the mean over the pixels, ``squeeze`` to a
    quarter and ReLU, ``excite`` and sigmoid), 1x1 ``project``, plus the input; no ReLU after the sum.

    Args:
        channels: C.
        se: whether there is a squeeze-excite.
        expansion: channels inside, as a multiple of C.
        bias: whether the convolutions have biases; those of the squeeze-excite never do.
        second_input: whether ``expand`` reads C further channels, ``forward(x, other)``, besides those of x.

    ``forward`` is ordinary PyTorch. ``forward_stacked`` computes the same for T tasks together on fused ops, where
    normalising, activating and gating an expanded tensor takes no pass of its own.
    """

    def __init__(
        self,
        channels: int,
        se: bool = True,
        *,
        expansion: int = 6,
        bias: bool = False,
        second_input: bool = False,
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        _parts.positive_sizes(channels=channels, expansion=expansion)
        wide = expansion * channels
        self.channels, self.second_input = channels, second_input
        self.expand = nn.Conv2d(2 * channels if second_input else channels, wide, 1, bias=bias)
        self.expand_norm = nn.BatchNorm2d(wide, eps, momentum)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=bias)
        self.depthwise_norm = nn.BatchNorm2d(wide, eps, momentum)
        self.squeeze: nn.Conv2d | None = None
        if se:
            self.squeeze = nn.Conv2d(wide, max(wide // 4, 1), 1, bias=False)
            self.squeeze_norm = nn.BatchNorm2d(self.squeeze.out_channels, eps, momentum)
            self.excite = nn.Conv2d(self.squeeze.out_channels, wide, 1, bias=False)
            self.excite_norm = nn.BatchNorm2d(wide, eps, momentum)
        self.project = nn.Conv2d(wide, channels, 1, bias=bias)
        self.project_norm = nn.BatchNorm2d(channels, eps, momentum)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Convolutions normal with variance 2 / fan-out, as by He et al.; biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = F.relu(self.expand_norm(self.expand(self._inputs(x, other, 1))))
        y = F.relu(self.depthwise_norm(self.depthwise(y)))
        if self.squeeze is not None:
            gate = F.relu(self.squeeze_norm(self.squeeze(y.mean((2, 3), keepdim=True))))
            y = y * torch.sigmoid(self.excite_norm(self.excite(gate)))
        return x + self.project_norm(self.project(y))

    def _inputs(self, x: Tensor, other: Tensor | None, dim: int) -> Tensor:
        if self.second_input != (other is not None):
            raise ValueError(f"other: expected {'a second input' if self.second_input else 'none'}")
        return x if other is None else torch.cat([x, other], dim)

    def forward_stacked(self, x: Tensor, weights: Tensors, buffers: Tensors, other: Tensor | None = None) -> Tensor:
        """``[B, T, C, H, W]`` -> the same; task t uses weights and statistics ``[T, ...]`` at t.

        The caller updates ``num_batches_tracked``.
        """
        if not self.second_input and other is None and self._in_one_op(x, weights):
            return self._fused(x, weights, buffers)
        y = convolved(self, "expand", "expand_norm", self._inputs(x, other, 2), weights, buffers, relu=True)
        return finish(self._after_expand(y, weights, buffers), x, relu=False)

    def chains(self, x: Tensor, other: Tensor | None = None) -> bool:
        """Whether :meth:`forward_chained` saves a launch: where CUDA C++ runs, and ``expand`` reads x alone."""
        return not self.second_input and other is None and served(x)

    def forward_chained(self, x: Tensor | Sum, weights: Tensors, buffers: Tensors) -> Sum:
        """As ``forward_stacked``, but the next block computes the sum at the end while it reads."""
        y, total = convolved_sum(self, "expand", "expand_norm", x, weights, buffers, relu=True)
        return Sum(self._after_expand(y, weights, buffers), total)

    def _after_expand(self, y: Pending, weights: Tensors, buffers: Tensors) -> Pending:
        y = convolved(self, "depthwise", "depthwise_norm", y, weights, buffers, relu=True)
        gate = None if self.squeeze is None else self._gate(y, weights, buffers)
        return convolved(self, "project", "project_norm", y, weights, buffers, gate=gate)

    def _norms(self) -> list[tuple[str, nn.BatchNorm2d]]:
        return [(name, module) for name, module in self.named_children() if isinstance(module, nn.BatchNorm2d)]

    def _in_one_op(self, x: Tensor, weights: Tensors) -> bool:
        """Whether the block is one op: on the CPU, if its batch norms have equal settings; with running statistics only
        where no gradient is needed."""
        norms = [(norm.training, norm.eps, norm.momentum) for _, norm in self._norms()]
        if any(norm != norms[0] for norm in norms) or self.expand.bias is not None:
            return False
        if not norms[0][0] and wanted(x, *weights.values()):
            return False
        if norms[0][0] and x.shape[0] == 1 and self.squeeze is None:
            return False  # the op refuses a single image in training, where a squeeze-excite has one value per channel
        return x.device.type == "cpu" and backend.resolve("norm_conv", x) == "native"

    def _fused(self, x: Tensor, weights: Tensors, buffers: Tensors) -> Tensor:
        params = []
        for name, _ in self._norms():
            convolution = name.removesuffix("_norm")
            params += [weights[f"{convolution}.weight"], weights[f"{name}.weight"], weights[f"{name}.bias"]]
        eps = self.expand_norm.eps
        if not self.expand_norm.training:
            known = [(buffers[f"{name}.running_mean"], buffers[f"{name}.running_var"]) for name, _ in self._norms()]
            return inverted_residual(x, params, eps=eps, running=known).y
        found = inverted_residual(x, params, eps=eps)
        momentum = self.expand_norm.momentum
        assert momentum is not None  # see stackable
        for kind, values in (("running_mean", found.means), ("running_var", found.variances)):
            running = [buffers[f"{name}.{kind}"] for name, _ in self._norms()]
            torch._foreach_lerp_(running, [v.to(r.dtype) for v, r in zip(values, running, strict=True)], momentum)
        return found.y

    def _gate(self, y: Pending, weights: Tensors, buffers: Tensors) -> Tensor:
        """``[B, T, C]`` in the dtype of the images."""
        assert y.scale is not None and y.shift is not None and self.squeeze is not None
        training = self.squeeze_norm.training and self.excite_norm.training
        if training and squeeze_excite.served(y.images, self.squeeze.out_channels):
            norms = [norm_of(self, name, weights, buffers) for name in ("squeeze_norm", "excite_norm")]
            squeeze, excite = (weights[f"{name}.weight"].flatten(2) for name in ("squeeze", "excite"))
            return squeeze_excite.squeeze_excite(y.images, y.scale, y.shift, squeeze, norms[0], excite, norms[1])
        pooled = norm_pool(y.images, y.scale, y.shift, relu=True)  # [B, T, C]
        squeezed = transformed(self, "squeeze", "squeeze_norm", pooled, weights, buffers).relu()
        gate = transformed(self, "excite", "excite_norm", squeezed, weights, buffers).sigmoid()
        return gate.to(y.images.dtype)
