"""The table of ``comp-adapt``: the new domain before and after adaptation, and the known ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastmod.runs.study import Record, Row
from fastmod.studies.comp import reports, sources

TITLES = {
    "isometric": "isometric, K layers",
    "compositional": "compositional",
    "half_shared": "compositional, half of the shares in common",
}
METHODS = ("adversarial", "moments", "supervised")
#: Tables 3 and 12: the fixed net, half of the shares in common, all shares separate.
_PRINTED: Mapping[str, tuple[str, str, str]] = {
    "source_only": ("95.75", "96.37", "96.05"),
    "adversarial": ("98.12", "-", "98.33"),
    "moments": ("96.93", "-", "96.85"),
    "supervised": ("-", "-", "98.25"),
    "original": ("99.14", "99.09", "99.29"),
    "shot_noise": ("97.63", "98.63", "98.28"),
    "shear": ("98.79", "98.69", "98.58"),
    "scale": ("98.18", "98.38", "98.79"),
    "svhn": ("54.73", "88.86", "89.16"),
}
_COLUMN = {"isometric": 0, "half_shared": 1, "compositional": 2}


def target_rows(config: Any, model: str, records: Sequence[Record], setting: str) -> list[Row]:
    title, results = TITLES[model], [record.result["results"] for record in records]
    known = ", ".join([*config.domains, *(["SVHN"] if "accuracy_svhn" in results[0]["pretrained"] else [])])
    column = _COLUMN[model]
    rows = []
    for bn in ("source", "target"):
        name = f"{title}: USPS, source only, BN statistics of the {bn} (%)"
        values = [result["source_only"][bn] for result in results]
        rows.append(reports.row(name, _PRINTED["source_only"][column], records, values, f"known: {known}; {setting}"))
    for method in METHODS:
        note = f"{results[0][method]['trained']} parameters trained"
        note += ", and two heads on the known domains" if method == "moments" else ""
        values = [result[method]["accuracy"] for result in results]
        rows.append(reports.row(f"{title}: USPS, {method} (%)", _PRINTED[method][column], records, values, note))
    for method in METHODS[:2]:
        values = [result[method]["accuracy"] - result["source_only"]["target"] for result in results]
        name = f"{title}: USPS, {method} - source only with the target's statistics (points)"
        rows.append(reports.row(name, "-", records, values))
    return rows


def domain_rows(model: str, records: Sequence[Record]) -> list[Row]:
    first = [record.result["results"]["pretrained"] for record in records]
    rows = []
    for domain, printed in _PRINTED.items():
        if f"accuracy_{domain}" in first[0]:
            values = [result[f"accuracy_{domain}"] for result in first]
            name = "SVHN" if domain == "svhn" else sources.title_of("mnist", domain)
            rows.append(reports.row(f"{TITLES[model]}: {name} (%)", printed[_COLUMN[model]], records, values))
    return rows
