"""What the report page shows, as plain data: each `..._data` gives lists and dictionaries that JSON knows.

Nothing is measured here. Numbers come from a `Report`, curves and bins from the functions of `fedlas.metrics` and
`fedlas.ood`; this file rounds, thins and cuts, so that a page stays small however many samples and classes there are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fedlas.metrics.binning import histogram
from fedlas.metrics.bins import (
    Bins,
    EdgeRule,
    add_up,
    bin_index,
    bin_statistics,
    count_up,
    equal_mass_edges,
    equal_width_edges,
    exact,
)
from fedlas.metrics.inputs import Pairs
from fedlas.metrics.intervals.binomial import clopper_pearson
from fedlas.metrics.result import Result
from fedlas.metrics.selective import RiskCoverage, curve
from fedlas.metrics.smooth import smooth_curve
from fedlas.ood.detection import Ranking, foreign_predictions, ranking
from fedlas.ood.scores import QUANTITIES, feature_norm, missing, score_of
from fedlas.predictions import AnyPredictions, Array, Predictions, TopLabelPredictions, slices_of
from fedlas.report.places import filled_places

if TYPE_CHECKING:  # `evaluation` already stands on a tall chain of modules
    from fedlas.evaluation import Report, State
    from fedlas.report.duels import PairedTest

LONGEST = 200  # letters of a text that someone else wrote
ALL_NAMES, SHORTEST = 1_000_000, 24  # letters of the names of all classes, and of one of very many
POINTS = 160  # of a curve
SHARES = 25  # bins of a histogram of confidences
CLASS_BINS = 10
SCORE_BINS = 40
NORM_BINS = 30
EPOCHS = 400

Plain = dict[str, Any]


def text_data(text: object, longest: int = LONGEST) -> str:
    """Cut a text that someone else wrote, and replace what UTF-8 cannot hold."""
    whole = str(text)
    cut = whole if len(whole) <= longest else f"{whole[:longest]}… ({len(whole):,} characters)"
    return cut.encode("utf-8", "replace").decode("utf-8")


def result_data(result: Result) -> Plain:
    """Return a metric, its interval and its noise floor at full precision; the page rounds them where it shows them."""
    interval, floor = result.interval, result.details.get("noise_floor")
    return {
        "name": result.definition.estimator,
        "value": float(result) if math.isfinite(result) else None,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "chance": None if floor is None else float(floor),
        "percent": result.definition.unit == "fraction",
    }


def state_data(state: "State", level: float = 0.95) -> Plain:
    """Give what the predictions as given, or as one calibrator left them, are drawn from."""
    found: Plain = {
        "name": text_data(state.name),
        "results": {name: result_data(result) for name, result in state.results.items()},
        "diagrams": {name: diagram_data(bins, level) for name, bins in state.bins.items()},
        "parameters": {text_data(name): number(value) for name, value in state.parameters.items()},
    }
    if state.pairs is not None:
        found["diagrams"]["smooth"] = smooth_data(state.pairs, level)
        found["confidences"] = confidence_data(state.pairs)
        found["risk"] = risk_data(state.pairs)
    return found


def diagram_data(bins: Bins, level: float = 0.95) -> Plain:
    """Give the filled bins of a reliability diagram: edges, count, confidence, accuracy and its range."""
    return {"bins": [[*place[:7]] for place in filled_places(bins, level)]}


def smooth_data(pairs: Pairs, level: float = 0.95) -> Plain:
    """Give the curve of a smooth reliability diagram, with an approximate range."""
    found = smooth_curve(pairs, points=101)
    low, high = clopper_pearson(found.accuracy * found.samples, found.samples, level)
    shift = found.place - found.confidence  # from the middle of what is in a window to the middle of the window
    columns = (found.place, *((x + shift).clamp(0, 1) for x in (found.accuracy, low, high)))
    rows = zip(*(x.tolist() for x in (*columns, found.density, found.samples)), strict=True)
    return {"points": [[*map(number, row)] for row in rows], "bandwidth": number(found.bandwidth)}


def confidence_data(pairs: Pairs) -> Plain:
    """Count right and wrong answers in narrow bins of confidence."""
    bins = bin_statistics(pairs.confidence, pairs.correct, equal_width_edges(SHARES), EdgeRule.RIGHT)
    wrong = bins.counts - bins.correct_sum
    return {"edges": numbers(bins.edges), "right": numbers(bins.correct_sum), "wrong": numbers(wrong)}


def risk_data(pairs: Pairs) -> Plain:
    """Trace the risk over coverage, and what the best possible order of the same answers would give."""
    found = curve(pairs)
    # Every right answer before every wrong one: the order that the truth itself would give.
    best = curve(Pairs(exact(pairs.correct), pairs.correct, pairs.about))
    return {"coverage": numbers(_thinned(found).coverage), "risk": numbers(_thinned(found).risk)} | {
        "best": numbers(_thinned(best).risk)
    }


def _thinned(traced: RiskCoverage) -> RiskCoverage:
    n = len(traced.risk)
    kept = torch.linspace(0, n - 1, min(n, POINTS), device=traced.risk.device).round().long()
    return RiskCoverage(traced.coverage[kept], traced.risk[kept])


def model_data(name: str, report: "Report", level: float = 0.95) -> Plain:
    """Give what one model is, and what every state of it is drawn from."""
    return {
        "name": text_data(name),
        "n": report.n,
        "classes": report.classes,
        "split": None if report.split is None else text_data(report.split),
        "states": [state_data(state, level) for state in report.states],
    }


def names_data(predictions: AnyPredictions) -> list[str] | None:
    """Give the names of the classes, where there are any; those of very many classes are cut shorter."""
    names = predictions.class_names
    if names is None:
        return None
    longest = min(LONGEST, max(SHORTEST, ALL_NAMES // len(names)))
    return [text_data(name, longest) for name in names]


def class_data(
    predictions: AnyPredictions, report: "Report | None" = None, *, most: int = 2_000, level: float = 0.95
) -> Plain:
    """Give the class table, and for the classes with most answers their diagrams.

    Answers are the samples that the model put into a class. Columns have one entry per class: how many labels and
    answers it has, how many of the answers are right, their mean confidence, and the class-wise ECE. Diagrams hold
    `[bin, count, confidence, accuracy, low, high]` for every filled bin: of the answers, and of all probabilities.

    Args:
        predictions: of one model.
        report: where the class-wise errors are taken from.
        most: how many classes have diagrams.
        level: of the ranges of accuracies.
    """
    classes = predictions.num_classes
    bins = answer_bins(predictions)
    answers, right, total = bins.counts.sum(1), bins.correct_sum.sum(1), bins.confidence_sum.sum(1)
    labels = predictions.labels
    support = exact(labels).sum(0) if labels.ndim == 2 else count_up(labels, classes)
    shown = torch.arange(classes)
    if isinstance(predictions, TopLabelPredictions):  # of classes that nobody named, nothing is known
        shown = ((answers > 0) | (support.to(answers.device) > 0)).nonzero()[:, 0].cpu()
    measured = None if report is None else report.before.results.get("classwise_ece")
    errors = None if measured is None else torch.tensor(measured.details["per_class"], dtype=torch.float64)
    drawn = shown[answers.cpu()[shown].argsort(descending=True, stable=True)[:most]].sort().values
    every = None if isinstance(predictions, TopLabelPredictions) else probability_bins(predictions)
    return {
        "class": shown.tolist(),
        "labels": numbers(support.cpu()[shown]),
        "answers": answers.cpu()[shown].tolist(),
        "right": numbers(right.cpu()[shown]),
        "confidence": numbers((total / answers.clamp_min(1)).cpu()[shown]),
        "error": None if errors is None else numbers(errors[shown]),
        "bins": CLASS_BINS,
        "drawn": drawn.tolist(),
        "of_answers": _cells(bins, drawn, level),
        "of_probability": None if every is None else _cells(every, drawn, level),
    }


def answer_bins(predictions: AnyPredictions) -> Bins:
    """Fill one histogram per class with the confidences of the samples that were put into it."""
    assert predictions.prediction is not None
    edges, classes = equal_width_edges(CLASS_BINS), predictions.num_classes
    confidence, correct = exact(predictions.confidence), exact(predictions.correct)
    index = bin_index(predictions.confidence, edges, EdgeRule.RIGHT).to(confidence.device)
    cell = predictions.prediction.to(confidence.device) * CLASS_BINS + index
    counts = count_up(cell, classes * CLASS_BINS)
    sums = (add_up(values, cell, classes * CLASS_BINS) for values in (confidence, correct))
    confidence_sum, correct_sum = (one.view(classes, CLASS_BINS) for one in sums)
    return Bins(edges, counts.view(classes, CLASS_BINS), confidence_sum, correct_sum, len(predictions), EdgeRule.RIGHT)


def probability_bins(predictions: Predictions) -> Bins:
    """Fill one histogram per class with the probabilities of the class, a part of the samples at a time."""
    first, *others = slices_of(predictions.scores)
    found = histogram(predictions[first], bins=CLASS_BINS, scope="class-wise").bins
    for rows in others:
        found += histogram(predictions[rows], bins=CLASS_BINS, scope="class-wise").bins
    return found


def _cells(bins: Bins, kept: Int64[Tensor, " kept"], level: float) -> list[list[list[float]]]:
    bins = bins.cpu()
    counts = bins.counts[kept]
    row, column = counts.nonzero().unbind(1)
    place = (kept[row], column)
    low, high = clopper_pearson(bins.correct_sum[place], bins.counts[place], level)
    columns = (column, bins.counts[place], bins.confidence[place], bins.accuracy[place], low, high)
    found: list[list[list[float]]] = [[] for _ in range(len(kept))]
    for line, *cells in zip(row.tolist(), *(x.tolist() for x in columns), strict=True):
        found[line].append([number(cell, 4) for cell in cells])
    return found


def sample_data(predictions: AnyPredictions, *, count: int = 12, most: int = 3) -> Plain:
    """Give the samples whose confidence was most above, and most below, what turned out to be true.

    Args:
        predictions: of one model.
        count: how many of either kind.
        most: how many of the likeliest classes are listed for each.
    """
    gap = exact(predictions.confidence) - exact(predictions.correct)
    found: Plain = {}
    for kind, sign in (("over", 1), ("under", -1)):
        order = (sign * gap).argsort(descending=True, stable=True)[:count]
        chosen = order[(sign * gap)[order] > 0]
        found[kind] = [_sample(predictions, int(row), most) for row in chosen]
    return found


def _sample(predictions: AnyPredictions, row: int, most: int) -> Plain:
    one = predictions[[row]]
    if isinstance(one, TopLabelPredictions):
        assert one.prediction is not None
        confidence, answer = number(one.confidence[0], 6), int(one.prediction[0])
        return {
            "row": row,
            "index": None if one.index is None else int(one.index[0]),
            "label": int(one.labels[0]),
            "share": None,
            "answer": answer,
            "confidence": confidence,
            "truth": None,
            "likeliest": [[answer, number(one.confidence[0])]],
        }
    probs, labels = one.probs[0], one.labels
    likeliest = probs.topk(min(most, len(probs)))
    truth = int(labels[0]) if labels.ndim == 1 else int(labels[0].argmax())
    return {
        "row": row,
        "index": None if one.index is None else int(one.index[0]),
        "label": truth,
        "share": None if labels.ndim == 1 else number(labels[0, truth]),
        "answer": int(one.prediction[0]),
        "confidence": number(one.confidence[0], 6),
        "truth": number(probs[truth], 6),
        "likeliest": [[k, number(p)] for k, p in zip(likeliest.indices.tolist(), likeliest.values, strict=True)],
    }


def ood_data(
    predictions: AnyPredictions,
    ood: Mapping[str, AnyPredictions | Array],
    report: "Report",
    train_features: Array | None = None,
) -> Plain | None:
    """Give for every foreign data set and score the ROC curve, the histograms and the measured numbers."""
    detection = report.before.detection
    if detection is None:
        return None
    sets: list[Plain] = []
    for name, held in detection.sets.items():
        foreign = foreign_predictions(name, ood[name], predictions) if name in ood else None
        scores: list[Plain] = []
        for score, separation in held.items():
            about: Plain = {
                "name": score,
                "quantity": QUANTITIES.get(score, score),
                "numbers": [result_data(x) for x in (separation.auroc, separation.aupr_out, separation.aupr_in)]
                + [result_data(separation.fpr)],
            }
            both = [x for x in (predictions, foreign) if x is not None]
            if len(both) == 2 and all(missing(x, score, train_features) is None for x in both):
                known, strange = (score_of(x, score, train_features) for x in both)
                about |= {"roc": roc_data(ranking(known, strange)), "histogram": score_data(known, strange)}
            scores.append(about)
        sets.append({"name": text_data(name), "scores": scores})
    return {"sets": sets}


def roc_data(ranked: Ranking) -> Plain:
    """Give the ROC curve in steps of equal length."""
    positives, negatives = ranked.sizes
    true = torch.cat([torch.zeros(1), exact(ranked.positives.cumsum(0)).cpu() / positives]).double()
    false = torch.cat([torch.zeros(1), exact(ranked.negatives.cumsum(0)).cpu() / negatives]).double()
    kept = torch.searchsorted(true + false, torch.linspace(0, 2, POINTS, dtype=torch.float64)).clamp_max(len(true) - 1)
    kept = torch.cat([torch.zeros(1, dtype=torch.long), kept]).unique()
    return {"false": numbers(false[kept]), "true": numbers(true[kept])}


def score_data(known: Tensor, foreign: Tensor) -> Plain:
    """Give the histograms of a score on known and foreign samples, as shares; the ends hold what lies beyond them."""
    known, foreign = exact(known).cpu(), exact(foreign).cpu()
    both = torch.cat([known, foreign])
    finite = both[both.isfinite()]
    if not len(finite):
        return {"edges": [0.0, 1.0], "known": [1.0], "foreign": [1.0]}
    ranked = finite.sort().values
    low, high = (float(ranked[round(share * (len(ranked) - 1))]) for share in (0.005, 0.995))
    if not low < high:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, SCORE_BINS + 1, dtype=torch.float64)
    shares = [
        count_up(bin_index(x.clamp(low, high), edges, EdgeRule.RIGHT), SCORE_BINS).double() / len(x)
        for x in (known, foreign)
    ]
    return {"edges": numbers(edges), "known": numbers(shares[0]), "foreign": numbers(shares[1])}


def norm_data(predictions: AnyPredictions) -> Plain | None:
    """Give the confidence indicator of FeDLaS on these samples: the L1 norm of the features, in deviations.

    Training normalises by running statistics; here mean and deviation are those of these samples.
    """
    if predictions.features is None or len(predictions) < 2:
        return None
    norm = exact(-feature_norm(predictions.features))
    spread = float(norm.std())
    if not 0 < spread < math.inf:
        return None
    gamma = (norm - norm.mean()) / spread
    correct, confidence = exact(predictions.correct).to(gamma.device), exact(predictions.confidence).to(gamma.device)
    low, high = (float(x) for x in torch.aminmax(gamma.clamp(-4, 4)))
    edges = torch.linspace(low, high, NORM_BINS + 1, dtype=torch.float64)
    shown = bin_index(gamma.clamp(low, high), edges, EdgeRule.RIGHT)
    right, wrong = (add_up(weights, shown, NORM_BINS) for weights in (correct, 1 - correct))
    return {
        "mean": number(norm.mean()),
        "deviation": number(spread),
        "edges": numbers(edges),
        "right": numbers(right),
        "wrong": numbers(wrong),
        "groups": _groups(gamma, confidence, correct),
    }


def _groups(
    gamma: Float64[Tensor, " n"], confidence: Float64[Tensor, " n"], correct: Float64[Tensor, " n"]
) -> list[list[float]]:
    """Average confidence and correctness over tenths of the samples, from the shortest features to the longest."""
    groups = 10
    place = bin_index(gamma, equal_mass_edges(gamma, groups), EdgeRule.RIGHT)
    counts = count_up(place, groups)
    means = [add_up(x, place, groups) / counts.clamp_min(1) for x in (gamma, confidence, correct)]
    rows = zip(counts.tolist(), *(x.tolist() for x in means), strict=True)
    return [[*map(number, row)] for row in rows if row[0]]


def training_data(log: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any] | None = None) -> Plain | None:
    """Return the curves of a run's log: loss, accuracy, calibration, gate and feedback; long logs are thinned."""
    records = [one for one in log if "epoch" in one and "train" in one and "val" in one]
    if not records:
        return None
    step = math.ceil(len(records) / EPOCHS)
    records = [one for place, one in enumerate(records) if place % step == 0 or place == len(records) - 1]
    found: Plain = {"epoch": [int(one["epoch"]) for one in records]}
    found["loss"] = [_maybe(one["train"].get("loss")) for one in records]
    for name in ("accuracy", "ece", "over_ece", "under_ece"):
        found[name] = [_maybe(one["val"].get(name)) for one in records]
    beta = ((recipe or {}).get("loss_options") or {}).get("beta")
    found["beta"] = _maybe(beta)
    if all(one.get("gate") for one in records):
        names = ("positive", "flip_rate", "alpha_ratio", "against_gamma")
        found["gate"] = {name: [_maybe(one["gate"].get(name)) for one in records] for name in names}
        found["gate"]["gamma"] = _gamma(records[-1]["gate"].get("gamma_histogram"), found["beta"])
    states: list[Mapping[str, Any]] = [one.get("loss_state") or {} for one in records]
    if all({"strengths", "gaps"} <= set(one) for one in states):
        found["feedback"] = {name: [list(map(_maybe, one[name])) for one in states] for name in ("strengths", "gaps")}
    return found


def _gamma(given: Any, beta: float | None) -> Plain | None:
    """Take the histogram of gamma of an epoch, and the smoothing of either mode in the middle of each bin.

    The first and last counts lie beyond the edges; they are shown as one more bin on either side.
    """
    if not isinstance(given, Mapping):
        return None
    edges, counts = list(map(float, given["edges"])), list(map(float, given["counts"]))
    if len(counts) != len(edges) + 1 or len(edges) < 2:
        return None
    step = edges[1] - edges[0]
    ends = [edges[0] - step, *edges, edges[-1] + step]
    middles = [(low + high) / 2 for low, high in pairwise(ends)]
    evenly = [ends[0] + place / 80 * (ends[-1] - ends[0]) for place in range(81)]
    return {
        "edges": edges,
        "counts": counts,
        "ends": numbers(ends),
        "middle": _ratios(middles, beta),
        "curve": _ratios(evenly, beta),
    }


def _ratios(gammas: Sequence[float], beta: float | None) -> list[list[float | int]]:
    """Give the smoothing of both modes at some values of gamma; nothing where nobody says how strong it is."""
    if beta is None:
        return []
    return [numbers([gamma, alpha_ratio(gamma, beta, 1), alpha_ratio(gamma, beta, -1)]) for gamma in gammas]


def alpha_ratio(gamma: float, beta: float, mode: int) -> float:
    """Give the smoothing of a sample, as a multiple of alpha: 2 sigmoid(beta gamma) in positive mode."""
    return 1 + math.tanh(beta * mode * gamma / 2)


def comparison_data(names: Sequence[str], duels: "Iterable[PairedTest]") -> Plain | None:
    """Give the paired tests of models, which are told by their place in the list of names."""
    if len(names) < 2:
        return None
    tests: list[Plain] = []
    for duel in duels:
        about: Plain = {"first": names.index(duel.first), "second": names.index(duel.second), "metric": duel.metric}
        found = duel.found
        if found is None:
            tests.append(about | {"why": text_data(duel.why)})
            continue
        tests.append(
            about
            | {
                "name": found.first.definition.estimator,
                "percent": found.first.definition.unit == "fraction",
                "difference": found.difference,
                "low": found.interval.low,
                "high": found.interval.high,
                "p": found.p_value,
                "better": {"first": 0, "second": 1}.get(found.better or ""),
            }
        )
    return {"tests": tests}


def number(value: Any, digits: int = 5) -> float | int:
    """Round to some significant digits; whole numbers stay whole."""
    plain = float(value)
    if plain.is_integer() and abs(plain) < 1e15:
        return int(plain)
    assert math.isfinite(plain), plain
    return float(f"{plain:.{digits}g}")


def numbers(values: Tensor | Sequence[float], digits: int = 5) -> list[float | int]:
    """Round many numbers."""
    return [number(value, digits) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def _maybe(value: Any) -> float | int | None:
    """Take a number from a log; what is none, or not finite, is left out."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number(value) if usable else None
