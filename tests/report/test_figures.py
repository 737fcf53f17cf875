"""Figures draw what their data says."""

import pytest
import torch

from fedlas.metrics import histogram
from fedlas.predictions import Predictions
from fedlas.report.figures import reliability_data, reliability_figure, save_figure


def test_a_reliability_diagram_draws_its_data(tmp_path):
    pytest.importorskip("matplotlib")
    generator = torch.Generator().manual_seed(0)
    made = Predictions(3 * torch.randn(200, 5, generator=generator), torch.randint(0, 5, (200,), generator=generator))
    data = reliability_data(histogram(made).bins, 0.25, "one")
    assert sum(data.share) == pytest.approx(1)
    gaps = [s * abs(a - c) for s, a, c in zip(data.share, data.accuracy, data.confidence, strict=True)]
    from fedlas.metrics import ece

    assert sum(gaps) == pytest.approx(float(ece(made)))
    figure = reliability_figure({"before": [data, data], "after": [data]})
    panel = figure.axes[0]
    assert panel.get_title() == "one\nECE 25.0 %"
    assert list(panel.lines[1].get_xdata()) == list(data.confidence)
    assert save_figure(figure, tmp_path / "x" / "f.png").stat().st_size > 1000
    first = (tmp_path / "x" / "f.png").read_bytes()
    assert (
        save_figure(reliability_figure({"before": [data, data], "after": [data]}), tmp_path / "g.png").read_bytes()
        == first
    )
