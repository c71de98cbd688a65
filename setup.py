"""Builds ``fastmod._C``: the C++ part, and the CUDA part when it can be had. Run pip with --no-build-isolation.

FASTMOD_EXTENSION=0 leaves it out: a wheel of Python alone, in which Triton serves GPUs and plain PyTorch CPUs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools.command.build_py import build_py

EXTENSION = os.environ.get("FASTMOD_EXTENSION", "1") != "0"


def find_cuda_home() -> str | None:
    """The toolkit's folder. nvcc is asked, because the one on PATH may be a script in a folder of its own."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home or shutil.which("nvcc") is None:
        return home
    dry_run = subprocess.run(["nvcc", "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, re.MULTILINE)
    return str(Path(top[1]).resolve()) if top else None


CUDA_HOME = find_cuda_home() if EXTENSION else None
if CUDA_HOME:
    os.environ["CUDA_HOME"] = CUDA_HOME  # torch's build tools read it when they are imported

# pip does not look at what the build needs when it builds without isolation; what setuptools itself says is no help.
if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit(
        f"fastmod: setuptools {setuptools.__version__} is too old to build with. Run\n"
        '    pip install "setuptools>=77" wheel ninja\n'
        "first, then\n"
        "    pip install --no-build-isolation ."
    )
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ImportError:
    BuildExtension = setuptools.Command
    if EXTENSION:
        sys.exit(
            "fastmod: torch is not importable in the build environment. Install torch first, then run\n"
            "    pip install --no-build-isolation ."
        )

ROOT = Path(__file__).parent.resolve()
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "fastmod" / "__init__.py").read_text(), re.MULTILINE)[0]
BUILD = ROOT / "build"
STAMP_HEADER = BUILD / "fastmod_stamp.h"
KERNELS_HEADER = BUILD / "fastmod_kernels.h"
CXX_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=fast", "-Wall", "-Wno-psabi"]
if sys.platform == "linux":
    # ATen's parallel_for lives in a header and is serial without it; the runtime is the one that torch has loaded.
    CXX_FLAGS.append("-fopenmp")
NVCC_FLAGS = ["-O3", "-std=c++20", "--threads=2"]
# Python's own flags ask for debug information: 50 MB of it around 3 MB of code. DEBUG=1 keeps it, for a debugger.
DEBUG = os.environ.get("DEBUG", "0") not in ("", "0")
CXX_FLAGS.append("-g" if DEBUG else "-g0")
LINK_FLAGS = ["-Wl,-s"] if sys.platform == "linux" and not DEBUG else []


def cuda_decision() -> tuple[bool, str]:
    """Whether to build the CUDA part, and why."""
    if os.environ.get("FORCE_CUDA") == "1":
        return True, "FORCE_CUDA=1"
    if os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return True, f"TORCH_CUDA_ARCH_LIST={os.environ['TORCH_CUDA_ARCH_LIST']}"
    if torch.version.cuda is None:
        return False, "torch is a CPU build"
    if not (CUDA_HOME and Path(CUDA_HOME, "bin", "nvcc").exists()):
        return False, "nvcc was not found"
    return True, f"torch is a CUDA {torch.version.cuda} build and nvcc was found"


def first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def build_stamp(with_cuda: bool) -> dict[str, str]:
    return {
        "fastmod": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda) if with_cuda else "none",
        "compiler": first_line(*shlex.split(os.environ.get("CXX", "c++")), "--version"),
        "machine": platform.machine(),
        "archs": os.environ.get("TORCH_CUDA_ARCH_LIST", "visible GPUs") if with_cuda else "none",
        "flags": " ".join(CXX_FLAGS),
        "devices": "CPU and CUDA" if with_cuda else "CPU",
    }


def write_if_changed(path: Path, text: str) -> None:
    """Keeps the time stamp of an unchanged file, so that a second build reuses the objects."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def write_stamp(stamp: dict[str, str]) -> None:
    text = json.dumps(stamp, indent=2)
    write_if_changed(ROOT / "fastmod" / "_build.json", text + "\n")
    write_if_changed(STAMP_HEADER, f"#define FASTMOD_STAMP {json.dumps(json.dumps(stamp))}\n")


def write_kernels() -> None:
    """The CPU kernels of every op, for the files that compile them once per instruction set."""
    headers = sorted(path.name for path in ROOT.glob("csrc/cpu/*_kernel.h"))
    write_if_changed(KERNELS_HEADER, "".join(f'#include "cpu/{name}"\n' for name in headers))


def extension(with_cuda: bool) -> CppExtension:
    sources = sorted(str(p.relative_to(ROOT)) for folder in ("csrc", "csrc/cpu") for p in ROOT.glob(f"{folder}/*.cpp"))
    arguments: dict[str, object] = {
        "include_dirs": [str(ROOT / "csrc"), str(BUILD)],
        # The stamp too, which holds the flags: other flags are a reason to build again.
        "depends": [
            str(p.relative_to(ROOT)) for p in (*sorted(ROOT.glob("csrc/**/*.*h")), STAMP_HEADER, KERNELS_HEADER)
        ],
        "extra_link_args": LINK_FLAGS,
    }
    if not with_cuda:
        return CppExtension("fastmod._C", sources, extra_compile_args={"cxx": CXX_FLAGS}, **arguments)
    sources += sorted(str(p.relative_to(ROOT)) for ext in ("cpp", "cu") for p in ROOT.glob(f"csrc/cuda/*.{ext}"))
    return CUDAExtension(
        "fastmod._C",
        sources,
        extra_compile_args={"cxx": [*CXX_FLAGS, "-DFASTMOD_WITH_CUDA"], "nvcc": NVCC_FLAGS},
        **arguments,
    )


class Build(BuildExtension):
    """Keeps the objects in build/, also where pip would build in a folder that it throws away."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(BUILD / "objects")


class WithoutExtension(build_py):
    """Says in the wheel, and not in the checkout, that there is no extension to look for."""

    def run(self) -> None:
        super().run()
        stamp = {"fastmod": VERSION, "extension": "off", "devices": "none"}
        Path(self.build_lib, "fastmod", "_build.json").write_text(json.dumps(stamp, indent=2) + "\n")


# Every folder with an __init__.py; pyproject.toml says where fastmod.kernels lies, which its own `find` cannot.
PACKAGES = [*setuptools.find_packages(str(ROOT), include=["fastmod", "fastmod.*"]), "fastmod.kernels"]
if EXTENSION:
    WITH_CUDA, REASON = cuda_decision()
    print(f"fastmod: building for {'CPU and CUDA' if WITH_CUDA else 'the CPU only'}: {REASON}", file=sys.stderr)
    write_stamp(build_stamp(WITH_CUDA))
    write_kernels()
    setuptools.setup(packages=PACKAGES, ext_modules=[extension(WITH_CUDA)], cmdclass={"build_ext": Build})
else:
    print("fastmod: building without the extension: FASTMOD_EXTENSION=0", file=sys.stderr)
    setuptools.setup(packages=PACKAGES, cmdclass={"build_py": WithoutExtension})
