"""Check of the theorem behind the indicator: the feature norm bounds the logits of the hidden classifier."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from fedlas import formatting
from fedlas.predictions import Predictions
from fedlas.report.figures.features import average_ranks, correlation, feature_norms, require_features
from fedlas.report.figures.style import (
    DARK,
    LIGHT,
    MIDDLE,
    PAGE,
    figure_of_size,
    fit_label,
    safe_label,
    title_width,
    to_floats,
)

ROUNDING = 1e-5  # relative to the norm of a sample; float32 sums depend on the order of summation
STEPS = 20  # bins of a histogram


@dataclass(frozen=True)
class Theorem:
    """Feature norms, logits of the hidden classifier, and violations of the theorem.

    With a the features, W the last layer's weights, B = sign(W) and sign(0) = -1, for each sample and class j:

        0 <= ||a||_1 - (B a)_j <= ||a||_inf ||sign(a) - b_j||_1

    Args:
        title: data and weights.
        norm: ||a||_1 of each sample.
        hidden: largest logit of the hidden classifier for each sample.
        pairs: number of pairs of sample and class that were checked.
        violations: number of pairs that violate a bound by more than the rounding error.
        largest_violation: largest violation of all pairs, relative to the norm of the sample; 0 if there is none.
        ratio_predicted: histogram from 0 to 1 of the ratio of the difference ||a||_1 - (B a)_j to its upper bound
            ||a||_inf ||sign(a) - b_j||_1, for the class that the network predicts.
        ratio_others: the same histogram for all other classes.
        correlation: Pearson correlation of norm and largest hidden logit.
        rank_correlation: Spearman correlation of the two.
        mean_ratio: mean of largest hidden logit / norm; 1 if all active units have positive weights for one class.
        agreement: fraction of samples for which hidden classifier and network predict the same class.
        negative: fraction of features below zero.
        remarks: assumptions that do not hold.
    """

    title: str
    norm: tuple[float, ...]
    hidden: tuple[float, ...]
    pairs: int
    violations: int
    largest_violation: float
    ratio_predicted: tuple[int, ...]
    ratio_others: tuple[int, ...]
    correlation: float
    rank_correlation: float
    mean_ratio: float
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
        weight: weight of the last layer.
        bias: bias of the last layer.
        norms: L1 norms from another source, such as those that a run stored; by default those of the features.
        title: data and weights.
    """
    features, matrix = require_features(predictions), weight.double().cpu()
    norm = feature_norms(predictions) if norms is None else norms.double().cpu()
    binary = _sign(matrix)
    hidden = features @ binary.t()
    largest, hidden_prediction = hidden.max(1)
    gap = norm[:, None] - hidden
    # ||sign(a) - b||_1 counts 2 for each unit on which two vectors of +1 and -1 differ.
    bound = features.abs().amax(1, keepdim=True) * (features.shape[1] - _sign(features) @ binary.t())
    violation = torch.maximum(-gap, gap - bound) / norm[:, None].clamp_min(1e-300)
    violation = torch.where(violation.isnan(), math.inf, violation)  # NaN would compare as no violation
    prediction = predictions.logits.argmax(1).cpu()
    ratio = torch.where(bound > 0, gap / bound.clamp_min(1e-300), 0)
    predicted = torch.zeros_like(ratio, dtype=torch.bool).scatter_(1, prediction[:, None], True)
    return Theorem(
        title=title,
        norm=to_floats(norm),
        hidden=to_floats(largest),
        pairs=gap.numel(),
        violations=int((violation > ROUNDING).sum()),
        largest_violation=max(0.0, float(violation.max())),
        ratio_predicted=_histogram(ratio[predicted]),
        ratio_others=_histogram(ratio[~predicted]),
        correlation=correlation(norm, largest),
        rank_correlation=correlation(average_ranks(norm), average_ranks(largest)),
        mean_ratio=float((largest / norm.clamp_min(1e-300)).mean()),
        agreement=float((hidden_prediction == prediction).double().mean()),
        negative=float((features < 0).double().mean()),
        remarks=tuple(_remarks(predictions, features, matrix, bias)),
    )


def _remarks(
    predictions: Predictions, features: Float64[Tensor, "n width"], weight: Tensor, bias: Tensor | None
) -> Iterator[str]:
    """Yield the assumptions of the theorem that do not hold; the bounds hold for any features and weights."""
    negative = float((features < 0).double().mean())
    if negative:
        yield (
            f"{formatting.percent(negative)} of the features are below zero, so they are not ReLU outputs: the bounds "
            "hold, but negative units increase the norm too"
        )
    shift = torch.zeros(len(weight)).double() if bias is None else bias.double().cpu()
    if float(shift.abs().max()):
        largest = formatting.significant(float(shift.abs().max()))
        yield f"the last layer has a bias of up to {largest}, which the theorem does not include"
    logits = predictions.logits.double().cpu()
    error = (features @ weight.t() + shift - logits).abs().max() / logits.abs().max().clamp_min(1e-300)
    if not float(error) <= 1e-3:
        difference = formatting.percent(float(error))
        yield f"the logits do not come from this layer: they differ by up to {difference} of the largest"


@dataclass(frozen=True)
class Theorems:
    """The theorem on a network before and after training.

    Args:
        title: name of the data.
        trained: results with the evaluated weights.
        initial: results with the weights at initialisation.
    """

    title: str
    trained: Theorem
    initial: Theorem


def theorem_figure(data: Theorems) -> Any:
    """Draw norms against the largest hidden logits, and the histograms of the ratios; return the matplotlib figure."""
    trained = data.trained
    with figure_of_size(PAGE, 2.5) as figure:
        *clouds, panel = figure.subplots(1, 3)
        for cloud, theorem in zip(clouds, (trained, data.initial), strict=True):
            top, low = 1.05 * max(theorem.norm), min(0.0, *theorem.hidden)
            cloud.scatter(theorem.hidden, theorem.norm, s=4, color=MIDDLE, alpha=0.4, linewidths=0, rasterized=True)
            cloud.plot([0, top], [0, top], color=DARK, linestyle="--", label=r"$\|a\|_1 = \bar\psi_j$, the bound")
            cloud.set(xlim=(low, top), ylim=(0, top))
            cloud.set(xlabel=r"largest hidden logit, $\max_j \bar\psi_j$", ylabel=r"$\|a\|_1$")
            pearson, ratio = (formatting.fixed(value, 2) for value in (theorem.correlation, theorem.mean_ratio))
            numbers = f"correlation {pearson}, mean ratio {ratio}"
            cloud.set_title(f"{fit_label(theorem.title, title_width(cloud), 7)}\n{numbers}", fontsize=7)
            cloud.legend(loc="lower right")
        edges = [n / STEPS for n in range(STEPS + 1)]
        looks = (
            (
                "predicted class",
                trained.ratio_predicted,
                {"fill": True, "facecolor": LIGHT, "hatch": "////", "linewidth": 0.8},
            ),
            ("other classes", trained.ratio_others, {"linestyle": "--"}),
        )
        for name, counts, look in looks:
            fractions = [count / max(1, sum(counts)) for count in counts]
            panel.stairs(fractions, edges, label=name, edgecolor=DARK, **look)
        panel.set_ylim(0, 1.25 * panel.get_ylim()[1])  # space for the legend
        panel.set(xlim=(0, 1), ylabel="fraction", xlabel=r"$(\|a\|_1 - \bar\psi_j)$ / its upper bound")
        numbers = f"{trained.violations:,} of {trained.pairs:,} violate a bound"
        panel.set_title(
            f"{fit_label(trained.title, title_width(panel) - 1, 7)}, sample and class\n{numbers}", fontsize=7
        )
        panel.legend(loc="upper right")
        figure.suptitle("\n".join([safe_label(data.title, 100), *trained.remarks]), fontsize=7)
    return figure


def _sign(values: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return 1 for positive values, else -1, as the theorem defines the sign."""
    return torch.where(values > 0, 1.0, -1.0).double()


def _histogram(values: Float64[Tensor, " n"]) -> tuple[int, ...]:
    """Count values in equal bins from 0 to 1; values outside, due to rounding, count in the first or last bin."""
    steps: Int[Tensor, " n"] = (values.nan_to_num(0) * STEPS).long().clamp(0, STEPS - 1)
    return tuple(torch.bincount(steps, minlength=STEPS).tolist())
