"""Encoder-decoders: from one padded sequence of numbers to another.

Both are called with the target, and score every position from what comes before it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

PAD, START = 0, 1


def shifted_right(target: Tensor) -> Tensor:
    """The input of a decoder for ``target [B, T]``: the start symbol, then all but the last."""
    return F.pad(target[:, :-1], (1, 0), value=START)


class LSTMEncoderDecoder(nn.Module):
    """Two LSTMs without attention: the decoder starts from the last state of the encoder.

    ``source [B, L]``, ``target [B, T]`` -> scores ``[B, T, V]``. With teacher forcing the decoder sees the
    target's words; else its own predictions. Dropout on embedded words and between layers.
    """

    def __init__(
        self,
        vocabulary: int,
        target_vocabulary: int,
        embedding: int = 16,
        units: int = 200,
        layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dropped = dropout if layers > 1 else 0.0
        self.read = nn.Embedding(vocabulary, embedding)  # "read", "reread": their names in checkpoints
        self.encoder = nn.LSTM(embedding, units, layers, batch_first=True, dropout=dropped)
        self.reread = nn.Embedding(target_vocabulary, embedding)
        self.decoder = nn.LSTM(embedding, units, layers, batch_first=True, dropout=dropped)
        self.output = nn.Linear(units, target_vocabulary)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor, teacher_forcing: bool = True) -> Tensor:
        state = self.encode(source)
        seen = shifted_right(target)
        if teacher_forcing:
            return self.output(self.decoder(self.dropout(self.reread(seen)), state)[0])
        word, scores = seen[:, :1], []
        for _ in range(target.shape[1]):
            hidden, state = self.decoder(self.dropout(self.reread(word)), state)
            scores.append(self.output(hidden))
            word = scores[-1].argmax(-1)
        return torch.cat(scores, 1)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """States ``[layers, B, units]`` at the last word of each sequence."""
        lengths = (source != PAD).sum(1).cpu()
        words = pack_padded_sequence(self.dropout(self.read(source)), lengths, batch_first=True, enforce_sorted=False)
        hidden, cell = self.encoder(words)[1]
        return hidden, cell


class SequenceTransformer(nn.Module):
    """``source [B, L]``, ``target [B, T]`` -> scores ``[B, T, V]``; always with teacher forcing.

    ``tied``: one embedding for source and target, which also gives the scores (so they have the same words).
    """

    positions: Tensor  # [longest, width]

    def __init__(
        self,
        vocabulary: int,
        target_vocabulary: int,
        width: int = 100,
        inner: int = 200,
        heads: int = 4,
        layers: int = 3,
        dropout: float = 0.1,
        longest: int = 256,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if tied and vocabulary != target_vocabulary:
            sizes = f"{vocabulary} and {target_vocabulary}"
            raise ValueError(f"tied: expected as many words in source and target, got {sizes}")
        self.scale = math.sqrt(width)
        self.read = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.read.weight, std=1 / self.scale)
        self.reread = self.read if tied else nn.Embedding(target_vocabulary, width)
        if not tied:
            nn.init.normal_(self.reread.weight, std=1 / self.scale)
        self.transformer = nn.Transformer(width, heads, layers, layers, inner, dropout, batch_first=True)
        self.transformer.encoder.use_nested_tensor = False  # a prototype of torch's, which warns
        self.output = None if tied else nn.Linear(width, target_vocabulary)
        self.register_buffer("positions", positional_encoding(longest, width), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == PAD
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        out = self.transformer(
            self._with_positions(self.read(source)),
            self._with_positions(self.reread(shifted_right(target))),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        # The weights of the embedding, outside any Linear: embeddings are not masked, so these are not either.
        return F.linear(out, self.read.weight) if self.output is None else self.output(out)

    def _with_positions(self, embedded: Tensor) -> Tensor:
        return embedded * self.scale + self.positions[: embedded.shape[1]]


def positional_encoding(longest: int, width: int) -> Tensor:
    """``[longest, width]``: sines and cosines of the position, in geometric wave lengths up to 10000 * 2 pi."""
    position = torch.arange(longest).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    encoding = torch.stack([(position * frequency).sin(), (position * frequency).cos()], -1)
    return encoding.flatten(1)[:, :width]
