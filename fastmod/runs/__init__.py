"""What all studies share: settings, trials, the engine that runs and resumes them, and the files of a run.

``fastmod.runs.load(RUN)`` returns the trained model of a run folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastmod.runs.loading import load, load_trial

__all__ = ["load", "load_trial"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: the modules of a study import others of this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastmod.runs import loading

    return getattr(loading, name)
