"""On a GPU: fused residual networks against torch's layers, in wide and narrow numbers, and their bits."""

import copy
from typing import Any

import pytest
import torch
from fused_case import compared, network, outcome

from fedlas.models import build_model
from fedlas.train.fused import fuse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32, before = False, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, convolutions = False, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before, convolutions


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_as_exact_as_torchs_layers(kind):
    one = compared(kind, "cuda")
    assert one["taken"]
    for part, bound in {"logits": 1e-5, "gradients": 1e-4, "buffers": 1e-5}.items():
        assert one["fused"][part] < max(bound, 3 * one["torch"][part]), (part, one)
    assert one["evaluates alike"]


def images_of(count: int) -> torch.Tensor:
    images = torch.randn(count, 3, 32, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return images.to(memory_format=torch.channels_last)


def in_bf16(model: Any, images: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    labels = torch.arange(len(images), device="cuda") % 5
    with torch.autocast("cuda", torch.bfloat16):
        return outcome(model, images, labels)


@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet50_cifar"])
@pytest.mark.parametrize("count", [3, 128])  # a part of a tile, and more tiles than programs
def test_in_bfloat16_as_far_from_float64_as_torchs_layers(name, count):
    plain = build_model(name, 10).to("cuda", memory_format=torch.channels_last)
    fused = copy.deepcopy(plain)
    assert fuse(fused)
    images = images_of(count)
    right = outcome(copy.deepcopy(plain).double(), images.double(), torch.arange(count, device="cuda") % 5)
    usual, ours = in_bf16(plain, images), in_bf16(fused, images)
    for part in ("logits", "gradients", "buffers"):
        far = {name: (usual[part][name] - right[part][name]).norm().item() for name in right[part]}
        ours_far = {name: (ours[part][name] - right[part][name]).norm().item() for name in right[part]}
        assert sum(ours_far.values()) < 1.3 * sum(far.values()), part


def test_without_cudnn():
    with torch.backends.cudnn.flags(enabled=False):
        one = compared("basic", "cuda")
    assert one["fused"]["gradients"] < 1e-4


def test_equal_inputs_give_equal_bits():
    fused = network("bottleneck").to("cuda", memory_format=torch.channels_last)
    assert fuse(fused)
    images = images_of(64)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        first, again = in_bf16(copy.deepcopy(fused), images), in_bf16(copy.deepcopy(fused), images)
    for part, values in first.items():
        for name, value in values.items():
            assert torch.equal(value, again[part][name]), (part, name)
