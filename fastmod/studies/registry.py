"""The studies by name: fastmod's own and those of installed packages; a study is imported when it is asked for.

A package joins by an entry point in the group ``fastmod.studies``, its name that of the study, its value the class::

    [project.entry-points."fastmod.studies"]
    sorting = "package.module:Sorting"
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from fastmod.runs.config import StudyError
from fastmod.runs.study import Study

GROUP = "fastmod.studies"
_OWN = {
    "algo": "fastmod.studies.blocks.algo:Algo",
    "addmul": "fastmod.studies.blocks.addmul:AddMul",
    "doubleadd": "fastmod.studies.blocks.doubleadd:DoubleAdd",
    "bpmnist": "fastmod.studies.blocks.bpmnist:BPMNIST",
    "mask-addmul": "fastmod.studies.masks.addmul:MaskAddMul",
    "mask-doubleadd": "fastmod.studies.masks.doubleadd:MaskDoubleAdd",
    "mask-permuted-mnist": "fastmod.studies.masks.permuted_mnist:MaskPermutedMNIST",
    "mask-cifar": "fastmod.studies.masks.cifar:MaskCifar",
    "mask-beta": "fastmod.studies.masks.sensitivity:MaskBeta",
    "mask-stability": "fastmod.studies.masks.stability:MaskStability",
    "mask-scan": "fastmod.studies.masks.scan:MaskScan",
    "mask-math": "fastmod.studies.masks.math:MaskMath",
    "resmix-pentomino": "fastmod.studies.resmix.pentomino:ResMixPentomino",
    "resmix-parity": "fastmod.studies.resmix.parity:ResMixParity",
    "resmix-cifar": "fastmod.studies.resmix.cifar:ResMixCifar",
    "comp-single": "fastmod.studies.comp.single:CompSingle",
    "comp-multitask": "fastmod.studies.comp.multitask:CompMultitask",
    "comp-transfer": "fastmod.studies.comp.transfer:CompTransfer",
    "comp-adapt": "fastmod.studies.comp.adapt:CompAdapt",
}


def _all() -> dict[str, EntryPoint]:
    """fastmod's own first, whose names no package can take: runs that exist are theirs."""
    own = {name: EntryPoint(name, place, GROUP) for name, place in _OWN.items()}
    others = {point.name: point for point in entry_points(group=GROUP)}
    return own | {name: others[name] for name in sorted(others) if name not in own}


def names() -> list[str]:
    return list(_all())


def get(name: str) -> Study:
    points = _all()
    if name not in points:
        raise StudyError(f"unknown study {name!r}; known: {', '.join(points)}")
    if name in _OWN:
        return points[name].load()()
    try:
        study = points[name].load()()
    except Exception as error:  # of somebody else's module: anything
        raise StudyError(f"study {name!r} ({points[name].value}): {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise StudyError(f"study {name!r} ({points[name].value}): expected a subclass of fastmod.runs.study.Study")
    return study
