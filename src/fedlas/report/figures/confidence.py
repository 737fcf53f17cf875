"""Histograms of confidence, the over- and under-confident parts of the ECE, and calibration gaps by class."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedlas import formatting
from fedlas.evaluation_report import State
from fedlas.extras import optional_module
from fedlas.metrics.bin_sums import exact
from fedlas.metrics.inputs import MetricInput, pairs
from fedlas.metrics.result import Result
from fedlas.predictions import AnyPredictions, TopLabelPredictions
from fedlas.report import page_data
from fedlas.report.figures.style import (
    COLUMN,
    DARK,
    OVER,
    PALE,
    UNDER,
    figure_of_size,
    fit_label,
    label_outer_axes,
    legend_below,
    panel_grid,
    safe_label,
    title_width,
)

CLASSES = 20  # largest number of rows of a class map
LARGEST = 0.5  # gap from which a square fills its cell


@dataclass(frozen=True)
class Confidences:
    """Histograms of the confidence of correct and incorrect predictions.

    Args:
        title: name of the model.
        edges: edges of the bins.
        correct: number of correct predictions in each bin.
        incorrect: number of incorrect predictions in each bin.
        confidence: mean confidence of all samples.
        accuracy: accuracy on all samples.
    """

    title: str
    edges: tuple[float, ...]
    correct: tuple[float, ...]
    incorrect: tuple[float, ...]
    confidence: float
    accuracy: float


def confidence_data(given: MetricInput, title: str) -> Confidences:
    """Count correct and incorrect predictions in narrow bins of confidence."""
    samples = pairs(given)
    histogram = page_data.confidence_data(samples)
    edges, correct, incorrect = (tuple(map(float, histogram[name])) for name in ("edges", "correct", "incorrect"))
    means = (float(exact(values).mean()) for values in (samples.confidence, samples.correct))
    return Confidences(title, edges, correct, incorrect, *means)


def confidence_figure(models: Sequence[Confidences]) -> Any:
    """Draw the confidence of correct and incorrect predictions of each model; return the matplotlib figure."""
    with panel_grid(len(models)) as (figure, axes):
        for panel, data in zip(axes, models, strict=True):
            for name, counts, look in (
                ("correct", data.correct, {"facecolor": "0.8", "edgecolor": DARK}),
                ("incorrect", data.incorrect, {"facecolor": "none", "edgecolor": OVER, "hatch": "/////"}),
            ):
                fractions = [count / max(1.0, sum(counts)) for count in counts]
                panel.stairs(fractions, data.edges, label=f"{name} predictions", fill=True, linewidth=0.8, **look)
            panel.axvline(data.confidence, color=DARK, linestyle="--", linewidth=0.9, label="mean confidence")
            panel.axvline(data.accuracy, color=DARK, linestyle=":", linewidth=1.2, label="accuracy")
            correct, incorrect = (formatting.count(sum(counts)) for counts in (data.correct, data.incorrect))
            panel.set_title(
                f"{fit_label(data.title, title_width(panel))}\n{correct} correct, {incorrect} incorrect", fontsize=8
            )
        axes[0].set(xlim=(0, 1), ylim=(0, None))  # set last, for all panels: it turns autoscaling off
        label_outer_axes(axes, "confidence", "fraction")
        legend_below(figure, axes[0], most=2 if len(models) < 3 else 4)
    return figure


@dataclass(frozen=True)
class OverUnder:
    """The over-confident and under-confident parts of the ECE of one model.

    Args:
        title: name of the model.
        over: part of the bins whose confidence is above their accuracy (O-ECE).
        under: part of the bins whose confidence is below their accuracy (U-ECE).
        over_interval: confidence interval of the O-ECE, if computed.
        under_interval: confidence interval of the U-ECE, if computed.
    """

    title: str
    over: float
    under: float
    over_interval: tuple[float, float] | None = None
    under_interval: tuple[float, float] | None = None


def over_under_data(state: State, title: str) -> OverUnder:
    """Return the O-ECE and U-ECE of an evaluated state."""
    over, under = state["over_ece"], state["under_ece"]
    return OverUnder(title, float(over), float(under), _interval(over), _interval(under))


def _interval(result: Result) -> tuple[float, float] | None:
    return None if result.interval is None else (float(result.interval.low), float(result.interval.high))


def over_under_figure(models: Sequence[OverUnder]) -> Any:
    """Draw O-ECE to the right and U-ECE to the left, one row for each model; return the matplotlib figure."""
    with figure_of_size(COLUMN, 0.85 + 0.22 * len(models)) as figure:
        panel = figure.subplots()
        for row, data in enumerate(models):
            sides = (
                (1, data.over, data.over_interval, OVER, "//////"),
                (-1, data.under, data.under_interval, UNDER, "\\\\\\\\\\\\"),
            )
            for sign, value, interval, colour, hatch in sides:
                panel.barh(row, 100 * sign * value, 0.66, facecolor=colour, edgecolor=DARK, linewidth=0.5, hatch=hatch)
                if interval is not None:
                    low, high = (100 * sign * end for end in interval)
                    panel.plot([low, high], [row, row], color=DARK, linewidth=1.2, marker="|", markersize=4)
        panel.axvline(0, color=DARK, linewidth=0.6)
        most = max(0.1, 1.05 * max(abs(end) for end in panel.get_xlim()))
        panel.set(xlim=(-most, most), ylim=(len(models) - 0.5, -0.5), xlabel="U-ECE  ←  points of ECE  →  O-ECE")
        panel.set_yticks(range(len(models)), [fit_label(data.title, 1.3, 7) for data in models])
        panel.xaxis.set_major_formatter(lambda value, _: formatting.significant(abs(value)))
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
    return figure


@dataclass(frozen=True)
class ClassMap:
    """Calibration gap by predicted class and confidence.

    Args:
        title: name of the model.
        classes: number of classes.
        names: names of the classes that are shown.
        edges: edges of the bins of confidence.
        gap: mean confidence minus accuracy of the predictions of each class in each bin; None if there are none.
        samples: number of predictions of each class in each bin.
    """

    title: str
    classes: int
    names: tuple[str, ...]
    edges: tuple[float, ...]
    gap: tuple[tuple[float | None, ...], ...]
    samples: tuple[tuple[int, ...], ...]


def class_map_data(predictions: AnyPredictions, title: str, most: int = CLASSES) -> ClassMap:
    """Return the calibration gap of each class and bin, for the classes with the largest error.

    Args:
        predictions: predictions of one model.
        title: name of the model.
        most: largest number of classes that are shown.
    """
    bins = page_data.predicted_class_bins(predictions).cpu()
    error = (bins.confidence_sum - bins.correct_sum).abs().sum(1)
    order = error.argsort(descending=True, stable=True)
    if isinstance(predictions, TopLabelPredictions):  # drop classes that were never predicted
        order = order[bins.counts.sum(1)[order] > 0]
    shown_classes = order[:most].sort().values
    counts, gaps = bins.counts[shown_classes], (bins.confidence - bins.accuracy)[shown_classes]
    names = predictions.class_names or tuple(str(n) for n in range(predictions.num_classes))
    return ClassMap(
        title=title,
        classes=predictions.num_classes,
        names=tuple(names[n] for n in shown_classes.tolist()),
        edges=tuple(bins.edges.tolist()),
        gap=tuple(
            tuple(page_data.number(gap) if count else None for gap, count in zip(*row, strict=True))
            for row in zip(gaps.tolist(), counts.tolist(), strict=True)
        ),
        samples=tuple(tuple(row) for row in counts.tolist()),
    )


def class_map_figure(data: ClassMap) -> Any:
    """Draw calibration gaps as squares, by class and confidence; return the matplotlib figure.

    The area of a square is the size of the gap; a gap of 50 points fills its cell. Filled squares are over-confident,
    hollow ones under-confident.
    """
    steps = len(data.edges) - 1
    with figure_of_size(COLUMN, 1.1 + 0.19 * len(data.names)) as figure:
        panel = figure.subplots()
        rectangle = optional_module("matplotlib.patches").Rectangle
        for row, (gaps, counts) in enumerate(zip(data.gap, data.samples, strict=True)):
            for column, (gap, count) in enumerate(zip(gaps, counts, strict=True)):
                if gap is None or not count:
                    continue
                side = 0.92 * min(1.0, abs(gap) / LARGEST) ** 0.5
                corner = (column + 0.5 - side / 2, row + 0.5 - side / 2)
                colour = OVER if gap > 0 else "white"
                panel.add_patch(rectangle(corner, side, side, edgecolor=DARK, linewidth=0.6, facecolor=colour))
                panel.plot(column + 0.5, row + 0.5, ".", markersize=1, color=PALE, zorder=0)
        ticks = range(0, steps + 1, 2)
        panel.set_xticks(ticks, [formatting.edge(data.edges[n]) for n in ticks])
        panel.set_yticks([n + 0.5 for n in range(len(data.names))], [fit_label(name, 1, 7) for name in data.names])
        panel.tick_params(axis="y", length=0)
        panel.set(xlim=(0, steps), ylim=(len(data.names), 0), xlabel="confidence")
        lines = [
            safe_label(data.title),
            f"area: |confidence − accuracy|, full from {formatting.significant(100 * LARGEST)} points on",
        ]
        if len(data.names) < data.classes:
            lines.insert(1, f"{len(data.names)} of {data.classes} classes, those with the largest error")
        figure.suptitle("\n".join(lines), fontsize=7)
        for name, colour in (("over-confident", OVER), ("under-confident", "white")):
            panel.scatter([], [], marker="s", s=20, facecolor=colour, edgecolor=DARK, linewidth=0.6, label=name)
        legend_below(figure, panel)
    return figure
