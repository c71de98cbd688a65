"""Records what a trial reports: metrics, checkpoints and trackers, in the folder of its run."""

from __future__ import annotations

from typing import Any, Protocol

from fastmod.runs import checkpoint, tracking
from fastmod.runs.folder import Plan, RunFolder, trial_key


class Ledger(Protocol):
    """What the engine needs, wherever the trial is trained."""

    def state(self) -> dict[str, Any] | None:
        """The state to continue from, if there is one."""

    def add(self, step: int, metrics: dict[str, float]) -> None: ...

    def save(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class FolderLedger:
    """A ledger on the disk of this machine."""

    def __init__(self, folder: RunFolder, plan: Plan, model: str, seed: int) -> None:
        self._folder, self._model, self._seed = folder, model, seed
        self.key, self._owner = trial_key(model, seed), plan.owner(model, seed)
        self._plan, self._file = plan, folder.checkpoint_file(self.key)
        self._sinks: tracking.Sinks | None = None  # opened after the checkpoint was read, as they need its step
        self._step = 0

    def state(self) -> dict[str, Any] | None:
        if not self._file.exists():
            return None
        state = checkpoint.load(self._file, self._owner)
        self._step = state["step"]
        return state

    def add(self, step: int, metrics: dict[str, float]) -> None:
        self._folder.append({"trial": self.key, "model": self._model, "seed": self._seed, "step": step, **metrics})
        if self._sinks is None:
            about = tracking.About(self._folder.path, self._plan, self._model, self._seed, self._step)
            self._sinks = tracking.Sinks(about)
        self._sinks.add(metrics, step)

    def save(self, state: dict[str, Any]) -> None:
        self.keep(checkpoint.content_of(self._owner, state))

    def keep(self, content: bytes) -> None:
        """Write a checkpoint that was already serialised."""
        if self._sinks is not None:
            self._sinks.flush()
        self._folder.sync(self.key)
        checkpoint.write_atomically(self._file, content)

    def kept(self) -> bytes | None:
        """The checkpoint on the disk; metrics measured after it are dropped, as they will be measured again."""
        state = self.state()
        self._folder.rewind({self.key: self._step if state is not None else -1}, only=self.key)
        return self._file.read_bytes() if state is not None else None

    def close(self) -> None:
        sinks, self._sinks = self._sinks, None
        if sinks is not None:
            sinks.close()
