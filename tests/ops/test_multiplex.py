"""multiplex on every backend: agreement with fp64, and the contract of the op."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastmod
from fastmod import ops
from fastmod.ops._checks import compute_dtype
from tests.helpers import backends
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_agrees, laid_out

NAN, INF = float("nan"), float("inf")
# B, M, N, D. In CUDA C++ a block holds whole batch rows, in Triton a program a tile of them.
SHAPES = [(3, 6, 8, 10), (2, 5, 4, 196), (1, 1, 1, 1), (9, 3, 9, 7), (2, 2, 1, 300), (7, 2, 37, 1)]
MANY = [(2, 33, 3, 5), (1, 65, 1, 130), (2, 40, 3, 5), (2, 16, 16, 32)]
# Many blocks, whose sums of tau are added up in two steps; weights that fill no tile of Triton's; weights, and blocks,
# that have no place in shared memory.
BEYOND = [(40, 2, 1, 200), (2, 70, 40, 3), (1, 130, 136, 2), (2, 3, 2, 9000)]
# Triton knows no shared memory of its own, and a step of its interpreter takes as long for few numbers as for many:
# fewer steps over blocks and D, and yet more weights than a tile has, and more than one step.
INTERPRETED = {(2, 70, 40, 3): (2, 33, 65, 3), (1, 130, 136, 2): (1, 65, 33, 3), (2, 3, 2, 9000): (2, 3, 2, 100)}
EMPTY = [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)]
TILES = [(128, 6, 8, 10), (5, 16, 16, 32), (3, 5, 4, 196), (1, 1, 1, 1), (67, 3, 5, 7), (2, 40, 33, 3)]
# Too large for a tile, so one element after the other: rows that fill no block of a product and columns that fill no
# vector; N a multiple of a vector, whose logits are read where they lie.
LARGE = [(3, 17, 13, 37), (2, 9, 32, 65), (3, 12, 16, 48), (66, 31, 16, 20), (2, 16, 48, 15), (2, 11, 15, 130)]
MODES = ("softmax", "gumbel", "argmax")
SEED = -(2**62) + 12345


def draw(b: int, m: int, n: int, d: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[torch.Tensor]:
    return [(torch.randn(b, m, d) * scale).to(dtype), (torch.randn(b, m, n) * scale).to(dtype)]


def route(mode: str, seed: int = SEED):
    return lambda blocks, logits, tau=1.0: ops.multiplex(blocks, logits, mode=mode, tau=tau, seed=seed)


@pytest.mark.usefixtures("filled_memory", "isa")
@pytest.mark.parametrize("tau", [0.7, 1.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", TILES + LARGE, ids=str)
def test_cpu_tiles_match_fp64(shape: tuple[int, ...], mode: str, tau: float) -> None:
    assert_agrees(route(mode), lambda: [*draw(*shape), torch.tensor(tau)])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
def test_matches_fp64(shape: tuple[int, ...], mode: str) -> None:
    assert_agrees(route(mode), lambda: [*draw(*shape), torch.tensor(0.7)])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mode", ["softmax", "argmax"])
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_many_blocks_match_fp64(shape: tuple[int, ...], mode: str) -> None:
    assert_agrees(route(mode), lambda: [*draw(*shape), torch.tensor(0.7)])


@pytest.mark.parametrize("backend", backends.parameters("native"), indirect=True)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", BEYOND, ids=str)
def test_beyond_a_tile(backend: backends.Backend, shape: tuple[int, ...], mode: str) -> None:
    if backend is backends.TRITON:
        shape = INTERPRETED.get(shape, shape)
    assert_agrees(route(mode), lambda: [*draw(*shape), torch.tensor(0.7)], draws=2)


@pytest.mark.parametrize("backend", backends.parameters("native", "triton"), indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 50, 100, 3), (2, 3, 5, 5200)], ids=str)
def test_beyond_shared_memory_in_every_dtype(backend: backends.Backend, shape: tuple[int, ...], dtype) -> None:
    assert_agrees(route("gumbel"), lambda: draw(*shape, dtype), draws=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_tensors_that_begin_anywhere(backend: backends.Backend, offset: int, dtype: torch.dtype) -> None:
    """Contiguous, but not at 16 bytes: what is read 16 bytes at a time must not be taken for aligned."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.full((tensor.numel() + offset,), NAN, dtype=tensor.dtype)
        return memory[offset:].view(tensor.shape).copy_(tensor)

    b, m, n, d = 7, 3, 4, 8
    blocks, logits = draw(b, m, n, d, dtype)
    grad, tau, seed = torch.randn(b, n, d).to(dtype), torch.tensor(0.7, dtype=compute_dtype(blocks)), torch.tensor(SEED)
    forward, backward = backends.kernel("multiplex_forward"), backends.kernel("multiplex_backward")
    for mode in (offset - 1,) if backend is backends.TRITON else range(3):
        expected = [
            forward(blocks, logits, tau, 1.0, seed, mode),
            *backward(grad, blocks, logits, tau, 1.0, seed, mode),
        ]
        elsewhere = [moved(t) for t in (grad, blocks, logits)]
        found = [forward(*elsewhere[1:], tau, 1.0, seed, mode), *backward(*elsewhere, tau, 1.0, seed, mode)]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)  # noise is slow to interpret
@pytest.mark.parametrize("shape", MANY, ids=str)
def test_many_blocks_with_noise_match_fp64(backend: backends.Backend, shape: tuple[int, ...]) -> None:
    assert_agrees(route("gumbel"), lambda: [*draw(*shape), torch.tensor(0.7)])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7, 3)], ids=str)
def test_dtypes(shape: tuple[int, ...], dtype: torch.dtype, mode: str) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    b, _, n, d = shape

    def inputs():
        return [*draw(*shape, dtype), torch.tensor(0.6, dtype=wide)]

    assert_agrees(route(mode), inputs, scales={2: b * n * d})  # the gradient of tau is one sum over all of them
    assert_agrees(
        lambda blocks, logits: route(mode)(blocks, logits, 0.3), lambda: draw(*shape, dtype)
    )  # no fp32 number


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(9, 4, 3, 5), (5, 6, 8, 10), (2, 33, 3, 5)], ids=str)
def test_more_dtypes(backend: backends.Backend, shape: tuple[int, ...], mode: str, dtype: torch.dtype) -> None:
    assert_agrees(route(mode), lambda: draw(*shape, dtype))


@pytest.mark.usefixtures("backend")
@given(
    b=st.sampled_from([0, 1, 2, 5]),
    m=st.sampled_from([1, 2, 3, 9, 21]),
    n=st.sampled_from([0, 1, 5, 16, 17]),
    d=st.sampled_from([0, 1, 3, 19, 66]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    mode=st.sampled_from(MODES),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_shape_layout_and_range(b, m, n, d, layouts, mode, scale, seed) -> None:
    torch.manual_seed(abs(seed) % 1000)

    def inputs():
        return [laid_out(t, kind) for t, kind in zip(draw(b, m, n, d, scale=scale), layouts, strict=False)]

    # The gradient of a logit is a difference of products as large as |blocks| * |grad| * D.
    assert_agrees(route(mode, seed), inputs, scale=scale * max(d, 1) * 4, grad_layout=layouts[2])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("dtype", "mode"), zip(DTYPES, ("gumbel", "softmax", "argmax", "softmax"), strict=True), ids=str
)
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layouts(layout: str, dtype: torch.dtype, mode: str) -> None:
    def inputs():
        shapes = ((2, 3, 4, 5), (2, 3, 4, 6))
        return [laid_out(torch.randn(shape).to(dtype), layout) for shape in shapes]

    assert_agrees(route(mode), inputs, grad_layout=layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_large_values(backend: backends.Backend, mode: str, dtype: torch.dtype) -> None:
    def inputs(m: int, blocks: float):
        x, logits = draw(3, m, 7, 3, dtype)
        return [x * blocks, logits * 1e4]

    for m, blocks in ((6, 1e4),) if backend is backends.TRITON else ((6, 1e4), (34, 1.0)):
        assert_agrees(route(mode), lambda m=m, blocks=blocks: inputs(m, blocks), scale=12.0 * blocks)


def check_not_finite(value: float, where: str, shape: tuple[int, ...]) -> None:
    def inputs():
        blocks, logits = draw(*shape)
        if where != "logits":
            blocks[1, 2, 1] = value
        if where != "blocks":
            logits[1, 2, 1] = value
        return [blocks, logits]

    for mode in MODES:
        assert_agrees(route(mode), inputs, draws=1)
    blocks, logits = inputs()
    logits[2] = -INF
    assert ops.multiplex(blocks, logits)[2].isnan().all()
    logits[2, 0] = NAN
    assert ops.multiplex(blocks, logits, mode="argmax")[2].isnan().all()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["blocks", "logits", "both"])
def test_nan_and_inf_travel_as_in_torch(value: float, where: str) -> None:
    check_not_finite(value, where, (4, 3, 5, 6))


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["blocks", "logits", "both"])
@pytest.mark.parametrize("shape", [(4, 16, 16, 32), (4, 17, 13, 37), (3, 40, 7, 3)], ids=str)
def test_nan_and_inf_among_many_blocks(
    backend: backends.Backend, value: float, where: str, shape: tuple[int, ...]
) -> None:
    check_not_finite(value, where, shape)


@pytest.mark.parametrize("mode", ["softmax", "argmax"])
def test_columns_of_minus_infinity(backend: backends.Backend, mode: str) -> None:
    """Minus infinities before finite scores are fine; a whole column of them is NaN, as in torch."""
    m = 4 if backend is backends.TRITON else 40  # more than a chunk

    def inputs():
        blocks, logits = draw(1, m, 7, 3)
        logits[0, 1, 0] = NAN
        logits[0, 0, 1] = INF
        logits[0, :, 2] = -INF
        logits[0, 0, 3] = -INF
        logits[0, : m - 1, 4] = -INF
        logits[0, m - 1, 5] = -1e4
        return [blocks, logits]

    assert_agrees(route(mode), inputs)
    out = route(mode)(*inputs())
    assert out[0, :3].isnan().all() and out[0, 3:].isfinite().all()

    def odd_blocks():
        blocks, logits = draw(1, m, 7, 3)
        blocks[0, 2, 1], blocks[0, 3, 0] = INF, NAN
        return [blocks, logits]

    assert_agrees(route(mode), odd_blocks, draws=1)


@pytest.mark.usefixtures("backend")
def test_first_of_equal_maxima() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0] * 12).view(1, 48, 1)
    blocks = torch.arange(48.0).view(1, 48, 1)
    assert ops.multiplex(blocks, logits, mode="argmax").item() == 1.0
    blocks = torch.arange(6.0).view(1, 3, 2)
    assert torch.equal(ops.multiplex(blocks, torch.zeros(1, 3, 4), mode="argmax"), blocks[:, :1].expand(1, 4, 2))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_tau_by_value_is_tau_by_tensor(mode: int, dtype: torch.dtype) -> None:
    """Bit for bit; the gradient of a number is zero in the dtype of sums."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    (blocks, logits), seed = draw(6, 4, 3, 5, dtype), torch.tensor(SEED)
    tau, grad = torch.tensor(0.75, dtype=wide), torch.randn(6, 3, 5).to(dtype)
    forward, backward = backends.kernel("multiplex_forward"), backends.kernel("multiplex_backward")
    assert torch.equal(forward(blocks, logits, tau, 1.0, seed, mode), forward(blocks, logits, None, 0.75, seed, mode))
    by_tensor = backward(grad, blocks, logits, tau, 1.0, seed, mode)
    *by_value, nothing = backward(grad, blocks, logits, None, 0.75, seed, mode)
    assert all(map(torch.equal, by_value, by_tensor))
    assert all(t.is_contiguous() for t in by_tensor)
    assert nothing.item() == 0 and nothing.dtype == by_tensor[2].dtype == wide


@pytest.mark.parametrize("backend", backends.parameters("native"), indirect=True)
@pytest.mark.parametrize("tau", [0.0, -1.0, NAN])
def test_a_tau_on_the_device_that_is_not_positive_gives_nan(backend: backends.Backend, tau: float) -> None:
    """Nobody waits for a GPU to read it."""
    blocks, logits = draw(2, 3, 5, 4)
    out = backends.kernel("multiplex_forward")(blocks, logits, torch.tensor(tau), 1.0, None, 0)
    assert out.isnan().all()


@pytest.mark.interpreted
def test_triton_draws_one_noise_in_tiles_and_rows() -> None:
    """Fours of a tile, single numbers of one whose rows are no fours, and rows."""
    from fastmod.kernels import multiplex

    seed = torch.tensor(2**40 + 7)
    for n in (4, 5):
        blocks, logits = draw(3, 5, n, 3)
        tiled, by_rows = torch.empty(2, 3, n, 3)
        multiplex.launch_forward(blocks, logits, tiled, None, 1.0, seed, 1)
        with mock.patch.object(multiplex, "tile_of", return_value=None):
            multiplex.launch_forward(blocks, logits, by_rows, None, 1.0, seed, 1)
        assert torch.equal(tiled, by_rows)


@pytest.mark.usefixtures("backend")
def test_softmax_is_the_textbook_formula() -> None:
    blocks, logits = draw(7, 4, 3, 5)
    expected = logits.softmax(-2).transpose(-1, -2) @ blocks
    torch.testing.assert_close(ops.multiplex(blocks, logits), expected)


@pytest.mark.usefixtures("backend")
def test_gumbel_picks_one_block_and_carries_the_relaxed_gradient() -> None:
    blocks, logits = draw(20, 6, 4, 3, torch.float64)
    logits.requires_grad_()
    out = ops.multiplex(blocks, logits, mode="gumbel", tau=0.5, seed=5)
    picked = (out.unsqueeze(-3) == blocks.unsqueeze(-2)).all(-1)  # [B, M, N]
    assert (picked.sum(1) == 1).all()
    noise = fastmod.noise.gumbel(
        torch.tensor(5), logits.shape, stream=0, dtype=torch.float64, device=torch.device("cpu")
    )
    soft = ((logits + noise) / 0.5).softmax(1)
    assert torch.equal(picked.double().argmax(1), soft.argmax(1))
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(soft.transpose(1, 2) @ blocks, logits, grad)[0]
    torch.testing.assert_close(torch.autograd.grad(out, logits, grad)[0], expected)


def test_gumbel_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).view(1, 3, 1).expand(20000, 3, 1)
    blocks = torch.eye(3).expand(20000, 3, 3)
    share = ops.multiplex(blocks, logits, mode="gumbel", seed=1).mean(0).squeeze()
    torch.testing.assert_close(share, logits[0, :, 0].softmax(0), atol=0.015, rtol=0)


@pytest.mark.usefixtures("backend")
def test_seed_rules() -> None:
    blocks, logits = draw(16, 6, 4, 3)
    torch.manual_seed(4)
    first, second = (ops.multiplex(blocks, logits, mode="gumbel") for _ in range(2))
    torch.manual_seed(4)
    assert torch.equal(ops.multiplex(blocks, logits, mode="gumbel"), first)
    assert not torch.equal(first, second)
    as_int, as_tensor = (ops.multiplex(blocks, logits, mode="gumbel", seed=s) for s in (-9, torch.tensor(-9)))
    assert torch.equal(as_int, as_tensor)


def test_noise_does_not_depend_on_batch_split_or_threads() -> None:
    blocks, logits = draw(1000, 6, 5, 7)
    whole = ops.multiplex(blocks, logits, mode="gumbel", seed=2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(ops.multiplex(blocks, logits, mode="gumbel", seed=2), whole)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(ops.multiplex(blocks[:3], logits[:3], mode="gumbel", seed=2), whole[:3])
    assert torch.equal(
        ops.multiplex(blocks.view(10, 100, 6, 7), logits.view(10, 100, 6, 5), mode="gumbel", seed=2).view_as(whole),
        whole,
    )


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)  # hundreds of calls
def test_gradcheck(backend: backends.Backend) -> None:
    blocks, logits = (t.requires_grad_() for t in draw(3, 4, 3, 5, torch.float64))
    tau = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda b, w, t: ops.multiplex(b, w, tau=t), (blocks, logits, tau))
