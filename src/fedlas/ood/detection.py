"""Metrics of out-of-distribution (OOD) detection: AUROC, AUPR and FPR at a given TPR, with confidence intervals.

A higher score means more likely OOD. With n in-distribution (ID) scores x and m OOD scores y:

    AUROC         P(x < y) + P(x = y) / 2
    AUPR          sum over thresholds of (increase in recall) x (precision): the average precision
    FPR at TPR t  fraction of negatives at or above the highest threshold with a true-positive rate of at least t

Only the order of scores matters. Scores are sorted without any transformation and counted in int64; tied samples are
counted together, so the result does not depend on the order of the samples. Infinite scores are ranked like others.
OOD samples are the positives; with `positive="id"`, ID samples are the positives and low scores detect them.

The confidence intervals need no bootstrap:

    AUROC   DeLong's variance with ties, on the logit scale. If it is zero (all pairs concordant, discordant or tied):
            the Clopper-Pearson bound (alpha / 2)^(1 / min(n, m)) from min(n, m) pairs that share no sample.
    AUPR    Delta method: the variance of the influence function, on the logit scale. If it is zero: the AUPR of the
            worst and best population, with an unobserved fraction of up to 1 - (alpha / 4)^(1 / n) of either class
            beyond all observed scores.
    both    The lower limit is at most that of a perfect ranking, the upper limit at least that of a reversed one:
            with few samples and little overlap the estimated variance is too small.
    FPR     10,000 draws of the binomial number of positives above the true threshold, and of the rate of negatives
            above it from the Clopper-Pearson confidence distribution. Valid for rates of 0 and 1 too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import NormalDist, fmean
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor

from fedlas.errors import UserError, UserTypeError
from fedlas.formatting import align_columns, html_table
from fedlas.metrics.bin_sums import exact
from fedlas.metrics.result import Definition, Interval, Result, check_level
from fedlas.ood.scores import available_scores, score_of
from fedlas.predictions import AnyPredictions, Predictions, check_same_classes
from fedlas.predictions.arrays import Array, are_probabilities, as_tensor, check_rows, float32_or_better

Positive = Literal["ood", "id"]

DRAWS = 10_000


@dataclass(frozen=True)
class Ranking:
    """Counts of positives and negatives at each distinct score, in the order in which a threshold reaches them.

    Args:
        scores: the distinct scores, descending if OOD samples are the positives, else ascending.
        positives: number of positives with each score.
        negatives: number of negatives with each score.
        positive: which samples are the positives.
        dtype: type of the input scores.
    """

    scores: Float[Tensor, " groups"]
    positives: Int64[Tensor, " groups"]
    negatives: Int64[Tensor, " groups"]
    positive: Positive = "ood"
    dtype: str = ""

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of positives and of negatives."""
        return int(self.positives.sum()), int(self.negatives.sum())

    def reversed(self) -> "Ranking":
        """Return the ranking with the other class as positives, from the other end."""
        other: Positive = "id" if self.positive == "ood" else "ood"
        return Ranking(self.scores.flip(0), self.negatives.flip(0), self.positives.flip(0), other, self.dtype)

    def define(self, estimator: str, norm: str) -> Definition:
        """Return the definition of a metric of this ranking, which names the positive class."""
        sign = "higher score = OOD" if self.positive == "ood" else "lower score = ID"
        scope = f"{self.positive.upper()} positive, {sign}"
        return Definition(estimator, norm=norm, scope=scope, n=sum(self.sizes), dtype=self.dtype)

    def details(self) -> dict[str, Any]:
        """Return the number of ID and OOD samples, and which of them are the positives."""
        positives, negatives = self.sizes
        n_id, n_ood = (negatives, positives) if self.positive == "ood" else (positives, negatives)
        return {"n_id": n_id, "n_ood": n_ood, "positive": self.positive}


def ranking(id_scores: Array, ood_scores: Array, positive: Positive = "ood") -> Ranking:
    """Sort ID and OOD scores together and count the samples of each at every distinct score."""
    _check_positive(positive)
    x, y = _check_scores(id_scores, "id_scores"), _check_scores(ood_scores, "ood_scores")
    dtype = str(torch.promote_types(x.dtype, y.dtype)).removeprefix("torch.")
    both, order = torch.cat([float32_or_better(x), float32_or_better(y).to(x.device)]).sort(descending=True)
    last = torch.cat([both[1:] != both[:-1], torch.ones(1, dtype=torch.bool, device=both.device)]).nonzero()[:, 0]
    detected = (order >= len(x)).cumsum(0)[last]
    positives, negatives = (torch.diff(total, prepend=total.new_zeros(1)) for total in (detected, last + 1 - detected))
    ranked = Ranking(both[last], positives, negatives, "ood", dtype)
    return ranked if positive == "ood" else ranked.reversed()


def auroc(id_scores: Array, ood_scores: Array, *, level: float = 0.95) -> Result:
    """Area under the ROC curve: the probability that an OOD sample scores above an ID sample; ties count half.

    Args:
        id_scores: one score per in-distribution sample; a higher score means more likely OOD.
        ood_scores: one score per OOD sample.
        level: confidence level of the interval.
    """
    return auroc_of(ranking(id_scores, ood_scores), level)


def aupr(id_scores: Array, ood_scores: Array, *, positive: Positive = "ood", level: float = 0.95) -> Result:
    """Area under the precision-recall curve, as the average precision.

    Unlike the AUROC it depends on the class balance: an uninformative score reaches the fraction of positives, which is
    `details["chance"]`.

    Args:
        id_scores: one score per in-distribution sample; a higher score means more likely OOD.
        ood_scores: one score per OOD sample.
        positive: "ood" detects OOD samples by high scores, "id" detects ID samples by low scores.
        level: confidence level of the interval.
    """
    return aupr_of(ranking(id_scores, ood_scores, positive), level)


def fpr_at_tpr(
    id_scores: Array,
    ood_scores: Array,
    tpr: float = 0.95,
    *,
    positive: Positive = "ood",
    level: float = 0.95,
    seed: int = 0,
) -> Result:
    """False-positive rate at the strictest threshold whose true-positive rate is at least `tpr`.

    `details` holds the threshold and its true-positive rate.

    Args:
        id_scores: one score per in-distribution sample; a higher score means more likely OOD.
        ood_scores: one score per OOD sample.
        tpr: true-positive rate.
        positive: "ood": the rate of ID samples detected as OOD; "id": the rate of OOD samples accepted as ID. Papers
            and their code differ in which of the two they call FPR95.
        level: confidence level of the interval.
        seed: random seed of the interval.
    """
    return fpr_of(ranking(id_scores, ood_scores, positive), tpr, level, seed)


def auroc_of(ranked: Ranking, level: float = 0.95) -> Result:
    """Return the AUROC of a ranking."""
    check_level(level)
    m, n = ranked.sizes
    below = n - ranked.negatives.cumsum(0)
    # Twice the number of concordant pairs, an integer of at most 2 n m, which fits into int64.
    value = int((ranked.positives * (2 * below + ranked.negatives)).sum()) / (2 * n * m)
    definition = ranked.define("AUROC", "ties count half")
    return Result(value, definition, _auroc_interval(ranked, value, level), ranked.details())


def aupr_of(ranked: Ranking, level: float = 0.95) -> Result:
    """Return the average precision of a ranking."""
    check_level(level)
    m, n = ranked.sizes
    positives, negatives = exact(ranked.positives), exact(ranked.negatives)
    value = _average_precision(positives, negatives)
    details = ranked.details() | {"chance": m / (n + m)}
    definition = ranked.define(f"AUPR ({ranked.positive.upper()} positive)", "average precision, ties together")
    return Result(value, definition, _aupr_interval(positives, negatives, value, level), details)


def fpr_of(ranked: Ranking, tpr: float = 0.95, level: float = 0.95, seed: int = 0) -> Result:
    """Return the false-positive rate of a ranking at a true-positive rate."""
    check_level(level)
    if not 0 < tpr <= 1:
        raise UserError(f"tpr is {tpr}; it must be above 0 and at most 1")
    m, n = ranked.sizes
    true, false = (x.cumsum(0).cpu().numpy() for x in (ranked.positives, ranked.negatives))
    # The quotient of two integers is the nearest float, and so is a tpr of that value.
    index = int(np.argmax(true / m >= tpr))
    threshold = {"threshold": float(ranked.scores[index]), "tpr": float(true[index] / m)}
    value = float(false[index] / n)
    low, high = _fpr_range(true, false, tpr, level, np.random.default_rng(seed))
    interval = Interval(min(low, value), max(high, value), level, "binomial threshold, Clopper-Pearson rate")
    definition = ranked.define(f"FPR at {100 * tpr:g} % TPR ({ranked.positive.upper()} positive)", "ties together")
    return Result(value, definition, interval, ranked.details() | threshold)


@dataclass(frozen=True)
class Separation:
    """Detection metrics of one score on one OOD data set.

    Args:
        auroc: area under the ROC curve.
        aupr_out: average precision with OOD samples as positives.
        aupr_in: average precision with ID samples as positives.
        fpr: false-positive rate at the chosen true-positive rate.
    """

    auroc: Result
    aupr_out: Result
    aupr_in: Result
    fpr: Result

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {field.name: getattr(self, field.name).to_dict() for field in FIELDS}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "Separation":
        """Restore from the output of `to_dict`."""
        return cls(**{field.name: Result.from_dict(numbers[field.name]) for field in FIELDS})


FIELDS = fields(Separation)


@dataclass(frozen=True)
class Detection:
    """Detection metrics of all scores on all OOD data sets: `detection["svhn"]["entropy"].auroc`.

    Args:
        sets: the metrics, by name of the OOD data set and name of the score.
    """

    sets: Mapping[str, Mapping[str, Separation]]

    def __getitem__(self, name: str) -> Mapping[str, Separation]:
        return self.sets[name]

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores."""
        return tuple(next(iter(self.sets.values())))

    @property
    def mean(self) -> Mapping[str, Separation]:
        """Mean of each metric over the OOD data sets, with equal weights.

        It has no intervals: those of the sets cannot be combined, as all sets share the ID samples.
        """
        return {score: _mean({name: by_score[score] for name, by_score in self.sets.items()}) for score in self.scores}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values that JSON can store."""
        sets = {
            name: {score: separation.to_dict() for score, separation in by_score.items()}
            for name, by_score in self.sets.items()
        }
        return {"sets": sets, "mean": {score: separation.to_dict() for score, separation in self.mean.items()}}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "Detection":
        """Restore from the output of `to_dict`."""
        sets = {
            name: {score: Separation.from_dict(values) for score, values in by_score.items()}
            for name, by_score in numbers["sets"].items()
        }
        return cls(sets)

    def rows(self) -> list[list[str]]:
        """Return a table: a header, and a row for each OOD data set and score."""
        blocks = [*self.sets.items(), *([("mean", self.mean)] if len(self.sets) > 1 else [])]
        first = next(iter(self.sets.values()))[self.scores[0]]
        head = ["OOD set", "score", *(getattr(first, f.name).heading() for f in FIELDS)]
        body = [
            [name if score == self.scores[0] else "", score, *(getattr(separation, f.name).cell() for f in FIELDS)]
            for name, block in blocks
            for score, separation in block.items()
        ]
        return [head, *body]

    def _repr_html_(self) -> str:
        """Show the numbers in a notebook."""
        return html_table(self.rows(), "OOD detection")

    def __str__(self) -> str:
        first = next(iter(self.sets.values()))[self.scores[0]]
        level = f"[low, high] at {100 * first.auroc.interval.level:g} %; " if first.auroc.interval else ""
        return "\n".join([*align_columns(self.rows()), f"{level}AUPR: average precision; {_describe_rate(first.fpr)}"])


def detect(
    predictions: AnyPredictions,
    ood: Mapping[str, AnyPredictions | Array],
    scores: Sequence[str] | None = None,
    *,
    tpr: float = 0.95,
    positive: Positive = "ood",
    level: float = 0.95,
    seed: int = 0,
) -> Detection:
    """Evaluate out-of-distribution detection (AUROC, AUPR, FPR at a given TPR) from predictions.

    Args:
        predictions: predictions on in-distribution samples.
        ood: predictions on each OOD data set, by its name; or an array of what the in-distribution predictions were
            built from, logits or probabilities.
        scores: names of scores; by default all that can be computed from all the given predictions.
        tpr: true-positive rate at which the false-positive rate is measured.
        positive: the positives of the false-positive rate: "ood" (as in OpenOOD) or "id".
        level: confidence level of the intervals.
        seed: random seed of the intervals of the false-positive rate.
    """
    if not isinstance(predictions, AnyPredictions):
        raise UserTypeError(
            f"detect takes Predictions, not {type(predictions).__name__}: pass Predictions.from_probs(probs) or "
            "Predictions(logits)"
        )
    ood_sets = {name: as_ood_predictions(name, given, predictions) for name, given in ood.items()}
    if isinstance(scores, str):
        raise UserTypeError(f"scores is {scores!r}; a sequence of names is expected")
    names = available_scores([predictions, *ood_sets.values()]) if scores is None else list(scores)

    def compute(name: str, data: AnyPredictions) -> dict[str, Tensor]:
        try:
            return {score: score_of(data, score) for score in names}
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error

    id_scores = compute("the in-distribution samples", predictions)
    ood_scores = {name: compute(name, given) for name, given in ood_sets.items()}
    split = predictions.split or "ID"
    return detect_scores(id_scores, ood_scores, tpr=tpr, positive=positive, level=level, seed=seed, split=split)


def as_ood_predictions(
    name: str,
    data: AnyPredictions | Array,
    id_predictions: AnyPredictions,
    *,
    declared: bool = False,
    normalize: bool = False,
) -> AnyPredictions:
    """Return predictions on an OOD data set after a check of their classes.

    An array holds what the in-distribution predictions were built from: logits or probabilities.

    Args:
        name: name of the OOD data set.
        data: predictions, or an array.
        id_predictions: predictions on in-distribution samples.
        declared: whether the caller said what arrays hold; else probabilities beside logits raise.
        normalize: divide every row of an array of probabilities by its sum.
    """
    if isinstance(data, AnyPredictions):
        ood = data
    elif isinstance(id_predictions, Predictions) and id_predictions.given_probs is not None:
        ood = Predictions.from_probs(data, normalize=normalize)
    elif not declared and are_probabilities(data):
        raise UserError(
            f"{name} is an array beside predictions with logits, and its rows sum to one; pass "
            f"Predictions.from_probs(...) if they are probabilities, Predictions(...) if they are logits"
        )
    else:
        ood = Predictions(data)
    check_same_classes(ood, name, id_predictions, "the in-distribution samples")
    return ood


def detect_scores(
    id_scores: Mapping[str, Array],
    ood_scores: Mapping[str, Mapping[str, Array]],
    *,
    tpr: float = 0.95,
    positive: Positive = "ood",
    level: float = 0.95,
    seed: int = 0,
    split: str = "ID",
) -> Detection:
    """Evaluate out-of-distribution detection from scores that are already computed.

    Args:
        id_scores: scores of the in-distribution samples, by name of the score.
        ood_scores: scores of each OOD data set, by its name and by name of the score.
        tpr: true-positive rate at which the false-positive rate is measured.
        positive: the positives of the false-positive rate: "ood" (as in OpenOOD) or "id".
        level: confidence level of the intervals.
        seed: random seed of the intervals of the false-positive rate.
        split: name of the in-distribution data.
    """
    _check_positive(positive)
    if not ood_scores or not id_scores:
        raise UserError("at least one score and one OOD data set are needed")
    for name, scores in ood_scores.items():
        if set(scores) != set(id_scores):
            raise UserError(
                f"{name} has the scores {sorted(scores)}, the in-distribution samples have {sorted(id_scores)}"
            )
    sets: dict[str, Mapping[str, Separation]] = {}
    for name, scores in ood_scores.items():
        rows: dict[str, Separation] = {}
        for score, values in id_scores.items():
            out = ranking(values, scores[score])
            turned = out.reversed()
            four = (
                auroc_of(out, level),
                aupr_of(out, level),
                aupr_of(turned, level),
                fpr_of(out if positive == "ood" else turned, tpr, level, seed),
            )
            rows[score] = Separation(*(_labelled(result, score, f"{split} against {name}") for result in four))
        sets[name] = rows
    return Detection(sets)


def _check_scores(values: Array, name: str) -> Float[Tensor, " n"]:
    scores = as_tensor(values, name)
    if scores.ndim != 1:
        raise UserError(f"{name} have shape {tuple(scores.shape)}; one score per sample is expected")
    scores = scores if scores.is_floating_point() else scores.double()
    check_rows(name, scores, ~scores.isnan(), "is not a number")
    return scores


def _check_positive(positive: str) -> None:
    if positive not in get_args(Positive):
        raise UserError(f'positive is {positive!r}; "ood" or "id" is expected')


def _auroc_interval(ranked: Ranking, value: float, level: float) -> Interval:
    m, n = ranked.sizes
    agreed = ((1 - level) / 2) ** (1 / min(m, n))
    if value in {0.0, 1.0} or len(ranked.scores) == 1:
        low, high = {1.0: (agreed, 1.0), 0.0: (0.0, 1 - agreed)}.get(value, (agreed / 2, 1 - agreed / 2))
        return Interval(low, high, level, "Clopper-Pearson of disjoint pairs")
    low, high = _logit_range(value, _auroc_variance(ranked, value), level)
    return Interval(min(low, agreed), max(high, 1 - agreed), level, "DeLong, logit scale")


def _auroc_variance(ranked: Ranking, value: float) -> float:
    m, n = ranked.sizes
    if min(m, n) == 1:
        # The variance within a class cannot be estimated from one sample: use that of a single pair, an upper bound.
        return value * (1 - value)
    positives, negatives = exact(ranked.positives), exact(ranked.negatives)
    beaten = (n - negatives.cumsum(0) + negatives / 2) / n  # fraction of negatives below each positive
    beating = (positives.cumsum(0) - positives / 2) / m  # fraction of positives above each negative
    of_positives = (positives * (beaten - value) ** 2).sum() / (m - 1)
    of_negatives = (negatives * (beating - value) ** 2).sum() / (n - 1)
    return float(of_positives / m + of_negatives / n)


def _logit_range(value: float, variance: float, level: float) -> tuple[float, float]:
    centre = math.log(value) - math.log1p(-value)
    reach = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance) / (value * (1 - value))
    low, high = (0.5 + 0.5 * math.tanh((centre + sign * reach) / 2) for sign in (-1, 1))
    return low, high


def _average_precision(positives: Float64[Tensor, " groups"], negatives: Float64[Tensor, " groups"]) -> float:
    true = positives.cumsum(0)
    precision = true / (true + negatives.cumsum(0))
    return float((positives * precision).sum() / true[-1])


def _aupr_interval(
    positives: Float64[Tensor, " groups"], negatives: Float64[Tensor, " groups"], value: float, level: float
) -> Interval:
    m, n = float(positives.sum()), float(negatives.sum())
    variance = _aupr_variance(positives / m, negatives / n, m, n) if min(m, n) > 1 else 0.0
    if variance < 1e-24 or value == 1:
        low, high = _unseen_range(positives, negatives, level)
        return Interval(min(low, value), max(high, value), level, "least and most favourable unseen shares")
    low, high = _logit_range(value, variance, level)
    best, worst = _extreme_limits(m, n, level)
    return Interval(min(low, best), max(high, worst), level, "delta method, logit scale")


def _extreme_limits(m: float, n: float, level: float) -> tuple[float, float]:
    """Return the lower limit of the AUPR of a perfect ranking of distinct scores, and the upper of a reversed one.

    Sums over positives are replaced by integrals of u / (u + c) over the recall u.
    """
    unseen, wrong_unseen = (1 - ((1 - level) / 4) ** (1 / count) for count in (m, n))
    early, late = n / m * wrong_unseen, n / m * (1 - wrong_unseen)
    least = (1 - unseen) - early * math.log1p((1 - unseen) / early) + unseen * m / (m + n)
    largest = 1 - late * math.log((1 + late) / (unseen + late))
    return least, largest


def _unseen_range(
    positives: Float64[Tensor, " groups"], negatives: Float64[Tensor, " groups"], level: float
) -> tuple[float, float]:
    """Place the largest plausible unobserved fractions at the ends of the ranking, in the worst and the best order."""
    (front, positives), (wrong_front, negatives) = (_set_aside(kind, level) for kind in (positives, negatives))
    none = torch.zeros_like(front)
    low = _average_precision(torch.cat([none, positives, front]), torch.cat([wrong_front, negatives, none]))
    high = _average_precision(torch.cat([front, positives, none]), torch.cat([none, negatives, wrong_front]))
    return low, high


def _set_aside(
    counts: Float64[Tensor, " groups"], level: float
) -> tuple[Float64[Tensor, " 1"], Float64[Tensor, " groups"]]:
    total = counts.sum(0, keepdim=True)
    unseen = 1 - ((1 - level) / 4) ** (1 / total)
    return unseen * total, (1 - unseen) * counts


def _aupr_variance(
    positives: Float64[Tensor, " groups"], negatives: Float64[Tensor, " groups"], m: float, n: float
) -> float:
    """Return the variance of the AUPR: the sum of squared influences; the masses of either class sum to one."""
    true, false = positives.cumsum(0), negatives.cumsum(0)
    total = true + n / m * false
    precision = true / total
    value = (positives * precision).sum()
    # Change of the precision at a score by additional positives, or negatives, at or above it.
    gain, loss = positives * (n / m) * false / total**2, -positives * (n / m) * true / total**2
    later_gain, later_loss = (x.flip(0).cumsum(0).flip(0) for x in (gain, loss))
    of_positives = precision - value + later_gain - (gain * true).sum()
    of_negatives = later_loss - (loss * false).sum()
    spread = (positives * of_positives**2).sum() / (m - 1) + (negatives * of_negatives**2).sum() / (n - 1)
    return float(spread)


def _fpr_range(
    true: NDArray[np.int64], false: NDArray[np.int64], tpr: float, level: float, rng: np.random.Generator
) -> tuple[float, float]:
    m, n = int(true[-1]), int(false[-1])
    # The true threshold lies between the positive of rank `reached` and the next one.
    reached = rng.binomial(m, tpr, DRAWS)
    fewest = np.where(reached > 0, false[np.searchsorted(true, np.maximum(reached, 1))], 0)
    most = np.where(reached < m, false[np.searchsorted(true, np.minimum(reached + 1, m))], n)
    low = np.where(fewest > 0, rng.beta(np.maximum(fewest, 1), n - fewest + 1), 0.0)
    high = np.where(most < n, rng.beta(most + 1, np.maximum(n - most, 1)), 1.0)
    tail = (1 - level) / 2
    return float(np.quantile(low, tail)), float(np.quantile(high, 1 - tail))


def _describe_rate(rate: Result) -> str:
    """Explain the false positive rate: which samples are the positives."""
    if rate.details.get("positive") == "id":
        return "FPR: fraction of OOD samples accepted as ID at the threshold that accepts this fraction of ID samples"
    return "FPR: fraction of ID samples flagged as OOD at the threshold that detects this fraction of OOD samples"


def _labelled(result: Result, score: str, split: str) -> Result:
    return Result(float(result), result.definition, result.interval, {"score": score, **result.details}).with_split(
        split
    )


def _mean(separations: Mapping[str, Separation]) -> Separation:
    return Separation(
        *(_mean_result({name: getattr(separation, f.name) for name, separation in separations.items()}) for f in FIELDS)
    )


def _mean_result(results: Mapping[str, Result]) -> Result:
    first = next(iter(results.values()))
    values = {name: float(result) for name, result in results.items()}
    n = first.details["n_id"] + sum(result.details["n_ood"] for result in results.values())
    definition = replace(first.definition, n=n, split="mean of OOD sets")
    return Result(fmean(values.values()), definition, None, {"score": first.details["score"], "values": values})
