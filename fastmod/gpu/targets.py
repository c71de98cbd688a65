"""The GPU architectures that fastmod compiles for: the only list of them. Imports nothing but Python's own modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class TargetError(ValueError):
    """A name that is not a target."""


class Target(NamedTuple):
    name: str
    backend: str  # the name in Triton
    arch: int | str
    warp: int  # threads that run in step
    triton: bool = True  # Triton needs sm_80 or later
    virtual: str = ""  # the architecture whose PTX CUDA C++ is assembled from

    @property
    def nvidia(self) -> bool:
        return self.backend == "cuda"

    @property
    def suffix(self) -> str:
        return "cubin" if self.nvidia else "hsaco"


def _nvidia(arch: int, *, triton: bool = True, ptx: int | None = None) -> Target:
    return Target(f"sm_{arch}", "cuda", arch, 32, triton, f"compute_{ptx or arch}")


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia(75, triton=False),
        _nvidia(80),
        _nvidia(86, ptx=80),  # to our sources the same as sm_80: one PTX serves the three
        _nvidia(89, ptx=80),
        _nvidia(90),
        # From here on nvcc uses another compiler, whose PTX for the two differs only in the name of the target. PTX of
        # sm_80 would do for sm_90 and these too, but an extension holds another: for sm_90 bf16 differs, here all.
        _nvidia(100),
        _nvidia(120, ptx=100),
        Target("gfx942", "hip", "gfx942", 64),
    )
}
#: One per generation on the market, as their code differs most: the default of a build of the whole extension.
USUAL = ("sm_80", "sm_90", "sm_120")


def find(name: str) -> Target:
    try:
        return TARGETS[name]
    except KeyError:
        raise TargetError(f"--target {name}: expected one of {', '.join(TARGETS)}") from None


def torch_list(names: Iterable[str]) -> str:
    """The names as TORCH_CUDA_ARCH_LIST wants them: ``sm_120`` -> ``12.0``."""
    return " ".join(f"{arch // 10}.{arch % 10}" for arch in (int(find(name).arch) for name in names))
