"""Argument checks shared by every op: each message names the argument, what it was and what was expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastmod import backend

#: A comparison with this replaces math.isfinite, which torch.compile cannot trace for a dynamic float.
INFINITY = float("inf")
#: The largest count or size; beyond it torch itself would complain, without naming the argument.
LARGEST = 2**31 - 1
FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype the kernels compute in: fp64 for fp64, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def tau_dtype(tau: Tensor | None, like: Tensor) -> torch.dtype:
    """The dtype of the gradient of a temperature in kernels: its own if that has 16 bits, else the compute dtype."""
    return tau.dtype if tau is not None and tau.dtype in (torch.bfloat16, torch.float16) else compute_dtype(like)


def in_dtype(dtype: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors cast to a dtype, or unchanged if it is None."""
    return tensors if dtype is None else tuple(t.to(dtype) for t in tensors)


def shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def float_tensor(name: str, value: object, min_dim: int, form: str) -> None:
    """``value`` is a floating-point tensor with at least ``min_dim`` dimensions; ``form`` shows the expected shape."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor {form}, got {type(value).__name__}")
    if value.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name}: expected float32, float64, bfloat16 or float16, got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {value.layout}")
    if value.dim() < min_dim:
        raise ValueError(f"{name}: expected {form}, got shape {shape(value)}")


def same_kind(first_name: str, first: Tensor, name: str, value: Tensor) -> None:
    """Both tensors share device and dtype; under autocast the dtypes may differ, as autocast casts both."""
    if value.device != first.device:
        raise RuntimeError(f"{name}: expected the device of {first_name} ({first.device}), got {value.device}")
    if value.dtype != first.dtype and not backend.autocasts(first):
        raise TypeError(f"{name}: expected the dtype of {first_name} ({first.dtype}), got {value.dtype}")


def one_device(first: Tensor, *tensors: Tensor | None) -> None:
    """For the fakes: given a meta tensor among CPU tensors, the dispatcher would return only a shape."""
    for tensor in tensors:
        if tensor is not None and tensor.device != first.device:
            raise RuntimeError(f"expected all tensors on {first.device}, got one on {tensor.device}")


def exact_shape(name: str, value: Tensor, expected: Sequence[int], form: str) -> None:
    if tuple(value.shape) != tuple(expected):
        raise ValueError(f"{name}: expected {form} = {list(expected)}, got shape {shape(value)}")


def tau_tensor(name: str, tau: Tensor, like: Tensor, form: str = "a float or a floating-point 0-d tensor") -> Tensor:
    if tau.dim() != 0 or not tau.is_floating_point():
        raise TypeError(f"{name}: expected {form}, got {tau.dtype} of {shape(tau)}")
    if tau.device != like.device:
        raise RuntimeError(f"{name}: expected the device of the blocks ({like.device}), got {tau.device}")
    # Reading a value breaks a trace and stalls a GPU: the CPU kernels check it themselves, a GPU returns NaN.
    return tau


def positive_tau(tau: float | Tensor, like: Tensor) -> tuple[Tensor | None, float]:
    """Split ``tau`` into (tensor or None, float): kernels read a tensor, a float is passed by value."""
    if isinstance(tau, Tensor):
        return tau_tensor("tau", tau, like), 1.0
    if isinstance(tau, bool) or not isinstance(tau, (int, float)):
        raise TypeError(f"tau: expected a float or a floating-point 0-d tensor, got {type(tau).__name__}")
    if not 0 < tau < INFINITY:
        raise ValueError(f"tau: expected a finite number > 0, got {tau}")
    return None, float(tau)


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")


def listed(name: str, value: object, form: str) -> None:
    """``value`` is a list or a tuple; ``form`` says of what."""
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: expected a list {form}, got {type(value).__name__}")


def threshold(value: float, form: str = "a float") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"threshold: expected {form}, got {type(value).__name__}")
    if not 0 <= value < INFINITY:
        raise ValueError(f"threshold: expected a finite number >= 0, got {value}")
    return float(value)


def float_tau(tau: float) -> float:
    """Check the temperature of an op that takes it by value only."""
    if isinstance(tau, bool) or not isinstance(tau, (int, float)):
        raise TypeError(f"tau: expected a float, got {type(tau).__name__}")
    if not 0 < tau < INFINITY:
        raise ValueError(f"tau: expected a finite number > 0, got {tau}")
    return float(tau)


def sample_count(samples: int) -> int:
    if isinstance(samples, bool) or not isinstance(samples, int):
        raise TypeError(f"samples: expected an int, got {type(samples).__name__}")
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, got {samples}")
    if samples > LARGEST:
        raise ValueError(f"samples: expected at most {LARGEST}, got {samples}")
    return samples
