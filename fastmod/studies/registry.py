"""The studies by name; a study's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from fastmod.studies.config import StudyError
from fastmod.studies.study import Study

_STUDIES = {
    "algo": "fastmod.studies.algo:Algo",
    "addmul": "fastmod.studies.addmul:AddMul",
    "doubleadd": "fastmod.studies.doubleadd:DoubleAdd",
    "bpmnist": "fastmod.studies.bpmnist:BPMNIST",
}


def names() -> list[str]:
    return list(_STUDIES)


def get(name: str) -> Study:
    if name not in _STUDIES:
        raise StudyError(f"unknown study {name!r}; known: {', '.join(_STUDIES)}")
    module, _, attribute = _STUDIES[name].partition(":")
    return getattr(import_module(module), attribute)()
