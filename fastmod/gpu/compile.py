"""Compiles all kernels for the given targets, in several processes; reuses what a folder already holds."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import fastmod
from fastmod.gpu import manifest, tools
from fastmod.gpu.targets import Target, TargetError, find

if TYPE_CHECKING:  # needs triton
    from fastmod.gpu import worker


@dataclass
class Report:
    kernels: list[manifest.Kernel] = field(default_factory=list)  # of the jobs of this run
    compiled: int = 0  # calls of a compiler
    reused: int = 0  # calls that were saved
    failed: dict[str, str] = field(default_factory=dict)  # name and target -> why
    left_out: list[str] = field(default_factory=list)

    @property
    def spilling(self) -> list[manifest.Kernel]:
        return [kernel for kernel in self.kernels if kernel.spills]


#: Called with the number of finished jobs, of all jobs, and op and target of the last one.
Listener = Callable[[int, int, str], None]


def build(
    names: Sequence[str],
    folder: Path,
    *,
    jobs: int = 1,
    ops: Sequence[str] = (),
    triton: bool = True,
    listener: Listener | None = None,
) -> Report:
    """Compile for the targets ``names`` into ``folder``. ``ops``: only their kernels; ``triton``: also those of
    Triton."""
    targets = [find(name) for name in dict.fromkeys(names)]
    tools.triton()  # before anything imports a kernel
    for target in targets:
        if target.nvidia:
            tools.cuobjdump()
            tools.ptxas(target)
    report = Report()
    wanted = [job for job in _jobs(targets, ops, report) if triton or job.source != "triton"]
    folder.mkdir(parents=True, exist_ok=True)
    current = _still_good(folder)
    missing = [job for job in wanted if job not in current]
    report.reused, done = len(wanted) - len(missing), 0
    try:
        # Inside the folder, so that one that cannot be written to is noticed before the first compilation.
        with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as scratch:
            for result in _run(missing, folder, scratch, jobs):
                done += 1
                if result.error:
                    report.failed[f"{result.job.name} for {result.job.target}"] = result.error
                else:
                    current[result.job] = result.kernels
                    report.compiled += 1
                if listener is not None:
                    listener(done, len(missing), f"{result.job.name.partition('.')[0]} {result.job.target}")
    finally:  # an interrupted run continues where it was
        kernels = sorted((k for of_job in current.values() for k in of_job), key=lambda k: (k.target, k.source, k.name))
        manifest.write(
            folder, kernels, versions=_versions(targets), left_out=report.left_out, failed=report.failed
        )  # fmt: skip
    report.kernels = [kernel for job in wanted for kernel in current.get(job, [])]
    return report


def _versions(targets: Iterable[Target]) -> dict[str, str]:
    """The versions that this run compiled with."""
    found = {"fastmod": fastmod.__version__, "triton": tools.triton().__version__}
    found |= {f"ptxas for {target.name}": tools.ptxas(target)[1] for target in targets if target.nvidia}
    with contextlib.suppress(tools.MissingToolError):
        found["nvcc"] = tools.nvcc_version(tools.nvcc())
    return found


def _jobs(targets: Iterable[Target], ops: Sequence[str], report: Report) -> Iterator[worker.Job]:
    """CUDA C++ first: those jobs take longest, and no long job should be left alone at the end."""
    from fastmod.gpu import discover, worker

    files, specialisations = discover.cuda_files(), discover.specialisations()
    known = sorted({*files, *(name.partition(".")[0] for name in specialisations)})
    for op in ops:
        if op not in known:
            raise TargetError(f"--op {op}: expected one of {', '.join(known)}")
    nvidia = [target for target in targets if target.nvidia]
    for target in _for_nvcc(nvidia, bool(files), report):
        yield from (worker.Job("cuda", stem, target.name) for stem in files if not ops or stem in ops)
    for target in targets:
        if not target.triton:
            report.left_out.append(f"Triton kernels for {target.name}: Triton begins with sm_80")
            continue
        for name in specialisations:
            if not ops or name.partition(".")[0] in ops:
                yield worker.Job("triton", name, target.name)


def _for_nvcc(targets: list[Target], any_files: bool, report: Report) -> list[Target]:
    """The targets that CUDA C++ can be compiled for; the report says why not for the others."""
    if not targets:
        return []
    if not any_files:
        report.left_out.append("CUDA C++ kernels: no csrc/cuda beside the package; they come with a checkout")
        return []
    try:
        known = tools.nvcc_targets(tools.nvcc())
    except tools.MissingToolError as error:
        report.left_out.append(f"CUDA C++ kernels: {error}")
        return []
    for target in targets:
        if target.name not in known:
            version = tools.nvcc_version(tools.nvcc())
            report.left_out.append(f"CUDA C++ kernels for {target.name}: nvcc {version} does not know it")
    return [target for target in targets if target.name in known]


def _still_good(folder: Path) -> dict[worker.Job, list[manifest.Kernel]]:
    """The kernels in the manifest, of any target, that would be compiled the same today and whose files are intact."""
    from fastmod.gpu import worker

    found: dict[worker.Job, list[manifest.Kernel]] = {}
    for kernel in manifest.read(folder):
        found.setdefault(worker.job_of(kernel), []).append(kernel)

    def good(job: worker.Job, kernels: list[manifest.Kernel]) -> bool:
        try:
            key = worker.key(job)
            whole = manifest.sha256(folder / job.file)
        except (KeyError, TargetError, tools.MissingToolError):  # renamed since, or nothing to compare it with
            return False
        return all(kernel.key == key and kernel.sha256 == whole and kernel.file == job.file for kernel in kernels)

    return {job: kernels for job, kernels in found.items() if good(job, kernels)}


def _run(missing: list[worker.Job], folder: Path, scratch: str, jobs: int) -> Iterator[worker.Done]:
    from fastmod.gpu import worker

    groups = worker.together(missing)
    jobs = min(jobs, len(groups))
    if jobs <= 1:
        with worker.here(scratch):
            for group in groups:
                for job in group:
                    yield worker.run(job, folder)
        return
    # Spawned: compilers have threads, which a forked process would lack.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, worker.begin, (scratch,)) as pool:
        try:
            for future in as_completed([pool.submit(worker.run_all, group, folder) for group in groups]):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)
