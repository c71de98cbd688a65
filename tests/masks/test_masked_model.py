"""``MaskedModel``: sampled, thresholded and given masks over every kind of net."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fastmod.masks import MaskedModel
from fastmod.ops import sample_mask
from tests.helpers.mask_zoo import NETS, Net, Reader, Recurrent, Twice, by_hand

SAMPLES = 4
nets = pytest.mark.parametrize("net", NETS, ids=lambda net: net.label)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def masked_net(net: Net, **options: object) -> tuple[MaskedModel, Tensor]:
    model = net.make()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # statistics that are not those of a fresh layer
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        masked = MaskedModel(model, SAMPLES, **{"init": 0.5, "batch_dim": net.batch_dim, **options})  # type: ignore[arg-type]
    for _, logits in masked.named_logits():
        nn.init.normal_(logits)
    return masked, net.input()


def sampled(masked: MaskedModel, x: Tensor, seed: int = 3) -> tuple[Tensor, list[Tensor]]:
    """An output, and the seeds that its masks were drawn with."""
    torch.manual_seed(seed)
    seeds = list(torch.randint(0, 2**63 - 1, (len(list(masked.named_logits())),)).unbind())
    torch.manual_seed(seed)
    return masked(x), seeds


def random_masks(masked: MaskedModel) -> dict[str, Tensor]:
    return {name: torch.rand(logits.shape) > 0.4 for name, logits in masked.named_logits()}


def has_fused_bias(net: Net) -> bool:
    return any(type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d) for module in net.make().modules())


# A fused bias shares the seed of its weight, on a stream of its own: it has a test of its own.
@pytest.mark.parametrize(
    ("net", "mask_bias"),
    [(net, False) for net in NETS] + [(net, True) for net in NETS if not has_fused_bias(net)],
    ids=lambda value: value.label if isinstance(value, Net) else str(value),
)
def test_a_part_of_the_batch_meets_its_own_sample(net: Net, mask_bias: bool) -> None:
    masked, x = masked_net(net, mask_bias=mask_bias)
    out, seeds = sampled(masked, x)
    masked.model.eval()  # batch norm by its statistics
    expected = by_hand(masked, seeds, x, SAMPLES, net.batch_dim)
    torch.testing.assert_close(out, expected)
    logits = [logits for _, logits in masked.named_logits()]
    found = torch.autograd.grad(out.square().sum(), logits)
    wanted = torch.autograd.grad(expected.square().sum(), logits)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


def test_masks_of_a_fused_bias() -> None:
    model = nn.Linear(3, 5)
    nn.init.constant_(model.bias, 1.0)
    masked = MaskedModel(model, SAMPLES, mask_bias=True, init=0.0)
    with torch.no_grad():
        out = masked(torch.zeros(8, 3)).view(SAMPLES, 2, 5)
    assert set(out.flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(out[:, 0], out[:, 1])
    assert not torch.equal(out[0], out[1])
    assert set(masked.hard_masks()) == {"weight", "bias"}


@nets
def test_given_masks(net: Net) -> None:
    masked, x = masked_net(net)
    masks = random_masks(masked)
    masked.eval()
    weights = {name: value * masks[name] if name in masks else value for name, value in masked.model.named_parameters()}
    with torch.no_grad(), masked.using(masks):
        out = masked(x)
    with torch.no_grad():
        torch.testing.assert_close(out, torch.func.functional_call(masked.model, weights, (x,)))
        assert not torch.allclose(out, masked(x))  # the block is over: thresholded masks again


@nets
def test_evaluation_thresholds_the_logits(net: Net) -> None:
    masked, x = masked_net(net)
    masked.eval()
    with torch.no_grad():
        out = masked(x)
        with masked.using(masked.hard_masks()):
            assert torch.equal(masked(x), out)
        assert torch.equal(masked(x), out)


@nets
def test_the_model_stays_as_it_was(net: Net) -> None:
    masked, x = masked_net(net)
    before = copy.deepcopy(masked.model.state_dict())
    keys = set(vars(masked.model))
    masked(x).square().sum().backward()
    masked.penalty().backward()
    for name, value in masked.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in masked.model.parameters())
    assert all(parameter.requires_grad for parameter in masked.model.parameters())
    assert all(logits.grad is not None and logits.grad.abs().sum() > 0 for _, logits in masked.named_logits())
    assert set(vars(masked.model)) == keys


@nets
def test_copies_and_pickles(net: Net) -> None:
    masked, x = masked_net(net)
    stream = io.BytesIO()
    torch.save(masked, stream)
    stream.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        others = [copy.deepcopy(masked), pickle.loads(pickle.dumps(masked)), torch.load(stream, weights_only=False)]
    out, _ = sampled(masked, x)
    for other in others:
        assert torch.equal(sampled(other, x)[0], out)
        assert other.model is not masked.model
        with torch.no_grad():
            for value in other.model.parameters():
                value.zero_()
    assert torch.equal(sampled(masked, x)[0], out)  # nothing is shared
    assert not torch.equal(sampled(others[0], x)[0], out)


@nets
def test_state_dict_is_the_logits(net: Net) -> None:
    masked, x = masked_net(net)
    other, _ = masked_net(net)
    other.model.load_state_dict(masked.model.state_dict())
    assert len(masked.state_dict()) == len(list(masked.parameters())) == len(list(masked.named_logits()))
    other.load_state_dict(masked.state_dict())
    assert torch.equal(sampled(masked, x)[0], sampled(other, x)[0])


@nets
def test_double_precision(net: Net) -> None:
    masked, x = masked_net(net)
    masked.double()
    out, _ = sampled(masked, x.double() if x.is_floating_point() else x)
    assert out.dtype == torch.float64
    assert all(logits.dtype == torch.float64 for logits in masked.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("net", [net for net in NETS if net.compiles], ids=lambda net: net.label)
def test_compiles_whole(net: Net) -> None:
    masked, x = masked_net(net)
    torch._dynamo.reset()
    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    assert all(logits.grad is not None for logits in masked.parameters())
    masked.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), masked(x))


def test_torch_manual_seed_rules() -> None:
    masked, x = masked_net(NETS[0])
    assert torch.equal(sampled(masked, x, 1)[0], sampled(masked, x, 1)[0])
    assert not torch.equal(sampled(masked, x, 1)[0], sampled(masked, x, 2)[0])
    with torch.no_grad():
        assert not torch.equal(masked(x), masked(x))  # anew each forward


def test_a_layer_used_twice_meets_one_mask() -> None:
    model = Twice()
    masked = MaskedModel(model, SAMPLES, init=0.5)
    [(name, logits)] = masked.named_logits()
    assert name == "first.weight"
    x = torch.randn(8, 8)
    out, [seed] = sampled(masked, x)
    weights = model.first.weight * sample_mask(logits, SAMPLES, seed)
    for part, found, weight in zip(x.chunk(SAMPLES), out.chunk(SAMPLES), weights, strict=True):
        hidden = nn.functional.linear(part, weight, model.first.bias).relu()
        torch.testing.assert_close(found, nn.functional.linear(hidden, weight, model.first.bias))


@pytest.mark.parametrize("mask_bias", [False, True])
def test_steps_of_a_decoder_meet_one_mask(mask_bias: bool) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            said, hidden = [x], None
            for _ in range(3):
                step, hidden = self.rnn(said[-1].unsqueeze(1), hidden)
                said.append(self.out(step[:, 0]))
            return torch.stack(said[1:], 1)

    masked = MaskedModel(Steps(), SAMPLES, init=0.5, mask_bias=mask_bias)
    x = torch.randn(8, 4)
    out, seeds = sampled(masked, x)
    again, _ = sampled(masked, x)
    assert torch.equal(out, again)
    if not mask_bias:
        torch.testing.assert_close(out, by_hand(masked, seeds, x, SAMPLES, 0))
    # The second step's copies carry the masks, and for biases the stream, of the first step's fused product.
    linear = MaskedModel(Twice(), SAMPLES, init=0.0, mask_bias=mask_bias)
    with torch.no_grad():
        linear.model.first.weight.copy_(torch.eye(8))  # type: ignore[union-attr]
        linear.model.first.bias.fill_(10.0)  # type: ignore[union-attr]
        kept = (linear(torch.zeros(4, 8)) / 10).round()
    once = torch.tensor([0.0, 1.0, 2.0] if mask_bias else [1.0, 2.0])
    assert torch.isin(kept, once).all()


def test_nets_that_run_part_by_part_say_so_once() -> None:
    class Peeking(nn.Module):
        """Reads a value, which vmap cannot."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum().item() > -1e9 else x

    masked = MaskedModel(Peeking(), SAMPLES, init=0.5)
    x = torch.randn(8, 8)
    with pytest.warns(RuntimeWarning, match="Peeking runs its 4 mask samples one after the other"):
        out, seeds = sampled(masked, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = sampled(masked, x)
    torch.testing.assert_close(out, by_hand(masked, seeds, x, SAMPLES, 0))
    assert torch.equal(out, again)


def test_excluded_modules() -> None:
    model = Reader()
    assert not any(name.startswith("embedding") for name, _ in MaskedModel(model).named_logits())
    everything = MaskedModel(model, exclude=())
    assert any(name.startswith("embedding") for name, _ in everything.named_logits())
    part = MaskedModel(model, exclude=(nn.Embedding, model.encoder.layers[0], model.out))
    names = [name for name, _ in part.named_logits()]
    assert names and all(name.startswith("encoder.layers.1.") for name in names)
    x = torch.randint(11, (8, 6))
    part(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())  # frozen as well
    part.eval()
    with torch.no_grad(), part.using({}):
        torch.testing.assert_close(part(x), model(x))


def test_weights_in_training() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    masked = MaskedModel(model, 2, train_weights=True, mask_bias=True)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
    before = norm.running_mean.clone()
    masked(torch.randn(8, 4) + 3).square().sum().backward()
    assert all(p.grad is not None for p in [*masked.parameters(), *model.parameters()])
    assert not torch.equal(before, norm.running_mean)  # the net itself is in training


def test_packed_sequences_keep_their_last_step() -> None:
    lstm = nn.LSTM(3, 4, batch_first=True)
    masked = MaskedModel(lstm, 2, init=1e4)  # every weight kept: the plain LSTM is the truth
    x, lengths = torch.randn(6, 5, 3), torch.tensor([2, 5, 1, 3, 5, 4])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, (h, c) = masked(packed)
    expected, (h0, c0) = lstm(packed)
    torch.testing.assert_close(pad_packed_sequence(out, True)[0], pad_packed_sequence(expected, True)[0])
    torch.testing.assert_close(h, h0)
    torch.testing.assert_close(c, c0)


def test_initial_state_is_cut_like_the_batch() -> None:
    for kind in (nn.LSTM, nn.GRU):
        net = kind(3, 4)
        masked = MaskedModel(net, 2, init=1e4, batch_dim=1)
        h = torch.randn(1, 6, 4)
        state = (h, torch.randn(1, 6, 4)) if kind is nn.LSTM else h
        x = torch.randn(5, 6, 3)
        torch.testing.assert_close(masked(x, state)[0], net(x, state)[0])


def test_one_sequence_meets_one_mask() -> None:
    model = Recurrent(nn.LSTM, True)
    masked = MaskedModel(model, 2, init=0.0)
    x = torch.randn(1, 7, 8).expand(8, 7, 8)
    out = masked(x)
    for part in out.chunk(2):
        torch.testing.assert_close(part, part[:1].expand_as(part))  # equal sequences of a part: equal outputs
    assert not torch.allclose(out[0], out[-1])


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_with_masks_of_its_own(batch_first: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    masked = MaskedModel(attention, 2, init=1e4, batch_dim=0 if batch_first else 1)
    q, k = torch.randn(4, 5, 8), torch.randn(4, 6, 8)
    if not batch_first:
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[1, 4:] = padding[3, 2:] = True
    per_head = torch.rand(8, 5, 6) > 0.7
    per_head[..., 0] = False
    for attn_mask in (None, torch.ones(5, 6).triu(2).bool(), per_head):
        found = masked(q, k, k, key_padding_mask=padding, attn_mask=attn_mask)
        expected = attention(q, k, k, key_padding_mask=padding, attn_mask=attn_mask)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
    assert masked(q, k, k, need_weights=False)[1] is None


def test_hooks_run() -> None:
    model, calls = nn.Sequential(nn.Linear(3, 3)), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    masked = MaskedModel(model)
    masked(torch.randn(4, 3))
    assert calls == [1]


def test_penalty_is_the_sum_of_the_logits() -> None:
    masked, _ = masked_net(NETS[0])
    assert masked.penalty().item() == pytest.approx(sum(p.sum().item() for p in masked.parameters()), rel=1e-5)


def test_extreme_logits() -> None:
    model = nn.Linear(5, 3)
    for value, weight in ((1e4, model.weight), (float("-inf"), torch.zeros_like(model.weight))):
        masked = MaskedModel(model, init=value)
        x = torch.randn(4, 5)
        out = masked(x)
        torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, model.bias))
        out.sum().backward()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in masked.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples: expected at least 1, got 0"),
        ({"samples": 2.0}, "samples: expected an int"),
        ({"tau": 0.0}, "tau: expected a finite number > 0"),
        ({"batch_dim": 2}, "batch_dim: expected 0 or 1, got 2"),
        ({"exclude": (nn.Linear,)}, "model: expected weights to mask"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        MaskedModel(nn.Linear(2, 2), **options)  # type: ignore[arg-type]


def test_bad_calls() -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module, got int"):
        MaskedModel(3)  # type: ignore[arg-type]
    masked = MaskedModel(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="expected a tensor with the batch"):
        masked(3)
    for masks, message in (
        ({"weight": torch.ones(2, 3, dtype=torch.bool)}, r"masks\['weight'\]: expected shape \[3, 2\], got \[2, 3\]"),
        ({"wheight": torch.ones(3, 2, dtype=torch.bool)}, "the model has no parameter 'wheight'"),
        ({"weight": torch.ones(3, 2)}, r"expected a bool tensor, got torch\.float32"),
    ):
        with pytest.raises((ValueError, TypeError), match=message), masked.using(masks):
            pass
    with pytest.raises(ValueError, match="3 dimensions"):
        MaskedModel(nn.LSTM(2, 2), batch_dim=1)(torch.randn(4, 2))
    with pytest.raises(ValueError, match="batch_dim: expected 1, where LSTM with batch_first=False has the batch"):
        MaskedModel(nn.LSTM(2, 2))
