"""Kernels of 1x1 convolutions against torch's layers, in Triton's interpreter."""

import pytest
from interpreted import run_interpreted

pytest.importorskip("triton")
from conv1x1_case import BACKWARD_CASES, CASES

pytestmark = pytest.mark.campaign
DIGITS = {"float16": 2**-10, "float32": 1e-5}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_interpreted("conv1x1_case.py", tmp_path_factory)


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_outputs_and_running_statistics_are_as_exact_as_torchs(results, shape, kind):
    for part, (kernel_error, torch_error) in results["shapes"][f"{shape}, {kind}"].items():
        assert kernel_error < max(DIGITS[kind], 3 * torch_error), part


def test_a_mean_far_from_zero_loses_few_digits(results):
    for part, (kernel_error, torch_error) in results["shapes"]["far from zero"].items():
        assert kernel_error < max(2e-4, 3 * torch_error), part  # some means are fifty times the standard deviation here


def test_a_nan_running_mean_does_not_affect_the_batch(results):
    assert results["lost statistics"]


@pytest.mark.parametrize(("shape", "kind"), BACKWARD_CASES)
def test_input_gradients_and_batch_norm_sums_are_correct(results, shape, kind):
    for part, error in results["backward"][f"{shape}, {kind}"].items():
        assert error < DIGITS[kind], part


def test_supports_only_1x1_in_channels_last_layout_where_it_is_faster(results):
    supported = results["supported"]
    assert {name for name, is_supported in supported.items() if is_supported} == {
        "usual",
        "bfloat16",
        "to 192 channels",
        "from 256 to 128",
        "back from 64 to 256",
        "back from 256 to 1024",
        "back from 128 to 192",
    }


def test_a_step_with_the_kernels_is_as_exact_as_without(results):
    for part, (kernel_error, torch_error) in results["step"]["float16"]["errors"].items():
        assert kernel_error < 1.3 * torch_error, part


def test_a_float32_step_loses_no_digits(results):
    for part, (kernel_error, _) in results["step"]["float32"]["errors"].items():
        assert kernel_error < 1e-5, part


def test_used_for_stride_1_and_statistics_are_computed_once(results):
    step = results["step"]["float16"]
    products = {"layer1.0.bn1", "layer1.0.bn3", "layer1.0.downsample.1", "layer2.0.bn1", "layer2.0.bn3"}
    sums = {"layer1.0.bn2", "layer2.0.bn2", "layer2.0.downsample.1"}  # that of the first layer has its own kernels
    assert sorted(step["multiply"]) == sorted(products)
    assert sorted(step["statistics"]) == sorted(sums)


def test_input_gradients_compute_the_sums_of_the_previous_batch_norm(results):
    step = results["step"]["float16"]
    before_products = {"bn1", "layer1.0.bn3"}  # followed by a 1x1 convolution with at most as many channels
    assert sorted(step["fused sums"]) == sorted(before_products)
    assert sorted(step["separate sums"]) == sorted(
        {f"layer{stage}.0.bn{norm}" for stage in (1, 2) for norm in (1, 2, 3)} - before_products
    )


def test_a_strided_convolution_hands_over_a_strided_gradient(results):
    assert results["step"]["float16"]["strided"] == ["layer1.0.bn3"]
