"""Masked forms of torch's layers.

A masked layer is a shallow copy of the original: same parameters, same attributes, another ``forward``. In training,
part s of the batch meets sample s of the masks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fastmod import noise, ops
from fastmod.masks.state import MaskState
from fastmod.ops.sample_mask import _sample as draw


class MaskedLayer(nn.Module):
    """``mask_state`` is shared; ``mask_names``: the layer's parameters -> names in the whole model."""

    mask_state: MaskState
    mask_names: dict[str, str]
    mask_original: tuple[nn.Module]

    def masked(self, name: str) -> Tensor | None:
        """A parameter under the mask in force, when nothing is sampled; None if the layer has none of this name."""
        value = self.get_parameter(name) if name in self.mask_names else None
        return None if value is None else self.mask_state.masked(self.mask_names[name], value)

    def sampled(self, name: str) -> Tensor | None:
        """All samples of a parameter ``[S, ...]``."""
        if name not in self.mask_names:
            return None
        state, full = self.mask_state, self.mask_names[name]
        if full not in state.drawn:
            state.drawn[full] = self._draw(name, state.seed(full), noise.STREAM_MASK)
        return state.drawn[full]

    def _draw(self, name: str, seed: Tensor, stream: int) -> Tensor:
        state = self.mask_state
        value, logits = state.weight(self.get_parameter(name)), state.logit(self.mask_names[name])
        if logits is None:
            return value.expand(state.samples, *value.shape)
        return draw(logits, value, 0, state.samples, seed, stream, state.tau)

    def all_masked(self) -> dict[str, Tensor]:
        return {name: _required(self.masked(name)) for name in self.mask_names}

    def all_sampled(self) -> dict[str, Tensor]:
        return {name: _required(self.sampled(name)) for name in self.mask_names}

    def is_sampled(self) -> bool:
        """Whether this layer's weight is sampled in this forward."""
        return self.mask_state.sampling and self.mask_names["weight"] in self.mask_state.names

    def sampled_args(self) -> dict[str, Any]:
        """Arguments of ``masked_linear`` and ``masked_conv2d``."""
        state = self.mask_state
        bias = self.get_parameter("bias") if "bias" in self.mask_names else None
        return {
            "weight": state.weight(self.get_parameter("weight")),
            "logits": state.logit(self.mask_names["weight"]),
            "samples": state.samples,
            "bias": None if bias is None else state.weight(bias),
            "bias_logits": None if bias is None else state.logit(self.mask_names["bias"]),
            "seed": state.seed(self.mask_names["weight"]),
            "tau": state.tau,
        }


def _required(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


class MaskedLinear(MaskedLayer, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        x = input
        if not self.is_sampled():
            return F.linear(x, _required(self.masked("weight")), self.masked("bias"))
        state, axis = self.mask_state, self.mask_state.batch_axis(x)
        rows = x.movedim(axis, 0)
        if state.again(self.mask_names["weight"]):
            return self._by_copies(rows).movedim(0, axis)
        return ops.masked_linear(rows, **self.sampled_args()).movedim(0, axis)

    def _by_copies(self, rows: Tensor) -> Tensor:
        """The same with the S masked copies drawn once: for a layer that a decoder calls at every step."""
        state, name = self.mask_state, self.mask_names["weight"]
        parts = rows.reshape(state.samples, -1, rows.shape[-1])
        out = parts @ _required(self.sampled("weight")).transpose(1, 2)
        if "bias" in self.mask_names:
            bias = self.mask_names["bias"]
            if bias not in state.drawn:  # as masked_linear draws it
                state.drawn[bias] = self._draw("bias", state.seed(name), noise.STREAM_MASK_BIAS)
            out = out + state.drawn[bias].unsqueeze(1)
        return out.reshape(*rows.shape[:-1], out.shape[-1])


class MaskedConv2d(MaskedLayer, nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        x, padding = padded(self, input)
        if not self.is_sampled():
            weight, bias = _required(self.masked("weight")), self.masked("bias")
            return F.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)
        arguments = self.sampled_args()
        return ops.masked_conv2d(
            x, **arguments, stride=self.stride, padding=padding, dilation=self.dilation, groups=self.groups
        )


class MaskedConv1d(MaskedLayer, nn.Conv1d):
    """A 2-d convolution over images of height one."""

    def forward(self, input: Tensor) -> Tensor:
        x, padding = padded(self, input)
        if not self.is_sampled():
            weight, bias = _required(self.masked("weight")), self.masked("bias")
            return F.conv1d(x, weight, bias, self.stride, padding, self.dilation, self.groups)
        arguments = self.sampled_args()
        arguments |= {"weight": arguments["weight"].unsqueeze(2), "logits": arguments["logits"].unsqueeze(2)}
        return ops.masked_conv2d(
            x.unsqueeze(2),
            **arguments,
            stride=(1, self.stride[0]),
            padding=(0, padding[0]),
            dilation=(1, self.dilation[0]),
            groups=self.groups,
        ).squeeze(2)


def padded(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input, padded here where the convolution cannot do it, and the padding left to the convolution."""
    none = (0,) * len(layer.kernel_size)
    if layer.padding == "valid":
        return x, none
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return x, layer.padding
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), none


class MaskedLayerNorm(MaskedLayer, nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        x = input
        if not self.mask_state.sampling:
            return F.layer_norm(x, self.normalized_shape, self.masked("weight"), self.masked("bias"), self.eps)
        axis = self.mask_state.batch_axis(x, last=len(self.normalized_shape))
        y = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        return scaled_by_part(
            y, axis, y.dim() - len(self.normalized_shape), self.sampled("weight"), self.sampled("bias")
        )


class _MaskedBatchNorm(MaskedLayer):
    """Statistics belong to the frozen net: they are used as they are, also in training."""

    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float | None
    eps: float
    track_running_stats: bool

    def forward(self, input: Tensor) -> Tensor:
        x = input
        state = self.mask_state
        live = state.train_weights and self.training
        if live and self.track_running_stats:  # the net itself is in training: torch's own form keeps the statistics
            y = self._normalised_and_tracked(x)
        else:
            y = F.batch_norm(
                x, self.running_mean, self.running_var, None, None, self.running_mean is None, 0.0, self.eps
            )
        weight, bias = (self.sampled("weight"), self.sampled("bias")) if state.sampling else (None, None)
        if state.sampling:
            return scaled_by_part(y, 0, 1, weight, bias)
        shape = [1, -1] + [1] * (x.dim() - 2)
        weight, bias = self.masked("weight"), self.masked("bias")
        y = y if weight is None else y * weight.view(shape)
        return y if bias is None else y + bias.view(shape)

    def _normalised_and_tracked(self, x: Tensor) -> Tensor:
        original = self.mask_original[0]
        assert isinstance(original, nn.modules.batchnorm._BatchNorm)
        bare = {
            name: torch.ones_like(p) if name == "weight" else torch.zeros_like(p)
            for name, p in original.named_parameters()
        }
        return torch.func.functional_call(original, bare, (x,))


class MaskedBatchNorm1d(_MaskedBatchNorm, nn.BatchNorm1d):
    pass


class MaskedBatchNorm2d(_MaskedBatchNorm, nn.BatchNorm2d):
    pass


def scaled_by_part(y: Tensor, axis: int, feature: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``y * weight[s] + bias[s]`` for part s of the batch at ``axis``; features begin at dimension ``feature``."""
    if weight is None and bias is None:
        return y
    some = weight if weight is not None else bias
    assert some is not None
    parts = y.unflatten(axis, (some.shape[0], -1))
    shape = [1] * parts.dim()
    shape[axis] = some.shape[0]
    for i, size in enumerate(some.shape[1:]):
        shape[feature + 1 + i] = size
    if weight is not None:
        parts = parts * weight.view(shape)
    if bias is not None:
        parts = parts + bias.view(shape)
    return parts.flatten(axis, axis + 1)


class _MaskedRecurrent(MaskedLayer):
    """LSTM and GRU: the parts of the batch one after the other, each with its own sample of every weight."""

    batch_first: bool

    def forward(self, input: Any, hx: Any = None) -> Any:
        x, state = input, self.mask_state
        if not state.sampling:
            return torch.func.functional_call(self.mask_original[0], self.all_masked(), (x, hx))
        if isinstance(x, PackedSequence):
            return self._packed(x, hx)
        if x.dim() != 3:
            raise ValueError(f"x: expected a batch of sequences (3 dimensions), got shape {list(x.shape)}")
        axis = 0 if self.batch_first else 1
        outputs, hidden = zip(*self._parts(x.chunk(state.samples, axis), hx), strict=True)
        return torch.cat(outputs, axis), _joined(hidden)

    def _parts(self, parts: Any, hx: Any) -> list[tuple[Any, Any]]:
        state = self.mask_state
        weights = self.all_sampled()
        hidden = _split(hx, state.samples)
        return [
            torch.func.functional_call(
                self.mask_original[0], {name: value[s] for name, value in weights.items()}, (part, hidden[s])
            )
            for s, part in enumerate(parts)
        ]

    def _packed(self, x: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        samples = self.mask_state.samples
        sequences, lengths = pad_packed_sequence(x, batch_first=True)
        pieces = zip(sequences.chunk(samples), lengths.chunk(samples), strict=True)
        parts = [pack_padded_sequence(s, n, batch_first=True, enforce_sorted=False) for s, n in pieces]
        outputs, hidden = zip(*self._parts(parts, hx), strict=True)
        longest = sequences.shape[1]
        padded = torch.cat([pad_packed_sequence(out, True, total_length=longest)[0] for out in outputs])
        return pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False), _joined(hidden)


def _split(hx: Any, samples: int) -> list[Any]:
    """A hidden state ``[layers, B, H]``, or a tuple of two, cut along the batch."""
    if hx is None:
        return [None] * samples
    if isinstance(hx, Tensor):
        return list(hx.chunk(samples, 1))
    return list(zip(*[h.chunk(samples, 1) for h in hx], strict=True))


def _joined(hidden: tuple[Any, ...]) -> Any:
    if isinstance(hidden[0], Tensor):
        return torch.cat(hidden, 1)
    return tuple(torch.cat(h, 1) for h in zip(*hidden, strict=True))


class MaskedLSTM(_MaskedRecurrent, nn.LSTM):
    pass


class MaskedGRU(_MaskedRecurrent, nn.GRU):
    pass


class MaskedMultiheadAttention(MaskedLayer, nn.MultiheadAttention):
    """Attention of the parts one after the other."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        state, original = self.mask_state, self.mask_original[0]
        options = {
            "need_weights": need_weights,
            "average_attn_weights": average_attn_weights,
            "is_causal": is_causal,
        }
        if not state.sampling:
            both = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            return torch.func.functional_call(original, self.all_masked(), (query, key, value), {**both, **options})
        if query.dim() != 3:
            raise ValueError(f"query: expected a batch of sequences (3 dimensions), got shape {list(query.shape)}")
        samples, axis = state.samples, 0 if self.batch_first else 1
        drawn = self.all_sampled()
        inputs = list(zip(*[t.chunk(samples, axis) for t in (query, key, value)], strict=True))
        padding = _each(key_padding_mask, samples, split=True)
        per_head = attn_mask is not None and attn_mask.dim() == 3  # [B * heads, L, S]
        attention = _each(attn_mask, samples, split=per_head)
        results = [
            torch.func.functional_call(
                original,
                {name: tensor[s] for name, tensor in drawn.items()},
                inputs[s],
                {"key_padding_mask": padding[s], "attn_mask": attention[s], **options},
            )
            for s in range(samples)
        ]
        weights_out = torch.cat([r[1] for r in results]) if need_weights else None
        return torch.cat([r[0] for r in results], axis), weights_out


def _each(value: Tensor | None, samples: int, *, split: bool) -> list[Tensor | None]:
    if value is None or not split:
        return [value] * samples
    return list(value.chunk(samples))


#: Layers with a masked form of their own: exact types, since a subclass may compute something else.
MASKED: dict[type[nn.Module], type[MaskedLayer]] = {
    nn.Linear: MaskedLinear,
    nn.Conv1d: MaskedConv1d,
    nn.Conv2d: MaskedConv2d,
    nn.LayerNorm: MaskedLayerNorm,
    nn.BatchNorm1d: MaskedBatchNorm1d,
    nn.BatchNorm2d: MaskedBatchNorm2d,
    nn.LSTM: MaskedLSTM,
    nn.GRU: MaskedGRU,
    nn.MultiheadAttention: MaskedMultiheadAttention,
}

_told: set[type[nn.Module]] = set()


class MaskedAny(MaskedLayer):
    """Any other module with parameters: its own code, called by torch.func with every sample's weights."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.mask_original = (original,)

    def tell(self) -> None:
        """Say once per class that it takes the slow way."""
        kind = type(self.mask_original[0])
        if kind not in _told:
            _told.add(kind)
            warnings.warn(
                f"fastmod.masks: {kind.__name__} has no masked form of its own; it runs through torch.func "
                "(functional_call and vmap over the samples), which is slower",
                RuntimeWarning,
                stacklevel=2,
            )

    def get_parameter(self, target: str) -> nn.Parameter:
        return self.mask_original[0].get_parameter(target)

    def __getattr__(self, name: str) -> Any:
        """Whatever the module around it may want to read off the original."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["mask_original"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, original = self.mask_state, self.mask_original[0]
        if not (state.sampling and any(name in state.names for name in self.mask_names.values())):
            return torch.func.functional_call(original, self.all_masked(), args, kwargs)
        drawn = self.all_sampled()
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        axes: list[int | None] = []
        for i, leaf in enumerate(leaves):
            axis = state.batch_axis(leaf, last=0) if isinstance(leaf, Tensor) and leaf.dim() else None
            axes.append(axis)
            if axis is not None:
                leaves[i] = leaf.unflatten(axis, (state.samples, -1))
        main = next((axis for axis in axes if axis is not None), 0)

        def one(weights: dict[str, Tensor], *values: Any) -> Any:
            inner_args, inner_kwargs = torch.utils._pytree.tree_unflatten(list(values), spec)
            return torch.func.functional_call(original, weights, inner_args, inner_kwargs)

        out = torch.func.vmap(one, in_dims=(0, *axes), randomness="different")(drawn, *leaves)
        return torch.utils._pytree.tree_map(lambda t: t.movedim(0, main).flatten(main, main + 1), out)
