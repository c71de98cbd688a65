"""``Adam`` with gradient clipping, as one call a step for models of many small tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastmod import _extension

_HOOKS = sys.modules[torch.optim.Optimizer.__module__]  # knows of the hooks of all optimisers


class Adam(torch.optim.Adam):
    """``torch.optim.Adam``, preceded by ``clip_grad_norm_`` when ``max_norm`` is given.

    A drop-in: same state, same ``state_dict``. On the CPU, fp32 and fp64 parameters are updated by one call of the
    extension; anything else (other devices, weight decay, amsgrad, sparse gradients ...) is left to torch.

    Args:
        params, lr, betas, eps, and keywords: as in ``torch.optim.Adam``.
        max_norm: the norm of all gradients together is clipped to this; None leaves them as they are.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm: expected a number > 0 or None, got {max_norm}")
        super().__init__(params, lr, betas, eps, **{"fused": True, **options})
        self.max_norm = max_norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's. While nobody watches, without the profiler's record around it: that and the search for hooks take
        as long as the update of a small model."""
        if closure is None and not self._watched() and self._one_call():
            return None
        return self._watched_step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps what has no such mark; it is _watched_step that is wrapped

    def _watched(self) -> bool:
        """Whether a hook or the profiler wants to know of a step; yes if this torch does not tell."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or getattr(_HOOKS, "_global_optimizer_pre_hooks", True)
            or getattr(_HOOKS, "_global_optimizer_post_hooks", True)
            or getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        )

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def _watched_step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._one_call():
            return loss
        fast = self._ready() if _extension.LOADED else None
        if fast is not None:
            self._fast_step(fast)
        else:
            if self.max_norm is not None:
                every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
                nn.utils.clip_grad_norm_(every, self.max_norm, foreach=True)
            super().step()
        return loss

    def _one_call(self) -> bool:
        """The common case: the one group of the last step, all of it with gradients again."""
        known = self.__dict__.get("_known")
        if known is None or len(known) != 1 or not known[0].looks_the_same(self.state):
            return False
        fast = known[0]
        (beta1, beta2), lr, eps = fast.group["betas"], fast.group["lr"], fast.group["eps"]
        return fast.step(self.max_norm or 0.0, lr, beta1, beta2, eps)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, without the profiler's record around it, which costs more than a small model's gradients."""
        if not set_to_none:
            return super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return None

    def _ready(self) -> list[_Fast] | None:
        """The lists that the extension takes; made once, and anew when parameters, their state or who has a gradient
        change. None: something is asked for that the extension does not do."""
        known = self.__dict__.get("_known")
        if known is not None and all(f.fits(self.state) for f in known):
            return known
        known = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            if not _plain(group, params):
                return None
            states = [self._state_of(p) for p in params]
            columns = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            known.append(_Fast(group, params, *columns))
        self.__dict__["_known"] = known
        return known

    def _fast_step(self, fast: list[_Fast]) -> None:
        gradients = [[_dense(p.grad) for p in f.params] for f in fast]
        clipped = sum(torch.ops.fastmod.square_sum(some) for some in gradients) if self.max_norm else 0.0
        for f, some in zip(fast, gradients, strict=True):
            (beta1, beta2), lr, eps = f.group["betas"], f.group["lr"], f.group["eps"]
            torch.ops.fastmod.adam_(
                f.params, some, f.means, f.squares, f.steps, clipped, self.max_norm or 0.0, lr, beta1, beta2, eps
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:  # as torch.optim.Adam begins it
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.__dict__.pop("_known", None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.__dict__.pop("_known", None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_norm": self.max_norm}


@dataclass
class _Fast:
    """What the extension needs of one group, in lists."""

    group: dict[str, Any]
    params: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]

    def __post_init__(self) -> None:
        self.without = [p for p in self.group["params"] if p.grad is None]
        self.places = [p.data_ptr() for p in self.params]  # model.to(...) moves the parameters, not these lists
        lists = torch.classes.fastmod.AdamLists(self.params, self.means, self.squares, self.steps)
        self.step = lists.step

    def looks_the_same(self, state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        """A quick look; the extension finds parameters that have moved and gradients that are missing by itself."""
        return (
            not self.without
            and len(self.group["params"]) == len(self.params)
            and self._has_state_of(state)
            and _options_are_plain(self.group)
        )

    def fits(self, state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        """Whether nothing has changed that the lists were made for."""
        return (
            all(p.grad is not None for p in self.params)
            and all(p.grad is None for p in self.without)
            and [p.data_ptr() for p in self.params] == self.places
            and self._has_state_of(state)
            and _options_are_plain(self.group)
        )

    def _has_state_of(self, state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
        """Whether these are still the optimiser's moments; its state may have been emptied or put in anew."""
        return state[self.params[0]].get("exp_avg") is self.means[0] if self.params[0] in state else False


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient if gradient.is_contiguous() else gradient.contiguous()


def _plain(group: dict[str, Any], params: list[Tensor]) -> bool:
    """Whether the extension does all that is asked for."""
    dtype = params[0].dtype
    return (
        _options_are_plain(group)
        and dtype in (torch.float32, torch.float64)
        and all(p.device.type == "cpu" and p.dtype is dtype and p.is_contiguous() for p in params)
        and all(p.grad is not None and p.grad.layout is torch.strided for p in params)
    )


def _options_are_plain(group: dict[str, Any]) -> bool:
    unusual = ("weight_decay", "amsgrad", "maximize", "capturable", "differentiable")
    return not any(group[name] for name in unusual) and isinstance(group["lr"], float)
