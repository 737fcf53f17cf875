"""Residual networks with kernels of our own compute what torch's layers do; here in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from fedlas.models import build_model
from fedlas.train.fused import fuse


@pytest.fixture(scope="module")
def found():
    """Run the comparison in a process of its own: Triton decides on import whether it interprets."""
    case = Path(__file__).with_name("fused_case.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, case, "cpu"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["basic", "bottleneck"])
def test_values_gradients_and_running_statistics_are_as_exact_as_torchs(found, case):
    one = found[case]
    assert one["taken"]
    for part, bound in {"logits": 1e-5, "gradients": 1e-4, "buffers": 1e-5}.items():
        assert one["fused"][part] < max(bound, 3 * one["torch"][part]), (part, one)
    assert one["evaluates alike"]


def test_networks_of_the_catalogue_are_taken():
    assert fuse(build_model("resnet18_cifar", 10))
    assert fuse(build_model("resnet50_tiny", 200))
    assert fuse(build_model("resnet50", 10, pretrained=False))


def narrow() -> ResNet:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)


def with_group_norm() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5, norm_layer=lambda channels: nn.GroupNorm(4, channels))


def with_shared_statistics() -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(narrow())


def with_a_bias() -> nn.Module:
    model = narrow()
    model.conv1 = nn.Conv2d(3, 64, 3)
    return model


def with_average_over_all_batches() -> nn.Module:
    model = narrow()
    model.bn1.momentum = None
    return model


def of_another_kind() -> nn.Module:
    class Mine(ResNet):
        """Whoever subclasses it may compute something else."""

    return Mine(BasicBlock, [1, 1, 1, 1], num_classes=5)


def of_a_block_of_its_own() -> nn.Module:
    class Block(BasicBlock):
        """Likewise."""

    return ResNet(Block, [1, 1, 1, 1], num_classes=5)


def in_float64() -> nn.Module:
    return narrow().double()


@pytest.mark.parametrize(
    "make",
    [
        with_group_norm,
        with_shared_statistics,
        with_a_bias,
        with_average_over_all_batches,
        of_another_kind,
        of_a_block_of_its_own,
        in_float64,
        lambda: build_model("small_cnn", 10, in_channels=1),
    ],
)
def test_what_does_not_fit_is_left_as_it_is(make):
    model = make()
    kinds = [type(layer) for layer in model.modules()]
    assert not fuse(model)
    assert [type(layer) for layer in model.modules()] == kinds


def test_names_and_weights_stay():
    model = narrow()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fuse(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
