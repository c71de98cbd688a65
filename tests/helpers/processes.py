"""Two processes that talk to one another by gloo."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Before there is a group: imported later, as an optimiser does, it would keep that alive in its default arguments, and
# with it threads that may still be at work when the interpreter ends, which aborts the process.
import torch.distributed.nn


def as_one_of_two(rank: int, folder: str, function: Callable[..., None], *arguments: Any) -> None:
    """``function(rank, folder, *arguments)`` in one of two processes, for ``torch.multiprocessing.spawn``.

    A function, not a `with`: a DistributedDataParallel dies with its frame, before the group is let go. Were it the
    last to hold the group, its destructor would keep the GIL and wait for a thread of gloo's that waits for the GIL.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    function(rank, folder, *arguments)
    gc.collect()
    dist.barrier()  # nobody hangs up while the other is still reading
    dist.destroy_process_group()
