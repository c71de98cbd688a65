"""``Adam`` with gradient clipping, as one call a step for models of many small tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastmod import _extension


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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        groups = [(group, params) for group, params in groups if params]
        if _extension.LOADED and all(_plain(group, params) for group, params in groups):
            self._fast_step(groups)
        else:
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_([p for _, params in groups for p in params], self.max_norm, foreach=True)
            super().step()
        return loss

    def _fast_step(self, groups: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
        gradients = [[_dense(p.grad) for p in params] for _, params in groups]
        scale = 1.0
        if self.max_norm is not None:
            norm = math.sqrt(sum(torch.ops.fastmod.square_sum(some) for some in gradients))
            scale = min(self.max_norm / (norm + 1e-6), 1.0) if norm == norm else norm  # NaN spreads, as in torch
        for (group, params), some in zip(groups, gradients, strict=True):
            states = [self._state_of(p) for p in params]
            means, squares, steps = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            beta1, beta2 = group["betas"]
            torch.ops.fastmod.adam_(
                params, some, means, squares, steps, scale, group["lr"], beta1, beta2, group["eps"]
            )  # fmt: skip

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:  # as torch.optim.Adam begins it
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient if gradient.is_contiguous() else gradient.contiguous()


def _plain(group: dict[str, Any], params: list[Tensor]) -> bool:
    """Whether the extension does all that is asked for."""
    unusual = ("weight_decay", "amsgrad", "maximize", "capturable", "differentiable")
    if any(group[name] for name in unusual) or isinstance(group["lr"], Tensor):
        return False
    dtype = params[0].dtype
    return dtype in (torch.float32, torch.float64) and all(
        p.device.type == "cpu" and p.dtype is dtype and p.is_contiguous() and p.grad.layout is torch.strided  # type: ignore[union-attr]
        for p in params
    )
