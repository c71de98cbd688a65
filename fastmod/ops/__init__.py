"""The ops: plain functions on tensors, differentiable, served by the backend in force."""

from fastmod.ops.gated_residual import gated_residual
from fastmod.ops.mfnnr import MFNNROutput, mfnnr
from fastmod.ops.multiplex import multiplex
from fastmod.ops.range_penalty import range_penalty
from fastmod.ops.smfr import SMFROutput, smfr

__all__ = ["MFNNROutput", "SMFROutput", "gated_residual", "mfnnr", "multiplex", "range_penalty", "smfr"]
