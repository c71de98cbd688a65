"""Hard masks as sets, on disk, and the recipe for the regulariser."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from fastmod.masks import inverted, iou, load, pick_beta, save, sharing, union


def bits(text: str) -> torch.Tensor:
    return torch.tensor([c == "1" for c in text])


A = {"first": bits("1100"), "second": bits("111")}
B = {"first": bits("0110"), "second": bits("000")}


def test_sets_by_hand() -> None:
    assert sharing(A, B) == {"first": 1 / 2, "second": 0.0, "total": 1 / 5}
    assert iou(A, B) == {"first": 1 / 3, "second": 0.0, "total": 1 / 6}
    found = union(A, B)
    assert torch.equal(found["first"], bits("1110")) and torch.equal(found["second"], bits("111"))
    assert torch.equal(inverted(A)["first"], bits("0011"))
    reverse = sharing(B, A)
    assert reverse["first"] == 1 / 2 and math.isnan(reverse["second"]) and reverse["total"] == 1 / 2


def test_sets_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="expected the same layers, got \\['second'\\]"):
        sharing(A, {"first": A["first"]})
    with pytest.raises(ValueError, match=r"masks\['first'\]: expected the same shape, got \[4\] and \[3\]"):
        iou(A, {"first": bits("110"), "second": A["second"]})
    with pytest.raises(ValueError, match="at least one"):
        union()


class Shapes(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape)))


@given(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3), st.integers(0, 1000))
def test_files_give_back_what_was_saved(tmp_path_factory: pytest.TempPathFactory, shapes: list, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = Shapes(*shapes)
    masks = {name: torch.rand(p.shape, generator=generator) > 0.5 for name, p in model.named_parameters()}
    path = tmp_path_factory.mktemp("masks") / "masks.safetensors"
    save(path, masks)
    found = load(path, model)
    assert set(found) == set(masks)
    assert all(torch.equal(found[name], masks[name]) for name in masks)


def test_a_weight_takes_one_bit(tmp_path: Path) -> None:
    save(tmp_path / "m", {"p0": torch.rand(1000, 1000) > 0.5})
    assert (tmp_path / "m").stat().st_size < 126_000


def test_files_refuse_another_model(tmp_path: Path) -> None:
    path = tmp_path / "m"
    save(path, {"p0": torch.ones(3, 4, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"expected shape \[4, 3\], got \[3, 4\]"):
        load(path, Shapes((4, 3)))
    with pytest.raises(ValueError, match="the model has no parameter 'p0'"):
        load(path, nn.Linear(3, 4))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a file of masks"):
        load(path, Shapes((3, 4)))
    save_file({"p0": torch.ones(3)}, path)
    with pytest.raises(ValueError, match="not a file of masks"):
        load(path, Shapes((3, 4)))
    save_file({"p0": torch.ones(5, dtype=torch.uint8)}, path, {"format": "fastmod masks 1", "shapes": '{"p0": [3, 4]}'})
    with pytest.raises(ValueError, match="the mask of 'p0' is damaged"):
        load(path, Shapes((3, 4)))
    with pytest.raises(TypeError, match="expected a bool tensor"):
        save(path, {"p0": torch.ones(3)})


def test_pick_beta_takes_the_strongest_that_keeps_the_score() -> None:
    scores = {1e-3: 1.0, 1e-2: 0.97, 1e-1: 0.5, 1.0: 0.99}
    beta, tried = pick_beta(scores.__getitem__, 1.0, betas=list(scores))
    assert beta == 1e-2
    assert [trial.beta for trial in tried] == [1e-3, 1e-2, 1e-1]  # stops at the first that loses
    assert pick_beta(lambda beta: 1.0, 1.0)[0] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="already the weakest"):
        pick_beta(lambda beta: 0.1, 1.0)
    with pytest.raises(ValueError, match="betas: expected rising"):
        pick_beta(lambda beta: 1.0, 1.0, betas=[1e-2, 1e-3])
    with pytest.raises(ValueError, match="keep"):
        pick_beta(lambda beta: 1.0, 1.0, keep=0.0)
