"""Adding and removing tasks and templates of ``Compositional``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastmod.nn import _parts
from fastmod.nn._undone import undone_on_error
from fastmod.nn.mixing import logits_of
from fastmod.nn.signatures import first_logits
from fastmod.nn.template_bank import TemplateBank


class Changeable(nn.Module):
    """Base class of ``Compositional``, which sets the attributes declared here."""

    bank: TemplateBank
    layers: int
    tasks: int
    norm: str
    mixing: str
    fixed: list[list[int]] | None
    logits: nn.Parameter | None
    norm_weight: nn.Parameter | None
    state: nn.Module
    _buffers_of_block: list[str]
    _trial: tuple[int, Tensor] | None

    if TYPE_CHECKING:

        def check_task(self, task: Any) -> int: ...

        def mixture(self, task: int | None = None) -> Tensor: ...

        def _rows(self, task: int | None) -> Tensor: ...

        def _fix(self, signatures: list[list[int]]) -> None: ...

    def add_task(
        self,
        init: int | str | Sequence[float] = "uniform",
        *,
        accuracies: Sequence[float] | None = None,
        loss: Callable[[], Tensor] | None = None,
        steps: int = 100,
        lr: float = 0.1,
    ) -> int:
        """Add a task and return its number. Parameters are replaced, so make a new optimiser.

        Args:
            init: initial shares: the number of a task to copy, ``"uniform"`` (random), or an interpolation between
                tasks, given as coefficients, ``"accuracy"`` or ``"learned"``.
            accuracies: for ``"accuracy"``: how well each task's shares do on the new data; coefficients are
                proportional to them.
            loss: for ``"learned"``: a function without arguments that runs the net on the new task (number
                ``tasks - 1``); ``steps`` steps of Adam at ``lr`` minimise it over the coefficients.

        Statistics and per-task scales and shifts are copied from the task with the largest coefficient.
        """
        old = self.tasks
        coefficients = self.coefficients(init, accuracies, loss, steps, lr)
        source = 0 if coefficients is None else int(coefficients.argmax())
        with undone_on_error(self):
            self._add_task(source, coefficients)
            if init == "learned":
                assert loss is not None
                self._learn(old, loss, steps, lr)
        return old

    def _add_task(self, source: int, coefficients: Tensor | None) -> None:
        if self.fixed is not None:
            self._fix([*self.fixed, list(self.fixed[source])])
        else:
            self._add_logits(coefficients)
        if self.norm_weight is not None and self.norm == "per_task":
            values = self.norm_weight.detach()
            self.norm_weight = _renewed(self.norm_weight, torch.cat([values, values[:, source : source + 1]], 1))
        for n in self._buffers_of_block:
            buffer = getattr(self.state, key_of(n))
            self.state._buffers[key_of(n)] = torch.cat([buffer, buffer[:, source : source + 1]], 1)
        self.tasks += 1

    def coefficients(
        self,
        init: int | str | Sequence[float],
        accuracies: Sequence[float] | None,
        loss: Callable[[], Tensor] | None,
        steps: int = 1,
        lr: float = 1.0,
    ) -> Tensor | None:
        """Check the arguments of :meth:`add_task`; a coefficient per existing task, or None for random shares."""
        if self.fixed is not None and (isinstance(init, bool) or not isinstance(init, int)):
            raise ValueError(f"init: expected the number of a task, as the net has fixed signatures, got {init!r}")
        _parts.positive_sizes(steps=steps)
        if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
            raise ValueError(f"lr: expected a finite number > 0, got {lr!r}")
        if isinstance(init, str):
            if init == "uniform":
                return None
            if init == "learned":
                if not callable(loss):
                    raise TypeError(f"loss: expected a function for init='learned', got {type(loss).__name__}")
                return torch.full((self.tasks,), 1 / self.tasks)
            if init != "accuracy":
                raise ValueError(
                    f"init: expected a task, coefficients, 'uniform', 'accuracy' or 'learned', got {init!r}"
                )
            return self._normed("accuracies", accuracies)
        if isinstance(init, (list, tuple, Tensor)):
            return self._normed("init", init)
        return nn.functional.one_hot(torch.tensor(self.check_task(init)), self.tasks).float()

    def _normed(self, name: str, values: Any) -> Tensor:
        found = torch.as_tensor([] if values is None else values, dtype=torch.float64)
        if found.shape != (self.tasks,) or bool((found < 0).any()) or not 0 < float(found.sum()) < math.inf:
            raise ValueError(f"{name}: expected a number >= 0 for each of {self.tasks} tasks, got {values}")
        return found / found.sum()

    def _add_logits(self, coefficients: Tensor | None) -> None:
        assert self.logits is not None
        values = self.logits.detach()
        if coefficients is None:
            new = first_logits("uniform", self.mixing, 2, self.layers, self.bank.templates)[0].to(values)
        elif int((coefficients > 0).sum()) == 1:
            new = self._rows(int(coefficients.argmax())).detach()[:, 0]
        else:
            new = logits_of(torch.einsum("t,tlk->lk", coefficients.to(values), self.mixture()), self.mixing)
        self.logits = _renewed(self.logits, torch.cat([values, new[None]]))

    def _learn(self, task: int, loss: Callable[[], Tensor], steps: int, lr: float) -> None:
        xi = self.mixture()[:task]  # [T, L, K]
        chosen = xi.new_zeros(task, requires_grad=True)
        optimizer = torch.optim.Adam([chosen], lr)
        try:
            for _ in range(steps):
                with torch.enable_grad():
                    tried = torch.einsum("t,tlk->lk", chosen.softmax(0), xi)
                    self._trial = (task, logits_of(tried, self.mixing))
                    value = loss()
                    if not isinstance(value, Tensor):
                        raise TypeError(f"loss: expected a function that returns a tensor, got {type(value).__name__}")
                    grad = torch.autograd.grad(value, chosen, allow_unused=True)[0] if value.requires_grad else None
                if grad is None:
                    raise ValueError(f"loss: expected the loss of the new task, {task}, got one that does not use it")
                chosen.grad = grad
                optimizer.step()
        finally:
            self._trial = None
        with torch.no_grad():
            found = torch.einsum("t,tlk->lk", chosen.softmax(0), xi)
            assert self.logits is not None
            self.logits[task] = logits_of(found, self.mixing)

    @torch.no_grad()
    def copy_statistics(self, source: int, target: int) -> None:
        """Copy one task's buffers to another, such as batch-norm statistics of a source to a new domain."""
        source, target = self.check_task(source), self.check_task(target)
        for buffer in self.state.buffers():
            buffer[:, target] = buffer[:, source]

    def add_template(self, init: int | nn.Module | Callable[[], nn.Module], share: float = 0.01) -> int:
        """Add a template, a copy of template ``init`` or of a block's weights, and return its number.

        With softmax its share is ``share`` in every layer, otherwise 0. Parameters are replaced, so make a new
        optimiser.
        """
        if not 0 < share < 1:
            raise ValueError(f"share: expected a number between 0 and 1, got {share}")
        number = self.bank.add_template(init)
        if self.logits is not None:
            values = self.logits.detach()
            new = torch.zeros_like(values[..., :1])
            if self.mixing == "softmax":
                new = values.logsumexp(-1, keepdim=True) + math.log(share / (1 - share))
            self.logits = _renewed(self.logits, torch.cat([values, new], -1))
        return number

    def remove_template(self, index: int) -> None:
        """Remove a template; with softmax its share goes to the others in proportion to theirs."""
        self.bank.check_index(index)
        if self.fixed is not None and any(index in signature for signature in self.fixed):
            raise ValueError(f"template: expected one that no signature uses, got {index}")
        self.bank.remove_template(index)
        if self.fixed is not None:
            self._fix([[k - (k > index) for k in signature] for signature in self.fixed])
        if self.logits is not None:
            values = self.logits.detach()
            self.logits = _renewed(self.logits, torch.cat([values[..., :index], values[..., index + 1 :]], -1))


def _renewed(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def key_of(name: str) -> str:
    """Name of a block's buffer in ``state``; torch allows no dots in names."""
    return name.replace(".", "/")
