"""Pentomino and MNIST Parity: labels follow from the image alone, splits have no digit in common."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastmod
from fastmod.data import DataError, mnist
from fastmod.tasks import drawing, parity, sprites
from tests.helpers.surroundings import no_data_folder as no_data_folder

Cells = frozenset[tuple[int, int]]


# ---- the sprites, by geometry


def cells_of(block: Tensor) -> tuple[Cells, int]:
    """The cells of the pentomino in a block ``[H, W]``, moved to 0, 0, and the width of a cell in pixels."""
    lit = block.nonzero()
    scale = {5: 1, 20: 2}[len(lit)]
    cells = (lit - lit.min(0).values) // scale
    found = frozenset(map(tuple, cells.tolist()))
    assert len(found) == 5, "every cell is lit as a whole"
    return found, scale


def turned_least(cells: Cells) -> tuple[tuple[int, int], ...]:
    """The same value for all four turns of a shape."""
    names = []
    for _ in range(4):
        cells = frozenset((c, -r) for r, c in cells)
        top, left = min(r for r, _ in cells), min(c for _, c in cells)
        names.append(tuple(sorted((r - top, c - left) for r, c in cells)))
    return min(names)


def mirrored(cells: Cells) -> Cells:
    return frozenset((r, -c) for r, c in cells)


def test_eighty_different_patterns() -> None:
    lit, sizes = sprites.patterns()
    assert len(sprites.CLASSES) == 10 and lit.shape == (80, 8, 8)
    assert len(lit.flatten(1).unique(dim=0)) == 80
    names: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for number, (block, (height, width)) in enumerate(zip(lit, sizes.tolist(), strict=True)):
        cells, scale = cells_of(block)
        assert block.any(1).nonzero().flatten().tolist() == list(range(height)), "top left, without gaps"
        assert block.any(0).nonzero().flatten().tolist() == list(range(width))
        assert sorted((height // scale, width // scale)) in ([2, 4], [2, 3], [3, 3])
        names.setdefault(sprites.CLASSES[number // 8], set()).add(turned_least(cells))
    assert all(len(several) == 1 for several in names.values()), "the turns of one shape"
    assert len(set.union(*names.values())) == 10
    for mirror, of in sprites.MIRRORS.items():
        (one,), (other,) = names[mirror], names[of]
        assert turned_least(mirrored(frozenset(one))) == other


def test_sprites_are_the_ones_of_their_names() -> None:
    cells = {
        name: frozenset((r, c) for r, row in enumerate(rows) for c, cell in enumerate(row) if cell == "#")
        for name, rows in sprites.SHAPES.items()
    }

    def neighbours(name: str) -> list[int]:
        """Numbers of neighbours of the cells, sorted; different for these five and the other seven pentominoes."""
        here = cells[name]
        return sorted(sum((r + y, c + x) in here for y, x in ((0, 1), (1, 0), (0, -1), (-1, 0))) for r, c in here)

    def longest(name: str) -> int:
        rows = [sum(r == row for r, _ in cells[name]) for row in range(4)]
        columns = [sum(c == column for _, c in cells[name]) for column in range(4)]
        return max(rows + columns)

    assert (neighbours("L"), longest("L")) == ([1, 1, 2, 2, 2], 4)
    assert (neighbours("N"), longest("N")) == ([1, 1, 2, 2, 2], 3)
    assert (neighbours("P"), longest("P")) == ([1, 2, 2, 2, 3], 3)
    assert (neighbours("F"), longest("F")) == ([1, 1, 1, 2, 3], 3)
    assert (neighbours("Y"), longest("Y")) == ([1, 1, 1, 2, 3], 4)


# ---- Pentomino, from its images


def blocks_of(image: Tensor, side: int) -> dict[int, Tensor]:
    """Number -> pixels ``[3, side, side]`` of each block that is not black."""
    grid = image.shape[1] // side
    parts = {
        row * grid + column: image[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
        for row in range(grid)
        for column in range(grid)
    }
    return {number: part for number, part in parts.items() if part.any()}


@pytest.mark.parametrize("placement", sprites.PLACEMENTS)
def test_pentomino_labels_by_looking(placement: str) -> None:
    images, labels = fastmod.tasks.pentomino(400, 5, placement)
    assert images.dtype == torch.uint8 and images.shape == (400, 3, 64, 64)
    assert labels.dtype == torch.int64 and labels.shape == (400,)
    colours, places, scales = set(), set(), set()
    for image, label in zip(images, labels.tolist(), strict=True):
        blocks = blocks_of(image, 8)
        assert len(blocks) == 3, "three sprites in three different blocks"
        classes = []
        for block in blocks.values():
            cells, scale = cells_of(block.any(0))
            scales.add(scale)
            classes.append(turned_least(cells))
            (colour,) = block.flatten(1).T[block.flatten(1).bool().any(0)].unique(dim=0).tolist()
            colours.add(tuple(colour))
            top, left = block.any(0).nonzero().min(0).values.tolist()
            height, width = (block.any(0).nonzero().max(0).values + 1).tolist()
            if placement == "corner":
                assert (top, left) == (0, 0)
            if placement == "center":
                assert abs(top - (8 - height)) <= 1 and abs(left - (8 - width)) <= 1
            places.add((top, left))
        assert label == len(set(classes)) - 1, "0: one class, 1: two of them"
    assert colours == set(drawing.COLOURS) and len(colours) == 10 and scales == {1, 2}
    if placement == "jitter":
        assert {(0, 0), (6, 4), (4, 6)} <= places, "all over the block"


def test_pentomino_is_balanced_and_even() -> None:
    shown = sprites.scene(20_000, 1)
    count = len(shown.labels)

    def even(values: Tensor, kinds: int) -> None:
        """All values are equally frequent within five standard deviations."""
        share = torch.bincount(values.flatten(), minlength=kinds) / values.numel()
        assert len(share) == kinds
        assert ((share - 1 / kinds).abs() < 5 * math.sqrt(1 / kinds / values.numel())).all()

    even(shown.labels, 2)
    even(shown.classes[:, 0], 10)
    even(shown.patterns[:, 2], 80)
    for sprite in range(3):
        even(shown.blocks[:, sprite], 64)
        even(shown.colours[:, sprite], 10)
    odd = shown.classes[shown.labels == 1]
    even((odd[:, 2] - odd[:, 0]) % 10 - 1, 9)
    pairs = shown.blocks[:, 0] * 64 + shown.blocks[:, 1]
    assert len(pairs.unique()) > 0.98 * (1 - math.exp(-count / 4032)) * 4032, "any two blocks"


# ---- MNIST Parity, from its images

LEVELS = 7  # brightness between two codes


def code_of(split: str, digit: int) -> int:
    return 10 * parity.SPLITS.index(split) + digit


def coded_digits(folder: Path, train: int = 60, test: int = 20) -> Path:
    """MNIST's files with bright rings instead of digits; the disc inside encodes digit and split."""
    folder.mkdir(parents=True, exist_ok=True)
    along = torch.arange(28) - 13.5
    radius = (along[:, None] ** 2 + along**2).sqrt()
    for name, count in (("train", train), ("t10k", test)):
        pixels, labels = b"", []
        for i in range(count):
            split = "test" if name == "t10k" else "train" if i < count * 5 // 6 else "valid"
            digit = (i * 7) % 10
            level = 30 + LEVELS * code_of(split, digit)
            image = torch.where(radius < 6, level, torch.where(radius < 11, 255, 0))
            pixels += bytes(image.flatten().tolist())
            labels.append(digit)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">BBBBIII", 0, 0, 8, 3, count, 28, 28) + pixels)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(labels))
    return folder


def read_code(block: Tensor) -> int:
    """The code in a block ``[3, 32, 32]``: brightness of the disc relative to its ring."""
    bright = block.float().amax(0)
    lit = bright.nonzero()
    row, column = ((lit.min(0).values + lit.max(0).values) / 2).tolist()
    middle = bright[math.floor(row) : math.ceil(row) + 1, math.floor(column) : math.ceil(column) + 1]
    return round((middle.mean().item() / bright.max().item() * 255 - 30) / LEVELS)


@pytest.mark.parametrize("split", parity.SPLITS)
def test_parity_labels_by_looking(tmp_path: Path, split: str) -> None:
    images, labels = fastmod.tasks.mnist_parity(300, split, 4, coded_digits(tmp_path), verify=False)
    assert images.dtype == torch.uint8 and images.shape == (300, 3, 64, 64)
    assert labels.dtype == torch.int64 and labels.shape == (300,)
    seen = set()
    for image, label in zip(images, labels.tolist(), strict=True):
        blocks = blocks_of(image, 32)
        assert len(blocks) == 2, "two digits in two different blocks"
        codes = [read_code(block) for block in blocks.values()]
        assert all(code // 10 == parity.SPLITS.index(split) for code in codes), "digits of this split only"
        assert label == int(codes[0] % 2 == codes[1] % 2)
        seen.update(code % 10 for code in codes)
    assert seen == set(range(10))


def test_parity_splits_have_no_digit_in_common(tmp_path: Path) -> None:
    root = coded_digits(tmp_path)
    parts = [parity.digits_of(split, root, verify=False)[0] for split in parity.SPLITS]
    assert [len(part) for part in parts] == [50, 10, 20]
    found = [{bytes(image.flatten().tolist()) for image in part} for part in parts]
    assert not found[0] & found[1] and not found[0] & found[2] and not found[1] & found[2]


@pytest.mark.slow
def test_parity_of_the_real_digits() -> None:
    whole = mnist()
    sizes = {split: parity.digits_of(split) for split in parity.SPLITS}
    assert [len(images) for images, _ in sizes.values()] == [50_000, 10_000, 10_000]
    assert torch.cat([sizes["train"][0], sizes["valid"][0]]).equal(whole.train_images)
    assert torch.cat([sizes["train"][1], sizes["valid"][1]]).equal(whole.train_labels)
    assert sizes["test"][0].equal(whole.test_images)
    shown = parity.scene(30_000, 0, sizes["train"][1])
    assert shown.labels.float().mean().item() == pytest.approx(0.5, abs=0.015)
    images, _ = fastmod.tasks.mnist_parity(20, "valid", 3)
    assert (images.flatten(1).amax(1) > 100).all()


def test_parity_draws_everything_evenly() -> None:
    shown = parity.scene(20_000, 2, torch.arange(50) % 10)
    kinds = {
        "digits": (shown.digits, 50), "sizes": (shown.sizes, 5), "angles": (shown.angles, 7),
        "blocks": (shown.blocks, 4), "colours": (shown.colours, 10),
    }  # fmt: skip
    for name, (values, count) in kinds.items():
        for column in values.T:
            share = torch.bincount(column, minlength=count) / len(column)
            assert len(share) == count, name
            assert ((share - 1 / count).abs() < 5 * math.sqrt(1 / count / len(column))).all(), name
    for size, pixels in enumerate(parity.SIZES):
        for places in (shown.tops, shown.lefts):
            assert places[shown.sizes == size].unique().tolist() == list(range(32 - pixels + 1))


@pytest.mark.parametrize("angle", parity.ANGLES)
@pytest.mark.parametrize("size", parity.SIZES)
def test_scaled_and_turned_as_grid_sample_does(size: int, angle: int) -> None:
    digits = torch.randint(256, (3, 28, 28), dtype=torch.uint8)
    turn = math.radians(angle)
    matrix = torch.tensor([[math.cos(turn), -math.sin(turn), 0], [math.sin(turn), math.cos(turn), 0]]).double()
    grid = F.affine_grid(matrix.expand(3, 2, 3), [3, 1, size, size], align_corners=False)
    expected = F.grid_sample(digits[:, None].double(), grid, align_corners=False)[:, 0]
    # Weights are rounded to 1/512 in each direction, pixels to half a level.
    torch.testing.assert_close(parity.turned(digits, size, angle).double(), expected, rtol=0, atol=0.5 + 2 * 255 / 512)


def test_turned_counterclockwise() -> None:
    digits = torch.randint(256, (2, 28, 28), dtype=torch.uint8)
    assert parity.turned(digits, 28, 0).equal(digits)
    assert parity.turned(digits, 28, 90).equal(digits.rot90(1, (1, 2)))


# ---- both


def test_different_gives_every_order_alike() -> None:
    columns = torch.cartesian_prod(torch.arange(4), torch.arange(3), torch.arange(2)).T
    found = drawing.different(*columns)
    assert len(found.unique(dim=0)) == 24
    assert all(len(set(row)) == 3 and set(row) <= {0, 1, 2, 3} for row in found.tolist())


@pytest.fixture(params=["pentomino", "mnist_parity"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    root = coded_digits(tmp_path)

    def make(n: int, seed: int) -> drawing.Labelled:
        if request.param == "pentomino":
            return fastmod.tasks.pentomino(n, seed, "jitter")
        return fastmod.tasks.mnist_parity(n, "train", seed, root, verify=False)

    return make


def test_seed_determines_everything(task) -> None:
    before = torch.get_num_threads()
    torch.manual_seed(1)
    images, labels = task(2100, 3)  # more than one chunk
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        torch.manual_seed(2)
        again = task(2100, 3)
    finally:
        torch.set_num_threads(before)
    assert again.images.equal(images) and again.labels.equal(labels), "for any number of threads"
    fewer = task(7, 3)
    assert fewer.images.equal(images[:7]) and fewer.labels.equal(labels[:7]), "more begin with the same"
    assert not task(7, 4).images.equal(fewer.images)
    assert task(0, 3).images.shape == (0, 3, 64, 64) and task(0, 3).labels.shape == (0,)


def test_bad_arguments_are_named(task) -> None:
    for n, seed, words in ((-1, 0, "n: expected 0 or more"), (1, -1, "seed: expected"), (1, 2**63, "seed: expected")):
        with pytest.raises(ValueError, match=words):
            task(n, seed)
    for n, seed, words in ((1.5, 0, "n: expected a whole"), (1, "0", "seed: expected a whole"), (True, 0, "n: ")):
        with pytest.raises(TypeError, match=words):
            task(n, seed)


def test_other_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"placement: expected one of center, corner, jitter, got 'middle'"):
        fastmod.tasks.pentomino(1, 0, "middle")
    with pytest.raises(ValueError, match=r"split: expected one of train, valid, test, got 'validation'"):
        fastmod.tasks.mnist_parity(1, "validation", 0)
    with pytest.raises(DataError, match="no such folder"):
        fastmod.tasks.mnist_parity(1, "train", 0, tmp_path / "nowhere")
    with pytest.raises(DataError, match="not the official"):
        fastmod.tasks.mnist_parity(1, "train", 0, coded_digits(tmp_path))
    with pytest.raises(DataError, match=r"expected digits \[N, 28, 28\] for valid"):
        fastmod.tasks.mnist_parity(1, "valid", 0, coded_digits(tmp_path / "none", train=0), verify=False)
