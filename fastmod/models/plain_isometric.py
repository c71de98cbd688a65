"""The isometric net without fastmod's ops, as one would write it in ordinary PyTorch: for tests and races."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmod.models._isometric_parts import TaskNorm
from fastmod.models.isometric import IsometricNet
from fastmod.nn.mixing import weights_of


class PlainIsometricNet(nn.Module):
    """The twin of an :class:`fastmod.models.IsometricNet`, with copies of its weights and statistics.

    ``templates.{name}`` [K, p] holds a tensor of all templates, ``norms.{name}`` what is not mixed, ``state.{name}``
    [L, T, ...] the statistics (names with / for .). Tasks run one after the other.
    """

    def __init__(self, net: IsometricNet) -> None:
        super().__init__()
        body, bank = net.body, net.body.bank
        self.patch, self.both, self.mixing = net.patch, net.adapter_into_blocks, body.mixing
        self.tasks, self.layers, self.norm, self.fixed = body.tasks, body.layers, body.norm, body.fixed
        self.shared = [i for i, shared in enumerate(body._shared.tolist()) if shared]  # type: ignore[operator]
        self.se = "squeeze.weight" in bank.shapes
        norm = bank.block.expand_norm
        assert isinstance(norm, nn.BatchNorm2d) and norm.momentum is not None
        self.eps, self.momentum = norm.eps, norm.momentum
        enter, leave = net.input_adapter, net.output_adapter
        self.enter = _dict(dict(enter.named_parameters(recurse=False)))
        self.enter_norm = _copied(enter.norm)
        # Flat, as torch has no channels-last layout for one more dimension.
        self.shapes = {_key(n): shape for n, shape in bank.shapes.items()}
        self.templates = _dict({_key(n): w.flatten(1) for n, w in bank.split(bank.weight).items()})
        self.shares = _dict({} if body.logits is None else {"logits": body.logits})
        self.norms = nn.ParameterDict()
        if body.norm_weight is not None:
            sizes = [torch.Size(shape).numel() for shape in bank.left_out.values()]
            for n, part in zip(bank.left_out, body.norm_weight.split(sizes, -1), strict=True):
                self.norms[_key(n)] = _copy(part)
        self.state = nn.Module()
        for n, buffer in body.state.named_buffers():
            self.state.register_buffer(n, buffer.detach().clone())
        self.leave = _dict(dict(leave.named_parameters(recurse=False)))
        self.leave_norms = nn.ModuleList(_copied(n) for n in (leave.norm1, leave.norm2) if n is not None)
        self.dropout = nn.Dropout(net.dropout.p)
        self.shared_head, self.classes = net.head.shared, net.head.classes
        self.head = _dict(dict(net.head.named_parameters()))
        self.train(net.training)

    def forward(self, x: Tensor, task: int | None = 0) -> Tensor | list[Tensor]:
        if task is not None:
            return self._one(x, task)
        found = [self._one(x[t], t) for t in range(self.tasks)]
        return torch.stack(found) if len(set(self.classes)) == 1 else found

    def _one(self, x: Tensor, task: int) -> Tensor:
        weights = self._weights(task)
        x = F.conv2d(x, self.enter["weight"], self.enter.get("bias"), self.patch)
        first = x = F.relu(self._adapter_norm(x, self.enter_norm, task))
        for layer in range(self.layers):
            own = {n: w[layer] for n, w in weights.items()}
            x = self._block(x, own, layer, task, first if self.both else None)
        return self._leave(x, task)

    def _weights(self, task: int) -> dict[str, Tensor]:
        """Every tensor of all layers, ``[L, ...]``, by a matrix product each."""
        if self.fixed is not None:
            chosen = self.fixed[task]
            found = {n: torch.stack([w[k] for k in chosen]) for n, w in self.templates.items()}
        else:
            logits = self.shares["logits"]
            rows = [logits[0 if layer in self.shared else task, layer] for layer in range(self.layers)]
            xi = weights_of(torch.stack(rows), self.mixing)  # [L, K]
            found = {n: xi @ w for n, w in self.templates.items()}
        found = {n: w.unflatten(1, self.shapes[n]) for n, w in found.items()}
        for n, p in self.norms.items():
            found[n] = p if self.norm == "per_layer" else p[:, task]
        return found

    def _block(self, x: Tensor, w: dict[str, Tensor], layer: int, task: int, first: Tensor | None) -> Tensor:
        def norm(y: Tensor, name: str) -> Tensor:
            mean, var, count = (
                getattr(self.state, f"{name}_norm/{n}") for n in ("running_mean", "running_var", "num_batches_tracked")
            )
            if self.training:
                count[layer, task] += 1
            scale, shift = w[f"{name}_norm/weight"], w[f"{name}_norm/bias"]
            return F.batch_norm(
                y, mean[layer, task], var[layer, task], scale, shift, self.training, self.momentum, self.eps
            )

        y = x if first is None else torch.cat([x, first], 1)
        y = F.relu(norm(F.conv2d(y, w["expand/weight"], w.get("expand/bias")), "expand"))
        weight = w["depthwise/weight"]
        y = F.relu(norm(F.conv2d(y, weight, w.get("depthwise/bias"), 1, 1, 1, weight.shape[0]), "depthwise"))
        if self.se:
            gate = F.relu(norm(F.conv2d(y.mean((2, 3), keepdim=True), w["squeeze/weight"]), "squeeze"))
            y = y * torch.sigmoid(norm(F.conv2d(gate, w["excite/weight"]), "excite"))
        return x + norm(F.conv2d(y, w["project/weight"], w.get("project/bias")), "project")

    def _leave(self, x: Tensor, task: int) -> Tensor:
        bias = [self.leave.get(f"bias{i}") for i in (1, 2)]
        x = F.conv2d(x, self.leave["weight1"][:, :, None, None], bias[0])
        if len(self.leave_norms):
            x = self._adapter_norm(x, self.leave_norms[0], task)
        x = F.linear(F.relu(x).mean((2, 3)), self.leave["weight2"], bias[1])
        if len(self.leave_norms):
            x = self._adapter_norm(x, self.leave_norms[1], task)
        x = self.dropout(F.relu(x))
        at = 0 if self.shared_head else task
        rows = [self.classes[0]] if self.shared_head else self.classes
        return F.linear(x, self.head["weight"].split(rows)[at], self.head["bias"].split(rows)[at])

    def _adapter_norm(self, x: Tensor, norm: nn.Module, task: int) -> Tensor:
        assert isinstance(norm, TaskNorm)
        if self.training:
            norm.num_batches_tracked[task] += 1
        row = task if norm.own else 0
        mean, var = norm.running_mean[task], norm.running_var[task]
        return F.batch_norm(x, mean, var, norm.weight[row], norm.bias[row], self.training, norm.momentum, norm.eps)


@torch.no_grad()
def load_plain_isometric(net: IsometricNet, plain: PlainIsometricNet) -> IsometricNet:
    """Give ``net`` the weights and statistics of a plain twin of its shape; returns it."""
    body = net.body
    body.bank.weight.copy_(torch.cat(list(plain.templates.values()), 1))
    if body.logits is not None:
        body.logits.copy_(plain.shares["logits"])
    if body.norm_weight is not None:
        body.norm_weight.copy_(torch.cat(list(plain.norms.values()), -1))
    for n, buffer in body.state.named_buffers():
        buffer.copy_(plain.state.get_buffer(n))
    parts = ((net.input_adapter, plain.enter), (net.output_adapter, plain.leave), (net.head, plain.head))
    for ours, theirs in parts:
        for n, p in ours.named_parameters(recurse=False):
            p.copy_(theirs[n])
    norms = [n for n in (net.input_adapter.norm, net.output_adapter.norm1, net.output_adapter.norm2) if n is not None]
    for norm, other in zip(norms, [plain.enter_norm, *plain.leave_norms], strict=True):
        norm.load_state_dict(other.state_dict())
    return net


def _copied(norm: TaskNorm) -> TaskNorm:
    found = TaskNorm(norm.weight.shape[1], norm.running_mean.shape[0], norm.own, norm.eps, norm.momentum)
    found.to(norm.weight).load_state_dict(norm.state_dict())
    return found


def _dict(values: Mapping[str, Tensor]) -> nn.ParameterDict:
    """Copies, in this order, which ParameterDict would change."""
    found = nn.ParameterDict()
    for name, value in values.items():
        found[name] = _copy(value)
    return found


def _copy(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(), requires_grad=values.requires_grad)


def _key(name: str) -> str:
    return name.replace(".", "/")
