"""Kernels of the first layer against torch's layers, in Triton's interpreter."""

import pytest
from interpreted import found_by

pytest.importorskip("triton")
from stem_case import SHAPES

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("stem_case.py", tmp_path_factory)


@pytest.mark.parametrize("uses", ["once", "twice"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_gradients_and_running_statistics_are_as_exact_as_torchs(found, shape, uses):
    for part, (ours, usual) in found["shapes"][f"{shape}, {uses}"].items():
        assert ours < max(1e-4, 3 * usual), part


def test_a_mean_far_from_zero_loses_few_digits(found):
    for part, (ours, usual) in found["shapes"]["far from zero"].items():
        assert ours < max(1e-5, 3 * usual), part


def test_a_nan_running_mean_does_not_affect_the_batch(found):
    assert found["lost statistics"]


def test_used_only_in_low_precision_with_three_channels(found):
    used = {name for name, asked in found["used"].items() if asked}
    assert used == {"usual", "float16", "frozen", "all frozen", "pooling"}
    assert found["used"].keys() - used == {
        "float32", "images that learn", "images with channels first", "filters with channels first", "a stride",
        "one channel", "5 x 5",
    }  # fmt: skip


def test_low_precision_only_adds_rounding_errors(found):
    for part, far in found["narrow"].items():
        assert far < 8 * 2**-10, part  # as on a GPU: some bits of float16, and where the ReLU cuts off


def test_a_step_with_the_kernels_is_as_exact_as_without(found):
    for part, (ours, usual) in found["step"].items():
        assert ours < 1.3 * usual, part
