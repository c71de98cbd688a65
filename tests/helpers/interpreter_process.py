"""Tests that need Triton's interpreter, run by name in one process of their own.

Triton decides at import whether it interprets. A test with the mark ``interpreted`` is collected, selected and reported
like any other, but its body runs in a second pytest session, started with TRITON_INTERPRET=1 when the first of them
comes and kept until the last: :func:`run` hands it the test's id and gets the outcome back. Of this file the first half
runs in the session that people start, the second half is a plugin of the other one.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

import pytest

PIPE = "FASTMOD_TEST_PIPE"  # number of the descriptor that the other session reads test ids from
SECONDS = 600  # for one test
OPTIONS = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", __name__, "--runxfail"]  # the mark xfail counts here
#: Plain torch's bf16 convolutions end in an illegal instruction where a virtual machine shows AMX but forbids it.
ENVIRONMENT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


class Outcome(NamedTuple):
    kind: str  # passed, failed, skipped
    text: str


class _Process:
    def __init__(self, root: str, files: list[str]) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *OPTIONS, *files],
            env={**ENVIRONMENT, **os.environ, "TRITON_INTERPRET": "1", PIPE: str(theirs.fileno())},
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def ask(self, nodeid: str) -> Outcome:
        try:
            self.pipe.send(nodeid)
            if not self.pipe.poll(SECONDS):
                return Outcome("failed", self.end(f"no answer within {SECONDS} s"))
            return self.pipe.recv()
        except (EOFError, OSError):
            return Outcome("failed", self.end("the interpreter's process ended"))

    def end(self, why: str) -> str:
        global _process
        _process = None
        self.process.kill()
        self.log.seek(0)
        return f"{why} (exit code {self.process.wait()})\n{self.log.read()[-5000:]}"

    def close(self) -> None:
        self.pipe.close()
        self.process.wait()


_process: _Process | None = None


def needed(item: pytest.Item) -> bool:
    return PIPE not in os.environ and item.get_closest_marker("interpreted") is not None


def run(item: pytest.Item) -> None:
    """Run ``item`` over there, with its outcome here."""
    global _process
    if _process is None:
        others = {other.nodeid.partition("::")[0] for other in item.session.items if needed(other)}
        _process = _Process(str(item.config.rootpath), sorted(others))
        atexit.register(_process.close)
    outcome = _process.ask(item.nodeid)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind == "failed":
        pytest.fail(outcome.text, pytrace=False)


# ------------------------------------------------------------------------------------------------ the other session


def _make_triton_quicker() -> None:
    """Four things take most of all time for nothing. Every call of a device function patches the language that it sees;
    once is enough: what its kernel's launch has not patched already stays so. Every sum, difference and product of
    integers is computed once more in 64 bits to find overflows, of which nobody is told unless the kernel is debugged.
    A table of dtypes is made anew wherever one is looked up. Shapes of operands are compared number by number, where
    numpy knows that they are equal."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    made_anew, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        element = dtype.scalar
        if element.name not in known:
            known[element.name] = made_anew(element)
        return known[element.name]

    interpreter._get_np_dtype = np_dtype
    semantic = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_if_needed(a: Any, b: Any) -> Any:
        if a.type.is_block() and b.type.is_block() and a.handle.data.shape == b.handle.data.shape:
            return a, b
        return broadcast(a, b)

    semantic.broadcast_impl_value = broadcast_if_needed
    seen = set()

    def device_call(self: interpreter.InterpretedFunction, *arguments: Any, **options: Any) -> Any:
        if self.fn not in seen:
            seen.add(self.fn)
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*arguments, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = device_call
    _make_types_quicker()


def _make_types_quicker() -> None:
    """Of what was left, nine tenths went into the types of tensors: every one that is made has its shape put into
    constexprs and checked, as if for the first time. Once for each shape is enough. What is not a plain shape goes the
    usual way, and ends in the usual error."""
    from triton.language import core
    from triton.runtime import interpreter

    unwrapped = core._unwrap_if_constexpr
    simple = {bool, int, float, str, type(None), core.dtype, core.pointer_type, core.block_type, core.tensor}

    def unwrapped_if_needed(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in simple else unwrapped(value)

    core._unwrap_if_constexpr = unwrapped_if_needed
    same_dtype = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or same_dtype(self, other)

    make_block, blocks = core.block_type.__init__, {}

    def block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        if not all(type(size) is int for size in sizes):  # 4.0 is no size, though equal to 4
            make_block(self, element, shape)
        elif sizes not in blocks:
            make_block(self, element, shape)
            blocks[sizes] = (self.shape, self.numel, f"<{self.shape}, ")
        else:
            self.element_ty = element
            self.shape, self.numel, opening = blocks[sizes]
            self.name = f"{opening}{element}>"

    core.block_type.__init__ = block
    scalar, wrapped = (core.tuple([]), core.constexpr(1)), {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar
            return
        sizes = tuple(type.shape.values)
        if sizes not in wrapped:
            wrapped[sizes] = (core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(type.numel))
        self.shape, self.numel = wrapped[sizes]

    core.tensor.__init__ = tensor
    semantic = interpreter.interpreter_semantic
    result_of, results = semantic.computation_type_impl, {}

    def computation_type(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in results:
            results[key] = result_of(a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return results[key]

    semantic.computation_type_impl = computation_type

    def patched(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def with_semantic(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return member(*arguments, **options)

        scope.set_attr(obj, name, with_semantic)

    interpreter._patch_attr = patched


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if PIPE not in os.environ:
        return None
    if importlib.util.find_spec("triton") is not None:
        _make_triton_quicker()
    pipe = Connection(int(os.environ[PIPE]))
    reports = _Reports()
    session.config.pluginmanager.register(reports)
    items = {item.nodeid: item for item in session.items}
    while True:
        try:
            nodeid: str = pipe.recv()
        except EOFError:
            return True
        reports.clear()
        items[nodeid].ihook.pytest_runtest_protocol(item=items[nodeid], nextitem=None)
        pipe.send(reports.outcome())


class _Reports(list[pytest.TestReport]):
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.append(report)

    def outcome(self) -> Outcome:
        for report in self:
            if report.failed:
                output = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
                return Outcome("failed", f"{report.when}, in the interpreter's process:\n{report.longreprtext}{output}")
            if report.skipped:
                return Outcome("skipped", report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped")
        return Outcome("passed", "")
