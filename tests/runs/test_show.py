"""``fastmod show``: a sheet of a task's images."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastmod.runs import draw
from fastmod.tasks import show
from tests.data.test_image_tasks import coded_digits
from tests.helpers.study_commands import in_process, refused


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTMOD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def test_pentomino(tmp_path: Path) -> None:
    done = in_process("show", "pentomino", "--n", "5", "--seed", "3")
    assert done.code == 0 and "pentomino.png" in done.out, done.text
    first = Path("pentomino.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    for seed, same in ((3, True), (4, False)):
        assert in_process("show", "pentomino", "--n", "5", "--seed", seed, "--out", "other.png").code == 0
        assert (Path("other.png").read_bytes() == first) == same


def test_mnist_parity(tmp_path: Path) -> None:
    root = coded_digits(tmp_path / "digits")
    args = ("--set", f"data={root}", "--set", "verify=false", "--set", "split=test", "--out", "sheet.png")
    done = in_process("show", "mnist-parity", "--n", "3", *args)
    assert done.code == 0 and Path("sheet.png").exists(), done.text


def test_sheet_has_the_images_and_their_labels() -> None:
    from fastmod.tasks import pentomino

    figure = show.sheet("pentomino", 7, 1, {"placement": "jitter"})
    shown = [axes for axes in figure.axes if axes.images]
    images, labels = pentomino(7, 1, "jitter")
    assert len(shown) == 7 <= len(figure.axes)
    for axes, image, label in zip(shown, images, labels.tolist(), strict=True):
        assert axes.get_title().startswith(str(label))
        assert (axes.images[0].get_array() == image.permute(1, 2, 0).numpy()).all()


@pytest.mark.parametrize(
    ("args", "words"),
    [(["nonsense"], "unknown task 'nonsense'; known: pentomino, mnist_parity"),
     (["pentomino", "--n", "0"], "--n: expected 1 to 400, got 0"),
     (["pentomino", "--n", "100000"], "--n: expected"),
     (["pentomino", "--seed", "-1"], "seed: expected"),
     (["pentomino", "--set", "placement=middle"], "placement: expected one of"),
     (["pentomino", "--set", "split=test"], "unknown key 'split'; known: placement"),
     (["pentomino", "--set", "placement"], "expected key=value"),
     (["pentomino", "--out", "sheet.txt"], "ends in .png"),
     (["pentomino", "--out", "nowhere/sheet.png"], "No such file"),
     (["mnist_parity", "--set", "split=all"], "split: expected one of"),
     (["mnist_parity", "--set", "verify=perhaps"], "verify: expected"),
     (["mnist_parity", "--set", "data=nowhere"], "nowhere: no such folder")],
)  # fmt: skip
def test_what_cannot_be_shown(args: list[str], words: str) -> None:
    refused(in_process("show", *args), words)
    assert not list(Path().glob("*.png"))


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "find_spec", lambda name: None)
    refused(in_process("show", "pentomino"), "matplotlib", 'pip install "fastmod[study]"')
