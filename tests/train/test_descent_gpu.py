"""On a GPU: the end of a step by kernels of our own, against torch's, captured and not."""

from typing import Any

import pytest
import torch
from runs_of import short
from torch import nn

pytest.importorskip("triton")
from descent_case import CASES, answers, compared
from test_train_gpu import assert_never_waits, pytestmark, tensors, trained

from fedlas.train.bench import Bench, chosen_device
from fedlas.train.fused import FusedResNet
from fedlas.train.precision import machine

__all__ = ["pytestmark"]  # needs a CUDA device, and inductor may explain itself
RESIDUAL = {"model": "resnet18_cifar", "model_options": {}, "channels_last": True, "precision": "bf16"}


@pytest.fixture
def uncompiled(monkeypatch):
    """Leave network and loss to torch's own kernels; the end of the step stays ours."""
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: None)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_torch(case):
    one, four = compared(case, "cuda", 1), compared(case, "cuda", 4)
    assert one["taken"]
    assert max(one["distance"].values()) < 1e-6, one["distance"]
    assert four["distance"]["rates"] == 0
    assert four["distance"]["weights"] < 1e-3
    assert four["distance"].get("memory", 0) < 1e-2
    for part in ("count", "first bad", "skips", "samples", "steps"):
        assert four["flags"][part] == four["torch's flags"][part], part
    assert four["steps"] == ([True, False, False, True] if "missing" in case else [True] * len(four["steps"]))


def test_right_answers_are_those_of_torch():
    assert all(all(one) for one in answers("cuda"))


def assert_captured_is_eager(recipe: Any) -> Bench:
    captured, eager = trained(recipe, capture=True), trained(recipe, capture=False)
    assert captured.step._graphs, "nothing was captured"
    assert captured.step.parts.descent is not None
    assert captured.step.parts.descent.ready
    for name, value in tensors(eager).items():
        assert torch.equal(value, tensors(captured)[name]), name
    assert captured.step.meter.read() == eager.step.meter.read()
    assert int(captured.step.count) == int(eager.step.count) == 21
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
def test_a_captured_step_equals_one_that_is_not_bit_for_bit(changes):
    assert_captured_is_eager(short("fedlas_ls", compile=True, **changes))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_convolutions_need_no_copy(accumulate):
    """A second part of a batch is added to the first one's gradient, which lies in the slot."""
    bench = assert_captured_is_eager(short("ce", compile=True, accumulate=accumulate, **RESIDUAL))
    assert isinstance(bench.net.model, FusedResNet)
    for layer in bench.net.model.modules():
        if isinstance(layer, nn.Conv2d):
            slot = bench.step.parts.descent.slots[layer.weight]
            assert layer.weight.grad.data_ptr() == slot.data_ptr()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_step_of_a_residual_network_is_that_of_torch(accumulate):
    """Four million numbers and more: each program of the norm looks at several tiles."""
    recipe = short("ce", compile=True, accumulate=accumulate, clip=0.5, **RESIDUAL)
    device, benches = chosen_device("cuda"), []
    for ours in (True, False):
        with machine(recipe, device):
            bench = Bench(recipe, device, capture=False)
            if not ours:
                bench.step.parts.descent = bench.step.meter.tally = None
            bench.net.train()
            bench.step(*next(iter(bench.batches(0))))
        benches.append(bench)
    mine, theirs = (tensors(bench) for bench in benches)
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-7, msg=name)
    found, right = (bench.step.meter.read() for bench in benches)
    assert found == pytest.approx(right, rel=1e-6)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("capture", [False, True])
def test_a_step_never_waits(capture):
    recipe = short("fedlas_ls", deterministic=False, compile=True, drop_last=True)
    assert assert_never_waits(recipe, capture=capture).step.parts.descent is not None
