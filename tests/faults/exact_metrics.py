"""Reference implementations of all metrics in exact rational arithmetic, for the campaign on numbers.

Probabilities and labels are lists of `Fraction`, converted exactly from the inputs of a metric. Nothing is shared with
the library except the rule for rounding bin edges to the dtype of the confidences. Functions have the names of the
metrics, by which they are looked up; roots and logarithms are computed last, in float64.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property

import torch

Row = Sequence[Fraction]


@dataclass(frozen=True)
class Table:
    """Exact rows of probabilities and labels, the original dtype of the probabilities, and the scope."""

    probs: Sequence[Row]
    labels: Sequence[Row]
    dtype: torch.dtype
    soft: bool = False
    scope: str = "top-label"

    @property
    def n(self) -> int:
        return len(self.probs)

    @property
    def classes(self) -> int:
        return len(self.probs[0])

    @cached_property
    def tops(self) -> list[tuple[Fraction, Fraction]]:
        """Return the confidence of every row and the label weight of that class (the first of equal ones)."""
        if self.scope == "positive":
            return self.column(self.classes - 1)
        predicted_classes = [row.index(max(row)) for row in self.probs]
        return [(p[k], y[k]) for k, p, y in zip(predicted_classes, self.probs, self.labels, strict=True)]

    @cached_property
    def predicted(self) -> list[tuple[Fraction, Fraction]]:
        """Like `tops`, but a binary probability p counts as max(p, 1 - p), with 1 - p rounded to the dtype."""
        if self.scope != "positive":
            return self.tops
        return [(c, y) if c > Fraction(1, 2) else (self._complement(c), 1 - y) for c, y in self.tops]

    def _complement(self, confidence: Fraction) -> Fraction:
        return Fraction(float(1 - torch.tensor(float(confidence), dtype=self.dtype)))

    @cached_property
    def parts(self) -> list[list[tuple[Fraction, Fraction]]]:
        """Return the groups of pairs that are binned together: all pairs, or those of each class."""
        return [self.column(k) for k in range(self.classes)] if self.scope == "class-wise" else [self.tops]

    def column(self, k: int) -> list[tuple[Fraction, Fraction]]:
        return [(p[k], y[k]) for p, y in zip(self.probs, self.labels, strict=True)]


@cache
def inner_edges(bins: int, dtype: torch.dtype) -> list[Fraction]:
    edges = (torch.arange(1, bins, dtype=torch.float64) / bins).to(dtype).double()
    return [Fraction(edge) for edge in edges.tolist()]


Pair = tuple[Fraction, Fraction]


def binned(table: Table, pairs: list[Pair], bins: int, binning: str = "width") -> list[list[int]]:
    """Return the sample numbers in each bin."""
    if binning == "width":
        return sorted_into(pairs, inner_edges(bins, table.dtype), bins)
    ranked, n = sorted(c for c, _ in pairs), len(pairs)
    bin_ends = [b * (n // bins) + min(b, n % bins) for b in range(1, bins)]
    return sorted_into(pairs, [ranked[max(end - 1, 0)] for end in bin_ends], bins)


def sorted_into(pairs: list[Pair], inner: list[Fraction], bins: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(bins)]
    for i, (confidence, _) in enumerate(pairs):
        result[bisect_left(inner, confidence)].append(i)
    return result


def binned_like(table: Table, pairs: list[Pair], bins: int, compat: str) -> tuple[list[Pair], list[list[int]]]:
    """Bin by the rules of another package (equal width only), including its rounding of confidences."""
    if compat == "official":
        edges = torch.linspace(0, 1, bins + 1).to(table.dtype).double()
        return pairs, sorted_into(pairs, [Fraction(edge) for edge in edges[1:-1].tolist()], bins)
    if compat == "uncertainty-calibration":
        return pairs, sorted_into(pairs, [Fraction(b / bins) for b in range(1, bins)], bins)
    if compat == "torchmetrics":
        pairs = [(Fraction(float(torch.tensor(float(c), dtype=torch.float32))), y) for c, y in pairs]
        inner = [Fraction(edge) for edge in torch.linspace(0, 1, bins + 1).double()[1:].tolist()]
    else:
        inner = [Fraction(b * (1 / bins)) for b in range(1, bins)]
    result: list[list[int]] = [[] for _ in range(len(inner) + 1)]
    for i, (confidence, _) in enumerate(pairs):
        result[bisect_right(inner, confidence)].append(i)
    return pairs, result


def gaps(
    table: Table, bins: int, binning: str = "width", compat: str | None = None
) -> list[list[tuple[int, Fraction, Fraction]]]:
    """Return the count, summed gap (confidence minus correctness) and summed correctness of each non-empty bin."""
    result = []
    for pairs in table.parts:
        compared_pairs, bin_indices = (
            (pairs, binned(table, pairs, bins, binning))
            if compat is None
            else (binned_like(table, pairs, bins, compat))
        )
        binned_pairs = [[compared_pairs[i] for i in indices] for indices in bin_indices if indices]
        result.append([
            (len(part), sum((c - y for c, y in part), Fraction()), sum((y for _, y in part), Fraction()))
            for part in binned_pairs
        ])  # fmt: skip
    return result


def mean_over(table: Table, sums: list[Fraction]) -> Fraction:
    """Return the mean over classes (or the only value) of sums over samples."""
    return sum(sums, Fraction()) / table.n / len(sums)


def ece(table: Table, bins: int = 15, binning: str = "width", compat: str | None = None) -> float:
    sums = [sum((abs(gap) for _, gap, _ in item), Fraction()) for item in gaps(table, bins, binning, compat)]
    return float(mean_over(table, sums))


def aece(table: Table, bins: int = 15) -> float:
    return ece(table, bins, "mass")


def classwise_ece(table: Table, bins: int = 15, binning: str = "width", compat: str | None = None) -> float:
    return ece(replace(table, scope="class-wise"), bins, binning, compat)


def over_ece(table: Table, bins: int = 15, binning: str = "width", compat: str | None = None, sign: int = 1) -> float:
    result = gaps(table, bins, binning, compat)
    sums = [sum((max(sign * gap, Fraction()) for _, gap, _ in item), Fraction()) for item in result]
    return float(mean_over(table, sums))


def under_ece(table: Table, bins: int = 15, binning: str = "width", compat: str | None = None) -> float:
    return over_ece(table, bins, binning, compat, sign=-1)


def signed_ece(table: Table, bins: int = 15, binning: str = "width", compat: str | None = None) -> float:
    result = gaps(table, bins, binning, compat)
    return float(mean_over(table, [sum((gap for _, gap, _ in item), Fraction()) for item in result]))


def mce(table: Table, bins: int = 15, binning: str = "width", compat: str | None = None) -> float:
    return float(max(abs(gap) / count for item in gaps(table, bins, binning, compat) for count, gap, _ in item))


def rms_error(table: Table, bins: int = 15, binning: str = "width", compat: str | None = None) -> float:
    result = gaps(table, bins, binning, compat)
    return math.sqrt(mean_over(table, [sum((gap**2 / count for count, gap, _ in item), Fraction()) for item in result]))


def lp_error(table: Table, bins: int = 15, p: float = 2, binning: str = "width", compat: str | None = None) -> float:
    if p == 2:
        return rms_error(table, bins, binning, compat)
    result = gaps(table, bins, binning, compat)
    total = math.fsum(count * float(abs(gap) / count) ** p for item in result for count, gap, _ in item)
    return (total / table.n / len(result)) ** (1 / p)


def debiased_l2(table: Table, bins: int = 15, binning: str = "mass", compat: str | None = None) -> float:
    sums = []
    for item in gaps(table, bins, binning, compat):
        total = Fraction()
        for count, gap, correct in item:
            if count >= 2:
                rate = correct / count
                total += ((gap / count) ** 2 - rate * (1 - rate) / (count - 1)) * count
        sums.append(max(total, Fraction()))
    return math.sqrt(mean_over(table, sums))


def accuracy(table: Table) -> float:
    return float(sum(correct for _, correct in table.predicted) / table.n)


def top_k(table: Table, k: int = 5) -> float:
    total = Fraction()
    for p, y in zip(table.probs, table.labels, strict=True):
        best = sorted(range(len(p)), key=lambda j: (-p[j], j))[:k]
        total += sum(y[j] for j in best)
    return float(total / table.n)


def top_5(table: Table) -> float:
    return top_k(table, 5)


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
    """Return the risk at every coverage, averaging over samples of equal confidence."""
    tops = table.predicted
    groups: dict[Fraction, list[Fraction]] = {}
    for confidence, correct in tops:
        groups.setdefault(confidence, []).append(1 - correct)
    result, total, count = [], Fraction(), 0
    for confidence in sorted(groups, reverse=True):
        errors = groups[confidence]
        for _ in errors:
            total, count = total + sum(errors) / len(errors), count + 1
            result.append(total / count)
    return result


def risk_coverage(table: Table) -> list[float]:
    return [float(risk) for risk in risks(table)]


def aurc(table: Table) -> float:
    return float(sum(risks(table)) / table.n)


def e_aurc(table: Table) -> float:
    errors = sorted(1 - correct for _, correct in table.predicted)
    best = sum(sum(errors[:k]) / k for k in range(1, table.n + 1)) / table.n
    return float(sum(risks(table)) / table.n - best)


def augrc(table: Table) -> float:
    return float(sum(risk * k for k, risk in enumerate(risks(table), 1)) / table.n**2)


def risk_at_coverage(table: Table, coverage: float = 0.8) -> float:
    fraction = Fraction(str(coverage))  # 0.7 is meant as seven tenths
    return float(risks(table)[max(math.ceil(fraction * table.n), 1) - 1])


def coverage_at_risk(table: Table, risk: float = 0.05) -> float:
    allowed = Fraction(str(risk)) + Fraction(1, 10**12)
    return max((k / table.n for k, result in enumerate(risks(table), 1) if result <= allowed), default=0.0)


def cumulative_gaps(table: Table) -> list[Fraction]:
    tops = sorted(table.tops)
    result, total = [Fraction()], Fraction()
    for i, (confidence, correct) in enumerate(tops):
        total += correct - confidence
        if i + 1 == len(tops) or tops[i + 1][0] != confidence:
            result.append(total / table.n)
    return result


def ks_test(table: Table) -> float:
    return float(max(abs(step) for step in cumulative_gaps(table)))


def kuiper_test(table: Table) -> float:
    return float(max(cumulative_gaps(table)) - min(cumulative_gaps(table)))


def spiegelhalter_test(table: Table) -> float:
    tops = table.tops
    variance = sum((1 - 2 * c) ** 2 * c * (1 - c) for c, _ in tops)
    total = sum((y - c) * (1 - 2 * c) for c, y in tops)
    if variance <= 0:  # a confidence that rounding put above one has a negative one
        return math.nan if variance < 0 else math.copysign(math.inf, total) if total else 0.0
    return float(total) / math.sqrt(variance)


def histogram(table: Table, bins: int = 15, binning: str = "width", compat: str | None = None) -> list[float]:
    result = []
    for pairs in table.parts:
        if compat is None:
            bin_indices = binned(table, pairs, bins, binning)
        else:
            _, bin_indices = binned_like(table, pairs, bins, compat)
        result += [float(len(item)) for item in bin_indices]
    return result


@cache
def oracle_of(name: str) -> Callable[..., object] | None:
    """Return the reference implementation of a metric or of its accumulator."""
    not_metrics = {"binned", "gaps", "risks", "cumulative_gaps", "replace", "cache"}
    references = {
        key.replace("_", ""): value for key, value in globals().items() if callable(value) and key not in not_metrics
    }
    return references.get(name.replace("_", "").lower()) if not name.startswith("_") else None
