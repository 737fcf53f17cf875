"""Comparison of several methods on several data sets by mean ranks, with the Friedman and Nemenyi tests.

Rank 1 is best. Ties share the smallest of their ranks, as in the paper's tables; the Friedman test and the critical
difference of Nemenyi use average ranks:  CD = q_alpha sqrt(k (k + 1) / (6 N)) for k methods on N data sets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fedlas import formatting
from fedlas.errors import UserError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class MeanRanks:
    """Mean ranks of methods over data sets, best first, and tests of their differences.

    Args:
        ranks: mean rank of each method, with the smallest rank for ties.
        average_ranks: mean rank of each method, with the average rank for ties; used by the tests.
        datasets: number of data sets.
        critical_difference: smallest significant difference of two average ranks.
        p_value: p-value of the Friedman test.
        alpha: significance level.
    """

    ranks: Mapping[str, float]
    average_ranks: Mapping[str, float]
    datasets: int
    critical_difference: float
    p_value: float
    alpha: float

    def differ(self, first: str, second: str) -> bool:
        """Return whether two methods differ significantly."""
        return abs(self.average_ranks[first] - self.average_ranks[second]) >= self.critical_difference

    def __str__(self) -> str:
        best = next(iter(self.ranks))
        worse = [name for name in self.ranks if self.differ(best, name)]
        verdict = (
            f"{best} differs significantly from {', '.join(worse)}"
            if worse
            else f"no method differs significantly from {best}"
        )
        return (
            f"{len(self.ranks)} methods on {self.datasets} data sets: Friedman {formatting.p_value(self.p_value)}, "
            f"critical difference {formatting.fixed(self.critical_difference, 2)} (Nemenyi, "
            f"{formatting.level(self.alpha)}): {verdict}"
        )


def mean_ranks(
    table: Mapping[str, Sequence[float]], *, higher_is_better: bool = False, alpha: float = 0.05
) -> MeanRanks:
    """Return the mean ranks of methods, with tests of their differences.

    Args:
        table: values of each method, one per data set.
        higher_is_better: whether rank 1 goes to the largest value.
        alpha: level of the critical difference.
    """
    methods = list(table)
    if len(methods) < 2:
        raise UserError("at least two methods are needed to rank them")
    lengths = {len(values) for values in table.values()}
    if len(lengths) != 1 or not min(lengths):
        raise UserError(f"every method needs a value on every data set; lengths are {sorted(lengths)}")
    values = np.array([list(table[name]) for name in methods], dtype=np.float64)
    if np.isnan(values).any():
        row, column = (int(i) for i in np.argwhere(np.isnan(values))[0])
        raise UserError(f"{methods[row]} has no value on data set {column}")
    signed = -values if higher_is_better else values
    ranks = scipy.stats.rankdata(signed, axis=0)  # equal values share their mean rank
    smallest, average = scipy.stats.rankdata(signed, method="min", axis=0).mean(1), ranks.mean(1)
    order = np.argsort(smallest, kind="stable")
    count, datasets = values.shape
    studentised_range = float(scipy.stats.studentized_range.ppf(1 - alpha, count, np.inf))
    return MeanRanks(
        ranks={methods[i]: float(smallest[i]) for i in order},
        average_ranks={methods[i]: float(average[i]) for i in order},
        datasets=datasets,
        critical_difference=studentised_range / math.sqrt(2) * math.sqrt(count * (count + 1) / (6 * datasets)),
        p_value=_friedman(ranks),
        alpha=alpha,
    )


def _friedman(ranks: Floats) -> float:
    methods, datasets = ranks.shape
    between = ((ranks.mean(1) - (methods + 1) / 2) ** 2).sum() * datasets
    within = ((ranks - (methods + 1) / 2) ** 2).sum() / (datasets * (methods - 1))
    if within == 0:
        return 1.0
    return float(scipy.special.gammaincc((methods - 1) / 2, between / within / 2))
