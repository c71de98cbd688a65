"""The same metrics once more, for TensorBoard."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Events:
    """TensorBoard's file of a trial, made when there is something to tell; nothing without tensorboard, which the
    command says: the metrics have it all."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step
        self._writer: SummaryWriter | None = None
        self._wanted = find_spec("tensorboard") is not None

    def add(self, metrics: dict[str, float], step: int) -> None:
        if not self._wanted:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._hook = threading.excepthook
            threading.excepthook = self._failed
            # What an earlier session told of later steps than its checkpoint holds is not valid any more.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._step + 1)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            finally:
                threading.excepthook = self._hook

    def _failed(self, what: Any) -> None:
        """It writes in a thread. A full disk there is an error of the next ``flush``, and needs no traceback before."""
        if not (isinstance(what.exc_value, OSError) and type(what.thread).__module__.startswith("tensorboard.")):
            self._hook(what)
