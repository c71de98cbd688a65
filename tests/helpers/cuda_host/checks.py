"""What the tests of the CUDA C++ kernels on the host share: harnesses as fixtures, cases, and checks against fp64.

Each check takes the harness to run on, so that plain and sanitised builds see the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod import noise
from fastmod.ops._checks import compute_dtype
from fastmod.ops.gated_residual import reference as gated_residual_reference
from fastmod.ops.mfnnr import LEAKY_SLOPE, NO_PENALTY
from fastmod.ops.mfnnr import reference as mfnnr_reference
from fastmod.ops.multiplex import reference as multiplex_reference
from fastmod.ops.range_penalty import reference as range_penalty_reference
from fastmod.ops.sample_mask import reference as sample_mask_reference
from tests.helpers.agreement import assert_close
from tests.helpers.cuda_host import Harness, InOut, Out, UnavailableError

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
    drawn = torch.rand(shape, generator=generator, dtype=F64, device="cpu")
    return ((drawn * 4 - 2) * scale).to(torch.get_default_device(), dtype)


#: Name of a result -> what the kernel gave, what the reference gives in fp64, what it gives in the same dtype.
Results = dict[str, tuple[Tensor, Tensor, Tensor]]


def assert_draws_close(draws: Sequence[Results], half_roundings: float = 0.0, **scales: float) -> None:
    for name in draws[0]:
        found = [draw[name] for draw in draws]
        assert_close(name, found, half_roundings=half_roundings, scale=scales.get(name, 0.0))


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


def check_multiplex(harness: Harness, case: Multiplex, draws: int = 1) -> None:
    found = [multiplex_results(harness, case, seed) for seed in range(draws if case.dtype == F32 else 1)]
    batch, _, n, d = case.sizes
    assert_draws_close(found, grad_tau=case.logit_scale * batch * n * d)


def multiplex_results(harness: Harness, case: Multiplex, draw: int) -> Results:
    batch, m, n, d = case.sizes
    dtype, wide = case.dtype, compute_dtype(torch.empty(0, dtype=case.dtype))
    blocks = random(batch, m, d, dtype=dtype, seed=10 * draw)
    logits = random(batch, m, n, dtype=dtype, scale=case.logit_scale / 2, seed=10 * draw)
    grad = random(batch, n, d, dtype=dtype, seed=10 * draw + 1)
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
    partials = -(-batch * n // 32)
    grad_logits, weights, tau_partials = harness.call(
        "multiplex_backward_logits", grad, blocks, logits, Out(batch, m, n, dtype=dtype), Out(batch, m, n, dtype=wide),
        Out(partials, dtype=wide), tau, seed, None, ints=ints, floats=[*floats, 0.0], dtype=dtype,
    )  # fmt: skip
    (grad_blocks,) = harness.call(
        "multiplex_backward_blocks", grad, weights, None, Out(batch, m, d, dtype=dtype), ints=case.sizes, dtype=dtype
    )
    usual[3] = usual[3].to(wide)
    names = ["out", "grad_blocks", "grad_logits", "grad_tau"]
    got = [out, grad_blocks, grad_logits, tau_partials.sum()]
    return {name: (a, b, c) for name, a, b, c in zip(names, got, exact, usual, strict=True)}


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
        assert_close(name, [values])


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
    assert_close("penalty", [(total[0], exact[0], usual[0])])
    for i, tensor in enumerate(tensors):
        (got,) = harness.call(
            "range_penalty_backward", grad, tensor, Out(*tensor.shape, dtype=dtype), ints=[tensor.numel()],
            floats=[threshold], dtype=dtype,
        )  # fmt: skip
        assert_close(f"grad {i}", [(got, exact[1 + i], usual[1 + i])])


# ---- sample_mask

#: Logits that are sure of their masks and get no gradient at all.
SURE = (1e4, -1e4, INF, -INF)


class Mask(NamedTuple):
    weights: int
    dtype: torch.dtype = F32
    samples: int = 3
    first: int = 0
    stream: int = noise.STREAM_MASK
    seed: int = SEED
    weighted: bool = True
    base: bool = True
    pointer: bool = False  # seed in device memory
    tau: float = 1.0

    def id(self) -> str:
        options = "".join(f"-{name}" for name in ("weighted", "base", "pointer") if getattr(self, name))
        sizes = f"P{self.weights}-S{self.samples}-from{self.first}-stream{self.stream}-seed{self.seed}"
        return f"{sizes}-{str(self.dtype)[6:]}-tau{self.tau:g}{options}"


def mask_logits(case: Mask) -> Tensor:
    """Logits whose mask in one of the samples hangs on the last bit of the threshold; then sure ones and a NaN.

    With random logits a threshold that is off by one would show in one mask of 2**23.
    """
    shape, count = torch.Size((case.samples, case.weights)), case.weights
    start, cpu = case.first * count, torch.device("cpu")
    words = noise.words(torch.tensor(case.seed), shape, stream=case.stream, device=cpu, start=start) >> 9
    p = torch.arange(count)
    u = (words[p % case.samples, p].double() + 0.5) * 2.0**-23
    logits = torch.log1p(-u) - u.log()  # sigmoid(-logit) = u, half a word beside the threshold
    unit = 2.0**-23 * 2.0 ** logits.abs().clamp(min=2.0**-6).log2().floor()
    logits += random(count, dtype=F64) * 2 * unit
    if case.dtype == F32:
        logits = logits.float()
    logits[count // 2 : count // 2 + count // 4] *= 4  # gradients of all sizes
    special = torch.tensor([*SURE, 0.0, -0.0, NAN], dtype=F64)[:count]
    logits[: len(special)] = special
    return logits.to(case.dtype)


def assert_same_masks(got: Tensor, want: Tensor, name: str = "masks") -> None:
    """Every bit but those of a NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape, f"{name}: {got.dtype} {tuple(got.shape)}"
    known = ~want.isnan()
    assert torch.equal(~got.isnan(), known), f"{name}: a NaN differs"
    assert torch.equal(got[known], want[known]), f"{name}: {(got != want)[known].sum()} of {got.numel()} differ"
    assert torch.equal(got[known].signbit(), want[known].signbit()), f"{name}: the sign of a zero differs"


def mask_gradients(
    case: Mask, grad: Tensor, logits: Tensor, weight: Tensor | None, base: Tensor | None
) -> list[Tensor]:
    """Of the reference in fp64 and in the compute dtype, both with ``base`` added before the last rounding."""
    found = []
    for wide, dtype in ((F64, F64), (compute_dtype(logits), case.dtype)):
        leaf = logits.to(wide).requires_grad_()
        masked = sample_mask_reference(
            leaf, None if weight is None else weight.to(wide), case.first, case.samples, torch.tensor(case.seed),
            case.stream, case.tau,
        )  # fmt: skip
        (got,) = torch.autograd.grad(masked, leaf, grad.to(wide))
        found.append((got if base is None else got + base.to(wide)).to(dtype))
    return found


def check_mask(harness: Harness, case: Mask) -> None:
    count, dtype = case.weights, case.dtype
    logits = mask_logits(case)
    weight = random(count, dtype=dtype, seed=1) if case.weighted else None
    base = random(count, dtype=dtype, seed=2) if case.base else None
    grad = random(case.samples, count, dtype=dtype, seed=3)
    seed = torch.tensor(case.seed) if case.pointer else None
    ints = [count, case.first, case.samples, case.stream, 0 if case.pointer else case.seed]
    (masks,) = harness.call(
        "sample_mask_forward", logits, weight, Out(case.samples, count, dtype=dtype), seed, ints=ints, dtype=dtype
    )
    arguments = (case.first, case.samples, torch.tensor(case.seed), case.stream)
    assert_same_masks(masks, sample_mask_reference(logits, weight, *arguments, case.tau), "reference")
    assert_same_masks(masks, torch.ops.fastmod.sample_mask_forward(logits, weight, *arguments), "native on the CPU")
    (got,) = harness.call(
        "sample_mask_backward", grad, logits, weight, base, Out(count, dtype=dtype), seed, ints=ints,
        floats=[case.tau], dtype=dtype,
    )  # fmt: skip
    assert_close("grad_logits", [(got, *mask_gradients(case, grad, logits, weight, base))])
    sure = logits.abs() >= 1e4
    assert torch.equal(got[sure], torch.zeros(count, dtype=dtype)[sure] if base is None else base[sure])


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
    """The two launches of csrc/cuda/mfnnr_binding.cpp."""
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
    """Gradient before the first layer's bias, and of every parameter: GEMMs and leaky_backward, as in its binding."""
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
    """[x, tau, route.., update..]: the composition of csrc/cuda/mfnnr_binding.cpp with torch.mm for cuBLAS."""
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


def check_mfnnr(harness: Harness, case: Mfnnr, grad_of: str = "both", draws: int = 1) -> None:
    found = [mfnnr_results(harness, case, grad_of, seed) for seed in range(draws if case.dtype == F32 else 1)]
    assert_draws_close(found, grad_tau=case.scale * case.sizes[0] * case.sizes[2])


def mfnnr_results(harness: Harness, case: Mfnnr, grad_of: str, draw: int) -> Results:
    batch, m, n, d = case.sizes
    dtype, tau = case.dtype, 0.75
    x = random(batch, m, d, dtype=dtype, scale=case.scale, seed=100 * draw)
    route = linears(m * d, [*case.route, m * n], dtype, seed=100 * draw + 10)
    update = linears((n + m if case.context else n) * d, [*case.update, n * d + n], dtype, seed=100 * draw + 20)
    grad_out = random(batch, n * d, dtype=dtype, seed=100 * draw + 5) if grad_of != "penalty" else None
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
    return {name: (a, b, c) for name, a, b, c in zip(names, got, exact, usual, strict=True)}


SMALL_MFNNR = Mfnnr((17, 3, 4, 5), (9,), (6, 7))
