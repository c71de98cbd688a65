"""inverted_residual with given statistics: agreement with fp64, with torch's own layers in eval mode, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastmod
from fastmod import ops
from fastmod.nn.isometric_block import IsometricBlock
from tests.helpers.agreement import DTYPES, LAYOUTS, assert_close, laid_out, opchecked
from tests.helpers.backends import same_bits
from tests.ops.test_inverted_residual import EMPTY, PARAMS, SHAPES, X, draw, everywhere, native


def draw_running(params: list[Tensor], shape: tuple[int, ...] = (3, 4)) -> list[tuple[Tensor, Tensor]]:
    """Statistics of other images, as running ones are: with statistics of nothing the squeeze-excite sees huge values,
    and its sigmoid decides by the last digits of them."""
    channels, tasks = params[0].shape[2], params[0].shape[0]
    x = torch.randn(32, tasks, channels, *shape).to(params[0].dtype)
    with torch.no_grad(), fastmod.use_backend("reference"):
        found = ops.inverted_residual(x, params)
    return list(zip(found.means, found.variances, strict=True))


def wide(value: object) -> object:
    if isinstance(value, Tensor):
        return value.double()
    return [wide(v) for v in value]  # type: ignore[attr-defined]


@torch.no_grad()
def compared(dtype: torch.dtype, layout: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Ours, in fp64, in plain PyTorch."""
    x, *params = draw(*shape, dtype=dtype)  # type: ignore[misc]
    x, running = laid_out(x, layout), draw_running(params, shape[-2:])
    ours = ops.inverted_residual(x, params, running=running).y
    with fastmod.use_backend("reference"):
        exact = ops.inverted_residual(x.double(), wide(params), running=wide(running)).y  # type: ignore[arg-type]
        return ours, exact, ops.inverted_residual(x, params, running=running).y


@native
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY, (1, 1, 3, 5, 2, 1, 1), (2, 3, 17, 40, 11, 4, 5)], ids=str)
@pytest.mark.usefixtures("backend")
def test_matches_fp64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert_close("y", [compared(torch.float32, "contiguous", shape) for _ in range(4)])


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("backend")
def test_dtypes_and_layouts(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(0)
    assert_close("y", [compared(dtype, layout, (5, 2, 5, 19, 4, 3, 5)) for _ in range(4)], scale=1e2)


@native
@pytest.mark.usefixtures("backend")
def test_an_image_has_no_part_in_another() -> None:
    x, *params = draw(6, 2, 5, 19, 4, 3, 5)
    running = draw_running(params)
    with torch.no_grad():
        y = ops.inverted_residual(x, params, running=running).y
        for i in range(6):
            assert same_bits(ops.inverted_residual(x[i : i + 1], params, running=running).y, y[i : i + 1])
        x[1, 0, 2, 1, 1] = float("nan")
        found = ops.inverted_residual(x, params, running=running).y
    assert found[1, 0].isnan().all()
    found[1, 0] = y[1, 0]
    assert same_bits(found, y)


@pytest.mark.parametrize("se", [True, False])
def test_as_the_block_of_torchs_layers(se: bool) -> None:
    torch.manual_seed(0)
    plain = [IsometricBlock(5, se).double() for _ in range(2)]
    for block in plain:
        block(torch.randn(8, 5, 4, 3).double())  # statistics other than the first
        block.eval()
    weights = {
        n: torch.stack([dict(b.named_parameters())[n].detach() for b in plain]) for n, _ in plain[0].named_parameters()
    }
    buffers = {n: torch.stack([dict(b.named_buffers())[n] for b in plain]) for n, _ in plain[0].named_buffers()}
    before = {n: value.clone() for n, value in buffers.items()}
    x = torch.randn(6, 2, 5, 4, 3, dtype=torch.float64)
    with torch.profiler.profile() as seen:
        y = plain[0].forward_stacked(x, weights, buffers)
    assert any(event.key == "fastmod::inverted_residual_inference" for event in seen.key_averages())
    with torch.no_grad():
        expected = torch.stack([b(x[:, t]) for t, b in enumerate(plain)], 1)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    assert all(torch.equal(before[n], value) for n, value in buffers.items())
    # With gradients it goes another way, to the same values.
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(plain[0].forward_stacked(leaf, weights, buffers), expected, rtol=1e-10, atol=1e-10)


@everywhere
def test_gradients_go_through_plain_pytorch(name: str) -> None:
    x, *params = draw(3, 2, 2, 3, 2, 2, 2, dtype=torch.float64)
    running = draw_running(params)
    leaves = [t.requires_grad_() for t in (x, *params)]
    with fastmod.use_backend(name):
        assert torch.autograd.gradcheck(lambda x, *p: ops.inverted_residual(x, p, running=running).y, leaves)


def test_bits_do_not_depend_on_threads() -> None:
    x, *params = draw(64, 1, 12, 40, 6, 8, 8)
    running, threads, results = draw_running(params), torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            with torch.no_grad():
                results.append(ops.inverted_residual(x, params, running=running).y)
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("r", [0, 2])
def test_opcheck(r: int) -> None:
    x, *params = draw(3, 2, 3, 5, r, 2, 4)
    stats = [value for pair in draw_running(params) for value in pair]
    opchecked("inverted_residual_inference", laid_out(x, "permuted"), params, stats, 1e-5)


RUNNING = draw_running(PARAMS)
BAD = {
    "count": (RUNNING[:4], ValueError, "running.*5 pairs.*4"),
    "no list": (X, TypeError, "running.*Tensor"),
    "no pair": ([*RUNNING[:4], RUNNING[4][:1]], ValueError, r"running\[4\].*mean and variance.*1"),
    "shape": ([RUNNING[2], *RUNNING[1:]], ValueError, r"running\[0\], expand's mean.*\[2, 5\].*\[2, 2\]"),
    "nothing": ([(RUNNING[0][0], None), *RUNNING[1:]], TypeError, r"running\[0\], expand's variance.*NoneType"),
}


@everywhere
@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, name: str) -> None:
    running, error, pattern = BAD[case]
    with fastmod.use_backend(name), torch.no_grad(), pytest.raises(error, match=pattern):
        ops.inverted_residual(X, PARAMS, running=running)


def test_the_kernel_refuses_too() -> None:
    stats = [value for pair in RUNNING for value in pair]
    for bad in (stats[:9], [stats[4], *stats[1:]], [stats[0].double(), *stats[1:]]):
        with pytest.raises((ValueError, TypeError)):
            torch.ops.fastmod.inverted_residual_inference(X, PARAMS, bad, 1e-5)
