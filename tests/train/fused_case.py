"""Compares fused residual networks with plain ones; run by itself with TRITON_INTERPRET=1, or on a GPU.

    python tests/train/fused_case.py cpu

Prints one line of JSON: for each network, how far gradients, logits and buffers in float32 are from float64, once for
torch's layers and once for the fused ones.
"""

import copy
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fedlas.models import WithFeatures
from fedlas.train.fused import fuse

BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}


def network(kind: str) -> nn.Module:
    """Make a small residual network: its first stage keeps size and channels, its second changes both."""
    torch.manual_seed(0)
    model = ResNet(BLOCKS[kind], [2, 1, 1, 1], num_classes=5)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    model.layer3, model.layer4 = nn.Sequential(), nn.Sequential()
    model.fc = nn.Linear(128 * BLOCKS[kind].expansion, 5)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.5, 0.5)
    return model


def outcome(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """Do a forward and a backward pass."""
    net = WithFeatures(model).train()
    logits, features = net(images)
    (functional.cross_entropy(logits, labels) + 0.01 * features.abs().mean()).backward()
    return {
        "logits": {"": logits.detach().double()},
        "gradients": {name: one.grad.double() for name, one in model.named_parameters()},
        "buffers": {name: one.double() for name, one in model.named_buffers()},
    }


def distance(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Give the largest relative distance of any tensor."""
    return max(((found[k] - right[k]).norm() / right[k].norm().clamp_min(1e-12)).item() for k in right)


def compared(kind: str, device: str) -> dict[str, Any]:
    """Compare both kinds of layers with float64."""
    plain = network(kind).to(device, memory_format=torch.channels_last)
    images = torch.randn(5, 3, 7, 7, device=device).to(memory_format=torch.channels_last)
    labels = torch.arange(5, device=device)
    right = outcome(copy.deepcopy(plain).double(), images.double(), labels)
    fused = copy.deepcopy(plain)
    taken = fuse(fused)
    usual, ours, again = outcome(plain, images, labels), outcome(fused, images, labels), None
    with torch.no_grad():
        other = copy.deepcopy(plain)
        other.load_state_dict(fused.state_dict())
        again = torch.equal(fused.eval()(images), other.eval()(images))
    return {
        "taken": taken,
        "torch": {part: distance(usual[part], right[part]) for part in right},
        "fused": {part: distance(ours[part], right[part]) for part in right},
        "evaluates alike": again,
    }


if __name__ == "__main__":
    print(json.dumps({kind: compared(kind, sys.argv[1]) for kind in BLOCKS}))
