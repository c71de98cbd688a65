"""What the tests of the CUDA C++ kernels on the host share: harnesses as fixtures, cases, and checks against fp64.

Each check takes the harness to run on, so that plain and sanitised builds see the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastmod import noise
from fastmod.ops._checks import compute_dtype
from fastmod.ops.gated_residual import reference as gated_residual_reference
from fastmod.ops.multiplex import reference as multiplex_reference
from fastmod.ops.range_penalty import reference as range_penalty_reference
from fastmod.ops.sample_mask import reference as sample_mask_reference
from tests.helpers.agreement import assert_close
from tests.helpers.cuda_host import Harness, Out, UnavailableError

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
    grad_blocks, grad_logits, grad_tau = harness.call(
        "multiplex_backward", grad, blocks, logits, Out(batch, m, d, dtype=dtype), Out(batch, m, n, dtype=dtype),
        Out(1, dtype=wide), tau, seed, ints=ints, floats=floats, dtype=dtype,
    )  # fmt: skip
    if tau is None or batch == 0:  # no gradient of a number; without a batch nothing is launched
        assert batch == 0 or grad_tau.item() == 0
        exact[3], usual[3] = (torch.zeros_like(t) for t in (exact[3], usual[3]))
        grad_tau = torch.zeros_like(grad_tau)
    usual[3] = usual[3].to(wide)
    names = ["out", "grad_blocks", "grad_logits", "grad_tau"]
    got = [out, grad_blocks, grad_logits, grad_tau.squeeze()]
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
        "gated_residual_backward", grad, x, new, gate, *(Out(*t.shape, dtype=case.dtype) for t in inputs[:3]),
        ints=ints, dtype=case.dtype,
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


# ---- mfnnr and smfr: mfnnr.py, smfr.py


def linears(features: int, widths: Sequence[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    params = []
    for i, width in enumerate(widths):
        params += [random(width, features, dtype=dtype, scale=features**-0.5, seed=seed + 2 * i)]
        params += [random(width, dtype=dtype, scale=0.5, seed=seed + 2 * i + 1)]
        features = width
    return params
