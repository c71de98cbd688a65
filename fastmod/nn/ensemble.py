"""Many copies of a small net, trained side by side: ``Ensemble``."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.nn import _parts


class _Called(nn.Module):
    """A function of a net, as the module that :func:`torch.func.functional_call` needs."""

    def __init__(self, net: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.function = net, function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.net, *inputs)


class Ensemble(nn.Module):
    """``copies`` nets of one architecture, such as the seeds of one experiment, in one module.

    Every parameter and buffer of the net is there once, with a leading dimension of copies, under the net's own name
    below ``model``. A call maps the net over the copies with :func:`torch.vmap`, so that each has the outputs, the
    gradients and the statistics that it would have alone; noise (dropout, Gumbel) is drawn anew for each. Buffers
    must be changed in place (``self.count.add_(1)``); a net that assigns a new one is refused.

    Args:
        model_factory: returns a new net at every call; all alike but for their values.
        copies: how many.
        seeds: one per copy, given to ``torch.manual_seed`` before the factory is called, so that copy i begins as a net
            of that seed does; with None, torch's generator goes on as it is, so that the copies differ.

    Shapes: all copies read the same inputs ``[B, ...]``; with ``each=True`` each has its own, ``[copies, B, ...]``.
    Outputs have a leading dimension of copies. Sum the losses over the copies: the gradients are then those of
    each loss alone. To clip them copy by copy, use :meth:`clip_grad_norm_`, not the ``max_norm`` of an optimiser.

        >>> nets = fastmod.nn.Ensemble(lambda: fastmod.nn.SMFR(6, 5, 10, 8, 3), copies=8)
        >>> out, penalty = nets.map(lambda net, x: (net(x), net.penalty()), x)  # [8, B, 5, 10], [8]
        >>> (loss(out, target) + penalty).sum().backward()
    """

    def __init__(
        self, model_factory: Callable[[], nn.Module], copies: int, *, seeds: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        _parts.positive_sizes(copies=copies)
        if not callable(model_factory):
            raise TypeError(f"model_factory: expected a function that makes a net, got {type(model_factory).__name__}")
        if seeds is not None and len(seeds) != copies:
            raise ValueError(f"seeds: expected one per copy, that is {copies}, got {len(seeds)}")
        nets = list(_made(model_factory, copies, seeds))
        self.copies = copies
        self.model = nets[0]
        _replace(self.model, *torch.func.stack_module_state(nets))

    def forward(self, *inputs: Any, each: bool = False) -> Any:
        """The net's outputs ``[copies, ...]``."""
        return self.map(_plain_call, *inputs, each=each)

    def map(self, function: Callable[..., Any], *inputs: Any, each: bool = False) -> Any:
        """``function(net, *inputs)`` of every copy, its tensors with a leading dimension of copies.

        What a net tells about its last forward, such as ``SMFR.penalty()``, has to be asked for in here, copy by copy.
        """
        called = _Called(self.model, function)
        state = dict(_places(called))

        def one(values: dict[str, Tensor], *own: Any) -> Any:
            # One tensor per place, so that no search for places that share one is needed.
            given = dict(values)
            found = torch.func.functional_call(called, values, own, tie_weights=False)
            _forget(called)
            for name, tensor in given.items():
                if values[name] is not tensor:  # functional_call notices it, and puts the old one back
                    raise RuntimeError(
                        f"{name.removeprefix('net.')}: the net puts another tensor in its place, which would be lost; "
                        "expected a buffer that is changed in place, such as self.count.add_(1)"
                    )
            return found

        dims = (0, *[0 if each and isinstance(value, Tensor) else None for value in inputs])
        for i, value in enumerate(inputs):
            if each and isinstance(value, Tensor) and (value.dim() == 0 or value.shape[0] != self.copies):
                raise ValueError(f"inputs[{i}]: expected [{self.copies}, ...], one per copy, got {list(value.shape)}")
        return torch.vmap(one, in_dims=dims, randomness="different")(state, *inputs)

    def copy(self, index: int) -> nn.Module:
        """A copy of one net as it is now, independent of the others."""
        if isinstance(index, bool) or not isinstance(index, int) or not -self.copies <= index < self.copies:
            raise IndexError(f"index: expected an int from 0 to {self.copies - 1}, got {index!r}")
        net = copying.deepcopy(self.model)
        with torch.no_grad():
            own = {name: tensor[index].clone() for name, tensor in _state(net)}
        _replace(net, own, own)
        return net

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of every copy to a norm of at most ``max_norm``, as
        :func:`torch.nn.utils.clip_grad_norm_` does for one net; returns the norms before it, ``[copies]``."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if not grads:
            return torch.zeros(self.copies)
        norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
        scale = (max_norm / (norms + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)))
        return norms

    def extra_repr(self) -> str:
        return f"copies={self.copies}"


def _forget(net: nn.Module) -> None:
    """Drop what modules keep of their last forward; their class names the attribute, ``last_forward_in``. Inside vmap's
    call its tensors belong to one copy, outside they cannot be read, and torch.compile cannot return them."""
    for module in net.modules():
        name = getattr(type(module), "last_forward_in", None)
        if name is not None and getattr(module, name) is not None:
            object.__setattr__(module, name, None)


def _plain_call(net: nn.Module, *inputs: Any) -> Any:
    return net(*inputs)


def _made(factory: Callable[[], nn.Module], copies: int, seeds: Sequence[int] | None) -> Iterator[nn.Module]:
    known: set[int] = set()
    for i in range(copies):
        if seeds is None:
            net = factory()
        else:
            with torch.random.fork_rng():
                torch.manual_seed(seeds[i])
                net = factory()
        if not isinstance(net, nn.Module):
            raise TypeError(f"model_factory: expected it to return an nn.Module, got {type(net).__name__}")
        if id(net) in known:
            raise ValueError("model_factory: expected a new net at every call, got the same one again")
        known.add(id(net))
        yield net


def _state(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters()
    yield from net.named_buffers()


def _places(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Adds all other names of tensors that have several, as a call needs it; takes a third of the time."""
    for prefix, module in net.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    yield f"{prefix}.{name}", tensor


def _replace(net: nn.Module, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Replace the tensors of the net, also where several places share one."""
    for kind, places, given in (
        ("_parameters", net.named_parameters, parameters),
        ("_buffers", net.named_buffers, buffers),
    ):
        by_old: dict[int, Any] = {}
        for name, old in places():
            new = given[name]
            by_old[id(old)] = nn.Parameter(new.detach(), old.requires_grad) if kind == "_parameters" else new
        for module in net.modules():
            own = getattr(module, kind)
            for name, old in own.items():
                if old is not None:
                    own[name] = by_old[id(old)]
