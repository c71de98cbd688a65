"""Peak memory of a training step, compared with the same net in plain PyTorch."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.mask_cases import in_a_process

NETS = {
    "ResMixNet": ("ResMixNet(2, 2)", "plain_resmixnet.PlainResMixNet(2, 2)", (16, 3, 64, 64)),
    "IsometricNet": (
        "IsometricNet(24, 8, 4, 10, dropout=0.0)",
        "PlainIsometricNet(models.IsometricNet(24, 8, 4, 10, dropout=0.0))",
        (64, 3, 32, 32),
    ),
}
#: As fractions of what plain PyTorch takes.
SHARES = {"ResMixNet": 1.0, "IsometricNet": 0.5}

STEP = """
import re, torch
from fastmod import models
from fastmod.models import plain_resmixnet
def memory(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
torch.set_num_threads(2)
net = models.{net}
def step(images):
    net(images).square().sum().backward()
step(torch.randn(4, *{shape}[1:]))  # allocates threads, workspaces and gradients before the measurement
images = torch.randn({shape})
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = memory("VmRSS")
step(images)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("name", NETS)
def test_peak_memory(name: str) -> None:
    ours, plain = (float(in_a_process(STEP.format(net=net, shape=NETS[name][2]))) for net in NETS[name][:2])
    assert plain > 40, f"plain PyTorch takes {plain:.0f} MB only: the measurement is broken"
    assert ours <= SHARES[name] * plain, f"{ours:.0f} MB, plain PyTorch {plain:.0f}"
