"""A Transformer that treats every block as one token."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BlockTransformer(nn.Module):
    """Encoder over the input blocks, decoder with one learned query per output block.

    Args:
        in_blocks, out_blocks, block_size: as in :class:`fastmod.nn.SMFR`.
        heads: attention heads; tokens are ``block_size`` numbers wide, rounded up to a multiple of ``heads``.
        inner: width of the feed-forward layers.
        layers: number of encoder layers, and of decoder layers.

    Shapes: ``[B, in_blocks, D] -> [B, out_blocks, D]``.
    """

    def __init__(self, in_blocks: int, out_blocks: int, block_size: int, heads: int, inner: int, layers: int) -> None:
        super().__init__()
        size = -(-block_size // heads) * heads
        self.inward, self.outward = nn.Linear(block_size, size), nn.Linear(size, block_size)
        self.positions = nn.Parameter(0.1 * torch.randn(in_blocks, size))
        self.queries = nn.Parameter(0.1 * torch.randn(out_blocks, size))
        encoder = nn.TransformerEncoderLayer(size, heads, inner, dropout=0.0, batch_first=True)
        decoder = nn.TransformerDecoderLayer(size, heads, inner, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, layers, nn.LayerNorm(size), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers, nn.LayerNorm(size))
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.dim() > 1:  # until here the layers are copies of one another
                nn.init.xavier_uniform_(parameter)

    @torch.no_grad()
    def attention(self, x: Tensor) -> Tensor:
        """The attention of the first layer, averaged over heads: ``[B, in_blocks (read), in_blocks (reading)]``."""
        tokens = self.inward(x) + self.positions
        first = self.encoder.layers[0].self_attn
        assert isinstance(first, nn.MultiheadAttention)
        return first(tokens, tokens, tokens, need_weights=True)[1].mT

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inward(x) + self.positions
        return self.outward(self.decoder(self.queries.expand(len(x), -1, -1), self.encoder(tokens)))
