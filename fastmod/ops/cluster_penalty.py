"""Loss that pulls the mixture of each layer towards one template: ``cluster_penalty``.

All distances follow from the squared distances between templates, [K, K]. Kernels compute these and their gradient, the
only steps that touch the whole bank; the rest is plain PyTorch on a few numbers, in fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fastmod import backend
from fastmod.ops import _autograd, _checks
from fastmod.ops._samples import Sample
from fastmod.ops.template_mix import check_mixture


def cluster_penalty(logits: Tensor, bank: Tensor, squared: bool = False) -> Tensor:
    """Sum over rows of ``sum_k xi[k] * ||mixture - bank[k]||``, ``xi`` the softmax, ``mixture = xi @ bank``.

    Accurate to the last digits near one-hot rows. At distance 0 (a one-hot row, equal templates) its subgradient is 0.

    Args:
        logits: ``[..., K]``.
        bank: ``[K, P]``.
        squared: use squared distances.

    Returns:
        A scalar, in fp64 for fp64 tensors, else in fp32.
    """
    chosen = backend.resolve("cluster_penalty", logits)
    _checks.flag("squared", squared)
    check_mixture(logits, bank)
    table = distances(bank) if chosen == "reference" else _run(chosen == "triton", bank)
    return from_table(logits, table, squared).to(_checks.compute_dtype(bank))


def distances(bank: Tensor) -> Tensor:
    """``||bank[j] - bank[k]||^2``, [K, K], fp64, in plain PyTorch; reduced precision is computed in fp32.

    From differences, one template at a time: norms minus products would lose small distances to rounding.
    """
    wide = bank.to(_checks.compute_dtype(bank))
    rows = [
        functional.pad((wide[k + 1 :] - wide[k]).square().sum(-1).double(), (k + 1, 0)) for k in range(bank.shape[0])
    ]
    upper = torch.stack(rows)
    return upper + upper.mT


def from_table(logits: Tensor, table: Tensor, squared: bool) -> Tensor:
    """The penalty from squared distances [K, K]."""
    count = table.shape[-1]
    xi = logits.double().softmax(-1).reshape(-1, count)  # [R, K]
    if squared:  # sum_k xi_k r_k^2 = sum_ij xi_i xi_j D_ij / 2
        return 0.5 * ((xi @ table) * xi).sum()
    # r_k^2 = (sum_j xi_j) * (sum_j xi_j D_jk) - sum_ij xi_i xi_j D_ij / 2, over all i, j but k: with k in the sums
    # large terms would cancel near one-hot.
    others = xi[:, None, :] * (1 - torch.eye(count, dtype=xi.dtype, device=xi.device))  # [R, K, K]: row k has no xi_k
    near = others @ table  # [R, K, K]
    square = others.sum(-1) * near.diagonal(dim1=-2, dim2=-1) - 0.5 * (near * others).sum(-1)  # [R, K]
    zero = square <= 0  # the root has no derivative there; NaN stays NaN
    return (xi * torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())).sum()


def fake_forward(bank: Tensor) -> Tensor:
    return bank.new_empty((bank.shape[0], bank.shape[0]), dtype=torch.float64)


def fake_backward(grad: Tensor, bank: Tensor) -> Tensor:
    _checks.one_device(grad, bank)
    return bank.new_empty(bank.shape)


#: bank [K, P] -> squared distances [K, K], fp64
FORWARD = _autograd.define("cluster_penalty_forward(Tensor bank) -> Tensor", fake_forward)
#: gradient of the bank from that of the distances, [K, K], fp64
BACKWARD = _autograd.define("cluster_penalty_backward(Tensor grad, Tensor bank) -> Tensor", fake_backward)

_run = _autograd.from_kernels("Distances", FORWARD, BACKWARD, distances, 1)

SAMPLES = (
    Sample("cluster_penalty", "odd", ((2, 3, 5), (5, 7)), lambda t: [cluster_penalty(t[0], t[1])]),
    Sample("cluster_penalty", "squared", ((3, 4), (4, 9)), lambda t: [cluster_penalty(t[0], t[1], squared=True)]),
)
