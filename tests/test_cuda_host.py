"""The CUDA C++ kernels, executed on the host: values against the fp64 reference, then the same under sanitizers.

No GPU, no nvcc: ``tests/cuda_host`` compiles the .cu files with g++ and runs every CUDA thread as a fiber. Each check
takes the harness to run on, so that plain and sanitised builds see the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod import noise
from fastmod.ops._checks import FLOAT_DTYPES, compute_dtype
from fastmod.ops.gated_residual import reference as gated_residual_reference
from fastmod.ops.mfnnr import LEAKY_SLOPE, NO_PENALTY
from fastmod.ops.mfnnr import reference as mfnnr_reference
from fastmod.ops.multiplex import reference as multiplex_reference
from fastmod.ops.range_penalty import reference as range_penalty_reference
from tests.cuda_host import CrashError, Harness, InOut, LaunchError, Out, UnavailableError, build_bindings

F32, F64 = torch.float32, torch.float64
SOFTMAX, GUMBEL, ARGMAX = 0, 1, 2
SEED = 0x1234_5678_9ABC_DEF0
NAN, INF = float("nan"), float("inf")
WRONG_TAU = -1.0  # passed by value where the pointer must win: any use of it would show


def _start(flavour: str, orders: Sequence[int]) -> Iterator[Harness]:
    try:
        harness = Harness(flavour, orders)
    except UnavailableError as error:
        pytest.skip(str(error))
    yield harness
    harness.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Harness]:
    yield from _start("plain", orders=(1, 2, 3))


@pytest.fixture(scope="module")
def asan() -> Iterator[Harness]:
    yield from _start("asan", orders=(1,))


@pytest.fixture(scope="module")
def tsan() -> Iterator[Harness]:
    yield from _start("tsan", orders=(1,))


def random(*shape: int, dtype: torch.dtype = F32, scale: float = 1.0, seed: int = 0) -> Tensor:
    """In [-2, 2] * scale, exactly representable in ``dtype``."""
    generator = torch.Generator().manual_seed(seed + sum(shape) * 31)
    return ((torch.rand(shape, generator=generator, dtype=F64) * 4 - 2) * scale).to(dtype)


def assert_close(name: str, got: Tensor, exact: Tensor, usual: Tensor, factor: float = 2.0, scale: float = 0.0) -> None:
    """Error against fp64 at most ``factor`` times that of ``usual``, plain PyTorch in the same dtype, plus rounding.

    ``scale``: size of the terms of a sum that may cancel to something smaller.
    """
    assert got.shape == exact.shape, f"{name}: {tuple(got.shape)} != {tuple(exact.shape)}"
    finite = exact.isfinite() & usual.isfinite()
    torch.testing.assert_close(got[~finite], usual[~finite], equal_nan=True, msg=f"{name}: NaN or infinity differs")
    if not finite.any():
        return
    epsilon, tiny = torch.finfo(got.dtype).eps, torch.finfo(got.dtype).smallest_normal
    units = 64 if got.dtype == F64 else 4  # in fp64 plain PyTorch is itself the measure, and its error unknown
    exact, got, usual = (t[finite].to(F64) for t in (exact, got, usual))
    error, allowed = (got - exact).abs().max(), (usual - exact).abs().max()
    slack = units * epsilon * exact.abs().max().clamp(min=scale) + tiny
    assert error <= factor * allowed + slack, f"{name}: error {error:.3g}, plain PyTorch {allowed:.3g} + {slack:.3g}"


def gradients(loss: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """[value, gradient of each input] in ``dtype`` of a function whose result is weighted by the last input."""
    leaves = [t.to(dtype).requires_grad_() for t in inputs[:-1]]
    value = loss(*leaves)
    grads = torch.autograd.grad(value, leaves, inputs[-1].to(value.dtype), allow_unused=True)
    filled = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    return [value.detach(), *filled]


# ---- multiplex


class Multiplex(NamedTuple):
    sizes: tuple[int, int, int, int]  # B, M, N, D
    dtype: torch.dtype = F32
    mode: int = SOFTMAX
    pointers: bool = False  # tau and seed in device memory
    logit_scale: float = 2.0
    special: float | None = None  # put into one logit and one block

    def id(self) -> str:
        special = "" if self.special is None else f"-{self.special}"
        pointers = "-pointers" if self.pointers else ""
        sizes = "B{}-M{}-N{}-D{}".format(*self.sizes)
        return f"{sizes}-{str(self.dtype)[6:]}-mode{self.mode}-x{self.logit_scale:g}{pointers}{special}"


def check_multiplex(harness: Harness, case: Multiplex) -> None:
    batch, m, n, d = case.sizes
    dtype, wide = case.dtype, compute_dtype(torch.empty(0, dtype=case.dtype))
    blocks, logits = random(batch, m, d, dtype=dtype), random(batch, m, n, dtype=dtype, scale=case.logit_scale / 2)
    grad = random(batch, n, d, dtype=dtype, seed=1)
    if case.special is not None:
        logits[0, m // 2, 0] = case.special
        blocks[-1, 0, 0] = case.special
    tau_value = 0.75
    tau = torch.tensor(tau_value, dtype=wide) if case.pointers else None
    seed = torch.tensor(SEED) if case.pointers else None
    ints = [*case.sizes, case.mode, 0 if case.pointers else SEED]
    floats = [WRONG_TAU if case.pointers else tau_value]

    def plain(blocks: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
        return multiplex_reference(blocks, logits, temperature, 1.0, torch.tensor(SEED), case.mode)

    inputs = [blocks, logits, torch.tensor(tau_value, dtype=F64), grad]
    exact, usual = gradients(plain, inputs, F64), gradients(plain, inputs, dtype)

    (out,) = harness.call(
        "multiplex_forward", blocks, logits, Out(batch, n, d, dtype=dtype), tau, seed, ints=ints, floats=floats,
        dtype=dtype,
    )  # fmt: skip
    assert_close("out", out, exact[0], usual[0])
    partials = -(-batch * n // 32)
    grad_logits, weights, tau_partials = harness.call(
        "multiplex_backward_logits", grad, blocks, logits, Out(batch, m, n, dtype=dtype), Out(batch, m, n, dtype=wide),
        Out(partials, dtype=wide), tau, seed, None, ints=ints, floats=[*floats, 0.0], dtype=dtype,
    )  # fmt: skip
    assert_close("grad_logits", grad_logits, exact[2], usual[2], factor=3)
    terms = (exact[2] * logits.double()).abs().nan_to_num().sum().item()
    assert_close("grad_tau", tau_partials.sum(), exact[3], usual[3].to(wide), factor=3, scale=terms)
    (grad_blocks,) = harness.call(
        "multiplex_backward_blocks", grad, weights, None, Out(batch, m, d, dtype=dtype), ints=case.sizes, dtype=dtype
    )
    assert_close("grad_blocks", grad_blocks, exact[1], usual[1], factor=3)


SIZES = [(1, 1, 1, 1), (5, 6, 8, 10), (3, 5, 7, 3), (2, 33, 3, 5), (7, 2, 37, 1), (1, 65, 1, 130), (2, 4, 5, 196)]
EMPTY = [(0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)]
MULTIPLEX = [
    *[Multiplex(sizes, dtype, mode) for sizes in SIZES for dtype in (F32, F64) for mode in (SOFTMAX, GUMBEL)],
    *[Multiplex(sizes, dtype, mode) for sizes in SIZES[1:4] for dtype in FLOAT_DTYPES[2:] for mode in range(3)],
    *[Multiplex(sizes, mode=mode) for sizes in EMPTY for mode in (SOFTMAX, ARGMAX)],
    *[Multiplex((3, 5, 7, 3), dtype, mode, pointers=True) for dtype in (F32, F64) for mode in (SOFTMAX, GUMBEL)],
    *[Multiplex((3, 34, 7, 3), dtype, mode, logit_scale=1e4) for dtype in (F32, F64) for mode in range(3)],
    *[Multiplex((3, 5, 7, 3), mode=mode, special=s) for s in (NAN, INF, -INF) for mode in range(3)],
    *[Multiplex((3, 40, 7, 3), mode=mode, special=NAN) for mode in range(3)],
]


@pytest.mark.parametrize("case", MULTIPLEX, ids=Multiplex.id)
def test_multiplex(plain: Harness, case: Multiplex) -> None:
    check_multiplex(plain, case)


@pytest.mark.parametrize("mode", [SOFTMAX, ARGMAX])
def test_multiplex_all_minus_infinity(plain: Harness, mode: int) -> None:
    """A whole chunk of -inf before finite scores is fine; a whole column of it is NaN, as in torch."""
    logits = torch.zeros(1, 40, 2)
    logits[0, :, 0] = -INF
    logits[0, :33, 1] = -INF
    blocks = random(1, 40, 3)
    want = multiplex_reference(blocks, logits, None, 1.0, None, mode)
    assert want[0, 0].isnan().all()
    assert want[0, 1].isfinite().all()
    (got,) = plain.call(
        "multiplex_forward", blocks, logits, Out(1, 2, 3, dtype=F32), None, None,
        ints=[1, 40, 2, 3, mode, 0], floats=[1.0],
    )  # fmt: skip
    torch.testing.assert_close(got, want, equal_nan=True)


def test_multiplex_first_of_equal_maxima(plain: Harness) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0] * 12).view(1, 48, 1)
    blocks = torch.arange(48.0).view(1, 48, 1)
    (got,) = plain.call(
        "multiplex_forward", blocks, logits, Out(1, 1, 1, dtype=F32), None, None,
        ints=[1, 48, 1, 1, ARGMAX, 0], floats=[1.0],
    )  # fmt: skip
    assert got.item() == 1.0


@pytest.mark.parametrize("tau", [0.0, -1.0, NAN])
def test_multiplex_bad_temperature_in_memory_gives_nan(plain: Harness, tau: float) -> None:
    (got,) = plain.call(
        "multiplex_forward", random(2, 3, 4), random(2, 3, 5), Out(2, 5, 4, dtype=F32), torch.tensor(tau), None,
        ints=[2, 3, 5, 4, SOFTMAX, 0], floats=[1.0],
    )  # fmt: skip
    assert got.isnan().all()


def test_multiplex_options(plain: Harness) -> None:
    """Penalty gradient on the logits; base of grad_blocks; outputs that nobody asked for."""
    sizes = batch, m, n, d = 3, 4, 5, 6
    blocks, logits, grad = random(batch, m, d), random(batch, m, n, scale=10), random(batch, n, d, seed=1)
    leaf = logits.double().requires_grad_()
    out = multiplex_reference(blocks.double(), leaf, None, 0.5, None, SOFTMAX)
    ((out * grad).sum() + 0.3 * range_penalty_reference([leaf], 4.0)).backward()
    (got,) = plain.call(
        "multiplex_backward_logits", grad, blocks, logits, Out(batch, m, n, dtype=F32), None, None, None, None,
        torch.tensor(0.3), ints=[*sizes, SOFTMAX, 0], floats=[0.5, 4.0],
    )  # fmt: skip
    torch.testing.assert_close(got.double(), leaf.grad, rtol=1e-5, atol=1e-5)
    weights, base = random(batch, m, n, seed=2), random(batch, m, d, seed=3)
    (got,) = plain.call("multiplex_backward_blocks", grad, weights, base, Out(batch, m, d, dtype=F32), ints=sizes)
    torch.testing.assert_close(got, base + weights @ grad)


def test_noise_bits(plain: Harness) -> None:
    """u equals fastmod.noise bit for bit, also where the counter needs more than 32 bits."""
    for seed in (0, 1, SEED, -1, -(2**63)):
        single, double = plain.call("probe_uniform", Out(1001, dtype=F32), Out(1001, dtype=F64), ints=[seed, 0, 1001])
        for got, dtype in ((single, F32), (double, F64)):
            want = noise.uniform(
                torch.tensor(seed), torch.Size([1001]), stream=0, dtype=dtype, device=torch.device("cpu")
            )
            assert torch.equal(got, want)
    first = 2**34 + 3  # group 2**32: the second counter word
    _, got = plain.call("probe_uniform", Out(8, dtype=F32), Out(8, dtype=F64), ints=[SEED, first, 8])
    group = torch.arange(first, first + 8) // 4
    counter = (group & 0xFFFFFFFF, group >> 32, torch.zeros_like(group), torch.zeros_like(group))
    key = torch.tensor(SEED)
    words = torch.stack(noise.philox4x32(counter, (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF)), dim=-1)
    picked = words.gather(1, (torch.arange(first, first + 8) % 4).unsqueeze(1)).flatten()
    assert torch.equal(got, ((picked >> 9).double() + 0.5) * 2.0**-23)


# ---- gated_residual


class Gate(NamedTuple):
    sizes: tuple[int, int, int]  # B, N, D
    dtype: torch.dtype = F32
    scale: float = 1.0  # of the gate logits
    special: float | None = None

    def id(self) -> str:
        special = "" if self.special is None else f"-{self.special}"
        return "B{}-N{}-D{}".format(*self.sizes) + f"-{str(self.dtype)[6:]}-x{self.scale:g}{special}"


def check_gate(harness: Harness, case: Gate) -> None:
    batch, n, d = case.sizes
    x, new, grad = (random(batch, n, d, dtype=case.dtype, seed=i) for i in range(3))
    gate = random(batch, n, dtype=case.dtype, scale=case.scale)
    if case.special is not None:
        gate[0, 0] = new[-1, 0, 0] = case.special
    inputs = [x, new, gate, grad]
    exact = gradients(gated_residual_reference, inputs, F64)
    usual = gradients(gated_residual_reference, inputs, case.dtype)
    ints = [batch, n, d, n * d, n]
    (out,) = harness.call(
        "gated_residual_forward", x, new, gate, Out(batch, n, d, dtype=case.dtype), ints=ints, dtype=case.dtype
    )
    results = harness.call(
        "gated_residual_backward", grad, x, new, gate, *(Out(*t.shape, dtype=case.dtype) for t in inputs[:3]), None,
        ints=ints, floats=[0.0], dtype=case.dtype,
    )  # fmt: skip
    names = ["out", "grad_x", "grad_new", "grad_gate"]
    for name, *values in zip(names, [out, *results], exact, usual, strict=True):
        assert_close(name, *values, factor=3)


GATES = [
    *[Gate(s, dtype) for s in [(1, 1, 1), (5, 8, 10), (3, 7, 3), (2, 5, 130)] for dtype in FLOAT_DTYPES],
    *[Gate(s) for s in [(0, 3, 4), (2, 0, 3), (2, 3, 0), (301, 1, 1)]],
    *[Gate((5, 8, 10), dtype, scale=1e4) for dtype in FLOAT_DTYPES],
    *[Gate((5, 8, 10), special=special) for special in (NAN, INF, -INF)],
]


@pytest.mark.parametrize("case", GATES, ids=Gate.id)
def test_gated_residual(plain: Harness, case: Gate) -> None:
    check_gate(plain, case)


# ---- range_penalty


def check_penalty(harness: Harness, sizes: Sequence[int], dtype: torch.dtype, scale: float) -> None:
    """Several tensors share one array of partials, as the launcher lays them out."""
    wide, threshold = compute_dtype(torch.empty(0, dtype=dtype)), 1.25
    tensors = [random(size, dtype=dtype, scale=scale, seed=i) for i, size in enumerate(sizes)]
    grad = torch.tensor(0.7, dtype=wide)
    counts = [min(-(-size // 2048), 1024) for size in sizes]
    partials = []
    for tensor, count in zip(tensors, counts, strict=True):
        partials += harness.call(
            "range_penalty_forward",
            tensor,
            Out(count, dtype=wide),
            ints=[tensor.numel()],
            floats=[threshold],
            dtype=dtype,
        )
    (total,) = harness.call(
        "range_penalty_finish", torch.cat(partials), Out(1, dtype=wide), ints=[sum(counts)], dtype=wide
    )

    def plain(*logits: Tensor) -> Tensor:
        return range_penalty_reference(logits, threshold)

    exact, usual = gradients(plain, [*tensors, grad], F64), gradients(plain, [*tensors, grad], dtype)
    assert_close("penalty", total[0], exact[0], usual[0])
    for i, tensor in enumerate(tensors):
        (got,) = harness.call(
            "range_penalty_backward", grad, tensor, Out(*tensor.shape, dtype=dtype), ints=[tensor.numel()],
            floats=[threshold], dtype=dtype,
        )  # fmt: skip
        assert_close(f"grad {i}", got, exact[1 + i], usual[1 + i])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 5e3])
def test_range_penalty(plain: Harness, dtype: torch.dtype, scale: float) -> None:
    check_penalty(plain, [1, 0, 2049, 63], dtype, scale)


def test_range_penalty_special_values(plain: Harness) -> None:
    for value in (NAN, INF, -INF):
        t = torch.tensor([0.5, value, 3.0])
        partials = plain.call("range_penalty_forward", t, Out(1, dtype=F32), ints=[3], floats=[1.0])
        torch.testing.assert_close(partials[0][0], range_penalty_reference([t], 1.0), equal_nan=True)
    (total,) = plain.call("range_penalty_finish", torch.empty(0), Out(1, dtype=F32), ints=[0])
    assert total.item() == 0.0


# ---- mfnnr


class Mfnnr(NamedTuple):
    sizes: tuple[int, int, int, int]  # B, M, N, D
    route: tuple[int, ...] = ()  # hidden widths
    update: tuple[int, ...] = ()
    dtype: torch.dtype = F32
    mode: int = SOFTMAX
    context: bool = True
    threshold: float = 1.0
    save: bool = True
    scale: float = 1.0

    def id(self) -> str:
        widths = f"route{'-'.join(map(str, self.route))}-update{'-'.join(map(str, self.update))}"
        options = f"mode{self.mode}" + ("" if self.context else "-alone") + ("" if self.save else "-nosave")
        return "B{}-M{}-N{}-D{}".format(*self.sizes) + f"-{widths}-{str(self.dtype)[6:]}-{options}-x{self.scale:g}"


def linears(features: int, widths: Sequence[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    params = []
    for i, width in enumerate(widths):
        params += [random(width, features, dtype=dtype, scale=features**-0.5, seed=seed + 2 * i)]
        params += [random(width, dtype=dtype, scale=0.5, seed=seed + 2 * i + 1)]
        features = width
    return params


class Forward(NamedTuple):
    out: Tensor
    penalty: Tensor
    logits: Tensor
    gate: Tensor
    route_kept: list[Tensor]  # hidden layers, then the logits
    routed: Tensor
    update_kept: list[Tensor]  # hidden layers, then new values and gates


def fused_forward(
    harness: Harness, case: Mfnnr, x: Tensor, route: list[Tensor], update: list[Tensor], tau: float
) -> Forward:
    """The two launches of csrc/cuda/bindings.cpp."""
    batch, m, n, d = case.sizes
    dtype, tiles = case.dtype, -(-batch // 16)

    def layers(params: list[Tensor]) -> list[Tensor | Out | None]:
        buffers: list[Tensor | Out | None] = []
        for i in range(0, len(params), 2):
            keeps = case.save or i + 2 == len(params)
            buffers += [*params[i : i + 2], Out(batch, params[i + 1].numel(), dtype=dtype) if keeps else None]
        return buffers

    def counts(params: list[Tensor]) -> list[int]:
        return [len(params) // 2, *(bias.numel() for bias in params[1::2])]

    ticket = InOut(torch.full((1,), 77, dtype=torch.int32))
    partials = InOut(torch.full((2 * tiles,), NAN, dtype=dtype))
    logits, routed, partial_sums, zero, *route_kept = harness.call(
        "mfnnr_route", x, None, None, Out(batch, m * n, dtype=dtype), Out(batch, n * d, dtype=dtype), partials, ticket,
        *layers(route), ints=[*case.sizes, case.mode, SEED, *counts(route)], floats=[tau, case.threshold], dtype=dtype,
    )  # fmt: skip
    torch.testing.assert_close(logits, route_kept[-1], rtol=0, atol=0, equal_nan=True)
    out, gate, _, _, penalty, *update_kept = harness.call(
        "mfnnr_update", x if case.context else None, routed, Out(batch, n * d, dtype=dtype), Out(batch, n, dtype=dtype),
        InOut(partial_sums), InOut(zero), InOut(torch.zeros(1, dtype=dtype)), *layers(update),
        ints=[*case.sizes, *counts(update)], floats=[case.threshold], dtype=dtype,
    )  # fmt: skip
    penalty = penalty[0]
    return Forward(out, penalty, logits, gate, route_kept, routed, update_kept)


def backward_through(
    harness: Harness, grad: Tensor, hidden: list[Tensor], params: list[Tensor], source: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradient before the first layer's bias, and of every parameter: GEMMs and leaky_backward, as in bindings.cpp."""
    grads: list[Tensor] = []
    for layer in reversed(range(len(params) // 2)):
        below = hidden[layer - 1] if layer else source
        grads = [grad.t() @ below, grad.sum(0), *grads]
        if layer:
            (grad,) = harness.call(
                "leaky_backward", InOut(grad @ params[2 * layer]), below, ints=[below.numel()], dtype=grad.dtype
            )
    return grad, grads


def fused_backward(
    harness: Harness, case: Mfnnr, kept: Forward, grad_out: Tensor | None, grad_penalty: Tensor | None, x: Tensor,
    route: list[Tensor], update: list[Tensor], tau: float,
) -> list[Tensor]:  # fmt: skip
    """[x, tau, route.., update..]: the composition of csrc/cuda/bindings.cpp with torch.mm for cuBLAS."""
    batch, m, n, d = case.sizes
    values, dtype = n * d, case.dtype
    u = kept.update_kept[-1]
    # new values and gates lie in one [B, N*D + N] buffer; the gate pointer is the tail of it, which a separate buffer
    # imitates here: its rows keep the stride of the whole.
    stride = values + n
    gates, grad_gates = u.flatten()[values:].clone(), InOut(torch.full((batch * stride - values,), NAN, dtype=dtype))
    grad_y, grad_new, grad_gate = harness.call(
        "gated_residual_backward", grad_out, kept.routed, u, gates, Out(batch, values, dtype=dtype),
        InOut(torch.full((batch, stride), NAN, dtype=dtype)), grad_gates, grad_penalty,
        ints=[batch, n, d, stride, stride], floats=[case.threshold], dtype=dtype,
    )  # fmt: skip
    index = torch.arange(batch).unsqueeze(1) * stride + torch.arange(n)
    grad_u = torch.cat([grad_new[:, :values], grad_gate[index]], dim=1)
    source = torch.cat([kept.routed, x.flatten(1)], dim=1) if case.context else kept.routed
    below, grad_update = backward_through(harness, grad_u, kept.update_kept[:-1], update, source)
    grad_y = torch.addmm(grad_y, below, update[0][:, :values])
    grad_x = below @ update[0][:, values:] if case.context else None
    grad_logits, weights, tau_partials = harness.call(
        "multiplex_backward_logits", grad_y, x, kept.route_kept[-1], Out(batch, m * n, dtype=dtype),
        Out(batch, m, n, dtype=dtype), Out(-(-batch * n // 32), dtype=dtype), None, None, grad_penalty,
        ints=[*case.sizes, case.mode, SEED], floats=[tau, case.threshold], dtype=dtype,
    )  # fmt: skip
    (grad_x,) = harness.call(
        "multiplex_backward_blocks", grad_y, weights, grad_x, Out(batch, m * d, dtype=dtype), ints=case.sizes,
        dtype=dtype,
    )  # fmt: skip
    below, grad_route = backward_through(harness, grad_logits, kept.route_kept[:-1], route, x.flatten(1))
    grad_x = torch.addmm(grad_x, below, route[0])
    return [grad_x.view(x.shape), tau_partials.sum(), *grad_route, *grad_update]


def plain_mfnnr(
    case: Mfnnr, x: Tensor, route: list[Tensor], update: list[Tensor], tau: float, dtype: torch.dtype, with_grads: bool,
    grad_out: Tensor | None, grad_penalty: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """[out, penalty, logits, gate] of the reference in ``dtype``, then its gradients by autograd."""
    leaves = [t.to(dtype).requires_grad_() for t in [x, torch.tensor(tau, dtype=F64), *route, *update]]
    split = 2 + len(route)
    result = mfnnr_reference(
        leaves[0], leaves[2:split], leaves[split:], leaves[1], 1.0, torch.tensor(SEED), case.mode, case.context,
        case.threshold,
    )  # fmt: skip
    values = [t.detach().flatten(1) if t.dim() > 1 else t.detach() for t in result]
    if not with_grads:
        return values
    loss = leaves[0].sum() * 0  # without a penalty, its gradient reaches nothing
    for value, grad in ((result.out.flatten(1), grad_out), (result.penalty, grad_penalty)):
        if grad is not None:
            loss = loss + (value * grad.to(value.dtype)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return values + [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)]


def check_mfnnr(harness: Harness, case: Mfnnr, grad_of: str = "both") -> None:
    batch, m, n, d = case.sizes
    dtype, tau = case.dtype, 0.75
    x = random(batch, m, d, dtype=dtype, scale=case.scale)
    route = linears(m * d, [*case.route, m * n], dtype, seed=10)
    update = linears((n + m if case.context else n) * d, [*case.update, n * d + n], dtype, seed=20)
    grad_out = random(batch, n * d, dtype=dtype, seed=5) if grad_of != "penalty" else None
    penalised = case.threshold != NO_PENALTY and grad_of != "out"
    grad_penalty = torch.tensor(0.3, dtype=dtype) if penalised else None

    kept = fused_forward(harness, case, x, route, update, tau)
    with_grads = case.save and batch > 0  # an empty batch never reaches a backward kernel
    exact, usual = (
        plain_mfnnr(case, x, route, update, tau, kind, with_grads, grad_out, grad_penalty) for kind in (F64, dtype)
    )
    got = [kept.out, kept.penalty, kept.logits, kept.gate]
    names = ["out", "penalty", "logits", "gate"]
    if with_grads:
        got += fused_backward(harness, case, kept, grad_out, grad_penalty, x, route, update, tau)
        names += ["grad_x", "grad_tau"]
        names += [f"grad_route[{i}]" for i in range(len(route))] + [f"grad_update[{i}]" for i in range(len(update))]
        for layer, hidden in enumerate(kept.route_kept[:-1]):
            below = kept.route_kept[layer - 1] if layer else x.flatten(1)
            want = F.leaky_relu(F.linear(below, route[2 * layer], route[2 * layer + 1]), LEAKY_SLOPE)
            torch.testing.assert_close(hidden, want, rtol=1e-4, atol=1e-5 * case.scale)
    for name, *values in zip(names, got, exact, usual, strict=True):
        assert_close(name, *values, factor=4, scale=case.scale * batch * n if name == "grad_tau" else 0.0)


SMALL_MFNNR = Mfnnr((17, 3, 4, 5), (9,), (6, 7))
MFNNR = [
    Mfnnr((1, 1, 1, 1)),
    Mfnnr((0, 3, 4, 5), (9,), (9,)),
    *[Mfnnr((33, 6, 8, 10), (100,), (100,), dtype, mode) for dtype in (F32, F64) for mode in range(3)],
    SMALL_MFNNR,
    SMALL_MFNNR._replace(dtype=F64),
    SMALL_MFNNR._replace(context=False),
    SMALL_MFNNR._replace(save=False),
    SMALL_MFNNR._replace(threshold=NO_PENALTY),
    SMALL_MFNNR._replace(threshold=0.0),
    SMALL_MFNNR._replace(scale=1e4),
    SMALL_MFNNR._replace(scale=1e4, mode=GUMBEL, dtype=F64),
    Mfnnr((16, 5, 13, 11), (128, 1), (), mode=GUMBEL),  # 156 outputs: two chunks of columns
    Mfnnr((5, 40, 2, 3), (), (128, 128, 128), F64),  # M in two chunks
]


@pytest.mark.parametrize("case", MFNNR, ids=Mfnnr.id)
def test_mfnnr(plain: Harness, case: Mfnnr) -> None:
    check_mfnnr(plain, case)


@pytest.mark.parametrize("grad_of", ["out", "penalty"])
def test_mfnnr_with_one_gradient(plain: Harness, grad_of: str) -> None:
    check_mfnnr(plain, SMALL_MFNNR, grad_of)


def test_mfnnr_nan_row_stays_in_its_row(plain: Harness) -> None:
    x, tau = random(17, 3, 5), 1.0
    route, update = linears(15, [9, 12], F32, 1), linears(35, [6, 7, 24], F32, 2)
    clean = fused_forward(plain, SMALL_MFNNR, x, route, update, tau)
    x[4, 1, 2] = NAN
    x[9, 0, 0] = INF
    got = fused_forward(plain, SMALL_MFNNR, x, route, update, tau)
    assert got.out[4].isnan().all()
    assert got.penalty.isnan()
    rest = [i for i in range(17) if i not in (4, 9)]
    assert torch.equal(got.out[rest], clean.out[rest])
    want = mfnnr_reference(x, route, update, None, tau, None, SOFTMAX, True, 1.0)
    assert torch.equal(got.out.isnan(), want.out.flatten(1).isnan())


def test_mfnnr_refuses_what_does_not_fit(plain: Harness) -> None:
    for widths in ((129,), (4,) * 8):
        case = Mfnnr((2, 3, 4, 5), widths, ())
        route, update = linears(15, [*widths, 12], F32, 1), linears(35, [24], F32, 2)
        with pytest.raises(LaunchError) as raised:
            fused_forward(plain, case, random(2, 3, 5), route, update, 1.0)
        assert raised.value.code == 1


# ---- bindings.cpp itself, over the harness, on CPU tensors


@pytest.fixture(scope="module")
def bindings() -> Any:
    try:
        torch.ops.load_library(str(build_bindings()))
    except UnavailableError as error:
        pytest.skip(str(error))
    return torch.ops.fastmod_cuda_host


def permuted(tensor: Tensor) -> Tensor:
    """The same values, dense but in another order in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("mode", [SOFTMAX, GUMBEL, ARGMAX])
def test_bound_multiplex(bindings: Any, dtype: torch.dtype, mode: int) -> None:
    wide = compute_dtype(torch.empty(0, dtype=dtype))
    blocks, logits = permuted(random(2, 3, 4, 5, dtype=dtype)), permuted(random(2, 3, 4, 6, dtype=dtype))
    tau, seed = torch.tensor(0.75), torch.tensor(SEED)

    def plain(blocks: Tensor, logits: Tensor, temperature: Tensor) -> Tensor:
        return multiplex_reference(blocks, logits, temperature, 1.0, seed, mode)

    grad = random(1, dtype=dtype).expand(2, 3, 6, 5)
    inputs = [blocks, logits, tau, grad]
    exact, usual = gradients(plain, inputs, F64), gradients(plain, inputs, dtype)
    out = bindings.multiplex_forward(blocks, logits, tau, 1.0, seed, mode)
    got = [out, *bindings.multiplex_backward(grad, blocks, logits, tau, 1.0, seed, mode)]
    usual[3] = usual[3].to(wide)
    for name, *values in zip(["out", "grad_blocks", "grad_logits", "grad_tau"], got, exact, usual, strict=True):
        assert values[0].is_contiguous()
        assert values[0].dtype == values[2].dtype
        assert_close(name, *values, factor=3, scale=10.0 if name == "grad_tau" else 0.0)
    *by_value, none = bindings.multiplex_backward(grad, blocks, logits, None, 0.75, seed, mode)
    assert torch.equal(by_value[0], got[1])
    assert torch.equal(by_value[1], got[2])
    assert none.item() == 0
    assert none.dtype == wide


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_bound_gate_and_penalty(bindings: Any, dtype: torch.dtype) -> None:
    x, new = permuted(random(2, 3, 4, dtype=dtype)), random(2, 3, 4, dtype=dtype, seed=1)
    gate = random(2, 3, dtype=dtype)
    grad = random(1, dtype=dtype).expand(2, 3, 4)
    inputs = [x, new, gate, grad]
    exact = gradients(gated_residual_reference, inputs, F64)
    usual = gradients(gated_residual_reference, inputs, dtype)
    got = [bindings.gated_residual_forward(x, new, gate), *bindings.gated_residual_backward(grad, x, new, gate)]
    for name, *values in zip(["out", "grad_x", "grad_new", "grad_gate"], got, exact, usual, strict=True):
        assert_close(name, *values, factor=3)

    def plain(*logits: Tensor) -> Tensor:
        return range_penalty_reference(logits, 0.5)

    tensors = [x, gate, x[:0], new[0, 0, 0]]
    weight = torch.tensor(0.3, dtype=compute_dtype(x))
    exact, usual = gradients(plain, [*tensors, weight], F64), gradients(plain, [*tensors, weight], dtype)
    got = [bindings.range_penalty_forward(tensors, 0.5), *bindings.range_penalty_backward(weight, tensors, 0.5)]
    assert got[0].dtype == weight.dtype
    assert got[0].dim() == 0
    for i, values in enumerate(zip(got, exact, usual, strict=True)):
        assert_close(f"penalty[{i}]", *values, factor=3)


BOUND_MFNNR = [
    SMALL_MFNNR,
    SMALL_MFNNR._replace(dtype=F64, mode=GUMBEL),
    SMALL_MFNNR._replace(dtype=F64, context=False, mode=ARGMAX),
    SMALL_MFNNR._replace(threshold=NO_PENALTY),
    SMALL_MFNNR._replace(route=(130,), update=(140, 3)),  # cuBLAS
    SMALL_MFNNR._replace(route=(130,), update=(140, 3), dtype=F64, mode=GUMBEL, context=False),
    SMALL_MFNNR._replace(route=(130,), threshold=NO_PENALTY),
    SMALL_MFNNR._replace(sizes=(0, 3, 4, 5)),
    SMALL_MFNNR._replace(dtype=torch.bfloat16),
    SMALL_MFNNR._replace(dtype=torch.float16, route=(130,)),
]


@pytest.mark.parametrize("case", BOUND_MFNNR, ids=Mfnnr.id)
def test_bound_mfnnr(bindings: Any, case: Mfnnr) -> None:
    batch, m, n, d = case.sizes
    dtype, tau, seed = case.dtype, torch.tensor(0.75), torch.tensor(SEED)
    wide = compute_dtype(torch.empty(0, dtype=dtype))
    x = permuted(random(batch, m, d, dtype=dtype))
    route = linears(m * d, [*case.route, m * n], dtype, seed=10)
    update = linears((n + m if case.context else n) * d, [*case.update, n * d + n], dtype, seed=20)
    grad_out = random(1, dtype=dtype).expand(batch, n, d)
    grad_penalty = torch.tensor(0.3, dtype=wide)
    routing = (tau, 1.0, seed, case.mode, case.context, case.threshold)
    *values, saved = bindings.mfnnr_forward(x, route, update, *routing, True)
    rows = sum(bias.numel() for bias in [*route[1::2], *update[1::2]]) + n * d
    assert saved.shape == (rows * -(-batch // 64) * 64,)
    assert saved.dtype == wide
    *again, nothing = bindings.mfnnr_forward(x, route, update, *routing, False)
    assert nothing.numel() == 0
    assert all(map(torch.equal, values, again))

    before = saved.clone()
    for grads in ((grad_out, grad_penalty), (grad_out, None), (None, grad_penalty)):
        got = bindings.mfnnr_backward(*grads, x, route, update, *routing, saved, True, True)
        grad_of_x, grad_of_tau = bindings.mfnnr_backward(*grads, x, route, update, *routing, saved, True, False)
        assert torch.equal(grad_of_x, got[0])
        assert torch.equal(grad_of_tau, got[1])
        empty, *rest = bindings.mfnnr_backward(*grads, x, route, update, *routing, saved, False, True)
        assert empty.numel() == 0
        assert all(map(torch.equal, rest, got[1:]))
        no_x, only_tau = bindings.mfnnr_backward(*grads, x, route, update, *routing, saved, False, False)
        assert no_x.numel() == 0
        assert torch.equal(only_tau, got[1])
        assert saved.nan_to_num().equal(before.nan_to_num())  # its padding may hold anything
        flat = None if grads[0] is None else grad_out.flatten(1)
        exact, usual = (plain_mfnnr(case, x, route, update, 0.75, kind, True, flat, grads[1]) for kind in (F64, dtype))
        usual[5] = usual[5].to(wide)  # gradient of tau
        names = ["out", "penalty", "logits", "gate", "grad_x", "grad_tau"]
        names += [f"grad_route[{i}]" for i in range(len(route))] + [f"grad_update[{i}]" for i in range(len(update))]
        values = [t.flatten(1) if t.dim() > 1 else t for t in values]
        for name, *three in zip(names, [*values, *got], exact, usual, strict=True):
            assert three[0].dtype == three[2].dtype, name
            assert_close(name, *three, factor=4, scale=float(batch * n) if name == "grad_tau" else 0.0)


# ---- sanitizers: the same checks, on small grids


def check_everything(harness: Harness, dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        check_multiplex(harness, Multiplex((5, 6, 7, 3), dtype, GUMBEL, pointers=True))
        check_multiplex(harness, Multiplex((3, 35, 2, 5), dtype))
        check_gate(harness, Gate((5, 7, 10), dtype))
        check_penalty(harness, [1, 0, 2049], dtype, 1.0)
    for dtype in (F32, F64):
        check_mfnnr(harness, SMALL_MFNNR._replace(dtype=dtype))
    check_mfnnr(harness, Mfnnr((3, 5, 13, 11), (128,), (), mode=ARGMAX, context=False))


def test_address_and_undefined_behaviour_sanitizer(asan: Harness) -> None:
    check_everything(asan, FLOAT_DTYPES)
    for sizes in [(1, 1, 1, 1), *EMPTY]:
        check_multiplex(asan, Multiplex(sizes))
        check_gate(asan, Gate(sizes[:1] + sizes[2:]))
    check_mfnnr(asan, Mfnnr((1, 1, 1, 1)))


def test_thread_sanitizer(tsan: Harness) -> None:
    check_everything(tsan, (F32,))


# ---- the harness itself: it must catch what the kernels must not do


def probe(harness: Harness, name: str, blocks: int = 1) -> Tensor:
    values = torch.arange(1.0, 64.0 * blocks + 1)
    (got,) = harness.call(f"probe_{name}", values, InOut(torch.zeros(64 * blocks)), ints=[blocks])
    return got


def test_harness_runs_correct_kernels(plain: Harness, asan: Harness, tsan: Harness) -> None:
    for harness in (plain, asan, tsan):
        values = torch.arange(1.0, 129).view(2, 64)
        assert torch.equal(probe(harness, "reverse", 2).view(2, 64), values.flip(1))
        lanes = torch.arange(1.0, 65).view(2, 32).roll(-1, 1)
        lanes = lanes + lanes[:, 3:4]
        lanes = lanes + torch.cat([lanes[:, :2], lanes[:, :-2]], dim=1)
        assert torch.equal(probe(harness, "warp"), lanes.flatten())


def test_missing_barrier_is_caught(plain: Harness, tsan: Harness) -> None:
    with pytest.raises(AssertionError, match="depends on the order of threads"):
        probe(plain, "missing_barrier")
    with pytest.raises(CrashError, match="data race"):
        probe(tsan, "missing_barrier")


def test_race_between_blocks_is_caught(tsan: Harness) -> None:
    with pytest.raises(CrashError, match="data race"):
        probe(tsan, "block_race", 2)


@pytest.mark.parametrize("name", ["shared_out_of_bounds", "global_out_of_bounds"])
def test_out_of_bounds_is_caught(asan: Harness, name: str) -> None:
    with pytest.raises(CrashError, match="heap-buffer-overflow"):
        probe(asan, name)


def test_uninitialised_shared_memory_is_nan(plain: Harness) -> None:
    got = probe(plain, "uninitialised", 2)
    assert (got[::2] == 0).all()
    assert got[1::2].isnan().all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exited_thread", "barrier never reached by 1 exited threads"),
        ("divergent_barrier", "divergent barrier"),
        ("missing_lane", "missing from a warp operation"),
        ("too_much_shared", "more than 48 KB of shared memory"),
    ],
)
def test_wrong_synchronisation_is_caught(plain: Harness, name: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        probe(plain, name)
    assert torch.equal(probe(plain, "reverse"), torch.arange(64.0, 0, -1))  # a failed launch does no harm


def test_reduced_precision_rounds_as_torch(plain: Harness) -> None:
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    special = torch.tensor([0.0, INF, NAN, 65504, 65519.9, 65520, 2**-24, 2**-25, 1.5 * 2**-25, 6.1e-5, 3.4e38])
    near = random(3000, scale=1e-4)
    ties = (torch.arange(2000) * 2 + 1).float() * 2**-25
    values = torch.cat([bits.view(F32), special, -special, near, ties, 1 + torch.arange(3000) * 2.0**-13])
    half, from_half, brain, from_brain = plain.call(
        "probe_round", values, *(Out(len(values), dtype=t) for t in (torch.float16, F32, torch.bfloat16, F32)),
        ints=[len(values)],
    )  # fmt: skip
    for got, widened, dtype in ((half, from_half, torch.float16), (brain, from_brain, torch.bfloat16)):
        torch.testing.assert_close(got, values.to(dtype), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(widened, values.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_launch_limits(plain: Harness) -> None:
    with pytest.raises(LaunchError) as raised:
        probe(plain, "reverse", 0)
    assert raised.value.code == 9  # cudaErrorInvalidConfiguration
