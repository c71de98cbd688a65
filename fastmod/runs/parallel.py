"""One trial on several processes: ``torchrun --nproc-per-node N -m fastmod study ...``.

Every process holds the whole model, makes the whole batch from the same seed, and trains on its part of it; gradients
are averaged before each step. So N processes compute what one computes with the same batch, up to rounding, if the loss
is a mean over the batch and the model draws no noise and has no batch norm: noise differs between processes, and the
statistics of a batch are those of a part, as in DistributedDataParallel. Only the first process writes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmod.runs.config import StudyError

T = TypeVar("T")


class Alone:
    """A process group of one, which has nothing to agree on."""

    rank, size = 0, 1

    def part(self, batch: tuple[Tensor, ...], dims: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        """The part ``[B / size, ...]`` of a batch, tensors ``[B, ...]``, that this process trains on. ``dims``: the
        position of B, tensor by tensor; the first where it says nothing."""
        return batch

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients over all processes."""

    def mean(self, value: Tensor) -> Tensor:
        return value

    def noise(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the generators of torch differ between processes."""
        return contextlib.nullcontext()

    def same(self, value: T) -> T:
        """The value of the first process."""
        return value

    def same_buffers(self, model: nn.Module) -> None: ...

    def any(self, flag: bool) -> bool:
        return flag


class Group(Alone):
    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def part(self, batch: tuple[Tensor, ...], dims: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        pairs = [(tensor, dims[i] if i < len(dims) else 0) for i, tensor in enumerate(batch)]
        lengths = [tensor.shape[dim] for tensor, dim in pairs if tensor.dim()]  # a scalar is about the whole step
        unsaid = {len(tensor) for tensor in batch[len(dims) :] if tensor.dim()}  # those are to be of one batch
        if not lengths or len(unsaid) > 1 or any(length % self.size for length in lengths):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in batch)
            raise StudyError(f"batch: expected a multiple of the {self.size} processes, got tensors {shapes}")
        return tuple(tensor.chunk(self.size, dim)[self.rank] if tensor.dim() else tensor for tensor, dim in pairs)

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for several in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in several])  # one message
            dist.all_reduce(flat)
            parts = flat.div_(self.size).split([grad.numel() for grad in several])
            for grad, part in zip(several, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def mean(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    @contextlib.contextmanager
    def noise(self) -> Iterator[None]:
        # Drawn from the common generator, whose state after it is the same everywhere, and in every checkpoint.
        seed = int(torch.randint(2**62, ()))
        state = torch.get_rng_state()
        torch.manual_seed(seed + self.rank)
        try:
            yield
        finally:
            torch.set_rng_state(state)

    def same(self, value: T) -> T:
        box: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box)
        return box[0]

    def same_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)

    def any(self, flag: bool) -> bool:
        found = torch.tensor(float(flag), device=_device())
        dist.all_reduce(found)
        return bool(found)


processes: Alone = Alone()


def launched() -> bool:
    """Whether torchrun started this process, and not alone."""
    return dist.is_available() and dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def joined() -> Iterator[Alone]:
    """The process group that torchrun started; without torchrun, a group of one."""
    global processes
    if not launched():
        yield processes
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Imported after this, as an optimiser does, it would keep the group alive in its default arguments, and with it
    # gloo's threads: one that is still at work when the interpreter ends aborts the process.
    importlib.import_module("torch.distributed.nn")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    before, processes = processes, Group()
    try:
        yield processes
        dist.barrier()  # nobody hangs up while another is still reading
    finally:
        processes = before
        dist.destroy_process_group()


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


class Silent:
    """The ledger of every process but the first."""

    def state(self) -> dict[str, Any] | None:
        return None

    def add(self, step: int, metrics: dict[str, float]) -> None: ...

    def save(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...
