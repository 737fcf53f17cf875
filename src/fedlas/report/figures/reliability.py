"""Reliability diagrams: accuracy against confidence.

Intervals are Clopper-Pearson intervals. Empty bins are not drawn. A histogram of the confidences is drawn below each
diagram. The smooth diagram uses a kernel instead of bins, with the bandwidth of the smooth ECE.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedlas.formatting import percent
from fedlas.metrics.bin_sums import Bins
from fedlas.metrics.inputs import MetricInput, pairs
from fedlas.metrics.result import Result
from fedlas.metrics.smooth import smooth_ece
from fedlas.report.figures.style import (
    COLUMN,
    DARK,
    OVER,
    PAGE,
    PALE,
    UNDER,
    figure_of_size,
    fit_label,
    legend_below,
    line_style,
    title_width,
)
from fedlas.report.page_data import smooth_data
from fedlas.report.reliability_bins import non_empty_bins

GAPS = {
    "confidence above accuracy": {"edgecolor": OVER, "hatch": "//////"},
    "confidence below accuracy": {"edgecolor": UNDER, "hatch": "\\\\\\\\\\\\"},
}
TALLEST = 8.4  # inches: height of a page without the legend
BANDS = 4  # largest number of models with bands; more bands would overlap
WINDOW = 0.015  # points of a smooth curve that are further apart in confidence are not connected


@dataclass(frozen=True)
class Reliability:
    """Data of a reliability diagram; each sequence has one entry for each non-empty bin.

    Args:
        title: title of the diagram.
        confidence: mean confidence.
        accuracy: accuracy.
        fraction: fraction of all samples.
        ece: expected calibration error.
        lower: lower edge.
        upper: upper edge.
        low: lower end of the confidence interval of the accuracy.
        high: upper end of that interval.
        level: confidence level of the intervals.
        ece_interval: confidence interval of the ECE, if known; its width sets the digits that are shown.
    """

    title: str
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    fraction: tuple[float, ...]
    ece: float
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    level: float = 0.95
    ece_interval: tuple[float, float] | None = None

    @property
    def ece_text(self) -> str:
        """The ECE in percent."""
        return percent(self.ece, *(self.ece_interval or ()))


def reliability_data(bins: Bins, ece: float, title: str, level: float = 0.95) -> Reliability:
    """Return the data of a reliability diagram; an ECE that is a `Result` is shown with the digits of its interval."""
    interval = ece.interval if isinstance(ece, Result) else None
    lower, upper, samples, confidence, accuracy, low, high, _ = zip(*non_empty_bins(bins, level), strict=True)
    return Reliability(
        title=title,
        confidence=confidence,
        accuracy=accuracy,
        fraction=tuple(count / sum(samples) for count in samples),
        ece=float(ece),
        lower=lower,
        upper=upper,
        low=low,
        high=high,
        level=level,
        ece_interval=None if interval is None else (interval.low, interval.high),
    )


def reliability_figure(rows: Mapping[str, Sequence[Reliability]]) -> Any:
    """Draw reliability diagrams as bars, one row for each name; return the matplotlib figure.

    The height of a bar is the accuracy of its bin, and a hatched area extends from the accuracy to the confidence.
    Hatches rise in over-confident bins and fall in under-confident ones.
    """
    columns = max(len(row) for row in rows.values())
    width = COLUMN if columns <= 2 else max(PAGE, 1.3 * columns)
    side = min(2.2, (width - 0.5) / columns, (TALLEST / len(rows) - 0.5) / 1.3)
    with figure_of_size(width, (1.3 * side + 0.5) * len(rows) + 0.6) as figure:
        ratios = [4.0, 1.0] * len(rows)
        panels = figure.subplots(2 * len(rows), columns, squeeze=False, sharex=True, sharey="row", height_ratios=ratios)
        for number, (name, row) in enumerate(rows.items()):
            above, below = panels[2 * number], panels[2 * number + 1]
            for position in range(columns):
                if position < len(row):
                    _draw_bars(above[position], below[position], row[position])
                else:
                    above[position].set_axis_off()
                    below[position].set_axis_off()
            above[0].set_ylabel(f"{fit_label(name, side)}\naccuracy" if name else "accuracy")
            below[0].set_ylabel("fraction")
            below[0].set_ylim(0, None)  # set last, for the whole row: it turns autoscaling off
        lengths = [len(row) for row in rows.values()]
        for position in range(columns):
            last = max(number for number, length in enumerate(lengths) if length > position)
            panels[2 * last + 1][position].set_xlabel("confidence")
            panels[2 * last + 1][position].tick_params(labelbottom=True)
        for name, look in GAPS.items():
            panels[0][0].bar(0, 0, facecolor="none", linewidth=0, label=name, **look)
        legend_below(figure, panels[0][0], most=2)
    return figure


def _draw_bars(panel: Any, below: Any, data: Reliability) -> None:
    """Draw a reliability diagram, and the histogram below it."""
    panel.plot([0, 1], [0, 1], color=PALE, linewidth=0.8, linestyle="--", zorder=3)
    panel.plot(data.confidence, data.accuracy, marker="o", markersize=2, color=DARK, linestyle="none", zorder=5)
    panel.vlines(data.confidence, data.low, data.high, color=DARK, linewidth=0.6, zorder=4)
    for n, (lower, upper) in enumerate(_visible_edges(data)):
        accuracy, confidence = data.accuracy[n], data.confidence[n]
        box = {"x": lower, "width": upper - lower, "align": "edge", "edgecolor": DARK, "linewidth": 0.4}
        panel.bar(height=accuracy, facecolor="0.85", **box)
        look = GAPS["confidence above accuracy" if confidence > accuracy else "confidence below accuracy"]
        gap = {"bottom": min(accuracy, confidence), "height": abs(confidence - accuracy)}
        panel.bar(**box | gap | look | {"facecolor": "none", "linewidth": 0})
        below.bar(height=data.fraction[n], facecolor=PALE, **box)
    ticks = (0, 0.5, 1)
    panel.set(xlim=(0, 1), ylim=(0, 1), xticks=ticks, yticks=ticks)
    panel.set_title(f"{fit_label(data.title, title_width(panel))}\nECE {data.ece_text}", fontsize=8)


def _visible_edges(data: Reliability) -> Iterator[tuple[float, float]]:
    """Yield the edges of each bin, at least 0.01 apart so that the bar is visible."""
    for lower, upper in zip(data.lower, data.upper, strict=True):
        margin = max(0.0, 0.01 - (upper - lower)) / 2
        yield lower - margin, upper + margin


def reliability_lines_figure(models: Sequence[Reliability]) -> Any:
    """Draw the reliability of several models as lines in one panel; return the matplotlib figure.

    Bands show the confidence intervals of the accuracies of up to four models.
    """
    with _panels(len(models)) as (figure, panel, below):
        for number, data in enumerate(models):
            look = line_style(number)
            name = f"{fit_label(data.title, 1.5, 7)}, ECE {data.ece_text}"
            if len(models) <= BANDS:
                panel.fill_between(data.confidence, data.low, data.high, color=look.colour, alpha=0.12, linewidth=0)
            if len(models) <= BANDS and len(data.confidence) == 1:  # a band needs two points
                panel.vlines(data.confidence, data.low, data.high, color=look.colour, linewidth=1)
            panel.plot(data.confidence, data.accuracy, label=name, clip_on=False, **look.with_markers(1))
            edges, fractions = _histogram_steps(data)
            below.stairs(fractions, edges, edgecolor=look.colour, linestyle=look.dash, linewidth=1)
        below.set_ylabel("fraction")
        legend_below(figure, panel)
    return figure


@contextmanager
def _panels(models: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield a figure with a panel for curves, and a lower one for the distribution of the confidence."""
    with figure_of_size(COLUMN, 3.1 + 0.14 * -(-models // 2)) as figure:
        panel, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        panel.plot([0, 1], [0, 1], color=PALE, linewidth=0.8, linestyle="--")
        yield figure, panel, below
        panel.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
        below.set(xlabel="confidence", ylim=(0, None))


def _histogram_steps(data: Reliability) -> tuple[list[float], list[float]]:
    """Return bin edges and fractions of samples, with empty bins filled with zeros."""
    edges, fractions = [data.lower[0]], []
    for lower, upper, fraction in zip(data.lower, data.upper, data.fraction, strict=True):
        if lower > edges[-1]:
            edges.append(lower)
            fractions.append(0.0)
        edges.append(upper)
        fractions.append(fraction)
    return edges, fractions


@dataclass(frozen=True)
class SmoothReliability:
    """Data of a smooth reliability diagram, at points where the kernel covers a sample.

    Args:
        title: title of the diagram.
        confidence: centre of the kernel.
        accuracy: confidence minus the kernel-weighted mean gap.
        low: lower end of the approximate confidence interval of the accuracy.
        high: upper end of that interval.
        density: kernel density of the confidences.
        samples: effective number of samples under the kernel.
        bandwidth: bandwidth of the kernel.
        smooth_ece: smooth ECE with this bandwidth.
        level: confidence level of the intervals.
    """

    title: str
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    density: tuple[float, ...]
    samples: tuple[float, ...]
    bandwidth: float
    smooth_ece: float
    level: float = 0.95


def smooth_reliability_data(given: MetricInput, title: str, level: float = 0.95) -> SmoothReliability:
    """Return the data of a smooth reliability diagram; without points if the kernel covers too few samples."""
    predictions = pairs(given)
    curve = smooth_data(predictions, level)
    columns = zip(*curve["points"], strict=True) if curve["points"] else [()] * 7
    confidence, accuracy, low, high, density, samples, _ = (tuple(map(float, column)) for column in columns)
    return SmoothReliability(
        title=title,
        confidence=confidence,
        accuracy=accuracy,
        low=low,
        high=high,
        density=density,
        samples=samples,
        bandwidth=float(curve["bandwidth"]),
        smooth_ece=float(smooth_ece(predictions)),
        level=level,
    )


def smooth_reliability_figure(models: Sequence[SmoothReliability]) -> Any:
    """Draw smooth reliability diagrams of several models in one panel; return the matplotlib figure."""
    with _panels(len(models)) as (figure, panel, below):
        for number, data in enumerate(models):
            look = line_style(number)
            for piece, part in enumerate(_segments(data.confidence)):
                x, y, low, high, density = (
                    values[part] for values in (data.confidence, data.accuracy, data.low, data.high, data.density)
                )
                name = None if piece else f"{fit_label(data.title, 1.3, 7)}, smooth ECE {percent(data.smooth_ece)}"
                if len(models) <= BANDS:
                    panel.fill_between(x, low, high, color=look.colour, alpha=0.12, linewidth=0)
                panel.plot(x, y, label=name, clip_on=False, **look.with_markers(len(x)))
                below.plot(x, density, linewidth=1, **look.options)
        below.set_ylabel("density")
        legend_below(figure, panel)
    return figure


def _segments(positions: Sequence[float]) -> Iterator[slice]:
    """Split a curve where consecutive points are further apart than `WINDOW`."""
    cuts = [n for n, (left, right) in enumerate(pairwise(positions), start=1) if right - left > WINDOW]
    return (slice(start, end) for start, end in pairwise([0, *cuts, len(positions)]) if start < end)
