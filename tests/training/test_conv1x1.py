"""The kernels of 1 x 1 convolutions compute what torch's layers do; here in Triton's interpreter."""

import pytest
from interpreted import found_by

pytest.importorskip("triton")
from conv1x1_case import CASES, CASES_BACK

pytestmark = pytest.mark.campaign
DIGITS = {"float16": 2**-10, "float32": 1e-5}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("conv1x1_case.py", tmp_path_factory)


@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_values_and_running_statistics_are_as_exact_as_torchs(found, shape, kind):
    for part, (ours, usual) in found["shapes"][f"{shape}, {kind}"].items():
        assert ours < max(DIGITS[kind], 3 * usual), part


def test_a_mean_far_from_zero_costs_few_digits(found):
    for part, (ours, usual) in found["shapes"]["far from zero"].items():
        assert ours < max(2e-4, 3 * usual), part  # some means are fifty times the spread here


def test_a_running_mean_that_is_no_number_spoils_no_batch(found):
    assert found["lost statistics"]


@pytest.mark.parametrize(("shape", "kind"), CASES_BACK)
def test_gradients_and_sums_of_the_norm_before_are_right(found, shape, kind):
    for part, far in found["back"][f"{shape}, {kind}"].items():
        assert far < DIGITS[kind], part


def test_takes_1_x_1_with_channels_last_where_it_pays_alone(found):
    takes = found["takes"]
    assert {name for name, taken in takes.items() if taken} == {
        "usual",
        "bfloat16",
        "to 192 channels",
        "from 256 to 128",
        "back from 64 to 256",
        "back from 256 to 1024",
        "back from 128 to 192",
    }


def test_a_step_with_it_is_as_exact_as_one_without(found):
    for part, (ours, usual) in found["step"]["float16"]["far"].items():
        assert ours < 1.3 * usual, part


def test_a_step_in_float32_loses_no_digits(found):
    for part, (ours, _) in found["step"]["float32"]["far"].items():
        assert ours < 1e-5, part


def test_used_for_1_x_1_with_a_stride_of_one_and_nothing_is_summed_twice(found):
    step = found["step"]["float16"]
    products = {"layer1.0.bn1", "layer1.0.bn3", "layer1.0.downsample.1", "layer2.0.bn1", "layer2.0.bn3"}
    sums = {"layer1.0.bn2", "layer2.0.bn2", "layer2.0.downsample.1"}  # that of the first layer has its own kernels
    assert sorted(step["multiplied"]) == sorted(products)
    assert sorted(step["summed"]) == sorted(sums)


def test_gradients_of_1_x_1_sum_for_the_norm_that_made_their_images(found):
    step = found["step"]["float16"]
    before_products = {"bn1", "layer1.0.bn3"}  # the convolution after is of 1 x 1, and has no more channels than these
    assert sorted(step["left"]) == sorted(before_products)
    assert sorted(step["summed back"]) == sorted(
        {f"layer{stage}.0.bn{norm}" for stage in (1, 2) for norm in (1, 2, 3)} - before_products
    )


def test_a_convolution_with_a_stride_leaves_the_gradient_of_the_pixels_that_it_looked_at(found):
    assert found["step"]["float16"]["apart"] == ["layer1.0.bn3"]
