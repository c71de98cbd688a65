"""Rewrites the graph of an ordinary net, so that batch norms are applied by the convolutions that read them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastmod.nn import _fused_calls
from fastmod.nn._fused_trace import has_own_ways, hooked, trace

RELUS = (F.relu, torch.relu, torch.relu_, F.relu_)
ADDS = (operator.add, torch.add)
ADDS_IN_PLACE = (operator.iadd,)

#: ``program(model, *required arguments)`` in place of ``type(model).forward``.
Program = Callable[..., Any]


class Rewriter:
    """One graph: what can be fused in it, why the rest cannot, and the program after fusion."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.graph = model, trace(model)
        self.left: dict[str, str] = {}  # name of a Conv2d or a batch norm -> why it is not fused
        self.fused: list[str] = []
        self._done: set[str] = set()
        self.pairs = dict(self._pairs())  # node of a batch norm -> node of its convolution

    # ------------------------------------------------------------ finding pairs

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _pairs(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        norms = [node for node in self.graph.nodes if isinstance(self._module(node), _BatchNorm)]
        for node in norms:
            reason = self._why_not(node)
            if reason is not None:
                self.left[str(node.target)] = reason
        # A norm is fused in all of its calls or in none: torch's own call would save the running statistics, which ours
        # then changes, and its backward would fail.
        for node in norms:
            if str(node.target) not in self.left:
                yield node, node.args[0]

    def _why_not(self, node: fx.Node) -> str | None:
        norm = self.model.get_submodule(str(node.target))
        if type(norm) is not nn.BatchNorm2d:
            return f"is a {type(norm).__name__}, not a BatchNorm2d"
        if has_own_ways(norm):
            return "has hooks or parametrisations"
        conv = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        module = self._module(conv) if isinstance(conv, fx.Node) else None
        if not isinstance(conv, fx.Node) or not isinstance(module, nn.Conv2d):
            return "reads something else than a convolution"
        if len(conv.args) != 1 or conv.kwargs:
            return f"{conv.target}, which it reads, is called by keyword"
        if len(conv.users) > 1:
            return f"{conv.target}, which it reads, is also read elsewhere"
        reason = unfit(module)
        return None if reason is None else f"{conv.target}, which it reads, {reason}"

    def _is_relu(self, node: fx.Node, x: fx.Node) -> bool:
        if not node.args or node.args[0] is not x or len(node.all_input_nodes) != 1:
            return False
        if node.op == "call_module":
            module = self._module(node)
            return type(module) is nn.ReLU and not hooked(module)
        if node.op == "call_method":
            return node.target in ("relu", "relu_") and len(node.args) == 1
        return node.op == "call_function" and node.target in RELUS and "out" not in node.kwargs

    def _relu_of(self, node: fx.Node) -> fx.Node | None:
        users = list(node.users)
        return users[0] if len(users) == 1 and self._is_relu(users[0], node) else None

    def _place_in_sum(self, node: fx.Node) -> int | None:
        """Which of two summands is a batch norm that only this sum reads; None if there is none."""
        function, method = node.op == "call_function", node.op == "call_method"
        in_place = (function and node.target in ADDS_IN_PLACE) or (method and node.target == "add_")
        plain = (function and node.target in ADDS) or (method and node.target == "add")
        if not (in_place or plain) or node.kwargs or len(node.args) != 2 or node.args[0] is node.args[1]:
            return None
        a, b = node.args
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return None
        if self._only_read_by(a, node):
            return 0
        # The first summand, which an in-place sum overwrites, may be read elsewhere.
        return 1 if plain and self._only_read_by(b, node) else None

    def _only_read_by(self, node: fx.Node, user: fx.Node) -> bool:
        return node in self.pairs and list(node.users) == [user]

    def _reads_pending(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether a convolution can apply what is pending while it reads."""
        module = self._module(node)
        return isinstance(module, nn.Conv2d) and node.args == (value,) and not node.kwargs and unfit(module) is None

    # --------------------------------------------------------------- rewriting

    def rewrite(self) -> bool:
        """Whether anything was fused."""
        if not self.pairs:
            return False
        pending: dict[fx.Node, fx.Node] = {}  # batch norm that a sum reads -> the call that stands for it
        dead: list[fx.Node] = []
        norms = {conv: norm for norm, conv in self.pairs.items()}
        sums = {node: place for node in self.graph.nodes if (place := self._place_in_sum(node)) is not None}
        added = {norm for node in sums for norm in node.args if self._only_read_by(norm, node)}
        for node in list(self.graph.nodes):
            if node in norms:
                norm = norms[node]
                relu = None if norm in added else self._relu_of(norm)
                call = self._call(node, _fused_calls.normalise, *self._refs(node, norm), relu is not None)
                dead += [node, norm]
                if norm in added:
                    pending[norm] = call
                else:
                    self._settle(norm if relu is None else relu, call)
                    dead += [] if relu is None else [relu]
                self._say(node, norm, relu)
            elif node in sums:
                first, other = node.args[sums[node]], node.args[1 - sums[node]]
                relu = self._relu_of(node)
                call = self._call(node, _fused_calls.add, pending[first], pending.get(other, other), relu is not None)
                (node if relu is None else relu).replace_all_uses_with(call)
                dead += [node] if relu is None else [node, relu]
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for node in sorted(dead, key=order.__getitem__, reverse=True):
            self.graph.erase_node(node)
        self._allow_any_layout()
        return True

    def _refs(self, conv: fx.Node, norm: fx.Node) -> tuple[Any, ...]:
        with self.graph.inserting_before(conv):
            return conv.args[0], *(self.graph.get_attr(str(node.target)) for node in (conv, norm))

    def _call(self, before: fx.Node, function: Callable[..., Any], *args: Any) -> fx.Node:
        with self.graph.inserting_before(before):
            return self.graph.call_function(function, args)

    def _settle(self, value: fx.Node, call: fx.Node) -> None:
        """Let all consumers of ``value`` read ``call``: pending, if all of them can apply it, else written out once."""
        readers = list(value.users)
        if not readers or not all(self._reads_pending(reader, value) for reader in readers):
            value.replace_all_uses_with(self._call(value, _fused_calls.write, call))
            return
        value.replace_all_uses_with(call)
        for reader in readers:
            if reader not in self.pairs.values():  # no batch norm follows
                with self.graph.inserting_before(reader):
                    conv = self.graph.get_attr(str(reader.target))
                reader.replace_all_uses_with(self._call(reader, _fused_calls.read, call, conv))
                self.graph.erase_node(reader)
                self.fused.append(f"{reader.target}, which no batch norm follows, reads one")
                self._done.add(str(reader.target))

    def _allow_any_layout(self) -> None:
        """Fused results have channels innermost, where ``view`` may fail and ``reshape`` works."""
        for node in self.graph.nodes:
            if node.op == "call_method" and node.target == "view" and not _names_a_dtype(node):
                node.target = "reshape"

    def _say(self, conv: fx.Node, norm: fx.Node, relu: fx.Node | None) -> None:
        names = [str(conv.target), str(norm.target)] + ([] if relu is None else ["ReLU"])
        self.fused.append(" > ".join(names))
        self._done.update(names)

    # ------------------------------------------------------------------ results

    def program(self) -> Program:
        """The graph as a function of the model: modules and parameters are looked up in it at every call."""
        self.graph.lint()
        code = self.graph.python_code("self")
        names = dict(code.globals)
        exec(compile(code.src, f"<fused forward of {type(self.model).__name__}>", "exec"), names)
        return names["forward"]

    def report_left(self) -> dict[str, str]:
        """Every Conv2d and batch norm that was not fused, and why."""
        met = {str(node.target) for node in self.graph.nodes if node.op == "call_module"}
        found = {}
        for name, module in self.model.named_modules():
            if name in self.left:
                found[name] = self.left[name]
            elif isinstance(module, (nn.Conv2d, _BatchNorm)) and name not in self._done:
                parts = name.split(".")
                outer = [".".join(parts[:i]) for i in range(1, len(parts)) if ".".join(parts[:i]) in met]
                if outer:
                    found[name] = f"is inside of {outer[0]}, which has hooks or runs by itself"
                elif name not in met:
                    found[name] = "is not used"
                else:
                    reason = unfit(module) if isinstance(module, nn.Conv2d) else None
                    found[name] = reason or "is followed by no batch norm that could be fused"
        return found


def unfit(conv: nn.Conv2d) -> str | None:
    """Why norm_conv cannot serve it."""
    if type(conv) is not nn.Conv2d or has_own_ways(conv):
        return "is a subclass of Conv2d, or has hooks or parametrisations"
    size = conv.kernel_size[0]
    if conv.kernel_size not in ((1, 1), (3, 3)):
        return "has a kernel of {} x {}".format(*conv.kernel_size)
    if conv.stride not in ((1, 1), (2, 2)):
        return f"has stride {conv.stride}"
    same = conv.padding == "same" or (conv.padding == "valid" and size == 1)
    if not same and conv.padding != (size // 2, size // 2):
        return f"is padded by {conv.padding}, not by {size // 2}"
    if conv.dilation != (1, 1) or conv.padding_mode != "zeros":
        return "is dilated or not padded with zeros"
    if conv.groups != 1 and not conv.groups == conv.in_channels == conv.out_channels:
        return f"has {conv.groups} groups"
    return None


def _names_a_dtype(node: fx.Node) -> bool:
    return bool(node.kwargs) or any(isinstance(a, torch.dtype) for a in node.args)
