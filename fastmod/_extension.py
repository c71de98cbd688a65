"""Loads the compiled extension and registers what Python adds to it. Import never fails: see ``STATUS``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from fastmod._private import has_kernel

REBUILD = "pip install --no-build-isolation --no-deps --force-reinstall ."
OLDER = f"the extension was built from older sources; rebuild it with: {REBUILD}"

NAME = "fastmod._C"
#: The pybind11 module, or None.
MODULE: ModuleType | None = None
#: Whether the native kernels of the ``fastmod::`` ops exist; their schemas always do.
LOADED = False
#: One line for users: what was loaded, or why not.
STATUS = ""


def built_stamp() -> dict[str, str] | None:
    """The stamp that the build wrote beside the package; readable without loading the extension."""
    path = Path(__file__).with_name("_build.json")
    try:
        stamp = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def _keep_freed_memory() -> None:
    """Make malloc keep up to 62 MB of freed memory, as in every program that has once freed a tensor of 31 MB.

    glibc returns free memory at the end of its heap to the system if it is more than twice the largest block ever freed
    (blocks over 32 MB do not count). Activations of small nets are smaller than that, so that every step got fresh
    pages: an inference of ResMixNet(2,2) took 9,000 page faults, a fifth of its time. The block here is never touched.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


def _load() -> None:
    global MODULE, LOADED, STATUS
    stamp = built_stamp()
    if stamp is not None and stamp.get("extension") == "off":
        STATUS = "installed without the extension: Triton serves GPUs, plain PyTorch CPUs"
        return
    if stamp is None or importlib.util.find_spec(NAME) is None:
        STATUS = f"no compiled extension; build it with: {REBUILD}"
    elif stamp.get("torch") != torch.__version__:
        # Loading it would end in undefined symbols or worse.
        STATUS = (
            f"the extension was built for torch {stamp.get('torch')}, you have {torch.__version__}; "
            f"rebuild it with: {REBUILD}"
        )
    else:
        try:
            module = importlib.import_module(NAME)
        except ImportError as error:
            STATUS = f"the extension does not load ({error}); rebuild it with: {REBUILD}"
        else:
            if hasattr(torch.ops.fastmod, "multiplex"):
                # Older extensions defined the ops themselves, autograd and all.
                STATUS = OLDER
            else:
                MODULE, LOADED = module, True
                _keep_freed_memory()
                STATUS = f"loaded, built for {stamp.get('devices')}"
                return
    _warn()


def _warn() -> None:
    warnings.warn(f"fastmod: {STATUS}. Plain PyTorch serves until then.", RuntimeWarning, stacklevel=4)


def leave_unused() -> None:
    """For an extension that was loaded before a schema turned out to differ from its kernel's."""
    global MODULE, LOADED, STATUS
    if LOADED:
        MODULE, LOADED, STATUS = None, False, OLDER
        _warn()


def native_devices() -> tuple[str, ...]:
    """Device types that have native kernels in this build."""
    if MODULE is None:
        return ()
    return ("cpu", "cuda") if _has_cuda_kernels() else ("cpu",)


@cache
def _has_cuda_kernels() -> bool:
    """Whether the CUDA part was built and holds code for the GPU at hand; if not, one warning says so."""
    assert MODULE is not None
    if not MODULE.has_cuda():
        return False
    archs = MODULE.stamp()["archs"]
    if not torch.cuda.is_available() or covers(archs, torch.cuda.get_device_capability()):
        return True
    major, minor = torch.cuda.get_device_capability()
    warnings.warn(
        f"fastmod: the CUDA kernels were built for {archs}, this GPU is {major}.{minor}: they are not used. "
        f'Rebuild them with: TORCH_CUDA_ARCH_LIST="{major}.{minor}+PTX" {REBUILD}',
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def covers(archs: str, capability: tuple[int, int]) -> bool:
    """Whether code built for ``archs`` ("8.0 9.0+PTX") runs on a GPU: machine code within its major version, PTX on
    anything newer. Architectures that are not numbers ("visible GPUs") are assumed to fit."""
    for arch in archs.replace(";", " ").split():
        number, _, ptx = arch.partition("+")
        try:
            major, minor = (int(part) for part in number.rstrip("af").split("."))
        except ValueError:
            return True
        if (major, minor) <= capability and (major == capability[0] or ptx == "PTX"):
            return True
    return False


def native_serves(op: str, device_type: str) -> bool:
    """Whether this build has native kernels of ``op`` for a device type; not every op has them for GPUs."""
    if device_type not in native_devices():
        return False
    if device_type == "cpu":
        return True
    return has_kernel(f"fastmod::{op}_forward", device_type)


@cache
def triton_ops() -> frozenset[str]:
    """Ops with Triton kernels registered, which need no extension; empty without triton."""
    try:
        kernels = importlib.import_module("fastmod.kernels")
    except ImportError:
        return frozenset()
    return frozenset(kernels.register())


_load()
