"""The ops: plain functions on tensors, differentiable, served by the backend in force."""

from fastmod.ops.gated_residual import gated_residual
from fastmod.ops.mfnnr import MFNNROutput, mfnnr
from fastmod.ops.multiplex import multiplex
from fastmod.ops.range_penalty import range_penalty

__all__ = ["MFNNROutput", "gated_residual", "mfnnr", "multiplex", "range_penalty"]
