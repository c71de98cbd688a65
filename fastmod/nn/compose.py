"""``compose_``: turn layers of an existing net into mixtures of templates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastmod.nn import _parts
from fastmod.nn._mix import mixed
from fastmod.nn.composed_layers import composed, ordinary
from fastmod.nn.compositional import COMPOSED_LOGITS
from fastmod.nn.mixing import check_mixing, logits_of, near_one_hot, weights_of
from fastmod.nn.signatures import first_logits, sequential

#: ``(name, module) -> whether its weights become mixtures``
Filter = Callable[[str, nn.Module], bool]
Kind = tuple[type, tuple[tuple[str, tuple[int, ...], torch.dtype], ...]]


PREFIX = "composition/"


class Place(NamedTuple):
    """Where the weights of a mixed parameter come from."""

    layer: int
    bank: str
    shape: tuple[int, ...]


def compose_(
    model: nn.Module,
    templates: int | None = None,
    filter_fn: Filter | None = None,
    coefficients: str = "per_layer",
    *,
    state_dicts: Sequence[Mapping[str, Tensor]] | None = None,
    mixing: str = "softmax",
    init: str | None = None,
    train_templates: bool | None = None,
) -> Composition:
    """Turn weights of an existing net into mixtures of templates, in place and without changing its code.

    With ``templates`` = K, layers of equal shapes (the 3x3 convolutions of a stage, the blocks of a Transformer) become
    mixtures of K templates, which start as the means of neighbouring layers. With ``state_dicts``, checkpoints of the
    same net, each layer becomes a mixture of that layer in all checkpoints: models merged with learned coefficients.
    Buffers such as batch-norm statistics keep the values of ``model``: re-estimate them for merged weights.

    Args:
        filter_fn: ``(name, module) -> bool`` picks modules; modules inside a picked one are part of it. By default
            every Linear and convolution, or every module with weights if there are ``state_dicts``. Kinds of layers
            that occur fewer than K times stay as they are.
        coefficients: ``"per_layer"``, or ``"shared"``: the same mixture in all layers.
        mixing: how logits become shares: ``"softmax"``, ``"tanh"`` or ``"none"``.
        init: initial logits: ``"diag"`` (close to the template that contains the layer), ``"uniform"`` or ``"equal"``.
            By default ``"equal"`` with ``state_dicts`` or shared coefficients, otherwise ``"diag"``.
        train_templates: whether templates are trained; by default not with ``state_dicts``, where only coefficients
            are.

    Returns:
        The :class:`Composition`, also ``model.composition``: ``merge()`` turns the net into an ordinary one with the
        mixed weights, ``remove()`` restores the original net, ``signature()`` shows each layer's main template.

    >>> composition = fastmod.compose_(net, templates=4, filter_fn=lambda name, m: name.startswith("layer3"))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if hasattr(model, "composition"):
        raise ValueError("model: expected a net without an attribute `composition`: is it composed already?")
    if (templates is None) == (state_dicts is None):
        raise ValueError("templates, state_dicts: expected exactly one of them")
    if coefficients not in ("per_layer", "shared"):
        raise ValueError(f"coefficients: expected 'per_layer' or 'shared', got {coefficients!r}")
    check_mixing(mixing)
    chosen = _chosen(model, filter_fn or (_is_layer if state_dicts is None else _owns_weights))
    if state_dicts is None:
        assert templates is not None
        _parts.positive_sizes(templates=templates)
        groups = _equal_ones(chosen, templates)
        init = init or ("equal" if coefficients == "shared" else "diag")
    else:
        listed = isinstance(state_dicts, (list, tuple)) and all(isinstance(state, Mapping) for state in state_dicts)
        if not listed or not state_dicts:
            raise TypeError(f"state_dicts: expected a list of state dicts, got {state_dicts!r:.60}")
        templates = len(state_dicts)
        groups = [[name] for name in chosen]
        init = init or "equal"
    _refuse_tied(model, [chosen[name] for group in groups for name in group])
    rows = [name for group in groups for name in group]
    first = _first(init, mixing, groups, templates, coefficients, state_dicts is not None)
    found = [  # everything is read before any change, as a state dict may not fit
        (group, name, _values(chosen, group, name, templates, state_dicts))
        for group in groups
        for name in dict(chosen[group[0]].named_parameters())
    ]
    composition = Composition(model, rows, mixing, coefficients == "shared", first.to(found[0][2]))
    train = state_dicts is None if train_templates is None else train_templates
    for group, name, values in found:
        composition.take([(rows.index(path), _joined(path, name)) for path in group], values, train)
    model.composition = composition  # type: ignore[assignment]
    return composition


class Composition:
    """What :func:`compose_` adds to a net.

    A parameter ``composition/logits`` [layers, K] (shared: [1, K]) and, for each tensor of a kind of layer, templates
    ``composition/{name}`` [K, P], named after the first such layer. They belong to the net itself: a Sequential would
    run a new module as one more layer.
    """

    def __init__(self, model: nn.Module, layers: list[str], mixing: str, shared: bool, first: Tensor) -> None:
        self.layers, self.mixing, self.shared = layers, mixing, shared
        self._model: nn.Module | None = model
        self._places: dict[str, Place] = {}  # full name of a parameter -> where its weights come from
        self._before: dict[str, nn.Parameter] = {}
        model.register_parameter(COMPOSED_LOGITS, nn.Parameter(first))

    @property
    def model(self) -> nn.Module:
        if self._model is None:
            raise RuntimeError("composition: expected to belong to a net, but it has been merged or removed")
        return self._model

    @property
    def logits(self) -> nn.Parameter:
        return self.model.get_parameter(COMPOSED_LOGITS)

    @property
    def banks(self) -> dict[str, nn.Parameter]:
        """Templates [K, P], by the name of the first parameter they replace."""
        keys = dict.fromkeys(place.bank for place in self._places.values())
        return {key.removeprefix(PREFIX).replace("/", "."): self.model.get_parameter(key) for key in keys}

    @property
    def templates(self) -> int:
        return self.logits.shape[-1]

    def take(self, members: list[tuple[int, str]], values: Tensor, train: bool) -> None:
        """Replace a parameter of equal layers by mixtures of ``values`` [K, *shape]; ``members``: (layer, name)."""
        key = PREFIX + members[0][1].replace(".", "/")
        self.model.register_parameter(key, nn.Parameter(values.flatten(1), requires_grad=train))
        for layer, name in members:
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            before = owner._parameters.pop(leaf)
            assert before is not None
            self._before[name] = before
            self._places[name] = Place(layer, key, tuple(values.shape[1:]))
            composed(owner, leaf, self, name)

    def weight(self, name: str) -> Tensor:
        """The mixed tensor in place of this parameter."""
        layer, key, shape = self._places[name]
        row = getattr(self.model, COMPOSED_LOGITS)[0 if self.shared else layer]
        bank = getattr(self.model, key)
        return mixed(row.to(bank.dtype), bank, self.mixing).view(shape)

    def mixture(self) -> dict[str, Tensor]:
        """Layer -> shares of the templates [K], without gradients."""
        xi = weights_of(self.logits.detach(), self.mixing)
        return {name: xi[0 if self.shared else i] for i, name in enumerate(self.layers)}

    def signature(self) -> dict[str, int]:
        """Layer -> the template with the largest share."""
        return {name: int(xi.argmax()) for name, xi in self.mixture().items()}

    def merge(self) -> nn.Module:
        """Make the net an ordinary one with the mixed weights and return it."""
        with torch.no_grad():
            values = {name: self.weight(name).clone() for name in self._places}
        return self._restore({n: nn.Parameter(v, self._before[n].requires_grad) for n, v in values.items()})

    def remove(self) -> nn.Module:
        """Make the net an ordinary one with its original weights and return it."""
        like = self.logits
        for p in self._before.values():
            p.data = p.data.to(like.device, like.dtype)
        return self._restore(self._before)

    def _restore(self, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
        model = self.model
        for name, p in parameters.items():
            path, _, leaf = name.rpartition(".")
            owner = model.get_submodule(path)
            ordinary(owner, leaf)
            owner.register_parameter(leaf, p)
        for key in [key for key in model._parameters if key.startswith(PREFIX)]:
            del model._parameters[key]
        del model.__dict__["composition"]
        self._model = None
        return model

    def __repr__(self) -> str:
        return f"Composition(layers={len(self.layers)}, templates={self.templates}, mixing={self.mixing!r})"


# ------------------------------------------------------------------- choosing


def _is_layer(_: str, module: nn.Module) -> bool:
    conv = isinstance(module, nn.modules.conv._ConvNd) or type(module).__name__ == "Conv1D"  # GPT-2's
    return conv or isinstance(module, (nn.Linear, nn.Bilinear))


def _owns_weights(_: str, module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _chosen(model: nn.Module, filter_fn: Filter) -> dict[str, nn.Module]:
    """The picked modules, without those inside another picked one."""
    if not callable(filter_fn):
        raise TypeError(f"filter_fn: expected a function of name and module, got {type(filter_fn).__name__}")
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") or other == "" for other in found)
        if not inside and filter_fn(name, module) and next(module.parameters(), None) is not None:
            found[name] = module
    if not found:
        raise ValueError(f"filter_fn: expected to pick modules with weights, picked none of {type(model).__name__}")
    for name, module in found.items():
        for inner in module.modules():
            if isinstance(inner, nn.RNNBase):
                raise TypeError(f"filter_fn: expected no recurrent layers, whose weights torch keeps in a list: {name}")
    return found


def _kind(module: nn.Module) -> Kind:
    return type(module), tuple((n, tuple(p.shape), p.dtype) for n, p in module.named_parameters())


def _equal_ones(chosen: dict[str, nn.Module], templates: int) -> list[list[str]]:
    groups: dict[Kind, list[str]] = defaultdict(list)
    for name, module in chosen.items():
        groups[_kind(module)].append(name)
    found = [group for group in groups.values() if len(group) >= max(templates, 2)]
    if not found:
        largest = max(len(group) for group in groups.values())
        raise ValueError(
            f"filter_fn: expected at least {max(templates, 2)} equal layers for {templates} templates, "
            f"but of no kind there are more than {largest}"
        )
    return found


def _refuse_tied(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    owners: dict[int, list[str]] = defaultdict(list)
    for name, p in _all_parameters(model):
        owners[id(p)].append(name)
    for module in modules:
        for p in module.parameters():
            if len(owners[id(p)]) > 1:
                raise ValueError(f"filter_fn: expected no tied weights, but these are one: {', '.join(owners[id(p)])}")


def _all_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            yield _joined(path, name), p


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ------------------------------------------------------------------- starting


def _first(init: str, mixing: str, groups: list[list[str]], templates: int, coefficients: str, merging: bool) -> Tensor:
    """Logits [layers, K]."""
    rows = 1 if coefficients == "shared" else sum(len(group) for group in groups)
    if init == "equal":
        return logits_of(torch.full((rows, templates), 1 / templates), mixing)
    if init == "diag":
        if merging or coefficients == "shared":
            raise ValueError("init: expected 'equal' or 'uniform' where a layer has no template of its own, got 'diag'")
        return torch.cat([near_one_hot(sequential(templates, len(group)), templates, mixing) for group in groups])
    if init != "uniform":
        raise ValueError(f"init: expected 'diag', 'uniform' or 'equal', got {init!r}")
    return first_logits("uniform", mixing, 1, rows, templates)[0]


@torch.no_grad()
def _values(
    chosen: dict[str, nn.Module],
    group: list[str],
    name: str,
    templates: int,
    state_dicts: Sequence[Mapping[str, Tensor]] | None,
) -> Tensor:
    """The templates' values of one parameter, [K, *shape]."""
    own = [chosen[path].get_parameter(name).detach() for path in group]
    if state_dicts is None:
        assigned = sequential(templates, len(group))
        means = [
            torch.stack([w for w, k in zip(own, assigned, strict=True) if k == t]).mean(0) for t in range(templates)
        ]
        return torch.stack(means)
    full = _joined(group[0], name)
    for i, state in enumerate(state_dicts):
        if full not in state:
            raise ValueError(f"state_dicts[{i}]: expected an entry {full}, got none")
        if state[full].shape != own[0].shape:
            raise ValueError(
                f"state_dicts[{i}]: expected {full} of shape {list(own[0].shape)}, got {list(state[full].shape)}"
            )
    return torch.stack([state[full].detach().to(own[0]) for state in state_dicts])
