"""On a GPU: fused ResNets against torch's layers, in float32 and low precision, and reproducibility."""

import copy
from typing import Any

import pytest
import torch
from runs_of import short

from fedlas.models import build_model

pytest.importorskip("triton")
import conv1x1_case
import stem_case
from resnet_case import (
    compare,
    compare_weight_casts,
    error,
    forward_and_backward,
    in_float64,
    in_low_precision,
    network,
)
from test_train_gpu import assert_captured_is_eager, pytestmark

from fedlas.training.accelerators import batch_norm, conv1x1, stem
from fedlas.training.accelerators import resnet as fused_module
from fedlas.training.accelerators.resnet import FusedResNet, Support, fuse
from fedlas.training.accelerators.trial import resnet_support

__all__ = ["pytestmark"]  # skips without a CUDA device, and ignores warnings of inductor


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32, matmul_before = False, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32, cudnn_before = False, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul_before, cudnn_before


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
def test_fused_resnet_is_as_exact_as_torch_layers(kind):
    result = compare(kind, "cuda")
    for part, bound in {"logits": 1e-5, "gradients": 1e-4, "buffers": 1e-5}.items():
        assert result["fused"][part] < max(bound, 3 * result["torch"][part]), (part, result)
    assert result["evaluates alike"]


def test_low_precision_copies_equal_those_of_torch():
    result = compare_weight_casts("cuda")
    assert all(result.values()), result


def images_of(count: int) -> torch.Tensor:
    images = torch.randn(count, 3, 32, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    return images.to(memory_format=torch.channels_last)


def in_bf16(model: Any, images: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    labels = torch.arange(len(images), device="cuda") % 5
    with torch.autocast("cuda", torch.bfloat16):
        return forward_and_backward(model, images, labels)


@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet50_cifar"])
@pytest.mark.parametrize("count", [3, 128])  # a part of a tile, and more tiles than programs
def test_fused_resnet_in_bf16_is_as_exact_as_torch_layers(name, count):
    model = build_model(name, 10).to("cuda", memory_format=torch.channels_last)
    fused = fuse(copy.deepcopy(model))
    images = images_of(count)
    expected = forward_and_backward(
        copy.deepcopy(model).double(), images.double(), torch.arange(count, device="cuda") % 5
    )
    torch_step, fused_step = in_bf16(model, images), in_bf16(fused, images)
    for part in ("logits", "gradients", "buffers"):
        norms = {name: value.norm().item() for name, value in expected[part].items()}
        torch_errors = {name: (torch_step[part][name] - expected[part][name]).norm().item() for name in norms}
        fused_errors = {name: (fused_step[part][name] - expected[part][name]).norm().item() for name in norms}
        assert sum(fused_errors.values()) < 1.3 * sum(torch_errors.values()), part
        worst = max(norms, key=lambda name: (fused_errors[name] - 2 * torch_errors[name]) / max(norms[name], 1e-12))
        assert fused_errors[worst] < 2 * torch_errors[worst] + 0.1 * norms[worst], (part, worst)


def test_fused_resnet_works_without_cudnn():
    with torch.backends.cudnn.flags(enabled=False):
        result = compare("basic", "cuda")
    assert result["fused"]["gradients"] < 1e-4


def test_equal_inputs_give_equal_bits():
    fused = network("bottleneck").to("cuda", memory_format=torch.channels_last)
    fused = fuse(fused)
    images = images_of(64)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        first, repeated = in_bf16(copy.deepcopy(fused), images), in_bf16(copy.deepcopy(fused), images)
    for part, values in first.items():
        for name, value in values.items():
            assert torch.equal(value, repeated[part][name]), (part, name)


def test_weight_gradients_on_the_side_stream_equal_those_on_the_main_stream(monkeypatch):
    model = build_model("resnet50_cifar", 10).to("cuda", memory_format=torch.channels_last)
    model = fuse(model)
    images = images_of(128)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        monkeypatch.setattr(fused_module, "MAX_PENDING", 0)  # the first stream waits for each of them
        one_by_one = in_bf16(copy.deepcopy(model), images)["gradients"]
        monkeypatch.undo()
        for _ in range(5):
            for part, value in in_bf16(copy.deepcopy(model), images)["gradients"].items():
                assert torch.equal(value, one_by_one[part]), part


def assert_as_exact_as_without(
    name: str, count: int, module: Any, monkeypatch: Any, *, work: str, times: int, fits: str = "fits"
) -> None:
    """Compare the errors of a step with and without a module's kernels; the kernel `work` must run `times` times."""
    model = build_model(name, 10).to("cuda", memory_format=torch.channels_last)
    images, calls = images_of(count), []
    expected = forward_and_backward(
        copy.deepcopy(model).double(), images.double(), torch.arange(count, device="cuda") % 5
    )
    model = fuse(model)
    support = resnet_support(model, images.device)
    assert support == Support(True, model.has_bottlenecks, model.has_bottlenecks)
    kernel = getattr(module, work)
    monkeypatch.setattr(module, work, lambda *args: calls.append(1) or kernel(*args))
    with_kernels = in_bf16(copy.deepcopy(model), images)
    assert len(calls) == times
    monkeypatch.setattr(module, fits, lambda *_: False)
    without_kernels = in_bf16(copy.deepcopy(model), images)
    assert len(calls) == times
    for part in expected:
        error_without, error_with = (
            sum((result[part][name] - value).norm().item() for name, value in expected[part].items())
            for result in (without_kernels, with_kernels)
        )
        assert error_with < 1.3 * error_without, part


@pytest.mark.parametrize("count", [3, 128, 512])
def test_a_step_with_the_stem_kernels_is_as_exact_as_without(count, monkeypatch):
    assert_as_exact_as_without("resnet18_cifar", count, stem, monkeypatch, work="convolve", times=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 7, 64), (64, 32, 32, 64), (40, 31, 33, 128)])
def test_the_stem_is_as_exact_as_its_type_and_reproducible(shape, twice, dtype):
    tensors = in_low_precision(stem_case.layer(shape, "cuda"), dtype)
    expected = stem_case.by_torch(in_float64(tensors), twice=twice, y_dtype=dtype)
    outputs, repeated = (stem_case.by_kernels(tensors, twice=twice) for _ in range(2))
    for part, value in outputs.items():
        assert torch.equal(value, repeated[part]), part
        assert error(value, expected[part]) < 8 * torch.finfo(dtype).eps, part


@pytest.mark.parametrize("count", [3, 128])
def test_a_step_with_the_conv1x1_kernel_is_as_exact_as_without(count, monkeypatch):
    monkeypatch.setattr(conv1x1, "MIN_ROWS", 0)
    times = 12  # seven in the first stage, five in the second
    assert_as_exact_as_without("resnet50_cifar", count, conv1x1, monkeypatch, work="multiply", times=times)


@pytest.mark.parametrize("count", [3, 128])
def test_a_step_with_the_conv1x1_backward_kernel_is_as_exact_as_without(count, monkeypatch):
    monkeypatch.setattr(conv1x1, "MIN_ROWS_BACKWARD", 0)
    options = {"work": "gradient_sums", "times": 13, "fits": "fits_back"}  # the first ones of the first 13 blocks
    assert_as_exact_as_without("resnet50_cifar", count, conv1x1, monkeypatch, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("residual", ["nothing", "skip", "norm"])
@pytest.mark.parametrize(
    "shape",
    [
        (128, 32, 32, 256, 64),
        (128, 16, 16, 512, 128),
        (128, 8, 8, 1024, 256),
        (3, 5, 7, 64, 64),
        (31, 17, 13, 192, 128),
    ],
)
def test_conv1x1_gradients_are_as_exact_as_their_type_and_reproducible(shape, residual, stride, dtype):
    tensors = in_low_precision(conv1x1_case.block(shape, "cuda"), dtype)
    expected = conv1x1_case.backward_by_torch(in_float64(tensors), residual, stride)
    gradients, repeated = (conv1x1_case.backward_by_kernels(tensors, residual, stride) for _ in range(2))
    for part, value in gradients.items():
        assert torch.equal(value, repeated[part]), part
        assert error(value, expected[part]) < 2 * torch.finfo(dtype).eps, part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (128, 32, 32, 64, 256), (128, 32, 32, 256, 64), (128, 16, 16, 128, 512), (128, 8, 8, 256, 128),
        (3, 5, 7, 64, 64), (31, 17, 13, 128, 192),
    ],
)  # fmt: skip
def test_conv1x1_is_as_exact_as_its_type_and_reproducible(shape, dtype):
    tensors = in_low_precision(conv1x1_case.layer(shape, "cuda"), dtype)
    expected = conv1x1_case.by_torch(in_float64(tensors), y_dtype=dtype)
    outputs, repeated = (conv1x1_case.by_kernels(tensors) for _ in range(2))
    for part, value in outputs.items():
        assert torch.equal(value, repeated[part]), part
        bound = torch.finfo(dtype).eps / 2 if part in {"y", "z"} else 1e-4  # some are rounded to the other side
        assert error(value, expected[part]) < bound, part


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


def test_moved_weights_are_cast_correctly():
    model: Any = build_model("resnet18_cifar", 10).to("cuda", memory_format=torch.channels_last)
    model = fuse(model)
    images, reference = images_of(8), copy.deepcopy(model)
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


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"precision": "fp16"}])
def test_a_captured_step_equals_an_eager_step_bit_for_bit(changes):
    options = {"deterministic": True, "channels_last": True, "compile": True, "precision": "bf16"} | changes
    recipe = short("ce", model="resnet18_cifar", model_options={}, epochs=2, **options)
    for session in assert_captured_is_eager(recipe):
        assert isinstance(session.net.model, FusedResNet)
