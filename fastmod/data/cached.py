"""Cache for readers of data sets, so that the trials of a run read each data set once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Cached(Generic[_Arguments, _Result]):
    def __init__(self, read: Callable[_Arguments, _Result], size: int | None) -> None:
        def keep(variable: str | None, *args: Any, **options: Any) -> _Result:  # the variable is part of the key
            return read(*args, **options)

        kept = functools.lru_cache(size)(keep)
        self._kept: Callable[..., _Result] = kept
        self.cache_clear = kept.cache_clear
        functools.update_wrapper(self, read)

    def __call__(self, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        return self._kept(os.environ.get("FASTMOD_DATA"), *args, **options)


def cached(size: int | None = None) -> Callable[[Callable[_Arguments, _Result]], _Cached[_Arguments, _Result]]:
    """Keep the results of the last ``size`` different calls, by default of all.

    Calls differ by their arguments and by ``FASTMOD_DATA``, where readers look for files.
    """
    return lambda read: _Cached(read, size)
