"""The numbers that the paper prints, by table, method, data set, network and metric."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def _paper() -> dict[str, Any]:
    text = resources.files("fedlas.experiments").joinpath("paper.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


@cache
def _numbers() -> dict[tuple[str | None, ...], float]:
    return {
        (row["table"], row["method"], row["data"], row["model"], row["metric"], row.get("ood")): row["percent"] / 100
        for row in _paper()["numbers"]
        if not row.get("commented_out")
    }


def printed(table: str, method: str, data: str, model: str, *, metric: str, ood: str | None = None) -> float | None:
    """Give a number of the paper as a fraction; None where it has none.

    Args:
        table: "sota", "finegrained", "ood" or "over_under".
        method: a loss by its catalogue name, or "ce+temperature".
        data: the data set.
        model: the network.
        metric: "ece", "aece", "accuracy", "over_ece", "under_ece" or "auroc".
        ood: the OOD data set of an AUROC.
    """
    return _numbers().get((table, method, data, model, metric, ood))


def printed_summaries(table: str) -> dict[str, dict[str, float]]:
    """Give what the paper prints about a method over all data sets: mean accuracy in percent, and mean ranks."""
    found: dict[str, dict[str, float]] = {}
    for row in _paper()["summaries"]:
        if row["table"] == table and not row.get("commented_out"):
            found.setdefault(row["method"], {})[row["metric"]] = row["value"]
    return found


def methods(table: str) -> dict[str, str]:
    """List the methods of a table in the paper's order, with the paper's names."""
    order = dict.fromkeys(
        row["method"] for row in _paper()["numbers"] if row["table"] == table and not row.get("commented_out")
    )
    return {method: _paper()["methods"][method] for method in order}


def data_sets(table: str) -> tuple[str, ...]:
    """List the data sets of a table, in the paper's order."""
    return tuple(dict.fromkeys(row["data"] for row in _paper()["numbers"] if row["table"] == table))


def places(table: str) -> tuple[tuple[str, str], ...]:
    """List the data sets of a table with their networks; what is printed about a method as a whole is about them."""
    return tuple(dict.fromkeys((row["data"], row["model"]) for row in _paper()["numbers"] if row["table"] == table))


def mean_accuracies(table: str) -> dict[str, float]:
    """Give the mean accuracy over all places of a table that the paper prints for a method, as a fraction."""
    found = printed_summaries(table)
    return {method: held["mean_Acc"] / 100 for method, held in found.items() if "mean_Acc" in held}


def ood_data(table: str, data: str) -> tuple[str, ...]:
    """Return the OOD data sets of a data set in a table."""
    rows = (row for row in _paper()["numbers"] if row["table"] == table and row["data"] == data and "ood" in row)
    return tuple(dict.fromkeys(row["ood"] for row in rows))


def data_name(data: str) -> str:
    """Return the paper's name of a data set; the name itself if the paper does not have it."""
    return str(_paper()["data"].get(data, data))
