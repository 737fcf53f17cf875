"""Feature norms against confidence, and the activations behind them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64, UInt8
from torch import Tensor

from fedlas import formatting
from fedlas.errors import UserError
from fedlas.predictions import Predictions
from fedlas.report import page_data
from fedlas.report.figures.features import correlation, features_of, norms_of, places_by_size
from fedlas.report.figures.style import (
    COLUMN,
    DARK,
    LIGHT,
    MIDDLE,
    OVER,
    PAGE,
    PALE,
    fitted,
    grid,
    label_outside,
    legend_below,
    numbers_of,
    paper,
    shown,
    title_room,
)

SATURATED = 0.99
STEPS = 40  # of a histogram
ALIKE = "there is one sample alone, or all features are equally long: their norm cannot be normalised"


@dataclass(frozen=True)
class Indicator:
    """Feature norm and confidence of every sample.

    Args:
        title: which data.
        nci: L1 norm of the features, less the mean of all samples and in units of their deviation.
        confidence: the largest probability.
        correct: whether the answer is right.
        rank_correlation: Spearman's, between norm and confidence.
        saturated: share of samples whose confidence is above 0.99.
        saturated_low: the same, of the tenth of samples with the lowest norms.
        norm_auroc: how well the norm tells right answers from wrong ones: 1 always, 0.5 not at all.
        confidence_auroc: how well the confidence does.
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
    """Take norm and confidence from predictions with features; the norm itself, as one column, will do."""
    norm, confidence = norms_of(predictions), predictions.confidence.double().cpu()
    correct = predictions.correct.bool().cpu()
    if len(norm) < 2 or not float(norm.std()) > 0:
        raise UserError(ALIKE)
    lowest = norm.argsort()[: max(1, len(norm) // 10)]
    return Indicator(
        title=title,
        nci=numbers_of((norm - norm.mean()) / norm.std()),
        confidence=numbers_of(confidence),
        correct=tuple(correct.tolist()),
        rank_correlation=correlation(places_by_size(norm), places_by_size(confidence)),
        saturated=float((confidence > SATURATED).double().mean()),
        saturated_low=float((confidence[lowest] > SATURATED).double().mean()),
        norm_auroc=_in_order(norm, correct),
        confidence_auroc=_in_order(confidence, correct),
    )


def indicator_figure(data: Indicator) -> Any:
    """Draw each sample's norm against its confidence, and how both are distributed; a matplotlib figure."""
    with paper(COLUMN, 3.2) as figure:
        ratios = {"width_ratios": (4, 1), "height_ratios": (1, 4)}
        (top, corner), (panel, side) = figure.subplots(2, 2, sharex="col", sharey="row", gridspec_kw=ratios)
        corner.remove()
        for wanted, marker, colour, size in ((True, "o", MIDDLE, 4), (False, "x", DARK, 5)):
            places = [n for n, correct in enumerate(data.correct) if correct is wanted]
            name = f"{'right' if wanted else 'wrong'} ({len(places):,})"
            x, y = ([values[n] for n in places] for values in (data.nci, data.confidence))
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
        shares = f"confidence above {SATURATED}: {above} of all,\n{low} of the tenth with the lowest norms"
        figure.suptitle(f"{shown(data.title, 56)}\n{shares}", fontsize=7)
    return figure


@dataclass(frozen=True)
class Norms:
    """The indicator of FeDLaS on some samples, beside confidence and accuracy.

    Training normalises by running statistics; here mean and deviation are those of the samples.

    Args:
        title: whose features.
        mean: of the L1 norm of the features.
        deviation: of the norm.
        edges: of bins of the indicator.
        right: how many right answers are in each.
        wrong: how many wrong ones.
        nci: mean of the indicator in each tenth of the samples, from the shortest features to the longest.
        confidence: mean confidence there.
        accuracy: share of right answers there.
        samples: how many there are.
    """

    title: str
    mean: float
    deviation: float
    edges: tuple[float, ...]
    right: tuple[float, ...]
    wrong: tuple[float, ...]
    nci: tuple[float, ...]
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    samples: tuple[int, ...]


def norm_data(predictions: Predictions, title: str) -> Norms:
    """Compare the feature norms of samples with their confidence and correctness."""
    held = page_data.norm_data(predictions)
    if held is None:
        features_of(predictions)
        raise UserError(ALIKE)
    edges, correct, incorrect = (tuple(map(float, held[name])) for name in ("edges", "correct", "incorrect"))
    samples, *means = zip(*held["groups"], strict=True)
    nci, confidence, accuracy = (tuple(map(float, column)) for column in means)
    return Norms(
        title=title,
        mean=float(held["mean"]),
        deviation=float(held["deviation"]),
        edges=edges,
        right=correct,
        wrong=incorrect,
        nci=nci,
        confidence=confidence,
        accuracy=accuracy,
        samples=tuple(map(int, samples)),
    )


def has_norms(predictions: Predictions) -> bool:
    """Return whether samples have features whose norms differ."""
    return page_data.norm_data(predictions) is not None


def norm_figure(models: Sequence[Norms]) -> Any:
    """Draw confidence and accuracy over the normalised feature norm, and how it is spread; a matplotlib figure."""
    with grid(len(models), height=1.8, share=False) as (figure, axes):
        for panel, data in zip(axes, models, strict=True):
            most = max(*data.right, *data.wrong)
            for counts, look in (
                (data.right, {"facecolor": "0.88"}),
                (data.wrong, {"facecolor": "none", "hatch": "/////"}),
            ):
                tall = [0.6 * count / most for count in counts]
                edge = OVER if "hatch" in look else PALE
                name = "wrong answers" if "hatch" in look else "right answers"
                panel.stairs(tall, data.edges, fill=True, edgecolor=edge, linewidth=0.6, label=name, zorder=0, **look)
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
            panel.set_title(fitted(data.title, title_room(panel)), fontsize=8)
        label_outside(axes, r"normalised $\|z\|_1$ (NCI)", "confidence, accuracy")
        legend_below(figure, axes[0], most=2 if len(models) < 3 else 4)
    return figure


@dataclass(frozen=True)
class Seen:
    """One image, and what it makes of a network's last features.

    Args:
        index: position in the data set's own order.
        label: its class.
        prediction: what the network takes it for.
        confidence: the largest probability.
        norm: L1 norm of the features.
        features: one for each unit.
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
        title: which data.
        high: the highest norms, each of another class.
        low: the lowest norms, each of another class.
        flatness_high: mean of (||z||_1 / ||z||_2)^2 / width over the tenth of samples with the highest norms: 1 where
            all units are equally active, 1 / width where one is alone.
        flatness_low: the same, of the lowest norms.
    """

    title: str
    high: tuple[Seen, ...]
    low: tuple[Seen, ...]
    flatness_high: float
    flatness_low: float


def activations_data(
    predictions: Predictions, images: UInt8[Tensor, "n channels height width"], title: str, count: int = 3
) -> Activations:
    """Find the samples with the highest and lowest norms; of each class at most one, so that not all look alike."""
    features = features_of(predictions)
    norm = norms_of(predictions)
    order = norm.argsort(stable=True).tolist()
    flat = (norm / torch.linalg.vector_norm(features, dim=1).clamp_min(1e-300)) ** 2 / features.shape[1]
    tenth = max(1, len(order) // 10)
    names = predictions.class_names or tuple(str(n) for n in range(predictions.num_classes))
    labels = predictions.labels.tolist()
    index = predictions.index

    def seen(place: int) -> Seen:
        return Seen(
            index=place if index is None else int(index[place]),
            label=names[labels[place]],
            prediction=names[int(predictions.prediction[place])],
            confidence=float(predictions.confidence[place]),
            norm=float(norm[place]),
            features=numbers_of(features[place]),
            pixels=tuple(tuple(row) for row in images[place].float().mean(0).round().int().tolist()),
        )

    return Activations(
        title=title,
        high=tuple(seen(place) for place in _of_other_classes(order[::-1], labels, count)),
        low=tuple(seen(place) for place in _of_other_classes(order, labels, count)),
        flatness_high=float(flat[order[-tenth:]].mean()),
        flatness_low=float(flat[order[:tenth]].mean()),
    )


def _of_other_classes(order: Sequence[int], labels: Sequence[int], count: int) -> list[int]:
    first = {labels[place]: place for place in reversed(order)}  # of each class the one that comes first
    chosen = set(first.values())
    return [place for place in order if place in chosen][:count]


def activations_figure(data: Activations) -> Any:
    """Draw images beside the activations that they cause, high norms on the left; a matplotlib figure."""
    rows = max(len(data.high), len(data.low))
    most = max(max(one.features) for one in (*data.high, *data.low))
    least = min(0.0, *(min(one.features) for one in (*data.high, *data.low)))
    with paper(PAGE, 0.5 + 1.1 * rows) as figure:
        ratios = {"width_ratios": (1, 3, 1, 3)}
        panels = figure.subplots(rows, 4, squeeze=False, gridspec_kw=ratios)
        for first, column, colour in ((0, data.high, MIDDLE), (2, data.low, LIGHT)):
            for line, one in zip(panels, column, strict=False):
                picture, panel = line[first : first + 2]
                picture.imshow(one.pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                panel.stairs(one.features, fill=True, color=colour)
                panel.stairs(one.features, color=DARK, linewidth=0.4)
                panel.set(ylim=(1.05 * least, 1.05 * most), xlim=(0, len(one.features)))
                label, prediction = (fitted(name, 1.1, 7) for name in (one.label, one.prediction))
                named = label if one.prediction == one.label else f"{label}, taken for {prediction}"
                norm, probability = formatting.significant(one.norm), formatting.probability(one.confidence)
                numbers = rf"$\|z\|_1$ = {norm}, probability {probability}"
                panel.set_title(f"{named}\n{numbers}", fontsize=7)
                panel.set_ylabel("activation")
        for picture in panels[:, ::2].flat:
            picture.set_axis_off()
        for panel in panels[-1, 1::2]:
            panel.set_xlabel("unit of the last hidden layer")
        figure.suptitle(
            f"{shown(data.title, 90)}\nhighest norms (left) and lowest norms (right), each of another class",
            fontsize=8,
        )
    return figure


def _in_order(scores: Float64[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Return the AUROC of scores; NaN without pairs."""
    many, others = int(positive.sum()), int((~positive).sum())
    above = float(places_by_size(scores)[positive].sum()) - many * (many + 1) / 2
    return above / (many * others) if many and others else math.nan
