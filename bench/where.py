"""Where the time of an SMFR's step goes: ``python -m bench.where``. Kernels alone, the whole step, and its floor."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import fastmod
from fastmod import race
from fastmod.bench import clock
from fastmod.bench.steps import Step, backward_step
from fastmod.nn import _parts
from fastmod.ops.mfnnr import NO_PENALTY

BATCH = 128


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def fnns(model: fastmod.nn.SMFR) -> list[nn.ModuleList]:
    """Route and update of every layer."""
    return [fnn for layer in model.stack for fnn in layer.children() if isinstance(fnn, nn.ModuleList)]


def flops(model: fastmod.nn.SMFR, batch: int) -> tuple[int, int]:
    """Of the matrix products of the linear layers: forward, backward. The input of the model has no gradient."""
    each = [2 * batch * layer.in_features * layer.out_features for layer in linears(model)]
    first = [linears(fnn)[0].out_features for fnn in fnns(model)[:2]]
    skipped = 2 * batch * model.in_blocks * model.block_size * sum(first)
    return sum(each), 2 * sum(each) - skipped


def kernel_steps(model: fastmod.nn.SMFR, x: Tensor, grad: Tensor) -> dict[str, Step]:
    """The two kernel ops on the tensors of the model, without autograd."""
    tensors = [_parts.fnn_tensors(fnn) for fnn in fnns(model)]
    params = [t.detach() for of_one in tensors for t in of_one]
    options: tuple[Any, ...] = (len(tensors[0]), [], [], 0, True, NO_PENALTY)
    run = torch.ops.fastmod
    saved = run.smfr_forward.default(x, params, *options, True)[4]
    return {
        "forward kernel": lambda: run.smfr_forward.default(x, params, *options, True)[:1],
        "backward kernel": lambda: run.smfr_backward.default(grad, None, x, params, *options, saved, False, True),
    }


def step_of(model: fastmod.nn.SMFR, x: Tensor, grad: Tensor) -> Step:
    return backward_step(lambda: [model(x)], list(model.parameters()), [grad])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="time per line")
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    i, o, d, width, depth = race.FIRST
    model = fastmod.nn.SMFR(i, o, d, width, depth, threshold=None)
    x, grad = torch.randn(BATCH, i, d), torch.randn(BATCH, o, d)
    # As many layers and parameters, and nothing to compute: Python, dispatcher, autograd and a tensor per gradient.
    idle = fastmod.nn.SMFR(1, 1, 1, 1, depth, hidden=1, threshold=None)
    steps = {
        **kernel_steps(model, x, grad),
        "whole step": step_of(model, x, grad),
        "the step of the same stack with all sizes 1": step_of(idle, torch.randn(1, 1, 1), torch.randn(1, 1, 1)),
    }
    times = clock.interleaved(steps, seconds=options.seconds)
    work = dict(zip(("forward kernel", "backward kernel"), flops(model, BATCH), strict=True))
    work["whole step"] = sum(work.values())
    noisy = " (noisy)" if clock.noisy(times.values()) else ""
    print(f"SMFR {race.CASES[0].label}, {torch.get_num_threads()} threads, median ms{noisy}")
    for name, found in times.items():
        value = found.median
        done = work.get(name)
        rate = f", {done / 1e6:.1f} Mflop of matrix products at {done / value / 1e9:.0f} Gflop/s" if done else ""
        print(f"{value * 1e3:7.3f}  {name}{rate}")


if __name__ == "__main__":
    main()
