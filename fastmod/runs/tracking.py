"""Trackers of experiments, which get the same metrics as the run folder: ``--track tensorboard|wandb|mlflow|trackio``.

Each is a thin sink for one trial, opened with its first metrics. Nothing depends on them, as the run folder has
everything: a tracker that fails (its server is down) is dropped with a warning, and training goes on.
"""

from __future__ import annotations

import importlib
import re
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fastmod.runs.config import StudyError
from fastmod.runs.events import Events
from fastmod.runs.folder import Plan, trial_key


@dataclass(frozen=True)
class About:
    """The trial of a sink; ``step``: that of the checkpoint from which it continues."""

    folder: Path
    plan: Plan
    model: str
    seed: int
    step: int

    @property
    def key(self) -> str:
        return trial_key(self.model, self.seed)

    @property
    def project(self) -> str:
        return f"fastmod-{self.plan.study}"

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": self.model, "seed": self.seed, **self.plan.settings}

    def number(self, tracker: str, made: Callable[[], str]) -> tuple[str, bool]:
        """The name of this trial in the tracker, and whether it existed before: a resumed trial keeps its line."""
        file = self.folder / "tracking" / f"{self.key}.{tracker}"
        if file.exists():
            return file.read_text(), True
        number = made()
        file.parent.mkdir(exist_ok=True)
        file.write_text(number)
        return number, False


class Sink(Protocol):
    def add(self, metrics: dict[str, float], step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Wandb:
    """A run of Weights & Biases in the project ``fastmod-STUDY``, grouped by run folder."""

    def __init__(self, about: About) -> None:
        number, _ = about.number("wandb", lambda: uuid.uuid4().hex)
        self._run = importlib.import_module("wandb").init(
            project=about.project, group=about.folder.name, name=about.key, id=number, resume="allow",
            config=about.settings, dir=str(about.folder), reinit="create_new",
        )  # fmt: skip

    def add(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def flush(self) -> None:
        pass  # it sends from its own process

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of the experiment ``fastmod-STUDY``, at the tracking URI that MLflow is set to."""

    def __init__(self, about: About) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        self._number, known = about.number("mlflow", lambda: self._begin(mlflow, about))
        if known:
            self._client.update_run(self._number, status="RUNNING")

    def _begin(self, mlflow: Any, about: About) -> str:
        experiment = mlflow.set_experiment(about.project).experiment_id  # created if missing
        name = f"{about.folder.name} {about.key}"
        number = self._client.create_run(experiment, run_name=name).info.run_id
        parameters = [self._entities.Param(key, str(value)) for key, value in about.settings.items()]
        self._client.log_batch(number, params=parameters)
        return number

    def add(self, metrics: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        lines = [self._entities.Metric(_plain(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._number, metrics=lines)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._client.set_terminated(self._number)


class Trackio:
    """A run in the local data base of trackio, in the project ``fastmod-STUDY``."""

    def __init__(self, about: About) -> None:
        name, known = about.number("trackio", lambda: f"{about.folder.name}-{about.key}-{uuid.uuid4().hex[:6]}")
        self._run = importlib.import_module("trackio").init(
            project=about.project, name=name, config=about.settings, resume="must" if known else "never"
        )

    def add(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


def _plain(name: str) -> str:
    """MLflow allows letters, digits and a few signs."""
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)


_OTHERS: dict[str, Callable[[About], Sink]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
#: Tracker -> the extra that installs it.
EXTRAS = {"tensorboard": "study", **{name: name for name in _OTHERS}}


def check(names: Sequence[str]) -> None:
    """Check the names before anything starts."""
    for name in names:
        if name not in EXTRAS:
            raise StudyError(f"--track {name}: expected one of {', '.join(EXTRAS)}")
        if find_spec(name) is None:
            raise StudyError(f'--track {name}: the package {name} is missing; pip install "fastmod[{EXTRAS[name]}]"')


class Sinks:
    """All sinks of a trial: TensorBoard if it is installed, and those that the plan names."""

    def __init__(self, about: About) -> None:
        self._events = Events(about.folder / "events" / about.key, about.step)
        self._about = about
        self._others: dict[str, Sink] = {}
        for name in about.plan.track:
            if name in _OTHERS:
                self._try(name, lambda name=name: self._others.update({name: _OTHERS[name](about)}))  # type: ignore[misc]

    def add(self, metrics: dict[str, float], step: int) -> None:
        self._events.add(metrics, step)
        self._each(lambda sink: sink.add(metrics, step))

    def flush(self) -> None:
        self._events.flush()
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        try:
            self._events.close()
        finally:
            self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[Sink], None]) -> None:
        for name, sink in list(self._others.items()):
            self._try(name, lambda sink=sink: act(sink))  # type: ignore[misc]

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # may be anything, from somebody else's network
            self._others.pop(name, None)
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"{self._about.key}: {name} is not told any more: {reason}", RuntimeWarning, stacklevel=2)
