"""Data of the HTML page: each `..._data` returns lists and dictionaries that can be written as JSON.

Metrics come from a `Report`, curves and bins from the functions of `fedlas.metrics` and `fedlas.ood`. Every number that
the page shows is computed here at full precision and rounded by the page. Curves are subsampled and texts are
truncated, so that a page stays small for any number of samples and classes.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from fedlas.comparison import PairedTest
from fedlas.evaluation_report import Report, State
from fedlas.metrics.bin_sums import (
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
from fedlas.metrics.binning import histogram
from fedlas.metrics.inputs import Pairs
from fedlas.metrics.intervals.binomial import clopper_pearson
from fedlas.metrics.result import Result
from fedlas.metrics.selective import RiskCoverage, curve
from fedlas.metrics.smooth import smooth_curve
from fedlas.ood.detection import Ranking, as_ood_predictions, ranking
from fedlas.ood.scores import QUANTITIES, feature_norm, missing, score_of
from fedlas.predictions import AnyPredictions, Predictions, TopLabelPredictions
from fedlas.predictions.arrays import Array
from fedlas.predictions.probabilities import slices_of
from fedlas.report.reliability_bins import non_empty_bins
from fedlas.report.slices import Slices

LONGEST = 200  # largest number of characters of a text from a file
ALL_NAMES, SHORTEST = 900_000, 24  # characters of all class names together, and at least of each one
POINTS = 160  # number of points of a curve
COVERAGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)  # rows of the risk-coverage table
FALSE_POSITIVE_RATES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # rows of the ROC table
CONFIDENCE_BINS = 25
CLASS_BINS = 10
SCORE_BINS = 40
NORM_BINS = 30
CONFUSIONS = 10  # largest number of pairs of classes in each table
MIN_CONFUSIONS = 5  # number of samples from which a pair of classes is ranked by its mean confidence
LIKELIEST = 3  # number of the most likely classes listed for each sample
EPOCHS = 400

Plain = dict[str, Any]


def text_data(text: object, longest: int = LONGEST) -> str:
    """Truncate a long text, and replace characters that UTF-8 cannot encode."""
    full_text = str(text)
    truncated = full_text if len(full_text) <= longest else f"{full_text[:longest]}… ({len(full_text):,} characters)"
    return truncated.encode("utf-8", "replace").decode("utf-8")


def result_data(result: Result) -> Plain:
    """Return a metric with its confidence interval and its noise floor."""
    interval, floor = result.interval, result.details.get("noise_floor")
    return {
        "name": result.definition.estimator,
        "value": float(result) if math.isfinite(result) else None,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "noise_floor": None if floor is None else float(floor),
        "percent": result.definition.unit == "fraction",
    }


def state_data(state: State, level: float = 0.95) -> Plain:
    """Return the results and diagrams before calibration, or after one calibrator."""
    data: Plain = {
        "name": text_data(state.name),
        "results": {name: result_data(result) for name, result in state.results.items()},
        "diagrams": {name: diagram_data(bins, level) for name, bins in state.bins.items()},
        "parameters": {text_data(name): number(value) for name, value in state.parameters.items()},
    }
    if state.pairs is not None:
        data["diagrams"]["smooth"] = smooth_data(state.pairs, level)
        data["confidences"] = confidence_data(state.pairs)
        data["risk"] = risk_data(state.pairs)
    return data


def diagram_data(bins: Bins, level: float = 0.95) -> Plain:
    """Return the non-empty bins of a reliability diagram.

    Each row has the two edges, the number of samples, the mean confidence, the accuracy with its confidence interval,
    and the gap (mean confidence minus accuracy).
    """
    rows = non_empty_bins(bins, level)
    return {"bins": [[*row[:7], row.confidence - row.accuracy] for row in rows]}


def smooth_data(pairs: Pairs, level: float = 0.95) -> Plain:
    """Return the curve of a smooth reliability diagram, with an approximate confidence interval.

    Each row has the confidence, the accuracy with its interval, the density of samples, the effective sample size, and
    the gap.
    """
    smoothed = smooth_curve(pairs, points=101)
    low, high = clopper_pearson(smoothed.accuracy * smoothed.samples, smoothed.samples, level)
    shift = smoothed.center - smoothed.confidence  # from the mean confidence in a window to the centre of the window
    accuracy, low, high = ((x + shift).clamp(0, 1) for x in (smoothed.accuracy, low, high))
    columns = (smoothed.center, accuracy, low, high, smoothed.density, smoothed.samples, smoothed.center - accuracy)
    rows = zip(*(x.tolist() for x in columns), strict=True)
    return {"points": [[*map(number, row)] for row in rows], "bandwidth": number(smoothed.bandwidth)}


def confidence_data(pairs: Pairs) -> Plain:
    """Count correct and incorrect predictions in narrow bins of confidence."""
    bins = bin_statistics(pairs.confidence, pairs.correct, equal_width_edges(CONFIDENCE_BINS), EdgeRule.RIGHT)
    accuracy = [number(value) if count else None for value, count in zip(bins.accuracy, bins.counts, strict=True)]
    counts = _counts_data(bins.correct_sum, bins.counts - bins.correct_sum)
    return {"edges": numbers(bins.edges), **counts, "accuracy": accuracy}


def _counts_data(correct: Float64[Tensor, " bins"], incorrect: Float64[Tensor, " bins"]) -> Plain:
    """Return histograms of correct and incorrect predictions: counts, their totals, and fractions of these."""
    data: Plain = {}
    for name, counts in (("correct", correct), ("incorrect", incorrect)):
        total = counts.sum()
        data[name] = numbers(counts)
        data[f"{name}_total"] = number(total)
        data[f"{name}_fraction"] = numbers(counts / total if total > 0 else counts)
    return data


def risk_data(pairs: Pairs) -> Plain:
    """Return the risk-coverage curve, and the curve of a perfect ranking at the same accuracy.

    `listed` has rows `[coverage, risk, lowest risk]` at round coverages.
    """
    traced = curve(pairs)
    # All correct predictions before all incorrect ones.
    best = curve(Pairs(exact(pairs.correct), pairs.correct, pairs.definition))
    coverages = torch.tensor(COVERAGES, dtype=torch.float64, device=traced.risk.device)
    position = torch.searchsorted(traced.coverage, coverages - 1e-12).clamp_max(len(traced.risk) - 1)
    listed = zip(COVERAGES, traced.risk[position].tolist(), best.risk[position].tolist(), strict=True)
    return {
        "coverage": numbers(_thinned(traced).coverage),
        "risk": numbers(_thinned(traced).risk),
        "best": numbers(_thinned(best).risk),
        "listed": [[*map(number, row)] for row in listed],
    }


def _thinned(traced: RiskCoverage) -> RiskCoverage:
    n = len(traced.risk)
    points = torch.linspace(0, n - 1, min(n, POINTS), device=traced.risk.device).round().long()
    return RiskCoverage(traced.coverage[points], traced.risk[points])


def model_data(name: str, report: Report, level: float = 0.95) -> Plain:
    """Return the name, size and states of one evaluation."""
    return {
        "name": text_data(name),
        "n": report.n,
        "classes": report.classes,
        "split": None if report.split is None else text_data(report.split),
        "states": [state_data(state, level) for state in report.states],
    }


def names_data(predictions: AnyPredictions) -> list[str] | None:
    """Return the class names, if any; with very many classes, names are truncated further."""
    names = predictions.class_names
    if names is None:
        return None
    longest = min(LONGEST, max(SHORTEST, ALL_NAMES // len(names)))
    return [text_data(name, longest) for name in names]


def class_data(
    predictions: AnyPredictions, report: Report | None = None, *, most: int = 2_000, level: float = 0.95
) -> Plain:
    """Return the class table, and the diagrams of the classes that are predicted most often.

    Columns have one entry per class: the numbers of labels, of predictions and of correct predictions of the class;
    recall, precision, mean confidence and gap of these predictions; the weight of the gap in the signed ECE; and the
    class-wise ECE. A class has two diagrams, one of the samples predicted as the class and one of its probability in
    all samples. Their rows `[bin, accuracy index, confidence, gap, significant]` describe the non-empty bins; the index
    refers to a row `[count, accuracy, low, high]` of `accuracies`, which bins with equal counts share.

    Args:
        predictions: predictions of one model.
        report: the report that has the class-wise ECE.
        most: largest number of classes with diagrams.
        level: level of the confidence intervals of accuracies.
    """
    classes = predictions.num_classes
    bins = predicted_class_bins(predictions).cpu()
    predicted, correct, total = (x.sum(1).double() for x in (bins.counts, bins.correct_sum, bins.confidence_sum))
    labels = predictions.labels
    support = (exact(labels).sum(0) if labels.ndim == 2 else count_up(labels, classes)).cpu().double()
    listed = torch.arange(classes)
    if isinstance(predictions, TopLabelPredictions):  # other classes are unknown
        listed = ((predicted > 0) | (support > 0)).nonzero()[:, 0]
    classwise = None if report is None else report.before.results.get("classwise_ece")
    errors = None if classwise is None else torch.tensor(classwise.details["per_class"], dtype=torch.float64)
    with_diagrams = listed[predicted[listed].argsort(descending=True, stable=True)[:most]].sort().values
    all_probability_bins = None if isinstance(predictions, TopLabelPredictions) else probability_bins(predictions)
    accuracies: dict[tuple[float, ...], int] = {}
    confidence, precision, recall = total / predicted, correct / predicted, correct / support  # NaN: no samples
    return {
        "class": listed.tolist(),
        "labels": numbers(support[listed]),
        "predicted": numbers(predicted[listed]),
        "correct": numbers(correct[listed]),
        "recall": optional_numbers(recall[listed]),
        "precision": optional_numbers(precision[listed]),
        "confidence": optional_numbers(confidence[listed]),
        "gap": optional_numbers((confidence - precision)[listed]),
        "weight": numbers(((total - correct) / len(predictions))[listed]),
        "ece": None if errors is None else numbers(errors[listed]),
        "bins": CLASS_BINS,
        "drawn": with_diagrams.tolist(),
        "of_predictions": _cells(bins, with_diagrams, level, accuracies),
        "of_probability": None
        if all_probability_bins is None
        else _cells(all_probability_bins, with_diagrams, level, accuracies),
        "accuracies": [[*row] for row in accuracies],
    }


def predicted_class_bins(predictions: AnyPredictions) -> Bins:
    """Return one histogram per class: the confidences of the samples predicted as this class."""
    assert predictions.prediction is not None
    edges, classes = equal_width_edges(CLASS_BINS), predictions.num_classes
    confidence, correct = exact(predictions.confidence), exact(predictions.correct)
    index = bin_index(predictions.confidence, edges, EdgeRule.RIGHT).to(confidence.device)
    cell = predictions.prediction.to(confidence.device) * CLASS_BINS + index
    counts = count_up(cell, classes * CLASS_BINS)
    sums = (add_up(values, cell, classes * CLASS_BINS) for values in (confidence, correct))
    confidence_sum, correct_sum = (values.view(classes, CLASS_BINS) for values in sums)
    return Bins(edges, counts.view(classes, CLASS_BINS), confidence_sum, correct_sum, len(predictions), EdgeRule.RIGHT)


def probability_bins(predictions: Predictions) -> Bins:
    """Return one histogram per class, of the probability of the class in all samples; computed in chunks."""
    first, *remaining = slices_of(predictions.scores)
    bins = histogram(predictions[first], bins=CLASS_BINS, scope="class-wise").bins
    for rows in remaining:
        bins += histogram(predictions[rows], bins=CLASS_BINS, scope="class-wise").bins
    return bins


def _cells(
    bins: Bins, kept: Int64[Tensor, " kept"], level: float, accuracies: dict[tuple[float, ...], int]
) -> list[list[list[float]]]:
    """Return the rows of the non-empty bins of some classes; append new accuracies to `accuracies`."""
    bins = bins.cpu()
    row, column = bins.counts[kept].nonzero().unbind(1)
    cells = (kept[row], column)
    confidence, accuracy, counts = bins.confidence[cells], bins.accuracy[cells], bins.counts[cells]
    low, high = clopper_pearson(bins.correct_sum[cells], counts, level)
    significant = (confidence < low) | (confidence > high)
    columns = (counts, accuracy, low, high, column, confidence, confidence - accuracy, significant)
    rows: list[list[list[float]]] = [[] for _ in range(len(kept))]
    for line, *values in zip(row.tolist(), *(x.tolist() for x in columns), strict=True):
        *shared, index, mean, gap, is_significant = map(number, values)
        rows[line].append([index, accuracies.setdefault(tuple(shared), len(accuracies)), mean, gap, is_significant])
    return rows


def confusion_data(predictions: AnyPredictions) -> Plain:
    """Return the pairs of label and predicted class that are confused most often, or with the highest confidence.

    Each row has the label, the predicted class, the number of samples, their fraction of all samples with this label,
    and their mean confidence. Pairs of fewer than `MIN_CONFUSIONS` samples are not listed by confidence. A soft label
    counts as its most likely class.
    """
    assert predictions.prediction is not None
    labels_or_weights = predictions.labels
    labels = (labels_or_weights if labels_or_weights.ndim == 1 else labels_or_weights.argmax(1)).cpu()
    prediction, classes = predictions.prediction.cpu(), predictions.num_classes
    wrong = (labels != prediction).nonzero()[:, 0]
    pairs, codes = (labels[wrong] * classes + prediction[wrong]).unique(return_inverse=True)
    counts = count_up(codes, len(pairs))
    confidence = add_up(exact(predictions.confidence).cpu()[wrong], codes, len(pairs)) / counts
    truth, predicted = pairs // classes, pairs % classes
    fraction = counts.double() / count_up(labels, classes)[truth]
    columns = [truth, predicted, counts, fraction, confidence]

    def rows(chosen: Tensor) -> list[list[float]]:
        return [[*map(number, row)] for row in zip(*(column[chosen].tolist() for column in columns), strict=True)]

    often = (counts >= MIN_CONFUSIONS).nonzero()[:, 0]
    return {
        "by_count": rows(counts.argsort(descending=True, stable=True)[:CONFUSIONS]),
        "by_confidence": rows(often[confidence[often].argsort(descending=True, stable=True)[:CONFUSIONS]]),
        "fewest": MIN_CONFUSIONS,
    }


def slice_data(slices: Slices) -> Plain:
    """Return the table of slices by decreasing harm.

    Each row has the column, value, number of samples, accuracy, ECE with its interval, harm, and whether it is small.
    """
    rows = []
    for row in slices.listed:
        interval = row.ece.interval
        ends = (None, None) if interval is None else (interval.low, interval.high)
        texts = [text_data(row.column), text_data(row.value)]
        rows.append([*texts, row.n, number(row.accuracy), number(row.ece), *ends, number(row.harm), row.is_small])
    return {"rows": rows, "total": slices.total, "skipped": [text_data(name) for name in slices.skipped]}


def sample_data(predictions: AnyPredictions, *, count: int = 12) -> Plain:
    """Return the most over-confident and the most under-confident samples, `count` of each kind."""
    gap = exact(predictions.confidence) - exact(predictions.correct)
    data: Plain = {}
    for kind, sign in (("over", 1), ("under", -1)):
        order = (sign * gap).argsort(descending=True, stable=True)[:count]
        chosen = order[(sign * gap)[order] > 0]
        data[kind] = [_sample(predictions, int(row)) for row in chosen]
    return data


def _sample(predictions: AnyPredictions, row: int) -> Plain:
    sample = predictions[[row]]
    assert sample.prediction is not None
    data: Plain = {
        "row": row,
        "index": None if sample.index is None else int(sample.index[0]),
        "prediction": int(sample.prediction[0]),
        "confidence": number(sample.confidence[0]),
    }
    if isinstance(sample, TopLabelPredictions):
        likeliest = [[data["prediction"], data["confidence"]]]
        return data | {
            "label": int(sample.labels[0]), "label_weight": None, "label_probability": None, "likeliest": likeliest,
        }  # fmt: skip
    probs, labels = sample.probs[0], sample.labels
    top = probs.topk(min(LIKELIEST, len(probs)))
    label = int(labels[0]) if labels.ndim == 1 else int(labels[0].argmax())
    return data | {
        "label": label,
        "label_weight": None if labels.ndim == 1 else number(labels[0, label]),
        "label_probability": number(probs[label]),
        "likeliest": [[k, number(p)] for k, p in zip(top.indices.tolist(), top.values, strict=True)],
    }


def ood_data(
    predictions: AnyPredictions,
    ood: Mapping[str, AnyPredictions | Array],
    report: Report,
) -> Plain | None:
    """Return the ROC curve, the histograms and the metrics of every OOD data set and score."""
    detection = report.before.detection
    if detection is None:
        return None
    sets: list[Plain] = []
    for name, separations in detection.sets.items():
        ood_predictions = as_ood_predictions(name, ood[name], predictions) if name in ood else None
        scores: list[Plain] = []
        for score, separation in separations.items():
            metrics = (separation.auroc, separation.aupr_out, separation.aupr_in, separation.fpr)
            data: Plain = {
                "name": score,
                "quantity": QUANTITIES.get(score, score),
                "results": [result_data(result) for result in metrics],
            }
            both = [x for x in (predictions, ood_predictions) if x is not None]
            if len(both) == 2 and all(missing(x, score) is None for x in both):
                id_scores, ood_scores = (score_of(x, score) for x in both)
                data |= {
                    "roc": roc_data(ranking(id_scores, ood_scores)),
                    "histogram": score_data(id_scores, ood_scores),
                }
            scores.append(data)
        sets.append({"name": text_data(name), "scores": scores})
    return {"sets": sets}


def roc_data(ranked: Ranking) -> Plain:
    """Return the ROC curve at points of equal distance; `listed` has rows `[FPR, TPR]` for the table."""
    positives, negatives = ranked.sizes
    start = torch.zeros(1, dtype=torch.float64)
    true = torch.cat([start, exact(ranked.positives.cumsum(0)).cpu() / positives])
    false = torch.cat([start, exact(ranked.negatives.cumsum(0)).cpu() / negatives])
    points = torch.searchsorted(true + false, torch.linspace(0, 2, POINTS, dtype=torch.float64)).clamp_max(
        len(true) - 1
    )
    points = torch.cat([torch.zeros(1, dtype=torch.long), points]).unique()
    rates = torch.tensor(FALSE_POSITIVE_RATES, dtype=torch.float64)
    reached = true[torch.searchsorted(false, rates + 1e-12, right=True) - 1]
    listed = [[*map(number, row)] for row in zip(FALSE_POSITIVE_RATES, reached.tolist(), strict=True)]
    return {"fpr": numbers(false[points]), "tpr": numbers(true[points]), "listed": listed}


def score_data(id_scores: Tensor, ood_scores: Tensor) -> Plain:
    """Return histograms of a score on ID and OOD samples, as fractions; the outermost bins are unbounded."""
    id_scores, ood_scores = exact(id_scores).cpu(), exact(ood_scores).cpu()
    both = torch.cat([id_scores, ood_scores])
    finite = both[both.isfinite()]
    if not len(finite):
        return {"edges": [0.0, 1.0], "id": [1.0], "ood": [1.0]}
    ranked = finite.sort().values
    low, high = (float(ranked[round(quantile * (len(ranked) - 1))]) for quantile in (0.005, 0.995))
    if not low < high:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, SCORE_BINS + 1, dtype=torch.float64)
    fractions = [
        count_up(bin_index(x.clamp(low, high), edges, EdgeRule.RIGHT), SCORE_BINS).double() / len(x)
        for x in (id_scores, ood_scores)
    ]
    return {"edges": numbers(edges), "id": numbers(fractions[0]), "ood": numbers(fractions[1])}


def norm_data(predictions: AnyPredictions) -> Plain | None:
    """Return the confidence indicator of FeDLaS on these samples: the standardised L1 norm of the features.

    Training uses running statistics; here, mean and standard deviation are computed from these samples.
    """
    if predictions.features is None or len(predictions) < 2:
        return None
    norm = exact(-feature_norm(predictions.features))
    deviation = float(norm.std())
    if not 0 < deviation < math.inf:
        return None
    gamma = (norm - norm.mean()) / deviation
    correct, confidence = exact(predictions.correct).to(gamma.device), exact(predictions.confidence).to(gamma.device)
    low, high = (float(x) for x in torch.aminmax(gamma.clamp(-4, 4)))
    edges = torch.linspace(low, high, NORM_BINS + 1, dtype=torch.float64)
    index = bin_index(gamma.clamp(low, high), edges, EdgeRule.RIGHT)
    return {
        "mean": number(norm.mean()),
        "deviation": number(deviation),
        "edges": numbers(edges),
        **_counts_data(*(add_up(weights, index, NORM_BINS) for weights in (correct, 1 - correct))),
        "groups": _groups(gamma, confidence, correct),
    }


def _groups(
    gamma: Float64[Tensor, " n"], confidence: Float64[Tensor, " n"], correct: Float64[Tensor, " n"]
) -> list[list[float]]:
    """Average indicator, confidence and correctness over ten equal parts of the samples, by increasing norm."""
    groups = 10
    group = bin_index(gamma, equal_mass_edges(gamma, groups), EdgeRule.RIGHT)
    counts = count_up(group, groups)
    means = [add_up(x, group, groups) / counts.clamp_min(1) for x in (gamma, confidence, correct)]
    rows = zip(counts.tolist(), *(x.tolist() for x in means), strict=True)
    return [[*map(number, row)] for row in rows if row[0]]


def training_data(log: Sequence[Mapping[str, Any]], recipe: Mapping[str, Any] | None = None) -> Plain | None:
    """Return the curves of a run's log: loss, accuracy, calibration, gate and feedback; long logs are subsampled."""
    records = [record for record in log if "epoch" in record and "train" in record and "val" in record]
    if not records:
        return None
    step = math.ceil(len(records) / EPOCHS)
    records = [
        record for position, record in enumerate(records) if position % step == 0 or position == len(records) - 1
    ]
    data: Plain = {"epoch": [int(record["epoch"]) for record in records]}
    data["loss"] = [_maybe(record["train"].get("loss")) for record in records]
    for name in ("accuracy", "ece", "over_ece", "under_ece"):
        data[name] = [_maybe(record["val"].get(name)) for record in records]
    beta = ((recipe or {}).get("loss_options") or {}).get("beta")
    data["beta"] = _maybe(beta)
    if all(record.get("gate") for record in records):
        names = ("positive", "flip_rate", "alpha_ratio", "against_gamma")
        data["gate"] = {name: [_maybe(record["gate"].get(name)) for record in records] for name in names}
        data["gate"]["gamma"] = _gamma(records[-1]["gate"].get("gamma_histogram"), data["beta"])
    states: list[Mapping[str, Any]] = [record.get("loss_state") or {} for record in records]
    if all({"strengths", "gaps"} <= set(record) for record in states):
        data["feedback"] = {
            name: [list(map(_maybe, record[name])) for record in states] for name in ("strengths", "gaps")
        }
    return data


def _gamma(recorded: Any, beta: float | None) -> Plain | None:
    """Return the histogram of gamma in an epoch, and the smoothing of both gate modes at the centre of each bin.

    The first and last counts are of values beyond the edges; they get an additional bin on either side.
    """
    if not isinstance(recorded, Mapping):
        return None
    edges, counts = list(map(float, recorded["edges"])), list(map(float, recorded["counts"]))
    if len(counts) != len(edges) + 1 or len(edges) < 2:
        return None
    step = edges[1] - edges[0]
    ends = [edges[0] - step, *edges, edges[-1] + step]
    centres = [(low + high) / 2 for low, high in pairwise(ends)]
    evenly = [ends[0] + step_number / 80 * (ends[-1] - ends[0]) for step_number in range(81)]
    total = sum(counts) or 1.0
    return {
        "edges": edges,
        "counts": counts,
        "fractions": numbers([count / total for count in counts]),
        "ends": numbers(ends),
        "centres": numbers(centres),
        "at_centres": _ratios(centres, beta),
        "curve": _ratios(evenly, beta),
    }


def _ratios(gammas: Sequence[float], beta: float | None) -> list[list[float | int]]:
    """Return the smoothing of both gate modes at some values of gamma; empty if beta is unknown."""
    if beta is None:
        return []
    return [numbers([gamma, alpha_ratio(gamma, beta, 1), alpha_ratio(gamma, beta, -1)]) for gamma in gammas]


def alpha_ratio(gamma: float, beta: float, mode: int) -> float:
    """Return the smoothing of a sample, as a multiple of alpha: 2 sigmoid(beta gamma) in positive mode."""
    return 1 + math.tanh(beta * mode * gamma / 2)


def comparison_data(names: Sequence[str], tests: Sequence[PairedTest]) -> Plain | None:
    """Return the paired tests between models, if any; a model is given by its index in the list of names."""
    if not tests:
        return None
    rows: list[Plain] = []
    for test in tests:
        tested: Plain = {"first": names.index(test.first), "second": names.index(test.second), "metric": test.metric}
        comparison = test.comparison
        if comparison is None:
            rows.append(tested | {"reason": text_data(test.reason)})
            continue
        rows.append(
            tested
            | {
                "name": comparison.first.definition.estimator,
                "percent": comparison.first.definition.unit == "fraction",
                "difference": comparison.difference,
                "low": comparison.interval.low,
                "high": comparison.interval.high,
                "p": comparison.p_value,
                "p_is_bound": comparison.p_value_is_bound,
                "better": {"first": 0, "second": 1}.get(comparison.better or ""),
            }
        )
    return {"tests": rows}


def number(value: Any) -> float | int:
    """Return a plain number at full precision; whole numbers become integers."""
    plain = float(value)
    assert math.isfinite(plain), plain
    return int(plain) if plain.is_integer() and abs(plain) < 1e15 else plain


def numbers(values: Tensor | Sequence[float]) -> list[float | int]:
    """Return plain numbers at full precision."""
    return [number(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


def optional_numbers(values: Float64[Tensor, " n"]) -> list[float | int | None]:
    """Return plain numbers, and None where a number is not finite."""
    return [_maybe(value) for value in values.tolist()]


def _maybe(value: Any) -> float | int | None:
    """Return a finite number, or None for anything else."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number(value) if usable else None
