"""Launchers of ``masked_conv2d``, whose kernels are in _masked_conv2d.py.

Forward: masks, products. Backward: partial gradients of weights and biases, and masks in the same launch; the gradient
of x; the sum of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from fastmod.kernels._common import OPTIONS, guard, seed_args
from fastmod.kernels._images import IEEE, TF32_THRICE, power, precision
from fastmod.kernels._masked_conv2d import SAMPLES, draw_kernel, finish_kernel, product_kernel, weight_kernel
from fastmod.kernels.masked_linear import kinds
from fastmod.kernels.norm_conv import LEAST_PIXELS, PROGRAMS
from fastmod.kernels.sample_mask import EXACT_OPTIONS
from torch import Tensor

from fastmod.gpu.specialisation import Dtype, Specialisation
from fastmod.ops._checks import compute_dtype
from fastmod.ops.masked_conv2d import fake_backward, fake_forward, out_size

#: Weights per program that draws or adds up.
BLOCK = 512
#: Programs that a large GPU needs: if there are fewer, each takes a quarter of the pixels.
ENOUGH = 128
#: Loading ahead in loops takes more registers than there are, and other programs hide the latency. Left to itself ptxas
#: spills registers to run more programs at once. AMD's warps are twice as large.
NVIDIA = {"num_stages": 1, "maxnreg": 224} if torch.version.hip is None else {"num_stages": 1}
FEWER_WARPS: dict[str, Any] = {**OPTIONS, **NVIDIA}
MORE_WARPS: dict[str, Any] = {**FEWER_WARPS, "num_warps": 8 if torch.version.hip is None else 4}


# ---- Launchers


def product_tile(rows: int, factors: tl.dtype, many: bool) -> tuple[dict[str, int], dict[str, Any]]:
    """Channels, pixels and depth per step, and launch options."""
    sizes = {
        "BLOCK_N": power(rows, 16, 64),
        "BLOCK_M": 128 if many else 32,
        "BLOCK_K": 16 if factors == tl.float32 else 32,
    }
    return sizes, MORE_WARPS if many else FEWER_WARPS


def weight_tile(rows: int, depth: int, factors: tl.dtype) -> tuple[dict[str, int], dict[str, Any]]:
    """Result channels, pairs of a channel and a tap, and pixels per step, and launch options."""
    block_n = power(rows, 16, 64)
    exact = {"enable_fp_fusion": EXACT_OPTIONS["enable_fp_fusion"]}  # for the masks
    if factors == tl.float32:
        return {"BLOCK_N": block_n, "BLOCK_J": power(depth, 16, 32), "BLOCK_P": 16}, FEWER_WARPS | exact
    return {"BLOCK_N": block_n, "BLOCK_J": power(depth, 16, 64), "BLOCK_P": 32}, MORE_WARPS | exact


def drawing_block(options: dict[str, Any]) -> int:
    """Weights per program that draws beside other programs: one Philox call per thread, which gives four words."""
    return 128 * int(options["num_warps"])


def geometry(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    low: torch.dtype | None,
) -> dict[str, Any]:
    """Constants that forward and backward share."""
    loaded, factors, sums, _ = kinds(x, low)
    found: dict[str, Any] = {
        "CHANNELS": weight.shape[1], "RESULTS": weight.shape[0],
        "PRECISION": precision(x, convolution=True) if low in (None, x.dtype) else IEEE,
        "LT": loaded, "DT": factors, "CT": sums,
    }  # fmt: skip
    for d, name in enumerate("HW"):
        own = {"KERNEL": weight.shape[2 + d], "STRIDE": stride[d], "PADDING": padding[d], "DILATION": dilation[d]}
        found |= {f"{what}_{name}": value for what, value in own.items()}
    return found


def backward_geometry(constants: dict[str, Any]) -> dict[str, Any]:
    """For the gradient of x: taps that a pixel uses are ``stride / g`` apart, and the pixels they read
    ``-dilation / g``, where g is the greatest common divisor."""
    found = {**constants, "CHANNELS": constants["RESULTS"], "RESULTS": constants["CHANNELS"], "BACK": True}
    for name in "HW":
        stride, dilation = constants[f"STRIDE_{name}"], constants[f"DILATION_{name}"]
        shared = gcd(stride, dilation)
        found |= {f"TAP_STEP_{name}": stride // shared, f"PACE_{name}": -dilation // shared}
    return found


def forward_geometry(constants: dict[str, Any]) -> dict[str, Any]:
    paces = {f"PACE_{name}": constants[f"DILATION_{name}"] for name in "HW"}
    return {**constants, **paces, "TAP_STEP_H": 1, "TAP_STEP_W": 1, "BACK": False}


def lies(source: Tensor, result: Tensor) -> dict[str, Any]:
    """Strides and sizes of two tensors of images."""
    names = ("image", "channel", "row", "column")
    found = {f"from_{name}": step for name, step in zip(names, source.stride(), strict=True)}
    found |= {f"to_{name}": step for name, step in zip(names, result.stride(), strict=True)}
    found |= {"SOURCE_HIGH": source.shape[2], "SOURCE_WIDE": source.shape[3]}
    found |= {"HIGH": result.shape[2], "WIDE": result.shape[3]}
    return found | {"SOURCE_LAST": source.stride(1) == 1, "OUT_LAST": result.stride(1) == 1}


def empty_masks(weight: Tensor, samples: int) -> Tensor:
    """Memory for the masks ``[bytes, weights]``."""
    return torch.empty((triton.cdiv(samples, SAMPLES), weight.numel()), dtype=torch.uint8, device=weight.device)


def draw(
    weight: Tensor, logits: Tensor, bias: Tensor | None, bias_logits: Tensor | None, seed: Tensor, samples: int,
    first: int, constants: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Draws masks and, if they are masked, biases ``[samples, out]``."""
    count, outputs = weight.numel(), weight.shape[0]
    masks, biases = empty_masks(weight, samples), None
    blocks = triton.cdiv(count, BLOCK)
    if bias is not None and bias_logits is not None:
        biases = weight.new_empty((samples, outputs), dtype=compute_dtype(weight))
        blocks += triton.cdiv(outputs, BLOCK)
    draw_kernel[(blocks, len(masks))](
        logits_ptr=logits.contiguous(), masks_ptr=masks, bias_ptr=None if biases is None else dense(bias),
        bias_logits_ptr=None if biases is None else dense(bias_logits), biases_ptr=biases, first=first,
        samples=samples, P=count, OUT=outputs, QUADS=count % 4 == 0, BLOCK=BLOCK, LT=constants["LT"],
        CT=constants["CT"], **seed_args(seed), **EXACT_OPTIONS,
    )  # fmt: skip
    return masks, biases


def dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def multiply(
    source: Tensor, weight: Tensor, masks: Tensor, biases: Tensor | None, result: Tensor, samples: int,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    """Launches ``product_kernel``; biases are per sample, or the same for all."""
    images, rows = result.shape[0] // samples, constants["RESULTS"]
    steps = [constants[f"STRIDE_{name}"] if constants["BACK"] else 1 for name in "HW"]
    classes, size = 1, images
    for step, length in zip(steps, result.shape[2:], strict=True):
        classes *= min(step, length)
        size *= triton.cdiv(length, step)
    many = triton.cdiv(size, 128) * classes * samples * triton.cdiv(rows, 64) >= ENOUGH
    blocks, options = product_tile(rows, constants["DT"], many)
    tiles = triton.cdiv(size, blocks["BLOCK_M"])
    product_kernel[(tiles * classes * samples, triton.cdiv(rows, blocks["BLOCK_N"]))](
        source_ptr=source, weight_ptr=weight, masks_ptr=masks, biases_ptr=biases, out_ptr=result, images=images,
        tiles=tiles, BIAS_STEP=0 if biases is None or biases.dim() == 1 else rows, **lies(source, result), **constants,
        **blocks, **options,
    )  # fmt: skip


def masked_conv2d_forward(
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    first: int = 0,
    low: torch.dtype | None = None,
) -> Tensor:
    """x ``[B, in, H, W]``, weight and logits ``[out, in, h, w]``, bias and its logits ``[out]`` ->
    ``[B, out, H', W']``."""
    refuse(x, weight, logits, bias, bias_logits, samples, low)
    out = fake_forward(x, weight, logits, bias, bias_logits, seed, samples, stride, padding, dilation, first, low)
    constants = forward_geometry(geometry(x, weight, stride, padding, dilation, low))
    with guard(x):
        masks, biases = draw(weight, logits, bias, bias_logits, seed, samples, first, constants)
        multiply(x, weight.contiguous(), masks, dense(bias) if biases is None else biases, out, samples, constants)
    return out


def refuse(
    x: Tensor, weight: Tensor, logits: Tensor, bias: Tensor | None, bias_logits: Tensor | None, samples: int,
    low: torch.dtype | None,
) -> None:  # fmt: skip
    """Refuses tensors that would be read beyond their end or as another dtype."""
    dtype = x.dtype if low is None else weight.dtype
    per_output = (weight.shape[0],)
    others = (("weight", weight, (weight.shape[0], x.shape[1], *weight.shape[2:])), ("logits", logits, weight.shape))
    for name, tensor, shape in (*others, ("bias", bias, per_output), ("bias_logits", bias_logits, per_output)):
        if tensor is not None and (tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape)):
            raise ValueError(f"{name}: expected {dtype} of shape {tuple(shape)}, got {tensor.dtype}, {tensor.shape}")
    if samples < 1 or x.shape[0] % samples or x.dtype == torch.float64:
        raise ValueError(f"x: expected a multiple of {samples} images, not of fp64, got {x.dtype} {tuple(x.shape)}")
    if bias_logits is not None and bias is None:
        raise ValueError("bias_logits: expected none without a bias")


def masked_conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    samples: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    tau: float,
    needs: Sequence[bool],
    first: int = 0,
    low: torch.dtype | None = None,
) -> list[Tensor]:
    """Gradients of x, weight, logits, bias and bias_logits; empty where not needed."""
    refuse(x, weight, logits, bias, bias_logits, samples, low)
    sizes = samples, stride, padding, dilation
    found = fake_backward(grad, x, weight, logits, bias, bias_logits, seed, *sizes, tau, needs, first, low)
    constants = geometry(x, weight, stride, padding, dilation, low)
    high, wide = (out_size(x.shape[2 + d], weight.shape[2 + d], stride[d], padding[d], dilation[d]) for d in range(2))
    if tuple(grad.shape) != (x.shape[0], weight.shape[0], high, wide) or grad.dtype != (low or x.dtype):
        raise ValueError(f"grad: expected the result's shape and dtype, got {grad.dtype} {tuple(grad.shape)}")
    of_kind = {"WEIGHT": any(needs[1:3]), "BIAS": any(t.numel() for t in found[3:])}
    of_parameters = any(of_kind.values())
    weight, logits = weight.contiguous(), logits.contiguous()
    masks = partials = None
    with guard(x):
        if of_parameters:  # also draws masks if the gradient of x needs them
            masks = empty_masks(weight, samples) if needs[0] else None
            partials = _parts(grad, x, weight, logits, seed, samples, constants, first, masks, of_kind)
        elif needs[0]:
            masks, _ = draw(weight, logits, None, None, seed, samples, first, constants)
        if masks is not None:
            multiply(grad, weight, masks, None, found[0], samples, backward_geometry(constants))
        if partials is not None:
            biases = dense(bias), dense(bias_logits)
            _finish(partials, weight, logits, *biases, seed, constants, tau, first, found, of_kind)
    return found


def _parts(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    logits: Tensor,
    seed: Tensor,
    samples: int,
    constants: dict[str, Any],
    first: int,
    masks: Tensor | None,
    of_kind: dict[str, bool],
) -> Tensor:
    """Partial gradients of masked weights and biases: ``[samples, parts, weights + biases]``. Draws ``masks``."""
    outputs, count = weight.shape[0], weight.numel()
    images = x.shape[0] // samples
    size = grad.shape[2] * grad.shape[3]
    values = images * size
    blocks, options = weight_tile(outputs, count // outputs, constants["DT"])
    columns = triton.cdiv(outputs, blocks["BLOCK_N"])
    if of_kind["WEIGHT"]:
        columns *= triton.cdiv(count // outputs, blocks["BLOCK_J"])
    share = max(triton.cdiv(values, max(PROGRAMS // (columns * samples), 1)), min(values, LEAST_PIXELS))
    whole, chunk = triton.cdiv(share, size), triton.cdiv(share, blocks["BLOCK_P"]) * blocks["BLOCK_P"]
    parts = triton.cdiv(size, chunk) if whole == 1 else 1
    splits = triton.cdiv(images, whole) * parts
    width = (count if of_kind["WEIGHT"] else 0) + (outputs if of_kind["BIAS"] else 0)
    partials = x.new_empty((samples, splits, width), dtype=compute_dtype(x))
    block = drawing_block(options)
    drawers = 0 if masks is None else triton.cdiv(triton.cdiv(count, block) * len(masks), columns)
    weight_kernel[(columns, samples * splits + drawers)](
        x_ptr=x, grad_ptr=grad, partials_ptr=partials, logits_ptr=logits, masks_ptr=masks, first=first, samples=samples,
        images=images, splits=splits, whole=whole, parts=parts, chunk=min(chunk, size), QUADS=count % 4 == 0,
        BLOCK=block, **lies(x, grad), **constants, **of_kind, **blocks, **seed_args(seed), **options,
    )  # fmt: skip
    return partials


def _finish(
    partials: Tensor,
    weight: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    bias_logits: Tensor | None,
    seed: Tensor,
    constants: dict[str, Any],
    tau: float,
    first: int,
    found: Sequence[Tensor],
    of_kind: dict[str, bool],
) -> None:
    """Adds up the parts into ``found[1:]``, unless those are empty."""
    outputs, count = weight.shape[0], weight.numel()
    samples, splits, _ = partials.shape
    _, dweight, dlogits, dbias, dbias_logits = (t if t.numel() else None for t in found)
    programs = triton.cdiv(count, BLOCK) if of_kind["WEIGHT"] else 0
    programs += triton.cdiv(outputs, BLOCK) if of_kind["BIAS"] else 0
    finish_kernel[(programs,)](
        partials_ptr=partials, weight_ptr=weight, logits_ptr=logits, bias_ptr=bias, bias_logits_ptr=bias_logits,
        dweight_ptr=dweight, dlogits_ptr=dlogits, dbias_ptr=dbias, dbias_logits_ptr=dbias_logits, first=first,
        samples=samples, splits=splits, tau=tau, P=count, OUT=outputs, AT_ONE=tau == 1.0, QUADS=count % 4 == 0,
        BLOCK=BLOCK, LT=constants["LT"], CT=constants["CT"], **of_kind, **seed_args(seed), **EXACT_OPTIONS,
    )  # fmt: skip


# ---- What `fastmod compile` builds of this file, and the tests check


#: Name -> channels in and out, filter, stride, dilation, channels innermost.
COMPILED: dict[str, Any] = {
    "3x3": (32, 64, (3, 3), (1, 1), (1, 1), False),
    "7x7": (3, 16, (7, 7), (2, 2), (1, 1), True),
    "dilated": (64, 64, (3, 2), (2, 3), (2, 1), False),
}


def specialisations(dtype: Dtype) -> list[Specialisation]:
    """fp64 is computed sample by sample. With 16 bits "7x7" and "words" read fp32, as under autocast."""
    if dtype.name == "fp64":
        return []
    p, w = dtype.pointer, dtype.wide_pointer
    on_amd = {"PRECISION": IEEE, "num_warps": OPTIONS["num_warps"], "maxnreg": None}
    found = []
    for case, (inputs, outputs, kernel, stride, dilation, last) in COMPILED.items():
        plain = case == "3x3"
        q = w if case == "7x7" else p  # of x and parameters
        weight = torch.empty(outputs, inputs, *kernel, device="meta")
        constants = {
            **geometry(weight, weight, stride, (1, 1), dilation, None), "LT": dtype.element, "DT": dtype.element,
            "CT": dtype.compute,
            "PRECISION": TF32_THRICE if dtype.name == "fp32" else IEEE,
        }  # fmt: skip
        shared = {"SOURCE_LAST": last, "OUT_LAST": last, "weight_ptr": q, "masks_ptr": "*u8"}
        sizes, options = product_tile(outputs, dtype.element, True)
        forward = {
            **forward_geometry(constants), **shared, **sizes, "source_ptr": q, "out_ptr": p,
            "biases_ptr": w if plain else q,
            "BIAS_STEP": outputs if plain else 0,
        }  # fmt: skip
        found.append(Specialisation(product_kernel, forward, options, case, on_amd))
        sizes, options = product_tile(inputs, dtype.element, plain)
        backward = {
            **forward, **backward_geometry(constants), **sizes, "source_ptr": p, "out_ptr": q, "biases_ptr": None,
        }  # fmt: skip
        found.append(Specialisation(product_kernel, backward, options, f"{case}-back", on_amd))
        sizes, options = weight_tile(outputs, weight[0].numel(), dtype.element)
        weights = {
            **constants, **sizes, "x_ptr": q, "grad_ptr": p, "partials_ptr": w, "WEIGHT": True, "BIAS": plain,
            "SOURCE_LAST": last, "OUT_LAST": last, "logits_ptr": q, "masks_ptr": "*u8", "seed_ptr": "*i64",
            "QUADS": plain, "BLOCK": drawing_block(options),
        }  # fmt: skip
        found.append(Specialisation(weight_kernel, weights, options, case, on_amd))
    for quads in (True, False):
        name = "quads" if quads else "words"
        q = p if quads else w
        shared = {
            "logits_ptr": q, "bias_ptr": p if quads else None, "bias_logits_ptr": p if quads else None,
            "seed_ptr": "*i64", "QUADS": quads, "BLOCK": BLOCK, "LT": dtype.element, "CT": dtype.compute,
        }  # fmt: skip
        drawn = {**shared, "masks_ptr": "*u8", "biases_ptr": w if quads else None}
        found.append(Specialisation(draw_kernel, drawn, EXACT_OPTIONS, name))
        for at_one in (True, False):
            finished = {
                **shared, "partials_ptr": w, "weight_ptr": q, "dweight_ptr": q if at_one else None, "dlogits_ptr": q,
                "dbias_ptr": p if quads else None, "dbias_logits_ptr": p if quads else None, "WEIGHT": True,
                "BIAS": quads, "AT_ONE": at_one,
            }  # fmt: skip
            named = f"{name}-{'one' if at_one else 'any'}"
            found.append(Specialisation(finish_kernel, finished, EXACT_OPTIONS, named))
    return found
