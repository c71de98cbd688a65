"""USPS, Fashion-MNIST and KMNIST on tiny files; domains of images compared with plain loops."""

from __future__ import annotations

import bz2
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastmod.data import DataError, load_fashion_mnist, load_kmnist, load_usps
from fastmod.tasks import corrupt
from fastmod.tasks.corruptions import DOMAINS
from tests.helpers.study_runs import digits
from tests.helpers.surroundings import no_data_folder as no_data_folder

# ---- USPS


def usps_folder(folder: Path, train: int = 12, test: int = 5, packed: bool = True) -> Path:
    """Image i shows the digit i % 10; its pixel i is white, the next one grey, the others black."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("usps", train), ("usps.t", test)):
        lines = []
        for i in range(count):
            values = dict.fromkeys(range(1, 257), "-1") | {i + 1: "1"}
            del values[i + 2]  # zeros are omitted
            pixels = " ".join(f"{place}:{value}" for place, value in values.items())
            lines.append(f"{i % 10 + 1} {pixels}\n")
        contents = "".join(lines).encode()
        (folder / f"{name}{'.bz2' * packed}").write_bytes(bz2.compress(contents) if packed else contents)
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["", "usps"])
def test_usps(tmp_path: Path, packed: bool, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_usps(usps_folder(tmp_path / place, packed=packed))
    assert found.train_images.shape == (12, 16, 16) and found.train_images.dtype == torch.uint8
    assert found.train_labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1] and len(found.test_labels) == 5
    assert found.test_images[3].flatten()[:6].tolist() == [0, 0, 0, 255, 128, 0]
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    assert load_usps().train_images.equal(found.train_images)


def test_usps_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"USPS: not found; .*FASTMOD_DATA"):
        load_usps()
    with pytest.raises(DataError, match="no such folder"):
        load_usps(tmp_path / "nowhere")
    with pytest.raises(DataError, match="expected usps "):
        load_usps(tmp_path)
    folder = usps_folder(tmp_path, packed=False)
    file = folder / "usps.t"
    for contents, words in [
        (b"", "expected at least one line"),
        (b"1 1:0\n11 1:0\n", r"line 2: expected a class 1 \.\. 10"),
        (b"1 257:0\n", "line 1: expected a class"),
        (b"1 1:1.5\n", "line 1: expected a class"),
        (b"1 1:nan\n", "line 1: expected a class"),
        (b"1 1=0\n", "line 1: expected a class and number:value pairs"),
        (bz2.compress(b"1 1:0\n")[:-3], "truncated or damaged bzip2"),
    ]:
        file.write_bytes(contents)
        with pytest.raises(DataError, match=rf"usps\.t: {words}"):
            load_usps(folder)


# ---- files named like those of MNIST


@pytest.mark.parametrize(("load", "name"), [(load_fashion_mnist, "fashion_mnist"), (load_kmnist, "kmnist")])
def test_like_mnist(tmp_path: Path, load: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = digits(tmp_path / name)
    found = load(folder)
    assert [len(part) for part in found] == [30, 30, 20, 20] and found.train_images.shape == (30, 28, 28)
    monkeypatch.setenv("FASTMOD_DATA", str(tmp_path))
    assert load().test_images.equal(found.test_images)
    with pytest.raises(DataError, match="no such folder"):
        load(tmp_path / "nowhere")
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="expected t10k-labels-idx1-ubyte"):
        load(folder)
    monkeypatch.delenv("FASTMOD_DATA")
    with pytest.raises(DataError, match=r"MNIST: not found; "):
        load()


def test_a_part_of_the_training_images_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = digits(tmp_path / "kmnist")
    digits(folder / "first7", train=7)
    (folder / "train-images-idx3-ubyte").unlink()  # the labels of all images stay
    found = load_kmnist(folder)
    assert [len(part) for part in found] == [7, 7, 20, 20]
    digits(folder / "first9", train=9)
    with pytest.raises(DataError, match="expected train-images-idx3-ubyte"):
        load_kmnist(folder)


# ---- domains


def pictures(count: int = 6, side: int = 9) -> Tensor:
    return torch.randint(256, (count, side, side), generator=torch.Generator().manual_seed(1)).byte()


def read_at(image: Tensor, row: float, column: float) -> float:
    """Bilinear brightness at a point; black beyond the edge."""
    total = 0.0
    for r in (math.floor(row), math.floor(row) + 1):
        for c in (math.floor(column), math.floor(column) + 1):
            if 0 <= r < image.shape[0] and 0 <= c < image.shape[1]:
                total += float(image[r, c]) * (1 - abs(row - r)) * (1 - abs(column - c))
    return total


def affine(image: Tensor, zoom: float, slant: float) -> Tensor:
    side = image.shape[0]
    centre = (side - 1) / 2
    rows = [
        [
            read_at(image, centre + zoom * (r - centre), centre + zoom * (c - centre) + slant * zoom * (r - centre))
            for c in range(side)
        ]
        for r in range(side)
    ]
    return torch.tensor(rows)


def test_scale_by_hand() -> None:
    images = pictures()
    for image, found in zip(images, corrupt(images, "scale"), strict=True):
        torch.testing.assert_close(found.float(), affine(image, 1 / 0.7, 0.0), atol=2.0, rtol=0)
    lone = torch.zeros(1, 9, 9, dtype=torch.uint8)
    lone[0, 4, 4] = 255
    assert corrupt(lone, "scale")[0, 4, 4] == 255, "the centre stays"


def test_shear_by_hand() -> None:
    images, slant = pictures(40), math.tan(0.4)
    sides = []
    for image, found in zip(images, corrupt(images, "shear", seed=3), strict=True):
        distances = [float((found - affine(image, 1.0, sign * slant)).abs().max()) for sign in (1, -1)]
        assert min(distances) <= 2.0 < max(distances)
        sides.append(distances[0] < distances[1])
    assert 8 < sum(sides) < 32, "to both sides"


def test_shot_noise_is_poisson() -> None:
    images = torch.full((500, 10, 10), 204, dtype=torch.uint8)  # 0.8 of white
    photons = corrupt(images, "shot_noise", seed=5).double() / 85  # a white pixel has three
    assert set(photons.unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}
    rate = 3 * 0.8
    chances = [math.exp(-rate) * rate**k / math.factorial(k) for k in range(3)]
    for k, chance in enumerate([*chances, 1 - sum(chances)]):
        assert (photons == k).double().mean().item() == pytest.approx(chance, abs=0.006)
    assert not corrupt(torch.zeros_like(images), "shot_noise").any()


def test_boundary_and_blur_by_hand() -> None:
    images = pictures(3)
    padded = torch.zeros(3, 13, 13)
    padded[:, 2:11, 2:11] = images.float()
    boundary, blurred = torch.zeros(3, 9, 9), torch.zeros(3, 9, 9)
    weights = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0]) / 16
    for r in range(9):
        for c in range(9):
            corner = padded[:, r + 2 : r + 4, c + 2 : c + 4].flatten(1)
            boundary[:, r, c] = corner.amax(1) - corner.amin(1)
            window = padded[:, r : r + 5, c : c + 5]
            blurred[:, r, c] = (window * weights[:, None] * weights).sum((1, 2))
    assert corrupt(images, "boundary").float().equal(boundary)
    twice = torch.zeros(3, 13, 13)
    twice[:, 2:11, 2:11] = (blurred + 0.5).floor()
    again = (twice.unfold(1, 5, 1) * weights).sum(-1)
    again = (again.unfold(2, 5, 1) * weights).sum(-1)
    assert corrupt(images, "blurred").float().equal((again + 0.5).floor())


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_seed_makes_the_same_images(domain: str) -> None:
    images = pictures(20)
    before = images.clone()
    found = corrupt(images, domain, seed=7)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    assert found.dtype == torch.uint8 and found.equal(corrupt(images, domain, seed=7))
    torch.set_num_threads(threads)
    assert images.equal(before) and found.equal(corrupt(images, domain, seed=7))
    if domain in ("shear", "shot_noise"):
        assert not found.equal(corrupt(images, domain, seed=8))
    assert found[:5].equal(corrupt(images[:5], domain, seed=7)), "the first ones are the same, however many"
    assert corrupt(images[:0], domain).shape == (0, 9, 9)


def test_bad_domains_and_images() -> None:
    with pytest.raises(ValueError, match=r"domain: expected one of original, shear, .*, got 'fog'"):
        corrupt(pictures(), "fog")
    with pytest.raises(TypeError, match=r"images: expected uint8 \[N, S, S\], got torch.float32"):
        corrupt(pictures().float(), "shear")
    with pytest.raises(ValueError, match=r"images: expected uint8 \[N, S, S\], got shape \[6, 9, 5\]"):
        corrupt(pictures()[:, :, :5], "shear")
