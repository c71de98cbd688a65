"""Layers whose weights are mixtures of the same templates: ``Compositional``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastmod.nn import _parts
from fastmod.nn._changeable import Changeable, key_of
from fastmod.nn._mix import mixed
from fastmod.nn._pending import finish
from fastmod.nn._stacked import Sum, stackable
from fastmod.nn.fuse_batch_norm import fuse_batch_norm_
from fastmod.nn.mixing import check_mixing, weights_of
from fastmod.nn.signatures import first_logits, sequential, signatures_of
from fastmod.nn.template_bank import TemplateBank
from fastmod.ops.cluster_penalty import cluster_penalty
from fastmod.ops.entropy_penalty import entropy_penalty

NORMS = ("mixed", "per_layer", "per_task")
#: Name of the logits that ``compose_`` adds to a net.
COMPOSED_LOGITS = "composition/logits"
#: Kinds of blocks already warned about because they run unfused.
_warned: set[type] = set()


class Compositional(Changeable):
    """L layers of one kind of block; each layer mixes its weights from K common templates, with its own shares.

    Args:
        block_factory: a function that makes a block (any module whose output has the shape of its input), or a
            ``TemplateBank``.
        templates: K.
        layers: L, applied one after the other.
        tasks: T. Each task has its own shares and its own statistics.
        norm: how scales and shifts of normalisation layers are kept: ``"mixed"`` like all other weights,
            ``"per_layer"`` one set per layer for all tasks, ``"per_task"`` one set per layer and task.
        mixing: how logits become shares: ``"softmax"``, ``"tanh"``, or ``"none"`` (the logits are the shares).
        init: initial logits: ``"uniform"`` on (0, 1) for one task and on +-sqrt(6 / (K + 1)) for several; ``"diag"``
            gives the layer's own template a share of 0.99 (with K < L, its template in a sequential signature).
        signature: fixed templates instead of learned shares, one signature for all tasks or a list with one per
            task: see :func:`make_signature`.
        share_layers: layers in which all tasks use the shares of task 0: a list, or a number of first layers.

    Shapes: ``forward(x, task=t)`` maps ``[B, ...]`` to ``[B, ...]``, ``forward(x, task=None)`` runs all tasks,
    ``[T, B, ...]`` to ``[T, B, ...]``. Further arguments are passed to every block.

    Parameters: ``bank.weight`` [K, P], ``logits`` [T, L, K] (none with a signature), ``norm_weight`` [L, N], per task
    [L, T, N]. Buffers of the block, such as the statistics of batch norm, are never mixed: ``state.*`` [L, T, ...].

    One call mixes all weights. Blocks with a method ``forward_stacked`` (``IsometricBlock``, ``BasicBlock``) run on
    fused ops, all tasks in one call. Other blocks run through torch.func.functional_call, one task after the other,
    with convolutions and batch norms fused (:func:`fuse_batch_norm_`); if nothing can be fused, a warning is given
    once per kind of block. Such a block must not use torch.utils.checkpoint inside: its recomputation would see NaN
    weights. Put the checkpoint around this module instead.
    """

    templates_of: Tensor  # [T, L], with a signature

    def __init__(
        self,
        block_factory: Callable[[], nn.Module] | TemplateBank,
        templates: int | None = None,
        layers: int = 1,
        tasks: int = 1,
        *,
        norm: str = "mixed",
        mixing: str = "softmax",
        init: str = "uniform",
        signature: str | Sequence[int] | Sequence[Sequence[int]] | None = None,
        share_layers: int | Sequence[int] = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _parts.positive_sizes(layers=layers, tasks=tasks)
        if norm not in NORMS:
            raise ValueError(f"norm: expected one of {', '.join(map(repr, NORMS))}, got {norm!r}")
        check_mixing(mixing)
        self.bank = _bank(block_factory, templates, norm)
        self.layers, self.tasks, self.norm, self.mixing = layers, tasks, norm, mixing
        kinds = self.bank.templates
        like = self.bank.weight
        self._shared_layers = _chosen_layers(share_layers, layers)
        shared = torch.zeros(layers, dtype=torch.bool, device="cpu")
        shared[self._shared_layers] = True
        self.register_buffer("_shared", shared.to(like.device), persistent=False)
        self.fixed: list[list[int]] | None = None  # a signature per task
        if signature is not None:
            self._fix(signatures_of(signature, kinds, layers, tasks, generator))
        else:
            first = first_logits(init, mixing, tasks, layers, kinds, generator)
            self.logits = nn.Parameter(first.to(like))
        self._trial: tuple[int, Tensor] | None = None  # a task and the logits tried for it
        self._start(self.fixed[0] if self.fixed is not None else sequential(kinds, layers))
        block = self.bank.block
        if any(isinstance(module, nn.RNNBase) for module in block.modules()):
            raise TypeError("block_factory: expected no recurrent layers of torch, which keep their weights in a list")
        self.fused = stackable(block)
        if not self.fused and not _fuses(block) and type(block) not in _warned:
            _warned.add(type(block))
            warnings.warn(
                f"fastmod.nn.Compositional: {type(block).__name__} is not on the fused "
                "path; it runs unfused over the mixed weights, through torch.func.functional_call",
                RuntimeWarning,
                stacklevel=2,
            )

    def _fix(self, signatures: list[list[int]]) -> None:
        """Replace learned shares by fixed signatures, in a buffer so that the state dict has them."""
        for layer in self._shared_layers:
            for own in signatures:
                own[layer] = signatures[0][layer]
        self.fixed = signatures
        self.register_parameter("logits", None)
        self.register_buffer("templates_of", torch.tensor(signatures, device=self.bank.weight.device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = prefix + "templates_of"
        if self.fixed is None:
            super()._load_from_state_dict(state_dict, prefix, *rest)
            return
        state_dict.setdefault(key, self.templates_of)  # older state dicts lack it
        found = state_dict[key]
        errors: list[str] = rest[-1]
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < self.bank.templates:
            errors.append(f"{key}: expected templates 0 .. {self.bank.templates - 1}, got {found.tolist()}")
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.fixed = self.templates_of.tolist()

    def _start(self, templates: list[int]) -> None:
        """Initialise norms and buffers of each layer from the block of its first template."""
        starts = [self.bank.start(k) for k in templates]
        own = list(self.bank.left_out)
        if own:
            rows = torch.stack([torch.cat([start[n].flatten() for n in own]) for start in starts])  # [L, N]
            if self.norm == "per_task":
                rows = rows[:, None].repeat(1, self.tasks, 1)
            self.norm_weight = nn.Parameter(rows)
        else:
            self.register_parameter("norm_weight", None)
        self.state = nn.Module()
        self._buffers_of_block = [n for n in starts[0] if n not in self.bank.left_out]
        for n in self._buffers_of_block:
            first = torch.stack([start[n] for start in starts])[:, None]  # [L, 1, ...]
            self.state.register_buffer(key_of(n), first.repeat(1, self.tasks, *[1] * (first.dim() - 2)))

    # ---------------------------------------------------------------- forward

    def forward(
        self, x: Tensor, *extra: Any, task: int | None = 0, order: Sequence[int] | None = None, **named: Any
    ) -> Tensor:
        """Run one task, or all tasks if ``task`` is None.

        ``order``: the layers to run, in this order; for inference only. ``extra`` and ``named`` are passed to every
        block; with all tasks at once, tensors among them are ``[T, ...]``.
        """
        if self.fused and named:
            raise TypeError(f"forward() got an unexpected keyword argument {next(iter(named))!r}")
        if task is None:
            self._check_all(x)
            if self.fused:
                moved = [None if e is None else e.transpose(0, 1) for e in extra]
                return self.forward_stacked(x.transpose(0, 1), *moved, task=None, order=order).transpose(0, 1)
            return self._by_functional_call(None, x, extra, named, order)
        task = self.check_task(task)
        if self.fused:
            single = [None if e is None else e.unsqueeze(1) for e in extra]
            return self.forward_stacked(x.unsqueeze(1), *single, task=task, order=order).squeeze(1)
        return self._by_functional_call(task, x, extra, named, order)

    def forward_stacked(
        self, x: Tensor, *extra: Tensor | None, task: int | None = None, order: Sequence[int] | None = None
    ) -> Tensor:
        """Forward in the fused ops' layout, ``[B, T, ...]`` or ``[B, 1, ...]``, for nets that contain this one."""
        if not self.fused:
            raise TypeError(f"x: {type(self.bank.block).__name__} has no forward_stacked: use forward")
        layers = self._weights(task)
        where = slice(None) if task is None else slice(task, task + 1)
        block: Any = self.bank.block
        chains = hasattr(block, "forward_chained") and block.chains(x, *extra)
        last: Any = x
        for layer in self._in_order(order):
            buffers = {n: getattr(self.state, key_of(n))[layer, where] for n in self._buffers_of_block}
            if chains:
                last = block.forward_chained(last, layers[layer], buffers)
            else:
                last = block.forward_stacked(last, layers[layer], buffers, *extra)
        x = finish(last.branch, last.images, relu=False) if isinstance(last, Sum) else last
        if block.training:
            counters = [n for n in self._buffers_of_block if n.endswith("num_batches_tracked")]
            torch._foreach_add_([getattr(self.state, key_of(n))[:, where] for n in counters], 1)
        return x

    def _by_functional_call(
        self, task: int | None, x: Tensor, extra: tuple[Any, ...], named: dict[str, Any], order: Sequence[int] | None
    ) -> Tensor:
        layers = self._weights(task)
        if task is not None:
            single = [{n: w.squeeze(0) for n, w in layer.items()} for layer in layers]
            return self._chain(task, single, x, extra, named, order)
        apart = [{n: w.unbind(0) for n, w in layer.items()} for layer in layers]
        found = []
        for t in range(self.tasks):
            of_task = [{n: w[t] for n, w in layer.items()} for layer in apart]
            others = tuple(_at(e, t) for e in extra)
            found.append(self._chain(t, of_task, x[t], others, {n: _at(e, t) for n, e in named.items()}, order))
        return torch.stack(found)

    def _chain(
        self,
        task: int,
        layers: list[dict[str, Tensor]],
        x: Tensor,
        extra: tuple[Any, ...],
        named: dict[str, Any],
        order: Sequence[int] | None,
    ) -> Tensor:
        for layer in self._in_order(order):
            buffers = {n: getattr(self.state, key_of(n))[layer, task] for n in self._buffers_of_block}
            tensors = {**layers[layer], **buffers}
            x = torch.func.functional_call(self.bank.block, tensors, (x, *extra), named)
            for n, buffer in buffers.items():  # the block assigned a new buffer instead of writing in place
                if tensors[n] is not buffer:
                    buffer.copy_(tensors[n].detach())
        return x

    def _in_order(self, order: Sequence[int] | None) -> Sequence[int]:
        if order is None:
            return range(self.layers)
        if self.training:
            raise ValueError("order: expected None in training: layers are reordered for inference")
        for layer in order:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.layers:
                raise ValueError(f"order: expected layers 0 .. {self.layers - 1}, got {layer!r}")
        return order

    def _check_all(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor [T, B, ...], got {type(x).__name__}")
        if x.dim() < 2 or x.shape[0] != self.tasks:
            raise ValueError(f"x: expected [T, B, ...] with T = {self.tasks} for all tasks, got shape {list(x.shape)}")

    def check_task(self, task: Any) -> int:
        if isinstance(task, (Tensor, list, tuple)):
            raise TypeError(
                "task: expected an int, as a batch belongs to one task (for all tasks at once: x [T, B, ...] and "
                f"task=None), got {type(task).__name__}"
            )
        if isinstance(task, bool) or not isinstance(task, int):
            raise TypeError(f"task: expected an int, got {type(task).__name__}")
        if not 0 <= task < self.tasks:
            raise ValueError(f"task: expected 0 .. {self.tasks - 1}, got {task}")
        return task

    # ---------------------------------------------------------------- weights

    def _rows(self, task: int | None) -> Tensor:
        """The logits as used, with trials and shared layers applied: [L, T or 1, K]."""
        logits = self.logits
        assert logits is not None
        rows: Tensor = logits
        if self._trial is not None:
            at, tried = self._trial
            rows = torch.cat([rows[:at], tried[None].to(rows), rows[at + 1 :]])
        if self._shared_layers:
            rows = torch.where(self._shared[:, None], rows[:1], rows)  # type: ignore[index]
        if task is not None:
            rows = rows[task : task + 1]
        return rows.transpose(0, 1)

    def _weights(self, task: int | None) -> list[dict[str, Tensor]]:
        """The weights of every layer, by name in the block, each [T or 1, *shape]."""
        layers = self._by_signature(task) if self.fixed is not None else self._by_mixing(task)
        if self.norm_weight is None:
            return layers
        norms: Tensor = self.norm_weight
        count = self.tasks if task is None else 1
        if self.norm == "per_layer":
            norms = norms[:, None].expand(-1, count, -1)
        elif task is not None:
            norms = norms[:, task : task + 1]
        shapes = self.bank.left_out
        sizes = [math.prod(shape) for shape in shapes.values()]
        found = []
        for layer, row in zip(layers, norms.unbind(0), strict=True):
            parts = zip(shapes.items(), row.split(sizes, -1), strict=True)
            found.append({**layer, **{n: part.reshape((count, *shape)) for (n, shape), part in parts}})
        return found

    def _by_mixing(self, task: int | None) -> list[dict[str, Tensor]]:
        weights = mixed(self._rows(task), self.bank.weight, self.mixing)  # [L, T or 1, P]
        return [self.bank.split(row) for row in weights.unbind(0)]

    def _by_signature(self, task: int | None) -> list[dict[str, Tensor]]:
        """Views into the bank; a layer is copied only if its tasks use different templates."""
        assert self.fixed is not None
        rows = self.bank.weight.unbind(0)
        known: dict[tuple[int, ...], dict[str, Tensor]] = {}
        found = []
        for layer in range(self.layers):
            chosen = tuple(s[layer] for s in self.fixed) if task is None else (self.fixed[task][layer],)
            if chosen not in known:
                one = rows[chosen[0]][None]
                known[chosen] = self.bank.split(one if len(chosen) == 1 else torch.stack([rows[k] for k in chosen]))
            found.append(known[chosen])
        return found

    def weights(self, layer: int, task: int = 0) -> dict[str, Tensor]:
        """The weights of one layer, by name in the block."""
        task = self.check_task(task)
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.layers:
            raise ValueError(f"layer: expected 0 .. {self.layers - 1}, got {layer!r}")
        return {n: w.squeeze(0) for n, w in self._weights(task)[layer].items()}

    # ----------------------------------------------------------------- shares

    def mixture(self, task: int | None = None) -> Tensor:
        """Shares of the templates, [T, L, K] or [L, K] for one task; without gradients."""
        if self.fixed is not None:
            chosen = torch.tensor(self.fixed, device=self.bank.weight.device)
            xi = nn.functional.one_hot(chosen, self.bank.templates).to(self.bank.weight.dtype)
        else:
            xi = weights_of(self._rows(None).transpose(0, 1).detach().clone(), self.mixing)
        return xi if task is None else xi[self.check_task(task)]

    def signature(self, task: int = 0) -> list[int]:
        """The template with the largest share in each layer."""
        return [int(k) for k in self.mixture(self.check_task(task)).argmax(-1)]

    def sharing(self, task: int, other: int) -> Tensor:
        """How much two tasks share in each layer: ``sum_k min(xi, xi')`` [L]."""
        return torch.minimum(self.mixture(self.check_task(task)), self.mixture(self.check_task(other))).sum(-1)

    def harden(self) -> Compositional:
        """A copy of the net with its signatures fixed: one template per layer, so nothing is mixed."""
        found = copy.deepcopy(self)
        found._fix([self.signature(t) for t in range(self.tasks)])
        return found

    def cluster_penalty(self, squared: bool = False) -> Tensor:
        """``sum_k xi_k ||mixture - template_k||`` over all layers and tasks.

        It pulls each layer towards a single template and templates towards each other; see
        ``fastmod.ops.cluster_penalty``.
        """
        return cluster_penalty(self._learned("cluster_penalty"), self.bank.weight, squared=squared)

    def entropy_penalty(self) -> Tensor:
        """Entropy of the shares, summed over all layers and tasks."""
        return entropy_penalty(self._learned("entropy_penalty"))

    def _learned(self, what: str) -> Tensor:
        if self.fixed is not None or self.mixing != "softmax":
            raise ValueError(f"{what}: expected learned shares by softmax, got {self._kind()}")
        return self._rows(None)

    def _kind(self) -> str:
        return f"mixing={self.mixing!r}" if self.fixed is None else "a fixed signature"

    def extra_repr(self) -> str:
        return f"layers={self.layers}, tasks={self.tasks}, norm={self.norm!r}, {self._kind()}"


def _fuses(block: nn.Module) -> bool:
    """Fuse the block's convolutions with its batch norms; whether there were any."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in block.modules()):
        return False
    try:
        return bool(fuse_batch_norm_(block).fused)
    except Exception:  # torch.fx cannot trace every block; such a block runs unfused
        return False


def _bank(block_factory: Any, templates: int | None, norm: str) -> TemplateBank:
    if not isinstance(block_factory, TemplateBank):
        if templates is None:
            raise TypeError("templates: expected an int, got None")
        return TemplateBank(block_factory, templates, norm=norm == "mixed")
    if templates is not None and templates != block_factory.templates:
        raise ValueError(f"templates: expected the bank's {block_factory.templates}, got {templates}")
    if block_factory.norm != (norm == "mixed"):
        raise ValueError(f"block_factory: expected a bank made with norm={norm == 'mixed'} for norm={norm!r}")
    return block_factory


def _chosen_layers(layers: int | Sequence[int], count: int) -> list[int]:
    if isinstance(layers, int) and not isinstance(layers, bool):
        if not 0 <= layers <= count:
            raise ValueError(f"share_layers: expected 0 .. {count} layers, got {layers}")
        return list(range(layers))
    if not isinstance(layers, (list, tuple, range)):
        raise TypeError(f"share_layers: expected an int or a list of layers, got {type(layers).__name__}")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < count:
            raise ValueError(f"share_layers: expected layers 0 .. {count - 1}, got {layer!r}")
    return list(layers)


def _at(argument: Any, task: int) -> Any:
    """One task's part of a further argument."""
    return argument[task] if isinstance(argument, Tensor) else argument


def logit_groups(model: nn.Module, lr: float, factor: float = 1.0) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: mixture logits at ``factor * lr``, all others at ``lr``.

    >>> optimizer = torch.optim.RMSprop(fastmod.nn.logit_groups(net, 0.02, factor=10), momentum=0.9)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    found = [m.logits for m in model.modules() if isinstance(m, Compositional) and m.logits is not None]
    found += [p for n, p in model.named_parameters() if n.endswith(COMPOSED_LOGITS)]
    if not found:
        raise ValueError(f"model: expected mixtures with logits, got {type(model).__name__} without")
    known = {id(p) for p in found}
    others = [p for p in model.parameters() if id(p) not in known]
    return [{"params": others, "lr": lr}, {"params": found, "lr": factor * lr}]
