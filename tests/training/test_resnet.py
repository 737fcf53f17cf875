"""ResNets with custom kernels against torch's layers."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from devices import exact_products, interpreted, needs_cuda
from gpu_sessions import assert_captured_is_eager
from runs_of import short
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from fedlas.models import build_model

pytest.importorskip("triton")
from kernel_cases import BLOCKS, CATALOGUE, Step, forward_and_backward, images_of, largest_error, network

from fedlas.training.accelerators import batch_norm
from fedlas.training.accelerators import resnet as fused_module
from fedlas.training.accelerators.parameter_blocks import WeightCast
from fedlas.training.accelerators.resnet import (
    Convolution,
    DeferredGradient,
    FusedResNet,
    SideStream,
    fits,
    stride_of_1x1,
)


@pytest.fixture(autouse=True)
def without_tf32():
    with exact_products():
        yield


def compare(device: str, kind: str) -> dict[str, Any]:
    """Return the errors of torch's layers and of the fused ones in float32 relative to float64."""
    model = network(kind).to(device, memory_format=torch.channels_last)
    images = 1 + images_of(device, 5, 5, 7)
    expected = forward_and_backward(copy.deepcopy(model).double(), images.double())
    fused: Any = FusedResNet(copy.deepcopy(model))
    torch_step, fused_step = forward_and_backward(model, images), forward_and_backward(fused, images)
    with torch.no_grad():
        torch_model = copy.deepcopy(model)
        torch_model.load_state_dict(fused.state_dict())
        evaluates_alike = torch.equal(fused.eval()(images), torch_model.eval()(images))
    return {
        "torch": {part: largest_error(torch_step[part], expected[part]) for part in expected},
        "fused": {part: largest_error(fused_step[part], expected[part]) for part in expected},
        "evaluates alike": evaluates_alike,
    }


@pytest.mark.parametrize("kind", BLOCKS)
def test_outputs_gradients_and_running_statistics_are_as_exact_as_torchs(device, kind):
    result = device.call(compare, kind)
    for part, bound in {"logits": 1e-5, "gradients": 1e-4, "buffers": 1e-5}.items():
        assert result["fused"][part] < max(bound, 3 * result["torch"][part]), (part, result)
    assert result["evaluates alike"]


@needs_cuda
def test_a_fused_resnet_works_without_cudnn():
    with torch.backends.cudnn.flags(enabled=False):
        result = compare("cuda", "basic")
    assert result["fused"]["gradients"] < 1e-4


def falls_back(device: str) -> dict[str, bool]:
    """Return for which networks torch's layers are used, by their running statistics or logits."""
    images = torch.randn(5, 3, 7, 7, device=device).to(memory_format=torch.channels_last)

    def equals_torch(change: Callable[[nn.Module], object]) -> bool:
        torch_model = network("basic").to(device, memory_format=torch.channels_last)
        fused: Any = FusedResNet(copy.deepcopy(torch_model))
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


@pytest.mark.parametrize("device", [interpreted()], indirect=True)
def test_frozen_layers_and_layers_with_hooks_use_torch(device):
    # Without a change, the kernels are used, whose last digits differ; else equality would prove nothing.
    expected = {"frozen norm": True, "forward hook": True, "backward hook": True, "nothing": False}
    assert device.call(falls_back) == expected


def error_far_from_zero(device: str) -> float:
    """Return the error of the statistics in the first step if the mean is much larger than the deviation."""
    y = 300 + torch.randn(4, 64, 5, 5, device=device).to(memory_format=torch.channels_last)
    weight, bias, mean, var = (torch.full((64,), value, device=device) for value in (1.0, 0.0, 0.0, 1.0))
    norm = batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1)
    result = batch_norm.statistics(y, norm, torch.zeros(1, dtype=torch.int32, device=device))
    expected = y.double().var((0, 2, 3), unbiased=False).add(1e-5).rsqrt()
    return ((result.rstd.double() - expected) / expected).abs().max().item()


@pytest.mark.parametrize("device", [interpreted()], indirect=True)
def test_a_mean_far_from_zero_loses_no_digits(device):
    assert device.call(error_far_from_zero) < 1e-5


def train_on_one_value(device: str) -> None:
    """Train a network on one image that is a single value per channel in the last layers, which has no variance."""
    fused: Any = FusedResNet(network("basic").to(device, memory_format=torch.channels_last))
    fused.train()(torch.zeros(1, 3, 2, 2, device=device).contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("device", [interpreted()], indirect=True)
def test_one_value_per_channel_raises(device):
    with pytest.raises(ValueError, match="channel"):
        device.call(train_on_one_value)


def check_weight_casts(device: str) -> None:
    """Check sizes that the kernel supports, and others."""
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

    def assert_equal_copies(cast: WeightCast, tensors: list[torch.Tensor]) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            for value, tensor in zip(cast.copies(tensors, dtype), tensors, strict=True):
                torch.testing.assert_close(value, tensor.to(dtype), rtol=0, atol=0, equal_nan=True)
                assert value.stride() == tensor.stride()

    assert cast_of_supported.fits
    assert_equal_copies(cast_of_supported, supported_weights)
    assert not fallback_cast.fits
    assert_equal_copies(fallback_cast, weights)
    first, repeated = (cast_of_supported.copies(supported_weights, torch.bfloat16) for _ in range(2))
    assert all(item.data_ptr() != second.data_ptr() for item, second in zip(first, repeated, strict=True))
    assert cast_of_supported.holds(supported_weights)
    assert not cast_of_supported.holds([*supported_weights[:-1], supported_weights[-1].clone()])


def test_low_precision_copies_equal_those_of_torch(device):
    device.call(check_weight_casts)


def test_networks_of_the_catalogue_fit():
    with torch.device("meta"):
        assert fits(build_model("resnet18_cifar", 10))
        assert fits(build_model("resnet50_tiny", 200))
        assert fits(build_model("resnet50", 10, pretrained=False))


def small_resnet(**options) -> ResNet:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5, **options)


@pytest.mark.parametrize(
    ("layer", "attribute", "value"),
    [
        ("", "conv1", nn.Conv2d(3, 64, 3)),  # with a bias
        ("", "conv1", nn.Sequential(nn.Conv2d(3, 64, 3, bias=False), nn.Identity())),
        ("", "layer4", nn.Identity()),
        ("bn1", "momentum", None),  # averages over all batches
        ("layer2.0", "relu", nn.SiLU()),
        (
            "layer2.0",
            "downsample",
            nn.Sequential(nn.Conv2d(64, 128, 1, 2, bias=False), nn.BatchNorm2d(128), nn.Dropout()),
        ),
        ("layer1.0.conv1", "padding_mode", "reflect"),
        ("layer1.0.conv1", "padding", "same"),
    ],
)
def test_networks_with_an_unsupported_layer_do_not_fit(layer, attribute, value):
    model = small_resnet()
    setattr(model.get_submodule(layer), attribute, value)
    assert not fits(model)


def with_a_weight_twice() -> nn.Module:
    model = small_resnet()
    model.layer1[0].conv2.weight = model.layer1[0].conv1.weight
    return model


def with_a_block_twice() -> nn.Module:
    model = small_resnet()
    model.layer1.append(model.layer1[0])
    return model


class SubclassedResNet(ResNet):
    """A subclass may compute something else."""


class SubclassedBlock(BasicBlock):
    """A subclass may compute something else."""


@pytest.mark.parametrize(
    "make",
    [
        with_a_block_twice,
        with_a_weight_twice,
        lambda: small_resnet(norm_layer=lambda channels: nn.GroupNorm(4, channels)),
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(small_resnet()),
        lambda: SubclassedResNet(BasicBlock, [1, 1, 1, 1]),
        lambda: ResNet(SubclassedBlock, [1, 1, 1, 1]),
        lambda: small_resnet().double(),
        lambda: build_model("small_cnn", 10, in_channels=1),
    ],
)
def test_unsupported_networks_do_not_fit(make):
    assert not fits(make())


def test_names_and_weights_are_unchanged():
    model = small_resnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = FusedResNet(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_frozen_weight_leaves_no_pending_work(trainable):
    """If no weight needs a gradient, nothing waits for pending weight gradients."""
    images, weight = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=trainable)
    read_counts = []

    class Recorded(SideStream):
        def run(self, work, *read):
            read_counts.append(len(read))
            return super().run(work, *read)

    geometry = (1, 1), (1, 1), (1, 1), 1
    output, _ = Convolution.apply(images, weight, geometry, Recorded(torch.device("cpu")), None, None)
    output.sum().backward()
    image_gradients = images.grad.clone()
    images.grad = None
    nn.functional.conv2d(images, weight, None, *geometry).sum().backward()
    torch.testing.assert_close(image_gradients, images.grad)
    assert read_counts == ([2] if trainable else [])
    assert (weight.grad is not None) is trainable


@pytest.mark.parametrize(("stride", "size"), [(2, (6, 6)), (2, (5, 7)), (2, (6, 3)), (3, (7, 4))])
def test_a_strided_convolution_stores_a_strided_gradient(stride, size):
    torch.manual_seed(0)
    images, weight = torch.randn(2, 8, *size, requires_grad=True), torch.randn(5, 8, 1, 1, requires_grad=True)
    geometry, deferred = ((stride, stride), (0, 0), (1, 1), 1), DeferredGradient()
    defer = partial(deferred.store_strided, stride)
    y, _ = Convolution.apply(images, weight, geometry, SideStream(torch.device("cpu")), None, defer)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    assert images.grad is None
    gemm, strided = deferred.pop()
    assert gemm is None
    assert strided.gradient.shape[2:] == y.shape[2:]
    assert deferred.pop() == (None, None)
    reference = [value.detach().requires_grad_() for value in (images, weight)]
    nn.functional.conv2d(*reference, stride=stride).backward(gradient)
    whole = torch.zeros_like(images)
    whole[:, :, :: strided.every, :: strided.every] = strided.gradient
    torch.testing.assert_close(whole, reference[0].grad)
    torch.testing.assert_close(weight.grad, reference[1].grad)


def test_other_convolutions_have_gradients_at_every_pixel():
    pointwise, weight_3x3 = torch.zeros(8, 8, 1, 1), torch.zeros(8, 8, 3, 3)
    assert stride_of_1x1(((2, 2), (0, 0), (1, 1), 1), pointwise) == 2
    geometries = [(2, 1), (0, 0), (1, 1), 1], [(2, 2), (1, 1), (1, 1), 1], [(2, 2), (0, 0), (1, 1), 2]
    assert [stride_of_1x1(tuple(geometry), pointwise) for geometry in geometries] == [1, 1, 1]
    assert stride_of_1x1(((2, 2), (0, 0), (1, 1), 1), weight_3x3) == 1


def test_deferred_gradients_cannot_be_differentiated_twice():
    images, weight = torch.randn(2, 8, 4, 4, requires_grad=True), torch.randn(5, 8, 1, 1, requires_grad=True)
    geometry, defer = ((1, 1), (0, 0), (1, 1), 1), DeferredGradient().defer_gemm
    y, _ = Convolution.apply(images, weight, geometry, SideStream(torch.device("cpu")), None, defer)
    with pytest.raises(RuntimeError, match=r"twice|double"):
        torch.autograd.grad(y.square().sum(), weight, create_graph=True)


def in_bf16(model: Any, images: torch.Tensor) -> Step:
    with torch.autocast("cuda", torch.bfloat16):
        return forward_and_backward(model, images)


@needs_cuda
@pytest.mark.parametrize("name", CATALOGUE.values())
@pytest.mark.parametrize("count", [3, 128])  # a part of a tile, and more tiles than programs
def test_fused_resnet_in_bf16_is_as_exact_as_torch_layers(name, count):
    model = build_model(name, 10).to("cuda", memory_format=torch.channels_last)
    fused = FusedResNet(copy.deepcopy(model))
    images = images_of("cuda", count)
    expected = forward_and_backward(copy.deepcopy(model).double(), images.double())
    torch_step, fused_step = in_bf16(model, images), in_bf16(fused, images)
    for part in ("logits", "gradients", "buffers"):
        norms = {name: value.norm().item() for name, value in expected[part].items()}
        torch_errors = {name: (torch_step[part][name] - expected[part][name]).norm().item() for name in norms}
        fused_errors = {name: (fused_step[part][name] - expected[part][name]).norm().item() for name in norms}
        assert sum(fused_errors.values()) < 1.3 * sum(torch_errors.values()), part
        worst = max(norms, key=lambda name: (fused_errors[name] - 2 * torch_errors[name]) / max(norms[name], 1e-12))
        assert fused_errors[worst] < 2 * torch_errors[worst] + 0.1 * norms[worst], (part, worst)


@needs_cuda
def test_equal_inputs_give_equal_bits_with_and_without_parallel_weight_gradients(monkeypatch):
    model = FusedResNet(build_model("resnet50_cifar", 10).to("cuda", memory_format=torch.channels_last))
    images = images_of("cuda", 128)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        monkeypatch.setattr(fused_module, "MAX_PENDING", 0)  # the first stream waits for each of them
        one_by_one = in_bf16(copy.deepcopy(model), images)
        monkeypatch.undo()
        for _ in range(5):
            for part, values in in_bf16(copy.deepcopy(model), images).items():
                for name, value in values.items():
                    assert torch.equal(value, one_by_one[part][name]), (part, name)


@needs_cuda
def test_kernels_accept_more_rows_than_the_grid_limit():
    """A batch of 4,096 images of 32 x 32 has 65,536 tiles of 64 rows; only the first grid axis may be that large."""
    y = torch.randn(4096, 64, 32, 33, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight, bias, mean, var = (torch.full((64,), value, device="cuda") for value in (1.0, 0.0, 0.0, 1.0))
    norm = batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    statistics = batch_norm.statistics(y, norm, counter)
    z, bits = batch_norm.activation(y, statistics, None, None)
    expected = torch.nn.functional.batch_norm(y.float(), None, None, training=True).relu()
    torch.testing.assert_close(z.float(), expected, atol=0.02, rtol=0.02)
    sums = batch_norm.gradient_sums(torch.ones_like(y), None, y, bits, statistics, counter)
    of_y, _ = batch_norm.gradients(sums, y, statistics)
    assert sums.bias[0].item() == pytest.approx((expected[:, 0] > 0).sum().item(), rel=1e-3)
    assert bool(torch.isfinite(of_y).all())


@needs_cuda
def test_moved_weights_are_cast_correctly():
    model: Any = build_model("resnet18_cifar", 10).to("cuda", memory_format=torch.channels_last)
    model = FusedResNet(model)
    images, reference = images_of("cuda", 8), copy.deepcopy(model)
    in_bf16(model, images)
    cast_before = model.weight_cast
    in_bf16(model, images)
    assert model.weight_cast is cast_before
    for weight in model.parameters():
        weight.data = 2 * weight.data
    reference.load_state_dict(model.state_dict())
    model.zero_grad(set_to_none=True)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        moved, expected = in_bf16(model, images), in_bf16(reference, images)
    assert model.weight_cast is not cast_before
    assert all(torch.equal(first, expected["gradients"][name]) for name, first in moved["gradients"].items())


@needs_cuda
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"precision": "fp16"}])
def test_a_captured_step_equals_an_eager_step_bit_for_bit(changes):
    options = {"deterministic": True, "channels_last": True, "compile": True, "precision": "bf16"} | changes
    recipe = short("ce", model="resnet18_cifar", model_options={}, epochs=2, **options)
    for session in assert_captured_is_eager(recipe):
        assert isinstance(session.net.model, FusedResNet)
