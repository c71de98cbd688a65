"""``MaskedModel``: masks over the weights of any module."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fastmod._private import is_compiled
from fastmod.masks import inputs, parts, sampling
from fastmod.masks.rebind import Rebinding, original
from fastmod.masks.sets import Masks, check_masks
from fastmod.masks.unused import find_unused
from fastmod.ops import _checks

_REDUCED = (torch.bfloat16, torch.float16)


class MaskedModel(nn.Module):
    """A module under learned weight masks; its code and weights are not changed.

    In training every forward samples ``samples`` new masks, and part s of the batch is computed under mask s; in
    evaluation a weight is kept where its logit is above 0. ``parameters()`` and ``state_dict()`` hold the logits only.

    The net runs as it is written, over masked weights: later changes of it (``eval()``, attributes, hooks) take effect.
    All parts run together where ``torch.func.vmap`` can follow the net, with fused ops for Linear, Conv1d, Conv2d,
    GPT-2's Conv1D and Embedding; otherwise one after the other, of which a warning tells once. Other methods of the
    net, such as ``generate``, can be called on the MaskedModel: they run under the thresholded masks.

    Outputs are joined along the batch; numbers and tensors without one, such as a mean loss, are averaged over the
    examples; objects that hold tensors, such as a cache of keys and values, are left out (None). A batch that is not
    a multiple of ``samples`` is cut into parts whose sizes differ by one.

    Args:
        model: the module to mask. ``train()`` and ``eval()`` are passed on to it; batch norm keeps its statistics. A
            module returned by ``torch.compile`` is unwrapped: compile the MaskedModel instead.
        samples: masks per batch, S.
        init: initial value of every logit; 2 keeps a weight with probability 0.88. Logits are at least fp32.
        tau: temperature of the relaxed masks, which give the logits their gradient.
        mask_bias: whether biases have masks as well.
        exclude: modules, or types of modules, that get no masks, including everything inside them.
        train_weights: also give gradients to the weights of the model; otherwise they are frozen and cost nothing.
        batch_dim: dimension of the batch in the input. Tensors of another size there, such as ``position_ids [1, T]``,
            are shared by all parts.
        in_dims: exceptions from ``batch_dim`` by the name or position of an argument: a dimension, or None for an
            argument without a batch.
        unused: ``"error"`` or ``"warn"`` if masks have no effect in the first training forward.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: int = 4,
        init: float = 2.0,
        tau: float = 1.0,
        mask_bias: bool = False,
        exclude: Sequence[type[nn.Module] | nn.Module] = (nn.Embedding,),
        train_weights: bool = False,
        batch_dim: int = 0,
        *,
        in_dims: Mapping[str | int, int | None] | None = None,
        unused: str = "error",
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        if batch_dim not in (0, 1):
            raise ValueError(f"batch_dim: expected 0 or 1, got {batch_dim!r}")
        if unused not in ("error", "warn"):
            raise ValueError(f"unused: expected 'error' or 'warn', got {unused!r}")
        if is_compiled(model):
            warnings.warn(
                "fastmod.masks: the model was compiled by torch.compile for its own weights; its masked form runs "
                "uncompiled. Compile the MaskedModel instead",
                RuntimeWarning,
                stacklevel=2,
            )
            model = original(model)
        self._samples, self._tau = _checks.sample_count(samples), _checks.float_tau(tau)
        self._places = inputs.Places(batch_dim, dict(in_dims or {}))
        inputs.check_batch_dim(model, batch_dim)
        self._train_weights, self._unused = train_weights, unused
        chosen = masked_parameters(model, mask_bias, exclude)
        self._names = list(chosen)
        noises = sampling.noise_of(model, self._names)
        self.logits = nn.ParameterDict(
            {key_of(name): nn.Parameter(first_logits(p, init, noises[name].transposed)) for name, p in chosen.items()}
        )
        # In a tuple: a registered submodule would add its weights to parameters() and state_dict().
        self._held: tuple[nn.Module] = (model,)
        self._forget()

    @property
    def model(self) -> nn.Module:
        """The wrapped module, without masks."""
        return self._held[0]

    def named_logits(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Logits by the name of their parameter in the wrapped module."""
        for name in self._names:
            yield name, self.logits[key_of(name)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fixed = self._fixed()
        if not self.training or fixed is not None:
            return self._whole(fixed, lambda net: net(*args, **kwargs))
        return self._by_parts(args, kwargs)

    def penalty(self) -> Tensor:
        """Sum of all logits: the regulariser, to be scaled by ``beta / batch``."""
        return torch.stack([logits.sum() for logits in self.logits.values()]).sum()

    def hard_masks(self) -> dict[str, Tensor]:
        """Parameter name -> bool: the weights whose logit is above 0."""
        return {name: logits.detach() > 0 for name, logits in self.named_logits()}

    @contextlib.contextmanager
    def using(self, masks: Masks) -> Iterator[MaskedModel]:
        """Use these masks within the block, in this thread; parameters that they do not name are not masked."""
        check_masks(masks, self.model)
        me = threading.get_ident()
        before, self._using[me] = self._using.get(me), dict(masks)
        try:
            yield self
        finally:
            if before is None:
                del self._using[me]
            else:
                self._using[me] = before

    def train(self, mode: bool = True) -> MaskedModel:
        super().train(mode)
        self.model.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> MaskedModel:
        def at_least_fp32(value: Tensor) -> Tensor:
            moved = fn(value)
            return value.to(moved.device) if moved.dtype in _REDUCED and value.dtype not in _REDUCED else moved

        super()._apply(at_least_fp32, recurse)
        self.model._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of the net; its methods run under the thresholded masks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__.get("_held")
            if held is None or name.startswith("_"):
                raise
        value = getattr(held[0], name)
        if getattr(value, "__self__", None) is not held[0]:
            return value
        return functools.partial(self._method, name)

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._whole(self._fixed(), lambda net: getattr(net, name)(*args, **kwargs))

    # Masked weights are derived from the rest: copies and pickles compute their own.
    def __getstate__(self) -> dict[str, Any]:
        own = ("_using", "_cached", "_axes", "_noises", "_parameters_of_net")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        self._using: dict[int, dict[str, Tensor]] = {}  # thread -> masks used instead of sampled or thresholded ones
        self._cached: dict[str, _Cached] = {}
        self._axes: dict[tuple[int | None, ...], list[int | None]] = {}
        self._together = sampling.can_run_together(self.model)
        self._checked = False
        self._noises = sampling.noise_of(self.model, self._names)
        self._parameters_of_net = sampling.ParameterNames(self.model)

    def _fixed(self) -> dict[str, Tensor] | None:
        return self._using.get(threading.get_ident()) if self._using else None

    # ------------------------------------------------------------------ one set of masks

    def _whole(self, fixed: Masks | None, call: Callable[[nn.Module], Any]) -> Any:
        """Run the whole batch under given or thresholded masks."""
        if torch.compiler.is_compiling():
            weights = {name: self._masked(name, p, fixed) for name, p in self.model.named_parameters()}
            with self._frozen_statistics():
                return call(_Functional(self.model, weights))  # type: ignore[arg-type]

        def substitute(_: nn.Module | None, __: str, parameter: nn.Parameter) -> Tensor:
            name = self._parameters_of_net.name(parameter)
            return parameter if name is None else self._masked(name, parameter, fixed)

        copy = Rebinding(self.model, substitute, frozen_statistics=not self._train_weights)
        try:
            return call(copy.net)
        finally:
            copy.write_back()

    def _masked(self, name: str, parameter: Tensor, fixed: Masks | None) -> Tensor:
        """A parameter under its mask; cached until one of the two changes, unless a gradient is needed."""
        weight = parameter if self._train_weights else parameter.detach()
        logits = self._logit(name)
        mask = (fixed.get(name) if fixed is not None else logits) if logits is not None or fixed is not None else None
        if mask is None:
            return weight
        wanted = weight.requires_grad and torch.is_grad_enabled()
        if wanted or torch.compiler.is_compiling() or parameter.is_inference() or mask.is_inference():
            return weight * _kept(mask)
        known = self._cached.get(name)
        if known is None or not known.is_of(parameter, mask):
            known = self._cached[name] = _Cached(parameter, mask, weight * _kept(mask))
        return known.result

    def _logit(self, name: str) -> Tensor | None:
        key = key_of(name)
        return self.logits.get(key)

    @contextlib.contextmanager
    def _frozen_statistics(self) -> Iterator[None]:
        """Batch norm of a frozen net uses its running statistics even in training."""
        live = [] if self._train_weights else _live_norms(self.model)
        for module in live:
            module.training = False
        try:
            yield
        finally:
            for module in live:
                module.training = True

    # ---------------------------------------------------------------- one mask for each part

    def _by_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = inputs.Batch(self._places, self.model, args, kwargs, self._samples)
        device = next((logits.device for _, logits in self.named_logits()), torch.device("cpu"))
        # On the device, so that nothing waits for it and a CUDA graph draws new masks at every replay.
        seeds = torch.randint(0, 2**63 - 1, (max(len(self._names), 1),), dtype=torch.int64, device=device).unbind()
        run = sampling.Run(
            self.model,
            self._parameters_of_net,
            self._noises,
            dict(self.named_logits()),
            seeds,
            self._samples,
            self._tau,
            self._train_weights,
        )
        if torch.compiler.is_compiling():
            with self._frozen_statistics():
                outputs = run.functional(batch)
            return self._joined(outputs, batch)
        if self._together and batch.even and not run.is_hooked():
            found = self._try_together(run, batch)
            if found is not None:
                return found
        outputs, copies = run.one_by_one(batch)
        self._check_unused(outputs[0], copies)
        return self._joined(outputs, batch)

    def _try_together(self, run: sampling.Run, batch: inputs.Batch) -> Any:
        """All parts at once; None if the net cannot run so, which is remembered once the other way worked."""
        before = torch.get_rng_state()
        try:
            stacked, structure, copy = run.together(batch)
        except Exception as error:
            torch.set_rng_state(before)
            outputs, copies = run.one_by_one(batch)  # an error of the net itself is raised again here
            self._together = False
            reason = str(error).strip().splitlines()
            warnings.warn(
                f"fastmod.masks: {type(self.model).__name__} runs its {self._samples} mask samples one after the "
                f"other, not together: {type(error).__name__}: {reason[0] if reason else ''}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._check_unused(outputs[0], copies)
            return self._joined(outputs, batch)
        self._check_unused(stacked, [copy])
        axes = self._axes_of([value[0] if isinstance(value, Tensor) else value for value in stacked], batch)
        found = iter(parts.join_stacked(value, axis) for value, axis in zip(stacked, axes, strict=True))
        return parts.rebuilt(structure, lambda _: next(found))

    def _joined(self, outputs: list[Any], batch: inputs.Batch) -> Any:
        if len(outputs) == 1:
            return outputs[0]
        flat = [parts.leaves(output) for output in outputs]
        if any(len(other) != len(flat[0]) for other in flat[1:]):
            raise ValueError(f"output: expected the same structure for every part, got {[len(f) for f in flat]} values")
        axes = self._axes_of(flat[0], batch)
        found = iter(
            parts.join(values, axis, batch.sizes) for values, axis in zip(zip(*flat, strict=True), axes, strict=True)
        )
        return parts.rebuilt(outputs[0], lambda _: next(found))

    def _axes_of(self, values: Sequence[Any], batch: inputs.Batch) -> list[int | None]:
        """The batch dimension of each output of a part. Where sizes are ambiguous, the net is run on the whole batch:
        it is the dimension that grows."""
        rows, batch_dim = batch.sizes[0], self._places.batch_dim
        axes = [parts.certain_axis(v.shape, rows, batch_dim) if isinstance(v, Tensor) else None for v in values]
        doubtful = [
            isinstance(v, Tensor) and v.dim() > 0 and axis is None for v, axis in zip(values, axes, strict=True)
        ]
        if not any(doubtful):
            return axes
        key = tuple(v.dim() if isinstance(v, Tensor) else None for v in values)
        known = self._axes.get(key)
        if known is None:
            with torch.no_grad(), _same_rng():
                whole = parts.leaves(self._whole(None, lambda net: net(*batch.args, **batch.kwargs)))
            known = [
                parts.axis_between(small.shape, large.shape, rows, batch.size) if isinstance(small, Tensor) else None
                for small, large in zip(values, whole, strict=True)
            ]
            self._axes[key] = known
        return [known[i] if doubt else axes[i] for i, doubt in enumerate(doubtful)]

    def _check_unused(self, output: Any, copies: Sequence[Rebinding]) -> None:
        """After the first forward with gradients: nothing else would reveal a mask without effect."""
        if self._checked or not torch.is_grad_enabled():
            return
        unused = find_unused(dict(self.named_logits()), [output, *(copy.written() for copy in copies)])
        if unused:
            shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
            message = (
                f"masks without effect: {shown}: the output does not depend on these weights, or reaches them in a way "
                "that masks cannot follow. Leave them out with `exclude`, or go on with `unused='warn'`"
            )
            if self._unused == "error":
                raise RuntimeError(message)
            warnings.warn(f"fastmod.masks: {message}", RuntimeWarning, stacklevel=2)
        self._checked = True


class _Functional:
    """A net called with other parameters, in a form that torch.compile can trace."""

    def __init__(self, net: nn.Module, weights: dict[str, Tensor]) -> None:
        self._net, self._weights = net, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return sampling.call_with(self._net, self._weights, args, kwargs)


def masked_parameters(
    model: nn.Module, mask_bias: bool, exclude: Sequence[type[nn.Module] | nn.Module]
) -> dict[str, nn.Parameter]:
    """The parameters that get masks, by name."""
    types = tuple(item for item in exclude if isinstance(item, type))
    instances = {id(module) for item in exclude if isinstance(item, nn.Module) for module in item.modules()}
    excluded = [name for name, module in model.named_modules() if id(module) in instances or isinstance(module, types)]
    chosen = {
        name: value
        for name, value in model.named_parameters()
        if value.is_floating_point() and (mask_bias or not is_bias(name)) and not is_inside(name, excluded)
    }
    if not chosen:
        raise ValueError("model: expected weights to mask, found none outside of `exclude`")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(is_inside(name, [path]) for name in chosen):
            raise TypeError(
                f"model: {path or 'it'} is a ScriptModule, whose weights cannot be masked; wrap the nn.Module that it "
                "was made from, or name it in `exclude`"
            )
    return chosen


def first_logits(parameter: Tensor, init: float, transposed: bool) -> Tensor:
    """In fp32 at least: steps of 1e-3 do not change a bf16 logit of 2. ``transposed``: a matrix stored as its
    transpose, which the fused op reads, and whose gradient it writes, without a copy."""
    dtype = torch.float32 if parameter.dtype in _REDUCED else parameter.dtype
    found = torch.full_like(parameter, init, dtype=dtype)
    return found.t().contiguous().t() if transposed else found


def key_of(name: str) -> str:
    """The name of a parameter as a key of a ParameterDict, which allows no dots."""
    return name.replace(".", "/")


def is_bias(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("bias") or last.endswith("bias")


def is_inside(name: str, paths: Sequence[str]) -> bool:
    """Whether a parameter belongs to one of the modules at ``paths`` (the model itself is at ``""``)."""
    return any(not path or name.startswith(path + ".") for path in paths)


def _live_norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats and m.training]


@contextlib.contextmanager
def _same_rng() -> Iterator[None]:
    """Restores the generator afterwards; does nothing in a compiled graph, which cannot keep its state."""
    if torch.compiler.is_compiling():
        yield
        return
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _kept(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask.detach() > 0


class _Cached:
    """A masked weight, and what it was computed from. As in autograd, writes through ``.data`` do not count as
    changes."""

    def __init__(self, parameter: Tensor, mask: Tensor, result: Tensor) -> None:
        self._of, self.result = (parameter, mask), result.detach()
        self._state = [(tensor._version, tensor.data_ptr()) for tensor in self._of]

    def is_of(self, parameter: Tensor, mask: Tensor) -> bool:
        return (
            self._of[0] is parameter
            and self._of[1] is mask
            and [(tensor._version, tensor.data_ptr()) for tensor in self._of] == self._state
        )
