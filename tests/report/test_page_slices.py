"""Slices of the report page have the project's own metrics, sorted by harm."""

import pytest
import torch

from fedlas.metrics import ece
from fedlas.metrics.base import Resampling
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report.page_data import slice_data
from fedlas.report.slices import CLASS, MISSING, SMALL, slices
from report import pages


def with_metadata(n: int = 900) -> Predictions:
    """Predictions of three hospitals, one of them rare, with ages and columns that have no slices."""
    places = [None if k < 30 else "north" if k % 3 else "south" for k in range(n)]
    columns = {"site": places, "age": [k * 0.1 for k in range(n)], "id": [f"x{k}" for k in range(n)], "one": [1] * n}
    return pages.model(n, metadata=columns)


def test_slices_hold_the_metrics_of_their_samples():
    given = with_metadata()
    found = slices(given, bins=10)
    by_name = {(one.column, one.value): one for one in found.listed}
    north = torch.tensor([place == "north" for place in given.metadata["site"]])
    chosen = {(CLASS, "class 3"): given.prediction == 3, ("site", "north"): north}
    for name, rows in chosen.items():
        part, one = given[rows], by_name[name]
        assert one.n == int(rows.sum())
        assert one.accuracy == pytest.approx(float(part.correct.double().mean()), rel=1e-12)
        assert float(one.ece) == pytest.approx(float(ece(part, bins=10)), rel=1e-12)
        assert one.ece.definition.bins == 10
        assert one.ece.definition.n == one.n
        assert one.harm == one.n * float(one.ece)
    assert found.skipped == ["id", "one"]
    assert sum(one.n for one in found.listed if one.column == CLASS) == len(given)
    assert by_name["site", MISSING].is_small
    assert not by_name["site", "north"].is_small
    assert [one.is_small for one in found.listed] == [one.n < SMALL for one in found.listed]


def test_slices_are_sorted_by_harm_and_capped():
    given = with_metadata()
    every, few = slices(given), slices(given, most=4)
    harms = [one.harm for one in every.listed]
    assert harms == sorted(harms, reverse=True)
    assert [one.value for one in few.listed] == [one.value for one in every.listed[:4]]
    assert every.total == few.total == len(every.listed) == 10 + 3 + 4


def test_numeric_metadata_is_grouped_by_quartile():
    found = [one for one in slices(with_metadata()).listed if one.column == "age"]
    assert [one.n for one in sorted(found, key=lambda one: float(one.value.split()[-1][:-1]))] == pytest.approx(
        [225] * 4, abs=2
    )
    text = [f"{k}.5" if k else "" for k in range(200)]
    found = [one for one in slices(pages.model(200, metadata={"x": text})).listed if one.column == "x"]
    assert sum(one.n for one in found) == 200
    assert {one.n for one in found if one.value == MISSING} == {1}


def test_slices_have_intervals_and_full_precision():
    found = slices(with_metadata(), how=Resampling(0.9, 50))
    data = slice_data(found)
    for one, row in zip(found.listed, data["rows"], strict=True):
        assert one.ece.interval.level == 0.9
        assert row == [
            one.column, one.value, one.n, one.accuracy, float(one.ece), one.ece.interval.low, one.ece.interval.high,
            one.harm, one.is_small,
        ]  # fmt: skip
    without = slice_data(slices(with_metadata()))
    assert all(row[5] is row[6] is None for row in without["rows"])


def test_top_label_predictions_have_slices():
    confidence = torch.linspace(0.5, 1, 400)
    metadata = {"site": ["a", "b"] * 200}
    given = TopLabelPredictions(confidence, torch.arange(400) % 3 > 0, metadata=metadata)
    assert {(one.column, one.value) for one in slices(given).listed} == {("site", "a"), ("site", "b")}
    assert slices(TopLabelPredictions(confidence, torch.arange(400) % 3 > 0)).total == 0


def test_the_page_lists_slices(visit, folder):
    from fedlas.report.html import save_page

    path = save_page(with_metadata(), folder / "slices.html", resamples=50)
    here = visit(path)
    assert here.count("#slice-table tbody tr") == 17
    assert "id, one" in here.text("#slice-note").replace("\n", "")
    assert here.count("#slice-table .small-slice") >= 1
    assert "%" in here.text("#slice-table .interval")
