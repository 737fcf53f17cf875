"""A result is a float that knows its definition, prints itself, and becomes JSON and LaTeX."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch

from fedlas.metrics import Definition, Interval, Result, accuracy, classwise_ece, ece, nll


@pytest.fixture
def result() -> Result:
    definition = Definition("ECE", 15, "equal-width bins", "L1", "top-label", 10_000, "float32", "test")
    return Result(
        0.0412, definition, Interval(0.031, 0.052, 0.95, "bootstrap"), {"noise_floor": 0.009, "parts": (1, 2.5)}
    )


def test_result_behaves_as_a_float(result):
    assert isinstance(result, float)
    assert result == 0.0412
    assert result + 1 == pytest.approx(1.0412)
    assert 100 * result > 4
    assert round(result, 2) == 0.04
    assert max(result, 0.01) is result
    assert math.sqrt(result) == math.sqrt(0.0412)
    assert np.asarray([result]).dtype == np.float64
    assert torch.tensor(result).item() == pytest.approx(0.0412)
    assert f"{result:.3f}" == "0.041"
    assert json.dumps({"ece": result}) == '{"ece": 0.0412}'
    assert hash(result) == hash(0.0412)


def test_result_has_a_definition(golden):
    ece_result = ece(golden, bins=10)
    assert (ece_result.value, ece_result.estimator, ece_result.bins, ece_result.norm) == (
        float(ece_result),
        "ECE",
        10,
        "L1",
    )
    assert (ece_result.scope, ece_result.n, ece_result.dtype, ece_result.split) == ("top-label", 1000, "float32", None)
    assert "(lower, upper]" in ece_result.edges
    assert ece_result.interval is None
    assert ece_result.with_split("val").split == "val"
    assert ece(golden, compat="netcal").compat == "netcal"
    with pytest.raises(AttributeError, match="colour"):
        _ = ece_result.colour


def test_the_split_of_predictions_is_carried():
    from fedlas.predictions import Predictions

    predictions = Predictions(torch.randn(5, 3), torch.zeros(5, dtype=torch.long), split="test")
    for metric in (ece, accuracy, nll, classwise_ece):
        assert metric(predictions).split == "test"


def test_percentages_appear_only_in_text(result):
    assert float(result) < 1
    assert str(result).startswith("ECE 4.1 % [3.1, 5.2] at 95 %, 0.9 % by chance")
    for part in ("15 equal-width bins", "L1", "top-label", "test", "n=10,000", "float32"):
        assert part in str(result)
    assert repr(result) == f"<{result}>"
    assert f"{result}" == str(result)


def test_json_round_trip(result):
    text = result.to_json()
    fields = json.loads(text)
    assert fields["value"] == 0.0412
    assert fields["interval"] == {"low": 0.031, "high": 0.052, "level": 0.95, "method": "bootstrap", "note": ""}
    assert (fields["bins"], fields["edges"], fields["n"]) == (15, "equal-width bins", 10_000)
    assert fields["details"] == {"noise_floor": 0.009, "parts": [1, 2.5]}
    restored = Result.from_dict(fields)
    assert restored == result
    assert restored.definition == result.definition
    assert restored.interval == result.interval


def test_json_has_null_for_nan():
    text = Result(math.nan, Definition("x"), None, {"std": math.inf}).to_json()
    assert json.loads(text)["value"] is None
    assert json.loads(text)["details"]["std"] is None
    assert math.isnan(Result.from_dict(json.loads(text)))


def test_latex_has_the_value_and_interval(result):
    assert result.to_latex() == r"$4.1$ {\scriptsize $[3.1, 5.2]$}"
    nll_result = Result(1.6474, Definition("NLL", unit="nats"))
    assert nll_result.to_latex() == "$1.647$"


def test_result_can_be_pickled_and_copied(result):
    for restored in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result), copy.copy(result)):
        assert restored == result
        assert restored.definition == result.definition
        assert restored.interval == result.interval
        assert dict(restored.details) == dict(result.details)


def test_details_cannot_be_changed(result):
    with pytest.raises(TypeError):
        result.details["noise_floor"] = 0


def test_interval_has_containment_and_width():
    interval = Interval(0.1, 0.3)
    assert 0.2 in interval
    assert 0.31 not in interval
    assert interval.width == pytest.approx(0.2)
