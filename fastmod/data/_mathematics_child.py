"""Makes questions with the package mathematics_dataset; :mod:`fastmod.data.mathematics` runs it as a program.

It is a separate process because the questions depend on the hash seed, which is fixed when Python starts, and because
the package uses parts of numpy and sympy that were removed: restoring them here affects nothing else. It imports only
that package. Arguments: task, level 0 to 2, count, seed. Prints one pair per line, as JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

LEVELS = 3
MOST_QUESTION, MOST_ANSWER = 160, 30  # characters, the limits of the published data
_PATIENCE = 1000  # questions in a row without a new one before it gives up


def put_back() -> None:
    """Restore what the package uses and numpy >= 1.24 and sympy >= 1.6 removed."""
    import numpy as np

    # By name, because the attribute of sympy.solvers is a function.
    package: Any = importlib.import_module("sympy.solvers.diophantine")
    if "object" not in np.__dict__:
        np.object = object  # type: ignore[attr-defined]
    if not hasattr(package, "base_solution_linear"):  # moved to an inner module
        inner = importlib.import_module("sympy.solvers.diophantine.diophantine")
        package.base_solution_linear = inner.base_solution_linear
    if not hasattr(np.ndarray, "itemset"):  # a C class takes no new method: change the caller
        _import_changed("mathematics_dataset.sample.polynomials", r"(\w+)\.itemset\((\w+), (\w+)\)", r"\1[\2] = \3")


def _import_changed(name: str, pattern: str, replacement: str) -> None:
    """Import a module after replacing some of its source."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None and spec.loader is not None
    source = spec.loader.get_source(name)  # type: ignore[attr-defined]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(re.sub(pattern, replacement, source), spec.origin, "exec"), module.__dict__)
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)


def part_of_range(level: int) -> Callable[[tuple[float, float]], tuple[float, float]]:
    """The third of a range of entropies to draw questions from; a higher level makes them harder."""

    def third(whole: tuple[float, float]) -> tuple[float, float]:
        length = whole[1] - whole[0]
        return whole[0] + level / LEVELS * length, whole[0] + (level + 1) / LEVELS * length

    return third


def questions(task: str, level: int, seed: int) -> Iterator[tuple[str, str]]:
    """Endless distinct questions and their answers; ``task`` is for example ``algebra__linear_1d``."""
    put_back()
    import numpy as np

    area, _, name = task.partition("__")
    module: Any = importlib.import_module(f"mathematics_dataset.modules.{area}")
    ask = module.train(part_of_range(level))[name]
    text = f"{seed} {task} {level}"
    random.seed(text)
    np.random.seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))
    seen: set[str] = set()
    in_vain = 0
    while in_vain < _PATIENCE:
        problem = ask()
        question, answer = str(problem.question), str(problem.answer)
        in_vain += 1
        if len(question) <= MOST_QUESTION and len(answer) <= MOST_ANSWER and question not in seen:
            seen.add(question)
            in_vain = 0
            yield question, answer


def main() -> None:
    task, level, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    for number, pair in enumerate(questions(task, level, seed), 1):
        print(json.dumps(pair))
        if number == count:
            break


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its modules could shadow others
    main()
