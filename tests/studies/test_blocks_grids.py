"""The block-operations studies: the paper's grids, settings of the range penalty, and what they show of the inside."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fastmod.models import BlockTransformer
from fastmod.nn import SMFR
from fastmod.ops import range_penalty
from fastmod.runs.config import StudyError, changed
from fastmod.runs.study import Outcome, Record
from fastmod.studies.blocks import addmul, algo, bpmnist, doubleadd, grids, models
from tests.helpers.study_commands import in_process
from tests.helpers.study_runs import untouched

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"batch": 4, "width": 3, "depth": 1, "hidden": 8, "layers": 1}


# ---- range penalty


def loud_trial(**settings: Any) -> algo.AlgoTrial:
    """Its routing logits are far out of range."""
    torch.manual_seed(0)
    trial = algo.AlgoTrial(changed(algo.AlgoConfig(), {**SMALL, "applications": 1, **settings}), "SMFR", 0, CPU)
    assert isinstance(trial.model, SMFR)
    with torch.no_grad():
        trial.model.get_submodule("stack.0.route.1").bias += 30  # type: ignore[operator]
    return trial


def losses(**settings: Any) -> tuple[float, float, SMFR]:
    """Of one step: with and without the penalty."""
    trial = loud_trial(**settings)
    batch = [tensor[0] for tensor in trial.batches(torch.Generator().manual_seed(0))]
    whole = trial.loss(*batch).item()
    trial.penalty = lambda model, count: 0.0  # type: ignore[assignment]
    assert isinstance(trial.model, SMFR)
    return whole, trial.loss(*batch).item(), trial.model


def test_the_penalty_is_a_mean_squared_error_as_the_papers() -> None:
    whole, plain, model = losses()
    found = model._last_forward()[0]
    logits = torch.cat([t.flatten() for t in (*found.logits, *found.gates)])
    target = logits.clamp(-20, 20)
    assert (target != logits).any()
    assert whole - plain == pytest.approx(torch.nn.functional.mse_loss(logits, target).item(), rel=1e-4)


def test_the_penalty_can_be_summed_weighted_moved_and_off() -> None:
    total, plain, model = losses(penalty="sum")
    found = model._last_forward()[0]
    assert total - plain == pytest.approx(range_penalty(*found.logits, *found.gates).item(), rel=1e-4)
    whole, plain, _ = losses(penalty="sum", penalty_weight=0.5)
    assert whole - plain == pytest.approx((total - plain) / 2, rel=1e-4)
    whole, plain, _ = losses(penalty_threshold=1000.0)
    assert whole == plain
    whole, plain, model = losses(penalty="off")
    assert whole == plain and model.threshold is None


@pytest.mark.parametrize("settings", [{"penalty": "max"}, {"penalty_weight": -1}, {"penalty_threshold": "inf"}])
def test_penalties_that_cannot_be(settings: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match=next(iter(settings))):
        changed(algo.AlgoConfig(), settings)


# ---- grids


def test_grids_have_the_papers_sizes() -> None:
    """63 SMFRs of each attention in Table 1, 240 trials behind Table 6; sizes of A.2.3."""

    def count(grid: grids.Grid) -> int:
        return len(torch.cartesian_prod(*(torch.arange(len(values)) for values in grid.values())))

    assert count(grids.ADDMUL["SMFR"]) == 63 and 2 * count(grids.DOUBLEADD["SMFR"]) == 240
    assert [count(grids.ALGO[kind]) for kind in ("FNN", "Transformer", "SMFR")] == [15, 54, 99]
    for study in (addmul.AddMul, doubleadd.DoubleAdd, algo.Algo):
        assert {"smfr", "fnn"} <= set(study.grids)
        for grid in study.grids.values():
            assert all(hasattr(study.defaults, key) for key in grid)


def test_table_6_has_the_printed_sizes() -> None:
    for alternate, attention, depth, width, layers, size in doubleadd.TABLE_6:
        settings = {"depth": depth, "width": width, "layers": layers, "alternate_split": alternate}
        model = models.build(changed(doubleadd.DoubleAddConfig(), settings), f"SMFR_{attention}", 5, 1, 10)
        assert sum(p.numel() for p in model.parameters()) == size
        assert any(grids.architecture(grids.DOUBLEADD, "SMFR", seed) == settings for seed in range(120))


def test_each_seed_draws_an_architecture_and_a_split() -> None:
    config = changed(doubleadd.DoubleAddConfig(), {"grid": "true"})
    trial = doubleadd.DoubleAddTrial(config, "SMFR_gumbel", 7, CPU)
    drawn = grids.architecture(grids.DOUBLEADD, "SMFR_gumbel", 7)
    assert {key: getattr(trial.config, key) for key in drawn} == drawn == trial.result({})["architecture"]
    ordinary = algo.AlgoTrial(algo.AlgoConfig(), "FNN", 3, CPU)
    assert ordinary.result({})["architecture"] == {} and ordinary.config == algo.AlgoConfig()
    wide = algo.AlgoTrial(changed(algo.AlgoConfig(), {"grid": "true"}), "Transformer", 3, CPU)
    assert isinstance(wide.model, BlockTransformer) and wide.config.inner in (400, 1200, 2000)


def test_table_6_from_trials() -> None:
    def record(model: str, ood: float, **architecture: Any) -> Record:
        return Record(model, 0, 100, 60.0, 1, {"ood_accuracy": ood, "architecture": architecture})

    smfr = {"alternate_split": False, "depth": 1, "layers": 1}
    records = [
        record("SMFR_softmax", 1.0, **smfr, width=9), record("SMFR_softmax", 0.5, **smfr, width=8),
        record("SMFR_softmax", 0.25, **smfr, width=2), record("SMFR_gumbel", 0.25, **smfr, width=9),
        record("FNN", 0.0, fnn_width=100, fnn_depth=2),
    ]  # fmt: skip
    config = changed(doubleadd.DoubleAddConfig(), {"grid": "true"})
    rows = {row.name: row for row in doubleadd.DoubleAdd().table(Outcome(config, records, []))}
    assert rows["SMFR, 4 of the grid's 240 cells, OOD accuracy"].mean == 0.5
    assert rows["SMFR, 4 of the grid's 240 cells, OOD accuracy"].paper == "-", "the paper's is of all cells"
    cells = [{"width": w, "depth": d, "layers": n, "alternate_split": a}
             for w in range(1, 11) for d in (0, 1, 2) for n in (1, 2) for a in (False, True)]  # fmt: skip
    every = [Record(f"SMFR_{mode}", seed, 100, 60.0, 5, {"ood_accuracy": 0.5, "architecture": cell})
             for mode in ("softmax", "gumbel") for seed, cell in enumerate(cells)]  # fmt: skip
    whole = {row.name: row.paper for row in doubleadd.DoubleAdd().table(Outcome(config, every, []))}
    assert whole["SMFR, all of the grid's 240 cells, OOD accuracy"] == "0.205"
    assert whole["SMFR, all of the grid's 240 cells, share at 1.0"] == "0.104 (25 of 240)"
    assert rows["SMFR, 4 of the grid's 240 cells, share at 1.0"].mean == 0.25
    assert rows["SMFR_softmax, depth 1, width >= 8, share at 1.0"].mean == 0.5
    assert rows["SMFR_gumbel, depth 1, width >= 8, share at 1.0"].paper == "0.33 (4 of 12)"
    assert rows["SMFR_gumbel, depth 1, width >= 8, share at 1.0"].values == [0.0]
    assert rows["plain split, softmax, depth 1, width 9, 1 layers"].values == [1.0]
    assert rows["plain split, gumbel, depth 1, width 9, 1 layers"].note == "Table 6; 54,966 parameters"
    assert "alternate split, softmax, depth 1, width 9, 1 layers" not in rows


def test_tables_2_and_7_from_trials() -> None:
    records = [
        Record("SMFR", seed, 100, 60.0, size, {
            "ood_even": even, "ood_odd": odd, "accuracy": 1.0, "accuracy_4": four, "architecture": {},
        })
        for seed, (size, even, odd, four) in enumerate([
            (300_000, 0.9, 0.9, 0.9), (300_000, 0.7, 0.5, 0.7), (100_000, 1.0, 1.0, 1.0), (100_000, 1.0, 1.0, 1.0),
            (100_000, 1.0, 0.4, 1.0), (10_000, 0.1, 0.0, 0.1), (10_000, 0.95, 0.6, 0.95),
        ])
    ]  # fmt: skip
    config = changed(algo.AlgoConfig(), {"grid": "true"})
    rows = {row.name: row for row in algo.Algo().table(Outcome(config, records, []))}
    best = rows["SMFR, best five, OOD_odd"]
    assert best.paper == "1.000 ± 0.000" and sorted(best.values) == [0.4, 0.6, 0.9, 1.0, 1.0]
    assert rows["SMFR, HIGH, OOD_even"].paper == "0.954" and rows["SMFR, HIGH, OOD_even"].mean == pytest.approx(0.8)
    assert rows["SMFR, LOW, OOD_odd"].paper == "0.229" and rows["SMFR, LOW, OOD_odd"].mean == pytest.approx(0.3)
    few = {row.name for row in algo.Algo().table(Outcome(config, records[:5], []))}
    assert not any("best five" in name for name in few), "of five trials the best five are no choice"


def test_the_ratio_of_table_1() -> None:
    def records(model: str, *values: float) -> list[Record]:
        results = [{"preparation_0.7": v, "architecture": {}} for v in values]
        return [Record(model, s, 10, 60.0, 60_000, result) for s, result in enumerate(results)]

    some = records("SMFR_softmax", 0.2, 0.4) + records("FNN", 0.1) + records("SMFR_gumbel", 0.5)
    rows = {row.name: row for row in addmul.AddMul().table(Outcome(addmul.AddMulConfig(), some, []))}
    ratio = rows["threshold 0.7, SMFR_softmax / FNN"]
    assert ratio.paper == "4.44" and ratio.values == pytest.approx([3.0]) and ratio.trials == 3
    assert rows["threshold 0.7, SMFR_gumbel"].paper == "0.088 ± 0.0080"


@pytest.mark.parametrize("study", [addmul.AddMul(), doubleadd.DoubleAdd(), algo.Algo(), bpmnist.BPMNIST()])
def test_presets_are_what_the_paper_prints(study: Any) -> None:
    """A.2: Adam with 3e-4, clipping at 0.1, contained FNNs of width 100 (BPMNIST: 400, depth 4); A.3: threshold 20."""
    printed = {"lr": 3e-4, "clip": 0.1, "hidden": 100, "penalty": "mean", "penalty_weight": 1, "penalty_threshold": 20}
    own = {
        "addmul": {"interference": 2000, "thresholds": (0.7, 0.8, 0.9, 0.95, 1.0)},
        "doubleadd": {"grid": True}, "algo": {"grid": True, "applications": 2},
        "bpmnist": {"steps": 25_000, "hidden": 400, "layers": 4, "bias_steps": 300},
    }[study.name]  # fmt: skip
    for model in study.models:
        trained = study.config_of(changed(study.defaults, {"paper": "true"}), model)
        assert {key: getattr(trained, key) for key in {**printed, **own}} == {**printed, **own}


# ---- what is shown of the inside


def test_variables_are_counted_one_by_one() -> None:
    """A model that spoils variable C of every input."""
    trial = algo.AlgoTrial(changed(algo.AlgoConfig(), SMALL), "SMFR", 0, CPU)

    class SpoilsC(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from fastmod.tasks import rule

            right = rule.apply_rule(x[:, :5].argmax(-1), x[:, 5].argmax(-1))
            out = torch.nn.functional.one_hot(right, 10).float()
            out[:, 2] = 0.0
            return out

    trial.model = SpoilsC()
    found = trial.metrics()
    assert found["ood_odd"] < 0.2 and found["odd_C"] < found["odd_B"]
    assert found["variables_1"] == pytest.approx((4 + found["accuracy_1"]) / 5, abs=1e-6)
    odd = [found[f"variables_{n}"] for n in (1, 3, 5, 7, 9)]
    assert found["variables_odd"] == pytest.approx(sum(odd) / 5)
    assert sum(found[f"odd_{name}"] for name in "ABCDE") / 5 == pytest.approx(found["variables_odd"])


def test_gates_are_recorded_and_inspected(tmp_path: Path) -> None:
    sizes = {**SMALL, "steps": 4, "chunk": 2, "evaluate_every": 2}
    words = [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
    run = tmp_path / "run"
    done = in_process("study", "doubleadd", "--model", "SMFR_softmax", "--seeds", "0", *words, "--out", run)
    assert done.code == 0, done.text
    shown = in_process("inspect", run)
    assert shown.code == 0 and "gates of layer 1: 0." in shown.text and "in the end" in shown.text
    assert (run / "figures" / "gates-SMFR_softmax-s0.png").stat().st_size > 5000


def test_inspection_of_a_noisy_run_shows_what_the_net_sees(tmp_path: Path) -> None:
    trial = algo.AlgoTrial(changed(algo.AlgoConfig(), {**SMALL, "noisy": True}), "SMFR", 3, CPU)
    assert trial.noise is not None
    met: list[torch.Tensor] = []
    trial.model.register_forward_pre_hook(lambda _, inputs: met.append(inputs[0]))
    (blocks, *_) = algo.Algo().examples(trial.config, CPU).values()
    trial.advance(blocks[:, :5], blocks[:, 5])
    assert torch.equal(met[0], trial.inspected(blocks)) and not torch.equal(met[0], blocks)
    plain = algo.AlgoTrial(changed(algo.AlgoConfig(), SMALL), "SMFR", 3, CPU)
    assert plain.inspected(blocks) is blocks and not plain.inspection_note
    run = tmp_path / "run"
    shutil.copytree(untouched("algo"), run)
    shown = in_process("inspect", run)
    assert shown.code == 0 and shown.out.startswith("noisy: each of the blocks"), shown.text
    from fastmod.runs import inspection, load_trial

    loaded = load_trial(run, "SMFR-s0")
    assert isinstance(loaded, algo.AlgoTrial) and isinstance(loaded.model, SMFR)
    name, example = next(iter(algo.Algo().examples(loaded.config, CPU).items()))
    with torch.no_grad():
        loaded.model.eval()(loaded.inspected(example))
    read = inspection._most_read(algo.Algo(), loaded.model.routing()[0].weights.float().mean(0))
    assert f"{name}: {read}" in shown.out.splitlines()


def test_attention_of_the_transformer_by_hand() -> None:
    torch.manual_seed(0)
    model = BlockTransformer(5, 1, 12, 2, 16, 1).eval()
    x = torch.randn(3, 5, 12)
    found = model.attention(x)
    assert found.shape == (3, 5, 5)
    torch.testing.assert_close(found.sum(1), torch.ones(3, 5))
    layer = model.encoder.layers[0].self_attn
    assert isinstance(layer, torch.nn.MultiheadAttention) and isinstance(layer.in_proj_weight, torch.Tensor)
    tokens = model.inward(x) + model.positions
    q, k, _ = torch.nn.functional.linear(tokens, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    heads = [a @ b.mT / 6**0.5 for a, b in zip(q.split(6, -1), k.split(6, -1), strict=True)]
    by_hand = torch.stack([head.softmax(-1) for head in heads]).mean(0).mT
    torch.testing.assert_close(found, by_hand)


def bpmnist_trial(monkeypatch: pytest.MonkeyPatch, name: str, **settings: Any) -> bpmnist.BPMNISTTrial:
    labels = torch.arange(20) % 10
    rows = bpmnist._as_blocks(255 * torch.rand(20, 4, 196))
    monkeypatch.setattr(bpmnist, "_images", lambda *_: (rows, labels, rows, labels))
    small = {"hidden": 8, "layers": 1, "fnn_width": 16, "fnn_depth": 2, "inner": 16, "batch": 8}
    return bpmnist.BPMNISTTrial(changed(bpmnist.BPMNISTConfig(), {**small, **settings}), name, 0, CPU)


def test_indicators_of_the_transformer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bpmnist_trial(monkeypatch, "Transformer").metrics()
    assert all(0 <= found[key] <= 1.001 for key in ("sharpness", "difference", "fairness"))
    assert not any(key.startswith("gate_") for key in found)
    assert "sharpness" not in bpmnist_trial(monkeypatch, "FNN").metrics()
    assert {"gate_0", "gate_1", "sharpness"} <= set(bpmnist_trial(monkeypatch, "SMFR").metrics())


def test_contained_fnns_as_large_as_the_fnn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    large = bpmnist_trial(monkeypatch, "SMFR_large").model
    assert isinstance(large, SMFR)
    route = [layer.out_features for layer in large.get_submodule("stack.0.route").children()]  # type: ignore[union-attr]
    assert route[:-1] == [16, 16]


@pytest.mark.parametrize(("steps", "printed"), [(25_000, "0.945 ± 0.00980"), (250_000, "0.985 ± 0.00092")])
def test_bpmnist_has_the_column_of_its_steps(steps: int, printed: str) -> None:
    config = changed(bpmnist.BPMNISTConfig(), {"steps": steps})
    records = [
        Record("SMFR", seed, steps, 60.0, 1, {"accuracy": seed / 10, "accuracy_test": seed / 100}) for seed in range(7)
    ]
    rows = {row.name: row for row in bpmnist.BPMNIST().table(Outcome(config, records, []))}
    assert rows["SMFR, test"].paper == printed == rows["SMFR, test, best five by validation"].paper
    assert rows["SMFR, test, best five by validation"].mean == pytest.approx(0.04)
