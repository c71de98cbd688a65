"""The noise contract, against Random123's published vectors."""

from __future__ import annotations

import pytest
import torch

from fastmod import noise, ops

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


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x1_0000_0001])
def test_native_kernels_draw_the_same_noise(seed: int) -> None:
    # With zero logits the pick of a column is the largest Gumbel draw of it, that is, the largest uniform.
    shape = torch.Size([203, 7, 3])
    blocks = torch.eye(7, dtype=torch.float64).expand(203, 7, 7)
    out = ops.multiplex(blocks, torch.zeros(shape, dtype=torch.float64), mode="gumbel", seed=seed)
    u = noise.uniform(torch.tensor(seed), shape, stream=noise.STREAM_MULTIPLEX, dtype=torch.float64, device=CPU)
    assert torch.equal(out.argmax(-1), u.argmax(1))


@pytest.mark.parametrize("seed", [1.5, "1", True, torch.tensor(1.0), torch.tensor([1]), 2**64])
def test_bad_seeds(seed: object) -> None:
    with pytest.raises((TypeError, ValueError), match="seed"):
        ops.multiplex(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), mode="gumbel", seed=seed)
