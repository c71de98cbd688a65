"""The metrics of a trial for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

_numbers = count()  # so that writers of one process and second have different files


class Events:
    """The file of a trial, made when the first metrics are logged; without tensorboard, of which the command tells,
    nothing: the run folder has all metrics.

    Records are written at once. Torch's SummaryWriter writes in a thread, where a full disk would end in a traceback
    that only a hook for the whole process could suppress.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self._writer: RecordWriter | None = None
        self._wanted = find_spec("tensorboard") is not None

    def add(self, metrics: dict[str, float], step: int) -> None:
        if not self._wanted:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        if self._writer is None:
            self._begin()
        for name, value in metrics.items():
            self._write(step=step, summary=Summary(value=[Summary.Value(tag=name, simple_value=float(value))]))
        self._step = step
        self.flush()  # somebody may be watching

    def _begin(self) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        unique = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._writer = RecordWriter((self._folder / f"events.out.tfevents.{unique}").open("wb"))
        self._write(file_version="brain.Event:2")
        # What an earlier session logged of later steps than its checkpoint holds is not valid any more.
        self._write(step=self._step + 1, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        assert self._writer is not None
        self._writer.write(Event(wall_time=time.time(), **content).SerializeToString())

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
