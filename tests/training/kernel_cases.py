"""Small networks and tensors for tests of custom kernels, and errors of a training step with and without kernels."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fedlas.models import WithFeatures, build_model
from fedlas.training.accelerators import batch_norm
from fedlas.training.accelerators.resnet import FusedResNet

Tensors = dict[str, torch.Tensor]
Step = dict[str, Tensors]  # logits, gradients and buffers
Function = tuple[Any, str]  # module and name
BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}
CATALOGUE = {"basic": "resnet18_cifar", "bottleneck": "resnet50_cifar"}


def network(kind: str) -> nn.Module:
    """Return a small ResNet: its first stage keeps size and channels, its second changes both."""
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


def images_of(device: str, count: int, *size: int) -> torch.Tensor:
    """Return random images of a size, by default 32 x 32."""
    generator = torch.Generator(device).manual_seed(1)
    images = torch.randn(count, 3, *(size or (32, 32)), device=device, generator=generator)
    return images.to(memory_format=torch.channels_last)


def labels_of(images: torch.Tensor) -> torch.Tensor:
    """Return labels of five classes."""
    return torch.arange(len(images), device=images.device) % 5


def forward_and_backward(model: nn.Module, images: torch.Tensor) -> Step:
    """Compute a forward and a backward pass."""
    net = WithFeatures(model).train()
    logits, features = net(images)
    (functional.cross_entropy(logits, labels_of(images)) + 0.01 * features.abs().mean()).backward()
    return {
        "logits": {"": logits.detach().double()},
        "gradients": {name: value.grad.double() for name, value in model.named_parameters()},
        "buffers": {name: value.double() for name, value in model.named_buffers()},
    }


def in_float64(tensors: Tensors) -> Tensors:
    return {name: value.double() for name, value in tensors.items()}


def in_low_precision(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return images and weights of convolutions in low precision, other tensors unchanged."""
    return {name: value.to(dtype) if value.dim() == 4 else value for name, value in tensors.items()}


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative difference of a tensor where the expected value is finite."""
    finite = expected.isfinite()
    return ((value - expected)[finite].norm() / expected[finite].norm().clamp_min(1e-12)).item()


def largest_error(values: Tensors, expected: Tensors) -> float:
    """Return the largest relative difference of any tensor, NaN if one is NaN."""
    return torch.tensor([error(values[name], expected[name]) for name in expected]).max().item()


def total_error(values: Tensors, expected: Tensors) -> float:
    """Return the sum of the differences of all tensors."""
    return sum((values[name] - expected[name]).norm().item() for name in expected)


def reproducible_errors(compute: Callable[[], Tensors], expected: Tensors) -> dict[str, float]:
    """Return the relative differences of computed tensors; check that a second computation gives equal bits."""
    with few_programs():
        values, repeated = compute(), compute()
    for part, value in values.items():
        assert torch.equal(value.nan_to_num(), repeated[part].nan_to_num()), part
    return {part: error(values[part], expected[part]) for part in expected}


@contextmanager
def few_programs() -> Iterator[None]:
    """Let a program process several tiles of the small images that the interpreter has time for."""
    blocks = batch_norm.Tile.blocks

    def few_blocks(tile: batch_norm.Tile, *size: int) -> int:
        return blocks(tile._replace(programs=4), *size)

    with patch.object(batch_norm.Tile, "blocks", few_blocks if batch_norm.INTERPRETED else blocks):
        yield


def random_norm(channels: int) -> Tensors:
    """Return parameters and running statistics of a norm; some running means are lost, which must not affect others."""
    parameters = {"weight": 0.5 + torch.rand(channels), "bias": torch.rand(channels) - 0.5}
    running_mean = torch.randn(channels)
    running_mean[::4], running_mean[1::8] = torch.nan, torch.inf
    return parameters | {"running_mean": running_mean, "running_var": 0.5 + torch.rand(channels)}


def affine_and_counter(tensors: Tensors) -> tuple[batch_norm.Affine, torch.Tensor]:
    """Return the norm in a dictionary of tensors, and the counter of its kernels."""
    weight, bias, mean, var = (tensors[name] for name in ("weight", "bias", "running_mean", "running_var"))
    counter = torch.zeros(len(weight) // 64, dtype=torch.int32, device=weight.device)
    return batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1), counter


def compare_step(
    device: str, kind: str, count: int, dtype: torch.dtype, *, work: dict[str, Function], fits: list[Function]
) -> dict[str, Any]:
    """Compare a step of a network with kernels, without them, and in float64.

    The interpreter trains a small network, whose first block keeps the size of the images and whose second does not.

    Args:
        device: device of the network.
        kind: kind of its blocks.
        count: number of images.
        dtype: precision of the step.
        work: kernels whose calls are recorded.
        fits: functions that choose kernels; they choose none in the step without kernels.

    Returns:
        For each part of the step, the errors with and without the kernels; and for each kernel, with and without, the
        batch norms that it was called for.
    """
    if device == "cuda":
        model, images, measure = build_model(CATALOGUE[kind], 10), images_of(device, count), total_error
    else:
        model, images, measure = network(kind), images_of(device, count, 3, 3), largest_error
        model.layer1 = model.layer1[:1]
    model.to(device, memory_format=torch.channels_last)
    expected = forward_and_backward(copy.deepcopy(model).double(), images.double())
    fused_model = FusedResNet(model)
    plain_model = copy.deepcopy(fused_model)
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device, dtype, enabled=dtype != torch.float32))
        kernels = {
            name: stack.enter_context(patch.object(*kernel, wraps=getattr(*kernel))) for name, kernel in work.items()
        }
        with_kernels = forward_and_backward(fused_model, images)
        calls = {name: called_norms(fused_model, kernel) for name, kernel in kernels.items()}
        for function in fits:
            stack.enter_context(patch.object(*function, lambda *_: False))
        without_kernels = forward_and_backward(plain_model, images)
        calls_without = {name: called_norms(plain_model, kernel) for name, kernel in kernels.items()}
    errors = {
        part: [measure(step[part], expected[part]) for step in (with_kernels, without_kernels)] for part in expected
    }
    return {"errors": errors, "calls": calls, "calls without": calls_without}


def called_norms(model: Any, kernel: Any) -> list[str]:
    """Return the batch norms of the recorded calls of a kernel, by their counters; forget the calls."""
    names = {model.counters[layer].data_ptr(): name for name, layer in model.named_modules() if layer in model.counters}
    norms = []
    for call in kernel.mock_calls:
        is_strided = any(isinstance(value, batch_norm.StridedGradient) for value in call.args)
        pointers = [value.data_ptr() for value in call.args if isinstance(value, torch.Tensor)]
        norms += [names[pointer] + ", strided" * is_strided for pointer in pointers if pointer in names]
    kernel.reset_mock()
    return norms
