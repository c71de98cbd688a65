"""A linear layer under sampled weight masks: ``masked_linear``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastmod import _extension, backend, noise
from fastmod._compiler import in_graph
from fastmod._private import transformed
from fastmod.ops import _autograd, _checks, _masked
from fastmod.ops._masked import Draws
from fastmod.ops._samples import Sample


def masked_linear(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    samples: int,
    *,
    bias: Tensor | None = None,
    bias_logits: Tensor | None = None,
    seed: int | Tensor | None = None,
    tau: float = 1.0,
) -> Tensor:
    """Multiply part s of the batch by ``weight * mask_s``, with masks as :func:`fastmod.ops.sample_mask` draws them.

    The masked copies of the weight never exist at the same time; a single one exists only on the CPU where a sample has
    hundreds of rows (:func:`row_limit`).

    Args:
        x: ``[B, in]`` or ``[B, ..., in]``, B a multiple of S; mask s applies to rows ``s * B / S`` and on.
        weight: ``[out, in]``; gets a gradient only if it requires one, like bias.
        logits: ``[out, in]``.
        samples: number of masks S.
        bias: ``[out]``.
        bias_logits: ``[out]``, for masks over the bias; without them the bias is added unmasked.
        seed: of the noise, an int or an int64 0-d tensor; ``None`` draws one from torch's generator. A tensor
            may be advanced in place after the backward, which reads it again, and not before.
        tau: temperature of the relaxed sample, which gives the logits their gradient.

    Returns:
        ``[B, ..., out]``.
    """
    return _masked_linear(x, weight, logits, samples, bias=bias, bias_logits=bias_logits, seed=seed, tau=tau)


def _masked_linear(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    samples: int,
    *,
    first: int = 0,
    bias: Tensor | None = None,
    bias_logits: Tensor | None = None,
    seed: int | Tensor | None = None,
    tau: float = 1.0,
) -> Tensor:
    """:func:`masked_linear` with samples ``first .. first + samples - 1`` of the noise."""
    chosen = backend.resolve("masked_linear", x)
    samples, tau = _checks.sample_count(samples), _checks.float_tau(tau)
    if first:
        _masked.sample_range(first, samples)
    if backend.checks_first(chosen):
        _check(x, weight, logits, bias, bias_logits, samples)
    key = noise.seed_tensor(seed, x.device)
    if chosen == "reference":
        with backend.reference_autocast(x, weight, logits, bias, bias_logits) as (x, weight, logits, bias, bias_logits):
            return reference(x, weight, logits, bias, bias_logits, key, samples, tau, first)
    try:
        low, triton = None, chosen == "triton"
        if backend.autocasts(x):
            if _at_once(x, weight, samples, triton):
                biases = () if bias is None else (bias,)
                low = backend.rounded_by_kernel(x, weight, logits, *biases, alike=False)
            if low is None:
                x, weight, logits, bias, bias_logits = backend.lowered(x, weight, logits, bias, bias_logits)
            elif bias is not None and bias_logits is not None:  # `sample_mask`, which masks it, does not take `low`
                bias, bias_logits = backend.lowered(bias, bias_logits)
        return _run(x, weight, logits, bias, bias_logits, key, samples, tau, first, triton, low)
    except Exception:
        _check(x, weight, logits, bias, bias_logits, samples)
        raise


def _check(
    x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor | None, bias_logits: Tensor | None, samples: int
) -> None:
    _checks.float_tensor("x", x, 2, "[B, ..., in]")
    _checks.float_tensor("weight", weight, 2, "[out, in]")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected [out, in] with in = {x.shape[-1]}, got shape {_checks.shape(weight)}")
    _masked.check_layer(x, weight, logits, bias, bias_logits, samples)


def reference(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    tau: float,
    first: int = 0,
) -> Tensor:
    """Plain PyTorch: all S masked copies of the weight in memory; reduced precision is computed in fp32."""
    wide = _checks.compute_dtype(x)
    weights, biases = _masked.reference_weights(weight, logits, bias, bias_logits, seed, samples, tau, first)
    parts = x.to(wide).reshape(samples, x.shape[:-1].numel() // samples, x.shape[-1])
    out = parts @ weights.to(wide).transpose(1, 2)
    if biases is not None:
        out = out + biases.to(wide).unsqueeze(1)
    return out.reshape(*x.shape[:-1], weight.shape[0]).to(x.dtype)


def fake_forward(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    biases: Tensor | None,
    seed: Tensor,
    samples: int,
    first: int = 0,
    low: torch.dtype | None = None,
) -> Tensor:
    _checks.one_device(x, weight, logits, biases)
    return x.new_empty((*x.shape[:-1], weight.shape[-2]), dtype=low or x.dtype)


def fake_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    seed: Tensor,
    samples: int,
    tau: float,
    needs: Sequence[bool],
    first: int = 0,
    low: torch.dtype | None = None,
) -> list[Tensor]:
    found = _masked.fake_gradients((x, weight, logits), needs)
    if weight.dim() == 2:
        return found
    return [value if need else x.new_empty(weight.shape[0], 0) for value, need in zip(found, needs, strict=True)]


def _side_by_side(weight: int) -> Callable[[Any], _autograd.Rule]:
    """The vmap rule of a kernel that serves many layers in one call: each of its five tensors (number ``weight`` is the
    weight, the last the seed) gets one more leading dimension, except a seed that all share."""

    def of(overload: Any) -> _autograd.Rule:
        loop = _autograd.by_elements(overload)

        def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
            if arguments[weight].dim() - _autograd.batched(in_dims[weight]) != 2:  # there are many layers already
                return loop(info, in_dims, *arguments)
            given = zip(arguments[:4], in_dims, strict=False)
            fronts = [None if tensor is None else _autograd.in_front(info, tensor, dim) for tensor, dim in given]
            seed = arguments[4] if in_dims[4] is None else _autograd.in_front(info, arguments[4], in_dims[4])
            found = overload(*fronts, seed, *arguments[5:])
            return found, 0 if isinstance(found, Tensor) else [0] * len(found)

        return rule

    return of


#: x [B, ..., in]: part s of the batch times sample first + s of the masked weight [out, in], plus row s of biases
#: [S, out]. With weights [layers, out, in] the same for each layer, on tensors with one more leading dimension.
FORWARD = _autograd.define(
    "masked_linear_forward(Tensor x, Tensor weight, Tensor logits, Tensor? biases, Tensor seed, int samples, "
    "int first=0, ScalarType? low=None) -> Tensor",
    fake_forward,
    _side_by_side(1),
)
#: gradients of x, weight and logits; empty where not needed
BACKWARD = _autograd.define(
    "masked_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor logits, Tensor seed, int samples, float tau, "
    "bool[3] needs, int first=0, ScalarType? low=None) -> Tensor[]",
    fake_backward,
    _side_by_side(2),
)

#: Instruction set of the CPU kernels -> (rows for large weights, rows * weights to add for small ones).
#:
#: With more rows per sample the masks cost little beside the products, at which torch's libraries are better. Either
#: way costs a + b * rows for every weight and sample, and torch's a fixed time on top for its calls: two lines that
#: cross once, later for small weights. Measured with AVX-512 on a Zen 4, without on a Xeon and before the gradient of x
#: had a pass of its own; forward + backward with gradients of x and logits, 4 samples, fp32, CPU time of one thread
#: (others used the machine), both ways in turns, up to 1024 rows of 64 x 64, 256 -> 1024, 400 x 400, 1024 -> 256 and
#: 2000 x 2000: the way taken was at most 10 % slower than the other.
ROW_LIMITS = {"avx512": (250, 60_000_000), "avx2": (150, 2_000_000), "baseline": (48, 200_000)}


def row_limit(weight: Tensor, triton: bool) -> int | None:
    """The kernels, which draw masks as they multiply, serve up to so many rows per sample; None: any number."""
    if triton or weight.device.type != "cpu" or _extension.MODULE is None:
        return None
    rows, small = ROW_LIMITS[_extension.MODULE.cpu_isa()]
    return rows + small // max(weight.numel(), 1)


#: So many rows per sample are below every limit: tells the usual case in a fraction of the time of the exact check.
FEW_ROWS = min(rows for rows, _ in ROW_LIMITS.values())


def _at_once(x: Tensor, weight: Tensor, samples: int, triton: bool) -> bool:
    rows = x.size(0) if x.dim() == 2 else x.shape[:-1].numel()
    if rows <= samples * FEW_ROWS:
        return True
    limit = row_limit(weight, triton)
    return limit is None or rows <= samples * limit


class Linear:
    """The geometry, see :mod:`fastmod.ops._masked`, of rows times a matrix."""

    always_masked = False

    @staticmethod
    def reference(
        draws: Draws, x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor, bias_logits: Tensor, seed: Tensor
    ) -> Tensor:
        x, weight, logits = _checks.in_dtype(draws.low, x, weight, logits)
        bias = bias if bias is None else _checks.in_dtype(draws.low, bias)[0]
        return reference(x, weight, logits, bias, bias_logits, seed, draws.samples, draws.tau, draws.first)

    def parts(self, batch: Tensor, samples: int) -> Sequence[Tensor]:
        return batch.reshape(samples, batch.shape[:-1].numel() // samples, batch.shape[-1]).unbind()

    def buffers(self, x: Tensor, samples: int, features: int) -> Sequence[Tensor | None]:
        if transformed():  # so results cannot be written to given buffers
            return [None] * samples
        return x.new_empty(samples, x.shape[:-1].numel() // samples, features).unbind()

    def whole(self, parts: list[Tensor], x: Tensor) -> Tensor:
        base = parts[0]._base
        found = torch.stack(parts) if base is None or transformed() else base
        return found.view(*x.shape[:-1], parts[0].shape[-1])

    def forward(self, part: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if bias is None:
            return torch.mm(part, weight.t(), out=out)
        return torch.addmm(bias, part, weight.t(), out=out)

    def backward(
        self, grad: Tensor, part: Tensor, weight: Any, needs: tuple[bool, bool], out: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        return torch.mm(grad, weight, out=out) if needs[0] else None, torch.mm(grad.t(), part) if needs[1] else None

    def bias_sum(self, grad: Tensor, dtype: torch.dtype, kept: int = 0) -> Tensor:
        return grad.sum(tuple(range(kept, grad.dim() - 1)), dtype=dtype)

    def forward_at_once(self, draws: Draws, *tensors: Any) -> Tensor:
        return FORWARD[draws.triton](*tensors, draws.samples, draws.first, draws.low)

    def backward_at_once(self, draws: Draws, *tensors: Any, needs: Sequence[bool]) -> list[Tensor]:
        return BACKWARD[draws.triton](*tensors, draws.samples, draws.tau, needs, draws.first, draws.low)


LINEAR = Linear()


@in_graph
def _run(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    tau: float,
    first: int,
    triton: bool,
    low: torch.dtype | None,
) -> Tensor:
    at_once = _at_once(x, weight, samples, triton)
    if not at_once or bias is not None or bias_logits is not None:
        _check(x, weight, logits, bias, bias_logits, samples)  # torch broadcasts where the kernels refuse
    draws = Draws(triton, first, samples, tau, low)
    return _masked.run(LINEAR, draws, at_once, x, weight, logits, bias, bias_logits, seed)


SAMPLES = (
    Sample("masked_linear", "odd", ((6, 7), (5, 7), (5, 7)), lambda t: [masked_linear(t[0], t[1], t[2], 3, seed=7)]),
    Sample(
        "masked_linear",
        "masked bias, cold",
        ((4, 3, 7), (5, 7), (5, 7), (5,), (5,)),
        lambda t: [masked_linear(t[0], t[1], t[2], 2, bias=t[3], bias_logits=t[4], seed=7, tau=0.5)],
    ),
)
