"""Turns kernels into an op that torch can differentiate, vmap and compile; shared by the files of the ops.

The file of an op defines the schemas of its kernels with :func:`define`, says in an :class:`Op` what to save and which
kernel gives the gradients, and calls :func:`apply`. Native kernels (``csrc``) and Triton launchers (``kernels``) only
implement the schemas: everything here is the same for both, and exists without either.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastmod import _extension
from fastmod._compiler import in_graph
from fastmod._private import is_batched, transformed, transforms_active, without_binding

#: Native kernels and Triton's have a namespace each, since both may serve one device.
NAMESPACES = ("fastmod", "fastmod_triton")
# Kept because torch drops the definitions together with the object that made them.
_libraries = [torch.library.Library(namespace, "FRAGMENT") for namespace in NAMESPACES]

#: Takes the schemas that contradict an extension built from older sources: that one stays unused, and importing works.
_unused = torch.library.Library("fastmod_unused", "FRAGMENT")

#: ``(native, triton)``, chosen by ``kernel[triton]``.
Kernel = tuple[Any, Any]
#: ``(info, in_dims, *arguments) -> (outputs, out_dims)``, as :func:`torch.library.register_vmap` takes it.
Rule = Callable[..., tuple[Any, Any]]


def define(schema: str, fake: Callable[..., Any], rule: Callable[[Any], Rule] | None = None) -> Kernel:
    """Define a kernel's schema; ``fake`` gives the shapes of its results, ``rule(overload)`` its vmap rule."""
    kernels = []
    for wished in _libraries:
        library, kernel = _defined(wished, schema)
        torch.library.register_fake(kernel.name(), fake, lib=library)
        torch.library.register_vmap(kernel, (rule or by_elements)(kernel), lib=library)
        kernels.append(kernel)
    return kernels[0], kernels[1]


def define_native(schema: str) -> Any:
    """The overload of a schema that only the extension implements, and that no transform needs to support."""
    return _defined(_libraries[0], schema)[1]


def _defined(library: torch.library.Library, schema: str) -> tuple[torch.library.Library, Any]:
    """Define a schema, in another library if an older extension has the name; returns that library and the overload."""
    name = schema.split("(", 1)[0]
    namespace = getattr(torch.ops, library.ns)
    try:
        if not hasattr(namespace, name):  # older extensions defined it themselves
            library.define(schema)
            return library, getattr(namespace, name).default
    except RuntimeError:  # or they have a kernel of that name with other arguments
        if _extension.NAME not in sys.modules:
            raise
    _extension.leave_unused()
    _unused.define(schema)
    return _unused, getattr(torch.ops.fastmod_unused, name).default


class Op(torch.autograd.Function):
    """Base of the ops: ``forward(*arguments)``, ``setup_context`` and ``backward``, fit for ``torch.func``."""

    generate_vmap_rule = True  # forward and backward run on batched tensors, as the kernels have vmap rules
    #: ``apply`` for callers that give every argument, skipping the binding of arguments.
    at_once: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.at_once = without_binding(cls)


def apply(op: type[Op], *arguments: Any) -> Any:
    """``op.apply(*arguments)``; every argument of ``forward`` is given."""
    return op.apply(*arguments) if transformed() else op.at_once(*arguments)


def wanted(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be needed; if not, the kernel is called without an autograd node."""
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return True
    return transforms_active()  # a batched tensor does not show whether the tensor inside requires grad


# ------------------------------------------------------------------ backward

#: ``(numbers, *tensors) -> gradients``; the tensors are gradients of outputs, then inputs, then what the forward kept.
Gradients = Callable[..., tuple[Tensor, ...]]


def gradients(
    by_kernel: Gradients, by_reference: Gradients, numbers: Any, *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """``by_kernel(numbers, *tensors)``; if that is differentiated in turn, the derivative is taken of ``by_reference``,
    which computes the same in plain PyTorch."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph, or torch.func
        return apply(_Gradients, by_kernel, by_reference, numbers, *tensors)
    return by_kernel(numbers, *tensors)


class _Gradients(Op):
    """The backward as a node of its own: computed by the kernel, differentiated through plain PyTorch."""

    @staticmethod
    def forward(
        by_kernel: Gradients, by_reference: Gradients, numbers: Any, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        return tuple(by_kernel(numbers, *tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.by_reference, ctx.numbers = inputs[1:3]
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved, by_reference, numbers = ctx.saved_tensors, ctx.by_reference, ctx.numbers
        places = [i for i, t in enumerate(saved) if t is not None and t.is_floating_point()]
        found = vjp_at(lambda *tensors: by_reference(numbers, *tensors), places, grads, *saved)
        return None, None, None, *spread(found, places, len(saved))


def vjp_at(
    function: Callable[..., Any], places: Sequence[int], grads: Any, *inputs: Tensor | None
) -> tuple[Tensor, ...]:
    """The vector-Jacobian product of ``function`` with ``grads``, for the inputs at ``places``; differentiable.

    Uses torch.func.vjp, which, unlike torch.autograd.grad, treats two inputs as independent even if one was computed
    from the other.
    """

    def of_chosen(*chosen: Tensor) -> Any:
        merged = list(inputs)
        for place, value in zip(places, chosen, strict=True):
            merged[place] = value
        return function(*merged)

    vjp: Callable[[Any], tuple[Tensor, ...]] = torch.func.vjp(of_chosen, *[inputs[place] for place in places])[1]
    return vjp(grads)


def spread(values: Sequence[Any], places: Sequence[int], count: int) -> list[Any]:
    """A list of ``count``, ``values`` at ``places``, None elsewhere."""
    result: list[Any] = [None] * count
    for place, value in zip(places, values, strict=True):
        result[place] = value
    return result


# ------------------------------------------------------------- whole ops


def from_kernels(
    name: str, forward: Kernel, backward: Kernel, reference: Callable[..., Tensor], tensors: int
) -> Callable[..., Tensor]:
    """The op made of two kernels, for the usual case: ``forward`` takes ``tensors`` tensors, then numbers, and returns
    one tensor; ``backward`` takes its gradient before the same arguments and, if its schema has ``needs``, after them
    which gradients are needed, and returns one for each tensor. ``reference`` is the forward in plain PyTorch.

    Returns:
        ``run(triton, *arguments)``, with the arguments of ``forward``; one node for torch.compile.
    """
    asks = backward[0]._schema.arguments[-1].name == "needs"
    everything = (True,) * tensors  # the usual case, which needs no search for places

    def by_kernel(numbers: tuple[Any, ...], *given: Tensor | None) -> tuple[Tensor, ...]:
        triton, rest, needs = numbers
        found = backward[triton](*given, *rest, needs) if asks else backward[triton](*given, *rest)
        each: tuple[Tensor, ...] = (found,) if isinstance(found, Tensor) else tuple(found)
        return each if needs == everything else tuple(itertools.compress(each, needs))

    def by_reference(numbers: tuple[Any, ...], grad: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        _, rest, needs = numbers
        return vjp_at(lambda *values: reference(*values, *rest), _places(needs), grad, *given)

    def kernel(triton: bool, *arguments: Any) -> Tensor:
        return forward[triton](*arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.triton, ctx.rest = inputs[0], inputs[1 + tensors :]
        ctx.save_for_backward(*inputs[1 : 1 + tensors])

    def node(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rest, needs = ctx.rest, ctx.needs_input_grad[1 : 1 + tensors]
        found = gradients(by_kernel, by_reference, (ctx.triton, rest, needs), grad, *ctx.saved_tensors)
        if needs == everything:
            return None, *found, *(None,) * len(rest)
        return None, *spread(found, _places(needs), tensors + len(rest))

    methods: dict[str, Callable[..., Any]] = {"forward": kernel, "setup_context": setup_context, "backward": node}
    op = type(name, (Op,), {key: staticmethod(method) for key, method in methods.items()})

    @in_graph
    def run(triton: bool, *arguments: Any) -> Tensor:
        if wanted(*arguments[:tensors]):
            return apply(op, triton, *arguments)
        return forward[triton](*arguments)

    return run


def _places(needs: Sequence[bool]) -> list[int]:
    return [i for i, need in enumerate(needs) if need]


# ---------------------------------------------------------------------- vmap


def elements(argument: Any, dim: Any, count: int) -> Sequence[Any]:
    """An argument split into those of ``count`` elements: one call of torch per tensor, however many elements."""
    if isinstance(argument, (list, tuple)):
        if not batched(dim):
            return [argument] * count
        dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(argument)
        parts = [elements(a, d, count) for a, d in zip(argument, dims, strict=True)]
        return [list(each) for each in zip(*parts, strict=True)]
    return [argument] * count if dim is None else argument.unbind(dim)


def by_elements(overload: Any) -> Rule:
    """The rule that always works: one call per element, so that each element draws the noise it would draw alone."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        found = _each(overload, info.batch_size, in_dims, arguments)
        return found, _in_front_of(found)

    return rule


def one_by_one(function: Callable[..., Any], count: int, *arguments: Any) -> Any:
    """For kernels that cannot take many nets at once: one call for each of ``count`` nets, which are the leading
    dimension of every input and output."""
    return _each(function, count, [_in_front_of(a) for a in arguments], arguments)


def _each(function: Callable[..., Any], count: int, dims: Sequence[Any], arguments: Sequence[Any]) -> Any:
    parts = [elements(a, d, count) for a, d in zip(arguments, dims, strict=True)]
    return _stacked([function(*each) for each in zip(*parts, strict=True)])


def _stacked(results: Sequence[Any]) -> Any:
    if isinstance(results[0], Tensor):
        return torch.stack(results)  # type: ignore[arg-type]
    return type(results[0])(_stacked(parts) for parts in zip(*results, strict=True))


def _in_front_of(found: Any) -> Any:
    """The batch dimension of every tensor in ``found``: 0."""
    if isinstance(found, (list, tuple)):
        return type(found)(map(_in_front_of, found))
    return 0 if isinstance(found, Tensor) else None


def over_copies(overload: Any, params: int) -> Rule:
    """The rule of a kernel that takes the parameters of many nets in one call, if these and every other tensor have the
    copies as leading dimension. Where there are copies already: one call per copy.

    Args:
        params: the position of the list of parameters, the first of which is a weight ``[out, in]``.
    """
    loop = by_elements(overload)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        dims = in_dims[params]
        first = dims[0] if isinstance(dims, (list, tuple)) else dims
        nested = arguments[params][0].dim() > (2 if first is None else 3)
        if nested:
            return loop(info, in_dims, *arguments)
        found = overload(*[with_copies(info, a, d) for a, d in zip(arguments, in_dims, strict=True)])
        return found, _in_front_of(found)

    return rule


def maps_copies(params: Sequence[Tensor]) -> bool:
    """Whether torch.vmap maps parameters (the first is a weight) that have no dimension of copies yet."""
    return params[0].dim() == 2 and any(map(is_batched, params))


def each_copy(function: Callable[..., Any], weight: Tensor | None) -> Callable[..., Any]:
    """``function``, which takes the tensors of one net, mapped over many nets if ``weight`` has copies."""

    def mapped(*tensors: Tensor | None) -> Any:
        return torch.vmap(function, tuple(None if t is None else 0 for t in tensors))(*tensors)

    return mapped if weight is not None and weight.dim() > 2 else function


def of_copies(op: type[Op], run: Callable[..., tuple[Tensor, ...]]) -> type[Op]:
    """The op for the parameters of many nets under torch.vmap: ``run(*arguments)`` is ``op`` with the copies as leading
    dimension, so that autograd records one node and none of torch.func's."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        found = run(*[with_copies(info, a, d) for a, d in zip(arguments, in_dims, strict=True)])
        return found, (0,) * len(found)

    return type(f"{op.__name__}OfCopies", (op,), {"generate_vmap_rule": False, "vmap": staticmethod(vmap)})


def batched(dim: Any) -> bool:
    """Whether an argument has a batch dimension; ``dim`` is a list for a list of tensors."""
    return any(batched(d) for d in dim) if isinstance(dim, (list, tuple)) else dim is not None


def in_front(info: Any, tensor: Tensor, dim: int | None) -> Tensor:
    """The tensor with the batch as leading dimension."""
    if dim is None:
        return tensor.expand(info.batch_size, *tensor.shape)
    return tensor.movedim(dim, 0) if dim else tensor


def with_copies(info: Any, argument: Any, dim: Any) -> Any:
    """An argument whose tensors, if any, have the batch as leading dimension."""
    if isinstance(argument, (list, tuple)):
        dims = dim if isinstance(dim, (list, tuple)) else [dim] * len(argument)
        return type(argument)(with_copies(info, a, d) for a, d in zip(argument, dims, strict=True))
    return in_front(info, argument, dim) if isinstance(argument, Tensor) else argument


def folded(overload: Any, tensors: int) -> Rule:
    """The rule of a kernel that treats the elements of leading dimensions independently: the first ``tensors``
    arguments and all results get one more dimension."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        fronts = [in_front(info, a, d) for a, d in zip(arguments[:tensors], in_dims, strict=False)]
        found = overload(*fronts, *arguments[tensors:])
        return found, 0 if isinstance(found, Tensor) else tuple(0 for _ in found)

    return rule
