"""One training forward: runs the parts of a batch through the net, each under its own sample of the masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastmod import noise
from fastmod.masks import parts, together
from fastmod.masks.draw import Draw, Noise, saved_tensors_are_hooked
from fastmod.masks.inputs import Batch
from fastmod.masks.placeholder import Placeholder
from fastmod.masks.rebind import Rebinding, Substitute


def can_run_together(net: nn.Module) -> bool:
    """Whether running all parts together is worth a try: vmap does not support recurrent layers, and depthwise
    convolutions have few weights but large activations, which fit the caches of a CPU better part by part."""
    return together.AVAILABLE and not any(
        isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv2d) and _is_depthwise(module))
        for module in net.modules()
    )


def _is_depthwise(layer: nn.Conv2d) -> bool:
    return layer.groups == layer.in_channels > 1 and layer.weight.device.type == "cpu"


#: Layers that pass these parameters only to a function with a fused op: exact types, since a subclass may compute
#: something else.
_FUSED: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight", "bias"),
    nn.Conv1d: ("weight", "bias"),
    nn.Conv2d: ("weight", "bias"),
    nn.Embedding: ("weight",),
    nn.BatchNorm1d: ("weight", "bias"),
    nn.BatchNorm2d: ("weight", "bias"),
    nn.BatchNorm3d: ("weight", "bias"),
}
_WITH_BIAS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def noise_of(net: nn.Module, names: Sequence[str]) -> dict[str, Noise]:
    """The source of the masks of each parameter: a fused bias shares the seed of its weight."""
    result = {name: Noise(i, noise.STREAM_MASK) for i, name in enumerate(names)}
    for path, module in net.named_modules():
        weight, bias = (f"{path}.{name}" if path else name for name in ("weight", "bias"))
        if weight not in result:
            continue
        if _is_conv1d(module):
            result[weight] = result[weight]._replace(transposed=True)
        if bias in result and (type(module) in _WITH_BIAS or _is_conv1d(module)):
            result[bias] = Noise(result[weight].seed, noise.STREAM_MASK_BIAS)
    return result


class ParameterNames:
    """Names of the parameters of the net, looked up again if an unknown one appears; and transposed copies of frozen
    ones, made again when they change."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._known: dict[int, tuple[Tensor, str]] = {}  # keeps the parameter, so that no other object gets its id
        self._turned: dict[str, tuple[Tensor, int, Tensor]] = {}

    def name(self, parameter: Tensor) -> str | None:
        found = self._known.get(id(parameter))
        if found is None:
            self._known = {id(value): (value, name) for name, value in self._net.named_parameters()}
            found = self._known.get(id(parameter))
        return None if found is None else found[1]

    def turned(self, name: str, weight: Tensor) -> Tensor:
        """``weight.t()``, contiguous. As in autograd, writes through ``.data`` do not count as changes."""
        plain = type(weight) is Tensor or type(weight) is nn.Parameter
        if weight.requires_grad or not plain or weight.is_inference() or torch.compiler.is_compiling():
            return weight.t().contiguous()
        known = self._turned.get(name)
        if known is None or known[1] != weight._version or not _is_same(known[0], weight):
            with torch.no_grad():
                known = weight, weight._version, weight.t().contiguous()
            self._turned[name] = known  # keeps the weight, so that no other tensor gets its memory
        return known[2]


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape and a.dtype == b.dtype


class Run:
    """The masks of one forward: one seed per parameter, so that a layer that runs twice has the same masks."""

    def __init__(
        self,
        net: nn.Module,
        names: ParameterNames,
        noises: Mapping[str, Noise],
        logits: Mapping[str, Tensor],
        seeds: Sequence[Tensor],
        samples: int,
        tau: float,
        train_weights: bool,
    ) -> None:
        self._net, self._name_of, self._noises, self._logits, self._seeds = net, names, noises, logits, seeds
        self._samples, self._tau, self._train_weights = samples, tau, train_weights
        self._holders = set() if torch.compiler.is_compiling() else parameter_holders(net)

    @staticmethod
    def is_hooked() -> bool:
        """Whether this forward is inside a checkpoint, which would run it again outside vmap."""
        return saved_tensors_are_hooked()

    def _weight(self, parameter: Tensor) -> Tensor:
        """A weight as used in the computation: frozen weights get no gradient."""
        return parameter if self._train_weights or not parameter.requires_grad else parameter.detach()

    def _draw(
        self, name: str, parameter: Tensor, first: int | None, hidden: together.HiddenDimension | None = None
    ) -> Draw:
        place, weight = self._noises[name], self._weight(parameter)
        return Draw(
            self._name_of.turned(name, weight) if place.transposed else weight,
            self._logits[name],
            place,
            self._seeds[place.seed],
            self._tau,
            self._samples,
            first,
            hidden,
        )

    def _substitute(self, first: int | None, hidden: together.HiddenDimension | None = None) -> Substitute:
        drawn: dict[int, Draw | Tensor] = {}
        stand_ins: dict[int, Placeholder] = {}

        def substitute(module: nn.Module | None, own_name: str, parameter: nn.Parameter) -> Tensor:
            key = id(parameter)
            found = drawn.get(key)
            if found is None:
                name = self._name_of.name(parameter)
                masked = name is not None and name in self._noises
                assert name is not None or not masked
                found = self._draw(str(name), parameter, first, hidden) if masked else self._weight(parameter)
                drawn[key] = found
            if isinstance(found, Tensor):
                return found
            if id(module) in self._holders or own_name not in _fused_names(module):
                return found.dense()
            if key not in stand_ins:
                stand_ins[key] = Placeholder.of(found)
            return stand_ins[key]

        return substitute

    def _copy(self, first: int | None, hidden: together.HiddenDimension | None = None) -> Rebinding:
        return Rebinding(self._net, self._substitute(first, hidden), frozen_statistics=not self._train_weights)

    def one_by_one(self, batch: Batch) -> tuple[list[Any], list[Rebinding]]:
        """The outputs of the parts, and the copies of the net that computed them."""
        outputs, copies = [], []
        for s, (args, kwargs) in enumerate(batch.parts()):
            copy = self._copy(s)
            copies.append(copy)
            outputs.append(copy.net(*args, **kwargs))
        return outputs, copies

    def together(self, batch: Batch) -> tuple[list[Any], Any, Rebinding]:
        """Leaves of the output, with samples as leading dimension of tensors; its structure; the copy of the net."""
        moving = [i for i, dim in enumerate(batch.dims) if dim is not None]
        dims = [batch.dims[i] for i in moving]
        cut = [batch.leaves[i].unflatten(dim, (self._samples, -1)) for i, dim in zip(moving, dims, strict=True)]
        seen: list[Any] = []

        def run(index: Tensor, *tensors: Tensor) -> list[Tensor]:
            values = list(batch.leaves)
            for i, tensor in zip(moving, tensors, strict=True):
                values[i] = tensor
            args, kwargs = batch.with_leaves(values)
            hidden = together.HiddenDimension(index, self._samples)
            copy = self._copy(None, hidden)
            with together.Attention(hidden):
                output = copy.net(*args, **kwargs)
            flat = [None if parts.holds_tensors(leaf) else leaf for leaf in parts.leaves(output)]
            seen[:] = [output, copy, flat]
            return [leaf for leaf in flat if isinstance(leaf, Tensor)]

        # In the backward, a checkpoint inside the net would run its layers again outside vmap.
        with torch.autograd.graph.disable_saved_tensors_hooks("layers are checkpointed"):
            found = torch.func.vmap(run, in_dims=(0, *dims), randomness="different")(torch.arange(self._samples), *cut)
        output, copy, flat = seen
        rest = iter(found)
        return [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in flat], output, copy

    def functional(self, batch: Batch) -> list[Any]:
        """The outputs of the parts, in a form that torch.compile can trace."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self._net.named_parameters():
            masked = name in self._noises
            weights[name] = (
                self._draw(name, parameter, None).sample(0, self._samples) if masked else self._weight(parameter)
            )
        return [
            call_with(
                self._net, {name: w[s] if name in self._noises else w for name, w in weights.items()}, args, kwargs
            )
            for s, (args, kwargs) in enumerate(batch.parts())
        ]


def call_with(net: nn.Module, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``functional_call`` with each parameter named once per module: a module registered twice would get its own
    parameter back only the first time."""
    by_id = {id(parameter): weights[name] for name, parameter in net.named_parameters()}
    named = {
        f"{path}.{name}" if path else name: by_id[id(parameter)]
        for path, module in net.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    return torch.func.functional_call(net, named, args, kwargs, tie_weights=False)


def parameter_holders(net: nn.Module) -> set[int]:
    """Ids of the modules inside our own layers, which hold parameters for an op that takes ordinary tensors."""
    ours = [module for module in net.modules() if type(module).__module__.startswith("fastmod.nn.")]
    return {id(inner) for module in ours for inner in module.modules()}


def _fused_names(module: nn.Module | None) -> tuple[str, ...]:
    return ("weight", "bias") if _is_conv1d(module) else _FUSED.get(type(module), ())  # type: ignore[arg-type]


def _is_conv1d(module: nn.Module | None) -> bool:
    """GPT-2's linear layer, which stores its weight as [in, out]; recognised by name, as its library may be missing."""
    if type(module).__name__ != "Conv1D" or module is None:
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2
