"""What fastmod uses of torch that torch does not call public: every such name is here, with why, and what breaks when
torch changes it. ``_foreach_*`` and the dictionaries of a module (``_parameters`` ...) are documented, and used freely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C import _functorch

# For its `_current_level`, -1 outside of forward mode, in which the kernels have no derivative. Without it they would
# be called all the same, and torch.func.jvp refused (tests/ops/test_transforms.py). A function around it costs time.
from torch.autograd import forward_ad as forward_ad
from torch.utils import _pytree

#: Whether a transform of torch.func is active. Without it the ops would take short cuts that transforms do not see:
#: wrong gradients under vmap and jacrev (tests/ops/test_transforms.py, tests/ops/test_copies.py).
transforms_active = torch._C._are_functorch_transforms_active

#: Whether torch.vmap maps a tensor. Without it copies of a small net would run one by one (tests/ops/test_copies.py).
is_batched = _functorch.is_batchedtensor

#: ``(op's name, dispatch key)``: whether a kernel is registered. Without it nobody could tell which ops the extension
#: has for GPUs (tests/ops/test_backends.py).
is_registered = torch._C._dispatch_has_kernel_for_dispatch_key

#: Applies a function to all of a type that are nested in arguments: how a MaskedModel finds its placeholders.
tree_map_only = _pytree.tree_map_only

try:
    # How fastmod.masks.together sees, and makes, the dimension that torch.vmap hides. Where one of these is missing,
    # a MaskedModel runs the parts of a batch one after another.
    from torch._functorch import pyfunctorch

    interpreter = pyfunctorch.retrieve_current_functorch_interpreter
    add_batch_dim, get_unwrapped = _functorch._add_batch_dim, _functorch.get_unwrapped
    batch_dim_of, level_of = _functorch.maybe_get_bdim, _functorch.maybe_get_level
    HIDDEN_DIMENSIONS = True
except (ImportError, AttributeError):
    HIDDEN_DIMENSIONS = False

_Function = TypeVar("_Function", bound=Callable[..., Any])


def transformed() -> bool:
    """Whether torch.func transforms or torch.compile traces what runs now, so that it has to be a pure function."""
    return transforms_active() or torch.compiler.is_compiling()


def without_binding(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for callers that give every argument outside of torch.func: skips binding the arguments, which
    inspects the signature and takes 10 us. Without it calls are slower, or, should torch move work into the skipped
    part, tests/ops/test_transforms.py fails."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def constant(function: _Function) -> _Function:
    """As torch.compiler.assume_constant_result, without the second that importing the compiler takes. Without it the
    compiler would trace into the function and stop there (tests/nn/test_compile.py)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def has_kernel(name: str, device_type: str) -> bool:
    """Whether ``namespace::name`` has a kernel for tensors of a device type."""
    return bool(is_registered(name, device_type.upper()))


def has_code(name: str) -> bool:
    """Whether an op has kernels rather than calls to other ops: only for counting torch's launches."""
    return bool(torch._C._dispatch_has_kernel(name))


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what ``torch.compile(module)`` returns, told without importing the compiler. Should torch rename
    it, a MaskedModel of a compiled net would mask nothing, which is an error (tests/masks)."""
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules
