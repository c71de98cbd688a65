"""Counter-based noise: Philox4x32-10, identical on every backend.

Contract: key = (low, high 32 bits of the seed); element ``i`` of the contiguous index space uses the counter
``(low32(i // 4), high32(i // 4), stream, 0)`` and word ``i % 4``; ``u = ((word >> 9) + 0.5) * 2**-23``, which lies
strictly inside (0, 1) and is exact in fp32. The backward regenerates the noise, it is never stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

#: One stream per random op, so that two ops given one seed draw independent noise.
STREAM_MULTIPLEX = 0
STREAM_MASK = 1
STREAM_MASK_BIAS = 2


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Ten Philox rounds on uint32 values held in int64 tensors (wrap-around keeps all 64 product bits)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _MASK32, (product1 >> 32) & _MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK32, high0 ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return [c0, c1, c2, c3]


def words(seed: Tensor, shape: torch.Size, *, stream: int, device: torch.device, start: int = 0) -> Tensor:
    """32-bit noise words in int64; that of element ``i`` in contiguous order depends on (seed, stream, start + i)."""
    numel = shape.numel()
    seed = seed.to(device)
    first, skipped = start // 4, start % 4
    group = torch.arange(first, first + (skipped + numel + 3) // 4, device=device, dtype=torch.int64)
    counter = (group & _MASK32, (group >> 32) & _MASK32, torch.full_like(group, stream), torch.zeros_like(group))
    drawn = torch.stack(philox4x32(counter, (seed & _MASK32, (seed >> 32) & _MASK32)), dim=-1)  # [groups, 4]
    return drawn.flatten()[skipped : skipped + numel].view(shape)


def uniform(seed: Tensor, shape: torch.Size, *, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uniform noise of ``shape`` in (0, 1): element ``i`` in contiguous order depends on (seed, stream, i) alone."""
    return ((words(seed, shape, stream=stream, device=device) >> 9).to(dtype) + 0.5) * 2.0**-23


def gumbel(seed: Tensor, shape: torch.Size, *, stream: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard Gumbel noise ``-log(-log u)``; finite because u never reaches 0 or 1."""
    return -torch.log(-torch.log(uniform(seed, shape, stream=stream, dtype=dtype, device=device)))


def seed_tensor(seed: int | Tensor | None, device: torch.device, name: str = "seed") -> Tensor:
    """The seed as an int64 0-d tensor on ``device``; ``None`` draws one from torch's generator, so
    ``torch.manual_seed`` applies.

    Nothing waits for the device, so that a CUDA graph can capture it: a replay draws anew for ``None``, reads the
    current value of a tensor on the device, and repeats an int or a tensor that was on the CPU, which is copied.
    """
    if seed is None:
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise TypeError(
                f"{name}: expected an int or an int64 0-d tensor, got {seed.dtype} of shape {list(seed.shape)}"
            )
        if seed.device not in (device, torch.device("cpu")):
            raise RuntimeError(f"{name}: expected a tensor on {device} or on the CPU, got one on {seed.device}")
        return seed if seed.device == device else seed.to(device)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{name}: expected an int or an int64 0-d tensor, got {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{name}: expected an int that fits in 64 bits, got {seed}")
    return torch.full((), seed, dtype=torch.int64, device=device)
