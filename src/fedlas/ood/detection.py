"""How well a score tells foreign samples (OOD) from known ones (ID): AUROC, AUPR, FPR at a given TPR, with intervals.

A higher score means more foreign. With n ID and m OOD samples, x a score of one and y of the other:

    AUROC         P(x < y) + P(x = y) / 2
    AUPR          sum over thresholds of (recall gained there) x (precision there): the average precision
    FPR at TPR t  share of negatives at or above the highest threshold that t of the positives reach

Only the order of scores counts. They are sorted as they are, never squashed into 0..1, and counted in int64; samples of
one score are taken together, so no number depends on the order of a file. Infinite scores are ranked like any others.
Positives are the OOD samples; `positive="id"` turns all around: ID samples are to be found, and a low score finds them.

Intervals are about the population that the samples are from, and cost no resampling:

    AUROC   DeLong's variance with ties, on the logit scale. Where it is zero (all pairs right, wrong, or tied), the
            min(n, m) pairs that share no sample decide: each turns out so with a probability q that is the same for
            all, and their agreement rules out q < (alpha / 2)^(1 / min(n, m)) (Clopper and Pearson).
    AUPR    the delta method: the variance of the influence that single samples have, on the logit scale. Where it is
            zero: the AUPR of the least and the most favourable population, in which the share of either kind that was
            not seen, up to 1 - (alpha / 4)^(1 / n), lies beyond all others.
    both    start no higher than they would had all pairs been right, and end no lower than had all been wrong: a few
            samples that nearly never overlap show too little variance.
    FPR     10,000 draws: of how many positives reach the true threshold, which is binomial, and of the rate of
            negatives there, whose confidence distribution is Clopper and Pearson's. Right also for rates of 0 and 1.
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
from fedlas.metrics.result import Definition, Interval, Result, aligned, html_table
from fedlas.ood.scores import missing, score_names, score_of
from fedlas.predictions import (
    AnyPredictions,
    Array,
    Predictions,
    TopLabelPredictions,
    as_tensor,
    check_every_class,
    check_rows,
)

Positive = Literal["ood", "id"]

DRAWS = 10_000
NO_FLOAT64 = {"mps"}


@dataclass(frozen=True)
class Ranking:
    """Samples in the order in which a falling threshold finds them, those of one score taken together.

    Args:
        scores: the distinct scores; from high to low where OOD samples are the positives, else from low to high.
        positives: how many positives have each score.
        negatives: how many negatives have it.
        positive: which samples are the positives.
        dtype: type of the scores that came in.
    """

    scores: Float[Tensor, " groups"]
    positives: Int64[Tensor, " groups"]
    negatives: Int64[Tensor, " groups"]
    positive: Positive = "ood"
    dtype: str = ""

    @property
    def sizes(self) -> tuple[int, int]:
        """How many positives and negatives there are."""
        return int(self.positives.sum()), int(self.negatives.sum())

    def turned(self) -> "Ranking":
        """Look for the other kind of samples, from the other end."""
        other: Positive = "id" if self.positive == "ood" else "ood"
        return Ranking(self.scores.flip(0), self.negatives.flip(0), self.positives.flip(0), other, self.dtype)

    def define(self, estimator: str, norm: str) -> Definition:
        """Return the definition of a metric of this ranking, which names the positive class."""
        sign = "higher score = OOD" if self.positive == "ood" else "lower score = ID"
        scope = f"{self.positive.upper()} positive, {sign}"
        return Definition(estimator, norm=norm, scope=scope, n=sum(self.sizes), dtype=self.dtype)

    def details(self) -> dict[str, Any]:
        """Say how many samples of either kind there are, and which are the positives."""
        positives, negatives = self.sizes
        known, foreign = (negatives, positives) if self.positive == "ood" else (positives, negatives)
        return {"n_id": known, "n_ood": foreign, "positive": self.positive}


def ranking(id_scores: Array, ood_scores: Array, positive: Positive = "ood") -> Ranking:
    """Sort the scores of both kinds of samples together and count both at each score."""
    _check_positive(positive)
    known, foreign = _scores(id_scores, "id_scores"), _scores(ood_scores, "ood_scores")
    dtype = str(torch.promote_types(known.dtype, foreign.dtype)).removeprefix("torch.")
    both, order = torch.cat([_wide(known), _wide(foreign).to(known.device)]).sort(descending=True)
    last = torch.cat([both[1:] != both[:-1], torch.ones(1, dtype=torch.bool, device=both.device)]).nonzero()[:, 0]
    found = (order >= len(known)).cumsum(0)[last]
    positives, negatives = (torch.diff(x, prepend=x.new_zeros(1)) for x in (found, last + 1 - found))
    ranked = Ranking(both[last], positives, negatives, "ood", dtype)
    return ranked if positive == "ood" else ranked.turned()


def auroc(id_scores: Array, ood_scores: Array, *, level: float = 0.95) -> Result:
    """Measure how often a foreign sample has a higher score than a known one; a tie counts half.

    Args:
        id_scores: one score per known sample, higher for more foreign ones.
        ood_scores: one score per foreign sample.
        level: how often the interval should hold the true value.
    """
    return auroc_of(ranking(id_scores, ood_scores), level)


def aupr(id_scores: Array, ood_scores: Array, *, positive: Positive = "ood", level: float = 0.95) -> Result:
    """Measure the average precision with which a falling threshold finds the positives.

    Unlike the AUROC it depends on how many samples of either kind there are: the score that knows nothing has the share
    of positives, which stands in `details["chance"]`.

    Args:
        id_scores: one score per known sample, higher for more foreign ones.
        ood_scores: one score per foreign sample.
        positive: "ood" finds foreign samples from the highest score on, "id" known ones from the lowest.
        level: how often the interval should hold the true value.
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
    """Measure the share of negatives that are taken for positives when at least `tpr` of the positives are found.

    The threshold and the share of positives that it really finds stand in `details`.

    Args:
        id_scores: one score per known sample, higher for more foreign ones.
        ood_scores: one score per foreign sample.
        tpr: share of positives to be found.
        positive: "ood": the share of known samples that raise a false alarm; "id": the share of foreign samples that
            pass as known. Papers and their code differ in which of the two they call FPR95.
        level: how often the interval should hold the true value.
        seed: of the random numbers behind the interval; equal seeds give equal intervals.
    """
    return fpr_of(ranking(id_scores, ood_scores, positive), tpr, level, seed)


def auroc_of(ranked: Ranking, level: float = 0.95) -> Result:
    """Measure the AUROC of samples that are already ranked."""
    _check_level(level)
    m, n = ranked.sizes
    below = n - ranked.negatives.cumsum(0)
    # Twice the number of right pairs: whole numbers up to 2 n m, which int64 holds.
    value = int((ranked.positives * (2 * below + ranked.negatives)).sum()) / (2 * n * m)
    definition = ranked.define("AUROC", "ties count half")
    return Result(value, definition, _auroc_interval(ranked, value, level), ranked.details())


def aupr_of(ranked: Ranking, level: float = 0.95) -> Result:
    """Measure the average precision of samples that are already ranked."""
    _check_level(level)
    m, n = ranked.sizes
    positives, negatives = _exact(ranked.positives), _exact(ranked.negatives)
    value = _average_precision(positives, negatives)
    details = ranked.details() | {"chance": m / (n + m)}
    definition = ranked.define(f"AUPR ({ranked.positive.upper()} positive)", "average precision, ties together")
    return Result(value, definition, _aupr_interval(positives, negatives, value, level), details)


def fpr_of(ranked: Ranking, tpr: float = 0.95, level: float = 0.95, seed: int = 0) -> Result:
    """Measure the false positive rate at a true positive rate, of samples that are already ranked."""
    _check_level(level)
    if not 0 < tpr <= 1:
        raise UserError(f"tpr is {tpr}; a share above 0 and up to 1 is needed")
    m, n = ranked.sizes
    found, wrong = (x.cumsum(0).cpu().numpy() for x in (ranked.positives, ranked.negatives))
    # A quotient of whole numbers is rounded to the float nearest to it, and so is a tpr of that value.
    place = int(np.argmax(found / m >= tpr))
    reached = {"threshold": float(ranked.scores[place]), "tpr": float(found[place] / m)}
    value = float(wrong[place] / n)
    low, high = _fpr_range(found, wrong, tpr, level, np.random.default_rng(seed))
    interval = Interval(min(low, value), max(high, value), level, "binomial threshold, Clopper-Pearson rate")
    definition = ranked.define(f"FPR at {100 * tpr:g} % TPR ({ranked.positive.upper()} positive)", "ties together")
    return Result(value, definition, interval, ranked.details() | reached)


@dataclass(frozen=True)
class Separation:
    """How well one score tells one foreign data set from the known one.

    Args:
        auroc: share of pairs in the right order.
        aupr_out: average precision with foreign samples as positives.
        aupr_in: average precision with known samples as positives.
        fpr: share of negatives taken for positives at the chosen share of positives found.
    """

    auroc: Result
    aupr_out: Result
    aupr_in: Result
    fpr: Result

    def to_dict(self) -> dict[str, Any]:
        """List everything as plain values."""
        return {field.name: getattr(self, field.name).to_dict() for field in FIELDS}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "Separation":
        """Read back what `to_dict` wrote."""
        return cls(**{field.name: Result.from_dict(numbers[field.name]) for field in FIELDS})


FIELDS = fields(Separation)


@dataclass(frozen=True)
class Detection:
    """How well scores tell foreign data sets from a known one: `detection["svhn"]["entropy"].auroc`.

    Args:
        sets: for every foreign data set and every score, the four numbers with their intervals.
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
        """Average each number over the foreign data sets, every set with equal weight.

        The sets share their known samples, so their intervals cannot be averaged; these results have none.
        """
        return {score: _mean({name: held[score] for name, held in self.sets.items()}) for score in self.scores}

    def to_dict(self) -> dict[str, Any]:
        """List everything as plain values that JSON knows."""
        sets = {name: {score: one.to_dict() for score, one in held.items()} for name, held in self.sets.items()}
        return {"sets": sets, "mean": {score: one.to_dict() for score, one in self.mean.items()}}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "Detection":
        """Read back what `to_dict` wrote."""
        sets = {
            name: {score: Separation.from_dict(one) for score, one in held.items()}
            for name, held in numbers["sets"].items()
        }
        return cls(sets)

    def rows(self) -> list[list[str]]:
        """Lay the numbers out: a head, and a row for each foreign data set and score."""
        blocks = [*self.sets.items(), *([("mean", self.mean)] if len(self.sets) > 1 else [])]
        one = next(iter(self.sets.values()))[self.scores[0]]
        head = ["OOD set", "score", *(getattr(one, f.name).heading() for f in FIELDS)]
        body = [
            [name if score == self.scores[0] else "", score, *(getattr(held, f.name).cell() for f in FIELDS)]
            for name, block in blocks
            for score, held in block.items()
        ]
        return [head, *body]

    def _repr_html_(self) -> str:
        """Show the numbers in a notebook."""
        return html_table(self.rows(), "foreign data")

    def __str__(self) -> str:
        one = next(iter(self.sets.values()))[self.scores[0]]
        level = f"[low, high] at {100 * one.auroc.interval.level:g} %; " if one.auroc.interval else ""
        return "\n".join([*aligned(self.rows()), f"{level}AUPR: average precision; {_rate_in_words(one.fpr)}"])


def detect(
    predictions: AnyPredictions,
    ood: Mapping[str, AnyPredictions | Array],
    scores: Sequence[str] | None = None,
    *,
    train_features: Array | None = None,
    k: int = 50,
    tpr: float = 0.95,
    positive: Positive = "ood",
    level: float = 0.95,
    seed: int = 0,
) -> Detection:
    """Measure how well scores tell foreign data sets from a known one.

    Args:
        predictions: what a model said about known samples.
        ood: for the name of every foreign data set, what the model said about it; logits alone are enough, as foreign
            samples have no labels.
        scores: names of scores; by default all that every one of the given predictions allows.
        train_features: features of the training set, for "knn".
        k: which neighbour counts, for "knn".
        tpr: true positive rate at which the false positive rate is measured.
        positive: the positives of the false positive rate: "ood" (as in OpenOOD) or "id".
        level: how often the intervals should hold the true value.
        seed: of the random numbers behind the intervals of the false positive rate.
    """
    foreign = {name: foreign_predictions(name, given, predictions) for name, given in ood.items()}
    if scores is None:
        everyone = [predictions, *foreign.values()]
        wanted = [s for s in score_names() if all(missing(one, s, train_features) is None for one in everyone)]
    elif isinstance(scores, str):
        raise UserTypeError(f"scores is {scores!r}; a sequence of names is expected")
    else:
        wanted = list(scores)
    known, *others = (
        {score: _named_score(one, score, name, train_features, k) for score in wanted}
        for name, one in [("the known samples", predictions), *foreign.items()]
    )
    found = dict(zip(foreign, others, strict=True))
    split = predictions.split or "ID"
    return detect_scores(known, found, tpr=tpr, positive=positive, level=level, seed=seed, split=split)


def foreign_predictions(name: str, given: AnyPredictions | Array, known: AnyPredictions) -> AnyPredictions:
    """Take predictions, or logits, on a foreign data set, and check that they are of the same classes."""
    ood = given if isinstance(given, AnyPredictions) else Predictions(given)
    if isinstance(ood, TopLabelPredictions) and isinstance(known, TopLabelPredictions):
        return ood  # each names the classes that it mentions
    check_every_class(ood, name, known, "the known samples")
    if ood.num_classes != known.num_classes:
        raise UserError(f"{name} has {ood.num_classes} classes, the in-distribution samples have {known.num_classes}")
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
    """Measure how well scores that are already computed tell foreign data sets from a known one.

    Args:
        id_scores: for the name of every score, its values on the known samples.
        ood_scores: for the name of every foreign data set, the same.
        tpr: true positive rate at which the false positive rate is measured.
        positive: the positives of the false positive rate: "ood" (as in OpenOOD) or "id".
        level: how often the intervals should hold the true value.
        seed: of the random numbers behind the intervals of the false positive rate.
        split: what the known samples are called.
    """
    _check_positive(positive)
    if not ood_scores or not id_scores:
        raise UserError("at least one score and one OOD data set are needed")
    for name, held in ood_scores.items():
        if set(held) != set(id_scores):
            raise UserError(
                f"{name} has the scores {sorted(held)}, the in-distribution samples have {sorted(id_scores)}"
            )
    sets: dict[str, Mapping[str, Separation]] = {}
    for name, held in ood_scores.items():
        rows: dict[str, Separation] = {}
        for score, known in id_scores.items():
            out = ranking(known, held[score])
            turned = out.turned()
            four = (
                auroc_of(out, level),
                aupr_of(out, level),
                aupr_of(turned, level),
                fpr_of(out if positive == "ood" else turned, tpr, level, seed),
            )
            rows[score] = Separation(*(_labelled(one, score, f"{split} against {name}") for one in four))
        sets[name] = rows
    return Detection(sets)


def _scores(values: Array, name: str) -> Float[Tensor, " n"]:
    scores = as_tensor(values, name)
    if scores.ndim != 1:
        raise UserError(f"{name} have shape {tuple(scores.shape)}; one score per sample is expected")
    scores = scores if scores.is_floating_point() else scores.double()
    check_rows(name, scores, ~scores.isnan(), "is not a number")
    return scores


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _exact(values: Tensor) -> Float64[Tensor, "..."]:
    return (values.cpu() if values.device.type in NO_FLOAT64 else values).double()


def _check_positive(positive: str) -> None:
    if positive not in get_args(Positive):
        raise UserError(f'positive is {positive!r}; "ood" or "id" is expected')


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise UserError(f"level is {level}; a share between 0 and 1 is needed, such as 0.95")


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
        # One sample shows no variance. Pairs that share no sample have at least the true one, and here there is one.
        return value * (1 - value)
    positives, negatives = _exact(ranked.positives), _exact(ranked.negatives)
    beaten = (n - negatives.cumsum(0) + negatives / 2) / n  # share of negatives that a positive stands above
    beating = (positives.cumsum(0) - positives / 2) / m  # share of positives that stand above a negative
    of_positives = (positives * (beaten - value) ** 2).sum() / (m - 1)
    of_negatives = (negatives * (beating - value) ** 2).sum() / (n - 1)
    return float(of_positives / m + of_negatives / n)


def _logit_range(value: float, variance: float, level: float) -> tuple[float, float]:
    centre = math.log(value) - math.log1p(-value)
    reach = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance) / (value * (1 - value))
    low, high = (0.5 + 0.5 * math.tanh((centre + sign * reach) / 2) for sign in (-1, 1))
    return low, high


def _average_precision(positives: Float64[Tensor, " groups"], negatives: Float64[Tensor, " groups"]) -> float:
    found = positives.cumsum(0)
    precision = found / (found + negatives.cumsum(0))
    return float((positives * precision).sum() / found[-1])


def _aupr_interval(
    positives: Float64[Tensor, " groups"], negatives: Float64[Tensor, " groups"], value: float, level: float
) -> Interval:
    m, n = float(positives.sum()), float(negatives.sum())
    variance = _aupr_variance(positives / m, negatives / n, m, n) if min(m, n) > 1 else 0.0
    if variance < 1e-24 or value == 1:
        low, high = _unseen_range(positives, negatives, level)
        return Interval(min(low, value), max(high, value), level, "least and most favourable unseen shares")
    low, high = _logit_range(value, variance, level)
    best, worst = _outermost(m, n, level)
    return Interval(min(low, best), max(high, worst), level, "delta method, logit scale")


def _outermost(m: float, n: float, level: float) -> tuple[float, float]:
    """Find the least AUPR that fits to a perfect ranking of distinct scores, and the largest that fits to the worst.

    Sums over positives are integrals here: of u / (u + c) over the share u of positives that are found.
    """
    unseen, wrong_unseen = (1 - ((1 - level) / 4) ** (1 / count) for count in (m, n))
    early, late = n / m * wrong_unseen, n / m * (1 - wrong_unseen)
    least = (1 - unseen) - early * math.log1p((1 - unseen) / early) + unseen * m / (m + n)
    largest = 1 - late * math.log((1 + late) / (unseen + late))
    return least, largest


def _unseen_range(
    positives: Float64[Tensor, " groups"], negatives: Float64[Tensor, " groups"], level: float
) -> tuple[float, float]:
    """Let as many as can have gone unseen stand at the ends of the ranking, in the worse and in the better order."""
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
    """Add up the squared influence of every sample; the masses of either kind add up to one."""
    found, wrong = positives.cumsum(0), negatives.cumsum(0)
    total = found + n / m * wrong
    precision = found / total
    value = (positives * precision).sum()
    # What more positives, or negatives, at or above a score change in the precision there.
    gain, loss = positives * (n / m) * wrong / total**2, -positives * (n / m) * found / total**2
    later_gain, later_loss = (x.flip(0).cumsum(0).flip(0) for x in (gain, loss))
    of_positives = precision - value + later_gain - (gain * found).sum()
    of_negatives = later_loss - (loss * wrong).sum()
    spread = (positives * of_positives**2).sum() / (m - 1) + (negatives * of_negatives**2).sum() / (n - 1)
    return float(spread)


def _fpr_range(
    found: NDArray[np.int64], wrong: NDArray[np.int64], tpr: float, level: float, rng: np.random.Generator
) -> tuple[float, float]:
    m, n = int(found[-1]), int(wrong[-1])
    # The true threshold lies between the positive number `reached` and the next one.
    reached = rng.binomial(m, tpr, DRAWS)
    fewest = np.where(reached > 0, wrong[np.searchsorted(found, np.maximum(reached, 1))], 0)
    most = np.where(reached < m, wrong[np.searchsorted(found, np.minimum(reached + 1, m))], n)
    low = np.where(fewest > 0, rng.beta(np.maximum(fewest, 1), n - fewest + 1), 0.0)
    high = np.where(most < n, rng.beta(most + 1, np.maximum(n - most, 1)), 1.0)
    tail = (1 - level) / 2
    return float(np.quantile(low, tail)), float(np.quantile(high, 1 - tail))


def _rate_in_words(rate: Result) -> str:
    """Explain the false positive rate: which samples are the positives."""
    if rate.details.get("positive") == "id":
        return "FPR: fraction of OOD samples accepted as ID at the threshold that accepts this fraction of ID samples"
    return "FPR: fraction of ID samples flagged as OOD at the threshold that detects this fraction of OOD samples"


def _named_score(one: AnyPredictions, score: str, name: str, train_features: Array | None, k: int) -> Tensor:
    try:
        return score_of(one, score, train_features, k)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _labelled(result: Result, score: str, split: str) -> Result:
    return Result(float(result), result.definition, result.interval, {"score": score, **result.details}).with_split(
        split
    )


def _mean(held: Mapping[str, Separation]) -> Separation:
    return Separation(*(_mean_result({name: getattr(one, f.name) for name, one in held.items()}) for f in FIELDS))


def _mean_result(results: Mapping[str, Result]) -> Result:
    first = next(iter(results.values()))
    values = {name: float(result) for name, result in results.items()}
    n = first.details["n_id"] + sum(result.details["n_ood"] for result in results.values())
    definition = replace(first.definition, n=n, split="mean of OOD sets")
    return Result(fmean(values.values()), definition, None, {"score": first.details["score"], "values": values})
