"""Where the news of a trial go: metrics, checkpoints and trackers, in the folder of its run."""

from __future__ import annotations

from typing import Any, Protocol

from fastmod.runs import checkpoint, tracking
from fastmod.runs.folder import Plan, RunFolder, trial_key


class Ledger(Protocol):
    """What the engine asks of it, wherever the trial is trained."""

    def state(self) -> dict[str, Any] | None:
        """What to go on from, if there is anything."""

    def add(self, step: int, metrics: dict[str, float]) -> None: ...

    def save(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class FolderLedger:
    """On this machine's disk."""

    def __init__(self, folder: RunFolder, plan: Plan, model: str, seed: int) -> None:
        self._folder, self._model, self._seed = folder, model, seed
        self.key, self._owner = trial_key(model, seed), plan.owner(model, seed)
        self._plan, self._file = plan, folder.checkpoint_file(self.key)
        self._sinks: tracking.Sinks | None = None  # opened after the checkpoint was read: they ask for its step
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
        if self._sinks is not None:
            self._sinks.flush()
        self._folder.sync(self.key)
        checkpoint.save(self._file, self._owner, state)

    def close(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
