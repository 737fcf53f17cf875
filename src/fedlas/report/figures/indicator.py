"""Feature norms against confidence, and activations of samples with high and low norms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, UInt8
from torch import Tensor

from fedlas import formatting
from fedlas.errors import UserError
from fedlas.ood.detection import auroc
from fedlas.predictions import Predictions
from fedlas.report import page_data
from fedlas.report.figures.features import average_ranks, correlation, feature_norms, require_features
from fedlas.report.figures.style import (
    COLUMN,
    DARK,
    LIGHT,
    MIDDLE,
    OVER,
    PAGE,
    PALE,
    figure_of_size,
    fit_label,
    label_outer_axes,
    legend_below,
    panel_grid,
    safe_label,
    title_width,
    to_floats,
)

SATURATED = 0.99
STEPS = 40  # bins of a histogram
EQUAL_NORMS = "feature norms cannot be normalised: there is only one sample, or all norms are equal"


@dataclass(frozen=True)
class Indicator:
    """Feature norm and confidence of every sample.

    Args:
        title: name of the data.
        nci: L1 norm of the features, standardised over all samples.
        confidence: largest probability of each sample.
        correct: whether the prediction is correct.
        rank_correlation: Spearman correlation of norm and confidence.
        saturated: fraction of samples whose confidence is above 0.99.
        saturated_low: the same fraction among the 10 % of samples with the lowest norms.
        norm_auroc: AUROC of the norm for detecting correct predictions.
        confidence_auroc: AUROC of the confidence for detecting correct predictions.
    """

    title: str
    nci: tuple[float, ...]
    confidence: tuple[float, ...]
    correct: tuple[bool, ...]
    rank_correlation: float
    saturated: float
    saturated_low: float
    norm_auroc: float
    confidence_auroc: float


def indicator_data(predictions: Predictions, title: str) -> Indicator:
    """Return norm and confidence of predictions with features; a single column with the norm suffices."""
    norm, confidence = feature_norms(predictions), predictions.confidence.double().cpu()
    correct = predictions.correct.bool().cpu()
    if len(norm) < 2 or not float(norm.std()) > 0:
        raise UserError(EQUAL_NORMS)
    lowest = norm.argsort()[: max(1, len(norm) // 10)]
    return Indicator(
        title=title,
        nci=to_floats((norm - norm.mean()) / norm.std()),
        confidence=to_floats(confidence),
        correct=tuple(correct.tolist()),
        rank_correlation=correlation(average_ranks(norm), average_ranks(confidence)),
        saturated=float((confidence > SATURATED).double().mean()),
        saturated_low=float((confidence[lowest] > SATURATED).double().mean()),
        norm_auroc=_auroc(norm, correct),
        confidence_auroc=_auroc(confidence, correct),
    )


def indicator_figure(data: Indicator) -> Any:
    """Draw norm against confidence, with a histogram of each; return the matplotlib figure."""
    with figure_of_size(COLUMN, 3.2) as figure:
        ratios = {"width_ratios": (4, 1), "height_ratios": (1, 4)}
        (top, corner), (panel, side) = figure.subplots(2, 2, sharex="col", sharey="row", gridspec_kw=ratios)
        corner.remove()
        for is_correct, marker, colour, size in ((True, "o", MIDDLE, 4), (False, "x", DARK, 5)):
            chosen = [n for n, correct in enumerate(data.correct) if correct is is_correct]
            name = f"{'correct' if is_correct else 'incorrect'} ({len(chosen):,})"
            x, y = ([values[n] for n in chosen] for values in (data.nci, data.confidence))
            look = {"linewidths": 0.4} if marker == "x" else {"linewidths": 0, "alpha": 0.4}
            panel.scatter(x, y, s=size, marker=marker, color=colour, label=name, rasterized=True, **look)
        top.hist(data.nci, bins=STEPS, color=PALE)
        side.hist(data.confidence, bins=STEPS, color=PALE, orientation="horizontal")
        for edge in (top, side):
            edge.tick_params(labelbottom=edge is side, labelleft=edge is top)
        top.set_ylabel("samples")
        side.set_xlabel("samples")
        side.locator_params(axis="x", nbins=2)
        panel.set(xlabel=r"normalised $\|z\|_1$ (NCI)", ylabel=r"largest softmax probability")
        figure.legend(loc="outside lower center", ncols=2, markerscale=2)
        above, low = formatting.percent(data.saturated), formatting.percent(data.saturated_low)
        subtitle = f"confidence above {SATURATED}: {above} of all,\n{low} of the 10 % with the lowest norms"
        figure.suptitle(f"{safe_label(data.title, 56)}\n{subtitle}", fontsize=7)
    return figure


@dataclass(frozen=True)
class Norms:
    """Normalised feature norms, with confidence and accuracy.

    Norms are standardised over the given samples, whereas training uses running statistics.

    Args:
        title: name of the model.
        mean: mean L1 norm of the features.
        deviation: standard deviation of the norm.
        edges: edges of the bins of the normalised norm (NCI).
        correct: number of correct predictions in each bin.
        incorrect: number of incorrect predictions in each bin.
        nci: mean NCI in each tenth of the samples, from the smallest norms to the largest.
        confidence: mean confidence in each tenth.
        accuracy: accuracy in each tenth.
        samples: number of samples in each tenth.
    """

    title: str
    mean: float
    deviation: float
    edges: tuple[float, ...]
    correct: tuple[float, ...]
    incorrect: tuple[float, ...]
    nci: tuple[float, ...]
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    samples: tuple[int, ...]


def norm_data(predictions: Predictions, title: str) -> Norms:
    """Compare the feature norms of samples with their confidence and correctness."""
    groups = page_data.norm_data(predictions)
    if groups is None:
        require_features(predictions)
        raise UserError(EQUAL_NORMS)
    edges, correct, incorrect = (tuple(map(float, groups[name])) for name in ("edges", "correct", "incorrect"))
    samples, *means = zip(*groups["groups"], strict=True)
    nci, confidence, accuracy = (tuple(map(float, column)) for column in means)
    return Norms(
        title=title,
        mean=float(groups["mean"]),
        deviation=float(groups["deviation"]),
        edges=edges,
        correct=correct,
        incorrect=incorrect,
        nci=nci,
        confidence=confidence,
        accuracy=accuracy,
        samples=tuple(map(int, samples)),
    )


def norm_figure(models: Sequence[Norms]) -> Any:
    """Draw confidence and accuracy over the normalised feature norm, with its histogram; return the figure."""
    with panel_grid(len(models), height=1.8, share_axes=False) as (figure, axes):
        for panel, data in zip(axes, models, strict=True):
            most = max(*data.correct, *data.incorrect)
            for name, counts, look in (
                ("correct", data.correct, {"facecolor": "0.88", "edgecolor": PALE}),
                ("incorrect", data.incorrect, {"facecolor": "none", "edgecolor": OVER, "hatch": "/////"}),
            ):
                heights, label = [0.6 * count / most for count in counts], f"{name} predictions"
                panel.stairs(heights, data.edges, fill=True, linewidth=0.6, label=label, zorder=0, **look)
            panel.plot(data.nci, data.confidence, color=DARK, marker="o", label="mean confidence")
            panel.plot(
                data.nci,
                data.accuracy,
                color=MIDDLE,
                marker="s",
                linestyle="--",
                markerfacecolor="white",
                label="accuracy",
            )
            panel.set(ylim=(0, 1.02), xlim=(data.edges[0], data.edges[-1]))
            panel.set_title(fit_label(data.title, title_width(panel)), fontsize=8)
        label_outer_axes(axes, r"normalised $\|z\|_1$ (NCI)", "confidence, accuracy")
        legend_below(figure, axes[0], most=2 if len(models) < 3 else 4)
    return figure


@dataclass(frozen=True)
class ActivationExample:
    """One image and the features of the network for it.

    Args:
        index: index in the data set.
        label: name of the true class.
        prediction: name of the predicted class.
        confidence: largest probability.
        norm: L1 norm of the features.
        features: activation of each unit.
        pixels: rows of grey values from 0 to 255.
    """

    index: int
    label: str
    prediction: str
    confidence: float
    norm: float
    features: tuple[float, ...]
    pixels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Activations:
    """Images with high and with low feature norms.

    Args:
        title: name of the data.
        high: images with the highest norms, at most one of each class.
        low: images with the lowest norms, at most one of each class.
        flatness_high: mean of (||z||_1 / ||z||_2)^2 / width over the 10 % of samples with the highest norms: 1 if all
            units are equally active, 1 / width if a single one is active.
        flatness_low: the same mean over the 10 % with the lowest norms.
    """

    title: str
    high: tuple[ActivationExample, ...]
    low: tuple[ActivationExample, ...]
    flatness_high: float
    flatness_low: float


def activations_data(
    predictions: Predictions, images: UInt8[Tensor, "n channels height width"], title: str, count: int = 3
) -> Activations:
    """Return the samples with the highest and lowest norms, at most one of each class."""
    features = require_features(predictions)
    norm = feature_norms(predictions)
    order = norm.argsort(stable=True).tolist()
    flat = (norm / torch.linalg.vector_norm(features, dim=1).clamp_min(1e-300)) ** 2 / features.shape[1]
    tenth = max(1, len(order) // 10)
    names = predictions.class_names or tuple(str(n) for n in range(predictions.num_classes))
    labels = predictions.labels.tolist()
    index = predictions.index

    def example(row: int) -> ActivationExample:
        return ActivationExample(
            index=row if index is None else int(index[row]),
            label=names[labels[row]],
            prediction=names[int(predictions.prediction[row])],
            confidence=float(predictions.confidence[row]),
            norm=float(norm[row]),
            features=to_floats(features[row]),
            pixels=tuple(tuple(line) for line in images[row].float().mean(0).round().int().tolist()),
        )

    return Activations(
        title=title,
        high=tuple(example(row) for row in _first_per_class(order[::-1], labels, count)),
        low=tuple(example(row) for row in _first_per_class(order, labels, count)),
        flatness_high=float(flat[order[-tenth:]].mean()),
        flatness_low=float(flat[order[:tenth]].mean()),
    )


def _first_per_class(order: Sequence[int], labels: Sequence[int], count: int) -> list[int]:
    """Return the first sample of each class, at most `count`."""
    first = {labels[row]: row for row in reversed(order)}
    chosen = set(first.values())
    return [row for row in order if row in chosen][:count]


def activations_figure(data: Activations) -> Any:
    """Draw images with their activations, high norms on the left; return the matplotlib figure."""
    rows = max(len(data.high), len(data.low))
    most = max(max(example.features) for example in (*data.high, *data.low))
    least = min(0.0, *(min(example.features) for example in (*data.high, *data.low)))
    with figure_of_size(PAGE, 0.5 + 1.1 * rows) as figure:
        ratios = {"width_ratios": (1, 3, 1, 3)}
        panels = figure.subplots(rows, 4, squeeze=False, gridspec_kw=ratios)
        for first, column, colour in ((0, data.high, MIDDLE), (2, data.low, LIGHT)):
            for row, example in zip(panels, column, strict=False):
                picture, panel = row[first : first + 2]
                picture.imshow(example.pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                panel.stairs(example.features, fill=True, color=colour)
                panel.stairs(example.features, color=DARK, linewidth=0.4)
                panel.set(ylim=(1.05 * least, 1.05 * most), xlim=(0, len(example.features)))
                label, prediction = (fit_label(name, 1.1, 7) for name in (example.label, example.prediction))
                class_text = label if example.prediction == example.label else f"{label}, predicted {prediction}"
                norm, probability = formatting.significant(example.norm), formatting.probability(example.confidence)
                numbers = rf"$\|z\|_1$ = {norm}, probability {probability}"
                panel.set_title(f"{class_text}\n{numbers}", fontsize=7)
                panel.set_ylabel("activation")
        for picture in panels[:, ::2].flat:
            picture.set_axis_off()
        for panel in panels[-1, 1::2]:
            panel.set_xlabel("unit of the last hidden layer")
        figure.suptitle(
            f"{safe_label(data.title, 90)}\nhighest norms (left) and lowest norms (right), one per class",
            fontsize=8,
        )
    return figure


def _auroc(scores: Float64[Tensor, " n"], correct: Bool[Tensor, " n"]) -> float:
    """Return the AUROC of scores for detecting correct predictions; NaN if all or none are correct."""
    return math.nan if correct.all() or not correct.any() else float(auroc(scores[~correct], scores[correct]))
