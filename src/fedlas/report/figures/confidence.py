"""How sure models are: confidences of right and wrong answers, and where confidence is too high or too low."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedlas import formatting
from fedlas.extras import optional_module
from fedlas.metrics.bin_sums import exact
from fedlas.metrics.inputs import Given, pairs
from fedlas.metrics.result import Result
from fedlas.predictions import AnyPredictions, TopLabelPredictions
from fedlas.report import page_data
from fedlas.report.figures.style import (
    COLUMN,
    DARK,
    OVER,
    PALE,
    UNDER,
    fitted,
    grid,
    label_outside,
    legend_below,
    paper,
    shown,
    title_room,
)

if TYPE_CHECKING:  # `evaluation` already stands on a tall chain of modules
    from fedlas.evaluation import State

CLASSES = 20  # rows of a map
LARGEST = 0.5  # a gap that fills its cell, and those beyond


@dataclass(frozen=True)
class Confidences:
    """Histograms of the confidence of correct and incorrect predictions.

    Args:
        title: whose they are.
        edges: of the bins.
        right: how many right answers are in each.
        wrong: how many wrong ones.
        confidence: mean of all samples.
        accuracy: share of right answers.
    """

    title: str
    edges: tuple[float, ...]
    right: tuple[float, ...]
    wrong: tuple[float, ...]
    confidence: float
    accuracy: float


def confidence_data(given: Given, title: str) -> Confidences:
    """Count right and wrong answers in narrow bins of confidence."""
    found = pairs(given)
    held = page_data.confidence_data(found)
    edges, right, wrong = (tuple(map(float, held[name])) for name in ("edges", "correct", "incorrect"))
    means = (float(exact(values).mean()) for values in (found.confidence, found.correct))
    return Confidences(title, edges, right, wrong, *means)


def confidence_figure(models: Sequence[Confidences]) -> Any:
    """Draw the confidence of correct and incorrect predictions of each model; return the matplotlib figure."""
    with grid(len(models)) as (figure, axes):
        for panel, data in zip(axes, models, strict=True):
            kinds: tuple[tuple[str, tuple[float, ...], dict[str, Any]], ...] = (
                ("right answers", data.right, {"fill": True, "facecolor": "0.8", "edgecolor": DARK}),
                (
                    "wrong answers",
                    data.wrong,
                    {"fill": True, "facecolor": "none", "edgecolor": OVER, "hatch": "/////"},
                ),
            )
            for name, counts, look in kinds:
                share = [count / max(1.0, sum(counts)) for count in counts]
                panel.stairs(share, data.edges, label=name, linewidth=0.8, **look)
            panel.axvline(data.confidence, color=DARK, linestyle="--", linewidth=0.9, label="mean confidence")
            panel.axvline(data.accuracy, color=DARK, linestyle=":", linewidth=1.2, label="accuracy")
            counted = f"{formatting.count(sum(data.right))} correct, {formatting.count(sum(data.wrong))} incorrect"
            panel.set_title(f"{fitted(data.title, title_room(panel))}\n{counted}", fontsize=8)
        axes[0].set(xlim=(0, 1), ylim=(0, None))  # of all panels, and only now: it ends the search for room
        label_outside(axes, "confidence", "share")
        legend_below(figure, axes[0], most=2 if len(models) < 3 else 4)
    return figure


@dataclass(frozen=True)
class OverUnder:
    """The two parts of the ECE of one model, and their sum.

    Args:
        title: whose they are.
        over: from bins where confidence is above accuracy.
        under: from bins where it is below.
        over_range: interval of the first, where one was computed.
        under_range: of the second.
    """

    title: str
    over: float
    under: float
    over_range: tuple[float, float] | None = None
    under_range: tuple[float, float] | None = None


def over_under_data(state: "State", title: str) -> OverUnder:
    """Take over- and under-confidence from what `evaluate` measured."""
    over, under = state["over_ece"], state["under_ece"]
    return OverUnder(title, float(over), float(under), _range(over), _range(under))


def _range(result: Result) -> tuple[float, float] | None:
    return None if result.interval is None else (float(result.interval.low), float(result.interval.high))


def over_under_figure(models: Sequence[OverUnder]) -> Any:
    """Draw over-confidence to the right and under-confidence to the left, a bar for each model; a matplotlib figure."""
    with paper(COLUMN, 0.85 + 0.22 * len(models)) as figure:
        panel = figure.subplots()
        for place, data in enumerate(models):
            sides = (
                (1, data.over, data.over_range, OVER, "//////"),
                (-1, data.under, data.under_range, UNDER, "\\\\\\\\\\\\"),
            )
            for sign, value, interval, colour, hatch in sides:
                panel.barh(
                    place, 100 * sign * value, 0.66, facecolor=colour, edgecolor=DARK, linewidth=0.5, hatch=hatch
                )
                if interval is not None:
                    low, high = (100 * sign * end for end in interval)
                    panel.plot([low, high], [place, place], color=DARK, linewidth=1.2, marker="|", markersize=4)
        panel.axvline(0, color=DARK, linewidth=0.6)
        most = max(0.1, 1.05 * max(abs(end) for end in panel.get_xlim()))
        panel.set(xlim=(-most, most), ylim=(len(models) - 0.5, -0.5), xlabel="U-ECE  ←  points of ECE  →  O-ECE")
        panel.set_yticks(range(len(models)), [fitted(data.title, 1.3, 7) for data in models])
        panel.xaxis.set_major_formatter(lambda value, _: formatting.significant(abs(value)))
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
    return figure


@dataclass(frozen=True)
class ClassMap:
    """Where confidence is too high or too low: by class, and by confidence.

    Args:
        title: whose map it is.
        classes: how many there are.
        names: of the classes that are shown.
        edges: of the bins of confidence.
        gap: for each class and bin, mean confidence minus accuracy of the samples put into the class; None if empty.
        samples: how many of them there are.
    """

    title: str
    classes: int
    names: tuple[str, ...]
    edges: tuple[float, ...]
    gap: tuple[tuple[float | None, ...], ...]
    samples: tuple[tuple[int, ...], ...]


def class_map_data(predictions: AnyPredictions, title: str, most: int = CLASSES) -> ClassMap:
    """Measure the gap of each class at each confidence; of many classes, those that add most to the error are shown.

    Args:
        predictions: of one model.
        title: whose map it is.
        most: how many classes are shown.
    """
    bins = page_data.predicted_class_bins(predictions).cpu()
    wrong = (bins.confidence_sum - bins.correct_sum).abs().sum(1)
    order = wrong.argsort(descending=True, stable=True)
    if isinstance(predictions, TopLabelPredictions):  # of classes that nobody named, nothing is known
        order = order[bins.counts.sum(1)[order] > 0]
    kept = order[:most].sort().values
    counts, gaps = bins.counts[kept], (bins.confidence - bins.accuracy)[kept]
    called = predictions.class_names or tuple(str(n) for n in range(predictions.num_classes))
    return ClassMap(
        title=title,
        classes=predictions.num_classes,
        names=tuple(called[n] for n in kept.tolist()),
        edges=tuple(bins.edges.tolist()),
        gap=tuple(
            tuple(page_data.number(gap) if count else None for gap, count in zip(*row, strict=True))
            for row in zip(gaps.tolist(), counts.tolist(), strict=True)
        ),
        samples=tuple(tuple(row) for row in counts.tolist()),
    )


def class_map_figure(data: ClassMap) -> Any:
    """Draw a square for each class and confidence, whose area is the gap; a matplotlib figure.

    Full squares are over-confident, hollow ones under-confident; a gap of 50 points fills its cell.
    """
    steps = len(data.edges) - 1
    with paper(COLUMN, 1.1 + 0.19 * len(data.names)) as figure:
        panel = figure.subplots()
        rectangle = optional_module("matplotlib.patches").Rectangle
        for row, (gaps, counts) in enumerate(zip(data.gap, data.samples, strict=True)):
            for column, (gap, count) in enumerate(zip(gaps, counts, strict=True)):
                if gap is None or not count:
                    continue
                side = 0.92 * min(1.0, abs(gap) / LARGEST) ** 0.5
                corner = (column + 0.5 - side / 2, row + 0.5 - side / 2)
                full = OVER if gap > 0 else "white"
                panel.add_patch(rectangle(corner, side, side, edgecolor=DARK, linewidth=0.6, facecolor=full))
                panel.plot(column + 0.5, row + 0.5, ".", markersize=1, color=PALE, zorder=0)
        ticks = range(0, steps + 1, 2)
        panel.set_xticks(ticks, [formatting.edge(data.edges[n]) for n in ticks])
        panel.set_yticks([n + 0.5 for n in range(len(data.names))], [fitted(name, 1, 7) for name in data.names])
        panel.tick_params(axis="y", length=0)
        panel.set(xlim=(0, steps), ylim=(len(data.names), 0), xlabel="confidence")
        lines = [
            shown(data.title),
            f"area: |confidence − accuracy|, full from {formatting.significant(100 * LARGEST)} points on",
        ]
        if len(data.names) < data.classes:
            lines.insert(1, f"{len(data.names)} of {data.classes} classes, those furthest off")
        figure.suptitle("\n".join(lines), fontsize=7)
        for name, colour in (("too sure", OVER), ("not sure enough", "white")):
            panel.scatter([], [], marker="s", s=20, facecolor=colour, edgecolor=DARK, linewidth=0.6, label=name)
        legend_below(figure, panel)
    return figure
