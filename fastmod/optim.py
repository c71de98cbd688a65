"""``Adam`` with gradient clipping, as one call a step for models of many small tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastmod import _extension
from fastmod.ops import _autograd

# Whether it did: False, with nothing done, if it cannot serve one of the tensors.
_adam = _autograd.define_native(
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, "
    "int[] group_sizes, float[] lrs, float[] beta1s, float[] beta2s, float[] epsilons, float max_norm) -> bool"
)

# What the extension may be handed; other kinds of tensors (DTensor ...) have ideas of their own what an op does.
_KINDS = {Tensor, nn.Parameter}
_UNUSUAL = ("weight_decay", "amsgrad", "maximize", "capturable", "differentiable", "foreach")

# When an optimiser is made, torch wraps the `step` of its class, for hooks and the profiler. That of the class below is
# wrapped so; from it torch's own must be called bare, else all hooks run twice once a torch.optim.Adam was made too.
# `unwrap` takes off the handling of `differentiable` too, which the call makes up for. Should torch wrap otherwise,
# test_hooks_are_called_once and test_differentiable (tests/nn/test_optim*.py) would notice.
_torch_step = inspect.unwrap(torch.optim.Adam.step)


class Adam(torch.optim.Adam):
    """``torch.optim.Adam``, preceded by ``clip_grad_norm_`` when ``max_norm`` is given.

    A drop-in: same state, same ``state_dict``, same hooks. On the CPU, fp32 and fp64 parameters are updated by one call
    of the extension, which clips as well. Anything else is left to torch: other devices and dtypes, weight decay,
    amsgrad, a learning rate that is a tensor, distributed tensors, compiled steps ...

    Under ``torch.amp.GradScaler`` the norm is that of the unscaled gradients, and a step with an infinite one is
    skipped; ``scaler.unscale_`` may be called before, but need not. What ``p.grad`` holds after a step, the clipped
    gradient or still the whole one, is not specified.

    Args:
        params, lr, betas, eps, and keywords: as in ``torch.optim.Adam``. ``fused`` is True unless given, or unless
            ``foreach`` or ``differentiable`` are; ``fused=False`` leaves every step to torch.
        max_norm: the norm of all gradients together is clipped to this; None leaves them as they are.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm: expected a number > 0 or None, got {max_norm}")
        if not (options.get("foreach") or options.get("differentiable")):
            options = {"fused": True, **options}
        super().__init__(params, lr, betas, eps, **options)
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._one_call():
            self._clip()
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                _torch_step(self)
        return loss

    def _one_call(self) -> bool:
        """False, with nothing done, if something is asked for that the extension does not do.

        Nothing is kept from step to step: the lists are made in a small part of the time that they save, and what was
        kept would have to be found out of date whenever someone freezes, moves, adds or reloads something.
        """
        # A GradScaler leaves its notes on the optimiser, and torch's kernels act on them.
        if not _extension.LOADED or hasattr(self, "found_inf") or torch.compiler.is_compiling():
            return False
        params: list[Tensor] = []
        grads: list[Tensor] = []
        states: list[dict[str, Tensor]] = []
        sizes, numbers = [], []
        for group in self.param_groups:
            if not _plain(group):
                return False
            before = len(params)
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    params.append(parameter)
                    grads.append(gradient)
            sizes.append(len(params) - before)
            numbers.append((group["lr"], *group["betas"], group["eps"]))
        if not {*map(type, params), *map(type, grads)} <= _KINDS:
            return False
        for parameter in params:
            state = self.state[parameter]
            if not state and not _begin(state, parameter):
                return False
            states.append(state)
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        return _adam(
            params, grads, means, squares, steps, sizes, *map(list, zip(*numbers, strict=True)), self.max_norm or 0.0
        )

    def _clip(self) -> None:
        """The gradients in place, where torch does the rest."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.max_norm is None or any(p.grad.is_sparse for p in params):  # which Adam will refuse
            return
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            nn.utils.clip_grad_norm_(params, self.max_norm)
            return
        # Still scaled, by a GradScaler; torch's kernel divides by the scale. All but the norm may stay as it is.
        if any(p.grad.dtype is torch.float16 for p in params):
            raise ValueError("max_norm: expected None for float16 gradients under a GradScaler: their norm overflows")
        norm = nn.utils.get_total_norm([p.grad for p in params])
        nn.utils.clip_grads_with_norm_(params, self.max_norm, norm / scale.to(norm.device))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["fused"] and any(p.is_complex() for p in group["params"]):
            group["fused"] = None  # torch has no fused step for these, but others

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. State of a ``torch.optim.Adam`` that was not told how to step leaves it open here too."""
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # else torch will complain
            groups = [_with_choice(group, own["fused"]) for group, own in zip(groups, self.param_groups, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_norm": self.max_norm}


def _with_choice(group: Mapping[str, Any], fused: bool | None) -> dict[str, Any]:
    open_ = group.get("fused") is None and not group.get("foreach") and not group.get("differentiable")
    return {**group, "fused": fused} if open_ else {**group}


def _begin(state: dict[str, Tensor], parameter: Tensor) -> bool:
    """Fills an empty state as torch.optim.Adam does; not on devices, where the count of steps may belong elsewhere."""
    if parameter.device.type != "cpu":
        return False
    state["step"] = torch.zeros((), dtype=torch.float32)
    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return True


def _plain(group: Mapping[str, Any]) -> bool:
    """Whether the extension does all that is asked for."""
    if any(map(group.__getitem__, _UNUSUAL)) or group["fused"] is False:
        return False
    return all(isinstance(number, (int, float)) for number in (group["lr"], *group["betas"], group["eps"]))
