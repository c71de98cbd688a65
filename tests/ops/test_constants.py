"""Numbers that Python and the compiled kernels must agree on stand in both: here they are held together."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from fastmod import noise
from fastmod.ops.mfnnr import BATCH_TILE, LEAKY_SLOPE, NO_PENALTY
from fastmod.ops.multiplex import MODES
from fastmod.ops.sample_mask import WORDS

HEADER = (Path(__file__).resolve().parents[2] / "csrc" / "constants.h").read_text()


def constant(name: str) -> float:
    (value,) = re.findall(rf"\b{name} = ([^,;}}]+?)\s*[,;}}]", HEADER)
    shifted = re.fullmatch(r"(\d+) << (\d+)", value)
    return int(shifted[1]) << int(shifted[2]) if shifted else ast.literal_eval(value.rstrip("f"))


def test_python_has_the_numbers_of_constants_h() -> None:
    pairs = {
        "kLeakySlope": LEAKY_SLOPE,
        "kBatchTile": BATCH_TILE,
        "kNoPenalty": NO_PENALTY,
        "kStreamMultiplex": noise.STREAM_MULTIPLEX,
        "kStreamMask": noise.STREAM_MASK,
        "kStreamMaskBias": noise.STREAM_MASK_BIAS,
        "kWords": WORDS,
        "kWordsF": WORDS,
    }
    assert {name: constant(name) for name in pairs} == pairs


def test_streams_are_all_here_and_differ() -> None:
    streams = {name: value for name, value in vars(noise).items() if name.startswith("STREAM_")}
    assert len(set(streams.values())) == len(streams) == len(re.findall(r"uint32_t kStream\w+", HEADER))


def test_modes() -> None:
    (names,) = re.findall(r"enum Mode : int \{([^}]+)\}", HEADER)
    assert {name.lower(): int(number) for name, number in re.findall(r"k(\w+) = (\d+)", names)} == MODES
