"""``fastmod.optim.Adam`` does what clip_grad_norm_ and torch.optim.Adam do, in one call."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fastmod
from fastmod.optim import Adam


@pytest.fixture
def by_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every step that falls back to torch fail."""
    monkeypatch.setattr(fastmod.optim, "_torch_step", lambda *_: pytest.fail("left to torch"))


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    # 1 + 7 + 33 ...: odd sizes, one tensor larger than a piece of the kernel, one empty.
    model = nn.ParameterList([nn.Parameter(torch.randn(s)) for s in [(1,), (7,), (3, 11), (130, 129), (0, 4), (17,)]])
    return model.to(dtype)


def gradients(model: nn.Module, step: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [scale * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, scale: float, clip: float | None) -> None:
    for step in steps:
        for p, g in zip(model.parameters(), gradients(model, step, scale), strict=True):
            p.grad = g
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("max_norm", "scale"), [(None, 1.0), (0.1, 1.0), (0.1, 1e-5), (1.0, 1e4)])
def test_same_as_torch(isa: str, dtype: torch.dtype, max_norm: float | None, scale: float, by_extension: None) -> None:
    ours, theirs = net(dtype), net(dtype)
    train(ours, Adam(ours.parameters(), 1e-2, max_norm=max_norm), range(20), scale, None)
    train(theirs, torch.optim.Adam(theirs.parameters(), 1e-2), range(20), scale, max_norm)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=100 * torch.finfo(dtype).eps, atol=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_models_step_as_small_ones(isa: str, dtype: torch.dtype, by_extension: None) -> None:
    """From 8 MiB, parameters aligned to vectors are written past the caches."""
    torch.manual_seed(0)
    count = 8 * 2**20 // dtype.itemsize
    aligned, shifted = torch.randn(count, dtype=dtype), torch.randn(10_007, dtype=dtype)[1:]
    large = nn.ParameterList([nn.Parameter(aligned), nn.Parameter(shifted)])
    small = [nn.Parameter(part.clone()) for whole in (aligned, shifted) for part in whole.split(500_000)]
    together, apart = Adam(large.parameters(), 1e-2), [Adam([part], 1e-2) for part in small]
    for step in range(3):
        slopes = gradients(large, step, 1.0)
        for p, g in zip(large, slopes, strict=True):
            p.grad = g
        parts = [part for slope in slopes for part in slope.split(500_000)]
        for p, g in zip(small, parts, strict=True):
            p.grad = g.clone()
        for optimizer in (together, *apart):
            optimizer.step()
    assert torch.equal(torch.cat(list(large)), torch.cat(small))


def test_state_moves_to_torch_and_back() -> None:
    ours, theirs = net(), net()
    first = Adam(ours.parameters(), 1e-2, max_norm=0.1)
    train(ours, first, range(5), 1.0, None)
    theirs.load_state_dict(ours.state_dict())
    second = torch.optim.Adam(theirs.parameters(), 1e-2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # a state_dict shares its tensors
    train(ours, first, range(5, 9), 1.0, None)
    train(theirs, second, range(5, 9), 1.0, 0.1)
    back = Adam(theirs.parameters(), 1e-2, max_norm=0.1)
    back.load_state_dict(copy.deepcopy(second.state_dict()))
    train(ours, first, range(9, 12), 1.0, None)
    train(theirs, back, range(9, 12), 1.0, None)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_reload_is_bit_exact() -> None:
    ours = net()
    optimizer = Adam(ours.parameters(), 1e-2, max_norm=0.1)
    train(ours, optimizer, range(5), 1.0, None)
    twin = net()
    twin.load_state_dict(ours.state_dict())
    other = Adam(twin.parameters(), 1e-2, max_norm=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, which in ((ours, optimizer), (twin, other)):
        train(model, which, range(5, 10), 1.0, None)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), twin.parameters(), strict=True))


def test_emptied_state_begins_anew() -> None:
    """Some training code restarts an optimiser by clearing its state: old moments must not survive."""
    ours, theirs = net(), net()
    pairs = [(ours, Adam(ours.parameters(), 1e-2)), (theirs, torch.optim.Adam(theirs.parameters(), 1e-2))]
    for model, optimizer in pairs:
        train(model, optimizer, range(5), 1.0, None)
        optimizer.state.clear()
        train(model, optimizer, range(5, 8), 1.0, None)
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_copies_step_by_themselves() -> None:
    """Copies by deepcopy and pickle have their own moments and parameters."""
    ours = net()
    optimizer = Adam(ours.parameters(), 1e-2, max_norm=0.1)
    train(ours, optimizer, range(3), 1.0, None)
    twin, copied = copy.deepcopy((ours, optimizer))
    loaded, other = pickle.loads(pickle.dumps((ours, optimizer)))
    for model, which in ((ours, optimizer), (twin, copied), (loaded, other)):
        train(model, which, range(3, 6), 1.0, None)
    for model in (twin, loaded):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), model.parameters(), strict=True))


def test_threads_do_not_change_a_bit() -> None:
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            model = net()
            train(model, Adam(model.parameters(), 1e-2, max_norm=0.1), range(5), 1.0, None)
            results.append([p.detach().clone() for p in model.parameters()])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_groups_share_the_norm_and_keep_their_rates() -> None:
    ours, theirs = net(), net()
    for model, kind in ((ours, Adam), (theirs, torch.optim.Adam)):
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": 1e-1}, {"params": rest}]
        optimizer = kind(groups, lr=1e-3, **({"max_norm": 0.1} if kind is Adam else {}))
        train(model, optimizer, range(5), 1.0, None if kind is Adam else 0.1)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_steps_without_gradients_do_not_end_the_training() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Adam([p], 0.1)
    optimizer.step()
    assert torch.equal(p, torch.ones(3)) and not optimizer.state
    p.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))


def test_groups_that_had_no_gradients_come_back() -> None:
    """As when parameters are frozen or two parts are trained in turn."""
    results = []
    for kind in (Adam, torch.optim.Adam):
        parts = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
        optimizer = kind([{"params": [part]} for part in parts], lr=0.1)
        for turn in ([0], [0, 1], [1], [0, 1], [0]):
            optimizer.zero_grad()
            for number in turn:
                parts[number].grad = torch.full_like(parts[number], 0.5)
            optimizer.step()
        assert [float(optimizer.state[part]["step"]) for part in parts] == [4.0, 3.0]
        results.append(torch.cat(parts))
    torch.testing.assert_close(*results)


def test_parameters_may_be_moved(by_extension: None) -> None:
    results = []
    for clip in (None, 0.1):
        model = net()
        optimizer = (
            Adam(model.parameters(), 1e-2, max_norm=0.1) if clip is None else torch.optim.Adam(model.parameters(), 1e-2)
        )
        train(model, optimizer, range(3), 1.0, clip)
        for p in model.parameters():
            p.data = p.data.clone() + 1
        train(model, optimizer, range(3, 6), 1.0, clip)
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results)


def test_any_dense_layout(by_extension: None) -> None:
    """Parameters in channels_last; only gradients may have another layout."""
    ours, theirs = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    pairs = [(ours, Adam(ours.parameters(), 1e-2, max_norm=0.1)), (theirs, torch.optim.Adam(theirs.parameters(), 1e-2))]
    for model, optimizer in pairs:
        train(model, optimizer, range(3), 1.0, None if model is ours else 0.1)
    assert not ours.weight.is_contiguous() and ours.weight.grad.is_contiguous()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))


def test_both_dtypes_in_one_model(by_extension: None) -> None:
    results = []
    for kind in (Adam, torch.optim.Adam):
        model = nn.ParameterList([*net(), *net(torch.float64)])
        optimizer = kind(model.parameters(), 1e-2, **({"max_norm": 0.1} if kind is Adam else {}))
        train(model, optimizer, range(4), 1.0, None if kind is Adam else 0.1)
        results.append(list(model))
    torch.testing.assert_close(*results)


def test_layouts_missing_gradients_and_nan() -> None:
    a, b, c = (nn.Parameter(torch.ones(4, 6)) for _ in range(3))
    a.grad, b.grad = torch.full((6, 4), 0.5).t(), None  # not contiguous; none at all
    c.grad = torch.full((4, 6), 0.5)
    Adam([a, b, c], 0.1).step()
    assert torch.equal(a, c) and torch.equal(b, torch.ones(4, 6)) and not torch.equal(a, b)
    c.grad[0, 0] = float("nan")
    Adam([a, c], 0.1, max_norm=1.0).step()
    assert a.isnan().all()  # the norm is NaN, as with clip_grad_norm_


def test_autograd_sees_the_change() -> None:
    p = nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    Adam([p], 0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bad_input() -> None:
    p = nn.Parameter(torch.ones(3))
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm"):
            Adam([p], max_norm=value)
    good, step = [torch.zeros(3)], [torch.zeros(())]
    numbers = ([1], [0.1], [0.9], [0.999], [1e-8], 0.0)
    adam = torch.ops.fastmod.adam_
    # Tensors the kernels do not support: they do nothing and return False.
    for bad in (
        torch.zeros(4),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(6)[::2],
        torch.zeros(3, device="meta"),
    ):
        for place in (0, 2, 3):
            lists = [good, good, good, good]
            lists[place] = [bad]
            assert not adam(*lists, step, *numbers)
    assert not adam(good, [torch.zeros(3).to_sparse()], good, good, step, *numbers)
    assert not adam([p.bfloat16()], [p.bfloat16()], [p.bfloat16()], [p.bfloat16()], step, *numbers)
    for bad in (torch.zeros(2), torch.zeros((), dtype=torch.int64)):
        assert not adam(good, good, good, good, [bad], *numbers)
    assert step[0] == 0
    for lists in ([good, good, good, []], [good, good, [], good], [[], good, good, good]):
        with pytest.raises((ValueError, RuntimeError), match="params: expected"):
            adam(*lists, step, *numbers)
    for sizes in ([2], [1, 0], [-1, 2]):
        with pytest.raises((ValueError, RuntimeError), match="group_sizes: expected"):
            adam(good, good, good, good, step, sizes, *numbers[1:])
    assert fastmod.optim.Adam is Adam


def test_hooks_are_called() -> None:
    model = net()
    optimizer = Adam(model.parameters(), 1e-2, max_norm=0.1)
    seen: list[str] = []
    train(model, optimizer, range(2), 1.0, None)
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_pre_hook(lambda *_: seen.append("before any")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after any")),
    ]
    expected = ["before any", "before", "after", "after any"]
    try:
        train(model, optimizer, range(2, 3), 1.0, None)
        assert seen == expected
        for hook in (hooks.pop(), hooks.pop()):
            hook.remove()
        optimizer.step(lambda: seen.append("closure"))
        assert seen[4:] == ["before", "closure", "after"]
    finally:
        for hook in hooks:
            hook.remove()
    train(model, optimizer, range(3, 4), 1.0, None)
    assert len(seen) == 7


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=["extension", "torch"])
def test_hooks_are_called_once(options: dict[str, float]) -> None:
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    torch.optim.Adam([q])  # from now on torch's own step calls hooks
    optimizer = Adam([p], **options)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    p.grad = torch.ones(3)
    optimizer.step()
    assert seen == ["before", "after"]


def test_closures_are_called_with_gradients() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = Adam([p], 0.1, max_norm=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.9))


def test_the_profiler_sees_a_step() -> None:
    model = net()
    optimizer = Adam(model.parameters(), 1e-2, max_norm=0.1)
    train(model, optimizer, range(2), 1.0, None)
    with torch.profiler.profile() as profile:
        train(model, optimizer, range(2, 3), 1.0, None)
    assert "Optimizer.step#Adam.step" in {event.key for event in profile.key_averages()}


def test_schedulers_see_a_step(recwarn: pytest.WarningsRecorder) -> None:
    model = net()
    optimizer = Adam(model.parameters(), 1e-2, max_norm=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        train(model, optimizer, range(step, step + 1), 1.0, None)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 8
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]
