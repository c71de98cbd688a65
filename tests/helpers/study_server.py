"""The process that forks a child for every command of a study.

Starting Python with torch takes seconds, so one process warms up and forks. Children are real processes: they are
killed, interrupted and limited like any other, and end with real exit codes.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
import traceback
from typing import Any

from tests.helpers.study_hooks import HOOKS
from tests.helpers.study_runs import SMALL


def serve() -> None:
    """The warmed-up process: answers a line of JSON with a line of JSON."""
    from fastmod import cli

    _warm_up(cli, sys.argv[1])
    gc.collect()
    gc.freeze()  # children that collect garbage would copy all of the memory they share
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            assert len(os.listdir("/proc/self/task")) == 1
            pid = os.fork()
            if pid == 0:
                answers.close()
                _be_the_command(cli, request)
            answer = {"pid": pid}
        print(json.dumps(answer), file=answers, flush=True)


def _warm_up(cli: Any, folder: str) -> None:
    """Import all that is imported late, by one run of the smallest kind."""
    from fastmod.studies import registry

    for name in registry.names():
        registry.get(name)
    with open(os.devnull, "w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        for args in (["study", *SMALL["doubleadd"], "--out", f"{folder}/warm"], ["inspect", f"{folder}/warm"]):
            assert not cli.app(args, standalone_mode=False), args
        sys.stdout = shown


def _be_the_command(cli: Any, request: dict[str, Any]) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        signal.alarm(100)  # what hangs ends
        for stream, flags in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{request['folder']}/{flags}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (io.TextIOWrapper(open(fd, "wb", 0), write_through=True) for fd in (1, 2))  # noqa: SIM115
        os.environ.update(request["env"])
        import torch

        torch.manual_seed(int.from_bytes(os.urandom(6), "big"))  # as little in common with other children as can be
        for name, arguments in request["hooks"]:
            HOOKS[name](**arguments)
        cli.app(request["args"], prog_name="fastmod")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        os._exit(code)
