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
    "mask-addmul": "fastmod.studies.mask_addmul:MaskAddMul",
    "mask-doubleadd": "fastmod.studies.mask_doubleadd:MaskDoubleAdd",
    "mask-permuted-mnist": "fastmod.studies.mask_permuted_mnist:MaskPermutedMNIST",
    "mask-cifar": "fastmod.studies.mask_cifar:MaskCifar",
    "mask-scan": "fastmod.studies.mask_scan:MaskScan",
    "mask-math": "fastmod.studies.mask_math:MaskMath",
}


def names() -> list[str]:
    return list(_STUDIES)


def get(name: str) -> Study:
    if name not in _STUDIES:
        raise StudyError(f"unknown study {name!r}; known: {', '.join(_STUDIES)}")
    module, _, attribute = _STUDIES[name].partition(":")
    return getattr(import_module(module), attribute)()
