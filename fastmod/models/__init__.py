"""The nets that studies train, by architecture. ``FNN`` and those named Block map
``[B, in_blocks, D] -> [B, out_blocks, D]``."""

from fastmod.models.block_transformer import BlockTransformer
from fastmod.models.cnn import CNN
from fastmod.models.encoder_decoders import LSTMEncoderDecoder, SequenceTransformer
from fastmod.models.fnn import FNN, MLP
from fastmod.models.isometric import IsometricNet
from fastmod.models.lstm import LSTM
from fastmod.models.plain_isometric import PlainIsometricNet, load_plain_isometric
from fastmod.models.plain_resmixnet import PlainResMixNet, PlainResNet, PlainVGG
from fastmod.models.plain_smfr import PlainSMFR
from fastmod.models.resmixnet import (
    FusedResNet,
    FusedVGG,
    ResMixNet,
    load_plain,
    resnet26,
    resnet50,
    resnet152_bottleneck,
    vgg19_bn,
)
from fastmod.models.resnet import ResNet

__all__ = [
    "CNN",
    "FNN",
    "LSTM",
    "MLP",
    "BlockTransformer",
    "FusedResNet",
    "FusedVGG",
    "IsometricNet",
    "LSTMEncoderDecoder",
    "PlainIsometricNet",
    "PlainResMixNet",
    "PlainResNet",
    "PlainSMFR",
    "PlainVGG",
    "ResMixNet",
    "ResNet",
    "SequenceTransformer",
    "load_plain",
    "load_plain_isometric",
    "resnet26",
    "resnet50",
    "resnet152_bottleneck",
    "vgg19_bn",
]
