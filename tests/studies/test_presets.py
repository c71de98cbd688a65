"""``--set paper=true``: what was typed stands, the preset fills the rest, and the label says what differs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastmod.runs.command import make_plan
from fastmod.runs.config import StudyError, changed, chosen
from fastmod.runs.engine import prepare_trial
from fastmod.runs.folder import Plan, RunFolder
from fastmod.runs.study import Outcome, Record
from fastmod.runs.sweep import Sweep
from fastmod.studies import registry
from tests.helpers.study_commands import in_process, refused

CPU = torch.device("cpu")
#: Study -> a model, and a setting of its preset with another value as it is typed.
TYPED: dict[str, tuple[str, str, str]] = {
    "algo": ("FNN", "lr", "0.5"),
    "addmul": ("FNN", "interference", "100"),
    "doubleadd": ("FNN", "clip", "0.5"),
    "bpmnist": ("SMFR", "hidden", "8"),
    "mask-addmul": ("FNN", "beta", "0.5"),
    "mask-doubleadd": ("LSTM", "units", "8"),
    "mask-permuted-mnist": ("FNN", "tasks", "2"),
    "mask-beta": ("FNN", "mask_steps", "50"),
    "mask-stability": ("CNN", "pairs", "2"),
    "mask-scan": ("LSTM", "units", "8"),
    "mask-math": ("sort", "width", "8"),
    "mask-cifar": ("CNN", "mask_lr", "0.5"),
    "resmix-pentomino": ("ResNet26", "epochs", "3"),
    "resmix-parity": ("ResNet26", "epochs", "3"),
    "resmix-cifar": ("ResNet26", "epochs", "3"),
    "comp-single": ("mixture", "batch", "8"),
    "comp-multitask": ("mixture", "templates", "4"),
    "comp-transfer": ("mixture", "tune_steps", "50"),
    "comp-adapt": ("isometric", "adapt_steps", "50"),
}


@pytest.mark.parametrize("name", registry.names())
def test_what_is_typed_stands_in_every_study(name: str) -> None:
    study = registry.get(name)
    model, key, value = TYPED[name]
    config = chosen(study.defaults, {"paper": "true", key: value})
    trained = study.config_of(config, model)
    preset = study.preset_of(config, model)
    assert key in preset and getattr(trained, key) == getattr(config, key) != preset[key]
    assert {k: getattr(trained, k) for k in preset if k != key} == {k: preset[k] for k in preset if k != key}
    assert study.setting(config, model).startswith(f"not the paper's setting: {key} {getattr(config, key)} (")
    assert study.setting(chosen(study.defaults, {"paper": "true"}), model).startswith("the paper's setting")


@pytest.mark.parametrize("name", registry.names())
def test_a_typed_default_stands_too(name: str) -> None:
    study = registry.get(name)
    model = TYPED[name][0]
    preset = study.preset_of(study.defaults, model)
    typed = {key: getattr(study.defaults, key) for key in preset}
    trained = study.config_of(chosen(study.defaults, {"paper": True, **typed}), model)
    assert {key: getattr(trained, key) for key in typed} == typed


@pytest.mark.parametrize("name", registry.names())
def test_runs_that_do_not_say_what_was_typed_go_on_as_before(name: str) -> None:
    """By the rules of their day: the whole preset, in mask studies but for values that are not the default."""
    study = registry.get(name)
    model, key, value = TYPED[name]
    config = changed(study.defaults, {"paper": "true", key: value})
    trained, preset = study.config_of(config, model), study.preset_of(config, model)
    stands = name.startswith("mask-")
    assert getattr(trained, key) == (getattr(config, key) if stands else preset[key])
    settings = {k: v for k, v in json.loads(json.dumps(asdict(config))).items() if k != "typed"}
    old = Plan(name, [model], [0], settings)
    assert old.owner(model, 0) == Plan(name, [model], [0], {**settings, "typed": None}).owner(model, 0)
    assert changed(study.defaults, old.settings).typed is None
    new = Plan(name, [model], [0], {**settings, "typed": ["paper"]})
    assert old.owner(model, 0) != new.owner(model, 0)


def plan_of(study: str, *models: str, quick: bool = False, steps: int | None = None, **settings: str) -> Plan:
    return make_plan(study, list(models), None, steps, settings, quick, 1, "cpu")


def test_names_of_what_was_typed_are_kept(tmp_path: Path) -> None:
    plan = plan_of("algo", "SMFR", quick=True, steps=100, paper="true", width="8")
    RunFolder.create(tmp_path / "run", plan)
    read = RunFolder(tmp_path / "run").plan()
    assert read.settings["typed"] == ["evaluate_every", "paper", "steps", "width"]
    assert read.owner("SMFR", 0) == plan.owner("SMFR", 0)
    refused(in_process("study", "algo", "--set", "typed=width", "--out", tmp_path / "other"), "typed")
    refused(in_process("sweep", "algo", "--grid", "typed=a,b", "--out", tmp_path / "other"), "typed")


def test_quick_and_steps_stand() -> None:
    plan = plan_of("bpmnist", "FNN", quick=True, paper="true", verify="false", data=str(_digits()))
    trial = prepare_trial(registry.get("bpmnist"), plan, "FNN", 0)
    assert trial.config.steps == 100 and trial.config.lr == 3e-4
    plan = plan_of("resmix-pentomino", "ResNet26", quick=True, paper="true")
    study = registry.get("resmix-pentomino")
    assert study.config_of(changed(study.defaults, plan.settings), "ResNet26").epochs == 2


def _digits() -> Path:
    from tests.helpers import study_runs

    return study_runs._digits()


@pytest.mark.parametrize(("name", "model"), [("algo", "SMFR"), ("doubleadd", "SMFR_softmax")])
def test_no_seed_draws_an_architecture_that_was_typed(name: str, model: str) -> None:
    study = registry.get(name)
    plan = plan_of(name, model, paper="true")
    cells = Sweep(plan, {"width": ["3", "8"]}).cells(Path("cells"))
    for cell in cells:
        for seed in (0, 1):
            trial: Any = prepare_trial(study, cell.plan, model, seed)
            assert trial.config.grid is False and trial.config.width == cell.values["width"]
            assert trial.architecture == {}
    config = changed(study.defaults, cells[0].plan.settings)
    assert "grid False (True)" in study.setting(config, model)
    assert study.config_of(config, "FNN").grid is True, "its grid has no width"
    drawn: Any = prepare_trial(study, plan, model, 0)
    assert drawn.config.grid is True and drawn.architecture.keys() == study.grids["smfr"].keys()
    both: Any = prepare_trial(study, plan_of(name, model, grid="true", width="3"), model, 1)
    assert both.architecture["width"] == both.config.width == 3
    assert both.architecture["layers"] == both.config.layers


def test_cells_of_old_sweeps_stay_as_they_are() -> None:
    plan = plan_of("algo", "SMFR", paper="true")
    old = replace(plan, settings={k: v for k, v in plan.settings.items() if k != "typed"})
    assert all(cell.plan.settings["typed"] is None for cell in Sweep(old, {"width": ["3", "8"]}).cells(Path("cells")))


def test_a_preset_that_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    done = in_process("study", "mask-addmul", "--set", "paper=true", "--set", "samples=3", "--set", "batch=9",
                      "--set", "mask_batch=none", "--set", "chunk=7", "--set", "evaluate_every=7", "--steps", "7",
                      "--out", tmp_path / "run")  # fmt: skip
    refused(done, "mask_steps")
    assert not (tmp_path / "run").exists()


# ---- tables look at the trial's own config


@pytest.mark.parametrize(("typed", "printed"), [({}, "0.945 ± 0.00980"), ({"steps": 250_000}, "0.985 ± 0.00092")])
def test_bpmnist_has_the_column_of_the_steps_that_were_trained(typed: dict[str, Any], printed: str) -> None:
    study = registry.get("bpmnist")
    record = Record("SMFR", 0, 25_000, 60.0, 1, {"accuracy": 0.5, "accuracy_test": 0.5})
    config = chosen(study.defaults, {"paper": True, **typed})
    rows = {row.name: row for row in study.table(Outcome(config, [record], []))}
    assert rows["SMFR, test"].paper == printed
    old = changed(study.defaults, {"paper": True, "steps": 250_000})  # trained with the preset's 25,000
    assert study.table(Outcome(old, [record], []))[0].paper == "0.945 ± 0.00980"


def test_doubleadd_with_a_typed_architecture_has_its_plain_rows() -> None:
    study = registry.get("doubleadd")
    result = {"ood_accuracy": 1.0, "accuracy": 1.0, "architecture": {}}
    record = Record("SMFR_softmax", 0, 100, 60.0, 1, result)
    config = chosen(study.defaults, {"paper": True, "width": 5})
    assert {row.name for row in study.table(Outcome(config, [record], []))} >= {"SMFR_softmax, OOD accuracy"}


def test_addmul_has_the_thresholds_that_were_trained() -> None:
    study = registry.get("addmul")
    result = {"preparation_0.7": 0.2, "preparation_0.3": 0.1, "architecture": {}}
    records = [Record("FNN", 0, 100, 60.0, 60_000, result)]
    for config, expected in (
        (chosen(study.defaults, {"paper": True, "thresholds": "0.3"}), "threshold 0.3, FNN"),
        (changed(study.defaults, {"paper": True, "thresholds": "0.3"}), "threshold 0.7, FNN"),
    ):
        assert study.table(Outcome(config, records, []))[0].name == expected


def test_comp_single_says_what_differs() -> None:
    study = registry.get("comp-single")
    record = Record("cyclic", 0, 100, 60.0, 1, {"accuracy": 50.0})
    config = chosen(study.defaults, {"paper": True, "batch": 8})
    row = study.table(Outcome(config, [record], []))[0]
    assert row.note.endswith("; not the paper's setting: batch 8 (128)") and "CIFAR-100" in row.note


# ---- settings of a model's own, such as beta_lstm, are defaults below what was typed


@pytest.mark.parametrize("paper", ["false", "true"])
@pytest.mark.parametrize(
    ("name", "model", "own"),
    [("mask-doubleadd", "LSTM_apart", "beta_lstm"), ("mask-scan", "Transformer", "beta_transformer")],
)
def test_what_is_typed_wins_over_a_models_own_default(name: str, model: str, own: str, paper: str) -> None:
    study = registry.get(name)

    def beta(**typed: str) -> Any:
        return study.config_of(chosen(study.defaults, {"paper": paper, **typed}), model).beta

    unset = study.presets[model]["beta"] if paper == "true" else getattr(study.defaults, own)
    assert beta() == unset
    assert beta(beta="0.5") == 0.5 and beta(beta="auto") == "auto"
    assert beta(**{own: "0.25"}) == 0.25 and beta(**{own: "0.25", "beta": "0.5"}) == 0.25
    default = str(study.defaults.beta)
    assert beta(beta=default) == float(default), "a default that was typed"


def test_every_setting_of_the_transformers_own() -> None:
    study = registry.get("mask-scan")
    fields = [field.name for field in dataclasses.fields(study.defaults) if field.name.endswith("_transformer")]
    assert len(fields) == 5
    names = {name.removesuffix("_transformer") for name in fields}
    values: dict[str, Any] = {"lr": 0.5, "beta": 0.5, "mask_init": 1.5, "mask_steps": 50, "mask_batch": 64}
    assert names == values.keys()
    for model in ("LSTM", "Transformer", "Transformer_direct"):
        typed = study.config_of(chosen(study.defaults, values), model)
        assert {name: getattr(typed, name) for name in values} == values
    config = chosen(study.defaults, {"paper": True, "beta_transformer": 0.5})
    assert study.setting(config, "Transformer") == "not the paper's setting: beta 0.5 (0.001)"
    assert study.setting(config, "LSTM") == "the paper's setting"


def test_quick_shortens_the_transformer_too() -> None:
    study = registry.get("mask-scan")
    quick = study.config_of(chosen(study.defaults, study.quick), "Transformer")
    assert (quick.mask_steps, quick.mask_batch) == (100, 64)


def test_typed_is_no_setting() -> None:
    study = registry.get("algo")
    with pytest.raises(StudyError, match="typed"):
        chosen(study.defaults, {"typed": "lr"})
    with pytest.raises(StudyError) as error:
        changed(study.defaults, {"nonsense": 1})
    assert "typed" not in str(error.value)
