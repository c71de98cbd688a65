"""The ops: plain functions on tensors, differentiable, served by the backend in force."""

from fastmod.ops.batch_affine import Affine, batch_affine
from fastmod.ops.cluster_penalty import cluster_penalty
from fastmod.ops.entropy_penalty import entropy_penalty
from fastmod.ops.gated_residual import gated_residual
from fastmod.ops.inverted_residual import InvertedResidualOutput, inverted_residual
from fastmod.ops.masked_conv2d import masked_conv2d
from fastmod.ops.masked_linear import masked_linear
from fastmod.ops.mfnnr import MFNNROutput, mfnnr
from fastmod.ops.multiplex import multiplex
from fastmod.ops.norm_conv import NormConvOutput, norm_conv
from fastmod.ops.norm_pool import norm_pool
from fastmod.ops.norm_sum import norm_sum
from fastmod.ops.range_penalty import range_penalty
from fastmod.ops.sample_mask import masked_weight, sample_mask
from fastmod.ops.smfr import SMFROutput, smfr
from fastmod.ops.template_mix import template_mix

__all__ = [
    "Affine",
    "InvertedResidualOutput",
    "MFNNROutput",
    "NormConvOutput",
    "SMFROutput",
    "batch_affine",
    "cluster_penalty",
    "entropy_penalty",
    "gated_residual",
    "inverted_residual",
    "masked_conv2d",
    "masked_linear",
    "masked_weight",
    "mfnnr",
    "multiplex",
    "norm_conv",
    "norm_pool",
    "norm_sum",
    "range_penalty",
    "sample_mask",
    "smfr",
    "template_mix",
]
