"""A masked net part by part: what every sample of the masks must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.masks import MaskedModel
from fastmod.ops import sample_mask

SAMPLES = 4


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight lies as [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], -1)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def masked_and_seeds(
    net: nn.Module, call: Callable[[MaskedModel], Any], **options: Any
) -> tuple[Any, MaskedModel, Any]:
    """The output of a masked net, and the seeds of its masks."""
    masked = MaskedModel(net, SAMPLES, **{"init": 0.5, **options})
    for _, logits in masked.named_logits():
        nn.init.normal_(logits)
    torch.manual_seed(3)
    seeds = torch.randint(0, 2**63 - 1, (len(list(masked.named_logits())),)).unbind()
    torch.manual_seed(3)
    return call(masked), masked, seeds


def weights_of(masked: MaskedModel, seeds: Any, s: int) -> dict[str, Tensor]:
    weights = {name: value.detach() for name, value in masked.model.named_parameters()}
    for (name, logits), seed in zip(masked.named_logits(), seeds, strict=True):
        transposed = isinstance(masked.model.get_submodule(name.rpartition(".")[0]), Conv1D)  # noise lies as [out, in]
        mask = sample_mask(logits.t(), SAMPLES, seed)[s].t() if transposed else sample_mask(logits, SAMPLES, seed)[s]
        weights[name] = weights[name] * mask.to(weights[name].dtype)
    return weights


def assert_parts(
    net: nn.Module,
    x: Tensor,
    batch_dim: int = 0,
    axis: int = 0,
    again: Callable[[nn.Module], nn.Module] = lambda net: net,
    **options: Any,
) -> MaskedModel:
    """Part s of the batch is what the net gives for that part alone under sample s, and so are its gradients."""
    out, masked, seeds = masked_and_seeds(net, lambda m: m(x), batch_dim=batch_dim, **options)
    wanted = [
        torch.func.functional_call(again(net), weights_of(masked, seeds, s), (part,))
        for s, part in enumerate(x.tensor_split(SAMPLES, batch_dim))
    ]
    expected = torch.cat(wanted, axis)
    torch.testing.assert_close(out, expected)
    logits = list(masked.parameters())
    found = torch.autograd.grad(out.square().sum(), logits)
    for got, want in zip(found, torch.autograd.grad(expected.square().sum(), logits), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
        assert float(want.abs().max()) > 0
    return masked
