"""Every metric a second time, in exact rational arithmetic, for the campaign to compare with.

Probabilities and labels are lists of `Fraction`, taken from the very numbers that a metric was given; nothing is shared
with the library but the rule by which an edge is rounded to the type of the confidences. Functions have the names of
the metrics, so that a metric of the library finds its own; roots and logarithms are taken last, in float64.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

import torch

Row = Sequence[Fraction]


@dataclass(frozen=True)
class Table:
    """Rows of probabilities and of labels, both exact, and the type that the probabilities came in."""

    probs: Sequence[Row]
    labels: Sequence[Row]
    dtype: torch.dtype
    soft: bool = False

    @property
    def n(self) -> int:
        return len(self.probs)

    @property
    def classes(self) -> int:
        return len(self.probs[0])

    @cached_property
    def tops(self) -> list[tuple[Fraction, Fraction]]:
        """Confidence of every row, and the share of its label on that class; of equal ones the first."""
        places = [row.index(max(row)) for row in self.probs]
        return [(p[k], y[k]) for k, p, y in zip(places, self.probs, self.labels, strict=True)]

    def column(self, k: int) -> list[tuple[Fraction, Fraction]]:
        return [(p[k], y[k]) for p, y in zip(self.probs, self.labels, strict=True)]


@cache
def inner_edges(bins: int, dtype: torch.dtype) -> list[Fraction]:
    edges = (torch.arange(1, bins, dtype=torch.float64) / bins).to(dtype).double()
    return [Fraction(edge) for edge in edges.tolist()]


def width_bins(pairs: list[tuple[Fraction, Fraction]], bins: int, dtype: torch.dtype) -> list[list[int]]:
    return sorted_into(pairs, inner_edges(bins, dtype), bins)


def mass_bins(pairs: list[tuple[Fraction, Fraction]], bins: int) -> list[list[int]]:
    ranked, n = sorted(c for c, _ in pairs), len(pairs)
    ends = [b * (n // bins) + min(b, n % bins) for b in range(1, bins)]
    return sorted_into(pairs, [ranked[max(end - 1, 0)] for end in ends], bins)


def sorted_into(pairs: list[tuple[Fraction, Fraction]], inner: list[Fraction], bins: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(bins)]
    for i, (confidence, _) in enumerate(pairs):
        found[bisect_left(inner, confidence)].append(i)
    return found


def gaps(pairs: list[tuple[Fraction, Fraction]], filled: list[list[int]]) -> list[tuple[int, Fraction]]:
    """How many samples each filled bin holds, and their confidence minus their correctness, added up."""
    return [(len(one), sum((pairs[i][0] - pairs[i][1] for i in one), Fraction())) for one in filled if one]


def top_gaps(table: Table, bins: int) -> list[tuple[int, Fraction]]:
    return gaps(table.tops, width_bins(table.tops, bins, table.dtype))


def ece(table: Table, bins: int = 15) -> float:
    return float(sum(abs(gap) for _, gap in top_gaps(table, bins)) / table.n)


def aece(table: Table, bins: int = 15) -> float:
    return float(sum(abs(gap) for _, gap in gaps(table.tops, mass_bins(table.tops, bins))) / table.n)


def classwise_ece(table: Table, bins: int = 15) -> float:
    each = [gaps(table.column(k), width_bins(table.column(k), bins, table.dtype)) for k in range(table.classes)]
    return float(sum(abs(gap) for one in each for _, gap in one) / table.n / table.classes)


def over_under(table: Table, bins: int = 15) -> tuple[float, float]:
    found = [gap for _, gap in top_gaps(table, bins)]
    over, under = (sum((max(sign * gap, Fraction()) for gap in found), Fraction()) for sign in (1, -1))
    return float(over / table.n), float(under / table.n)


def signed_ece(table: Table, bins: int = 15) -> float:
    return float(sum(gap for _, gap in top_gaps(table, bins)) / table.n)


def mce(table: Table, bins: int = 15) -> float:
    return float(max(abs(gap) / count for count, gap in top_gaps(table, bins)))


def rms_error(table: Table, bins: int = 15) -> float:
    return math.sqrt(sum(gap**2 / count for count, gap in top_gaps(table, bins)) / table.n)


lp_error = rms_error  # p = 2 is its default


def debiased_l2(table: Table, bins: int = 15) -> float:
    total = Fraction()
    for one in mass_bins(table.tops, bins):
        if len(one) >= 2:
            count = len(one)
            gap = sum((table.tops[i][0] - table.tops[i][1] for i in one), Fraction()) / count
            right = sum((table.tops[i][1] for i in one), Fraction()) / count
            total += (gap**2 - right * (1 - right) / (count - 1)) * count / table.n
    return math.sqrt(max(total, 0))


def accuracy(table: Table) -> float:
    return float(sum(correct for _, correct in table.tops) / table.n)


def top_k(table: Table, k: int = 5) -> float:
    total = Fraction()
    for p, y in zip(table.probs, table.labels, strict=True):
        best = sorted(range(len(p)), key=lambda j: (-p[j], j))[:k]
        total += sum(y[j] for j in best)
    return float(total / table.n)


def brier(table: Table) -> float:
    rows = zip(table.probs, table.labels, strict=True)
    return float(sum((p - y) ** 2 for ps, ys in rows for p, y in zip(ps, ys, strict=True)) / table.n)


def nll(table: Table) -> float:
    floor = Fraction(torch.finfo(table.dtype).tiny * torch.finfo(table.dtype).eps)
    rows = zip(table.probs, table.labels, strict=True)
    return (
        math.fsum(-float(y) * math.log(max(p, floor)) for ps, ys in rows for p, y in zip(ps, ys, strict=True) if y)
        / table.n
    )


def risks(table: Table) -> list[Fraction]:
    """The risk at every coverage, where samples of equal confidence count as their mean."""
    tops = table.tops
    groups: dict[Fraction, list[Fraction]] = {}
    for confidence, correct in tops:
        groups.setdefault(confidence, []).append(1 - correct)
    found, total, seen = [], Fraction(), 0
    for confidence in sorted(groups, reverse=True):
        wrong = groups[confidence]
        for _ in wrong:
            total, seen = total + sum(wrong) / len(wrong), seen + 1
            found.append(total / seen)
    return found


def risk_coverage(table: Table) -> list[float]:
    return [float(risk) for risk in risks(table)]


def aurc(table: Table) -> float:
    return float(sum(risks(table)) / table.n)


def e_aurc(table: Table) -> float:
    wrong = sorted(1 - correct for _, correct in table.tops)
    best = sum(sum(wrong[:k]) / k for k in range(1, table.n + 1)) / table.n
    return float(sum(risks(table)) / table.n - best)


def augrc(table: Table) -> float:
    return float(sum(risk * k for k, risk in enumerate(risks(table), 1)) / table.n**2)


def risk_at_coverage(table: Table) -> float:
    return float(risks(table)[math.ceil(Fraction(4, 5) * table.n) - 1])


def coverage_at_risk(table: Table) -> float:
    allowed = Fraction(1, 20) + Fraction(1, 10**12)
    return max((k / table.n for k, risk in enumerate(risks(table), 1) if risk <= allowed), default=0.0)


def walk(table: Table) -> list[Fraction]:
    tops = sorted(table.tops)
    found, total = [Fraction()], Fraction()
    for i, (confidence, correct) in enumerate(tops):
        total += correct - confidence
        if i + 1 == len(tops) or tops[i + 1][0] != confidence:
            found.append(total / table.n)
    return found


def ks_test(table: Table) -> float:
    return float(max(abs(step) for step in walk(table)))


def kuiper_test(table: Table) -> float:
    return float(max(walk(table)) - min(walk(table)))


def spiegelhalter_test(table: Table) -> float:
    tops = table.tops
    spread = sum((1 - 2 * c) ** 2 * c * (1 - c) for c, _ in tops)
    total = sum((y - c) * (1 - 2 * c) for c, y in tops)
    if spread <= 0:  # a confidence that rounding put above one has a negative one
        return math.nan if spread < 0 else math.copysign(math.inf, total) if total else 0.0
    return float(total) / math.sqrt(spread)


def histogram(table: Table, bins: int = 15) -> list[float]:
    return [float(len(one)) for one in width_bins(table.tops, bins, table.dtype)]


@cache
def oracle_of(name: str) -> Callable[..., object] | None:
    """Find the exact twin of a metric, or of the stream of the same name."""
    twins = {key.replace("_", ""): value for key, value in globals().items() if callable(value)}
    return twins.get(name.replace("_", "").lower()) if not name.startswith("_") else None
