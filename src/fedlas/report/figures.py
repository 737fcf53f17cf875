"""Figures: `..._data` computes what `..._figure` draws, so that a figure can be checked, or drawn by someone else.

Figures for a paper are as wide as one of its columns or as its page, and need no colour to be read: line styles,
markers and hatches tell the same. `save_with_data` writes one as PDF and PNG, and its numbers as JSON beside them.
"""

import importlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int, UInt8
from torch import Tensor

from fedlas.metrics.bins import Bins
from fedlas.predictions import Predictions, write_whole

COLUMN, PAGE = 3.4, 7.0  # inches
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,  # whole letters, which publishers ask for
}
DARK, MIDDLE, LIGHT, PALE = "#000000", "#0072b2", "#e69f00", "#999999"
STROKES = ((DARK, "o"), (MIDDLE, "s"), (LIGHT, "^"), (PALE, "D"))
NO_CLOCK = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
SATURATED = 0.99
ROUNDING = 1e-5  # of a sample's norm: sums in float32, added in another order
STEPS = 20  # of a histogram


@dataclass(frozen=True)
class Reliability:
    """What a reliability diagram shows.

    Args:
        title: what the diagram is of.
        confidence: mean confidence of each filled bin.
        accuracy: share of right answers in it.
        share: share of all samples in it.
        ece: expected calibration error.
    """

    title: str
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    share: tuple[float, ...]
    ece: float


def reliability_data(bins: Bins, ece: float, title: str) -> Reliability:
    """Take from bins of confidence what a reliability diagram shows."""
    counts = bins.counts.tolist()
    filled = [n for n, count in enumerate(counts) if count > 0]
    confidence, accuracy = bins.confidence.tolist(), bins.accuracy.tolist()
    return Reliability(
        title=title,
        confidence=tuple(confidence[n] for n in filled),
        accuracy=tuple(accuracy[n] for n in filled),
        share=tuple(counts[n] / sum(counts) for n in filled),
        ece=ece,
    )


def reliability_figure(rows: Mapping[str, Sequence[Reliability]]) -> Any:
    """Draw reliability diagrams, a row of them for each name; a matplotlib figure."""
    figures = importlib.import_module("matplotlib.figure")
    columns = max(len(row) for row in rows.values())
    figure = figures.Figure(figsize=(2.6 * columns, 2.7 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey=True)
    for line, (name, row) in zip(panels, rows.items(), strict=True):
        for panel, data in zip(line, row, strict=False):
            _draw(panel, data)
        line[0].set_ylabel(f"{name}\naccuracy")
    for panel in panels[-1]:
        panel.set_xlabel("confidence")
    return figure


def _draw(panel: Any, data: Reliability) -> None:
    panel.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
    panel.bar(data.confidence, data.share, width=0.05, color="0.85")
    panel.plot(data.confidence, data.accuracy, marker="o", markersize=3, color="#0072b2")
    for confidence, accuracy in zip(data.confidence, data.accuracy, strict=True):
        panel.plot([confidence, confidence], [confidence, accuracy], color="#d55e00", linewidth=1)
    panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    panel.set_title(f"{data.title}\nECE {100 * data.ece:.1f} %", fontsize=9)


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
    norm, confidence = _norms(predictions), predictions.confidence.double().cpu()
    correct = predictions.correct.bool().cpu()
    lowest = norm.argsort()[: max(1, len(norm) // 10)]
    return Indicator(
        title=title,
        nci=_numbers((norm - norm.mean()) / norm.std()),
        confidence=_numbers(confidence),
        correct=tuple(correct.tolist()),
        rank_correlation=_correlation(_ranks(norm), _ranks(confidence)),
        saturated=float((confidence > SATURATED).double().mean()),
        saturated_low=float((confidence[lowest] > SATURATED).double().mean()),
        norm_auroc=_auroc(norm, correct),
        confidence_auroc=_auroc(confidence, correct),
    )


def indicator_figure(data: Indicator) -> Any:
    """Draw each sample's norm against its confidence, and how both are distributed; a matplotlib figure."""
    with _paper(COLUMN, 3.1) as figure:
        grid = {"width_ratios": (4, 1), "height_ratios": (1, 4)}
        (top, corner), (panel, side) = figure.subplots(2, 2, sharex="col", sharey="row", gridspec_kw=grid)
        corner.remove()
        for wanted, marker, colour, size in ((True, "o", MIDDLE, 4), (False, "x", DARK, 5)):
            places = [n for n, correct in enumerate(data.correct) if correct is wanted]
            name = f"{'right' if wanted else 'wrong'} ({len(places):,})"
            x, y = ([values[n] for n in places] for values in (data.nci, data.confidence))
            look = {"linewidths": 0.4} if marker == "x" else {"linewidths": 0, "alpha": 0.4}
            panel.scatter(x, y, s=size, marker=marker, color=colour, label=name, rasterized=True, **look)
        top.hist(data.nci, bins=2 * STEPS, color=PALE)
        side.hist(data.confidence, bins=2 * STEPS, color=PALE, orientation="horizontal")
        for edge in (top, side):
            edge.tick_params(labelbottom=edge is side, labelleft=edge is top)
        top.set_ylabel("samples")
        side.set_xlabel("samples")
        side.locator_params(axis="x", nbins=2)
        panel.set(xlabel=r"normalised $\|z\|_1$ (NCI)", ylabel=r"largest softmax probability")
        figure.legend(loc="outside lower center", ncols=2, markerscale=2)
        above, low = 100 * data.saturated, 100 * data.saturated_low
        shares = f"confidence above {SATURATED}: {above:.0f} % of all, {low:.0f} % of the lowest tenth of norms"
        figure.suptitle(f"{data.title}\n{shares}", fontsize=7)
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
    features = _features(predictions)
    norm = _norms(predictions)
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
            features=_numbers(features[place]),
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
    with _paper(PAGE, 0.5 + 1.1 * rows) as figure:
        grid = {"width_ratios": (1, 3, 1, 3)}
        panels = figure.subplots(rows, 4, squeeze=False, gridspec_kw=grid)
        for first, column, colour in ((0, data.high, MIDDLE), (2, data.low, LIGHT)):
            for line, one in zip(panels, column, strict=False):
                picture, panel = line[first : first + 2]
                picture.imshow(one.pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                panel.stairs(one.features, fill=True, color=colour)
                panel.stairs(one.features, color=DARK, linewidth=0.4)
                panel.set(ylim=(1.05 * least, 1.05 * most), xlim=(0, len(one.features)))
                named = one.label if one.prediction == one.label else f"{one.label}, taken for {one.prediction}"
                numbers = rf"$\|z\|_1$ = {one.norm:.1f}, probability {one.confidence:.2f}"
                panel.set_title(f"{named}\n{numbers}", fontsize=7)
                panel.set_ylabel("activation")
        for picture in panels[:, ::2].flat:
            picture.set_axis_off()
        for panel in panels[-1, 1::2]:
            panel.set_xlabel("unit of the last hidden layer")
        figure.suptitle(
            f"{data.title}: highest norms (left) and lowest norms (right), each of another class", fontsize=8
        )
    return figure


@dataclass(frozen=True)
class Theorem:
    """The feature norm beside the logits of the hidden classifier, and whether they keep to the theorem.

    With a the features, W the last layer's weights, B = sign(W) and sign(0) = -1, for each sample and class j:

        0 <= ||a||_1 - (B a)_j <= ||a||_inf ||sign(a) - b_j||_1

    Args:
        title: which data and weights.
        norm: ||a||_1 of each sample.
        hidden: the largest of its hidden classifier's logits.
        pairs: how many pairs of sample and class were checked.
        violations: how many of them break a bound by more than rounding does.
        largest_violation: of all pairs, as a share of the sample's norm; 0 if no bound is passed at all.
        used_by_answer: for the network's answer, how many samples use which part of the room that the bounds leave:
            a histogram of (||a||_1 - (B a)_j) / (||a||_inf ||sign(a) - b_j||_1) from 0 to 1.
        used_by_others: the same, for all other classes.
        correlation: between norm and hidden logit.
        rank_correlation: Spearman's.
        recovered: mean of hidden logit / norm: 1 if every active unit votes for one class.
        agreement: share of samples for which hidden classifier and network give the same answer.
        negative: share of features below zero.
        remarks: which assumptions do not hold, in words.
    """

    title: str
    norm: tuple[float, ...]
    hidden: tuple[float, ...]
    pairs: int
    violations: int
    largest_violation: float
    used_by_answer: tuple[int, ...]
    used_by_others: tuple[int, ...]
    correlation: float
    rank_correlation: float
    recovered: float
    agreement: float
    negative: float
    remarks: tuple[str, ...]


def theorem_data(
    predictions: Predictions,
    weight: Float[Tensor, "classes width"],
    bias: Float[Tensor, " classes"] | None = None,
    *,
    norms: Float[Tensor, " n"] | None = None,
    title: str = "",
) -> Theorem:
    """Check the theorem on every sample and every class.

    Args:
        predictions: logits and features.
        weight: of the last layer.
        bias: of the last layer.
        norms: L1 norms from elsewhere, such as those that a run wrote down; by default those of the features.
        title: which data and weights.
    """
    features, matrix = _features(predictions), weight.double().cpu()
    norm = _norms(predictions) if norms is None else norms.double().cpu()
    binary = _sign(matrix)
    hidden = features @ binary.t()
    largest, answer = hidden.max(1)
    gap = norm[:, None] - hidden
    # ||sign(a) - b||_1 counts 2 for each unit on which two vectors of +1 and -1 differ.
    room = features.abs().amax(1, keepdim=True) * (features.shape[1] - _sign(features) @ binary.t())
    beyond = torch.maximum(-gap, gap - room) / norm[:, None].clamp_min(1e-300)
    beyond = torch.where(beyond.isnan(), math.inf, beyond)  # a comparison with NaN would pass
    said = predictions.logits.argmax(1).cpu()
    used = torch.where(room > 0, gap / room.clamp_min(1e-300), 0)
    own = torch.zeros_like(used, dtype=torch.bool).scatter_(1, said[:, None], True)
    return Theorem(
        title=title,
        norm=_numbers(norm),
        hidden=_numbers(largest),
        pairs=gap.numel(),
        violations=int((beyond > ROUNDING).sum()),
        largest_violation=max(0.0, float(beyond.max())),
        used_by_answer=_histogram(used[own]),
        used_by_others=_histogram(used[~own]),
        correlation=_correlation(norm, largest),
        rank_correlation=_correlation(_ranks(norm), _ranks(largest)),
        recovered=float((largest / norm.clamp_min(1e-300)).mean()),
        agreement=float((answer == said).double().mean()),
        negative=float((features < 0).double().mean()),
        remarks=tuple(_remarks(predictions, features, matrix, bias)),
    )


def _remarks(
    predictions: Predictions, features: Float64[Tensor, "n width"], weight: Tensor, bias: Tensor | None
) -> Iterator[str]:
    """Say which assumptions of the theorem do not hold; the two bounds hold for any features and weights."""
    negative = float((features < 0).double().mean())
    if negative:
        yield (
            f"{100 * negative:.1f} % of the features are below zero, so no rectifier made them: the bounds hold, "
            "but units below zero raise the norm too"
        )
    shift = torch.zeros(len(weight)).double() if bias is None else bias.double().cpu()
    if float(shift.abs().max()):
        yield f"the last layer has a bias of up to {float(shift.abs().max()):.3g}, which the theorem leaves out"
    logits = predictions.logits.double().cpu()
    off = (features @ weight.t() + shift - logits).abs().max() / logits.abs().max().clamp_min(1e-300)
    if not float(off) <= 1e-3:
        yield f"the logits are not this layer's: they differ by up to {100 * float(off):.2g} % of the largest"


@dataclass(frozen=True)
class Theorems:
    """The theorem on a network before and after training.

    Args:
        title: which data.
        trained: with the weights that it was judged with.
        drawn: with the weights that training began with.
    """

    title: str
    trained: Theorem
    drawn: Theorem


def theorem_figure(data: Theorems) -> Any:
    """Draw norms against the largest hidden logits, and how much of their room is used; a matplotlib figure."""
    trained = data.trained
    with _paper(PAGE, 2.5) as figure:
        *clouds, panel = figure.subplots(1, 3)
        for cloud, one in zip(clouds, (trained, data.drawn), strict=True):
            top, low = 1.05 * max(one.norm), min(0.0, *one.hidden)
            cloud.scatter(one.hidden, one.norm, s=4, color=MIDDLE, alpha=0.4, linewidths=0, rasterized=True)
            cloud.plot([0, top], [0, top], color=DARK, linestyle="--", label=r"$\|a\|_1 = \bar\psi_j$, the bound")
            cloud.set(xlim=(low, top), ylim=(0, top))
            cloud.set(xlabel=r"largest hidden logit, $\max_j \bar\psi_j$", ylabel=r"$\|a\|_1$")
            numbers = f"correlation {one.correlation:.2f}, mean ratio {one.recovered:.2f}"
            cloud.set_title(f"{one.title}\n{numbers}", fontsize=7)
            cloud.legend(loc="lower right")
        edges = [n / STEPS for n in range(STEPS + 1)]
        looks = (
            (
                "the answer",
                trained.used_by_answer,
                {"fill": True, "facecolor": LIGHT, "hatch": "////", "linewidth": 0.8},
            ),
            ("other classes", trained.used_by_others, {"linestyle": "--"}),
        )
        for name, counts, look in looks:
            share = [count / max(1, sum(counts)) for count in counts]
            panel.stairs(share, edges, label=name, edgecolor=DARK, **look)
        panel.set_ylim(0, 1.25 * panel.get_ylim()[1])  # room for the legend
        panel.set(xlim=(0, 1), ylabel="share", xlabel=r"$(\|a\|_1 - \bar\psi_j)$ / its upper bound")
        numbers = f"{trained.violations:,} of {trained.pairs:,} break a bound"
        panel.set_title(f"{trained.title}, sample and class\n{numbers}", fontsize=7)
        panel.legend(loc="upper right")
        figure.suptitle("\n".join([data.title, *trained.remarks]), fontsize=7)
    return figure


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
    curves = tuple(ModeCurve(*place, *(_numbers(one) for one in found[place])) for place in places)
    return SmoothingCurve(alpha, curves)


def smoothing_figure(data: SmoothingCurve) -> Any:
    """Draw smoothing against the indicator: a marker for each beta, a line style for each mode; a matplotlib figure."""
    betas = list(dict.fromkeys(one.beta for one in data.curves))
    with _paper(COLUMN, 2.6) as figure:
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
                label=rf"$\beta$ = {one.beta:g}, {one.mode}",
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

    Thick lines are means, thin ones seeds, bands the range over seeds.
    """
    with _paper(PAGE, 2.5) as figure:
        *shares, flips = figure.subplots(1, len(data.positive) + 1, sharex=True)
        for panel, positive, negative in zip(shares, data.positive, data.negative, strict=True):
            _draw_course(panel, positive, DARK, "o", "positive mode")
            _draw_course(panel, negative, LIGHT, "^", "negative mode", dashed=True)
            panel.set(ylim=(0, 100), ylabel="samples (%)", title=positive.name)
        for (colour, marker), course in zip(STROKES, data.flip_rate, strict=False):
            _draw_course(flips, course, colour, marker, course.name, dashed=marker != STROKES[0][1])
        flips.set(ylabel="flips (%)", title="flip rate")
        flips.set_ylim(0, max(1.0, 1.05 * flips.get_ylim()[1]))
        for panel in (*shares, flips):
            panel.set_xlabel("epoch")
            for epoch in data.milestones:
                panel.axvline(epoch, color=PALE, linewidth=0.8, linestyle=":")
            # Below the axes, where no line can run through it.
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22))
        figure.suptitle(data.title, fontsize=8)
    return figure


def _draw_course(panel: Any, course: Course, colour: str, marker: str, name: str, *, dashed: bool = False) -> None:
    mean, low, high = ([100 * value for value in values] for values in (course.mean, course.low, course.high))
    look = {"color": colour, "linestyle": "--" if dashed else "-"}
    panel.fill_between(course.epochs, low, high, color=colour, alpha=0.15, linewidth=0)
    for values in course.each if len(course.each) > 1 else ():
        percent = [math.nan if value is None else 100 * value for value in values]
        panel.plot(course.epochs, percent, linewidth=0.4, alpha=0.7, **look)
    every, face = max(1, len(mean) // 8), "white" if dashed else colour
    panel.plot(
        course.epochs, mean, marker=marker, markerfacecolor=face, markevery=every, label=name, clip_on=False, **look
    )


def save_figure(figure: Any, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure, whole or not at all; the file's ending says as what. No clock time goes into it."""
    path = Path(path)
    buffer = io.BytesIO()
    with _style():
        figure.savefig(buffer, format=path.suffix[1:], dpi=dpi, metadata=NO_CLOCK.get(path.suffix))
    write_whole(path, buffer.getvalue())
    return path


def save_with_data(figure: Any, data: Any, folder: str | Path, name: str) -> list[Path]:
    """Write a figure as PDF and PNG, and the data class that it was drawn from as JSON, where NaN becomes null."""
    paths = [save_figure(figure, Path(folder) / f"{name}.{end}", dpi=300) for end in ("pdf", "png")]
    numbers = {"figure": name, **_without_nan(asdict(data))}
    text = Path(folder) / f"{name}.json"
    write_whole(text, (json.dumps(numbers, allow_nan=False) + "\n").encode())
    return [*paths, text]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _style() -> Iterator[None]:
    with importlib.import_module("matplotlib").rc_context(STYLE):
        yield


@contextmanager
def _paper(width: float, height: float) -> Iterator[Any]:
    """Make an empty figure in the one style of all; what is drawn inside of the block gets it too."""
    with _style():
        yield importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _features(predictions: Predictions) -> Float64[Tensor, "n width"]:
    if predictions.features is None:
        raise ValueError("these predictions have no features, which this figure is about")
    return predictions.features.double().cpu()


def _norms(predictions: Predictions) -> Float64[Tensor, " n"]:
    found: Tensor = torch.linalg.vector_norm(_features(predictions), 1, 1)
    return found


def _sign(values: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Give the theorem's sign: 1 above zero, otherwise -1."""
    return torch.where(values > 0, 1.0, -1.0).double()


def _ranks(values: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Give each value its place by size, from 1; equal ones share the mean of their places."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    shared: Tensor = counts.cumsum(0) - (counts - 1).double() / 2
    return shared[place]


def _correlation(one: Float64[Tensor, " n"], other: Float64[Tensor, " n"]) -> float:
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def _auroc(scores: Float64[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Give the share of pairs, one positive and one not, that the scores put in the right order; NaN without pairs."""
    many, others = int(positive.sum()), int((~positive).sum())
    above = float(_ranks(scores)[positive].sum()) - many * (many + 1) / 2
    return above / (many * others) if many and others else math.nan


def _histogram(values: Float64[Tensor, " n"]) -> tuple[int, ...]:
    """Count values in equal steps from 0 to 1; what lies outside, by rounding, is in the first or last."""
    steps: Int[Tensor, " n"] = (values.nan_to_num(0) * STEPS).long().clamp(0, STEPS - 1)
    return tuple(torch.bincount(steps, minlength=STEPS).tolist())


def _numbers(values: Float[Tensor, " n"]) -> tuple[float, ...]:
    """Make plain numbers, of as many digits as float32 has."""
    return tuple(float(f"{value:.7g}") for value in values.tolist())
