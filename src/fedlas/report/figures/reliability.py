"""Reliability diagrams: how often a model is right, where it says how sure it is.

Ranges are those of Clopper and Pearson. Empty bins are not drawn, and below each diagram stands where the samples are.
The smooth diagram has no bins: a window slides over confidence, as wide as the smooth ECE chooses it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedlas.formatting import percent
from fedlas.metrics.bin_sums import Bins
from fedlas.metrics.inputs import Given, pairs
from fedlas.metrics.result import Result
from fedlas.metrics.smooth import smooth_ece
from fedlas.report.figures.style import (
    COLUMN,
    DARK,
    OVER,
    PAGE,
    PALE,
    UNDER,
    fitted,
    legend_below,
    paper,
    stroke,
    title_room,
)
from fedlas.report.page_data import smooth_data
from fedlas.report.reliability_bins import non_empty_bins

GAPS = {
    "confidence above accuracy": {"edgecolor": OVER, "hatch": "//////"},
    "confidence below accuracy": {"edgecolor": UNDER, "hatch": "\\\\\\\\\\\\"},
}
TALLEST = 8.4  # inches: what fits on a page, with a legend below
BANDS = 4  # more of them hide each other
WINDOW = 0.015  # of confidence: further apart, two places of a smooth curve have an empty one between them


@dataclass(frozen=True)
class Reliability:
    """What a reliability diagram shows.

    Args:
        title: what the diagram is of.
        confidence: mean confidence of each filled bin.
        accuracy: share of right answers in it.
        share: share of all samples in it.
        ece: expected calibration error.
        lower: lower edge of each filled bin.
        upper: its upper edge.
        low: lower end of the range of its accuracy.
        high: upper end.
        level: how often such a range holds the true accuracy.
        ece_interval: confidence interval of the ECE, if known; its width sets the digits that are shown.
    """

    title: str
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    share: tuple[float, ...]
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
    places = non_empty_bins(bins, level)
    samples = sum(place.samples for place in places)
    return Reliability(
        title=title,
        confidence=tuple(place.confidence for place in places),
        accuracy=tuple(place.accuracy for place in places),
        share=tuple(place.samples / samples for place in places),
        ece=float(ece),
        lower=tuple(place.lower for place in places),
        upper=tuple(place.upper for place in places),
        low=tuple(place.low for place in places),
        high=tuple(place.high for place in places),
        level=level,
        ece_interval=None if interval is None else (interval.low, interval.high),
    )


def reliability_figure(rows: Mapping[str, Sequence[Reliability]]) -> Any:
    """Draw reliability diagrams as bars, a row of them for each name; a matplotlib figure.

    A bar ends at the accuracy of its bin and the hatched part at its confidence; the hatches of bins that are too sure
    rise, those of bins that are not sure enough fall.
    """
    columns = max(len(row) for row in rows.values())
    width = COLUMN if columns <= 2 else max(PAGE, 1.3 * columns)
    side = min(2.2, (width - 0.5) / columns, (TALLEST / len(rows) - 0.5) / 1.3)
    with paper(width, (1.3 * side + 0.5) * len(rows) + 0.6) as figure:
        ratios = [4.0, 1.0] * len(rows)
        panels = figure.subplots(2 * len(rows), columns, squeeze=False, sharex=True, sharey="row", height_ratios=ratios)
        for number, (name, row) in enumerate(rows.items()):
            above, below = panels[2 * number], panels[2 * number + 1]
            for place in range(columns):
                if place < len(row):
                    _draw_bars(above[place], below[place], row[place])
                else:
                    above[place].set_axis_off()
                    below[place].set_axis_off()
            above[0].set_ylabel(f"{fitted(name, side)}\naccuracy" if name else "accuracy")
            below[0].set_ylabel("share")
            below[0].set_ylim(0, None)  # of the whole row, and only now: it ends the search for room
        lengths = [len(row) for row in rows.values()]
        for place in range(columns):
            last = max(number for number, length in enumerate(lengths) if length > place)
            panels[2 * last + 1][place].set_xlabel("confidence")
            panels[2 * last + 1][place].tick_params(labelbottom=True)
        for name, look in GAPS.items():
            panels[0][0].bar(0, 0, facecolor="none", linewidth=0, label=name, **look)
        legend_below(figure, panels[0][0], most=2)
    return figure


def _draw_bars(panel: Any, below: Any, data: Reliability) -> None:
    panel.plot([0, 1], [0, 1], color=PALE, linewidth=0.8, linestyle="--", zorder=3)
    panel.plot(data.confidence, data.accuracy, marker="o", markersize=2, color=DARK, linestyle="none", zorder=5)
    panel.vlines(data.confidence, data.low, data.high, color=DARK, linewidth=0.6, zorder=4)
    for place, (lower, upper) in enumerate(_wide(data)):
        accuracy, confidence = data.accuracy[place], data.confidence[place]
        box = {"x": lower, "width": upper - lower, "align": "edge", "edgecolor": DARK, "linewidth": 0.4}
        panel.bar(height=accuracy, facecolor="0.85", **box)
        look = GAPS["confidence above accuracy" if confidence > accuracy else "confidence below accuracy"]
        gap = {"bottom": min(accuracy, confidence), "height": abs(confidence - accuracy)}
        panel.bar(**box | gap | look | {"facecolor": "none", "linewidth": 0})
        below.bar(height=data.share[place], facecolor=PALE, **box)
    ticks = (0, 0.5, 1)
    panel.set(xlim=(0, 1), ylim=(0, 1), xticks=ticks, yticks=ticks)
    panel.set_title(f"{fitted(data.title, title_room(panel))}\nECE {data.ece_text}", fontsize=8)


def _wide(data: Reliability) -> Iterator[tuple[float, float]]:
    """Return the edges of bins; one that holds a single confidence is made wide enough to be seen."""
    for lower, upper in zip(data.lower, data.upper, strict=True):
        room = max(0.0, 0.01 - (upper - lower)) / 2
        yield lower - room, upper + room


def reliability_lines_figure(models: Sequence[Reliability]) -> Any:
    """Draw the reliability of several models as lines in one panel; a matplotlib figure.

    Up to four models have bands, which show the ranges of their accuracies; those of more would hide each other.
    """
    with _panels(len(models)) as (figure, panel, below):
        for number, data in enumerate(models):
            look = stroke(number)
            name = f"{fitted(data.title, 1.5, 7)}, ECE {data.ece_text}"
            if len(models) <= BANDS:
                panel.fill_between(data.confidence, data.low, data.high, color=look.colour, alpha=0.12, linewidth=0)
            if len(models) <= BANDS and len(data.confidence) == 1:  # a band needs two places
                panel.vlines(data.confidence, data.low, data.high, color=look.colour, linewidth=1)
            panel.plot(data.confidence, data.accuracy, label=name, clip_on=False, **look.marked(1))
            edges, shares = _steps(data)
            below.stairs(shares, edges, edgecolor=look.colour, linestyle=look.dash, linewidth=1)
        below.set_ylabel("share")
        legend_below(figure, panel)
    return figure


@contextmanager
def _panels(models: int) -> Iterator[tuple[Any, Any, Any]]:
    """Make a panel for curves and one below it for where the samples are."""
    with paper(COLUMN, 3.1 + 0.14 * -(-models // 2)) as figure:
        panel, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        panel.plot([0, 1], [0, 1], color=PALE, linewidth=0.8, linestyle="--")
        yield figure, panel, below
        panel.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
        below.set(xlabel="confidence", ylim=(0, None))


def _steps(data: Reliability) -> tuple[list[float], list[float]]:
    """Fill the gaps between the bins with zeros."""
    edges, shares = [data.lower[0]], []
    for lower, upper, share in zip(data.lower, data.upper, data.share, strict=True):
        if lower > edges[-1]:
            edges.append(lower)
            shares.append(0.0)
        edges.append(upper)
        shares.append(share)
    return edges, shares


@dataclass(frozen=True)
class SmoothReliability:
    """What a smooth reliability diagram shows, wherever its window holds a sample.

    Args:
        title: what the diagram is of.
        confidence: where the middle of the window is.
        accuracy: confidence less the mean gap in the window.
        low: lower end of the range of the accuracy, about.
        high: upper end.
        density: how densely confidences lie; the integral is 1.
        samples: how many samples the window is worth.
        bandwidth: width of the window.
        smooth_ece: calibration error with this window.
        level: how often a range holds the true accuracy, about.
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


def smooth_reliability_data(given: Given, title: str, level: float = 0.95) -> SmoothReliability:
    """Slide a window over the confidences of predictions."""
    found = pairs(given)
    held = smooth_data(found, level)
    confidence, accuracy, low, high, density, samples, _ = (
        tuple(map(float, column)) for column in zip(*held["points"], strict=True)
    )
    return SmoothReliability(
        title=title,
        confidence=confidence,
        accuracy=accuracy,
        low=low,
        high=high,
        density=density,
        samples=samples,
        bandwidth=float(held["bandwidth"]),
        smooth_ece=float(smooth_ece(found)),
        level=level,
    )


def smooth_reliability_figure(models: Sequence[SmoothReliability]) -> Any:
    """Draw the smooth reliability of several models in one panel, up to four with bands; a matplotlib figure."""
    with _panels(len(models)) as (figure, panel, below):
        for number, data in enumerate(models):
            look = stroke(number)
            for piece, part in enumerate(_pieces(data.confidence)):
                x, y, low, high, density = (
                    values[part] for values in (data.confidence, data.accuracy, data.low, data.high, data.density)
                )
                name = None if piece else f"{fitted(data.title, 1.3, 7)}, smooth ECE {percent(data.smooth_ece)}"
                if len(models) <= BANDS:
                    panel.fill_between(x, low, high, color=look.colour, alpha=0.12, linewidth=0)
                panel.plot(x, y, label=name, clip_on=False, **look.marked(len(x)))
                below.plot(x, density, linewidth=1, **look.line)
        below.set_ylabel("density")
        legend_below(figure, panel)
    return figure


def _pieces(places: Sequence[float]) -> Iterator[slice]:
    """Cut a curve where there is nothing between two places."""
    cuts = [n for n, (one, other) in enumerate(pairwise(places), start=1) if other - one > WINDOW]
    return (slice(start, end) for start, end in pairwise([0, *cuts, len(places)]))
