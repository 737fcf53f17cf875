"""Fused optimizer step and metric sums against those of torch."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from devices import needs_cuda
from gpu_sessions import (
    assert_captured_is_eager,
    assert_equal_tensors,
    assert_never_waits,
    gpu_session,
    tensors,
    trained,
)
from runs_of import short
from torch import nn

pytest.importorskip("triton")
import triton.language as tl

from fedlas.losses import build_loss
from fedlas.losses.base import GateState
from fedlas.training import Recipe, build
from fedlas.training.accelerators import metric_sums, optimizer_step
from fedlas.training.accelerators.metric_sums import MAX_CLASSES, SAMPLES_PER_TILE
from fedlas.training.accelerators.optimizer_step import SUMS, FusedOptimizerStep
from fedlas.training.accelerators.parameter_blocks import BLOCK, TILE, WeightCast
from fedlas.training.accelerators.resnet import CastWeights, FusedResNet, GradientTarget, SideStream
from fedlas.training.backend_flags import backend_flags
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.optimizer import build_optimizer, optimizer_state, parameters_of
from fedlas.training.session import Session

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not hasattr(tl, "tuple"), reason="needs a Triton that has tuples")
FEW = 2  # sums of tiles that are added at a time, so that there are several of these in a small network
Change = Callable[[Session, int], object]
SMALL = {
    "epochs": 2,
    "data_options": {"train_samples": 130},
    "model_options": {"width": 16},
    "channels_last": True,
    "compile": True,
}


def no_change(session: Session, step: int) -> None:
    """Change nothing."""


def nan_images(session: Session, step: int) -> None:
    """Make the loss of the third step NaN."""
    scale, shift = session.train_source._constants
    if step == 2:
        session.before = scale
    scales = {2: scale * math.nan, 3: getattr(session, "before", scale)}
    session.train_source._constants = scales.get(step, scale), shift


def non_finite_gradient(value: float, part: str) -> Change:
    """Make one gradient of the third and the fourth step non-finite; the first of them is recorded."""

    def change(session: Session, step: int) -> None:
        if step == 0:
            last = list(getattr(session, part).parameters())[-1]
            last.register_hook(lambda gradient: gradient * session.factor)
        session.factor = value if step >= 2 else 1.0

    return change


def without_one_gradient(session: Session, step: int) -> None:
    """Remove the gradient of a parameter in the second and the third step: torch skips it."""
    next(session.net.parameters()).requires_grad_(step not in {1, 2})


CASES: dict[str, tuple[dict[str, Any], Change]] = {
    "usual": ({}, no_change),
    "few sums": ({}, no_change),
    "plain": ({"nesterov": False, "clip": None}, no_change),
    "nesterov": ({"nesterov": True, "clip": 0.5, "decay_all": False}, no_change),
    "clips the gate": ({"clip": 0.1, "clip_loss": True, "gate_lr_factor": 0.3, "gate_weight_decay": 0.01}, no_change),
    "no momentum": ({"momentum": 0.0, "nesterov": False, "clip": 1.0}, no_change),
    "two parts": ({"accumulate": 2, "drop_last": True, "schedule": "cosine"}, no_change),
    "no gate": ({"loss": "mbls"}, no_change),
    "bad loss": ({}, nan_images),
    "bad gradient": ({"clip": 1.0}, non_finite_gradient(math.inf, "net")),
    "too large a gradient": ({"clip": None}, non_finite_gradient(1e30, "net")),
    "bad gate": ({"clip": 1.0}, non_finite_gradient(math.nan, "loss")),
    # A higher learning rate would enlarge rounding errors.
    "a gradient is missing": ({"nesterov": True, "lr": 0.02}, without_one_gradient),
}


def use_torch(session: Session) -> None:
    """Use torch instead of the custom kernels."""
    session.step.fused_step = None
    session.step.metrics.kernels = session.step.gate.kernels = None


def train_some_steps(changes: dict[str, Any], device: str, change: Change, count: int, *, use_kernels: bool) -> Session:
    """Train some steps of a network with odd sizes."""
    recipe = short(**SMALL, **changes)
    with backend_flags(recipe, torch.device(device)):
        session: Any = Session(recipe, torch.device(device), capture=False)
        if not use_kernels:
            use_torch(session)
        session.ready = []
        session.net.train()
        for step, inputs in enumerate([*session.batches(0), *session.batches(1)][:count]):
            change(session, step)
            session.runner.run(*inputs)
            session.ready.append(use_kernels and session.step.fused_step.ready)
    return session


def step_tensors(session: Session) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that steps change."""
    optimizer = session.step.optimizer
    return {
        "weights": list(parameters_of(optimizer)),
        "memory": [value for item in optimizer_state(optimizer) for value in item.values()],
        "sums": [session.step.metrics.sums[name] for name in sorted(session.step.metrics.sums)],
        "gate": [session.step.gate.sums, session.step.gate.history.now],
        "rates": [session.step.rates.now],
    }


def flags(session: Session) -> dict[str, Any]:
    """Return the counters and decisions of the steps."""
    return {
        "count": int(session.step.count),
        "first bad": int(session.step.first_bad),
        "skips": float(session.step.optimizer.found_inf),
        "correct": float(session.step.metrics.sums["correct"]),
        "samples": float(session.step.metrics.sums["samples"]),
        "steps": float(session.step.metrics.sums["steps"]),
    }


def distance(values: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative difference of any tensor; NaN has to be at the same positions."""
    worst = 0.0
    for value, expected_value in zip(values, expected, strict=True):
        if not torch.equal(value.isnan(), expected_value.isnan()):
            return math.inf
        difference = (value.double() - expected_value.double()).nan_to_num().norm()
        worst = max(worst, (difference / expected_value.double().nan_to_num().norm().clamp_min(1e-12)).item())
    return worst


def compare(device: str, case: str, count: int) -> dict[str, Any]:
    """Compare some steps with the kernels with those of torch."""
    changes, change = CASES[case]
    with (
        patch.object(optimizer_step, "SUMS", FEW if case == "few sums" else SUMS),
        patch.object(build, "is_compiled", lambda recipe, _: recipe.compile),
        patch.object(build, "CompiledCall", lambda module, **_: module),
    ):
        fused, reference = (
            train_some_steps(changes, device, change, use_kernels=use_kernels, count=count)
            for use_kernels in (True, False)
        )
    fused_state, reference_state = step_tensors(fused), step_tensors(reference)
    return {
        "is fused": isinstance(fused.step.fused_step, optimizer_step.FusedOptimizerStep),
        "steps": fused.ready,
        "distance": {
            part: distance(fused_state[part], reference_state[part]) for part in fused_state if reference_state[part]
        },
        "flags": flags(fused),
        "torch's flags": flags(reference),
    }


# Largest relative differences of the state after four steps; rounding errors grow faster on a GPU.
TOLERANCES = {
    "interpreted": dict.fromkeys(("weights", "memory", "sums", "gate"), 5e-6),
    "cuda": {"weights": 1e-3, "memory": 1e-2},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_torch(device, case):
    after_one_step, after_four_steps = device.call(compare, case, 1), device.call(compare, case, 4)
    assert after_one_step["is fused"]
    assert max(after_one_step["distance"].values()) < 1e-6, after_one_step["distance"]
    assert after_four_steps["distance"]["rates"] == 0
    for part, tolerance in TOLERANCES[device.name].items():
        assert after_four_steps["distance"].get(part, 0) < tolerance, part
    flags, expected_flags = after_four_steps["flags"], after_four_steps["torch's flags"]
    if device.name == "cuda":  # a prediction may change if weights differ
        del flags["correct"], expected_flags["correct"]
    assert flags == expected_flags
    assert (flags["first bad"] == 2) == case.startswith(("bad", "too large"))
    assert after_four_steps["steps"] == ([True, False, False, True] if "missing" in case else [True] * 4)


def check_metric_sums(device: str) -> None:
    """Check edge cases of logits: the first of equal logits counts, and NaN before all others."""
    inf, nan = math.inf, math.nan
    rows = [[1, 1, 0], [0, 1, 1], [nan, 1, nan], [inf, nan, 0], [-inf, -inf, -inf], [nan, nan, nan], [0, -0.0, -1]]
    edge_cases = torch.tensor(rows * 3, device=device, dtype=torch.float32)
    edge_case_labels = torch.arange(3, device=device).repeat_interleave(len(rows))
    random = torch.randn(301, 37, device=device).round()
    for logits, labels in (
        (edge_cases, edge_case_labels),
        (random, random.argmax(1)),
        (random.bfloat16(), torch.arange(301, device=device) % 37),
        (random.t().contiguous().t(), torch.arange(301, device=device) % 40 - 2),  # some labels are out of range
        (torch.zeros(2, MAX_CLASSES + 1, device=device), torch.zeros(2, dtype=torch.int64, device=device)),
    ):
        used: list[bool] = []

        def recorded(*arguments: Any, used: list[bool] = used, add_batch: Any = metric_sums.add_batch) -> bool:
            used.append(add_batch(*arguments))
            return used[-1]

        kernels: Any = metric_sums
        fused, reference = EpochMetrics(torch.device(device), kernels), EpochMetrics(torch.device(device))
        for metrics in (fused, reference):
            for _ in range(2):
                value = torch.tensor(0.7, device=device)
                with patch.object(metric_sums, "add_batch", recorded):
                    metrics.add_batch(value, {"one": value / 3, "two": value / 7}, logits, labels)
        assert used == [logits.shape[1] <= MAX_CLASSES] * 2
        assert len(reference.sums) == 5
        assert fused.sums == reference.sums


def test_metric_sums_equal_those_of_torch(device):
    device.call(check_metric_sums)


def check_gate_statistics(device: str) -> None:
    """Check batches of several sizes; ignored samples count nowhere, a state of zero as -1."""
    for rows in (1, 5, SAMPLES_PER_TILE, 2 * SAMPLES_PER_TILE + 3):
        torch.manual_seed(rows)
        psi, gamma = torch.randn(rows).sign(), 3 * torch.randn(rows)
        gamma[:4] = torch.tensor([0.0, 0.5, 1e6, -1e6])[:rows]  # an edge, and far beyond all of them
        psi[1:2] = 0
        state = GateState(psi.to(device), gamma.to(device), torch.rand(rows).to(device), 0.05)
        for item in state[:3]:
            item[3::7] = math.nan
        loss: Any = build_loss("fedlas_ls", num_classes=3)
        loss.gate_state = partial(tuple, state)
        indices = torch.randperm(3 * rows)[: 2 * rows]
        kernels: Any = metric_sums
        fused, reference = (GateStatistics(loss, 3 * rows, torch.device(device), sums) for sums in (kernels, None))
        for gate in (fused, reference):
            for index in indices.split(rows):
                gate.add(index.to(device))
        assert fused.sums[0] > 0
        torch.testing.assert_close(fused.sums[1], reference.sums[1], rtol=1e-6, atol=0)  # of alpha_i / alpha
        fused.sums[1] = reference.sums[1]
        assert torch.equal(fused.sums, reference.sums)
        assert torch.equal(fused.history.now, reference.history.now)


def test_gate_statistics_equal_those_of_torch(device):
    device.call(check_gate_statistics)


def build_fused_step(net: nn.Module, loss: nn.Module | None = None, **changes) -> FusedOptimizerStep:
    recipe = Recipe(data="digits", model="small_cnn", loss="ce", **changes)
    loss = nn.Identity() if loss is None else loss
    optimizer, rates = build_optimizer(recipe, net, loss, torch.ones(3), CPU)
    return FusedOptimizerStep(recipe, optimizer, rates, loss)


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
    fused_step.copy_to_slots()
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


RESIDUAL = {"model": "resnet18_cifar", "model_options": {}, "channels_last": True, "precision": "bf16"}


@pytest.fixture
def uncompiled(monkeypatch):
    """Compute network and loss by torch's own kernels; the optimizer step stays fused."""
    monkeypatch.setattr(build, "CompiledCall", lambda module, **_: module)


def assert_captured_fused_step_is_eager(recipe: Any) -> Session:
    captured, eager = assert_captured_is_eager(recipe)
    assert isinstance(captured.step.fused_step, FusedOptimizerStep)
    assert eager.step.fused_step.ready
    return captured


@needs_cuda
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 2, "nesterov": True},
        {"clip": None, "schedule": "cosine"},
        {"clip": 0.1, "clip_loss": True},
        {"momentum": 0.0, "nesterov": False},
    ],
    ids=str,
)
def test_a_captured_step_equals_an_eager_step_bit_for_bit(changes):
    assert_captured_fused_step_is_eager(short("fedlas_ls", compile=True, **changes))


@needs_cuda
@pytest.mark.usefixtures("uncompiled")
def test_accumulated_gradients_need_no_copy():
    """The second part is added to the first one's gradient, which lies in the slot."""
    session = assert_captured_fused_step_is_eager(short("ce", compile=True, accumulate=2, **RESIDUAL))
    assert isinstance(session.net.model, FusedResNet)
    for layer in session.net.model.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.grad.data_ptr() == session.step.fused_step.slots[layer.weight].data_ptr()


@needs_cuda
@pytest.mark.usefixtures("uncompiled")
def test_a_captured_step_is_independent_of_later_allocations():
    recipe = short("ce", compile=True, drop_last=True, **RESIDUAL)
    with gpu_session(recipe) as captured:
        for epoch in range(3):
            for inputs in captured.batches(epoch):
                captured.runner.run(*inputs)
                freed = [torch.full((2**size,), float("nan"), device="cuda") for size in range(8, 24)]
                pinned = [torch.full((2**size,), -1).pin_memory() for size in range(4, 12)]
                del freed, pinned
    assert captured.runner.graphs
    assert_equal_tensors(captured, trained(recipe, capture=False))


@needs_cuda
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_step_of_a_resnet_equals_that_of_torch(accumulate):
    """Over four million parameters: each program of the norm sums several tiles."""
    recipe = short("ce", compile=True, accumulate=accumulate, clip=0.5, **RESIDUAL)
    sessions = []
    for use_kernels in (True, False):
        with gpu_session(recipe, capture=False) as session:
            if not use_kernels:
                use_torch(session)
            session.runner.run(*next(iter(session.batches(0))))
        sessions.append(session)
    fused_tensors, torch_tensors = (tensors(session) for session in sessions)
    for name, value in torch_tensors.items():
        torch.testing.assert_close(fused_tensors[name], value, rtol=1e-5, atol=1e-7, msg=name)
    fused_metrics, torch_metrics = (session.step.metrics.read() for session in sessions)
    assert fused_metrics == pytest.approx(torch_metrics, rel=1e-6)


@needs_cuda
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("capture", [False, True])
def test_a_step_does_not_synchronise(capture):
    recipe = short("fedlas_ls", deterministic=False, compile=True, drop_last=True)
    assert assert_never_waits(recipe, capture=capture).step.fused_step.ready
