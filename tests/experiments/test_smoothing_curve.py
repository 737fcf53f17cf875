"""The smoothing curve is computed by the loss itself."""

import json
import math
import re

import pytest
import torch

from fedlas.experiments.base import Choice, Drawing
from fedlas.experiments.ledger import Ledger
from fedlas.experiments.smoothing_curve import BETAS, SmoothingCurve, alpha_of


@pytest.mark.parametrize("beta", [0.0, 0.5, 4.0])
@pytest.mark.parametrize(("mode", "psi"), [("positive", 1), ("negative", -1)])
def test_alpha_equals_its_formula_in_both_modes(beta, mode, psi):
    nci = torch.tensor([-3.0, -0.5, 0.0, 0.25, 2.0])
    returned_nci, alpha_i = alpha_of(nci, alpha=0.1, beta=beta, mode=mode)
    assert torch.equal(returned_nci, nci)
    assert alpha_i.tolist() == pytest.approx([0.1 * 2 / (1 + math.exp(-beta * psi * x)) for x in nci.tolist()])


def test_alpha_is_computed_by_the_loss(monkeypatch):
    from fedlas.losses.fedlas import AdaptiveSmoothing

    forward = AdaptiveSmoothing.forward

    def other(self, *inputs):
        forward(self, *inputs)
        self.alpha_i = self.alpha_i + 1
        return self.alpha_i

    monkeypatch.setattr(AdaptiveSmoothing, "forward", other)
    _, alpha_i = alpha_of(torch.zeros(2), alpha=0.1, beta=1.0, mode="positive")
    assert alpha_i.tolist() == pytest.approx([1.1, 1.1])


def test_alpha_of_preserves_the_random_state():
    before = torch.get_rng_state()
    alpha_of(torch.zeros(2), alpha=0.1, beta=1.0, mode="positive")
    assert torch.equal(torch.get_rng_state(), before)


def test_smoothing_curve_is_drawn_without_runs(tmp_path):
    pytest.importorskip("matplotlib")
    experiment, ledger = SmoothingCurve(), Ledger(tmp_path / "ledger")
    assert experiment.plan(Choice(), ledger) == []
    assert experiment.tables(ledger, Choice()) == []
    files = experiment.draw(Drawing(ledger, Choice(), tmp_path / "figures", lambda _: None))
    assert [path.name for path in files] == [f"smoothing_curve.{end}" for end in ("pdf", "png", "json")]
    assert all(re.fullmatch(experiment.file_names, path.stem) for path in files)
    data = json.loads(files[2].read_text())
    assert data["alpha"] == 0.05
    assert [(item["beta"], item["mode"]) for item in data["curves"]] == [
        (beta, mode) for beta in BETAS for mode in ("positive", "negative")
    ]
    for up, down in zip(data["curves"][::2], data["curves"][1::2], strict=True):
        assert up["alpha_i"] == pytest.approx(down["alpha_i"][::-1], abs=1e-7)  # rotated by half a turn: x -> -x
        assert all(0 <= value <= 0.1 for value in up["alpha_i"])
