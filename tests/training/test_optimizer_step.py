"""The fused optimizer step against torch's, in Triton's interpreter."""

import copy
from typing import Any

import pytest
import torch
from interpreted import found_by
from runs_of import short
from torch import nn

pytest.importorskip("triton")
import triton.language as tl
from optimizer_step_case import CASES

from fedlas.models import resnet
from fedlas.training import build
from fedlas.training.accelerators import batch_norm, conv1x1, metric_sums, optimizer_step, stem
from fedlas.training.accelerators.parameter_blocks import BLOCK, TILE, WeightCast
from fedlas.training.accelerators.resnet import SideStream, _CastWeights, _GradientTarget
from fedlas.training.build import SessionCache
from fedlas.training.optimizer import OptimizerStep, build_optimizer
from fedlas.training.recipe import Recipe
from fedlas.training.session import Session

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not hasattr(tl, "tuple"), reason="needs a Triton that has tuples")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("optimizer_step_case.py", tmp_path_factory)


@pytest.mark.campaign
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_torch(found, case):
    one = found[case]
    assert one["taken"]
    assert one["flags"] == one["torch's flags"]
    assert max(one["distance"].values()) < 5e-6, one["distance"]
    assert one["distance"]["rates"] == 0
    assert (one["flags"]["first bad"] == 2) == case.startswith(("bad", "too large"))


@pytest.mark.campaign
def test_a_step_without_all_gradients_uses_torch(found):
    assert found["a gradient is missing"]["steps"] == [True, False, False, True]
    assert found["usual"]["steps"] == [True] * 2


@pytest.mark.campaign
def test_correct_counts_equal_those_of_torch(found):
    """The first of equal logits, and NaN before all others."""
    assert len(found["answers"]) == 5
    assert all(all(one) and len(one) == 6 for one in found["answers"])  # the kernel was used, and five sums


@pytest.mark.campaign
def test_gate_statistics_equal_those_of_torch(found):
    """Ignored samples count nowhere, a state of zero as -1."""
    assert len(found["watched"]) == 4
    assert all(len(one) == 4 and all(one) for one in found["watched"])


@pytest.mark.campaign
def test_bf16_gradients_give_the_same_bits_as_float32_copies(found):
    one = found["handed over"]
    # Weights and biases in turn, then those of the loss; numbers that do not come in fours are left.
    first = [True, True, True, False, False, False, True, False, True, True]
    assert one["taken"] == 2 * first
    assert len(one["equal"]) == 2 * len(first) + 3
    assert all(one["equal"])


def made(net: nn.Module, loss: nn.Module | None = None, **changes) -> optimizer_step.FusedOptimizerStep:
    recipe = Recipe(data="digits", model="small_cnn", loss="ce", **changes)
    loss = nn.Identity() if loss is None else loss
    optimizer, rates = build_optimizer(recipe, net, loss, torch.ones(3), CPU)
    return optimizer_step.FusedOptimizerStep(OptimizerStep(recipe, net, loss, optimizer, rates))


def test_gradient_slots_are_contiguous_with_the_strides_of_the_parameters():
    net = nn.Sequential(nn.Conv2d(5, 7, 3), nn.Linear(100, 90, bias=False))
    net.to(memory_format=torch.channels_last)
    one = made(net, nn.Linear(3, 1))
    assert one.net == 4 * TILE  # the second layer has two of its own
    assert len(one.flat) == 6 * TILE
    places = torch.zeros(len(one.flat))
    for parameter, slot in one.slots.items():
        assert slot.shape == parameter.shape
        assert slot.stride() == parameter.stride()
        places[slot.storage_offset() :][: slot.numel()] += 1
        assert slot.storage_offset() % TILE == 0
        slot.fill_(1)
    assert torch.equal(places, one.flat)  # none lies over another, and all have room
    assert int(one.blocks[:, 1].clamp_max(BLOCK).sum()) == sum(slot.numel() for slot in one.slots.values())


def narrowed(
    weights: list[nn.Parameter], slots: list[torch.Tensor | None], images: torch.Tensor, receiver: Any = None
) -> None:
    targets = [_GradientTarget(weight, slot, receiver) for weight, slot in zip(weights, slots, strict=True)]
    copies = _CastWeights.apply(torch.bfloat16, SideStream(CPU), targets, WeightCast(weights), *weights)
    sum((nn.functional.conv2d(images.bfloat16(), copy) ** 2).float().sum() for copy in copies).backward()


def test_gradients_of_cast_weights_are_written_to_their_slots():
    layers = nn.ModuleList([nn.Conv2d(4, 6, 3, bias=False), nn.Conv2d(4, 5, 1, bias=False), nn.Conv2d(4, 3, 2)])
    layers.to(memory_format=torch.channels_last)
    weights = [layer.weight for layer in layers]
    one = made(layers)
    images = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    slots = [one.slots[weight] for weight in weights]
    narrowed(weights, [*slots[:2], None], images)
    here = [weight.grad.data_ptr() == slot.data_ptr() for weight, slot in zip(weights, slots, strict=True)]
    assert here == [True, True, False]
    first = [weight.grad.clone() for weight in weights]
    # Another part of the batch: what is there must not be written over.
    narrowed(weights, slots, images)
    for weight, half in zip(weights, first, strict=True):
        torch.testing.assert_close(weight.grad, 2 * half, rtol=1e-6, atol=0)


def test_kept_bf16_gradients_are_not_cast():
    layers = nn.ModuleList([nn.Conv2d(4, 6, 3, bias=False), nn.Conv2d(4, 5, 1, bias=False), nn.Conv2d(4, 8, 2)])
    layers.to(memory_format=torch.channels_last)
    weights = [layer.weight for layer in layers]
    one = made(layers)
    watched, slots = weights[1], [one.slots[weight] for weight in weights]
    handle = watched.register_hook(lambda gradient: gradient)
    images = torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    narrowed(weights, slots, images, one)
    wide = [weight.grad.clone() for weight in weights]  # nothing is captured yet
    layers.zero_grad(set_to_none=True)
    with one.capturing():
        narrowed(weights, slots, images, one)
        assert [weight.grad is None for weight in weights] == [True, False, True]
        assert list(one.low_precision) == [weights[0], weights[2]]
        assert all(torch.equal(one.low_precision[weights[place]].float(), wide[place]) for place in (0, 2))
        handle.remove()
        # A loss that looks at the network twice: the two are added up, as wide numbers.
        narrowed(weights, slots, images, one)
        assert not one.low_precision
    for weight, half in zip(weights, wide, strict=True):
        torch.testing.assert_close(weight.grad, 2 * half, rtol=1e-6, atol=0)


def test_a_weight_in_the_loss_keeps_both_gradients():
    """Torch adds the gradient of another way to a weight when all of it has been taken already."""
    net = nn.Conv2d(4, 8, 3, bias=False).to(memory_format=torch.channels_last)
    one, images = made(net), torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    with one.capturing():
        narrowed([net.weight], [None], images, one)
        taken = one.low_precision[net.weight].float()
        net.weight.grad = torch.full_like(net.weight, 3.0)
        one._copy_to_slots()
        assert not one.low_precision
    torch.testing.assert_close(one.slots[net.weight], taken + 3, rtol=0, atol=0)


def test_not_ready_if_a_momentum_buffer_moved():
    net = nn.Linear(8, 4)
    one = made(net, momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert one.ready
    state = one.optimizer.state[net.weight]
    state["momentum_buffer"] = state["momentum_buffer"].clone()
    assert not one.ready


def test_weight_casts_are_bound_to_shapes():
    storage = torch.zeros(64, 64, 1, 1)
    few = storage[:8]
    assert few.data_ptr() == storage.data_ptr()
    assert few.stride() == storage.stride()
    assert WeightCast([storage]).holds([storage])
    assert not WeightCast([few]).holds([storage])


def test_only_gradients_with_the_strides_of_their_parameter_are_kept():
    net = nn.Conv2d(8, 8, 3, bias=False).to(memory_format=torch.channels_last)
    one, narrow = made(net), torch.ones_like(net.weight, dtype=torch.bfloat16)
    others = [
        narrow.contiguous(),
        narrow.float(),
        torch.ones(577, dtype=torch.bfloat16)[1:].as_strided(narrow.shape, narrow.stride(), 1),
    ]
    assert not one.take(net.weight, narrow)
    with one.capturing():
        assert not any(one.take(net.weight, other) for other in others)
        assert not one.take(nn.Parameter(net.weight.detach().clone()), narrow)  # not the optimizer's
        net.weight.requires_grad_(False)
        assert not one.take(net.weight, narrow)
        net.weight.requires_grad_(True)
        assert one.take(net.weight, narrow)
        assert one.ready
    assert not one.ready


def test_only_gradients_outside_their_slots_are_copied():
    net = nn.Linear(30, 20)
    one = made(net)
    assert not one.ready
    for parameter, slot in one.slots.items():
        parameter.grad = torch.full_like(parameter, 2.0) if parameter.ndim > 1 else slot.fill_(3.0).view_as(slot)
    assert one.ready
    one._copy_to_slots()
    assert [slot.unique().tolist() for slot in one.slots.values()] == [[2.0], [3.0]]
    net.weight.data = net.weight.data.clone()
    assert not one.ready  # its address is another one


def in_float64(net: nn.Module) -> nn.Module:
    return net.double()


def with_gaps(net: nn.Linear) -> nn.Module:
    net.weight.data = torch.zeros(20, 60)[:, ::2]
    return net


def not_aligned(net: nn.Linear) -> nn.Module:
    net.bias.data = torch.zeros(21)[1:]
    return net


@pytest.mark.parametrize(
    ("change", "changes", "expected"),
    [
        (nn.Module.float, {}, True),
        (nn.Module.float, {"momentum": 0.0, "nesterov": False}, True),
        (nn.Module.float, {"optimizer": "adamw"}, False),
        (nn.Module.float, {"precision": "fp16"}, False),
        (in_float64, {}, False),
        (with_gaps, {}, False),
        (not_aligned, {}, False),
    ],
)
def test_unsupported_optimizers_use_torch(change, changes, expected, monkeypatch):
    monkeypatch.setattr(batch_norm, "unsupported_reason", lambda _: None)
    recipe = Recipe(data="digits", model="small_cnn", loss="ce", **changes)
    optimizer, _ = build_optimizer(recipe, change(nn.Linear(30, 20)), nn.Identity(), torch.ones(3), CPU)
    assert optimizer_step.fits(recipe, optimizer, CPU) == expected
    if expected:
        monkeypatch.setattr(batch_norm, "unsupported_reason", lambda _: "no compiler")
        with pytest.warns(UserWarning, match="no compiler"):
            assert not optimizer_step.fits(recipe, optimizer, CPU)


@pytest.fixture
def thin(monkeypatch):
    """ResNets with one block in each stage."""
    monkeypatch.setattr(resnet, "BLOCKS", dict.fromkeys(resnet.BLOCKS, (1, 1, 1, 1)))


def pretend_compilation(monkeypatch):
    """Let a session on the CPU use the custom kernels, which are not run, in place of the compiler."""
    monkeypatch.setattr(build, "is_compiled", lambda recipe, _: recipe.compile)
    monkeypatch.setattr(build, "CompiledCall", lambda module, **_: module)
    monkeypatch.setattr(batch_norm, "unsupported_reason", lambda _: None)


def is_fused(session: Session) -> bool:
    return isinstance(session.step.parts.optimizer_step, optimizer_step.FusedOptimizerStep)


@pytest.mark.usefixtures("thin")
def test_a_session_uses_the_kernels_if_it_compiles(monkeypatch):
    recipe = short("ce", channels_last=True, compile=True, model="resnet18_cifar", model_options={"in_channels": 1})
    assert not is_fused(Session(recipe, CPU))
    pretend_compilation(monkeypatch)
    cache = SessionCache()
    ours = Session(recipe, CPU, cache=cache)
    assert is_fused(ours)
    fused = ours.step.parts.optimizer_step
    assert ours.net.model.receiver is None
    with fused.receiving():
        assert ours.net.model.receiver is fused
    assert ours.net.model.receiver is None
    assert ours.step.metrics.kernels is ours.step.gate.kernels is metric_sums
    other = Session(recipe.replace(seed=5), CPU, cache=cache)
    assert other.step.parts.optimizer_step is fused
    addresses = [parameter.data_ptr() for parameter in fused.slots]
    assert addresses == fused.addresses[: len(addresses)]
    copy.deepcopy(ours.net)  # a callback may keep one
    with_adam = Session(recipe.replace(optimizer="adamw", lr=0.001), CPU, cache=cache)
    assert with_adam.net is ours.net
    assert not is_fused(with_adam)
    assert with_adam.step.metrics.kernels is None
    assert not is_fused(Session(recipe.replace(compile=False), CPU))


@pytest.mark.usefixtures("thin")
def test_kept_gradients_are_released_if_torch_updates_the_parameters(monkeypatch):
    recipe = short("ce", channels_last=True, compile=True, model="resnet18_cifar", model_options={"in_channels": 1})
    pretend_compilation(monkeypatch)
    ours = Session(recipe, CPU)
    one, weight = ours.step.parts.optimizer_step, ours.net.model.layer1[0].conv1.weight
    narrow, before = torch.ones_like(weight, dtype=torch.bfloat16), weight.detach().clone()
    with one.capturing():
        assert one.take(weight, narrow)
        assert not one.ready  # others have none
        one(torch.tensor(True), ours.step.count, ours.step.first_bad, ours.step.metrics)
    assert torch.equal(weight.grad.unique(), torch.tensor([recipe.clip / narrow.numel() ** 0.5]))  # by torch, clipped
    assert not torch.equal(weight, before)
    assert int(ours.step.count) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there can be used")
def test_kernels_that_fail_fall_back_with_a_warning():
    nowhere = torch.device("cuda")
    for made in (stem._can_run, conv1x1._can_run, conv1x1._can_run_backward):
        with pytest.warns(UserWarning, match="cuDNN"):
            assert not made.__wrapped__(nowhere)
        assert made(CPU)
    assert optimizer_step._unsupported_reason(Recipe(data="digits", model="small_cnn", loss="ce"), nowhere)
