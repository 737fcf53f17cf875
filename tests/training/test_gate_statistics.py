"""Gate statistics against counts by hand."""

import math
from typing import Any

import pytest
import torch

from fedlas.losses import build_loss
from fedlas.training.gate_statistics import EDGES, GateStatistics


def test_gate_statistics_are_counted_per_sample():
    """Of five samples one is ignored; a state of zero counts as -1."""
    nan = math.nan
    loss: Any = build_loss("fedlas_ls", num_classes=3, alpha=0.05)
    loss.smoothing.psi = torch.tensor([1.0, -1.0, 0.0, nan, 1.0])
    loss.smoothing.gamma = torch.tensor([-0.75, 2.0, -9.0, nan, 0.25])
    loss.smoothing.alpha_i = torch.tensor([0.02, 0.04, 0.05, nan, 0.07])
    gate_statistics = GateStatistics(loss, 8, torch.device("cpu"))
    gate_statistics.add(torch.tensor([7, 0, 2, 3, 5]))
    assert gate_statistics.history.now.tolist() == [-1, 0, -1, 0, 0, 1, 0, 1]
    statistics = gate_statistics.end_epoch()
    assert (statistics["positive"], statistics["negative"], statistics["flip_rate"]) == (0.5, 0.5, None)
    assert statistics["alpha_ratio"] == pytest.approx((0.4 + 0.8 + 1.0 + 1.4) / 4)
    assert statistics["against_gamma"] == 0.5  # the first two
    counts = dict(zip((-math.inf, *EDGES), statistics["gamma_histogram"]["counts"], strict=True))
    assert {edge: count for edge, count in counts.items() if count} == {-math.inf: 1, -1.0: 1, 0.0: 1, 2.0: 1}
    loss.smoothing.psi = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    gate_statistics.add(torch.tensor([7, 0, 2, 3, 5]))
    assert gate_statistics.end_epoch()["flip_rate"] == 0.5  # of the four samples of both epochs
