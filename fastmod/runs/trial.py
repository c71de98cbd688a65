"""One model in training, and everything of it that a checkpoint must hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastmod.optim import Adam
from fastmod.runs import parallel
from fastmod.runs.config import Config, StudyError


class Trial(ABC):
    """A model, its optimiser and its position in the data.

    The trial of a study says how data are made (``batches``), what the loss is and how to evaluate. Data are a function
    of (seed, step), so the position in the data is the step. State beyond model, optimiser and step goes into
    ``extra``, which holds numbers, text, tensors, and lists and dicts of these.
    """

    #: The dimension of the examples in each tensor of a batch; the first one for tensors beyond these.
    batch_dims: ClassVar[tuple[int, ...]] = ()

    def __init__(self, config: Config, name: str, model: nn.Module, seed: int, device: torch.device) -> None:
        self.config, self.name, self.seed, self.device = config, name, seed, device
        self.model = model.to(device)
        self.optimizer = self.make_optimizer()
        self.step = 0
        self.seconds = 0.0
        self.extra: dict[str, Any] = {}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser of the new model; its state is part of the checkpoint. By default Adam, with clipped
        gradients."""
        return Adam(self.model.parameters(), self.config.lr, max_norm=self.config.clip)

    def nets(self) -> list[nn.Module]:
        """The modules whose buffers the processes of a group agree on before an evaluation."""
        return [self.model]

    @property
    def steps(self) -> int:
        """The number of steps to do; may change as the trial learns more."""
        return self.config.steps

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    @property
    def due(self) -> bool:
        """Whether to evaluate now, between two chunks; at the end that is done in any case."""
        return self.step % self.config.evaluate_every == 0

    @abstractmethod
    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Data of the next ``chunk`` steps (or fewer), each tensor ``[chunk, ...]``, on the training device."""

    @abstractmethod
    def loss(self, *batch: Tensor) -> Tensor:
        """Scalar loss of one step, the range penalty included."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics; called without gradients and with the model in eval mode."""

    def after_evaluation(self, metrics: dict[str, float]) -> None:  # noqa: B027 - optional
        """Where a trial with several stages moves to the next."""

    def result(self, last: dict[str, float]) -> dict[str, Any]:
        """The values of a finished trial for the table; by default its last metrics."""
        return last

    @property
    def side_by_side(self) -> bool:
        """Whether trials of other seeds can train in one batched step with this one: of what
        belongs to this trial, ``loss`` reads the model only; it draws no noise, and :func:`torch.vmap` can map it."""
        return False

    def inspected(self, blocks: Tensor) -> Tensor:
        """A study's example input as the model meets it in training."""
        return blocks

    @property
    def inspection_note(self) -> str:
        """What else ``fastmod inspect`` should say of the names of input blocks."""
        return ""

    def masks(self) -> dict[str, dict[str, Tensor]]:
        """Task -> parameter -> bool, of a trial that learns masks."""
        return {}

    def chunk(self) -> Tensor:
        """Train for ``config.chunk`` steps; the mean loss, still on the device so that nothing waits for it."""
        begin = self.step
        data = self.batches(self.generator("data", self.step))
        total = torch.zeros((), device=self.device)
        processes = parallel.processes
        with processes.noise():
            for batch in zip(*data, strict=True):
                loss = self.loss(*processes.part(batch, self.batch_dims))
                loss.backward()
                processes.average(self.optimizer)
                self.optimizer.step()
                self.optimizer.zero_grad()
                total += loss.detach()
                self.step += 1
        return processes.mean(total / (self.step - begin))

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        self.model.eval()
        try:
            return self.evaluate()
        finally:
            self.model.train()

    def generator(self, purpose: str, position: int = 0) -> torch.Generator:
        """A generator of its own for each purpose and position: nothing to store, nothing to rewind."""
        mixed = (self.seed * 1_000_003 + position) * 257 + sum(purpose.encode())
        return torch.Generator(self.device).manual_seed(mixed % 2**63)

    def random_state(self) -> dict[str, Tensor | None]:
        """The states of torch's generators: that of the CPU, and that of the device."""
        cuda = self.device.type == "cuda"
        return {
            "generator": torch.get_rng_state(),
            "device_generator": torch.cuda.get_rng_state(self.device) if cuda else None,
        }

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["generator"])
        if state["device_generator"] is not None:
            torch.cuda.set_rng_state(state["device_generator"], self.device)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **self.random_state(),
            "extra": self.extra,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise StudyError(f"the checkpoint does not fit the model: {str(error).splitlines()[0]}") from None
        self.step, self.seconds, self.extra = state["step"], state["seconds"], state["extra"]
        self.set_random_state(state)
