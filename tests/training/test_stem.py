"""Kernels of the first layer against torch's layers, in Triton's interpreter."""

import pytest
from interpreted import run_interpreted

pytest.importorskip("triton")
from stem_case import SHAPES

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_interpreted("stem_case.py", tmp_path_factory)


@pytest.mark.parametrize("uses", ["once", "twice"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_gradients_and_running_statistics_are_as_exact_as_torchs(results, shape, uses):
    for part, (kernel_error, torch_error) in results["shapes"][f"{shape}, {uses}"].items():
        assert kernel_error < max(1e-4, 3 * torch_error), part


def test_a_mean_far_from_zero_loses_few_digits(results):
    for part, (kernel_error, torch_error) in results["shapes"]["far from zero"].items():
        assert kernel_error < max(1e-5, 3 * torch_error), part


def test_a_nan_running_mean_does_not_affect_the_batch(results):
    assert results["lost statistics"]


def test_used_only_in_low_precision_with_three_channels(results):
    used = {name for name, is_used in results["used"].items() if is_used}
    assert used == {"usual", "float16", "frozen", "all frozen", "pooling"}
    assert results["used"].keys() - used == {
        "float32", "images that learn", "images with channels first", "filters with channels first", "a stride",
        "one channel", "5 x 5",
    }  # fmt: skip


def test_low_precision_only_adds_rounding_errors(results):
    for part, error in results["low precision"].items():
        assert error < 8 * 2**-10, part  # as on a GPU: some bits of float16, and where the ReLU cuts off


def test_a_step_with_the_kernels_is_as_exact_as_without(results):
    for part, (kernel_error, torch_error) in results["step"].items():
        assert kernel_error < 1.3 * torch_error, part
