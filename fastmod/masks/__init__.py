"""Weight masks: which weights of a trained net serve a function?

>>> masked = MaskedModel(net)                         # code and weights of the net are not changed
>>> optimizer = fastmod.optim.Adam(masked.parameters(), 1e-2)
>>> loss = F.cross_entropy(masked(x), y) + beta * masked.penalty() / len(x)
>>> ...
>>> addition = masked.hard_masks()                    # parameter name -> bool
>>> sharing(addition, multiplication)["total"]
"""

from fastmod.masks.beta import BetaTrial, pick_beta
from fastmod.masks.files import load, save
from fastmod.masks.model import MaskedModel
from fastmod.masks.sets import Masks, inverted, iou, sharing, union

__all__ = ["BetaTrial", "MaskedModel", "Masks", "inverted", "iou", "load", "pick_beta", "save", "sharing", "union"]
