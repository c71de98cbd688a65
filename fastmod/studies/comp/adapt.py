"""Domain adaptation without labels, from MNIST and its corruptions to USPS, by training mixture weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.data import DataError
from fastmod.models import IsometricNet
from fastmod.runs import parallel
from fastmod.runs.config import StudyError
from fastmod.runs.study import Outcome, Row, Study
from fastmod.studies.comp import alignment, reports, sources
from fastmod.studies.comp.adapt_table import METHODS, TITLES, domain_rows, target_rows
from fastmod.studies.comp.stages import Stage, StagedTrial, recalibrate
from fastmod.studies.comp.training import CompConfig, measure
from fastmod.tasks import corruptions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WARM_UP = 100  # steps of the opponent alone: an untrained one would move shares at random


@dataclass(frozen=True)
class AdaptConfig(CompConfig):
    steps: int = 800  # on the known domains
    adapt_steps: int = 200  # per method
    lr: float = 2e-3
    logit_rate: float = 1.0  # the rate of all others, as in the paper: shares far from 0 and 1 can still adapt
    adapt_lr: float = 0.003  # of the logits; faster ones outrun the discriminator
    supervised_lr: float = 0.03  # of the logits in training with labels
    adapter_lr: float = 1e-3  # of the input adapter, in nets with fixed layers
    batch: int = 16
    evaluate_every: int = 200
    se: bool = False
    patch: int = 2
    side: int = 16
    dropout: float = 0.3
    train_images: int = 10_000
    domains: tuple[str, ...] = ("original", "shear", "scale", "shot_noise")  # of MNIST
    margin: int = 0  # dark pixels around USPS's digits, which touch the edges; 3 makes them as large as MNIST's
    begin: str = "shear"  # the domain whose mixture weights the new one starts from
    svhn: str = "auto"  # another known domain: yes, no, or auto (yes if its files are found)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapt_steps < 1 or self.adapt_steps % self.chunk:
            raise StudyError(f"adapt_steps: expected a multiple of chunk = {self.chunk}, got {self.adapt_steps}")
        rates = (self.adapt_lr, self.supervised_lr, self.adapter_lr)
        if not min(rates) > 0:
            raise StudyError(f"adapt_lr, supervised_lr and adapter_lr: expected more than 0, got {rates}")
        if len(self.domains) < 2 or not set(self.domains) <= set(corruptions.DOMAINS):
            raise StudyError(f"domains: expected two or more of {', '.join(corruptions.DOMAINS)}, got {self.domains}")
        if self.begin not in self.domains:
            raise StudyError(f"begin: expected one of domains = {', '.join(self.domains)}, got {self.begin!r}")
        if not 0 <= self.margin <= 64:
            raise StudyError(f"margin: expected 0 to 64, got {self.margin}")
        if self.svhn not in ("auto", "yes", "no"):
            raise StudyError(f"svhn: expected auto, yes or no, got {self.svhn!r}")

    @property
    def with_svhn(self) -> bool:
        if self.svhn != "auto":
            return self.svhn == "yes"
        try:
            sources.read("svhn", self.place)
        except DataError:
            return False
        return True


class AdaptTrial(StagedTrial):
    """Move the features of the new domain towards those of the known ones, which stay as pretrained.

    Only the new domain's mixture weights are trained, or the input adapter if the net has fixed layers.
    """

    config: AdaptConfig
    batch_dims = (1, 1)  # the new domain, and the known ones

    def __init__(self, config: AdaptConfig, name: str, seed: int, device: torch.device) -> None:
        tasks = {domain: config.task("mnist", domain) for domain in config.domains}
        if config.with_svhn:
            tasks["svhn"] = config.task("svhn")
        self.opponent: nn.Module | None = None  # trained beside the net, not part of it
        self.opponents_optimizer: torch.optim.Optimizer | None = None
        stages = [Stage("pretrained", config.steps), *(Stage(method, config.adapt_steps) for method in METHODS)]
        self.domains = len(tasks)
        super().__init__(config, name, seed, device, tasks, config.task("usps", margin=config.margin), stages)

    def build(self, config: AdaptConfig, name: str, seed: int) -> IsometricNet:
        fixed = name == "isometric"
        return IsometricNet(
            config.channels, config.templates if fixed else config.layers, config.templates, 10, self.domains,
            config.se, in_channels=config.colours, patch=config.patch, output=(128, 256), bias=True, output_norm=False,
            dropout=config.dropout, shared_head=True, signature="sequential" if fixed else None,
            share_layers=config.layers // 2 if name == "half_shared" else 0,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip

    # ---- stages

    @property
    def source(self) -> int:
        return self.config.domains.index(self.config.begin)

    def after_pretraining(self) -> None:
        """Measure USPS before adaptation, with statistics of its source domain and with its own."""
        net = self.pretrained()
        net.add_task(self.source)
        found = {"source": measure(net.eval(), self.new, self.number, None, self.device)[1]}
        self._recalibrate(net)
        found["target"] = measure(net.eval(), self.new, self.number, None, self.device)[1]
        self.extra["results"]["source_only"] = found

    def _recalibrate(self, net: IsometricNet) -> None:
        recalibrate(net, self.number, self.new_data.images, self.config.batch * self.domains, self.seed)

    def add_new(self, stage: Stage, resumed: bool) -> None:
        self.known = self.pretrained().eval().requires_grad_(False)
        net = self.model
        net.add_task(self.source)
        logits = net.body.logits
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name == "body.logits" or (logits is None and name.startswith("input_adapter.")))
        if net.body.logits is not None:
            others = torch.zeros(net.tasks, 1, 1, device=self.device)
            others[self.number] = 1  # not the first task's row: common shares stay as they are
            net.body.logits.register_hook(lambda gradient: gradient * others)
        self.opponent = self.opponents_optimizer = None
        if stage.name == "adversarial":
            self.opponent = alignment.Discriminator(self.config.channels).to(self.device)
        elif stage.name == "moments":
            self.opponent = alignment.TwoHeads(net.head.weight.detach(), net.head.bias.detach())
        if self.opponent is not None:
            self.opponents_optimizer = torch.optim.Adam(self.opponent.parameters(), 1e-3)
        if not resumed:
            self._recalibrate(net)
            if self.opponent is not None:
                self._warm_up(stage)

    def _warm_up(self, stage: Stage) -> None:
        """Train the opponent alone: the second head on the known domains, or the discriminator to separate domains.

        Without it the opponent's first gradients would be random.
        """
        assert self.opponent is not None
        generator = self.generator("heads")
        known = self.data.draw(_WARM_UP, self.config.batch, generator)
        new = self.new_data.draw(_WARM_UP, self.config.batch * self.domains, generator)
        for some, other in zip(known, new, strict=True):
            images, labels = self.data(some)
            if stage.name == "moments":
                with torch.no_grad():
                    features = self.known.embed(images, None).transpose(0, 1)  # [S, B, F]
                scores = self.opponent(features)
                loss = F.cross_entropy(scores.flatten(0, 2), labels.repeat(2, 1, 1).flatten())
            else:
                with torch.no_grad():
                    theirs = self.known.features(images, None).flatten(0, 1)
                    ours = self.model.features(self.new_data(other[0])[0], self.number).squeeze(1)
                loss = alignment.discriminator_loss(self.opponent(theirs), self.opponent(ours))
            self._train_opponent(loss)

    def make_optimizer(self) -> torch.optim.Optimizer:
        if not self.extra["stage"]:
            return super().make_optimizer()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        rate = self.config.supervised_lr if self.stage.name == "supervised" else self.config.adapt_lr
        if self.model.body.logits is None:
            rate = self.config.adapter_lr
        return torch.optim.Adam([{"params": trained, "lr": rate, "first": rate}], foreach=True)

    # ---- training

    def batches(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        if not self.extra["stage"]:
            return super().batches(generator)
        known = self.data.draw(self.config.chunk, self.config.batch, generator)
        return self.new_data.draw(self.config.chunk, self.config.batch * self.domains, generator), known

    def loss(self, index: Tensor, *more: Tensor) -> Tensor:  # type: ignore[override]
        if not self.extra["stage"]:
            return super().loss(index)
        images, labels = self.new_data(index[0])
        known, right = self.data(more[0])  # [S, B, ...]
        loss = getattr(self, f"_{self.stage.name}")(images, labels, known, right)
        self.average.update_parameters(self.model)
        return loss

    def _supervised(self, images: Tensor, labels: Tensor, known: Tensor, right: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(self.model, images), labels)

    def _adversarial(self, images: Tensor, labels: Tensor, known: Tensor, right: Tensor) -> Tensor:
        assert self.opponent is not None
        with torch.no_grad():
            theirs = self.known.features(known, None).flatten(0, 1)  # [B * S, C, H, W]
        ours = self.model.features(images, self.number).squeeze(1)
        self._rate(alignment.ADVERSARY_LR)
        self._train_opponent(alignment.discriminator_loss(self.opponent(theirs), self.opponent(ours.detach())))
        return alignment.fooling_loss(self.opponent(ours))

    def _moments(self, images: Tensor, labels: Tensor, known: Tensor, right: Tensor) -> Tensor:
        assert self.opponent is not None
        with torch.no_grad():
            theirs = self.known.embed(known, None).transpose(0, 1)  # [S, B, F]
        ours = self.model.embed(images, self.number).squeeze(1)
        self._rate(alignment.HEADS_LR)
        scores = self.opponent(theirs).flatten(1, 2)  # [2, S * B, classes]
        right_answers = sum(F.cross_entropy(each, right.flatten()) for each in scores)
        self._train_opponent(right_answers - alignment.discrepancy(self.opponent(ours.detach())))
        distance = alignment.MOMENT_WEIGHT * alignment.moment_distance(theirs, ours)
        return distance + alignment.discrepancy(self.opponent(ours))

    def _train_opponent(self, loss: Tensor) -> None:
        """One step of the opponent; clears the gradients that the net's loss left in it."""
        assert self.opponents_optimizer is not None
        self.opponents_optimizer.zero_grad()
        loss.backward()
        parallel.processes.average(self.opponents_optimizer)
        self.opponents_optimizer.step()

    def _rate(self, ends: tuple[float, float]) -> None:
        assert self.opponents_optimizer is not None
        done, whole = self.progress
        for group in self.opponents_optimizer.param_groups:
            group["lr"] = alignment.linear_rate(ends, done, whole)

    # ---- measures

    def predict(self, images: Tensor, number: int) -> Tensor:
        if self.stage.name == "moments":
            assert isinstance(self.opponent, alignment.TwoHeads)
            return self.opponent.together(self.evaluated.embed(images, number).squeeze(1))
        return super().predict(images, number)

    def outcome(self) -> dict[str, Any]:
        net = self.model
        of_one = 1 if net.body.logits is None else net.tasks
        trained = sum(p.numel() for p in net.parameters() if p.requires_grad) // of_one
        if self.name == "half_shared":
            trained -= self.config.layers // 2 * self.config.templates
        if net.body.logits is not None:
            self.extra["mixtures"][f"USPS, {self.stage.name}"] = self.evaluated.mixture(self.number).tolist()
        return {**super().outcome(), "trained": trained}

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        found = super().state()
        if self.opponent is not None and self.opponents_optimizer is not None:
            found["opponent"] = [self.opponent.state_dict(), self.opponents_optimizer.state_dict()]
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if self.opponent is not None and self.opponents_optimizer is not None:
            self.opponent.load_state_dict(state["opponent"][0])
            self.opponents_optimizer.load_state_dict(state["opponent"][1])


class CompAdapt(Study):
    name = "comp-adapt"
    title = "A new domain without labels: do a few mixture weights adapt a net to it?"
    paper = "Compositional models, Tables 3, 4, 11, 12"
    models = tuple(TITLES)
    default_models = models
    default_seeds = "1"
    criterion = ""  # there are no validation images
    defaults = AdaptConfig()
    quick: ClassVar[dict[str, Any]] = {
        "steps": 20, "adapt_steps": 10, "evaluate_every": 10, "batch": 4, "layers": 4, "templates": 2,
        "train_images": 200, "test_images": 100,
    }  # fmt: skip
    #: The paper's net and lengths (2 and 10 epochs, batches of 32); it does not print optimiser and image side.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        model: {
            "channels": 40, "layers": 16, "templates": 4, "colours": 3, "side": 32, "batch": 32, "steps": 3750,
            "adapt_steps": 2280, "train_images": 0,
        }
        for model in models
    }  # fmt: skip

    def prepare(self, config: AdaptConfig) -> None:
        for dataset in ("mnist", "usps", *(["svhn"] if config.svhn == "yes" else [])):
            sources.read(dataset, config.place)

    def trial(self, config: AdaptConfig, model: str, seed: int, device: torch.device) -> AdaptTrial:
        return AdaptTrial(self.config_of(config, model), model, seed, device)

    def table(self, outcome: Outcome) -> list[Row]:
        rows: list[Row] = []
        for model in outcome.models():
            config, records = self.config_of(outcome.config, model), outcome.of(model)
            setting = self.setting(outcome.config, model)
            setting = "the paper's net, not its optimiser" if setting == "the paper's setting" else setting
            rows += target_rows(config, model, records, setting) + domain_rows(model, records)
        return rows

    def figures(self, outcome: Outcome) -> dict[str, tuple[Figure, str]]:
        return dict(reports.mixture_figures(outcome, TITLES))
