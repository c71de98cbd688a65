"""The layers: modules over ``fastmod.ops``, with parameters named and shaped as in ``nn.Linear``."""

from fastmod.nn.basic_block import BasicBlock
from fastmod.nn.compose import Composition, compose_
from fastmod.nn.compositional import Compositional, logit_groups
from fastmod.nn.ensemble import Ensemble
from fastmod.nn.expert_mixture import ExpertMixture
from fastmod.nn.expert_stack import ExpertStack
from fastmod.nn.fnnr import FNNR
from fastmod.nn.fuse_batch_norm import Fusion, fuse_batch_norm_, unfuse_batch_norm_
from fastmod.nn.gater import Gater
from fastmod.nn.isometric_block import IsometricBlock
from fastmod.nn.mfnnr import MFNNR, Routing
from fastmod.nn.multiplexer import Multiplexer
from fastmod.nn.signatures import make_signature
from fastmod.nn.smfr import SMFR
from fastmod.nn.template_bank import TemplateBank

__all__ = [
    "FNNR",
    "MFNNR",
    "SMFR",
    "BasicBlock",
    "Composition",
    "Compositional",
    "Ensemble",
    "ExpertMixture",
    "ExpertStack",
    "Fusion",
    "Gater",
    "IsometricBlock",
    "Multiplexer",
    "Routing",
    "TemplateBank",
    "compose_",
    "fuse_batch_norm_",
    "logit_groups",
    "make_signature",
    "unfuse_batch_norm_",
]
