"""ResNets with custom kernels against torch's layers, in Triton's interpreter."""

from functools import partial

import pytest
import torch
from interpreted import found_by
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from fedlas.models import build_model, resnet
from fedlas.training import build, recipe_for, session

pytest.importorskip("triton")
from fedlas.training.accelerators import batch_norm
from fedlas.training.accelerators.resnet import (
    DeferredGradient,
    FusedResNet,
    SideStream,
    _Convolution,
    _stride_of_1x1,
    fuse,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("resnet_case.py", tmp_path_factory)


@pytest.mark.campaign
@pytest.mark.parametrize("case", ["basic", "bottleneck"])
def test_outputs_gradients_and_running_statistics_are_as_exact_as_torchs(found, case):
    item = found[case]
    assert item["taken"]
    for part, bound in {"logits": 1e-5, "gradients": 1e-4, "buffers": 1e-5}.items():
        assert item["fused"][part] < max(bound, 3 * item["torch"][part]), (part, item)
    assert item["evaluates alike"]
    assert item["same parameters"]


@pytest.mark.campaign
def test_frozen_layers_and_layers_with_hooks_use_torch(found):
    # What is not touched differs in the last digits, or the comparison would show nothing.
    assert found["falls back"] == {"frozen norm": True, "watched layer": True, "watched back": True, "nothing": False}


@pytest.mark.campaign
def test_a_mean_far_from_zero_loses_no_digits(found):
    assert found["far from zero"]["rstd"] < 1e-5


@pytest.mark.campaign
def test_one_value_per_channel_raises(found):
    assert "channel" in found["one value"]


@pytest.mark.campaign
def test_low_precision_copies_equal_those_of_torch(found):
    assert len(found["narrowed"]) == 5
    assert all(found["narrowed"].values()), found["narrowed"]


def test_networks_of_the_catalogue_fit():
    with torch.device("meta"):
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


def with_another_activation() -> nn.Module:
    model = narrow()
    model.layer2[0].relu = nn.SiLU()
    return model


def with_dropout_aside() -> nn.Module:
    model = narrow()
    model.layer2[0].downsample.append(nn.Dropout())
    return model


def with_reflected_borders() -> nn.Module:
    model = narrow()
    model.layer1[0].conv1.padding_mode = "reflect"
    return model


def with_padding_by_name() -> nn.Module:
    model = narrow()
    model.layer1[0].conv1.padding = "same"
    return model


def with_a_weight_twice() -> nn.Module:
    model = narrow()
    model.layer1[0].conv2.weight = model.layer1[0].conv1.weight
    return model


def with_a_block_twice() -> nn.Module:
    model = narrow()
    model.layer1.append(model.layer1[0])
    return model


def with_a_stem_of_two_layers() -> nn.Module:
    model = narrow()
    model.conv1 = nn.Sequential(model.conv1, nn.Identity())
    return model


def without_a_stage() -> nn.Module:
    model = narrow()
    model.layer4 = nn.Identity()
    return model


def resnet_subclass() -> nn.Module:
    class Mine(ResNet):
        """A subclass may compute something else."""

    return Mine(BasicBlock, [1, 1, 1, 1], num_classes=5)


def resnet_of_a_block_subclass() -> nn.Module:
    class Block(BasicBlock):
        """A subclass may compute something else."""

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
        with_another_activation,
        with_dropout_aside,
        with_reflected_borders,
        with_padding_by_name,
        with_a_block_twice,
        with_a_weight_twice,
        with_a_stem_of_two_layers,
        without_a_stage,
        resnet_subclass,
        resnet_of_a_block_subclass,
        in_float64,
        lambda: build_model("small_cnn", 10, in_channels=1),
    ],
)
def test_unsupported_networks_are_unchanged(make):
    model = make()
    kinds = [type(layer) for layer in model.modules()]
    assert not fuse(model)
    assert [type(layer) for layer in model.modules()] == kinds


def test_names_and_weights_are_unchanged():
    model = narrow()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model = fuse(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def on_a_pretended_gpu(monkeypatch, reason=None, **changes):
    """Give the network that a session prepares where there is a GPU, and whether torch's compiler was asked for it."""
    monkeypatch.setattr(resnet, "BLOCKS", dict.fromkeys(resnet.BLOCKS, (1, 1, 1, 1)))
    monkeypatch.setattr(build, "is_compiled", lambda recipe, _: recipe.compile)
    monkeypatch.setattr(batch_norm, "unsupported_reason", lambda _: reason)
    compiled = []
    monkeypatch.setattr(build, "CompiledCall", lambda module, **_: compiled.append(type(module).__name__) or module)
    options = {"model_options": {"in_channels": 1}, "channels_last": True, "compile": True} | changes
    recipe = recipe_for("digits", loss="ce").replace(model="resnet18_cifar", **options)
    made = session.Session(recipe, torch.device("cpu"))
    return isinstance(made.net.model, FusedResNet), "WithFeatures" in compiled


def test_a_session_fuses_networks_that_it_would_compile(monkeypatch):
    assert on_a_pretended_gpu(monkeypatch) == (True, False)
    # Nobody who looks at steps, and so keeps them from being captured, shall change what is learned.
    assert on_a_pretended_gpu(monkeypatch, capture=False) == (True, False)
    assert on_a_pretended_gpu(monkeypatch, channels_last=False) == (False, True)
    assert on_a_pretended_gpu(monkeypatch, compile=False) == (False, False)


def test_without_kernels_the_network_is_compiled(monkeypatch):
    with pytest.warns(UserWarning, match="no C compiler"):
        assert on_a_pretended_gpu(monkeypatch, reason="RuntimeError: no C compiler") == (False, True)


def test_why_not_returns_the_reason():
    reason = batch_norm.unsupported_reason(torch.device("cpu"))  # which Triton knows nothing of, unless it interprets
    assert reason is not None
    assert "\n" not in reason


@pytest.mark.parametrize("learns", [True, False])
def test_a_frozen_weight_leaves_no_pending_work(learns):
    """If no weight needs a gradient, nothing waits for pending weight gradients."""
    images, weight = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=learns)
    asked = []

    class Recorded(SideStream):
        def run(self, work, *read):
            asked.append(len(read))
            return super().run(work, *read)

    about = (1, 1), (1, 1), (1, 1), 1
    found, _ = _Convolution.apply(images, weight, about, Recorded(torch.device("cpu")), None, None)
    found.sum().backward()
    given = images.grad.clone()
    images.grad = None
    nn.functional.conv2d(images, weight, None, *about).sum().backward()
    torch.testing.assert_close(given, images.grad)
    assert asked == ([2] if learns else [])
    assert (weight.grad is not None) is learns


def test_small_tensors_are_summed_by_fewer_programs():
    few, many = batch_norm.tile_for_sums(batch_norm.SMALL_SIZE), batch_norm.tile_for_sums(batch_norm.SMALL_SIZE + 1)
    assert few.programs < many.programs
    assert few.blocks(10**6, 64) == few.programs


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
    product, strided = deferred.pop()
    assert product is None
    assert strided.gradient.shape[2:] == y.shape[2:]
    assert deferred.pop() == (None, None)
    usual = [value.detach().requires_grad_() for value in (images, weight)]
    nn.functional.conv2d(*usual, stride=stride).backward(gradient)
    torch.testing.assert_close(strided.whole(images), usual[0].grad)
    torch.testing.assert_close(weight.grad, usual[1].grad)


def test_other_convolutions_have_gradients_at_every_pixel():
    first, three = torch.zeros(8, 8, 1, 1), torch.zeros(8, 8, 3, 3)
    assert _stride_of_1x1(((2, 2), (0, 0), (1, 1), 1), first) == 2
    others = [(2, 1), (0, 0), (1, 1), 1], [(2, 2), (1, 1), (1, 1), 1], [(2, 2), (0, 0), (1, 1), 2]
    assert [_stride_of_1x1(tuple(about), first) for about in others] == [1, 1, 1]
    assert _stride_of_1x1(((2, 2), (0, 0), (1, 1), 1), three) == 1


def test_deferred_gradients_cannot_be_differentiated_twice():
    images, weight = torch.randn(2, 8, 4, 4, requires_grad=True), torch.randn(5, 8, 1, 1, requires_grad=True)
    geometry, defer = ((1, 1), (0, 0), (1, 1), 1), DeferredGradient().defer_product
    y, _ = _Convolution.apply(images, weight, geometry, SideStream(torch.device("cpu")), None, defer)
    with pytest.raises(RuntimeError, match=r"twice|double"):
        torch.autograd.grad(y.square().sum(), weight, create_graph=True)
