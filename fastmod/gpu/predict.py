"""Predicted times of every op at the papers' shapes: launches times their stated cost, plus the larger of two roofs.

Bytes are counted as if every input were read and every result written once, flops are those of the matrix products, and
both are the same for fastmod and plain PyTorch: only the number of launches differs between the predictions. No GPU
was involved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastmod.gpu import launch_table, shapes
from fastmod.gpu.machines import GRAPH_LAUNCH, HOST_LAUNCH, MACHINES, MULTIPROCESSORS, Machine, resident_blocks
from fastmod.gpu.manifest import Kernel


class Prediction(NamedTuple):
    """Forward and backward of one op; times in microseconds."""

    op: str
    shape: str
    dtype: str
    machine: str
    launches: int
    eager_launches: int | None
    bytes: int
    flops: int
    memory: float  # the bytes at full bandwidth
    compute: float  # the flops at the peak of the dtype
    binds: str  # launches, memory or compute: what takes the most time in a graph
    fastmod: float
    fastmod_graph: float
    eager: float | None
    eager_graph: float | None


def predictions(ops: Sequence[str] = (), machines: Iterable[Machine] = MACHINES) -> list[Prediction]:
    found = []
    machines = list(machines)
    for row in launch_table.read():
        if ops and row.op not in ops:
            continue
        shape = shapes.find(f"{row.op} {row.shape}")
        moved = sum(shape.bytes_moved(launch_table.DTYPES[row.dtype]))
        found += [_predicted(row, machine, moved, 6 * shape.products) for machine in machines]
    return found


def _predicted(row: launch_table.Row, machine: Machine, moved: int, flops: int) -> Prediction:
    # fp32 with full accuracy: without tensor cores, or by three products of tf32 each.
    peak = machine.bf16 if row.dtype == "bf16" else max(machine.fp32, machine.tf32 / 3)
    memory, compute = moved / machine.bandwidth, flops / peak
    count, work = row.forward + row.backward, max(memory, compute)
    terms = {"launches": count * GRAPH_LAUNCH, "memory": memory, "compute": compute}
    eager = None if row.eager is None else row.eager * HOST_LAUNCH + work
    eager_graph = None if row.eager is None else row.eager * GRAPH_LAUNCH + work
    times = [memory, compute, count * HOST_LAUNCH + work, count * GRAPH_LAUNCH + work, eager, eager_graph]
    memory_us, compute_us, *told = [None if t is None else round(t * 1e6, 3) for t in times]
    assert memory_us is not None and compute_us is not None
    return Prediction(
        row.op, row.shape, row.dtype, machine.name, count, row.eager, moved, flops, memory_us, compute_us,
        max(terms, key=lambda term: terms[term]), *told,  # type: ignore[arg-type]  # the first two are always told
    )  # fmt: skip


class Launched(NamedTuple):
    """One of our kernels at one shape, compiled for one target."""

    op: str
    shape: str
    dtype: str
    target: str
    kernel: str
    launches: int
    blocks: int
    threads: int
    registers: int
    spills: int
    shared: int  # bytes of a block, dynamic ones among them
    tensor_core: int  # instructions
    resident: int  # blocks of a multiprocessor at once
    occupancy: float  # of its threads


def launched(kernels: Iterable[Kernel], ops: Sequence[str] = ()) -> list[Launched]:
    """Every launch of geometry.csv, for each target that its kernel was compiled for."""
    by_name: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel)
    found = []
    for g in launch_table.read_geometry():
        for kernel in by_name.get(g.kernel, []) if not ops or g.op in ops else []:
            shared = kernel.shared + g.dynamic
            resident = resident_blocks(kernel.target, g.threads, kernel.registers, shared)
            share = resident * g.threads / MULTIPROCESSORS[kernel.target].threads
            found.append(
                Launched(
                    g.op, g.shape, g.dtype, kernel.target, g.kernel, g.launches, g.blocks, g.threads, kernel.registers,
                    kernel.spills, shared, kernel.tensor_core, resident, round(share, 3),
                )
            )  # fmt: skip
    return found
