"""Nets of the mask studies on sequences: from one padded sequence of numbers to another.

Both are called with the target, of which they see what comes before each place, and give scores for every place. A
sequence is answered right if the best score is right at every place: then the net would have said the same had it been
given its own words instead of the target's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

PAD, START = 0, 1


def delayed(target: Tensor) -> Tensor:
    """What a decoder sees of ``target [B, T]``: the start, then all but the last."""
    return F.pad(target[:, :-1], (1, 0), value=START)


def sequence_loss(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of ``scores [B, T, V]`` over the places of ``target [B, T]`` that are not padding."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD)


def all_right(scores: Tensor, target: Tensor) -> Tensor:
    """bool ``[B]``: whether ``scores [B, T, V]`` are right at every place of ``target [B, T]`` but its padding."""
    return ((scores.argmax(-1) == target) | (target == PAD)).all(1)


class LSTMEncoderDecoder(nn.Module):
    """Two LSTMs without attention: the decoder begins with the encoder's last state.

    ``source [B, L]``, ``target [B, T]`` -> scores ``[B, T, V]``. Forced, the decoder sees the target's words; else its
    own best ones.
    """

    def __init__(
        self,
        words: int,
        target_words: int,
        embedding: int = 16,
        units: int = 200,
        layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dropped = dropout if layers > 1 else 0.0
        self.read = nn.Embedding(words, embedding)
        self.encoder = nn.LSTM(embedding, units, layers, batch_first=True, dropout=dropped)
        self.reread = nn.Embedding(target_words, embedding)
        self.decoder = nn.LSTM(embedding, units, layers, batch_first=True, dropout=dropped)
        self.output = nn.Linear(units, target_words)

    def forward(self, source: Tensor, target: Tensor, forced: bool = True) -> Tensor:
        state = self.encode(source)
        seen = delayed(target)
        if forced:
            return self.output(self.decoder(self.reread(seen), state)[0])
        word, scores = seen[:, :1], []
        for _ in range(target.shape[1]):
            said, state = self.decoder(self.reread(word), state)
            scores.append(self.output(said))
            word = scores[-1].argmax(-1)
        return torch.cat(scores, 1)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """States ``[layers, B, units]`` at the last word of each sequence."""
        lengths = (source != PAD).sum(1).cpu()
        words = pack_padded_sequence(self.read(source), lengths, batch_first=True, enforce_sorted=False)
        hidden, cell = self.encoder(words)[1]
        return hidden, cell


class SequenceTransformer(nn.Module):
    """``source [B, L]``, ``target [B, T]`` -> scores ``[B, T, V]``; always forced.

    ``tied``: one embedding for source and target, which also gives the scores (so they have the same words).
    """

    positions: Tensor  # [longest, width]

    def __init__(
        self,
        words: int,
        target_words: int,
        width: int = 100,
        inner: int = 200,
        heads: int = 4,
        layers: int = 3,
        dropout: float = 0.1,
        longest: int = 256,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if tied and words != target_words:
            raise ValueError(f"tied: expected as many words in source and target, got {words} and {target_words}")
        self.scale = math.sqrt(width)
        self.read = nn.Embedding(words, width)
        nn.init.normal_(self.read.weight, std=1 / self.scale)
        self.reread = self.read if tied else nn.Embedding(target_words, width)
        if not tied:
            nn.init.normal_(self.reread.weight, std=1 / self.scale)
        self.transformer = nn.Transformer(width, heads, layers, layers, inner, dropout, batch_first=True)
        self.transformer.encoder.use_nested_tensor = False  # a prototype of torch's, which warns
        self.output = None if tied else nn.Linear(width, target_words)
        self.register_buffer("positions", position_waves(longest, width), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == PAD
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        out = self.transformer(
            self._placed(self.read(source)),
            self._placed(self.reread(delayed(target))),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        # The embedding's weights, read off it: they are not masked, as embeddings are not.
        return F.linear(out, self.read.weight) if self.output is None else self.output(out)

    def _placed(self, vectors: Tensor) -> Tensor:
        return vectors * self.scale + self.positions[: vectors.shape[1]]


def position_waves(longest: int, width: int) -> Tensor:
    """``[longest, width]``: sines and cosines of the place, in geometric wave lengths up to 10000 * 2 pi."""
    place = torch.arange(longest).unsqueeze(1)
    speed = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    waves = torch.stack([(place * speed).sin(), (place * speed).cos()], -1)
    return waves.flatten(1)[:, :width]


def by_length(lengths: Tensor, chunk: int, generator: torch.Generator, together: int = 5) -> Tensor:
    """Order ``[chunk, B]`` of ``chunk * B`` drawn examples. Those of some batches ``together`` are sorted by length, so
    that a batch pads little and yet has more than one length, which would make training restless."""
    size = len(lengths) // chunk
    places = torch.arange(len(lengths), device=lengths.device).split(together * size)
    batches = torch.cat([some[lengths[some].argsort(stable=True)].view(-1, size) for some in places])
    return batches[torch.randperm(chunk, generator=generator, device=lengths.device)]


def trimmed(sequences: Tensor) -> Tensor:
    """``[B, L]`` without the columns that are nothing but padding."""
    return sequences[:, : int((sequences != PAD).sum(1).max())]
