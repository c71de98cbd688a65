"""Table of medians and of the ratio of the better baseline to fastmod: ``python -m bench.ratios [words of labels]``."""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console

from bench.cases import ALL
from fastmod import race
from fastmod.cli import race_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose op and label contain one of these")
    parser.add_argument("--seconds", type=float, default=3.0, help="time per case and contender")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    torch.set_num_threads(2)
    results = []
    for case in ALL:
        label = f"{case.op} {case.label}"
        if options.words and not any(word in label for word in options.words):
            continue
        print(f"{label} ...", file=sys.stderr)
        torch._dynamo.reset()
        steps = case.steps(compiled=not options.no_compile)
        results.append(race.run(label, steps, target=case.target, seconds=options.seconds))
    contenders = ["eager", "fastmod"] if options.no_compile else ["eager", "compile", "fastmod"]
    Console(width=110).print(race_table(results, contenders, "forward + backward"))
    return 0 if all(result.matches for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
