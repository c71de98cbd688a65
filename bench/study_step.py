"""What a study adds to the bare model step: ``python -m bench.study_step``.

Bare: forward and backward on data that lie ready, as in the other benchmarks. Study: the engine's own chunk with data
made, gradients clipped, Adam, the loss read once. Both in turn, medians.
"""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.table import Table

from fastmod.bench import clock
from fastmod.bench.steps import Step
from fastmod.runs.config import Config, changed
from fastmod.studies import registry

CASES = (
    ("algo", "SMFR"),
    ("addmul", "SMFR_softmax"),
    ("doubleadd", "SMFR_softmax"),
    ("bpmnist", "SMFR_no_context"),
    ("resmix-pentomino", "ResMixNet_4_1"),
)
# Long steps in short chunks, so that the contenders take turns often enough to meet the same machine.
SIZES: dict[str, dict[str, int]] = {
    "addmul": {"width": 4, "depth": 2, "layers": 1}, "bpmnist": {"chunk": 5},
    "resmix-pentomino": {"chunk": 1, "images": 640},
}  # fmt: skip
LIMIT = 1.3


def config_of(study: str) -> Config:
    return changed(registry.get(study).defaults, SIZES.get(study, {}))


def chunks(study_name: str, model: str) -> dict[str, Step]:
    """Contender -> one chunk of steps."""
    torch.manual_seed(0)
    trial = registry.get(study_name).trial(config_of(study_name), model, 0, torch.device("cpu"))
    ready = list(zip(*trial.batches(trial.generator("data")), strict=True))

    def bare() -> list[torch.Tensor]:
        for batch in ready:
            for parameter in trial.model.parameters():
                parameter.grad = None
            trial.loss(*batch).backward()
        return []

    def whole() -> list[torch.Tensor]:
        return [torch.tensor(float(trial.chunk()))]

    return {"bare": bare, "study": whole}


def main(words: list[str]) -> None:
    torch.set_num_threads(2)
    table = Table("study", "bare ms a step", "study ms a step", "ratio", "limit")
    for study, model in CASES:
        if words and study not in words:
            continue
        try:
            steps = chunks(study, model)
        except ValueError as error:  # MNIST is not at hand
            print(f"{study}: {error}")
            continue
        times = clock.interleaved(steps, seconds=5, per_call=config_of(study).chunk)
        bare, whole = (times[name].median * 1e3 for name in ("bare", "study"))
        table.add_row(f"{study} {model}", f"{bare:.2f}", f"{whole:.2f}", f"{whole / bare:.2f}", f"{LIMIT:g}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
