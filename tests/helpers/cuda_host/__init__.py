"""Builds the host harness and talks to it: see cuda_host.h and driver.cpp."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

_FLAGS = ["-std=c++17", "-fPIC", "-O1", "-g1", "-ffp-contract=fast", "-fno-tree-vectorize", "-DFASTMOD_CUDA_HOST"]
_FLAGS += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", f"-I{HERE}", f"-I{ROOT / 'csrc' / 'cuda'}"]
if platform.machine() in ("x86_64", "AMD64"):
    _FLAGS += ["-mfma", "-fexpensive-optimizations"]  # as nvcc does, products are fused into sums; -O1 alone does not
#: Two files that all flavours run most of the time in: worth a second more.
_SCHEDULER = ["-O3"]
#: Addresses are checked by calls, and undefined behaviour ends in a trap instead of a report: a third less to compile.
_CHECKED = ["-fsanitize=address,undefined", "--param=asan-instrumentation-with-call-threshold=0"]
_CHECKED += ["-fsanitize-undefined-trap-on-error"]
#: flavour -> (flags of the kernels, flags of the scheduler, which is never instrumented). -O0 takes half the time to
#: compile, and inlines nothing: two functions of one name that mean different things are found out.
FLAVOURS: dict[str, tuple[list[str], list[str]]] = {
    "plain": ([], []),
    "asan": (["-O0", *_CHECKED, "-fno-sanitize-recover=all"], ["-DCUDA_HOST_ASAN"]),
    # At -O3 a loop of the scheduler becomes a memmove, which TSan would count as a write of the fiber that asks for it.
    "tsan": (["-O0", "-fsanitize=thread"], ["-O1", "-DCUDA_HOST_TSAN"]),
}
_ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",  # a launch that failed abandons its fibers
    "TSAN_OPTIONS": "halt_on_error=1",
}


class UnavailableError(Exception):
    """This machine has no runtime of a sanitizer, or it does not start here."""


class CrashError(AssertionError):
    """The harness died: a sanitizer has found something. Carries its report."""


class LaunchError(AssertionError):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"launch failed with {code}: {message}")
        self.code = code


class Out:
    """A buffer that the kernel writes, all of it, handed over full of NaN."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        self.tensor = torch.full(shape, float("nan"), dtype=dtype)


class InOut:
    """A buffer that the kernel may change."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def build(flavour: str) -> Path:
    """The harness as an executable under ``build/``."""
    own, scheduler = FLAVOURS[flavour]
    sources = dict.fromkeys([*_kernels(), HERE / "probes.cu", HERE / "driver.cpp"], own)
    scheduler = [*_SCHEDULER, *scheduler]
    return _link(flavour, {**sources, **dict.fromkeys(_scheduler(), scheduler)}, own)


def build_bindings() -> Path:
    """csrc/cuda/*_binding.cpp over the harness, as a library of ops on CPU tensors: see bindings_host.cpp."""
    from torch.utils.cpp_extension import include_paths, library_paths

    own = ["-std=c++20", "-g0", f"-I{HERE / 'stubs'}", *(f"-isystem{path}" for path in include_paths())]
    own.append(f"-I{ROOT / 'csrc'}")
    # Another torch, or other checks, another object: ops have theirs beside their CPU kernels.
    checks = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((ROOT / "csrc" / "cpu").glob("*.h"))))
    own += [f"-DFASTMOD_TORCH={torch.__version__}", f"-DFASTMOD_CHECKS={checks.hexdigest()[:16]}"]
    for path in [HERE / "bindings_host.h", *sorted((ROOT / "csrc" / "cuda").glob("*_binding.cpp"))]:
        own += ["-include", str(path)]
    sources: dict[Path, list[str]] = {path: [] for path in _kernels()} | dict.fromkeys(_scheduler(), _SCHEDULER)
    libraries = [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu"]
    return _link("bindings", {**sources, HERE / "bindings_host.cpp": own}, ["-shared"], libraries)


def _kernels() -> list[Path]:
    return sorted((ROOT / "csrc" / "cuda").glob("*.cu"))


def _scheduler() -> list[Path]:
    return [HERE / "cuda_host.cpp", HERE / "mma_host.cpp"]


def _link(name: str, sources: dict[Path, list[str]], flags: list[str], libraries: Sequence[str] = ()) -> Path:
    """Everything is made once per content of the sources and flags; flavours share the objects they can."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no g++, which the extension needs as well")
    headers = hashlib.sha256()
    for path in sorted([*HERE.rglob("*.h"), *(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc" / "cuda").glob("*.[hc]*")]):
        if path.suffix != ".cu":  # bindings count: bindings_host.cpp includes them
            headers.update(path.name.encode() + path.read_bytes())
    waiting = {}
    for path, own in sources.items():
        command = [compiler, *_FLAGS, *own, "-x", "c++", "-c", str(path)]
        waiting[path] = (path.stem + ".o", path.read_bytes() + headers.digest() + repr(command).encode(), command)
    for made in waiting.values():  # first those that no other process of the test run is making
        _make(*made, wait=False)
    objects = [_make(*made) for made in waiting.values()]
    content = repr((objects, flags, libraries)).encode()
    try:
        return _make(name, content, [compiler, *flags, *map(str, objects), *libraries])
    except RuntimeError as error:
        if not any("-fsanitize" in flag for flag in flags):
            raise
        raise UnavailableError(f"no {name} runtime: {error}") from error


def _make(name: str, content: bytes, command: list[str], wait: bool = True) -> Path:
    folder = ROOT / "build" / "cuda_host"
    target = folder / f"{hashlib.sha256(content).hexdigest()[:16]}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:
        try:  # two processes of one test run build each file once
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return target
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / name
                done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
                os.replace(made, target)
    return target


class Harness:
    """A running driver. Every call is repeated for each thread order; all must leave the same bits."""

    def __init__(self, flavour: str, orders: Sequence[int]) -> None:
        self.flavour = flavour
        self.orders = orders
        self.launches = 0
        self._prefix: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as this object)
        self._executable = build(flavour)
        if flavour != "plain":
            self._settle()

    def _settle(self) -> None:
        """Older sanitizer runtimes do not start where the kernel randomises addresses widely: switch that off."""
        for prefix in ([], ["setarch", "-R"]):
            self._prefix = prefix
            try:
                self.call("probe_reverse", torch.zeros(64), Out(64, dtype=torch.float32), ints=[1])
                return
            except (CrashError, FileNotFoundError) as error:
                reason = str(error)
        raise UnavailableError(f"{self.flavour} does not run here: {reason[:300]}")

    def call(
        self,
        name: str,
        *buffers: Tensor | Out | InOut | None,
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Run a launch function; returns what it left in the ``Out`` and ``InOut`` buffers, in order."""
        inputs = [b.tensor if isinstance(b, (Out, InOut)) else b for b in buffers]
        results = [self._run(order, name, inputs, ints, floats, dtype) for order in self.orders]
        self.launches += len(results)
        for order, result in zip(self.orders, results, strict=True):
            for i, (sent, first, got) in enumerate(zip(inputs, results[0], result, strict=True)):
                assert got == first, f"{name}: buffer {i} depends on the order of threads (order {order})"
                if not isinstance(buffers[i], (Out, InOut)) and sent is not None:
                    assert got == _bytes(sent), f"{name}: buffer {i} is an input and was written"
        outputs = []
        for buffer, raw in zip(buffers, results[0], strict=True):
            if isinstance(buffer, (Out, InOut)):
                like = buffer.tensor
                flat = torch.frombuffer(bytearray(raw), dtype=like.dtype) if raw else like.new_empty(0)
                outputs.append(flat.view(like.shape))
        return outputs

    def _run(
        self,
        order: int,
        name: str,
        buffers: Sequence[Tensor | None],
        ints: Sequence[int],
        floats: Sequence[float],
        dtype: torch.dtype,
    ) -> list[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [*self._prefix, str(self._executable)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, **_ENVIRONMENT},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        contents = [b"" if b is None else _bytes(b) for b in buffers]
        sizes = [-1 if b is None else len(raw) for b, raw in zip(buffers, contents, strict=True)]
        fields = [name, str(dtype).removeprefix("torch."), order, len(sizes), *sizes, len(ints), *ints]
        fields += [len(floats), *(repr(float(value)) for value in floats)]
        try:
            self._process.stdin.write(" ".join(map(str, fields)).encode() + b"\n" + b"".join(contents))
            self._process.stdin.flush()
            status = self._process.stdout.readline().decode()
        except BrokenPipeError:
            status = ""
        if not status.endswith("\n"):
            raise CrashError(self._died(name))
        code, message = status.rstrip("\n").split(" ", 1)
        replies = [self._process.stdout.read(max(size, 0)) for size in sizes]
        if int(code):
            raise LaunchError(int(code), message)
        return replies

    def _died(self, name: str) -> str:
        assert self._process is not None
        code = self._process.wait()
        self.close()
        self._stderr.seek(0)
        report = self._stderr.read().decode(errors="replace")
        self._stderr.seek(0)
        self._stderr.truncate()
        if code == -signal.SIGILL:
            report += "undefined behaviour; without -fsanitize-undefined-trap-on-error a report would tell where"
        return f"{name}: the harness ended with {code}\n{report}"

    def close(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                try:
                    if pipe is not None:
                        pipe.close()
                except BrokenPipeError:
                    pass
            self._process.wait()
            self._process = None


def _bytes(tensor: Tensor) -> bytes:
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""
