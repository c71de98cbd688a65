"""The Mathematics Dataset (Saxton et al.): questions such as ``Solve 3*x + 6 = 0 for x.`` and their answers, as text.

Read from the published files, or made by the package mathematics_dataset, which is asked for only then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fastmod.data.idx import DataError
from fastmod.data.scan import Vocabulary, padded

#: The tasks that the weight-mask paper looks at: area and name, as the published files are called.
TASKS = (
    "arithmetic__add_or_sub",
    "algebra__linear_1d",
    "calculus__differentiate",
    "comparison__sort",
    "polynomials__collect",
)
LEVELS = ("easy", "medium", "hard")
PACKAGE = "mathematics_dataset"
#: Where the published files are looked for below $FASTMOD_DATA; the last one is what their archive unpacks to.
FOLDERS = ("", "mathematics", "mathematics_dataset-v1.0")
#: All characters of questions and answers.
CHARACTERS = Vocabulary([chr(code) for code in range(ord(" "), ord("~") + 1)])


class Texts(NamedTuple):
    """Pairs as characters' numbers: every text ends with END and is filled up with PAD."""

    questions: Tensor  # int64 [N, longest question + 1]
    answers: Tensor  # int64 [N, longest answer + 1]


def load_mathematics(
    task: str, level: str, count: int, root: str | os.PathLike[str] | None = None, *, seed: int = 0
) -> list[tuple[str, str]]:
    """Different questions and their answers. From the published files in ``root``; else in ``$FASTMOD_DATA`` and its
    folders ``mathematics`` and ``mathematics_dataset-v1.0``; else made by the package mathematics_dataset.

    Args:
        task: for instance ``algebra__linear_1d``; :data:`TASKS` are those of the paper.
        level: ``easy``, ``medium`` or ``hard``.
        count: how many.
        root: folder with ``train-easy/algebra__linear_1d.txt`` and so on. Where it is given, nothing else is looked at.
        seed: of questions that are made; the same gives the same.

    Raises:
        DataError: nothing found, a file is damaged, or there are fewer questions than asked for.
    """
    if level not in LEVELS:
        raise DataError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
    if count < 1:
        raise DataError(f"count: expected 1 or more, got {count}")
    file = Path(f"train-{level}", f"{task}.txt")
    if root is not None:
        return read_pairs(Path(root, file), count)
    variable = os.environ.get("FASTMOD_DATA")
    for folder in FOLDERS if variable else ():
        assert variable
        if Path(variable, folder, file).is_file():
            return read_pairs(Path(variable, folder, file), count)
    if find_spec(PACKAGE) is None:
        where = f" in FASTMOD_DATA={variable}" if variable else ""
        raise DataError(
            f'Mathematics Dataset: not found{where}; pip install "fastmod[mathematics]", or give a folder with {file} '
            "and so on, or set FASTMOD_DATA to such a folder"
        )
    return generate(task, level, count, seed)


def read_pairs(path: Path, count: int) -> list[tuple[str, str]]:
    """The first ``count`` different questions of a published file: a line for each question, the next its answer."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; the published data have it in train-easy, -medium and -hard")
    found: dict[str, str] = {}
    with path.open(encoding="ascii", errors="replace") as lines:
        while len(found) < count and (pair := list(islice(lines, 2))):
            if len(pair) < 2:
                raise DataError(f"{path}: truncated: the last question has no answer")
            question, answer = (text.rstrip("\n") for text in pair)
            found.setdefault(question, answer)
    return _enough(list(found.items()), count, str(path))


def generate(task: str, level: str, count: int, seed: int = 0) -> list[tuple[str, str]]:
    """``count`` different questions made by the package, always the same for the same arguments."""
    child = Path(__file__).with_name("_mathematics_child.py")
    # The package's questions follow the order of sets of text, which only a fixed hash seed fixes.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, str(child), task, str(LEVELS.index(level)), str(count), str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DataError(f"{PACKAGE}: {task}, {level}: {reason}")
    pairs = [json.loads(line) for line in done.stdout.splitlines()]
    return _enough([(question, answer) for question, answer in pairs], count, f"{PACKAGE}: {task}, {level}")


def _enough(pairs: list[tuple[str, str]], count: int, origin: str) -> list[tuple[str, str]]:
    if len(pairs) < count:
        raise DataError(f"{origin}: expected {count} different questions, there are {len(pairs)}")
    return pairs


def as_tensors(pairs: Sequence[tuple[str, str]]) -> Texts:
    """Pairs of text as numbers of :data:`CHARACTERS`."""
    try:
        questions, answers = zip(*((CHARACTERS.encode(q), CHARACTERS.encode(a)) for q, a in pairs), strict=True)
    except KeyError as error:
        raise DataError(f"Mathematics Dataset: unknown character {error.args[0]!r}") from None
    return Texts(padded(questions), padded(answers))
