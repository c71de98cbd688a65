"""The noise contract, against Random123's published vectors."""

from __future__ import annotations

import pytest
import torch

from fastmod import noise, ops
from tests.helpers.backends import TRITON, Backend

CPU = torch.device("cpu")
# Counter, key, expected words: philox4x32-10 of Random123's known-answer file.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_random123_vectors(counter, key, expected) -> None:
    words = noise.philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert [w.item() for w in words] == list(expected)


def test_index_space() -> None:
    seed = torch.tensor(0x123456789ABCDEF0)
    u = noise.uniform(seed, torch.Size([3, 5]), stream=7, dtype=torch.float64, device=CPU).flatten()
    for i in (0, 5, 14):
        counter = tuple(torch.tensor([c]) for c in (i // 4, 0, 7, 0))
        word = noise.philox4x32(counter, (torch.tensor([0x9ABCDEF0]), torch.tensor([0x12345678])))[i % 4].item()
        assert u[i].item() == ((word >> 9) + 0.5) * 2.0**-23
    assert torch.equal(noise.uniform(seed, torch.Size([15]), stream=7, dtype=torch.float32, device=CPU).double(), u)


def test_uniform_is_strictly_inside_and_even() -> None:
    u = noise.uniform(torch.tensor(-1), torch.Size([200_000]), stream=0, dtype=torch.float32, device=CPU)
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean().item() - 0.5) < 0.003 and abs(u.var().item() - 1 / 12) < 0.002


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x1_0000_0001])
def test_kernels_draw_the_same_noise(backend: Backend, seed: int) -> None:
    # With zero logits the pick of a column is the largest Gumbel draw of it, that is, the largest uniform.
    rows = 17 if backend is TRITON else 203
    shape = torch.Size([rows, 7, 3])
    blocks = torch.eye(7, dtype=torch.float64).expand(rows, 7, 7)
    out = ops.multiplex(blocks, torch.zeros(shape, dtype=torch.float64), mode="gumbel", seed=seed)
    u = noise.uniform(torch.tensor(seed), shape, stream=noise.STREAM_MULTIPLEX, dtype=torch.float64, device=CPU)
    assert torch.equal(out.argmax(-1).cpu(), u.argmax(1))


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 3, -(2**63)])
@pytest.mark.parametrize("start", [0, 2**32 - 2, 2**34 - 3, 2**40 + 1])
def test_triton_follows_the_contract(seed: int, start: int) -> None:
    import triton
    import triton.language as tl

    global uniform, uniform_kernel  # Triton looks names up in the module
    from fastmod.kernels._common import uniform

    @triton.jit
    def uniform_kernel(out_ptr, seed_ptr, start_ptr, SIZE: tl.constexpr):  # noqa: N803
        i = tl.arange(0, SIZE)
        tl.store(out_ptr + i, uniform(tl.load(seed_ptr), tl.load(start_ptr) + i, tl.float64))

    out = torch.empty(8, dtype=torch.float64)
    uniform_kernel[(1,)](out, torch.tensor(seed), torch.tensor(start), SIZE=8)
    index = torch.arange(start, start + 8)
    group, mask = index // 4, 0xFFFFFFFF
    zeros = torch.zeros_like(group)
    key = torch.tensor(seed)
    words = torch.stack(
        noise.philox4x32((group & mask, group >> 32, zeros, zeros), (key & mask, (key >> 32) & mask)), dim=-1
    )
    word = words.gather(-1, (index % 4)[:, None])[:, 0]
    assert torch.equal(out, ((word >> 9).double() + 0.5) * 2.0**-23)
    if start == 0:
        assert torch.equal(out, noise.uniform(key, torch.Size([8]), stream=0, dtype=torch.float64, device=CPU))


@pytest.mark.parametrize("seed", [1.5, "1", True, torch.tensor(1.0), torch.tensor([1]), 2**64])
def test_bad_seeds(seed: object) -> None:
    with pytest.raises((TypeError, ValueError), match="seed"):
        ops.multiplex(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), mode="gumbel", seed=seed)


@pytest.mark.parametrize("name", ["masked_linear", "sample_mask", "multiplex"])
def test_a_seed_is_advanced_after_the_backward(name: str) -> None:
    """As the docstrings say: the backward reads it again, and autograd refuses one that has changed by then."""
    x, weight, logits = (torch.randn(*shape, requires_grad=True) for shape in ((4, 3), (5, 3), (5, 3)))
    call = {
        "masked_linear": lambda seed: ops.masked_linear(x, weight, logits, 2, seed=seed),
        "sample_mask": lambda seed: ops.sample_mask(logits, 2, seed),
        "multiplex": lambda seed: ops.multiplex(x, x @ weight.mT, mode="gumbel", seed=seed),
    }[name]
    seed = torch.tensor(3)
    first = call(seed)
    first.sum().backward()
    seed.add_(1)
    assert not torch.equal(call(seed), first)
    early = call(seed)
    seed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.sum().backward()
    documented = " ".join((getattr(ops, name).__doc__ or "").split())
    assert "advanced in place after the backward, which reads it again, and not before" in documented
