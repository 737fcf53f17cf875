"""Training curves: accuracy and calibration by epoch, strengths of feedback losses, smoothing of a gate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlas import formatting
from fedlas.errors import UserError
from fedlas.report import page_data
from fedlas.report.figures.gate import draw_mode
from fedlas.report.figures.style import (
    DARK,
    PAGE,
    PALE,
    figure_of_size,
    fit_label,
    legend_below,
    line_style,
    safe_label,
)

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class LearningCurve:
    """Metrics that a run logged on its validation split; None where an epoch has no value.

    Args:
        title: name of the run.
        epoch: epochs, starting at 1.
        loss: mean training loss.
        accuracy: accuracy.
        ece: expected calibration error.
        over: over-confident part of the ECE (O-ECE).
        under: under-confident part of the ECE (U-ECE).
    """

    title: str
    epoch: tuple[int, ...]
    loss: Values
    accuracy: Values
    ece: Values
    over: Values
    under: Values


def training_data(log: Sequence[Mapping[str, Any]], title: str) -> LearningCurve:
    """Return the curves of a log, such as `Run.log`; long logs are subsampled."""
    epochs = page_data.training_data(log)
    if epochs is None:
        raise UserError('the log has no finished epoch; its records need "epoch", "train" and "val"')
    columns = (tuple(epochs[name]) for name in ("epoch", "loss", "accuracy", "ece", "over_ece", "under_ece"))
    return LearningCurve(title, *columns)


def training_figure(models: Sequence[LearningCurve]) -> Any:
    """Draw training loss, accuracy, ECE, O-ECE and U-ECE by epoch; return the matplotlib figure."""
    with figure_of_size(PAGE, 2.0 + 0.14 * math.ceil(len(models) / 3)) as figure:
        loss, accuracy, error, parts = figure.subplots(1, 4)
        if all(value is None for data in models for value in (*data.over, *data.under)):
            parts.set_visible(False)
        for number, data in enumerate(models):
            look = line_style(number).with_markers(len(data.epoch), most=6)
            for panel, values, factor in ((loss, data.loss, 1), (accuracy, data.accuracy, 100), (error, data.ece, 100)):
                panel.plot(data.epoch, _scaled(values, factor), label=safe_label(data.title), **look)
            parts.plot(data.epoch, _scaled(data.over, 100), **look)
            parts.plot(data.epoch, _scaled(data.under, -100), **look)
        parts.axhline(0, color=DARK, linewidth=0.6)
        parts.yaxis.set_major_formatter(lambda value, _: formatting.significant(abs(value)))
        titles = ("training loss", "accuracy (%)", "ECE (%)", "O-ECE ↑  U-ECE ↓ (%)")
        for panel, title in zip((loss, accuracy, error, parts), titles, strict=True):
            panel.set_title(title, fontsize=8)
            panel.set_xlabel("epoch")
            panel.xaxis.get_major_locator().set_params(integer=True)
        error.set_ylim(0, None)
        legend_below(figure, loss, most=6)
    return figure


def _scaled(values: Values, factor: float) -> list[float]:
    return [math.nan if value is None else factor * value for value in values]


@dataclass(frozen=True)
class Feedback:
    """Smoothing strengths of a loss with feedback, and the calibration gaps that determine them.

    Args:
        title: name of the run.
        epoch: epochs, starting at 1.
        strengths: strength of each bin after each epoch, from low to high values of the indicator.
        gaps: mean confidence minus accuracy of each bin on held-out data.
        lr: learning rate of each epoch.
    """

    title: str
    epoch: tuple[int, ...]
    strengths: tuple[Values, ...]
    gaps: tuple[Values, ...]
    lr: Values


def feedback_data(log: Sequence[Mapping[str, Any]], title: str) -> Feedback | None:
    """Return strengths and gaps of a log; None for a loss without feedback."""
    epochs = page_data.training_data(log)
    if epochs is None or "feedback" not in epochs:
        return None
    rates = {record["epoch"]: record.get("lr") for record in log if "epoch" in record}
    strengths, gaps = (tuple(map(tuple, epochs["feedback"][name])) for name in ("strengths", "gaps"))
    return Feedback(title, tuple(epochs["epoch"]), strengths, gaps, tuple(rates[n] for n in epochs["epoch"]))


def feedback_figure(models: Sequence[Feedback]) -> Any:
    """Draw strengths and calibration gaps by epoch, one line per bin, one row per model; return the figure.

    Lines become darker with the value of the indicator; vertical lines mark changes of the learning rate.
    """
    with figure_of_size(PAGE, 0.4 + 1.7 * len(models)) as figure:
        for (left, right), data in zip(figure.subplots(len(models), 2, squeeze=False), models, strict=True):
            for panel, rows, factor in ((left, data.strengths, 1), (right, data.gaps, 100)):
                bins = len(rows[0])
                for number, values in enumerate(zip(*rows, strict=True)):
                    grey = 0.75 * (1 - number / max(1, bins - 1)) if bins > 1 else 0
                    ends = {0: (":", "lowest bin"), bins - 1: ("-", "highest bin" if bins > 1 else "all samples")}
                    dash, label = ends.get(number, ("-", None))
                    look = {"color": str(grey), "linestyle": dash, "linewidth": 1.2 if label else 0.7}
                    panel.plot(data.epoch, _scaled(values, factor), label=label, **look)
                for epoch, before, after in zip(data.epoch[1:], data.lr, data.lr[1:], strict=False):
                    if before != after:
                        panel.axvline(epoch, color=PALE, linewidth=0.6)
                panel.set_xlabel("epoch")
                panel.xaxis.get_major_locator().set_params(integer=True)
            left.set_ylabel("strength")
            right.set_ylabel("confidence - accuracy (%)")
            right.axhline(0, color=DARK, linewidth=0.6)
            left.set_title(safe_label(data.title), fontsize=8, loc="left")
        legend_below(figure, figure.axes[0], most=2)
    return figure


@dataclass(frozen=True)
class Alphas:
    """Smoothing factors that a gate chose, relative to alpha.

    Args:
        title: name of the run.
        epoch: epochs, starting at 1.
        ratio: mean of alpha_i / alpha over the samples of each epoch.
        beta: slope of the gate, if the recipe has it.
        edges: edges of the bins of the indicator; the first and last bin include all values beyond them.
        fraction: fraction of samples in each bin in the last epoch.
        gamma: values of the indicator.
        positive: alpha_i / alpha at these values in positive mode; empty without beta.
        negative: alpha_i / alpha in negative mode.
    """

    title: str
    epoch: tuple[int, ...]
    ratio: Values
    beta: float | None
    edges: tuple[float, ...]
    fraction: tuple[float, ...]
    gamma: tuple[float, ...]
    positive: tuple[float, ...]
    negative: tuple[float, ...]


def alpha_data(log: Sequence[Mapping[str, Any]], title: str, recipe: Mapping[str, Any] | None = None) -> Alphas | None:
    """Return the smoothing factors of a log; None for a loss without a gate."""
    epochs = page_data.training_data(log, recipe)
    if epochs is None or "gate" not in epochs:
        return None
    gate, histogram = epochs["gate"], epochs["gate"]["gamma"] or {"ends": (), "fractions": (), "curve": ()}
    gamma, positive, negative = zip(*histogram["curve"], strict=True) if histogram["curve"] else ((), (), ())
    return Alphas(
        title=title,
        epoch=tuple(epochs["epoch"]),
        ratio=tuple(gate["alpha_ratio"]),
        beta=epochs["beta"],
        edges=tuple(map(float, histogram["ends"])),
        fraction=tuple(map(float, histogram["fractions"])),
        gamma=tuple(map(float, gamma)),
        positive=tuple(map(float, positive)),
        negative=tuple(map(float, negative)),
    )


def alpha_figure(models: Sequence[Alphas]) -> Any:
    """Draw the mean smoothing by epoch, and the smoothing over the indicator; return the matplotlib figure.

    A grey histogram shows the indicator of the first model in its last epoch.
    """
    with figure_of_size(PAGE, 2.1 + 0.14 * math.ceil(len(models) / 3)) as figure:
        left, right = figure.subplots(1, 2)
        left.axhline(1, color=PALE, linewidth=0.8, linestyle=":")
        for number, data in enumerate(models):
            look = line_style(number).with_markers(len(data.epoch))
            left.plot(data.epoch, _scaled(data.ratio, 1), label=safe_label(data.title), **look)
            for values, dash in ((data.positive, "-"), (data.negative, "--")):
                if values:  # an unclipped line without points would have an infinite extent
                    draw_mode(right, data.gamma, values, line_style(number), dash=dash)
        for mode, dash in (("positive mode", "-"), ("negative mode", "--")):
            left.plot([], [], color=PALE, linestyle=dash, label=mode)
        left.set(xlabel="epoch", ylabel=r"mean $\alpha_i$ / $\alpha$", ylim=(0, None))
        left.xaxis.get_major_locator().set_params(integer=True)
        right.set(xlabel=r"NCI $\gamma$", ylabel=r"$\alpha_i$ / $\alpha$", ylim=(0, 2))
        first = models[0]
        if first.fraction:
            heights = [1.9 * fraction / max(*first.fraction, 1e-9) for fraction in first.fraction]
            right.stairs(heights, first.edges, fill=True, facecolor="0.85", zorder=0)
            right.set_xlim(first.edges[0], first.edges[-1])
            right.set_title(f"grey: histogram of $\\gamma$, {fit_label(first.title, 1.2, 7)}, last epoch", fontsize=7)
        legend_below(figure, left, most=6)
    return figure
