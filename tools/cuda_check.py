"""Builds fastmod with its CUDA part in an environment of its own and checks the result. Needs nvcc, no GPU.

Every kernel-level ``fastmod::`` op must have a CUDA kernel registered, and no symbol may be missing.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda-check"
TOOLS = ("torch", "numpy", "ninja", "pybind11", "safetensors", "setuptools", "wheel")
# By its path: fastmod itself needs torch, which this environment need not have.
TARGETS = runpy.run_path(str(ROOT / "fastmod" / "gpu" / "targets.py"))
ARCHS = TARGETS["torch_list"](TARGETS["USUAL"])
PARTS = ("csrc", "kernels", "fastmod", "setup.py", "pyproject.toml", "README.md", "LICENSE")

REGISTERED = """
import torch, fastmod
from fastmod import _extension
assert _extension.LOADED, _extension.STATUS
print(_extension.STATUS, "from", fastmod.__file__)
names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fastmod::"))
# A whole inverted residual is one kernel on the CPU alone: elsewhere it is a few convolutions.
kernels = [n for n in names if n.endswith(("_forward", "_backward")) and "inverted_residual" not in n]
missing = [n for n in kernels if not torch._C._dispatch_has_kernel_for_dispatch_key(n, "CUDA")]
assert len(kernels) >= 8, names
assert not missing, f"no CUDA kernel: {missing}"
print(f"{len(kernels)} kernels registered for CUDA: {', '.join(kernels)}")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--env", type=Path, default=ROOT / ".venv-cuda", help="environment with the CUDA build of torch"
    )
    parser.add_argument("--archs", default=ARCHS, help="TORCH_CUDA_ARCH_LIST")
    options = parser.parse_args()
    if shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ:
        return fail("nvcc was not found: put the CUDA toolkit on PATH or set CUDA_HOME")
    python = options.env.absolute() / "bin" / "python"
    prepare(options.env, python)
    site, seconds = build(python, options.archs)
    with tempfile.TemporaryDirectory() as elsewhere:  # so that the source tree is not what gets imported
        run([python, "-W", "error", "-c", REGISTERED], cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(site)})
    (library,) = (site / "fastmod").glob("_C*.so")
    missing = missing_symbols(library, python)
    if missing:
        return fail("missing in the extension:\n" + "\n".join(missing))
    print(f"no symbol is missing; built for {options.archs} in {seconds:.0f} s, {library.stat().st_size / 1e6:.1f} MB")
    return 0


def prepare(env: Path, python: Path) -> None:
    """The environment, with the pinned versions; an environment that has them is left as it is."""
    pins = [line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if pin_name(line) in TOOLS]
    if not python.exists():
        run([sys.executable, "-m", "venv", env])
    probe = "import torch, numpy, ninja, pybind11, safetensors, setuptools, wheel; assert torch.version.cuda"
    if subprocess.run([python, "-c", probe], capture_output=True).returncode:
        # Only the index of PyPI holds the CUDA build for sure: other indexes and local wheels are switched off.
        overrides = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        run([python, "-m", "pip", "install", *pins], env={**os.environ, **overrides})
        run([python, "-c", probe])


def pin_name(line: str) -> str:
    return re.split(r"[=;\s]", line, maxsplit=1)[0]


def build(python: Path, archs: str) -> tuple[Path, float]:
    """Builds a copy of the sources; returns where it is installed and the seconds it took."""
    shutil.rmtree(BUILD, ignore_errors=True)
    source, site = BUILD / "source", BUILD / "site"
    source.mkdir(parents=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "*.so", "_build.json")
            shutil.copytree(ROOT / part, source / part, ignore=unwanted)
        else:
            shutil.copy(ROOT / part, source)
    start = time.perf_counter()
    run(
        [python, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "--target", site, source],
        env={**os.environ, "TORCH_CUDA_ARCH_LIST": archs, "FORCE_CUDA": "1"},
        log=BUILD / "build.log",
    )
    return site, time.perf_counter() - start


def missing_symbols(library: Path, python: Path) -> list[str]:
    """Lines of ``ldd -r`` about what is missing, apart from Python itself and the GPU driver."""
    find = "import sysconfig, pathlib; print(sysconfig.get_paths()['purelib'])"
    packages = Path(subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip())
    folders = [packages / "torch" / "lib", *sorted((packages / "nvidia").glob("*/lib"))]
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, folders))}
    result = subprocess.run(["ldd", "-r", library], capture_output=True, text=True, env=env)
    lines = [line.strip() for line in (result.stdout + result.stderr).splitlines()]
    bad = [line for line in lines if "not found" in line or "undefined symbol" in line]
    return [line for line in bad if not re.search(r"undefined symbol: _?Py|libcuda\.so", line)]


def run(
    command: list[object], *, log: Path | None = None, cwd: str | None = None, env: dict[str, str] | None = None
) -> None:
    words = [str(word) for word in command]
    if log is None:
        subprocess.run(words, check=True, cwd=cwd, env=env)
        return
    with log.open("w") as stream:
        code = subprocess.run(words, cwd=cwd, env=env, stdout=stream, stderr=subprocess.STDOUT).returncode
    if code:
        print("\n".join(log.read_text().splitlines()[-60:]), file=sys.stderr)
        raise SystemExit(f"cuda-check: the build failed, see {log}")


def fail(message: str) -> int:
    print(f"cuda-check: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
