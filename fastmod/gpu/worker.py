"""One compilation, in any process."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from fastmod.gpu import cuda_part, discover, manifest, tools, triton_part
from fastmod.gpu.targets import find


class Job(NamedTuple):
    """One call of a compiler."""

    source: str  # triton or cuda
    name: str  # of the specialisation, or of the .cu file without its ending
    target: str

    @property
    def file(self) -> str:
        return f"{self.target}/{self.source}/{self.name}.{find(self.target).suffix}"


class Done(NamedTuple):
    job: Job
    kernels: list[manifest.Kernel]
    error: str = ""


def key(job: Job) -> str:
    if job.source == "cuda":
        of_part = cuda_part.key(discover.cuda_files()[job.name], find(job.target))
    else:
        of_part = triton_part.key(discover.specialisations()[job.name], find(job.target))
    return f"{manifest.FORMAT}-{of_part}"


def job_of(kernel: manifest.Kernel) -> Job:
    """The job that made a kernel."""
    return Job(kernel.source, Path(kernel.file).name.rpartition(".")[0], kernel.target)


def begin(scratch: str) -> None:
    """Runs in a new process. Ctrl-C reaches all at once; the process that started them informs the user."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tools.triton().knobs.cache.dir = scratch


@contextmanager
def here(scratch: str) -> Iterator[None]:
    """The same in this process, temporarily: Triton's own cache is not changed."""
    with tools.triton().knobs.cache.scope():
        tools.triton().knobs.cache.dir = scratch
        yield


def run(job: Job, folder: Path) -> Done:
    """Compile, write the file, return what it contains. An error of the compiler is a result too."""
    try:
        (folder / job.file).parent.mkdir(parents=True, exist_ok=True)
        return Done(job, _cuda(job, folder) if job.source == "cuda" else [_triton(job, folder)])
    except OSError:
        raise
    except Exception as error:  # compilers raise all sorts of exceptions
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower()] or lines or [type(error).__name__]
        return Done(job, [], telling[0])


def run_all(jobs: Sequence[Job], folder: Path) -> list[Done]:
    return [run(job, folder) for job in jobs]


def together(jobs: Iterable[Job]) -> list[list[Job]]:
    """Those that one process should do: a Triton kernel for all targets, as its front end then runs once."""
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.name if job.source == "triton" else job, []).append(job)
    return list(groups.values())


def _triton(job: Job, folder: Path) -> manifest.Kernel:
    target, spec = find(job.target), discover.specialisations()[job.name]
    kernel, needs = triton_part.compiled(spec, target)
    path = folder / job.file
    path.write_bytes(kernel.asm[target.suffix])
    signature, constants = triton_part.told(spec, target)
    return manifest.Kernel(
        job.name, job.source, job.target, kernel.metadata.name, signature, constants, dict(spec.options),
        **asdict(needs), file=job.file, sha256=manifest.sha256(path) or "", key=key(job),
    )  # fmt: skip


def _cuda(job: Job, folder: Path) -> list[manifest.Kernel]:
    path = folder / job.file
    found, _ = cuda_part.compiled(discover.cuda_files()[job.name], find(job.target), path)
    digest, made_from = manifest.sha256(path) or "", key(job)
    kernels = []
    for symbol, needs in found.items():
        name, arguments = cuda_part.readable(symbol)
        shown = f"{job.name}.{name}<{','.join(map(str, arguments))}>"
        kernels.append(
            manifest.Kernel(
                shown, job.source, job.target, symbol, {}, {"template": arguments}, {"flags": list(cuda_part.FLAGS)},
                **asdict(needs), file=job.file, sha256=digest, key=made_from,
            )
        )  # fmt: skip
    return sorted(kernels, key=lambda kernel: kernel.name)
