"""All parts of a batch in one run of the net, by ``torch.func.vmap``.

Which part an example belongs to is a hidden dimension: the net can reshape, repeat, concatenate and transpose what it
sees as it likes, and no example is computed under the mask of another part. The fused ops need it as an ordinary
dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastmod import _private

AVAILABLE = _private.HIDDEN_DIMENSIONS


def without_hidden_dimensions(value: Tensor) -> Tensor:
    """A tensor without its hidden dimensions, even after the end of the vmap that made them."""
    while AVAILABLE and _private.is_batched(value):
        value = _private.get_unwrapped(value)
    return value


class HiddenDimension:
    """The hidden dimension of one run, that of ``index``, which has one number per part."""

    def __init__(self, index: Tensor, samples: int) -> None:
        self._level, self._samples = _private.level_of(index), samples

    def __call__(self, make: Callable[[], Tensor]) -> Tensor:
        """Hide dimension 0 of the result of ``make``, which runs outside vmap."""
        with _private.interpreter().lower():
            value = make()
        return _private.add_batch_dim(value, 0, self._level)

    def unhidden(self, value: Tensor) -> Tensor | None:
        """``[S, ...]`` of a tensor of this run; None inside a vmap of the net's own."""
        if _private.interpreter().level() != self._level:
            return None
        with _private.interpreter().lower():
            if not _private.is_batched(value):
                return value.unsqueeze(0).expand(self._samples, *value.shape)
            inner = _private.get_unwrapped(value)
            return None if _private.is_batched(inner) else inner.movedim(_private.batch_dim_of(value), 0)

    @staticmethod
    def is_hidden(value: Tensor) -> bool:
        return _private.is_batched(value)


class Attention(TorchFunctionMode):
    """``scaled_dot_product_attention`` for all parts in one call: vmap has no rule for it and would loop."""

    def __init__(self, hidden: HiddenDimension) -> None:
        super().__init__()
        self._hidden = hidden

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            found = self._attention(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
        if any(t.dim() != 4 for t in tensors[:3]) or not any(self._hidden.is_hidden(t) for t in tensors):
            return None
        shared = attn_mask is not None and not self._hidden.is_hidden(attn_mask) and _has_no_batch(attn_mask)
        if attn_mask is not None and not shared and attn_mask.dim() != 4:
            return None
        unhidden = [self._hidden.unhidden(t) for t in (tensors[:3] if shared else tensors)]
        if any(t is None for t in unhidden):
            return None

        def run() -> Tensor:
            folded = [t.flatten(0, 1) for t in unhidden if t is not None]
            mask = attn_mask if shared else (folded[3] if attn_mask is not None else None)
            if mask is not None and not shared and mask.shape[0] != folded[0].shape[0]:  # one of [1, ...] for each part
                mask = mask.repeat_interleave(folded[0].shape[0] // mask.shape[0], 0)
            q, k, v = folded[:3]
            out = F.scaled_dot_product_attention(q, k, v, mask, *args, **kwargs)
            return out.unflatten(0, (len(unhidden[0]), -1))  # type: ignore[arg-type]

        return self._hidden(run)


def _has_no_batch(mask: Tensor) -> bool:
    return mask.dim() < 4 or mask.shape[0] == 1
