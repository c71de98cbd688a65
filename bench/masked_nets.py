"""Nets as people bring them to ``MaskedModel``, and their masks as they are written without it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.bench.baselines import Drawn, drawn_by_fastmod, sample_mask
from fastmod.bench.steps import RandomStep, Step, backward_step
from fastmod.masks import MaskedModel

SAMPLES = 4


class Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    """A Transformer's layer, normalised first."""

    def __init__(self, size: int, heads: int, linear: Callable[[int, int], nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, norm(size), norm(size)
        self.attend, self.join = linear(size, 3 * size), linear(size, size)
        self.up, self.down = linear(size, 4 * size), linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attend(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer(linear: Callable[[int, int], nn.Module], norm: type[nn.Module]) -> nn.Module:
    blocks = [Block(256, 4, linear, norm) for _ in range(4)]
    return nn.Sequential(nn.Embedding(1000, 256), *blocks, norm(256), nn.Linear(256, 1000, bias=False))


def tokens(steps: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(1000, (16, steps))


def gpt2() -> nn.Module:
    return transformer(Conv1D, nn.LayerNorm)


def bert() -> nn.Module:
    return transformer(nn.Linear, nn.LayerNorm)


def llama() -> nn.Module:
    return transformer(lambda i, o: nn.Linear(i, o, bias=False), RMSNorm)


class ViT(nn.Module):
    """Patches of 8 x 8 pixels, a class token, places that are learned."""

    def __init__(self, pixels: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 256, 8, stride=8)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, 256))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + (pixels // 8) ** 2, 256))
        self.blocks = nn.Sequential(*[Block(256, 4, nn.Linear, nn.LayerNorm) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


def mlp(layers: int = 3, size: int = 1024) -> nn.Module:
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(size, size), nn.ReLU())][:-1])


def depthwise() -> nn.Module:
    def part(inputs: int, outputs: int) -> list[nn.Module]:
        deep = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
        wide = nn.Conv2d(inputs, outputs, 1, bias=False)
        return [deep, nn.BatchNorm2d(inputs), nn.ReLU(), wide, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *part(32, 64), nn.AvgPool2d(2), *part(64, 128), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def steps(make: Callable[[], nn.Module], inputs: Callable[[], Tensor], *, compiled: bool) -> dict[str, Step]:
    """The peer masks every weight by straight-through samples of its own and runs part by part."""
    torch.manual_seed(0)
    net, x = make().eval(), inputs()
    masked = MaskedModel(net, SAMPLES)
    net.eval()  # no dropout: both compute the same
    with torch.no_grad():
        grad = torch.randn_like(net(x))
    frozen = {name: value.detach() for name, value in net.named_parameters()}
    turned = {f"{path}.weight" for path, module in net.named_modules() if isinstance(module, Conv1D)}

    def parts(logits: dict[str, Tensor], drawn: dict[str, Drawn] | None = None) -> Tensor:
        weights = dict(frozen)
        outputs = []
        for s, part in enumerate(x.chunk(SAMPLES)):
            for name, value in logits.items():
                given = None if drawn is None else (drawn[name][0][s : s + 1], drawn[name][1][s : s + 1])
                weights[name] = frozen[name] * sample_mask(value, 1, drawn=given)[0]
            outputs.append(torch.func.functional_call(net, weights, (part,)))
        return torch.cat(outputs)

    def fixed_noise() -> dict[str, Drawn]:
        torch.manual_seed(0)
        seeds = torch.randint(0, 2**63 - 1, (len(masked.logits),)).tolist()
        result = {}
        for (name, value), seed in zip(masked.named_logits(), seeds, strict=True):
            noise, masks = drawn_by_fastmod(value.t() if name in turned else value, SAMPLES, seed)
            result[name] = (noise.transpose(1, 2), masks.transpose(1, 2)) if name in turned else (noise, masks)
        return result

    def peer(run: Callable[..., Tensor]) -> RandomStep:
        logits = {name: value.detach().clone().requires_grad_() for name, value in masked.named_logits()}
        leaves = list(logits.values())
        return RandomStep(
            backward_step(lambda: [run(logits)], leaves, [grad]),
            backward_step(lambda: [run(logits, fixed_noise())], leaves, [grad]),
        )

    def ours() -> list[Tensor]:
        return [masked(x)]

    def ours_fixed() -> list[Tensor]:
        torch.manual_seed(0)
        return ours()

    leaves = [value for _, value in masked.named_logits()]
    found: dict[str, Step] = {"eager": peer(parts)}
    if compiled:
        found["compile"] = peer(torch.compile(parts))
    found["fastmod"] = RandomStep(backward_step(ours, leaves, [grad]), backward_step(ours_fixed, leaves, [grad]))
    return found
