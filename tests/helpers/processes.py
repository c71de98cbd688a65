"""Two processes that talk to one another by gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

# Before there is a group: imported later, as an optimiser does, it would keep that alive in its default arguments, and
# with it threads that may still be at work when the interpreter ends, which aborts the process.
import torch.distributed.nn

from fastmod.runs.parallel import wait_for_all


@contextlib.contextmanager
def one_of_two(rank: int, folder: str) -> Iterator[None]:
    """Inside, this process is one of two that meet in a file of ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    yield
    wait_for_all()
    dist.destroy_process_group()
