"""Where the time of an SMFR's step goes: ``python -m bench.where``. Kernels alone, the whole step, and its floor."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import fastmod
from fastmod import race
from fastmod.nn import _parts
from fastmod.ops.mfnnr import NO_PENALTY
from fastmod.race import Step, backward_step

CASE = race.SMFR_CASES[0]


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def flops(model: fastmod.nn.SMFR, batch: int) -> tuple[int, int]:
    """Of the matrix products of the linear layers: forward, backward. The input of the model has no gradient."""
    each = [2 * batch * layer.in_features * layer.out_features for layer in linears(model)]
    first_route, first_update = (fnn[0] for fnn in (model.stack[0].route, model.stack[0].update))
    skipped = 2 * batch * model.in_blocks * model.block_size * (first_route.out_features + first_update.out_features)
    return sum(each), 2 * sum(each) - skipped


def kernel_steps(model: fastmod.nn.SMFR, x: Tensor, grad: Tensor) -> dict[str, Step]:
    """The two kernel ops on the tensors of the model, without autograd."""
    params = [
        t.detach() for layer in model.stack for fnn in (layer.route, layer.update) for t in _parts.fnn_tensors(fnn)
    ]
    options = (len(_parts.fnn_tensors(model.stack[0].route)), [], [], 0, True, NO_PENALTY)
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
    i, o, d, width, depth = CASE.sizes
    model = fastmod.nn.SMFR(i, o, d, width, depth, threshold=None)
    x, grad = torch.randn(CASE.batch, i, d), torch.randn(CASE.batch, o, d)
    # As many layers and parameters, and nothing to compute: Python, dispatcher, autograd and a tensor per gradient.
    idle = fastmod.nn.SMFR(1, 1, 1, 1, depth, hidden=1, threshold=None)
    steps = {
        **kernel_steps(model, x, grad),
        "whole step": step_of(model, x, grad),
        "the step of the same stack with all sizes 1": step_of(idle, torch.randn(1, 1, 1), torch.randn(1, 1, 1)),
    }
    seconds, spread = race.interleaved(steps, seconds=options.seconds)
    work = dict(zip(("forward kernel", "backward kernel"), flops(model, CASE.batch), strict=True))
    work["whole step"] = sum(work.values())
    print(
        f"SMFR {CASE.label}, {torch.get_num_threads()} threads, median ms" + (" (noisy)" if spread > race.NOISY else "")
    )
    for name, value in seconds.items():
        done = work.get(name)
        rate = f", {done / 1e6:.1f} Mflop of matrix products at {done / value / 1e9:.0f} Gflop/s" if done else ""
        print(f"{value * 1e3:7.3f}  {name}{rate}")


if __name__ == "__main__":
    main()
