"""Compiles CUDA C++ kernels to cubin by nvcc. One file holds many kernels: templates, instantiated for every dtype."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fastmod.gpu import resources, tools
from fastmod.gpu.targets import Target

#: C++17 although the extension is built as C++20: only torch headers need more, and kernel files include none.
FLAGS = ("-std=c++17", "-O3")
_TYPES = {"f": "float", "d": "double", "i": "int", "l": "long", "b": "bool"}


def key(source: Path, target: Target) -> str:
    """Depends on the file, the headers beside it, nvcc, its flags and the target."""
    parts: list[object] = [tools.nvcc_version(tools.nvcc()), FLAGS, target]
    parts += [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(_with_headers(source))]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _with_headers(source: Path) -> set[Path]:
    """The file and all that it includes by relative name, recursively; the version of the toolkit covers its
    headers."""
    found: set[Path] = set()
    waiting = [source.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
        waiting += [header for name in names if (header := (path.parent / name).resolve()).is_file()]
    return found


def write_ptx(source: Path, virtual: str, ptx: Path, *, host: bool = False) -> str:
    """Compile the part that targets of one ``virtual`` architecture share, nearly half of the work. Returns nvcc's
    output.

    ``host``: nvcc also does the pass for the host, which finds errors that otherwise only a build of the extension
    would find, such as a function for both that calls one for the device."""
    if not host:
        return _nvcc(f"-arch={virtual}", "-ptx", str(source), "-o", str(ptx))
    with tempfile.TemporaryDirectory() as folder:
        code = f"arch={virtual},code={virtual}"
        kept = ("--keep", "--keep-dir", folder)
        log = _nvcc("-gencode", code, "--cuda", *kept, str(source), "-o", f"{folder}/host.ii")
        shutil.move(f"{folder}/{source.stem}.ptx", ptx)
    return log


def compiled(
    source: Path, target: Target, cubin: Path, *, ptx: Path | None = None, disassemble: bool = True
) -> tuple[dict[str, resources.Resources], str]:
    """Write ``cubin``; returns what each kernel in it needs, by mangled name, and the output of nvcc.

    Args:
        ptx: the result of :func:`write_ptx` for ``source``.
        disassemble: count instructions of tensor cores.
    """
    code = f"arch={target.virtual},code={target.name}"
    log = _nvcc("-Xptxas", "-v", "-gencode", code, "-cubin", str(ptx or source), "-o", str(cubin))
    # nvcc uses tensor cores only where the source says so; disassembling takes a quarter of the time of compiling.
    told_to = disassemble and any("mma" in path.read_text() for path in _with_headers(source))
    return resources.of_cuda_cubin(cubin, log, disassemble=told_to), log


def _nvcc(*options: str) -> str:
    done = subprocess.run([tools.nvcc(), *FLAGS, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"nvcc ended with {done.returncode}")
    return done.stderr


def readable(symbol: str) -> tuple[str, list[str | int]]:
    """Name and template arguments of one of our mangled kernels: not every machine has c++filt."""
    # Names follow one another, each after its length; that of the kernel is the last. Reading the lengths in turn
    # separates them from digits inside a name (nvcc puts hashes and a process number into the unnamed namespace).
    opening = re.match(r"_ZN?", symbol)
    name, rest = "", symbol[opening.end() :] if opening else ""
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    if not name.endswith("_kernel"):
        return symbol, []
    return name, list(_arguments(rest[1:])) if rest.startswith("I") else []


def _arguments(text: str) -> Iterator[str | int]:
    """Up to the E that closes them."""
    last = ""
    while text and text[0] != "E":
        if number := re.match(r"L[a-z](\d+)E", text):
            yield int(number[1])
            text = text[number.end() :]
        elif named := re.match(r"\d+", text):
            end = named.end() + int(named[0])
            last = text[named.end() : end]
            yield last
            text = text[end:]
        elif again := re.match(r"S\w?_", text):  # a name that occurred before
            yield last
            text = text[again.end() :]
        else:
            yield _TYPES.get(text[0], text[0])
            text = text[1:]
