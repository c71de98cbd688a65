"""``TemplateBank``: the weights of K equal blocks as rows of one matrix."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fastmod.nn import _parts
from fastmod.nn.fuse_batch_norm import unfuse_batch_norm_

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class TemplateBank(nn.Module):
    """K templates (blocks of one kind with different weights) in one parameter ``weight`` [K, P].

    Args:
        block_factory: a function that makes a block, any module; called once per template.
        templates: K.
        norm: whether templates include the scales and shifts of normalisation layers.

    Templates do not include buffers, such as the statistics of batch norm.
    """

    def __init__(self, block_factory: Callable[[], nn.Module], templates: int, *, norm: bool = True) -> None:
        super().__init__()
        if isinstance(block_factory, nn.Module) or not callable(block_factory):
            raise TypeError(
                "block_factory: expected a function that makes a block (for finished blocks there is "
                f"TemplateBank.from_modules), got {type(block_factory).__name__}"
            )
        _parts.positive_sizes(templates=templates)
        self._fill([block_factory() for _ in range(templates)], norm, "block_factory()")

    @classmethod
    def from_modules(cls, modules: Sequence[nn.Module], *, norm: bool = True) -> TemplateBank:
        """Make templates from copies of existing blocks, such as the layers of a trained net."""
        if not isinstance(modules, (list, tuple, nn.ModuleList)):
            raise TypeError(f"modules: expected a list of modules, got {type(modules).__name__}")
        bank = cls.__new__(cls)
        nn.Module.__init__(bank)
        bank._fill(list(modules), norm, "modules")
        return bank

    @classmethod
    def from_state_dicts(
        cls, block: nn.Module, state_dicts: Sequence[Mapping[str, Tensor]], *, norm: bool = True
    ) -> TemplateBank:
        """Make one template per checkpoint of ``block``."""
        if not isinstance(block, nn.Module):
            raise TypeError(f"block: expected a module, got {type(block).__name__}")
        if not isinstance(state_dicts, (list, tuple)):
            raise TypeError(f"state_dicts: expected a list of state dicts, got {type(state_dicts).__name__}")
        if not state_dicts:
            raise ValueError("state_dicts: expected at least one, got none")
        modules = []
        for i, state in enumerate(state_dicts):
            module = copy.deepcopy(block)
            try:
                module.load_state_dict(state)
            except RuntimeError as error:
                raise ValueError(f"state_dicts[{i}]: expected the entries of block: {error}") from error
            modules.append(module)
        return cls.from_modules(modules, norm=norm)

    def _fill(self, modules: list[nn.Module], norm: bool, name: str) -> None:
        if not modules:
            raise ValueError(f"{name}: expected at least one block, got none")
        for i, module in enumerate(modules):
            if not isinstance(module, nn.Module):
                raise TypeError(f"{name}: expected modules, got {type(module).__name__} as number {i}")
        first = modules[0]
        left_out = set() if norm else norm_parameters(first)
        parameters = dict(first.named_parameters())
        self.norm = norm
        self.shapes = {n: tuple(p.shape) for n, p in parameters.items() if n not in left_out}
        #: Parameters outside the templates: scales and shifts of normalisation if ``norm`` is False.
        self.left_out = {n: tuple(p.shape) for n, p in parameters.items() if n in left_out}
        if not self.shapes:
            raise ValueError(f"{name}: expected blocks with parameters, got {type(first).__name__} without")
        kinds = {(p.dtype, p.device) for n, p in parameters.items() if n in self.shapes}
        if len(kinds) > 1:
            raise TypeError(f"{name}: expected parameters of one dtype on one device, got {sorted(map(str, kinds))}")
        for i, module in enumerate(modules):
            self._check(f"{name}: number {i}", module, next(iter(kinds))[0])
        self.weight = nn.Parameter(torch.stack([self._row(module) for module in modules]))
        self.weight.requires_grad_(any(p.requires_grad for module in modules for p in module.parameters()))
        # In a tuple, so that parameters() and state_dict() do not include it.
        self._held: tuple[nn.Module] = (_without_values(first),)
        #: Unmixed parameters and buffers of each block: initial values for layers that use its template.
        self._starts = [self._start(module) for module in modules]

    def _check(self, name: str, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
        expected = {**self.shapes, **self.left_out}
        for n in expected:
            if n not in shapes:
                raise ValueError(f"{name}: expected the parameters of the first block, got no {n}")
            if shapes[n] != expected[n]:
                raise ValueError(f"{name}: expected {n} of shape {list(expected[n])}, got {list(shapes[n])}")
        if dtype is not None:
            for n, p in module.named_parameters():
                if n in self.shapes and p.dtype != dtype:
                    raise TypeError(f"{name}: expected {n} of the first block's {dtype}, got {p.dtype}")
        for n in shapes:
            if n not in expected:
                raise ValueError(f"{name}: expected the parameters of the first block, got {n} besides")

    def _row(self, module: nn.Module) -> Tensor:
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[n].detach().flatten() for n in self.shapes])

    def _start(self, module: nn.Module) -> dict[str, Tensor]:
        parameters = dict(module.named_parameters())
        own = {n: parameters[n].detach().clone() for n in self.left_out}
        return own | {n: buffer.detach().clone() for n, buffer in module.named_buffers()}

    # ---------------------------------------------------------------- reading

    @property
    def block(self) -> nn.Module:
        """The block without its values, to be called with mixed weights."""
        return self._held[0]

    @property
    def templates(self) -> int:
        return self.weight.shape[0]

    def split(self, vectors: Tensor) -> dict[str, Tensor]:
        """``[..., P]`` -> views ``[..., *shape]``, by parameter name in the block."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = vectors.split(sizes, -1)  # its backward is one pass; slices would need one each
        lead = vectors.shape[:-1]
        return {n: part.reshape((*lead, *shape)) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def template(self, index: int) -> dict[str, Tensor]:
        """Views of one template's weights, by name in the block."""
        return self.split(self.weight[self.check_index(index)])

    def start(self, index: int) -> dict[str, Tensor]:
        """Buffers of this template's block, and scales and shifts if ``norm`` is False."""
        like = self.weight
        start = self._starts[self.check_index(index)]
        return {n: v.to(like if v.is_floating_point() else like.device) for n, v in start.items()}

    def to_modules(self) -> list[nn.Module]:
        """K ordinary blocks with copies of the templates and of the original buffers."""
        found = []
        for k in range(self.templates):
            values = {n: v.detach().clone() for n, v in {**self.template(k), **self.start(k)}.items()}
            memo: dict[int, Any] = {id(p): nn.Parameter(values[n]) for n, p in self.block.named_parameters()}
            memo |= {id(b): values[n] for n, b in self.block.named_buffers()}
            found.append(copy.deepcopy(self.block, memo).train(self.training))
            unfuse_batch_norm_(found[-1])  # Compositional may have fused it
        return found

    def check_index(self, index: int) -> int:
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"template: expected an int, got {type(index).__name__}")
        if not 0 <= index < self.templates:
            raise ValueError(f"template: expected 0 .. {self.templates - 1}, got {index}")
        return index

    # --------------------------------------------------------------- changing

    def add_template(self, init: int | nn.Module | Callable[[], nn.Module]) -> int:
        """Add a row, a copy of a template or the weights of a block, and return its number.

        ``weight`` becomes a new parameter, so make a new optimiser.
        """
        if isinstance(init, int) and not isinstance(init, bool):
            row, start = self.weight[self.check_index(init)].detach(), self._starts[init]
        elif callable(init):
            module = init if isinstance(init, nn.Module) else init()
            self._check("init", module)
            row, start = self._row(module).to(self.weight), self._start(module)
        else:
            raise TypeError(f"init: expected a template's number, a block or a function, got {type(init).__name__}")
        self._starts = [*self._starts, start]
        self._replace(torch.cat([self.weight.detach(), row[None]]))
        return self.templates - 1

    def remove_template(self, index: int) -> None:
        """Remove a row; ``weight`` becomes a new parameter, so make a new optimiser."""
        self.check_index(index)
        if self.templates == 1:
            raise ValueError("template: expected more than one template to remove one of, got the last")
        self._starts = self._starts[:index] + self._starts[index + 1 :]
        self._replace(torch.cat([self.weight.detach()[:index], self.weight.detach()[index + 1 :]]))

    def _replace(self, weight: Tensor) -> None:
        self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)

    def train(self, mode: bool = True) -> TemplateBank:
        self.block.train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{type(self.block).__name__}, templates={self.templates}, parameters={self.weight.shape[1]}"


def _without_values(block: nn.Module) -> nn.Module:
    """A copy whose tensors are NaN and take the memory of one number each; tied weights stay tied.

    Not on the meta device: if a weight were not replaced, some CPU kernels would read from address 0.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(_blank(p), p.requires_grad) for p in block.parameters()}
    memo |= {id(buffer): _blank(buffer) for buffer in block.buffers()}
    return copy.deepcopy(block, memo)


def _blank(values: Tensor) -> Tensor:
    one = torch.zeros((), dtype=values.dtype, device=values.device)
    return (one + float("nan") if one.is_floating_point() else one).expand(values.shape)


def norm_parameters(block: nn.Module) -> set[str]:
    """Names of the scales and shifts of its normalisation layers."""
    return {
        f"{path}.{name}" if path else name
        for path, module in block.named_modules()
        if isinstance(module, _NORMS)
        for name, _ in module.named_parameters(recurse=False)
    }
