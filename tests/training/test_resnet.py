"""ResNets with custom kernels against torch's layers, in Triton's interpreter."""

from functools import partial

import pytest
import torch
from interpreted import run_interpreted
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from fedlas.models import build_model

pytest.importorskip("triton")
from fedlas.training.accelerators.resnet import (
    DeferredGradient,
    SideStream,
    _Convolution,
    _stride_of_1x1,
    fuse,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_interpreted("resnet_case.py", tmp_path_factory)


@pytest.mark.campaign
@pytest.mark.parametrize("case", ["basic", "bottleneck"])
def test_outputs_gradients_and_running_statistics_are_as_exact_as_torchs(results, case):
    case_result = results[case]
    for part, bound in {"logits": 1e-5, "gradients": 1e-4, "buffers": 1e-5}.items():
        assert case_result["fused"][part] < max(bound, 3 * case_result["torch"][part]), (part, case_result)
    assert case_result["evaluates alike"]


@pytest.mark.campaign
def test_frozen_layers_and_layers_with_hooks_use_torch(results):
    # Without a change, the kernels are used, whose last digits differ; else equality would prove nothing.
    assert results["falls back"] == {"frozen norm": True, "forward hook": True, "backward hook": True, "nothing": False}


@pytest.mark.campaign
def test_a_mean_far_from_zero_loses_no_digits(results):
    assert results["far from zero"]["rstd"] < 1e-5


@pytest.mark.campaign
def test_one_value_per_channel_raises(results):
    assert "channel" in results["one value"]


@pytest.mark.campaign
def test_low_precision_copies_equal_those_of_torch(results):
    assert len(results["weight casts"]) == 5
    assert all(results["weight casts"].values()), results["weight casts"]


def test_networks_of_the_catalogue_fit():
    with torch.device("meta"):
        assert fuse(build_model("resnet18_cifar", 10))
        assert fuse(build_model("resnet50_tiny", 200))
        assert fuse(build_model("resnet50", 10, pretrained=False))


def small_resnet(**options) -> ResNet:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5, **options)


def assert_not_fused(model: nn.Module) -> None:
    kinds = [type(layer) for layer in model.modules()]
    assert not fuse(model)
    assert [type(layer) for layer in model.modules()] == kinds


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
def test_networks_with_an_unsupported_layer_are_unchanged(layer, attribute, value):
    model = small_resnet()
    setattr(model.get_submodule(layer), attribute, value)
    assert_not_fused(model)


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
def test_unsupported_networks_are_unchanged(make):
    assert_not_fused(make())


def test_names_and_weights_are_unchanged():
    model = small_resnet()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = fuse(model)
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
    output, _ = _Convolution.apply(images, weight, geometry, Recorded(torch.device("cpu")), None, None)
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
    y, _ = _Convolution.apply(images, weight, geometry, SideStream(torch.device("cpu")), None, defer)
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
    assert _stride_of_1x1(((2, 2), (0, 0), (1, 1), 1), pointwise) == 2
    geometries = [(2, 1), (0, 0), (1, 1), 1], [(2, 2), (1, 1), (1, 1), 1], [(2, 2), (0, 0), (1, 1), 2]
    assert [_stride_of_1x1(tuple(geometry), pointwise) for geometry in geometries] == [1, 1, 1]
    assert _stride_of_1x1(((2, 2), (0, 0), (1, 1), 1), weight_3x3) == 1


def test_deferred_gradients_cannot_be_differentiated_twice():
    images, weight = torch.randn(2, 8, 4, 4, requires_grad=True), torch.randn(5, 8, 1, 1, requires_grad=True)
    geometry, defer = ((1, 1), (0, 0), (1, 1), 1), DeferredGradient().defer_gemm
    y, _ = _Convolution.apply(images, weight, geometry, SideStream(torch.device("cpu")), None, defer)
    with pytest.raises(RuntimeError, match=r"twice|double"):
        torch.autograd.grad(y.square().sum(), weight, create_graph=True)
