"""GPUs that predictions are made for: published peaks, and how many blocks a multiprocessor holds."""

from __future__ import annotations

from typing import NamedTuple

#: Seconds from the start of one kernel to that of the next, if each does nothing: launched by PyTorch on the host, and
#: in a CUDA graph whose kernels wait for one another. Orders of magnitude that people report, assumed and not measured.
HOST_LAUNCH = 6e-6
GRAPH_LAUNCH = 2e-6


class Machine(NamedTuple):
    name: str
    target: str
    multiprocessors: int
    bandwidth: float  # bytes a second
    fp32: float  # flops a second, without tensor cores
    tf32: float  # on tensor cores, dense, sums in fp32
    bf16: float


# From NVIDIA's own papers: peaks at boost clock, without sparsity, of the SXM module where there are several. Figures
# printed with sparsity are halved; 5090: the figure with sums in fp32, a quarter of the one printed first.
MACHINES = (
    Machine("A100", "sm_80", 108, 2.039e12, 19.5e12, 156e12, 312e12),  # A100 80GB datasheet
    Machine("H100", "sm_90", 132, 3.35e12, 67e12, 494.5e12, 989.5e12),  # H100 datasheet
    Machine("B200", "sm_100", 148, 8.0e12, 80e12, 1.1e15, 2.25e15),  # Blackwell architecture brief, HGX B200
    Machine("RTX 5090", "sm_120", 170, 1.792e12, 104.8e12, 104.8e12, 209.5e12),  # RTX Blackwell whitepaper
    Machine("L4", "sm_89", 58, 0.3e12, 30.3e12, 60e12, 121e12),  # L4 datasheet
)


class Multiprocessor(NamedTuple):
    threads: int
    blocks: int
    shared: int  # bytes for all blocks together
    registers: int = 65536


# CUDA C++ Programming Guide, technical specifications per compute capability.
MULTIPROCESSORS = {
    "sm_75": Multiprocessor(1024, 16, 64 * 1024),
    "sm_80": Multiprocessor(2048, 32, 164 * 1024),
    "sm_86": Multiprocessor(1536, 16, 100 * 1024),
    "sm_89": Multiprocessor(1536, 24, 100 * 1024),
    "sm_90": Multiprocessor(2048, 32, 228 * 1024),
    "sm_100": Multiprocessor(2048, 32, 228 * 1024),
    "sm_120": Multiprocessor(1536, 24, 100 * 1024),
}
_RESERVED = 1024  # bytes of shared memory that the system takes from every block, since sm_80


def resident_blocks(target: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that a multiprocessor holds at once, as in the occupancy calculator of CUDA."""
    room = MULTIPROCESSORS[target]
    warps = -(-threads // 32)
    of_warp = -(-max(registers, 1) * 32 // 256) * 256  # registers are allocated in units of 256
    # A multiprocessor has four parts with their own registers, and a warp belongs to one of them.
    by_registers = room.registers // 4 // of_warp * 4 // warps
    taken = shared + (0 if target == "sm_75" else _RESERVED)
    by_shared = room.shared // (-(-taken // 128) * 128) if taken else room.blocks
    return min(room.blocks, room.threads // (32 * warps), by_registers, by_shared)
