"""The gate of FeDLaS: smoothing as a function of the indicator, and gate statistics by epoch."""

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
    LineStyle,
    figure_of_size,
    fit_label,
    line_style,
    safe_label,
    title_width,
    to_floats,
)

ACROSS = 4  # number of panels in a row


@dataclass(frozen=True)
class ModeCurve:
    """Smoothing as a function of the indicator in one mode of the gate.

    Args:
        beta: slope of the gate.
        mode: "positive" or "negative".
        nci: values of the indicator.
        alpha_i: smoothing at each value.
    """

    beta: float
    mode: str
    nci: tuple[float, ...]
    alpha_i: tuple[float, ...]


@dataclass(frozen=True)
class SmoothingCurve:
    """Curves of the adaptive smoothing.

    Args:
        alpha: base smoothing.
        curves: one for each beta and mode.
    """

    alpha: float
    curves: tuple[ModeCurve, ...]


def smoothing_data(alpha: float, values: Mapping[tuple[float, str], tuple[Tensor, Tensor]]) -> SmoothingCurve:
    """Return the curves in the order of beta.

    Args:
        alpha: base smoothing.
        values: indicator and smoothing of each beta and mode.
    """
    order = sorted(values, key=lambda key: (key[0], key[1] != "positive"))
    curves = tuple(ModeCurve(*key, *map(to_floats, values[key])) for key in order)
    return SmoothingCurve(alpha, curves)


def smoothing_figure(data: SmoothingCurve) -> Any:
    """Draw smoothing against the indicator: a marker for each beta, a line style for each mode; return the figure."""
    betas = list(dict.fromkeys(curve.beta for curve in data.curves))
    with figure_of_size(COLUMN, 2.6) as figure:
        panel = figure.subplots()
        for curve in data.curves:
            look = line_style(len(betas) - 1 - betas.index(curve.beta))
            label = rf"$\beta$ = {significant(curve.beta)}, {curve.mode}"
            dash = "-" if curve.mode == "positive" else "--"
            draw_mode(panel, curve.nci, curve.alpha_i, look, dash=dash, label=label)
        panel.axhline(data.alpha, color=PALE, linewidth=0.8, linestyle=":")
        panel.set(xlabel=r"NCI $\gamma$", ylabel=r"smoothing $\alpha_i$", ylim=(0, None))
        figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_mode(
    panel: Any, gamma: Sequence[float], values: Sequence[float], look: LineStyle, *, dash: str, label: str | None = None
) -> None:
    """Draw smoothing in one mode of a gate: markers distinguish betas or models, dashes distinguish modes."""
    face = look.colour if dash == "-" else "white"
    marked = {"marker": look.marker, "markerfacecolor": face, "markevery": max(1, len(values) // 8)}
    panel.plot(gamma, values, color=look.colour, linestyle=dash, clip_on=False, label=label, **marked)


@dataclass(frozen=True)
class EpochStatistics:
    """Mean and range over seeds of a logged number, by epoch.

    Args:
        name: name of the loss.
        epochs: epochs at which any seed has a value.
        mean: mean over the seeds that have a value.
        low: smallest value.
        high: largest value.
        per_seed: values of each seed, None if missing; the mean may hide that seeds split into two groups.
    """

    name: str
    epochs: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    per_seed: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class GateStability:
    """Gate statistics by epoch.

    Args:
        title: data set, network and protocol.
        milestones: epochs after which the learning rate drops.
        positive: fraction of samples in positive mode for each loss, which the paper calls overconfident.
        negative: fraction of samples in negative mode.
        flip_rate: fraction of samples whose mode differs from the previous epoch.
    """

    title: str
    milestones: tuple[int, ...]
    positive: tuple[EpochStatistics, ...]
    negative: tuple[EpochStatistics, ...]
    flip_rate: tuple[EpochStatistics, ...]


def gate_data(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], title: str, milestones: Sequence[int] = ()
) -> GateStability:
    """Return the mean and range over seeds of logged gate statistics.

    Args:
        curves: for each loss and each seed, the records of all epochs.
        title: data set, network and protocol.
        milestones: epochs after which the learning rate drops.
    """
    positive, negative, flip_rate = (
        tuple(epoch_statistics(name, runs, key) for name, runs in curves.items())
        for key in ("positive", "negative", "flip_rate")
    )
    return GateStability(title, tuple(milestones), positive, negative, flip_rate)


def epoch_statistics(name: str, runs: Sequence[Sequence[Mapping[str, Any]]], key: str) -> EpochStatistics:
    """Return the statistics of one gate number; skip epochs without it, such as the first for the flip rate."""
    per_seed = [{int(record["epoch"]): record.get("gate", {}).get(key) for record in run} for run in runs]
    values: dict[int, list[float]] = {}
    for epoch, value in (pair for seed in per_seed for pair in seed.items()):
        if value is not None:
            values.setdefault(epoch, []).append(float(value))
    epochs = tuple(sorted(values))
    return EpochStatistics(
        name=name,
        epochs=epochs,
        mean=tuple(math.fsum(values[epoch]) / len(values[epoch]) for epoch in epochs),
        low=tuple(min(values[epoch]) for epoch in epochs),
        high=tuple(max(values[epoch]) for epoch in epochs),
        per_seed=tuple(tuple(seed.get(epoch) for epoch in epochs) for seed in per_seed),
    )


def gate_figure(data: GateStability) -> Any:
    """Draw the fractions of the two modes for each loss, and the flip rates, by epoch; return the matplotlib figure.

    Thick lines are means, thin lines seeds, bands the range over seeds.
    """
    count = len(data.positive) + 1
    columns = min(count, ACROSS)
    rows = -(-count // columns)
    with figure_of_size(PAGE, 2.5 * rows + 0.12 * max(0, count - 3)) as figure:
        panels = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
        for empty in panels[count:]:
            empty.set_axis_off()
        *modes, flips = panels[:count]
        for panel, positive, negative in zip(modes, data.positive, data.negative, strict=True):
            _draw_statistics(panel, positive, LineStyle(DARK, "o", "-"), "positive mode")
            _draw_statistics(panel, negative, LineStyle(LIGHT, "^", "--"), "negative mode")
            panel.set(ylim=(0, 100), ylabel="samples (%)", title=fit_label(positive.name, title_width(panel) - 0.2))
        for number, statistics in enumerate(data.flip_rate):
            _draw_statistics(
                flips, statistics, line_style(number), fit_label(statistics.name, title_width(flips) - 0.4, 7)
            )
        flips.set(ylabel="flips (%)", title="flip rate")
        flips.set_ylim(0, max(1.0, 1.05 * flips.get_ylim()[1]))
        for panel in (*modes, flips):
            panel.set_xlabel("epoch")
            panel.tick_params(labelbottom=True)  # also if there are panels below
            for epoch in data.milestones:
                panel.axvline(epoch, color=PALE, linewidth=0.8, linestyle=":")
            # Place the legend below the axes, clear of all lines. After one epoch there is no flip rate to label.
            if panel.get_legend_handles_labels()[1]:
                panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
        if data.title:
            figure.suptitle(safe_label(data.title, 100), fontsize=8)
    return figure


def _draw_statistics(panel: Any, statistics: EpochStatistics, look: LineStyle, name: str) -> None:
    mean, low, high = (
        [100 * value for value in values] for values in (statistics.mean, statistics.low, statistics.high)
    )
    panel.fill_between(statistics.epochs, low, high, color=look.colour, alpha=0.15, linewidth=0)
    for values in statistics.per_seed if len(statistics.per_seed) > 1 else ():
        percent = [math.nan if value is None else 100 * value for value in values]
        panel.plot(statistics.epochs, percent, linewidth=0.4, alpha=0.7, **look.options)
    if mean:  # an unclipped line without points would have an infinite extent
        panel.plot(statistics.epochs, mean, label=name, clip_on=False, **look.with_markers(len(mean)))
