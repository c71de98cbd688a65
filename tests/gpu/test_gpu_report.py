"""``fastmod gpu-report``: predictions from stated figures, what kernels need, table, csv and picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from fastmod.gpu import launch_table, predict, shapes
from fastmod.gpu.machines import GRAPH_LAUNCH, HOST_LAUNCH, MACHINES, MULTIPROCESSORS, resident_blocks
from fastmod.gpu.manifest import Kernel
from fastmod.gpu.targets import TARGETS
from tests.helpers.study_commands import in_process, refused


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "blocks"),
    [  # as cuda_occupancy.h of CUDA 13.0 has it
        ("sm_80", 128, 110, 13184, 4),
        ("sm_90", 256, 64, 0, 4),
        ("sm_90", 1024, 65, 0, 0),
        ("sm_90", 96, 200, 0, 2),
        ("sm_89", 256, 32, 70000, 1),
        ("sm_120", 128, 24, 0, 12),
        ("sm_100", 32, 16, 0, 32),
        ("sm_86", 32, 16, 0, 16),
        ("sm_90", 128, 40, 40000, 5),
    ],
)
def test_blocks_of_a_multiprocessor(target: str, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert resident_blocks(target, threads, registers, shared) == blocks


def test_every_machine_has_a_target_that_is_compiled_for() -> None:
    for machine in MACHINES:
        assert TARGETS[machine.target].nvidia and machine.target in MULTIPROCESSORS
        assert machine.fp32 <= machine.tf32 < machine.bf16


def test_a_prediction_by_hand() -> None:
    (row,) = [r for r in launch_table.read() if (r.shape, r.dtype) == ("B4096 M16 N16 D32", "fp32")]
    (a100,) = [p for p in predict.predictions(["multiplex"], MACHINES[:1]) if (p.shape, p.dtype) == row[1:3]]
    blocks = weights = 4096 * 16 * 32 * 4  # both inputs of 4096 x 16 x 32 and 4096 x 16 x 16, the output as the first
    moved = 3 * (blocks + weights // 2) + 2 * blocks
    flops = 6 * 4096 * 16 * 16 * 32
    assert (a100.bytes, a100.flops) == (moved, flops)
    memory, compute = moved / 2.039e12, flops / 52e12  # 156 / 3
    assert a100.memory == pytest.approx(memory * 1e6, abs=1e-3)
    assert a100.compute == pytest.approx(compute * 1e6, abs=1e-3)
    launches = row.forward + row.backward
    assert a100.fastmod == pytest.approx((launches * HOST_LAUNCH + memory) * 1e6, abs=1e-3)
    assert a100.fastmod_graph == pytest.approx((launches * GRAPH_LAUNCH + memory) * 1e6, abs=1e-3)
    assert row.eager is not None and a100.eager_graph is not None
    assert a100.eager_graph == pytest.approx((row.eager * GRAPH_LAUNCH + memory) * 1e6, abs=1e-3)
    assert a100.binds == ("memory" if memory > launches * GRAPH_LAUNCH else "launches")


def test_kernels_are_joined_with_their_launches() -> None:
    geometry = [g for g in launch_table.read_geometry() if g.op == "sample_mask" and g.dtype == "fp32"]
    rest: dict[str, Any] = {
        "symbol": "",
        "signature": {},
        "constants": {},
        "options": {},
        "file": "",
        "sha256": "",
        "key": "",
    }
    kernel = Kernel(geometry[0].kernel, "cuda", "sm_90", registers=28, spills=0, shared=100, tensor_core=0, **rest)
    (found,) = predict.launched([kernel], ["sample_mask"])
    assert found.blocks == geometry[0].blocks and found.shared == 100 + geometry[0].dynamic
    assert found.resident == resident_blocks("sm_90", found.threads, 28, found.shared)
    assert found.occupancy == pytest.approx(found.resident * found.threads / 2048, abs=1e-3)
    assert predict.launched([kernel], ["multiplex"]) == []


def test_table_csv_and_picture(tmp_path: Path) -> None:
    done = in_process("gpu-report", "--op", "batch_affine", "--out", tmp_path / "out")
    assert done.code == 0, done.text
    assert "predictions, not measurements" in " ".join(done.out.split())
    with (tmp_path / "out" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["machine"] for row in rows] == [machine.name for machine in MACHINES] * 2
    assert {row["op"] for row in rows} == {"batch_affine"}
    assert (tmp_path / "out" / "predictions.png").read_bytes().startswith(b"\x89PNG")


def test_without_targets_kernels_have_a_header_alone(tmp_path: Path) -> None:
    assert in_process("gpu-report", "--op", "batch_affine", "--out", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "kernels.csv").read_text() == ",".join(predict.Launched._fields) + "\n"


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    done = in_process("gpu-report", "--op", "batch_affine", "--out", tmp_path / "out")
    refused(done, f"--out {tmp_path / 'out'}: File exists")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--op", "nothing"), "--op nothing: expected one of batch_affine"), (("--target", "gfx942"), "--target gfx942")],
)
def test_what_is_not_there_is_refused(options: tuple[str, ...], message: str) -> None:
    refused(in_process("gpu-report", *options), message)


def test_shapes_have_names_of_their_own() -> None:
    names = [shape.name for shape in shapes.SHAPES]
    assert len(set(names)) == len(names)
