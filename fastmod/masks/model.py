"""``MaskedModel``: masks over the weights of any module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.masks.layers import MASKED, MaskedAny, MaskedLayer
from fastmod.masks.sets import Masks, check_masks
from fastmod.masks.state import MaskState, key_of
from fastmod.ops import _checks


class MaskedModel(nn.Module):
    """A module under learned weight masks; its code and its weights stay as they are.

    In training every forward samples ``samples`` masks anew, and part s of the batch meets mask s; in evaluation a
    weight is kept where its logit is above 0. ``parameters()`` are the logits alone, and so is ``state_dict()``.

    Linear, Conv1d/2d, LSTM, GRU, MultiheadAttention, Transformer layers, LayerNorm and BatchNorm use the fused ops. Any
    other module that has parameters goes through torch.func, and says so once. Weights that a module reads off another
    one (a tied output layer written as ``F.linear(x, embedding.weight)``) are not seen.

    Args:
        model: what to mask. ``train()`` and ``eval()`` are passed on to it; batch norm keeps its statistics.
        samples: masks per batch, S; the batch must be a multiple of it.
        init: first value of every logit; 2 keeps a weight with probability 0.88.
        tau: temperature of the relaxed masks, whose gradient the logits get.
        mask_bias: whether biases have masks as well.
        exclude: types of modules, or modules, without masks, all that is inside them included.
        train_weights: let gradients through to the model's own weights; else they are frozen and cost nothing.
        batch_dim: dimension of the batch in the input.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: int = 4,
        init: float = 2.0,
        tau: float = 1.0,
        mask_bias: bool = False,
        exclude: Sequence[type[nn.Module] | nn.Module] = (nn.Embedding,),
        train_weights: bool = False,
        batch_dim: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        if batch_dim not in (0, 1):
            raise ValueError(f"batch_dim: expected 0 or 1, got {batch_dim!r}")
        types = tuple(item for item in exclude if isinstance(item, type))
        instances = {id(module) for item in exclude if isinstance(item, nn.Module) for module in item.modules()}
        excluded = [
            name for name, module in model.named_modules() if id(module) in instances or isinstance(module, types)
        ]
        self._options = (_checks.sample_count(samples), _checks.float_tau(tau), batch_dim)
        self._train_weights = train_weights
        chosen = {
            name: value
            for name, value in model.named_parameters()
            if value.is_floating_point() and (mask_bias or not is_bias(name)) and not is_inside(name, excluded)
        }
        if not chosen:
            raise ValueError("model: expected weights to mask, found none outside of `exclude`")
        self._names = list(chosen)
        self.logits = nn.ParameterDict(
            {key_of(name): nn.Parameter(torch.full_like(value, init)) for name, value in chosen.items()}
        )
        # In a tuple: a registered submodule would add its weights to parameters() and state_dict().
        self._held: tuple[nn.Module] = (model,)
        self._build()

    @property
    def model(self) -> nn.Module:
        """The wrapped module, without masks."""
        return self._held[0]

    def named_logits(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Logits by the name of their parameter in the wrapped module."""
        for name in self._names:
            yield name, self.logits[key_of(name)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._state.begin(self.training, args, kwargs)
        try:
            return self._shadow[0](*args, **kwargs)
        finally:
            self._state.end()

    def penalty(self) -> Tensor:
        """Sum of all logits: the regulariser, to be scaled by ``beta / batch``."""
        return torch.stack([logits.sum() for logits in self.logits.values()]).sum()

    def hard_masks(self) -> dict[str, Tensor]:
        """Parameter name -> bool: the weights whose logit is above 0."""
        return {name: logits.detach() > 0 for name, logits in self.named_logits()}

    @contextlib.contextmanager
    def using(self, masks: Masks) -> Iterator[MaskedModel]:
        """Within the block these masks are in force; parameters that they do not name are not masked."""
        check_masks(masks, self.model)
        before, self._state.fixed = self._state.fixed, dict(masks)
        try:
            yield self
        finally:
            self._state.fixed = before

    def train(self, mode: bool = True) -> MaskedModel:
        super().train(mode)
        self.model.train(mode)
        self._shadow[0].train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MaskedModel:
        super()._apply(fn, recurse)
        self.model._apply(fn, recurse)
        return self

    # The masked layers are made from the rest: copies and pickles make their own.
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_shadow", "_state")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build()

    def _build(self) -> None:
        samples, tau, batch_dim = self._options
        self._state = MaskState(self.logits, self._names, samples, tau, batch_dim)
        self._state.train_weights = self._train_weights
        names = {id(value): name for name, value in self.model.named_parameters()}
        self._shadow = (self._masked(self.model, names, {}),)

    def _masked(self, module: nn.Module, names: dict[int, str], made: dict[int, nn.Module]) -> nn.Module:
        """The masked form of ``module``: a masked layer, or a copy around masked children."""
        if id(module) in made:
            return made[id(module)]
        form = MASKED.get(type(module))
        own = {name: names[id(value)] for name, value in module.named_parameters()}
        if form is not None:
            result: nn.Module = clone(module, form)
        elif needs_whole(module):
            result = MaskedAny(module)
            if any(name in self._state.names for name in own.values()):
                result.tell()
        else:
            result = clone(module, type(module))
            result._modules = {
                name: None if child is None else self._masked(child, names, made)
                for name, child in module._modules.items()
            }
            _without_fast_paths(result)
        if isinstance(result, MaskedLayer):
            result.mask_state, result.mask_names = self._state, own
            result.mask_original = (module,)
        made[id(module)] = result
        return result


def is_bias(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("bias") or last.endswith("bias")


def is_inside(name: str, paths: Sequence[str]) -> bool:
    """Whether a parameter belongs to one of the modules at ``paths`` (the model itself is at ``""``)."""
    return any(not path or name.startswith(path + ".") for path in paths)


def needs_whole(module: nn.Module) -> bool:
    """Whether a module uses parameters itself, so that masking its children would not do."""
    lists = (nn.ParameterList, nn.ParameterDict)
    direct = any(True for _ in module.parameters(recurse=False))
    return direct or any(isinstance(child, lists) and len(child) for child in module.children())


def clone(module: nn.Module, form: type[nn.Module]) -> nn.Module:
    """A shallow copy of another class: the dicts of parameters, buffers and hooks are shared with the original."""
    copy = form.__new__(form)
    object.__setattr__(copy, "__dict__", dict(module.__dict__))
    return copy


def _without_fast_paths(module: nn.Module) -> None:
    """torch's shortcuts for inference read a Transformer layer's weights past its sublayers, and so past masks."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = module.enable_nested_tensor = False
