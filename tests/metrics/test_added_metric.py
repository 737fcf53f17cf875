"""A metric is one class in one file: added to the folder, it appears in reports, tables, comparisons and adapters."""

import json
import sys
from pathlib import Path

import pytest
import torch

import fedlas
from fedlas import metrics
from fedlas.metrics import registry

SPHERICAL = '''
"""Spherical score."""

from torch import Tensor

from fedlas.metrics.base import AbstractMean
from fedlas.metrics.inputs import Rows
from fedlas.metrics.intervals.methods import MeanBootstrap
from fedlas.metrics.paired import PairedMeans


class Spherical(AbstractMean):
    """Probability of the label divided by the length of the row."""

    name = "spherical"
    title = "spherical score"
    explanation = "How well rows point at their labels."
    unit = ""
    higher_is_better = True
    in_summary = True
    is_compared = True
    is_logged = True
    interval = MeanBootstrap()
    paired = PairedMeans(largest=1.0)

    def values(self, table: Rows) -> Tensor:
        return table.probs.gather(1, table.labels[:, None])[:, 0] / table.probs.norm(dim=1)
'''


@pytest.fixture
def spherical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> metrics.AbstractMetric:
    (tmp_path / "spherical.py").write_text(SPHERICAL)
    monkeypatch.setattr(metrics, "__path__", [*metrics.__path__, str(tmp_path)])
    catalog = type(registry.CATALOG)("fedlas.metrics", metrics.AbstractMetric, "metric")
    monkeypatch.setattr(registry, "CATALOG", catalog)
    yield registry.find_metric("spherical")
    sys.modules.pop("fedlas.metrics.spherical", None)


def predictions(scale: float = 2.0) -> fedlas.Predictions:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (400,), generator=generator)
    logits = torch.randn(400, 4, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 4)
    return fedlas.Predictions(scale * logits, labels, split="test")


def test_an_added_metric_appears_everywhere(spherical, tmp_path):
    pytest.importorskip("torchmetrics")
    from fedlas.comparison import compare_models
    from fedlas.integrations.base import ValidationMetrics
    from fedlas.integrations.torchmetrics import calibration_metrics
    from fedlas.report.html import save_page

    first_model = predictions()
    expected = float(spherical(first_model))
    report = fedlas.evaluate(first_model, posthoc="temperature", resamples=200)
    result = report["spherical"]
    assert float(result) == pytest.approx(expected, abs=1e-12)
    assert result.interval is not None
    assert expected in result.interval
    assert "spherical score" in str(report)
    assert report.after["temperature"].comparisons["spherical"].first == result
    assert json.loads(report.to_json())["states"][0]["results"]["spherical"]["value"] == float(result)
    tests = compare_models({"first": first_model, "second": predictions(0.3)}, resamples=200)
    assert [test.comparison.better for test in tests if test.metric == "spherical"] == ["first"]
    stream = spherical.accumulator()
    for rows in torch.arange(400).split(150):
        stream.update_logits(first_model.logits[rows], first_model.labels[rows])
    assert float(stream.compute()) == pytest.approx(expected, abs=1e-6)
    logged = ValidationMetrics()
    logged.add(first_model.logits, first_model.labels)
    assert logged.read()["spherical"] == pytest.approx(expected, abs=1e-6)
    adapter = calibration_metrics("logits")["spherical"]
    adapter.update(first_model.logits, first_model.labels)
    assert float(adapter.compute()) == pytest.approx(expected, abs=1e-6)
    save_page({"model": report}, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "spherical score" in page
    assert "How well rows point at their labels." in page
