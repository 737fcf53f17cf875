"""The theorem behind the indicator: the feature norm beside the logits of the hidden classifier."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from fedlas import formatting
from fedlas.predictions import Predictions
from fedlas.report.figures.features import correlation, features_of, norms_of, places_by_size
from fedlas.report.figures.style import DARK, LIGHT, MIDDLE, PAGE, fitted, numbers_of, paper, shown, title_room

ROUNDING = 1e-5  # of a sample's norm: sums in float32, added in another order
STEPS = 20  # of a histogram


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
    features, matrix = features_of(predictions), weight.double().cpu()
    norm = norms_of(predictions) if norms is None else norms.double().cpu()
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
        norm=numbers_of(norm),
        hidden=numbers_of(largest),
        pairs=gap.numel(),
        violations=int((beyond > ROUNDING).sum()),
        largest_violation=max(0.0, float(beyond.max())),
        used_by_answer=_histogram(used[own]),
        used_by_others=_histogram(used[~own]),
        correlation=correlation(norm, largest),
        rank_correlation=correlation(places_by_size(norm), places_by_size(largest)),
        recovered=float((largest / norm.clamp_min(1e-300)).mean()),
        agreement=float((answer == said).double().mean()),
        negative=float((features < 0).double().mean()),
        remarks=tuple(_remarks(predictions, features, matrix, bias)),
    )


def _remarks(
    predictions: Predictions, features: Float64[Tensor, "n width"], weight: Tensor, bias: Tensor | None
) -> Iterator[str]:
    """Return which assumptions of the theorem do not hold; the two bounds hold for any features and weights."""
    negative = float((features < 0).double().mean())
    if negative:
        yield (
            f"{formatting.percent(negative)} of the features are below zero, so they are not ReLU outputs: the bounds "
            "hold, but units below zero raise the norm too"
        )
    shift = torch.zeros(len(weight)).double() if bias is None else bias.double().cpu()
    if float(shift.abs().max()):
        largest = formatting.significant(float(shift.abs().max()))
        yield f"the last layer has a bias of up to {largest}, which the theorem leaves out"
    logits = predictions.logits.double().cpu()
    off = (features @ weight.t() + shift - logits).abs().max() / logits.abs().max().clamp_min(1e-300)
    if not float(off) <= 1e-3:
        yield f"the logits are not this layer's: they differ by up to {formatting.percent(float(off))} of the largest"


@dataclass(frozen=True)
class Theorems:
    """The theorem on a network before and after training.

    Args:
        title: which data.
        trained: with the weights that were evaluated.
        drawn: with the weights that training began with.
    """

    title: str
    trained: Theorem
    drawn: Theorem


def theorem_figure(data: Theorems) -> Any:
    """Draw norms against the largest hidden logits, and how much of their room is used; a matplotlib figure."""
    trained = data.trained
    with paper(PAGE, 2.5) as figure:
        *clouds, panel = figure.subplots(1, 3)
        for cloud, one in zip(clouds, (trained, data.drawn), strict=True):
            top, low = 1.05 * max(one.norm), min(0.0, *one.hidden)
            cloud.scatter(one.hidden, one.norm, s=4, color=MIDDLE, alpha=0.4, linewidths=0, rasterized=True)
            cloud.plot([0, top], [0, top], color=DARK, linestyle="--", label=r"$\|a\|_1 = \bar\psi_j$, the bound")
            cloud.set(xlim=(low, top), ylim=(0, top))
            cloud.set(xlabel=r"largest hidden logit, $\max_j \bar\psi_j$", ylabel=r"$\|a\|_1$")
            numbers = (
                f"correlation {formatting.fixed(one.correlation, 2)}, mean ratio {formatting.fixed(one.recovered, 2)}"
            )
            cloud.set_title(f"{fitted(one.title, title_room(cloud), 7)}\n{numbers}", fontsize=7)
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
        panel.set_title(f"{fitted(trained.title, title_room(panel) - 1, 7)}, sample and class\n{numbers}", fontsize=7)
        panel.legend(loc="upper right")
        figure.suptitle("\n".join([shown(data.title, 100), *trained.remarks]), fontsize=7)
    return figure


def _sign(values: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return the sign of the theorem: 1 above zero, otherwise -1."""
    return torch.where(values > 0, 1.0, -1.0).double()


def _histogram(values: Float64[Tensor, " n"]) -> tuple[int, ...]:
    """Count values in equal steps from 0 to 1; what lies outside, by rounding, is in the first or last."""
    steps: Int[Tensor, " n"] = (values.nan_to_num(0) * STEPS).long().clamp(0, STEPS - 1)
    return tuple(torch.bincount(steps, minlength=STEPS).tolist())
