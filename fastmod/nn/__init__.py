"""The layers: modules over ``fastmod.ops``, with parameters named and shaped as in ``nn.Linear``."""

from fastmod.nn.expert_mixture import ExpertMixture
from fastmod.nn.expert_stack import ExpertStack
from fastmod.nn.fnnr import FNNR
from fastmod.nn.fuse_batch_norm import Fusion, fuse_batch_norm_, unfuse_batch_norm_
from fastmod.nn.gater import Gater
from fastmod.nn.mfnnr import MFNNR, Routing
from fastmod.nn.multiplexer import Multiplexer
from fastmod.nn.smfr import SMFR

__all__ = [
    "FNNR",
    "MFNNR",
    "SMFR",
    "ExpertMixture",
    "ExpertStack",
    "Fusion",
    "Gater",
    "Multiplexer",
    "Routing",
    "fuse_batch_norm_",
    "unfuse_batch_norm_",
]
