"""The fused optimizer step against torch's, in Triton's interpreter."""

import pytest
import torch
from interpreted import run_interpreted
from torch import nn

pytest.importorskip("triton")
import triton.language as tl
from optimizer_step_case import CASES

from fedlas.training.accelerators import optimizer_step
from fedlas.training.accelerators.parameter_blocks import BLOCK, TILE, WeightCast
from fedlas.training.accelerators.resnet import CastWeights, GradientTarget, SideStream
from fedlas.training.optimizer import build_optimizer
from fedlas.training.recipe import Recipe

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not hasattr(tl, "tuple"), reason="needs a Triton that has tuples")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_interpreted("optimizer_step_case.py", tmp_path_factory)


@pytest.mark.campaign
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_torch(results, case):
    case_result = results[case]
    assert case_result["is fused"]
    assert case_result["flags"] == case_result["torch's flags"]
    assert max(case_result["distance"].values()) < 5e-6, case_result["distance"]
    assert case_result["distance"]["rates"] == 0
    assert (case_result["flags"]["first bad"] == 2) == case.startswith(("bad", "too large"))


@pytest.mark.campaign
def test_a_step_without_all_gradients_uses_torch(results):
    assert results["a gradient is missing"]["steps"] == [True, False, False, True]
    assert results["usual"]["steps"] == [True] * 2


@pytest.mark.campaign
def test_correct_counts_equal_those_of_torch(results):
    """The first of equal logits, and NaN before all others."""
    assert len(results["metric sums"]) == 5
    assert all(all(item) and len(item) == 6 for item in results["metric sums"])  # the kernel was used, and five sums


@pytest.mark.campaign
def test_gate_statistics_equal_those_of_torch(results):
    """Ignored samples count nowhere, a state of zero as -1."""
    assert len(results["gate statistics"]) == 4
    assert all(len(checks) == 4 and all(checks) for checks in results["gate statistics"])


def build_fused_step(net: nn.Module, loss: nn.Module | None = None, **changes) -> optimizer_step.FusedOptimizerStep:
    recipe = Recipe(data="digits", model="small_cnn", loss="ce", **changes)
    loss = nn.Identity() if loss is None else loss
    optimizer, rates = build_optimizer(recipe, net, loss, torch.ones(3), CPU)
    return optimizer_step.FusedOptimizerStep(recipe, optimizer, rates, loss)


def test_gradient_slots_are_contiguous_with_the_strides_of_the_parameters():
    net = nn.Sequential(nn.Conv2d(5, 7, 3), nn.Linear(100, 90, bias=False))
    net.to(memory_format=torch.channels_last)
    fused_step = build_fused_step(net, nn.Linear(3, 1))
    assert fused_step.net_end == 4 * TILE  # the second layer has two of its own
    assert len(fused_step.flat) == 6 * TILE
    coverage = torch.zeros(len(fused_step.flat))
    for parameter, slot in fused_step.slots.items():
        assert slot.shape == parameter.shape
        assert slot.stride() == parameter.stride()
        coverage[slot.storage_offset() :][: slot.numel()] += 1
        assert slot.storage_offset() % TILE == 0
        slot.fill_(1)
    assert torch.equal(coverage, fused_step.flat)  # slots do not overlap, and each fits
    assert int(fused_step.blocks[:, 1].clamp_max(BLOCK).sum()) == sum(
        slot.numel() for slot in fused_step.slots.values()
    )


def backward_through_casts(weights: list[nn.Parameter], slots: list[torch.Tensor | None], images: torch.Tensor) -> None:
    targets = [GradientTarget(weight, slot) for weight, slot in zip(weights, slots, strict=True)]
    copies = CastWeights.apply(torch.bfloat16, SideStream(CPU), targets, WeightCast(weights), *weights)
    sum((nn.functional.conv2d(images.bfloat16(), copy) ** 2).float().sum() for copy in copies).backward()


def test_gradients_of_cast_weights_are_written_to_their_slots():
    layers = nn.ModuleList([nn.Conv2d(4, 6, 3, bias=False), nn.Conv2d(4, 5, 1, bias=False), nn.Conv2d(4, 3, 2)])
    layers.to(memory_format=torch.channels_last)
    weights = [layer.weight for layer in layers]
    fused_step = build_fused_step(layers)
    images = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    slots = [fused_step.slots[weight] for weight in weights]
    backward_through_casts(weights, [*slots[:2], None], images)
    in_slots = [weight.grad.data_ptr() == slot.data_ptr() for weight, slot in zip(weights, slots, strict=True)]
    assert in_slots == [True, True, False]
    first = [weight.grad.clone() for weight in weights]
    # The second part of an accumulated batch is added to the first gradient.
    backward_through_casts(weights, slots, images)
    for weight, partial_gradient in zip(weights, first, strict=True):
        torch.testing.assert_close(weight.grad, 2 * partial_gradient, rtol=1e-6, atol=0)


def test_not_ready_if_a_momentum_buffer_moved():
    net = nn.Linear(8, 4)
    fused_step = build_fused_step(net, momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert fused_step.ready
    state = fused_step.optimizer.state[net.weight]
    state["momentum_buffer"] = state["momentum_buffer"].clone()
    assert not fused_step.ready


def test_weight_casts_are_bound_to_shapes():
    storage = torch.zeros(64, 64, 1, 1)
    first_rows = storage[:8]
    assert first_rows.data_ptr() == storage.data_ptr()
    assert first_rows.stride() == storage.stride()
    assert WeightCast([storage]).holds([storage])
    assert not WeightCast([first_rows]).holds([storage])


def test_only_gradients_outside_their_slots_are_copied():
    net = nn.Linear(30, 20)
    fused_step = build_fused_step(net)
    assert not fused_step.ready
    for parameter, slot in fused_step.slots.items():
        parameter.grad = torch.full_like(parameter, 2.0) if parameter.ndim > 1 else slot.fill_(3.0).view_as(slot)
    assert fused_step.ready
    fused_step._copy_to_slots()
    assert [slot.unique().tolist() for slot in fused_step.slots.values()] == [[2.0], [3.0]]
    net.weight.data = net.weight.data.clone()
    assert not fused_step.ready  # its address has changed


def with_gaps(net: nn.Linear) -> nn.Module:
    net.weight.data = torch.zeros(20, 60)[:, ::2]
    return net


def with_unaligned_storage(net: nn.Linear) -> nn.Module:
    net.bias.data = torch.zeros(21)[1:]
    return net


@pytest.mark.parametrize(
    ("change", "changes", "expected"),
    [
        (nn.Module.float, {}, True),
        (nn.Module.float, {"momentum": 0.0, "nesterov": False}, True),
        (nn.Module.float, {"optimizer": "adamw"}, False),
        (nn.Module.float, {"precision": "fp16"}, False),
        (nn.Module.double, {}, False),
        (with_gaps, {}, False),
        (with_unaligned_storage, {}, False),
    ],
)
def test_unsupported_optimizers_use_torch(change, changes, expected, monkeypatch):
    monkeypatch.setattr(optimizer_step, "run_trial", lambda _: None)
    recipe = Recipe(data="digits", model="small_cnn", loss="ce", **changes)
    optimizer, _ = build_optimizer(recipe, change(nn.Linear(30, 20)), nn.Identity(), torch.ones(3), CPU)
    assert optimizer_step.fits(recipe, optimizer, CPU) == expected
    if expected:
        monkeypatch.undo()
        with pytest.warns(UserWarning, match="cannot be used.*driver"):
            assert not optimizer_step.fits(recipe, optimizer, CPU)
