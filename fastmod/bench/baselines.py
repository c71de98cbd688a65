"""The layers in plain PyTorch, written as one would without fastmod: the baselines of every race.

Parameters have the names of ``fastmod.nn``, so that ``load_state_dict`` moves a model from one to the other.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod import noise
from fastmod.ops.sample_mask import WORDS, words_off


def norm_conv(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """Experts in a loop, as one writes them: batch norm, ReLU, convolution."""
    parts = []
    for image, kernel in zip(x.unbind(1), weight, strict=True):
        z = F.relu(F.batch_norm(image, None, None, training=True))
        parts.append(F.conv2d(z, kernel, None, stride, kernel.shape[-1] // 2))
    return torch.stack(parts, 1)


def norm_sum(x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor, gate: Tensor) -> Tensor:
    total = F.relu(x * scale[..., None, None] + shift[..., None, None] + residual)
    return (total * gate[..., None, None, None]).sum(1)


def batch_affine(mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight * torch.rsqrt(var + 1e-5)
    return scale, bias - mean * scale


def multiplex(blocks: Tensor, logits: Tensor) -> Tensor:
    return logits.softmax(-2).transpose(-1, -2) @ blocks


def gated_residual(x: Tensor, new: Tensor, gate: Tensor) -> Tensor:
    return torch.lerp(x, new, torch.sigmoid(gate).unsqueeze(-1))  # faster than the sum of two products


def range_penalty(*logits: Tensor, threshold: float = 20.0) -> Tensor:
    terms = [(t - t.detach().clamp(-threshold, threshold)).square().sum() for t in logits]
    return sum(terms[1:], start=terms[0])


#: Logistic noise [S, ...] and the masks that go with it.
Drawn = tuple[Tensor, Tensor]


def drawn_by_fastmod(logits: Tensor, samples: int, seed: int) -> Drawn:
    """Noise and masks of fastmod for ``seed``: with equal noise, results can be compared."""
    shape = torch.Size((samples, *logits.shape))
    words = noise.words(torch.tensor(seed), shape, stream=noise.STREAM_MASK, device=logits.device) >> 9
    u = (words.double() + 0.5) / WORDS
    return (u.log() - torch.log1p(-u)).to(logits.dtype), (words >= words_off(logits)).to(logits.dtype)


def sample_mask(logits: Tensor, samples: int, *, tau: float = 1.0, drawn: Drawn | None = None) -> Tensor:
    """Relaxed Bernoulli masks [S, *logits.shape], straight through; with ``drawn`` noise in place of its own."""
    if drawn is None:
        u1, u2 = torch.rand((2, samples, *logits.shape), dtype=logits.dtype, device=logits.device)
        soft = torch.sigmoid((logits - torch.log(torch.log(u1) / torch.log(u2))) / tau)
        hard = (soft > 0.5).to(soft.dtype)
    else:
        soft = torch.sigmoid((logits + drawn[0]) / tau)
        hard = drawn[1]
    return (hard - soft).detach() + soft


def masked_linear(x: Tensor, weight: Tensor, logits: Tensor, samples: int, *, drawn: Drawn | None = None) -> Tensor:
    weights = weight * sample_mask(logits, samples, drawn=drawn)  # [S, out, in]
    return torch.bmm(x.view(samples, -1, x.shape[-1]), weights.mT).flatten(0, 1)


def masked_conv2d(x: Tensor, weight: Tensor, logits: Tensor, samples: int, *, drawn: Drawn | None = None) -> Tensor:
    weights = weight * sample_mask(logits, samples, drawn=drawn)  # [S, out, in, h, w]
    return torch.cat([F.conv2d(part, w, padding=1) for part, w in zip(x.chunk(samples), weights, strict=True)])


def template_mix(logits: Tensor, bank: Tensor) -> Tensor:
    return logits.softmax(-1) @ bank


def _fnn(inputs: int, outputs: int, hidden: int, layers: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(i, o) for i, o in pairwise([inputs, *[hidden] * layers, outputs]))


def _run(fnn: nn.ModuleList, x: Tensor) -> Tensor:
    *hidden, last = fnn
    for layer in hidden:
        x = F.leaky_relu(layer(x))
    return last(x)


class MFNNR(nn.Module):
    """``[B, M, D] -> [B, N, D]``, and the range penalty or None."""

    def __init__(self, m: int, n: int, d: int, *, hidden: int, layers: int, threshold: float | None) -> None:
        super().__init__()
        self.m, self.n, self.d, self.threshold = m, n, d, threshold
        self.route = _fnn(m * d, m * n, hidden, layers)
        self.update = _fnn((n + m) * d, n * d + n, hidden, layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        flat = x.flatten(-2)
        logits = _run(self.route, flat).unflatten(-1, (self.m, self.n))  # [B, M, N]
        routed = multiplex(x, logits)  # [B, N, D]
        new, gate = _run(self.update, torch.cat([routed.flatten(-2), flat], -1)).split([self.n * self.d, self.n], -1)
        out = gated_residual(routed, new.unflatten(-1, (self.n, self.d)), gate)
        return out, None if self.threshold is None else range_penalty(logits, gate, threshold=self.threshold)


class SMFR(nn.Module):
    """The softmax SMFR with context; returns its output and the range penalty, None without a threshold."""

    def __init__(
        self,
        in_blocks: int,
        out_blocks: int,
        block_size: int,
        width: int,
        depth: int,
        *,
        hidden: int = 100,
        layers: int = 1,
        threshold: float | None = 20.0,
    ) -> None:
        super().__init__()
        counts = [in_blocks, *[width] * depth, out_blocks]
        self.stack = nn.ModuleList(
            MFNNR(m, n, block_size, hidden=hidden, layers=layers, threshold=threshold) for m, n in pairwise(counts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        total = None
        for layer in self.stack:
            x, penalty = layer(x)
            total = penalty if total is None else total + penalty
        return x, total
