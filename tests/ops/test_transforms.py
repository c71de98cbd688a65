"""What torch does to a function of ours: forward mode, checkpointing, meta tensors, torch.func. Every op and SMFR."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fastmod
from fastmod import nn
from fastmod.samples import SAMPLES, Sample

Function = Callable[..., tuple[Tensor, ...]]


def name_of(sample: Sample) -> str:
    return f"{sample.op} {sample.label}".replace(" ", "-")


samples = pytest.mark.parametrize("sample", SAMPLES, ids=name_of)
#: With each sample the tensors that are batched; an op of one tensor has no others.
choices = pytest.mark.parametrize(
    ("sample", "which"),
    [
        pytest.param(sample, which, id=f"{name_of(sample)}-{which}")
        for sample in SAMPLES
        for which in ("all", "first", "others")
        if which != "others" or len(sample.tensors(dtype=torch.float64)) > 1
    ],
)
MODES = ("softmax", "gumbel")


def function_of(sample: Sample) -> Function:
    return lambda *tensors: tuple(sample.call(tensors))


def small_smfr(mode: str = "softmax") -> nn.SMFR:
    torch.manual_seed(0)
    return nn.SMFR(3, 2, 4, 3, 1, hidden=5, mode=mode, threshold=0.1).double()


def seeded(model: nn.SMFR) -> Callable[[Tensor], Tensor]:
    """The model with the same noise at every call, its penalty added to its output."""

    def call(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return model(x) + model.penalty()

    return call


def by_reference(function: Callable[[], object]) -> object:
    with fastmod.use_backend("reference"):
        return function()


@samples
def test_forward_mode(sample: Sample) -> None:
    inputs = [t.detach() for t in sample.tensors(dtype=torch.float64)]
    tangents = [torch.randn_like(t) for t in inputs]
    function = function_of(sample)
    out, found = torch.func.jvp(function, tuple(inputs), tuple(tangents))
    # The other direction, by the kernels: <grad, J tangent> = <J' grad, tangent>.
    leaves = [t.clone().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    grads = [torch.randn_like(o) for o in outputs]
    pulled = torch.autograd.grad(outputs, leaves, grads)
    expected = sum((p * t).sum() for p, t in zip(pulled, tangents, strict=True))
    torch.testing.assert_close(sum((g * f).sum() for g, f in zip(grads, found, strict=True)), expected)
    torch.testing.assert_close(list(out), [o.detach() for o in outputs])
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p, t) for p, t in zip(inputs, tangents, strict=True)]
        unpacked = [forward_ad.unpack_dual(o).tangent for o in function(*duals)]
    torch.testing.assert_close(unpacked, list(found))


@pytest.mark.parametrize("mode", MODES)
def test_forward_mode_of_smfr(mode: str) -> None:
    call = seeded(small_smfr(mode))
    x, tangent = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    found = torch.func.jvp(call, (x,), (tangent,))[1]
    expected = by_reference(lambda: torch.autograd.functional.jvp(call, x, tangent)[1])
    assert found.abs().max() > 0
    torch.testing.assert_close(found, expected)


def gradients(function: Function, inputs: Sequence[Tensor], how: Callable[..., object]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    torch.manual_seed(5)
    outputs = how(function, *leaves)
    assert isinstance(outputs, tuple)
    sum(o.sin().sum() for o in outputs).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("place", ["end", "middle"])
@samples
def test_checkpoint(sample: Sample, place: str, reentrant: bool) -> None:
    def segment(*tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = sample.call([t.abs() for t in tensors])
        return tuple(outputs) if place == "end" else tuple(o.tanh() for o in outputs)

    inputs = sample.tensors(dtype=torch.float64)
    plain = gradients(segment, inputs, lambda f, *t: f(*t))
    again = gradients(segment, inputs, lambda f, *t: checkpoint(f, *t, use_reentrant=reentrant))
    assert len(plain) == len(inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_of_smfr(mode: str, reentrant: bool) -> None:
    model = small_smfr(mode)
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for how in (lambda f, *t: f(*t), lambda f, *t: checkpoint(f, *t, use_reentrant=reentrant)):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(1)
        how(model, x).sin().sum().backward()
        found.append([x.grad, *[p.grad for p in model.parameters()]])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@samples
def test_meta(sample: Sample) -> None:
    inputs = [t.detach().to("meta").requires_grad_() for t in sample.tensors()]
    with fastmod.use_backend("reference"):
        shapes = [o.shape for o in sample.call(sample.tensors())]
    outputs = sample.call(inputs)
    assert [o.shape for o in outputs] == shapes and all(o.is_meta for o in outputs)
    sum(o.sum() for o in outputs).backward()
    assert all(t.grad is not None and t.grad.is_meta and t.grad.shape == t.shape for t in inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.SMFR(3, 2, 4, 3, 1, hidden=5),
        lambda: nn.SMFR(3, 2, 4, 3, 1, hidden=5, mode="gumbel"),
        lambda: nn.MFNNR(3, 2, 4, hidden=5),
        lambda: nn.Multiplexer(3, 2, 4, hidden=5),
        lambda: nn.FNNR(3, 4, hidden=5),
    ],
)
def test_layers_on_meta(make: Callable[[], torch.nn.Module]) -> None:
    with torch.device("meta"):
        layer, x = make(), torch.randn(5, 3, 4, requires_grad=True)
    out = layer(x)
    assert out.is_meta and out.shape == (5, 3 if isinstance(layer, nn.FNNR) else 2, 4)
    out.sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in layer.parameters())


# ----------------------------------------------------------------- torch.func


def detached(sample: Sample) -> tuple[Tensor, ...]:
    return tuple(t.detach() for t in sample.tensors(dtype=torch.float64))


def loss_of(sample: Sample) -> Callable[..., Tensor]:
    def loss(*tensors: Tensor) -> Tensor:
        return sum((o.sin() * torch.linspace(0.5, 2, o.numel()).view_as(o)).sum() for o in sample.call(tensors))

    return loss


@samples
def test_func_grad(sample: Sample) -> None:
    inputs = detached(sample)
    places = tuple(range(len(inputs)))
    found = torch.func.grad(loss_of(sample), argnums=places)(*inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = torch.autograd.grad(loss_of(sample)(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def several(inputs: Sequence[Tensor], count: int = 3) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.stack([t + 0.3 * torch.rand_like(t) * (i > 0) for i in range(count)]) for t in inputs]


@choices
def test_vmap(sample: Sample, which: str) -> None:
    """Over every tensor, over the first alone (x, the blocks), over the parameters alone."""
    inputs = detached(sample)
    chosen = [which == "all" or (which == "first") == (i == 0) for i in range(len(inputs))]
    many = [b if c else a for a, b, c in zip(inputs, several(inputs), chosen, strict=True)]
    in_dims = tuple(0 if c else None for c in chosen)
    alone = [[t[i] if c else t for t, c in zip(many, chosen, strict=True)] for i in range(3)]
    function = function_of(sample)
    found = torch.vmap(function, in_dims)(*many)
    for i in range(3):
        torch.testing.assert_close([f[i] for f in found], list(function(*alone[i])))
    # Last dimension, and an outer autograd that sums over the elements.
    leaves = [t.clone().requires_grad_() for t in many]
    moved = [t.movedim(0, -1) if c else t for t, c in zip(leaves, chosen, strict=True)]
    outputs = torch.vmap(function, tuple(-1 if c else None for c in chosen))(*moved)
    torch.testing.assert_close([o.detach() for o in outputs], list(found))
    grads = [torch.randn_like(o) for o in outputs]
    ours = torch.autograd.grad(outputs, leaves, grads)
    by_hand = torch.autograd.grad(
        [torch.stack(o) for o in zip(*[function(*a) for a in [
            [t[i] if c else t for t, c in zip(leaves, chosen, strict=True)] for i in range(3)]], strict=True)],
        leaves, grads,
    )  # fmt: skip
    torch.testing.assert_close(ours, by_hand)


@choices
def test_per_sample_gradients(sample: Sample, which: str) -> None:
    inputs = detached(sample)
    chosen = [which == "all" or (which == "first") == (i == 0) for i in range(len(inputs))]
    many = [b if c else a for a, b, c in zip(inputs, several(inputs), chosen, strict=True)]
    gradient = torch.func.grad(loss_of(sample), argnums=tuple(range(len(inputs))))
    found = torch.vmap(gradient, tuple(0 if c else None for c in chosen))(*many)
    for i in range(3):
        torch.testing.assert_close(
            [f[i] for f in found], list(gradient(*[t[i] if c else t for t, c in zip(many, chosen, strict=True)]))
        )


@samples
def test_second_derivatives(sample: Sample) -> None:
    inputs = [t.detach().requires_grad_() for t in sample.tensors(dtype=torch.float64)]
    loss = loss_of(sample)

    def twice(backend: str) -> list[Tensor]:
        with fastmod.use_backend(backend):
            first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
            total = sum((g * torch.linspace(-1, 1, g.numel()).view_as(g)).sum() for g in first)
            second = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
            third = torch.autograd.grad(sum(s.square().sum() for s in second), inputs, materialize_grads=True)
        return [*first, *second, *third]

    torch.testing.assert_close(twice("native"), twice("reference"))


@samples
def test_second_derivative_of_related_inputs(sample: Sample) -> None:
    """One input made from another: their gradients stay apart."""
    x = sample.tensors(dtype=torch.float64)[0].detach().requires_grad_()

    def twice(backend: str) -> Tensor:
        with fastmod.use_backend(backend):
            others = [t.detach() + x.sum() * 0.01 for t in sample.tensors(dtype=torch.float64)[1:]]
            (first,) = torch.autograd.grad(loss_of(sample)(x, *others), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(twice("native"), twice("reference"))


def test_hessian() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    logits = torch.randn(2, 3, 2, dtype=torch.float64)
    loss = lambda t: fastmod.ops.multiplex(x, t).square().sum()  # noqa: E731
    found = torch.func.jacrev(torch.func.grad(loss))(logits)
    torch.testing.assert_close(found, torch.func.hessian(loss)(logits))
    torch.testing.assert_close(found, by_reference(lambda: torch.autograd.functional.hessian(loss, logits)))


@pytest.mark.parametrize("mode", MODES)
def test_ensemble_of_smfrs(mode: str) -> None:
    torch.manual_seed(0)
    models = [nn.SMFR(3, 2, 4, 3, 1, hidden=5, mode=mode, threshold=0.1).double().eval() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(models)
    x, base = torch.randn(5, 3, 4, dtype=torch.float64), models[0]

    def call(own: dict[str, Tensor], x: Tensor) -> Tensor:
        out = torch.func.functional_call(base, own, (x,))
        return (out.sin().sum() + base.penalty()).sum()

    found = torch.vmap(call, (0, None))(params, x)
    grads = torch.vmap(torch.func.grad(call), (0, None))(params, x)
    for i, model in enumerate(models):
        model.zero_grad()
        loss = model(x).sin().sum() + model.penalty()
        loss.backward()
        torch.testing.assert_close(found[i], loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name][i], parameter.grad)


@pytest.mark.parametrize("mode", MODES)
def test_per_sample_gradients_of_smfr(mode: str) -> None:
    model = small_smfr(mode).eval()
    params = dict(model.named_parameters())
    x = torch.randn(7, 3, 4, dtype=torch.float64)

    def loss(own: dict[str, Tensor], one: Tensor) -> Tensor:
        out = torch.func.functional_call(model, own, (one,))
        return out.sin().sum() + model.penalty()

    found = torch.vmap(torch.func.grad(loss), (None, 0))({n: p.detach() for n, p in params.items()}, x)
    for i in range(7):
        model.zero_grad()
        (model(x[i]).sin().sum() + model.penalty()).backward()
        for name, parameter in params.items():
            torch.testing.assert_close(found[name][i], parameter.grad)


def test_vmap_with_a_seed_for_each() -> None:
    x, logits = torch.randn(6, 5), torch.randn(4, 5)
    weight, seeds = torch.randn(4, 5), torch.tensor([3, 4])
    found = torch.vmap(lambda s: fastmod.ops.masked_linear(x, weight, logits, 2, seed=s))(seeds)
    for i in range(2):
        assert torch.equal(found[i], fastmod.ops.masked_linear(x, weight, logits, 2, seed=int(seeds[i])))


# -------------------------------------------------------------- torch.compile, autocast, backends


@samples
def test_compile_fullgraph(sample: Sample) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function_of(sample), fullgraph=True, backend="aot_eager")
    plain = gradients(function_of(sample), sample.tensors(), lambda f, *t: f(*t))
    found = gradients(compiled, sample.tensors(), lambda f, *t: f(*t))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MFNNR(3, 2, 4, hidden=5),
        lambda: nn.MFNNR(3, 2, 4, hidden=5, mode="gumbel").eval(),
        lambda: nn.Multiplexer(3, 2, 4, hidden=5),
        lambda: nn.FNNR(3, 4, hidden=5),
    ],
)
def test_layers_compile_fullgraph(make: Callable[[], torch.nn.Module]) -> None:
    torch._dynamo.reset()
    layer, x = make(), torch.randn(5, 3, 4)
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        out = run(x)
        out.sin().sum().backward()
        found.append([out.detach(), *[p.grad for p in layer.parameters()]])
    torch.testing.assert_close(*found)


@samples
def test_autocast(sample: Sample) -> None:
    """Kernels and plain PyTorch cast alike: the same dtypes, the same values up to a rounding of bf16."""
    found = {}
    for name in ("native", "reference"):
        leaves = sample.tensors()
        with fastmod.use_backend(name), torch.autocast("cpu", torch.bfloat16):
            outputs = sample.call(leaves)
        grads = torch.autograd.grad(sum(o.float().sum() for o in outputs), leaves)
        found[name] = [*[o.detach() for o in outputs], *grads]
    for ours, expected in zip(found["native"], found["reference"], strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, atol=0.1 * max(1.0, expected.abs().max().item()), rtol=0.1)


@samples
def test_backward_inside_autocast(sample: Sample) -> None:
    """It has the dtypes of its forward, whatever is on by then."""
    leaves = sample.tensors()
    outputs = sample.call(leaves)
    loss = sum(o.sin().sum() for o in outputs)
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@samples
def test_backward_runs_where_the_forward_ran(sample: Sample) -> None:
    def run(backend_of_backward: str) -> list[Tensor]:
        leaves = sample.tensors()
        with fastmod.use_backend("native"):
            outputs = sample.call(leaves)
        with fastmod.use_backend(backend_of_backward):
            return list(torch.autograd.grad(sum(o.sin().sum() for o in outputs), leaves))

    assert all(torch.equal(a, b) for a, b in zip(run("native"), run("reference"), strict=True))
