"""Compare fused ResNets with plain ones; a script for TRITON_INTERPRET=1 or a GPU.

    python tests/training/resnet_case.py cpu

Prints one line of JSON: for each network, the errors of gradients, logits and buffers in float32 relative to float64,
for torch's layers and for the fused ones.
"""

import copy
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fedlas.models import WithFeatures
from fedlas.training.accelerators import batch_norm
from fedlas.training.accelerators.parameter_blocks import WeightCast
from fedlas.training.accelerators.resnet import fuse

Tensors = dict[str, torch.Tensor]
Step = dict[str, Tensors]  # logits, gradients and buffers
BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}


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


def forward_and_backward(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Step:
    """Compute a forward and a backward pass."""
    net = WithFeatures(model).train()
    logits, features = net(images)
    (functional.cross_entropy(logits, labels) + 0.01 * features.abs().mean()).backward()
    return {
        "logits": {"": logits.detach().double()},
        "gradients": {name: value.grad.double() for name, value in model.named_parameters()},
        "buffers": {name: value.double() for name, value in model.named_buffers()},
    }


def distance(values: Tensors, expected: Tensors) -> float:
    """Return the largest relative difference of any tensor."""
    return max(((values[k] - expected[k]).norm() / expected[k].norm().clamp_min(1e-12)).item() for k in expected)


def in_float64(tensors: Tensors) -> Tensors:
    return {name: value.double() for name, value in tensors.items()}


def in_low_precision(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return images and weights of convolutions in low precision, other tensors unchanged."""
    return {name: value.to(dtype) if value.dim() == 4 else value for name, value in tensors.items()}


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative difference of a tensor."""
    return distance({"": value}, {"": expected})


def errors(kernel_values: Tensors, torch_values: Tensors, expected: Tensors) -> dict[str, list[float]]:
    """Return the relative differences of the kernels' tensors and of torch's."""
    return {
        part: [error(values[part], expected[part]) for values in (kernel_values, torch_values)] for part in expected
    }


def random_norm(channels: int) -> Tensors:
    """Return parameters and running statistics of a norm."""
    parameters = {"weight": 0.5 + torch.rand(channels), "bias": torch.rand(channels) - 0.5}
    return parameters | {"running_mean": torch.randn(channels), "running_var": 0.5 + torch.rand(channels)}


def affine_and_counter(tensors: Tensors) -> tuple[batch_norm.Affine, torch.Tensor]:
    """Return the norm in a dictionary of tensors, and the counter of its kernels."""
    weight, bias, mean, var = (tensors[name] for name in ("weight", "bias", "running_mean", "running_var"))
    counter = torch.zeros(len(weight) // 64, dtype=torch.int32, device=weight.device)
    return batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1), counter


def ignores_lost_statistics(
    tensors: Tensors,
    by_torch: Callable[[Tensors], Tensors],
    by_kernels: Callable[[Tensors], Tensors],
) -> bool:
    """Return whether a NaN running mean affects nothing but itself."""
    expected = by_torch(tensors)["z"]
    tensors["running_mean"][::2] = torch.nan
    tensors["running_mean"][1::4] = torch.inf
    return error(by_kernels(tensors)["z"], expected) < 1e-5


def small_case(kind: str, device: str, shape: tuple[int, ...]) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """Return a fused network with few blocks (the interpreter is slow), images, labels, and a step in float64."""
    model: Any = network(kind).to(device, memory_format=torch.channels_last)
    model.layer1 = model.layer1[:1]
    images = 1 + torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    labels = torch.arange(len(images), device=device)
    expected = forward_and_backward(copy.deepcopy(model).double(), images.double(), labels)
    model = fuse(model)
    return model, images, labels, expected


def step_errors(first: Step, second: Step, expected: Step) -> dict[str, list[float]]:
    """Return the largest relative differences of two steps from a third."""
    return {part: [distance(step[part], expected[part]) for step in (first, second)] for part in expected}


def compare(kind: str, device: str) -> dict[str, Any]:
    """Compare both kinds of layers with float64."""
    model = network(kind).to(device, memory_format=torch.channels_last)
    images = 1 + torch.randn(5, 3, 5, 7, device=device).to(memory_format=torch.channels_last)
    labels = torch.arange(5, device=device)
    expected = forward_and_backward(copy.deepcopy(model).double(), images.double(), labels)
    fused: Any = fuse(copy.deepcopy(model))
    torch_step, fused_step = forward_and_backward(model, images, labels), forward_and_backward(fused, images, labels)
    with torch.no_grad():
        torch_model = copy.deepcopy(model)
        torch_model.load_state_dict(fused.state_dict())
        evaluates_alike = torch.equal(fused.eval()(images), torch_model.eval()(images))
    return {
        "torch": {part: distance(torch_step[part], expected[part]) for part in expected},
        "fused": {part: distance(fused_step[part], expected[part]) for part in expected},
        "evaluates alike": evaluates_alike,
    }


def falls_back(device: str) -> dict[str, bool]:
    """Return for which networks torch's layers are used, by their running statistics or logits."""
    images = torch.randn(5, 3, 7, 7, device=device).to(memory_format=torch.channels_last)

    def equals_torch(change: Callable[[nn.Module], object]) -> bool:
        torch_model = network("basic").to(device, memory_format=torch.channels_last)
        fused: Any = fuse(copy.deepcopy(torch_model))
        for model in (torch_model, fused):
            model.train()
            change(model)
        values = [model(images).detach() for model in (torch_model, fused)]
        equal_buffers = all(
            torch.equal(value, fused.state_dict()[name]) for name, value in torch_model.state_dict().items()
        )
        return equal_buffers and torch.equal(*values)

    changes: dict[str, Callable[[Any], object]] = {
        "frozen norm": lambda model: model.layer1[0].bn2.eval(),
        "forward hook": lambda model: model.layer1[1].conv1.register_forward_hook(lambda *_: None),
        "backward hook": lambda model: model.layer1[0].register_full_backward_pre_hook(lambda *_: None),
        "nothing": lambda _: None,
    }
    return {name: equals_torch(change) for name, change in changes.items()}


def far_from_zero(device: str) -> dict[str, float]:
    """Return the errors of the statistics in the first step if the mean is much larger than the deviation."""
    y = 300 + torch.randn(4, 64, 5, 5, device=device).to(memory_format=torch.channels_last)
    weight, bias, mean, var = torch.ones(64), torch.zeros(64), torch.zeros(64), torch.ones(64)
    norm = batch_norm.Affine(*(value.to(device) for value in (weight, bias, mean, var)), eps=1e-5, momentum=0.1)
    result = batch_norm.statistics(y, norm, torch.zeros(1, dtype=torch.int32, device=device))
    expected = y.double().var((0, 2, 3), unbiased=False).add(1e-5).rsqrt()
    return {"rstd": ((result.rstd.double() - expected) / expected).abs().max().item()}


def one_value(device: str) -> str:
    """Return the error message for a single value per channel, which has no variance."""
    fused: Any = fuse(network("basic").to(device, memory_format=torch.channels_last))
    try:
        fused.train()(torch.zeros(1, 3, 2, 2, device=device).contiguous(memory_format=torch.channels_last))
    except ValueError as error:
        return str(error)
    return "nothing"


def compare_weight_casts(device: str) -> dict[str, bool]:
    """Return whether low-precision copies equal those of torch, for sizes that the kernel supports and for others."""
    torch.manual_seed(0)
    shapes = (64, 64, 3, 3), (64, 3, 3, 3), (128, 64, 1, 1), (2,), (4,)
    max_exponent = 25 if batch_norm.INTERPRETED else 100  # Triton's interpreter is wrong for the smallest bfloat16
    weights = [(torch.randn(shape, device=device) * max_exponent).exp2() for shape in shapes]
    weights[0][0, 0, 0] = torch.tensor([math.nan, -0.0, 1 + 2**-8], device=device)
    if batch_norm.INTERPRETED:  # it cuts off what bfloat16 has no room for
        weights = [value.bfloat16().float() for value in weights]
    weights[:3] = [value.to(memory_format=torch.channels_last) for value in weights[:3]]
    supported_weights = [value for value in weights if value.numel() % 4 == 0]
    cast_of_supported, fallback_cast = WeightCast(supported_weights), WeightCast(weights)

    def equals_torch(cast: WeightCast, tensors: list[torch.Tensor]) -> bool:
        result = [(dtype, cast.copies(tensors, dtype)) for dtype in (torch.bfloat16, torch.float16)]
        pairs = [
            (item, second.to(dtype)) for dtype, copies in result for item, second in zip(copies, tensors, strict=True)
        ]
        equal = all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)
        return equal and all(item.stride() == second.stride() for item, second in pairs)

    first, repeated = (cast_of_supported.copies(supported_weights, torch.bfloat16) for _ in range(2))
    return {
        "supported": cast_of_supported.fits and equals_torch(cast_of_supported, supported_weights),
        "fallback": not fallback_cast.fits and equals_torch(fallback_cast, weights),
        "new storage": all(item.data_ptr() != second.data_ptr() for item, second in zip(first, repeated, strict=True)),
        "same addresses": cast_of_supported.holds(supported_weights),
        "moved tensor": not cast_of_supported.holds([*supported_weights[:-1], supported_weights[-1].clone()]),
    }


if __name__ == "__main__":
    target = sys.argv[1]
    results: dict[str, Any] = {kind: compare(kind, target) for kind in BLOCKS}
    results |= {
        "falls back": falls_back(target),
        "far from zero": far_from_zero(target),
        "one value": one_value(target),
    }
    results["weight casts"] = compare_weight_casts(target)
    print(json.dumps(results))
