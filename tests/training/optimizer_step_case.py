"""Compare the fused optimizer step with torch's; a script for TRITON_INTERPRET=1 or a GPU.

    python tests/training/optimizer_step_case.py cpu

Prints one line of JSON: for each kind of recipe, the differences of weights, optimizer state and sums from torch after
some steps, and the flags of both.
"""

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from fedlas.losses.base import GateState
from fedlas.training import build, recipe_for
from fedlas.training.accelerators import metric_sums, optimizer_step
from fedlas.training.accelerators.metric_sums import MAX_CLASSES, SAMPLES_PER_TILE
from fedlas.training.accelerators.optimizer_step import SUMS
from fedlas.training.backend_flags import backend_flags
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.optimizer import optimizer_state, parameters_of
from fedlas.training.session import Session

FEW = 2  # sums of tiles that are added at a time, so that there are several of these in a small network
Change = Callable[[Session, int], object]
SMALL = {
    "epochs": 2,
    "batch_size": 50,
    "deterministic": True,
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
    session.train_source._constants = (
        {2: scale * math.nan, 3: getattr(session, "before", scale)}.get(step, scale),
        shift,
    )


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
    "a gradient is missing": (
        {"nesterov": True, "lr": 0.02},
        without_one_gradient,
    ),  # a higher one would enlarge rounding errors
}


def use_torch(session: Session) -> None:
    """Use torch instead of the custom kernels."""
    session.step.fused_step = None
    session.step.metrics.kernels = session.step.gate.kernels = None


def trained(changes: dict[str, Any], device: str, change: Change, *, use_kernels: bool, count: int) -> Session:
    """Train some steps of a network with odd sizes."""
    recipe = recipe_for("digits", **{"loss": "fedlas_ls", **SMALL, **changes})
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


def compare(case: str, device: str, count: int | None = None) -> dict[str, Any]:
    """Compare the kernels with torch, in two steps, or in four if something is changed between them."""
    changes, change = CASES[case]
    count = count or (2 if change is no_change else 4)
    with (
        patch.object(optimizer_step, "SUMS", FEW if case == "few sums" else SUMS),
        patch.object(build, "is_compiled", lambda recipe, _: recipe.compile),
        patch.object(build, "CompiledCall", lambda module, **_: module),
    ):
        fused, reference = (
            trained(changes, device, change, use_kernels=use_kernels, count=count) for use_kernels in (True, False)
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


def compare_metric_sums(device: str) -> list[list[bool]]:
    """Return for edge cases of logits whether the kernel was used and its sums equal those of torch."""
    inf, nan = math.inf, math.nan
    rows = [[1, 1, 0], [0, 1, 1], [nan, 1, nan], [inf, nan, 0], [-inf, -inf, -inf], [nan, nan, nan], [0, -0.0, -1]]
    edge_cases = torch.tensor(rows * 3, device=device, dtype=torch.float32)
    edge_case_labels = torch.arange(3, device=device).repeat_interleave(len(rows))
    random = torch.randn(301, 37, device=device).round()
    result = []
    for logits, labels in (
        (edge_cases, edge_case_labels),
        (random, random.argmax(1)),
        (random.bfloat16(), torch.arange(301, device=device) % 37),
        (random.t().contiguous().t(), torch.arange(301, device=device) % 40 - 2),  # some labels are out of range
        (torch.zeros(2, MAX_CLASSES + 1, device=device), torch.zeros(2, dtype=torch.int64, device=device)),
    ):
        used: list[bool] = []

        def recorded(*arguments: Any, used: list[bool] = used) -> bool:
            used.append(metric_sums.add_batch(*arguments))
            return used[-1]

        kernels: Any = SimpleNamespace(add_batch=recorded)
        fused, reference = EpochMetrics(torch.device(device), kernels), EpochMetrics(torch.device(device))
        for meter in (fused, reference):
            for _ in range(2):
                value = torch.tensor(0.7, device=device)
                meter.add_batch(value, {"one": value / 3, "two": value / 7}, logits, labels)
        equal_sums = [fused.sums[name].item() == value.item() for name, value in reference.sums.items()]
        result.append([used == [logits.shape[1] <= MAX_CLASSES] * 2, *equal_sums])
    return result


def compare_gate_statistics(device: str) -> list[list[bool]]:
    """Return for batches of several sizes, with ignored samples, whether the gate statistics equal those of torch."""
    result = []
    for rows in (1, 5, SAMPLES_PER_TILE, 2 * SAMPLES_PER_TILE + 3):
        torch.manual_seed(rows)
        psi, gamma = torch.randn(rows).sign(), 3 * torch.randn(rows)
        gamma[:4] = torch.tensor([0.0, 0.5, 1e6, -1e6])[:rows]  # an edge, and far beyond all of them
        psi[1:2] = 0
        state = GateState(psi.to(device), gamma.to(device), torch.rand(rows).to(device), 0.05)
        for item in state[:3]:
            item[3::7] = math.nan
        loss: Any = SimpleNamespace(gate_state=partial(tuple, state))
        indices = torch.randperm(3 * rows)[: 2 * rows]
        kernels: Any = metric_sums
        fused, reference = (GateStatistics(loss, 3 * rows, torch.device(device), sums) for sums in (kernels, None))
        for gate in (fused, reference):
            for index in indices.split(rows):
                gate.add(index.to(device))
        counts = [0, *range(2, len(fused.sums))]
        equal_counts = torch.equal(fused.sums[counts], reference.sums[counts])
        close_ratio = math.isclose(fused.sums[1].item(), reference.sums[1].item(), rel_tol=1e-6)
        result.append(
            [equal_counts, close_ratio, bool(fused.sums[0] > 0), torch.equal(fused.history.now, reference.history.now)]
        )
    return result


if __name__ == "__main__":
    target = sys.argv[1]
    results: dict[str, Any] = {case: compare(case, target) for case in CASES}
    results["metric sums"] = compare_metric_sums(target)
    results["gate statistics"] = compare_gate_statistics(target)
    print(json.dumps(results))
