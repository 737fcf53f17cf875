"""The gate of FeDLaS: how it turns the indicator into smoothing, and what it did in the course of training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedlas.formatting import significant
from fedlas.report.figures.style import (
    COLUMN,
    DARK,
    LIGHT,
    PAGE,
    PALE,
    STROKES,
    Stroke,
    fitted,
    numbers_of,
    paper,
    shown,
    stroke,
    title_room,
)

ACROSS = 4  # panels beside each other on a page


@dataclass(frozen=True)
class ModeCurve:
    """How one mode of the gate turns the indicator into smoothing.

    Args:
        beta: how strongly the indicator moves the smoothing.
        mode: "positive" or "negative".
        nci: values of the indicator.
        alpha_i: the smoothing that each gives.
    """

    beta: float
    mode: str
    nci: tuple[float, ...]
    alpha_i: tuple[float, ...]


@dataclass(frozen=True)
class SmoothingCurve:
    """Curves of the adaptive smoothing.

    Args:
        alpha: the smoothing that they move around.
        curves: one for each beta and mode.
    """

    alpha: float
    curves: tuple[ModeCurve, ...]


def smoothing_data(alpha: float, found: Mapping[tuple[float, str], tuple[Tensor, Tensor]]) -> SmoothingCurve:
    """Put indicator and smoothing, found for each beta and mode, in the order of beta."""
    places = sorted(found, key=lambda place: (place[0], place[1] != "positive"))
    curves = tuple(ModeCurve(*place, *(numbers_of(one) for one in found[place])) for place in places)
    return SmoothingCurve(alpha, curves)


def smoothing_figure(data: SmoothingCurve) -> Any:
    """Draw smoothing against the indicator: a marker for each beta, a line style for each mode; a matplotlib figure."""
    betas = list(dict.fromkeys(one.beta for one in data.curves))
    with paper(COLUMN, 2.6) as figure:
        panel = figure.subplots()
        for one in data.curves:
            colour, marker = STROKES[(len(betas) - 1 - betas.index(one.beta)) % len(STROKES)]
            positive = one.mode == "positive"
            panel.plot(
                one.nci,
                one.alpha_i,
                color=colour,
                linestyle="-" if positive else "--",
                marker=marker,
                markerfacecolor=colour if positive else "white",
                markevery=max(1, len(one.nci) // 8),
                clip_on=False,
                label=rf"$\beta$ = {significant(one.beta)}, {one.mode}",
            )
        panel.axhline(data.alpha, color=PALE, linewidth=0.8, linestyle=":")
        panel.set(xlabel=r"NCI $\gamma$", ylabel=r"smoothing $\alpha_i$", ylim=(0, None))
        figure.legend(loc="outside lower center", ncols=2)
    return figure


@dataclass(frozen=True)
class Course:
    """A number at each epoch: its mean and its range over seeds.

    Args:
        name: of what.
        epochs: those at which any seed has the number.
        mean: over the seeds that have it.
        low: the smallest.
        high: the largest.
        each: the number of each seed, None where it has none: modes can be divided, and then no seed is near the mean.
    """

    name: str
    epochs: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    each: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class GateStability:
    """What the gate did in the course of training.

    Args:
        title: which data, network and protocol.
        milestones: epochs after which the learning rate falls.
        positive: for each loss the share of samples in positive mode, which the paper calls overconfident.
        negative: the share in negative mode.
        flip_rate: the share whose mode differs from the epoch before.
    """

    title: str
    milestones: tuple[int, ...]
    positive: tuple[Course, ...]
    negative: tuple[Course, ...]
    flip_rate: tuple[Course, ...]


def gate_data(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], title: str, milestones: Sequence[int] = ()
) -> GateStability:
    """Take mean and range over seeds from what runs logged.

    Args:
        curves: for each loss, for each seed, the records of all epochs.
        title: which data, network and protocol.
        milestones: epochs after which the learning rate falls.
    """
    found = {
        word: tuple(course_data(name, runs, word) for name, runs in curves.items())
        for word in ("positive", "negative", "flip_rate")
    }
    return GateStability(title, tuple(milestones), found["positive"], found["negative"], found["flip_rate"])


def course_data(name: str, runs: Sequence[Sequence[Mapping[str, Any]]], word: str) -> Course:
    """Follow one number of the gate; epochs without it, such as the first one of a flip rate, are left out."""
    each = [{int(record["epoch"]): record.get("gate", {}).get(word) for record in run} for run in runs]
    values: dict[int, list[float]] = {}
    for epoch, value in (pair for one in each for pair in one.items()):
        if value is not None:
            values.setdefault(epoch, []).append(float(value))
    epochs = tuple(sorted(values))
    return Course(
        name=name,
        epochs=epochs,
        mean=tuple(math.fsum(values[epoch]) / len(values[epoch]) for epoch in epochs),
        low=tuple(min(values[epoch]) for epoch in epochs),
        high=tuple(max(values[epoch]) for epoch in epochs),
        each=tuple(tuple(one.get(epoch) for epoch in epochs) for one in each),
    )


def gate_figure(data: GateStability) -> Any:
    """Draw the shares of the two modes for each loss, and the flip rates, by epoch; a matplotlib figure.

    Thick lines are means, thin ones seeds, bands the range over seeds. More than three losses take several rows.
    """
    count = len(data.positive) + 1
    columns = min(count, ACROSS)
    rows = -(-count // columns)
    with paper(PAGE, 2.5 * rows + 0.12 * max(0, count - 3)) as figure:
        panels = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
        for empty in panels[count:]:
            empty.set_axis_off()
        *shares, flips = panels[:count]
        for panel, positive, negative in zip(shares, data.positive, data.negative, strict=True):
            _draw_course(panel, positive, Stroke(DARK, "o", "-"), "positive mode")
            _draw_course(panel, negative, Stroke(LIGHT, "^", "--"), "negative mode")
            panel.set(ylim=(0, 100), ylabel="samples (%)", title=fitted(positive.name, title_room(panel) - 0.2))
        for number, course in enumerate(data.flip_rate):
            _draw_course(flips, course, stroke(number), fitted(course.name, title_room(flips) - 0.4, 7))
        flips.set(ylabel="flips (%)", title="flip rate")
        flips.set_ylim(0, max(1.0, 1.05 * flips.get_ylim()[1]))
        for panel in (*shares, flips):
            panel.set_xlabel("epoch")
            panel.tick_params(labelbottom=True)  # also where other panels stand below
            for epoch in data.milestones:
                panel.axvline(epoch, color=PALE, linewidth=0.8, linestyle=":")
            # Below the axes, where no line can run through it. After one epoch there is no flip rate to explain.
            if panel.get_legend_handles_labels()[1]:
                panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
        if data.title:
            figure.suptitle(shown(data.title, 100), fontsize=8)
    return figure


def _draw_course(panel: Any, course: Course, look: Stroke, name: str) -> None:
    mean, low, high = ([100 * value for value in values] for values in (course.mean, course.low, course.high))
    panel.fill_between(course.epochs, low, high, color=look.colour, alpha=0.15, linewidth=0)
    for values in course.each if len(course.each) > 1 else ():
        percent = [math.nan if value is None else 100 * value for value in values]
        panel.plot(course.epochs, percent, linewidth=0.4, alpha=0.7, **look.line)
    if mean:  # a line without points that is not clipped would have no end
        panel.plot(course.epochs, mean, label=name, clip_on=False, **look.marked(len(mean)))
