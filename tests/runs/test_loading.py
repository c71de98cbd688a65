"""``fastmod.runs.load`` and ``fastmod export``: the model that was trained, with its masks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fastmod.runs
from fastmod.masks import files as mask_files
from fastmod.nn import SMFR
from fastmod.runs import loading
from fastmod.runs.config import StudyError
from fastmod.runs.folder import RunFolder
from tests.helpers.study_commands import in_process, refused
from tests.helpers.study_runs import states, untouched

MASKED = ("batch=8", "chunk=2", "evaluate_every=2", "samples=2", "mask_lr=3", "mask_steps=6")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading") / "run"
    shutil.copytree(untouched("doubleadd"), folder)
    return folder


def test_load_gives_the_trained_model(run: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = fastmod.runs.load(run, "SMFR_gumbel-s3")
    assert torch.equal(torch.rand(3), expected), "torch's generator is left alone"
    assert isinstance(model, SMFR) and not model.training
    for name, value in states(run)["SMFR_gumbel-s3"]["model"].items():
        assert torch.equal(model.state_dict()[name], value), name
    trial = fastmod.runs.load_trial(run, "FNN-s3")
    assert trial.step == 12 and trial.finished
    last = [line for line in RunFolder(run).metrics() if line["trial"] == "FNN-s3"][-1]
    assert trial.metrics() == {key: last[key] for key in ("accuracy", "ood_accuracy")}


def test_load_says_what_there_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="expected a trial, one of SMFR_gumbel-s3, FNN-s3"):
        fastmod.runs.load(run)
    with pytest.raises(StudyError, match="no trial 'FNN-s9'"):
        fastmod.runs.load(run, "FNN-s9")
    with pytest.raises(StudyError, match="not the folder of a run"):
        fastmod.runs.load(tmp_path)
    with pytest.raises(AttributeError, match="nonsense"):
        fastmod.runs.nonsense  # noqa: B018


def test_export(run: Path, tmp_path: Path) -> None:
    done = in_process("export", run, "--out", tmp_path / "out")
    assert done.code == 0 and str(tmp_path / "out" / "FNN-s3") in done.out, done.text
    for key in ("SMFR_gumbel-s3", "FNN-s3"):
        weights = load_file(tmp_path / "out" / key / "model.safetensors")
        expected = states(run)[key]["model"]
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        about = json.loads((tmp_path / "out" / key / "config.json").read_text())
        assert (about["trial"], about["step"], about["finished"], about["plan"]["study"]) == (
            key,
            12,
            True,
            "doubleadd",
        )
        again, before = fastmod.runs.load(tmp_path / "out" / key), fastmod.runs.load(run, key)
        blocks = torch.rand(4, 5, 10)
        with torch.no_grad():
            assert torch.equal(again(blocks), before(blocks)) and not again.training
    assert about["class"] == "fastmod.models.fnn.FNN"


def test_export_by_default_into_the_run(run: Path) -> None:
    assert in_process("export", run, "--trial", "FNN-s3").code == 0
    assert [path.name for path in (run / "export").iterdir()] == ["FNN-s3"]
    refused(in_process("export", run, "--trial", "FNN-s4"), "--trial FNN-s4", "SMFR_gumbel-s3, FNN-s3")


def test_export_that_is_damaged(run: Path, tmp_path: Path) -> None:
    (export,) = loading.export(RunFolder(run), "FNN-s3", tmp_path)
    model = export.folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-8])
    with pytest.raises(StudyError, match="not an export that can be read"):
        fastmod.runs.load(export.folder)


def test_masks(tmp_path: Path) -> None:
    """Those of all tasks, the last one's too, as bits that fit the model."""
    sizes = [f"--set={size}" for size in (*MASKED, "hidden=6,5")]
    options = ["mask-addmul", "--model", "FNN", "--seeds", "0", "--steps", "4", *sizes]
    done = in_process("study", *options, "--out", tmp_path / "run")
    assert done.code == 0, done.text
    (export,) = loading.export(RunFolder(tmp_path / "run"))
    assert list(export.masks) == ["add", "mul"]
    trial = fastmod.runs.load_trial(tmp_path / "run")
    assert trial.finished and list(trial.masks()) == ["add", "mul"], "the last one's too"
    model = fastmod.runs.load(export.folder)
    result = json.loads((tmp_path / "run" / "result.json").read_text())["trials"][0]["result"]
    for task in export.masks:
        masks = mask_files.load(export.folder / "masks" / f"{task}.safetensors", model)
        assert {name: int(mask.sum()) for name, mask in masks.items()} == {
            name: count for name, count in result["kept"][task].items() if name != "total"
        }
        assert all(torch.equal(mask, masks[name]) for name, mask in trial.masks()[task].items())
