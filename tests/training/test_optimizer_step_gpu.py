"""On a GPU: the fused optimizer step against torch's, captured and eager."""

from typing import Any

import pytest
import torch
from runs_of import short
from torch import nn

pytest.importorskip("triton")
from optimizer_step_case import CASES, compare, compare_gate_statistics, compare_metric_sums, use_torch
from test_train_gpu import (
    assert_captured_is_eager,
    assert_equal_tensors,
    assert_never_waits,
    gpu_session,
    pytestmark,
    tensors,
    trained,
)

from fedlas.training import build
from fedlas.training.accelerators.optimizer_step import FusedOptimizerStep
from fedlas.training.accelerators.resnet import FusedResNet
from fedlas.training.session import Session

__all__ = ["pytestmark"]  # skips without a CUDA device, and ignores warnings of inductor
RESIDUAL = {"model": "resnet18_cifar", "model_options": {}, "channels_last": True, "precision": "bf16"}


@pytest.fixture
def uncompiled(monkeypatch):
    """Compute network and loss by torch's own kernels; the optimizer step stays fused."""
    monkeypatch.setattr(build, "CompiledCall", lambda module, **_: module)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_torch(case):
    after_one_step, after_four_steps = compare(case, "cuda", 1), compare(case, "cuda", 4)
    assert after_one_step["is fused"]
    assert max(after_one_step["distance"].values()) < 1e-6, after_one_step["distance"]
    assert after_four_steps["distance"]["rates"] == 0
    assert after_four_steps["distance"]["weights"] < 1e-3
    assert after_four_steps["distance"].get("memory", 0) < 1e-2
    for part in ("count", "first bad", "skips", "samples", "steps"):
        assert after_four_steps["flags"][part] == after_four_steps["torch's flags"][part], part
    assert after_four_steps["steps"] == (
        [True, False, False, True] if "missing" in case else [True] * len(after_four_steps["steps"])
    )


def test_correct_counts_equal_those_of_torch():
    assert all(all(checks) for checks in compare_metric_sums("cuda"))


def test_gate_statistics_equal_those_of_torch():
    assert all(all(checks) for checks in compare_gate_statistics("cuda"))


def assert_captured_fused_step_is_eager(recipe: Any) -> Session:
    captured, eager = assert_captured_is_eager(recipe)
    assert isinstance(captured.step.fused_step, FusedOptimizerStep)
    assert eager.step.fused_step.ready
    assert captured.step.metrics.read() == eager.step.metrics.read()
    assert int(captured.step.count) == int(eager.step.count) == 7 * 3
    return captured


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


def convolutions(session: Session) -> list[Any]:
    assert isinstance(session.net.model, FusedResNet)
    return [layer.weight for layer in session.net.model.modules() if isinstance(layer, nn.Conv2d)]


@pytest.mark.usefixtures("uncompiled")
def test_accumulated_gradients_need_no_copy():
    """The second part is added to the first one's gradient, which lies in the slot."""
    session = assert_captured_fused_step_is_eager(short("ce", compile=True, accumulate=2, **RESIDUAL))
    slots = session.step.fused_step.slots
    assert all(weight.grad.data_ptr() == slots[weight].data_ptr() for weight in convolutions(session))


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


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("capture", [False, True])
def test_a_step_does_not_synchronise(capture):
    recipe = short("fedlas_ls", deterministic=False, compile=True, drop_last=True)
    assert assert_never_waits(recipe, capture=capture).step.fused_step.ready
