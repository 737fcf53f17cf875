"""On a GPU of the kind: convolutions of 3 x 3 on 64 channels against float64, what norms want of them, and bits."""

from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")
from resnet_case import distance
from runs_of import short
from test_resnet_gpu import assert_as_exact_as_without
from test_train_gpu import pytestmark, tensors, trained

from fedlas.training.accelerators import batch_norm, conv3x3

pytestmark = [
    *pytestmark,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != conv3x3.GENERATION,
        reason="needs a GPU of the Hopper kind",
    ),
]
SHAPES = {
    "whole programs": (8, 32, 32),
    "part of a program": (6, 32, 32),
    "one line after the last": (11, 20, 16),
    "two lines after it": (3, 7, 64),
    "fewest lines": (9, 3, 8),
    "one image a program": (2, 4, 128),
}
CASES = [(name, torch.bfloat16) for name in SHAPES] + [("two lines after it", torch.float16)]


def case(name: str, dtype: torch.dtype, mean: float = 0.0) -> dict[str, Any]:
    """Make images, a weight, a norm, and gradients."""
    count, height, width = SHAPES[name]
    torch.manual_seed(0)

    def images(shift: float = 0.0) -> torch.Tensor:
        made = (torch.randn(count, 64, height, width, device="cuda") + shift).to(dtype)
        return made.contiguous(memory_format=torch.channels_last)

    weight = (torch.randn(64, 64, 3, 3, device="cuda") / 24).to(dtype).contiguous(memory_format=torch.channels_last)
    numbers = torch.rand(3, 64, device="cuda") + 0.5
    norm = batch_norm.Affine(
        numbers[0], numbers[1] - 1, numbers[2] - 1 + mean, torch.ones(64, device="cuda"), 1e-5, 0.1
    )
    return {"x": images(mean), "weight": weight, "norm": norm, "dy": images(), "second": images(), "skip": images()}


def copied(norm: batch_norm.Affine) -> batch_norm.Affine:
    return norm._replace(running_mean=norm.running_mean.clone(), running_var=norm.running_var.clone())


def summed(y: torch.Tensor, norm: batch_norm.Affine) -> batch_norm.Normed:
    return batch_norm.statistics(y, norm, torch.zeros(1, dtype=torch.int32, device="cuda"))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_as_exact_as_their_type_with_the_sums_of_their_norm(name, dtype):
    given = case(name, dtype)
    ours, usual = copied(given["norm"]), copied(given["norm"])
    y, about = conv3x3.convolve(given["x"], given["weight"], ours)
    again, _ = conv3x3.convolve(given["x"], given["weight"], copied(given["norm"]))
    assert torch.equal(y, again)
    right = functional.conv2d(given["x"].double(), given["weight"].double(), padding=1)
    assert distance({"": y.double()}, {"": right}) < torch.finfo(dtype).eps / 2
    for found, expected in zip((*about, *ours[2:4]), (*summed(y, usual), *usual[2:4]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_mean_far_from_zero_costs_few_digits():
    given = case("whole programs", torch.float16, mean=20.0)
    wide = conv3x3.convolve(given["x"], given["weight"], copied(given["norm"]))[0].double()
    usual = (wide.mean((0, 2, 3)) + 0.1).float()  # as running statistics would have it
    _, about = conv3x3.convolve(given["x"], given["weight"], copied(given["norm"]._replace(running_mean=usual)))
    torch.testing.assert_close(about.mean.double(), wide.mean((0, 2, 3)), rtol=1e-6, atol=1e-5)
    spread = (wide.var((0, 2, 3), unbiased=False) + 1e-5).rsqrt()
    torch.testing.assert_close(about.rstd.double(), spread, rtol=5e-6, atol=0)  # around zero it would be 2e-5


def test_a_running_mean_that_is_no_number_spoils_no_batch():
    given = case("whole programs", torch.bfloat16)
    lost = copied(given["norm"])
    lost.running_mean[::2], lost.running_mean[1::4] = torch.nan, torch.inf
    for one, other in zip(
        conv3x3.convolve(given["x"], given["weight"], lost)[1],
        conv3x3.convolve(given["x"], given["weight"], given["norm"])[1],
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_way_back_is_that_of_a_convolution_and_a_pass_of_the_norm(name, dtype, added, twice):
    given = case(name, dtype)
    y, second = given["skip"], given["second"] if twice else None
    about = summed(y, copied(given["norm"]))
    _, bits = batch_norm.activation(y, about, given["x"] if added else None, None)
    ours, again = (conv3x3.gradient_sums(given["dy"], given["weight"], second, y, bits, about) for _ in range(2))
    for one, other in zip(ours[:1] + ours[2:6], again[:1] + again[2:6], strict=True):
        assert torch.equal(one, other)
    wide = functional.conv_transpose2d(given["dy"].double(), given["weight"].double(), padding=1)
    narrow = wide.to(dtype).contiguous(memory_format=torch.channels_last)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    right = batch_norm.gradient_sums(narrow, second, y, bits, about, counter)
    expected = right.gradient
    if right.mask == "y":  # nothing was written, and nothing cut off
        z = y.float() * about.scale[:, None, None] + about.shift[:, None, None]
        expected = torch.where(z <= 0, 0, expected)
    assert ours.mask == "none"
    assert (ours.gradient != expected).double().mean() < 0.003  # where a sum lies between two numbers
    assert distance({"": ours.gradient.double()}, {"": expected.double()}) < 1e-3
    for found, one in zip(ours[2:6], right[2:6], strict=True):
        assert distance({"": found}, {"": one}) < 2e-3


@pytest.mark.parametrize("work", ["convolve", "gradient_sums"])
def test_a_step_with_them_is_as_exact_as_one_without(work, monkeypatch):
    assert_as_exact_as_without("resnet18_cifar", 512, conv3x3, monkeypatch, work=work, times=4)


@pytest.mark.parametrize(("work", "times"), [("convolve", 3), ("gradient_sums", 0)])
def test_in_a_network_of_bottlenecks_forward_alone(work, times, monkeypatch):
    monkeypatch.setattr(conv3x3, "BUSY", 0)
    assert_as_exact_as_without("resnet50_cifar", 8, conv3x3, monkeypatch, work=work, times=times)


def test_few_images_are_left_to_cudnn(monkeypatch):
    assert_as_exact_as_without("resnet18_cifar", 128, conv3x3, monkeypatch, work="convolve", times=0)


def test_a_captured_step_equals_one_that_is_not_bit_for_bit(monkeypatch):
    """Images of 8 x 8, sixteen of them a program: few multiprocessors are busy, which shall do here."""
    monkeypatch.setattr(conv3x3, "BUSY", 0)
    asked, kernel = [], conv3x3.convolve
    monkeypatch.setattr(conv3x3, "convolve", lambda *given: asked.append(1) or kernel(*given))
    same = {"deterministic": True, "channels_last": True, "compile": True, "precision": "bf16"}
    recipe = short("ce", model="resnet18_cifar", model_options={"in_channels": 1}, epochs=2, **same)
    captured, eager = trained(recipe, capture=True), trained(recipe, capture=False)
    assert asked
    assert captured.execute.graphs, "nothing was captured"
    for name, value in tensors(eager).items():
        assert torch.equal(value, tensors(captured)[name]), name
