"""Models that studies set side by side; each maps blocks to blocks: ``[B, in_blocks, D] -> [B, out_blocks, D]``."""

from fastmod.models.block_transformer import BlockTransformer
from fastmod.models.fnn import FNN

__all__ = ["FNN", "BlockTransformer"]
