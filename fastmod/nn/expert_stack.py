"""Residual experts that run as one: ``ExpertStack``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastmod import backend
from fastmod.nn import _parts
from fastmod.nn.basic_block import BasicBlock, Expert
from fastmod.nn.expert_layers import ExpertBlock, ExpertNorm, check_images, check_stride, count_batches, in_training
from fastmod.ops import _checks
from fastmod.ops import _conv_chain as chain

#: The names in a block, in the order in which a module of He's block registers them.
PAIRS = (("conv1", "norm1"), ("conv2", "norm2"), ("shortcut", "shortcut_norm"))


class ExpertStack(nn.Module):
    """E experts, each a stack of residual blocks (two 3x3 convolutions with batch norm), one op for all of them.

    Args:
        in_channels, out_channels: of every expert.
        experts: E.
        depth: residual blocks of an expert.
        stride: of the first block, 1 or 2.

    Shapes: x ``[B, C, H, W]``, read by all experts, or ``[B, E, C, H, W]`` -> ``[B, E, C', H', W']``; with ``gate``
    ``[B, E]`` the mixture, the sum of ``gate[b, e]`` times expert e's images, ``[B, C', H', W']``.

    Parameters: ``blocks.{d}.conv1.weight`` [E, C', C, 3, 3], ``blocks.{d}.norm1.weight``, ``bias``, ``running_mean``
    and ``running_var`` [E, C'], ``conv2`` and ``norm2`` likewise, and where the shape changes ``shortcut.weight``
    [E, C', C, 1, 1] and ``shortcut_norm``. Each expert is initialised independently, as a residual net by He et al.:
    convolutions normal with variance 2 / (k * k * C'), batch norm 1 and 0.

    Batch norm is never a pass over memory: a convolution returns the statistics of what it wrote, the next one
    normalises while it reads. Convolutions and norms hold parameters only: hooks on them do not run.
    """

    def __init__(self, in_channels: int, out_channels: int, experts: int, depth: int, stride: int = 1) -> None:
        super().__init__()
        _parts.positive_sizes(in_channels=in_channels, out_channels=out_channels, experts=experts, depth=depth)
        check_stride("stride", stride)
        self.in_channels, self.out_channels, self.experts, self.stride = in_channels, out_channels, experts, stride
        first = ExpertBlock(in_channels, out_channels, experts, stride)
        others = [ExpertBlock(out_channels, out_channels, experts) for _ in range(depth - 1)]
        self.blocks = nn.ModuleList([first, *others])

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        check_images(x, self.in_channels, self.experts)
        if gate is not None:
            gate = self.checked(gate, x)
        blocks = self.begin(x)
        if chain.served(x) and not any(_is_watched(block) or in_training(block) for block in blocks):
            return self._at_once(x, gate, blocks)
        for block in blocks[:-1]:
            x = block(x)
        return blocks[-1](x, gate)

    @staticmethod
    def _at_once(x: Tensor, gate: Tensor | None, blocks: list[ExpertBlock]) -> Tensor:
        layers: list[chain.Layer] = []
        for block in blocks:
            layers += block.chained(len(layers), len(layers) + 1)
        return chain.conv_chain(x, layers, gate)

    def begin(self, x: Tensor) -> list[ExpertBlock]:
        """The blocks, after their batch norms have counted a batch."""
        blocks = cast("list[ExpertBlock]", list(self.blocks._modules.values()))
        count_batches(x, *blocks)
        return blocks

    def checked(self, gate: Tensor, x: Tensor) -> Tensor:
        if not isinstance(gate, Tensor):
            raise TypeError(f"gate: expected a tensor [B, E], got {type(gate).__name__}")
        if gate.shape != (x.shape[0], self.experts):
            expected = [x.shape[0], self.experts]
            raise ValueError(f"gate: expected [B, E] = {expected}, got shape {_checks.shape(gate)}")
        return gate if gate.dtype == x.dtype or backend.autocasts(x) else gate.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, experts={self.experts}, stride={self.stride}"

    # ------------------------------------------------- to and from a loop over experts

    @classmethod
    def from_experts(cls, experts: Sequence[nn.Module]) -> ExpertStack:
        """The stack that computes what these modules do one by one, with their weights and running statistics.

        Each is a chain of He's basic blocks: bias-free 3x3 convolutions and BatchNorm2d in pairs, 1x1 ones where the
        shape changes, of any names. Both sides are run on a small random input (copies of them, in eval mode): a module
        that does anything else is refused.
        """
        found = [_blocks_of(f"experts[{i}]", expert) for i, expert in enumerate(_listed(experts))]
        shapes = [_shape_of(f"experts[{i}]", blocks) for i, blocks in enumerate(found)]
        for i, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ValueError(
                    f"experts[{i}]: expected channels, depth and stride of experts[0], {shapes[0]}, got {shape}"
                )
        inputs, outputs, depth, stride = shapes[0]
        stack = cls(inputs, outputs, len(found), depth, stride)
        like = found[0][0]["conv1"].weight
        stack.to(device=like.device, dtype=like.dtype).train(experts[0].training)
        for d, block in enumerate(stack.blocks):
            for pair in PAIRS[: len(found[0][d]) // 2]:
                for name in pair:
                    _stack(getattr(block, name), [blocks[d][name] for blocks in found])
        _compare(stack, experts)
        return stack

    def to_experts(self) -> list[nn.Module]:
        """E ordinary modules (``Conv2d``, ``BatchNorm2d``) that compute the same, with copies of the weights."""
        experts = []
        for e in range(self.experts):
            expert = Expert(self.in_channels, self.out_channels, len(self.blocks), self.stride)
            first = next(self.parameters())
            expert.to(device=first.device, dtype=first.dtype).train(self.training)
            for ours, block in zip(self.blocks, cast("list[BasicBlock]", list(expert.blocks)), strict=True):
                for name in (name for pair in PAIRS for name in pair):
                    if getattr(ours, name) is not None:
                        _unstack(getattr(ours, name), getattr(block, name), e)
            experts.append(expert)
        return experts  # type: ignore[return-value]


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _listed(experts: Sequence[nn.Module]) -> Sequence[nn.Module]:
    if not isinstance(experts, (list, tuple, nn.ModuleList)):
        raise TypeError(f"experts: expected a list of modules, got {type(experts).__name__}")
    if len(experts) == 0:
        raise ValueError("experts: expected at least one module, got none")
    for i, expert in enumerate(experts):
        if not isinstance(expert, nn.Module):
            raise TypeError(f"experts[{i}]: expected a module, got {type(expert).__name__}")
    return experts


def _blocks_of(name: str, expert: nn.Module) -> list[dict[str, Any]]:
    """Per block the convolutions and norms by our names; the n-th registered norm belongs to the n-th convolution."""
    convs = [m for m in expert.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in expert.modules() if isinstance(m, nn.BatchNorm2d)]
    if len(convs) < 2 or len(convs) != len(norms):
        raise ValueError(
            f"{name}: expected basic blocks of Conv2d and BatchNorm2d in pairs, "
            f"got {len(convs)} Conv2d and {len(norms)} BatchNorm2d"
        )
    pairs = list(zip(convs, norms, strict=True))
    for conv, norm in pairs:
        _check_pair(name, conv, norm)
    large = [pair for pair in pairs if pair[0].kernel_size == (3, 3)]
    small = [pair for pair in pairs if pair[0].kernel_size == (1, 1)]
    blocks: list[dict[str, Any]] = []
    for first, second in zip(large[::2], large[1::2], strict=False):
        chosen = [first, second]
        if first[0].in_channels != first[0].out_channels or first[0].stride != (1, 1):
            if not small:
                raise ValueError(f"{name}: expected a 1x1 shortcut in block {len(blocks)}, whose shape changes")
            chosen.append(small.pop(0))
        named: dict[str, Any] = {}
        for (conv_name, norm_name), (conv, norm) in zip(PAIRS, chosen, strict=False):
            named |= {conv_name: conv, norm_name: norm}
        blocks.append(named)
    if small or len(large) % 2:
        raise ValueError(f"{name}: expected two 3x3 convolutions a block, and a 1x1 one only where the shape changes")
    return blocks


def _check_pair(name: str, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    size = conv.kernel_size[0]
    fits = conv.kernel_size in ((1, 1), (3, 3)) and conv.padding == (size // 2, size // 2) and conv.groups == 1
    if not fits or conv.bias is not None or conv.dilation != (1, 1) or conv.padding_mode != "zeros":
        raise ValueError(f"{name}: expected bias-free 3x3 and 1x1 convolutions padded by k // 2, got {conv}")
    if norm.num_features != conv.out_channels or norm.weight is None or norm.running_mean is None:
        raise ValueError(
            f"{name}: expected BatchNorm2d({conv.out_channels}) with weights and running statistics, got {norm}"
        )


def _shape_of(name: str, blocks: list[dict[str, Any]]) -> tuple[int, int, int, int]:
    """Input and output channels, depth and stride."""
    first = blocks[0]["conv1"]
    inputs, outputs, stride = first.in_channels, first.out_channels, first.stride
    for d, block in enumerate(blocks):
        entry = (inputs if d == 0 else outputs, outputs, stride if d == 0 else (1, 1))
        expected = {"conv1": entry, "conv2": (outputs, outputs, (1, 1)), "shortcut": entry}
        for key, what in expected.items():
            conv = block.get(key)
            if conv is not None and (conv.in_channels, conv.out_channels, conv.stride) != what:
                raise ValueError(f"{name}: expected {what[0]} -> {what[1]} channels, stride {what[2]}, got {conv}")
    if stride not in ((1, 1), (2, 2)):
        raise ValueError(f"{name}: expected stride 1 or 2, got {first}")
    return inputs, outputs, len(blocks), stride[0]


@torch.no_grad()
def _stack(ours: nn.Module, theirs: list[Any]) -> None:
    """Parameters and statistics of the modules, stacked over the experts."""
    if isinstance(ours, ExpertNorm):
        ours.eps, ours.momentum = theirs[0].eps, theirs[0].momentum
        if any((other.eps, other.momentum) != (ours.eps, ours.momentum) for other in theirs):
            raise ValueError("experts: expected one eps and one momentum for the same batch norm of all experts")
        ours.num_batches_tracked.copy_(theirs[0].num_batches_tracked)
        ours.train(theirs[0].training)
    if any(other.training != theirs[0].training for other in theirs):
        raise ValueError("experts: expected all in train or all in eval mode: a stack has one mode")
    for name, value in ours.state_dict().items():
        if name != "num_batches_tracked":
            tensors = [getattr(other, name) for other in theirs]
            kinds = {(t.dtype, t.device, t.requires_grad) for t in tensors}
            if len(kinds) > 1:
                found = ", ".join(sorted(f"{dtype} on {device}, requires_grad={grad}" for dtype, device, grad in kinds))
                raise ValueError(f"experts: expected {name} of one kind in all experts, which are stacked, got {found}")
            value.copy_(torch.stack(tensors))
    for name, parameter in ours.named_parameters():
        parameter.requires_grad_(getattr(theirs[0], name).requires_grad)


@torch.no_grad()
def _unstack(ours: nn.Module, theirs: Any, expert: int) -> None:
    if isinstance(ours, ExpertNorm):
        theirs.eps, theirs.momentum = ours.eps, ours.momentum
        theirs.num_batches_tracked.copy_(ours.num_batches_tracked)
        theirs.train(ours.training)
    for name, value in ours.state_dict().items():
        if name != "num_batches_tracked":
            getattr(theirs, name).copy_(value[expert])
    for name, parameter in ours.named_parameters():
        getattr(theirs, name).requires_grad_(parameter.requires_grad)


@torch.no_grad()
def _compare(stack: ExpertStack, experts: Sequence[nn.Module]) -> None:
    """Compare copies of both in fp64 on noise: names alone do not tell what a module computes."""
    device = next(stack.parameters()).device
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, stack.in_channels, 7, 6, dtype=torch.float64, generator=generator).to(device)
    with torch.autocast(device.type, enabled=False), backend.use_backend("reference"):
        ours = copy.deepcopy(stack).double().eval()(x)
        for i, expert in enumerate(experts):
            theirs = copy.deepcopy(expert).double().eval()(x)
            if theirs.shape != ours[:, i].shape or not torch.allclose(ours[:, i], theirs, 1e-6, 1e-8, equal_nan=True):
                raise ValueError(
                    f"experts[{i}]: its modules look like basic blocks, but it computes something else; "
                    "expected relu(norm2(conv2(relu(norm1(conv1(x))))) + shortcut(x)), block after block"
                )
