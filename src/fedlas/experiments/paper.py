"""The numbers of the paper, by table, method, data set, network and metric."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def _paper() -> dict[str, Any]:
    text = resources.files("fedlas.experiments").joinpath("paper.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    for name in ("numbers", "summaries"):
        content[name] = [row for row in content[name] if not row.get("commented_out")]
    return content


@cache
def _numbers() -> dict[tuple[str | None, ...], float]:
    return {
        (row["table"], row["method"], row["data"], row["model"], row["metric"], row.get("ood")): row["percent"] / 100
        for row in _paper()["numbers"]
    }


def value(table: str, method: str, data: str, model: str, *, metric: str, ood: str | None = None) -> float | None:
    """Return a number of the paper as a fraction; None if the paper does not have it.

    Args:
        table: "sota", "finegrained", "ood" or "over_under".
        method: a loss by its catalogue name, or "ce+temperature".
        data: the data set.
        model: the network.
        metric: "ece", "aece", "accuracy", "over_ece", "under_ece" or "auroc".
        ood: the OOD data set of an AUROC.
    """
    return _numbers().get((table, method, data, model, metric, ood))


def summaries_of(table: str) -> dict[str, dict[str, float]]:
    """Return the paper's numbers of each method over all data sets: mean accuracy in percent, and mean ranks."""
    summaries: dict[str, dict[str, float]] = {}
    for row in _paper()["summaries"]:
        if row["table"] == table:
            summaries.setdefault(row["method"], {})[row["metric"]] = row["value"]
    return summaries


def methods(table: str) -> dict[str, str]:
    """List the methods of a table in the paper's order, with the paper's names."""
    order = dict.fromkeys(row["method"] for row in _paper()["numbers"] if row["table"] == table)
    return {method: _paper()["methods"][method] for method in order}


def data_sets(table: str) -> tuple[str, ...]:
    """List the data sets of a table, in the paper's order."""
    return tuple(dict.fromkeys(row["data"] for row in _paper()["numbers"] if row["table"] == table))


def benchmarks(table: str) -> tuple[tuple[str, str], ...]:
    """List the data sets of a table with their networks; means of the paper are over these."""
    return tuple(dict.fromkeys((row["data"], row["model"]) for row in _paper()["numbers"] if row["table"] == table))


def mean_accuracies(table: str) -> dict[str, float]:
    """Return the paper's mean accuracy of each method over all benchmarks of a table, as a fraction."""
    summaries = summaries_of(table)
    return {method: summary["mean_Acc"] / 100 for method, summary in summaries.items() if "mean_Acc" in summary}


def ood_data(table: str, data: str) -> tuple[str, ...]:
    """Return the OOD data sets of a data set in a table."""
    rows = (row for row in _paper()["numbers"] if row["table"] == table and row["data"] == data and "ood" in row)
    return tuple(dict.fromkeys(row["ood"] for row in rows))


def data_name(data: str) -> str:
    """Return the paper's name of a data set; the name itself if the paper does not have it."""
    return str(_paper()["data"].get(data, data))
