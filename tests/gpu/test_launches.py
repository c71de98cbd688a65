"""Launches of every op, recorded over the host harness, and what a CUDA graph would refuse."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastmod
from fastmod.gpu import aten, launch_table, shapes
from fastmod.samples import SAMPLES, Sample
from tests.helpers import backends
from tests.helpers.cuda_host import recorder

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = launch_table.read_geometry()


@pytest.mark.parametrize("row", launch_table.read(), ids=lambda row: f"{row.op} {row.shape} {row.dtype}")
def test_launches_are_those_of_the_table(row: launch_table.Row) -> None:
    """fastmod/gpu/launches.csv; fewer launches than there are an improvement: write the new figure into its line."""
    found = recorder.record(shapes.find(f"{row.op} {row.shape}"), launch_table.DTYPES[row.dtype])
    told = f"forward {[each.name for each in found.forward]}, backward {[each.name for each in found.backward]}"
    assert (len(found.forward), len(found.backward)) == (row.forward, row.backward), told
    geometry = [each for each in GEOMETRY if each[:3] == row[:3]]
    assert found.geometry(*row[:3]) == geometry, "tools/count_gpu.py --write-launches writes geometry.csv anew"


def test_the_table_has_every_shape_and_dtype() -> None:
    expected = {(shape.name, dtype) for shape in shapes.SHAPES for dtype in launch_table.DTYPES}
    assert {(f"{row.op} {row.shape}", row.dtype) for row in launch_table.read()} == expected


@pytest.mark.parametrize("row", launch_table.read(), ids=lambda row: f"{row.op} {row.shape} {row.dtype}")
def test_launches_of_plain_pytorch(row: launch_table.Row) -> None:
    shape = shapes.find(f"{row.op} {row.shape}")
    if shape.plain is None:
        assert row.eager is None
    elif math.prod(shape.shapes[0]) <= 200_000:  # larger ones launch the same and take long
        assert len(aten.of_step(shape.plain, shape.tensors(dtype=launch_table.DTYPES[row.dtype]))) == row.eager


@pytest.mark.parametrize(
    "name",
    [
        "mfnnr 5 to 4 D196 h400 B128",
        "smfr 6 to 5 D10 w8 d3 h100 B128",
        "multiplex B1024 M8 N8 D10 gumbel",
        "multiplex B512 M5 N4 D196",
        "gated_residual B1024 N8 D10",
        "masked_linear 128x400 to 400 S4",
    ],
)
def test_autocast_casts_nothing(name: str) -> None:
    """The launches are those of a model in bf16, of which some read fp32."""
    shape = shapes.find(name)

    def under_autocast(tensors: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return shape.call(tensors)

    found = recorder.record(dataclasses.replace(shape, call=under_autocast))
    expected = recorder.record(shape, torch.bfloat16)
    for half, alone in zip(found, expected, strict=True):
        plain = [each.name.replace("<__nv_bfloat16,float>", "<__nv_bfloat16,__nv_bfloat16>") for each in half]
        if "mfnnr" not in name and "smfr" not in name:  # told apart by the last argument of their templates
            plain = [re.sub(r",1>$", ",0>", each) for each in plain]
            assert plain != [each.name for each in half]
        assert plain == [each.name for each in alone]
    assert all("bfloat16" in each.name for half in found for each in half)


@pytest.mark.parametrize("hidden", [12, 130])
@pytest.mark.parametrize("mode", ["softmax", "gumbel"])
@pytest.mark.parametrize("name", ["smfr", "mfnnr"])
def test_a_net_in_bf16_casts_nothing(name: str, mode: str, hidden: int) -> None:
    """Learned temperatures and all."""
    own = fastmod.nn.SMFR(3, 2, 5, 4, 2, hidden=hidden, mode=mode) if name == "smfr" else None
    net = (own or fastmod.nn.MFNNR(3, 2, 5, hidden=hidden, mode=mode)).to(torch.bfloat16)
    x, grads = torch.randn(8, 3, 5).bfloat16(), [torch.ones(8, 2, 5).bfloat16(), torch.ones(())]

    def step() -> None:
        out = net(x)
        torch.autograd.backward([out, net.penalty()], grads)
        net.zero_grad()

    with recorder.on_the_harness(name):
        recorder.capture(step)  # what is made once
        names = [each.name for each in recorder.capture(step)]
    assert len(names) > 2 and not any("copy" in each for each in names), names


def test_casts_together_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, gradients and second derivatives; a tensor that needs no cast, fp64 and None stay as they are."""
    torch.manual_seed(0)
    wide, half = torch.randn(5, 3, requires_grad=True), torch.randn(3).half().requires_grad_()
    strided, fp64 = torch.randn(3, 5).t().requires_grad_(), torch.randn(2, dtype=torch.float64)
    low, inputs = torch.randn(4).bfloat16(), [wide, half, strided]
    found = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(fastmod.backend, "CAST_TOGETHER", devices)
        with torch.autocast("cpu", torch.bfloat16):
            *casts, same, other, none = fastmod.backend.lowered(*inputs, low, fp64, None)
        assert same is low and other is fp64 and none is None
        assert [t.dtype for t in casts] == [torch.bfloat16] * 3
        assert [t.stride() for t in casts] == [t.stride() for t in inputs]
        value = sum(t.float().pow(3).sum() for t in casts[1:])  # nothing of the first
        first = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
        assert first[0] is None
        second = torch.autograd.grad([g.sum() for g in first[1:]], inputs[1:])
        found.append([*casts, *first[1:], *second])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.op} {sample.label}")
def test_every_op_can_be_captured(sample: Sample) -> None:
    """Odd shapes, integer seeds, temperatures and permuted inputs too: nothing waits, nothing on the default stream."""
    recorder.record(sample, captured=True)


@pytest.mark.parametrize(("batch", "kind"), [(48, "wide_"), (4, "")])
def test_blocks_of_64_channels_where_there_are_enough_of_them(batch: int, kind: str) -> None:
    """Of 64 channels and 16 px, two tiles an image: with 96 blocks images are read once, with fewer by more blocks."""
    found = recorder.record(shapes.norm_conv(batch, 1, 64, 64, 16), torch.float32)
    assert [each.name for each in found.forward] == [f"norm_conv.{kind}forward_kernel<float>"]
    of_weight = "norm_conv_weight.wide_backward_weight_kernel<float>"  # of 32 x 32 channels for any batch
    assert sorted(each.name for each in found.backward) == [f"norm_conv.{kind}backward_x_kernel<float>", of_weight]


FORBIDDEN = ["a launch on the default stream", "cudaDeviceSynchronize", "cudaMalloc", "_local_scalar_dense"]


@pytest.mark.parametrize(("which", "message"), list(enumerate(FORBIDDEN)))
def test_what_a_graph_would_refuse_is_refused(which: int, message: str) -> None:
    forbidden = backends.host_bindings()["forbidden"]
    with pytest.raises(recorder.GraphError, match=message):
        recorder.capture(lambda: forbidden(torch.zeros(1), which))


def test_a_recorded_launch_is_told_and_left_out() -> None:
    value = torch.zeros(1)
    (launch,) = recorder.capture(lambda: backends.host_bindings()["forbidden"](value, len(FORBIDDEN)))
    assert launch.name.startswith("bindings_host.")
    assert (launch.grid, launch.block, launch.dynamic) == ((1, 1, 1), (1, 1, 1), 0)
    assert launch.arguments == (value.data_ptr().to_bytes(8, "little"),)
    assert value.item() == 0
    backends.host_bindings()["forbidden"](value, len(FORBIDDEN))
    assert value.item() == 1  # nothing is left of the recorder


def test_more_copies_than_a_grid_takes() -> None:
    """Copies are grid.y, which ends at 65535."""
    shape = shapes.smfr(1, (1, 1, 1), 1, (1,), copies=70_000)
    tensors = shape.tensors()
    with torch.no_grad(), recorder.on_the_harness("smfr"):
        recorder.capture(lambda: shape.call(tensors))  # what is made once
        launches = recorder.capture(lambda: shape.call(tensors))
    assert [each.grid for each in launches] == [(1, 65_535, 1), (1, 4_465, 1)]


def test_kernels_are_told_by_name_and_template() -> None:
    found = recorder.record(shapes.find("sample_mask 4000000 S4"))
    assert [each.name for each in found.forward] == ["sample_mask.forward_kernel<float,4>"]
    assert found.forward[0].grid[0] * found.forward[0].block[0] * 4 >= 4_000_000


def linear_softmax(x: Any, weight: Any) -> Any:
    return nn.functional.linear(x, weight).softmax(-1).to(torch.float64)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: linear_softmax(x, x), ["aten::mm", "aten::_softmax", "aten::copy_"]),
        (lambda x: x.t().reshape(2, 8).narrow(0, 0, 1).expand(3, 8), ["aten::copy_"]),
        (lambda x: torch.addmm(x, x, x), ["aten::addmm"] * 2),  # the matrix is copied first
        (lambda x: torch.addmm(x[0], x, x), ["aten::addmm"]),
        (lambda x: torch.empty(3).resize_(4), []),
        (lambda x: x.new_zeros(3), ["aten::zero_"]),
        (lambda x: x.sum().item(), ["aten::sum", "aten::_local_scalar_dense"]),
    ],
)
def test_launches_of_torch_ops(run: Callable[[Any], Any], expected: list[str]) -> None:
    x = torch.randn(4, 4)
    assert aten.launches(lambda: run(x)) == expected


#: What reads a value of the device, allocates past torch or takes another stream, in C++ and in Triton launchers.
FORBIDDEN_WORDS = r"\.item\b|\.item<|\.cpu\(\)|\bcudaMalloc|\bcudaMemcpy|Synchronize\(|\.tolist\(|getDefaultCUDAStream"


@pytest.mark.parametrize("path", sorted([*ROOT.glob("csrc/cuda/*"), *ROOT.glob("kernels/*.py")]), ids=lambda p: p.name)
def test_nothing_on_the_way_to_a_kernel_waits(path: Path) -> None:
    assert re.findall(FORBIDDEN_WORDS, path.read_text()) == []


@pytest.mark.parametrize("seed", [7, torch.tensor(7), None])
def test_seeds_are_put_on_the_device_of_the_inputs(seed: Any) -> None:
    """Of the meta device, the only other one on every machine: nothing could be read from it."""
    logits = torch.empty(4, 3, device="meta")
    assert fastmod.noise.seed_tensor(seed, logits.device).device == logits.device
    assert fastmod.ops.sample_mask(logits, 2, seed=seed).device == logits.device


def test_a_replay_draws_what_the_seed_then_is() -> None:
    """The kernels get the address of the seed: who advances it in place draws other masks at the next replay."""
    logits, seed = torch.zeros(1000), torch.tensor(3)
    with backends.chosen(backends.CUDA_HOST):
        first = fastmod.ops.sample_mask(logits, 1, seed=seed)
        again = fastmod.ops.sample_mask(logits, 1, seed=seed)
        seed += 1
        later = fastmod.ops.sample_mask(logits, 1, seed=seed)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    launches: list[recorder.Launch] = []
    addresses = []
    with backends._cuda_host(direct=True):
        launches = recorder.capture(lambda: fastmod.ops.sample_mask(logits, 1, seed=seed))
        addresses = [seed.data_ptr().to_bytes(8, "little") in each for each in launches[0].arguments]
    assert any(addresses)
