"""The kernels of masked_linear on every backend: masks bit for bit, launches, what they compute and in which memory."""

from __future__ import annotations

import itertools
from importlib import import_module

import pytest
import torch

import fastmod
from fastmod import ops
from fastmod.gpu import aten
from tests.helpers import backends, triton_launches
from tests.helpers.backends import isas
from tests.helpers.mask_cases import drawn, in_a_process, threads
from tests.helpers.masked_linear import MASKED_LINEAR, ROW_LIMIT, SEED, draw, layer
from tests.helpers.masked_linear import one_row_limit as one_row_limit
from tests.ops.test_sample_mask import by_reference, module

pytestmark = pytest.mark.usefixtures("one_row_limit")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_kernels_compute_only_what_is_needed(needs: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, logits = draw(3, 3, 6, 5)[:3]
    arguments = (torch.randn(9, 5), x, weight, logits, torch.tensor(SEED), 3, 1.0)
    backward = backends.kernel("masked_linear_backward")
    every = backward(*arguments, [True] * 3)
    launched = []
    if backends.INTERPRETED:
        launched = backends.watched(monkeypatch, import_module("fastmod.kernels.masked_linear"), *TRITON_KERNELS)
    for needed, got, want in zip(needs, backward(*arguments, needs), every, strict=True):
        assert torch.equal(got, want) if needed else got.numel() == 0
    if backends.INTERPRETED:
        assert ("backward_x_kernel" in launched) == needs[0]
        assert ("backward_weight_kernel" in launched) == (needs[1] or needs[2])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(0, 5, 7), (4, 0, 7), (4, 5, 0)], ids=str)
def test_kernels_of_nothing(shape: tuple[int, int, int]) -> None:
    rows, outputs, inputs = shape
    x, weight, biases, seed = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(2, outputs), SEED
    key = torch.tensor(seed)
    out = backends.kernel("masked_linear_forward")(x, weight, weight, biases, key, 2)
    assert torch.equal(out, biases.repeat_interleave(rows // 2, 0))
    found = backends.kernel("masked_linear_backward")(out, x, weight, weight, key, 2, 1.0, [True] * 3)
    assert all(torch.equal(got, torch.zeros_like(like)) for got, like in zip(found, (x, weight, weight), strict=True))


@pytest.mark.parametrize("backend", backends.parameters("triton"), indirect=True)
def test_many_rows_without_inputs(backend: backends.Backend) -> None:
    x, weight, logits, bias, _ = draw(3, 65, 0, 5)
    assert torch.equal(layer(3)(x, weight, logits, bias), bias.expand(195, 5))


@pytest.mark.usefixtures("backend")
def test_repeats_are_bit_equal() -> None:
    leaves = [t.requires_grad_() for t in draw(3, 5, 9, 6)]
    results = [torch.autograd.grad(layer(3)(*leaves).square().sum(), leaves) for _ in range(3)]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


TRITON_KERNELS = ("forward_kernel", "backward_x_kernel", "backward_weight_kernel")


@pytest.mark.interpreted
def test_triton_takes_the_seed_by_pointer_as_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers pass a seed of the CPU by value; on a GPU it comes by pointer."""
    kernels = import_module("fastmod.kernels.masked_linear")
    (x, weight, logits), grad, seed = draw(3, 3, 6, 5)[:3], torch.randn(9, 5), torch.tensor(-SEED)

    def results() -> list[torch.Tensor]:
        out = kernels.masked_linear_forward(x, weight, logits, None, seed, 3)
        return [out, *kernels.masked_linear_backward(grad, x, weight, logits, seed, 3, 0.7, (True,) * 3)]

    by_value = results()
    monkeypatch.setattr(kernels, "seed_args", lambda seed: {"seed_ptr": seed, "seed_value": 0})
    assert all(map(torch.equal, results(), by_value))


@pytest.mark.interpreted
def test_triton_takes_one_launch_forward_and_two_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "triton" really runs these kernels, for any number of rows."""
    launched = backends.watched(monkeypatch, import_module("fastmod.kernels.masked_linear"), *TRITON_KERNELS)
    monkeypatch.setattr(MASKED_LINEAR, "row_limit", ROW_LIMIT)
    for rows in (4, 65):
        launched.clear()
        with fastmod.use_backend("triton"):
            layer(3)(*[t.requires_grad_() for t in draw(3, rows, 5, 4)[:3]]).sum().backward()
        assert launched == list(TRITON_KERNELS)


@pytest.mark.interpreted
@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5])
def test_triton_takes_whole_steps_first(samples: int) -> None:
    """Sums of several steps and a rest, of columns that fill a tile and of some that do not."""
    x, weight, logits = draw(samples, 5, 148, 44)[:3]
    found = []
    for name in ("triton", "reference"):
        dtype = torch.float32 if name == "triton" else torch.float64
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, logits)]
        with fastmod.use_backend(name):
            out = layer(samples)(*leaves)
            found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("samples", [2, 4])
def test_triton_computes_again_what_is_infinite(samples: int, value: float) -> None:
    """In whole steps nothing guards inf - inf; what it leaves is found and computed with guards."""
    x, weight, logits = draw(samples, 3, 148, 44)[:3]
    x[1, 5], x[4, 140], weight[3, 40], logits[9, 64] = value, value, value, value
    found = []
    for name in ("triton", "reference"):
        with fastmod.use_backend(name):
            leaf = x.clone().requires_grad_()
            out = layer(samples)(leaf, weight, logits)
            grad = torch.ones_like(out)
            grad[2, 7] = value
            found.append([out.detach(), *torch.autograd.grad(out, leaf, grad)])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), expected.isnan()) and expected.isfinite().any()
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.parametrize("copies", [None, 2])
def test_triton_programs_share_a_sum(copies: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there would be few: the last adds up, in the same order at every call, and leaves no ticket behind."""
    kernels, common = import_module("fastmod.kernels.masked_linear"), import_module("fastmod.kernels._common")
    numbers = [] if copies is None else [copies]
    x, weight, logits = torch.randn(*numbers, 12, 148), torch.randn(*numbers, 68, 148), torch.randn(*numbers, 68, 148)
    biases, grad = torch.randn(*numbers, 4, 68), torch.randn(*numbers, 12, 68)
    seed = torch.tensor(SEED)

    def results() -> list[torch.Tensor]:
        out = kernels.masked_linear_forward(x, weight, logits, biases, seed, 4)
        return [out, *kernels.masked_linear_backward(grad, x, weight, logits, seed, 4, 1.0, (True, False, False))]

    monkeypatch.setattr(kernels, "STEPS", 1)
    monkeypatch.setattr(kernels, "ENOUGH", 0)
    alone = results()
    for enough, expected in ((4, [2, 1]), (8, [4, 2])):
        monkeypatch.setattr(kernels, "ENOUGH", enough)
        blocks = ("BLOCK_O", "BLOCK_I")
        assert [kernels.tile(4, 3, 68, 148, block, *kernels.kinds(x, None))["SPLITS"] for block in blocks] == expected
        first, second = results(), results()
        assert all(map(torch.equal, first, second))
        for shared, one in zip(first, alone, strict=True):
            torch.testing.assert_close(shared, one, rtol=0, atol=2e-5)
        assert not any(tickets.any() for tickets in common._tickets.values())


@pytest.mark.interpreted
@pytest.mark.parametrize("size", [400, 2000])
def test_triton_has_programs_for_a_large_gpu(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the papers' shapes, in one launch forward and two backward, torch's included."""
    launches = triton_launches.left_out(monkeypatch)
    x, weight = torch.empty(128, size), torch.empty(size, size)
    kernels, seed = import_module("fastmod.kernels.masked_linear"), torch.tensor(SEED)

    def step() -> None:
        kernels.masked_linear_forward(x, weight, weight, None, seed, 4)
        kernels.masked_linear_backward(x, x, weight, weight, seed, 4, 1.0, (True,) * 3)

    step()  # the tickets, which are kept
    launches.clear()
    assert aten.launches(step) == []
    assert len(launches) == 3 and min(each.grid[0] for each in launches) >= 100, launches


def test_threads_do_not_change_a_bit() -> None:
    inputs = [t.requires_grad_() for t in draw(4, 8, 300, 700)]
    results = []
    for count in (1, 2):
        with threads(count):
            out = layer(4)(*inputs)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Not getrusage: what that tells of a process begins with the peak of the one that started it.
PEAK = """
import re, torch, fastmod
from tests.helpers.masked_linear import draw, layer
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
torch.set_num_threads(2)
def step(inputs):
    layer(4)(*[t.requires_grad_() for t in inputs]).sum().backward()
with fastmod.use_backend({backend!r}):
    step(draw(4, 2, 70, 130))  # threads, workspaces and code are there before the count begins
    inputs = draw(4, 32, 2000, 2000)[:3]
    before = peak()
    step(inputs)
print(peak() - before)
"""


@pytest.mark.slow
def test_peak_memory() -> None:
    """At B 128, 2000 x 2000, S 4 the four masked weights alone are 61 MB and the noise as much again."""
    ours, plain = (float(in_a_process(PEAK.format(backend=name))) for name in ("native", "reference"))
    assert plain > 300, f"plain PyTorch takes {plain:.0f} MB only: the measurement is broken"
    assert ours <= 100, f"{ours:.0f} MB"


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("seed", [0, -SEED, 2**62 + 5])
def test_masks_are_those_of_sample_mask(seed: int) -> None:
    """Unit inputs show the masked weights: the masks are the same, bit for bit."""
    _, weight, logits, *_ = draw(1, 1, 12, 9, scale=3.0)
    weight = weight.bfloat16().float()  # which products of tf32 numbers leave as it is
    got = ops.masked_linear(torch.eye(12).repeat(3, 1), weight, logits, 3, seed=seed).view(3, 12, 9)
    assert torch.equal(got, by_reference(ops.masked_weight, weight, logits, 3, seed=seed).transpose(1, 2))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [12, 11])
def test_masks_next_to_the_threshold(inputs: int, dtype: torch.dtype) -> None:
    """Logits chosen so that the words of sample 1 are at the last that drops a weight or at the first that keeps it:
    kernels that compute thresholds roughly have to decide these exactly."""
    torch.manual_seed(3)
    words = drawn(3, 9 * inputs, 5).view(3, 9, inputs)[1]
    share = (words.double() + torch.randint(-1, 3, words.shape)) * 2.0**-23
    logits = ((1 - share) / share).log().float()
    if dtype == torch.float32:
        near = words - module.words_off(logits)
        assert (near.abs() <= 3).float().mean() > 0.8 and (near >= 0).any() and (near < 0).any()
    logits, weight, units = logits.to(dtype), torch.ones(9, inputs, dtype=dtype), torch.eye(inputs, dtype=dtype)
    got = ops.masked_linear(units.repeat(3, 1), weight, logits, 3, seed=5).view(3, inputs, 9)
    assert torch.equal(got, by_reference(ops.masked_weight, weight, logits, 3, seed=5).transpose(1, 2))
    grad = torch.eye(9, dtype=dtype).repeat(3, 1)
    seed = torch.tensor(5)
    x = torch.zeros(27, inputs, dtype=dtype)
    (dx, _, _) = backends.kernel("masked_linear_backward")(grad, x, weight, logits, seed, 3, 1.0, [True, False, False])
    assert torch.equal(dx.view(3, 9, inputs), by_reference(ops.masked_weight, weight, logits, 3, seed=5))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, grad = draw(3, 5, 33, 26, dtype), torch.randn(15, 26).to(dtype)
    found = []
    for limit in (5, 4):  # at once, by samples
        monkeypatch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton, limit=limit: limit)
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = layer(3, tau=0.5)(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    torch.testing.assert_close(*found)
    # Ones through the layer count the masks: these agree bit for bit.
    ones = [torch.eye(33).repeat(3, 1), torch.ones(26, 33), inputs[2].float()]
    counts = []
    for limit in (33, 32):
        monkeypatch.setattr(MASKED_LINEAR, "row_limit", lambda weight, triton, limit=limit: limit)
        counts.append(ops.masked_linear(*ones, 3, seed=4))
    masks = ops.sample_mask(ones[2], 3, seed=4).transpose(1, 2).reshape(99, 26)
    assert torch.equal(counts[0], masks) and torch.equal(counts[1], masks)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_part_of_the_samples(first: int, backend: str) -> None:
    """Private: sample ``first`` alone gets the masks that it has among all."""
    x, weight, logits, bias, bias_logits = draw(3, 4, 7, 5)
    options = {"bias": bias, "bias_logits": bias_logits, "seed": 9, "tau": 0.5}
    rows = slice(4 * first, 4 * first + 4)
    with fastmod.use_backend(backend):
        leaf, other = (logits.clone().requires_grad_() for _ in range(2))
        whole = ops.masked_linear(x, weight, leaf, 3, **options)
        part = MASKED_LINEAR._masked_linear(x[rows], weight, other, 1, first=first, **options)
        torch.testing.assert_close(part, whole[rows])
        expected = torch.autograd.grad(whole[rows].square().sum(), leaf)
        torch.testing.assert_close(torch.autograd.grad(part.square().sum(), other), expected)
    for wrong in (-1, 1.5, True, "1", 2**40):
        with pytest.raises(ValueError, match="first: expected an int"):
            MASKED_LINEAR._masked_linear(x, weight, logits, 3, first=wrong)


def test_row_limits() -> None:
    """What was measured: rows up to which the kernels win, fewer for large weights, fewer without wide vectors."""
    module, large, small = fastmod._extension.MODULE, torch.empty(2000, 2000), torch.empty(64, 64)
    try:
        for isa, limits in {"avx512": (265, 14898), "avx2": (150, 638), "baseline": (48, 96)}.items():
            if isa in isas():
                module.set_cpu_isa(isa)
                assert (ROW_LIMIT(large, False), ROW_LIMIT(small, False)) == limits
    finally:
        module.set_cpu_isa(module.best_cpu_isa())
    assert ROW_LIMIT(large, True) is None and ROW_LIMIT(large.to("meta"), False) is None  # on a GPU


def test_fifty_equal_repeats() -> None:
    inputs = [t.requires_grad_() for t in draw(4, 8, 100, 200)]
    results = []
    for _ in range(50):
        out = layer(4, tau=0.5)(*inputs)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
