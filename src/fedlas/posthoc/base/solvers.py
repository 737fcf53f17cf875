"""Optimisers of the negative log-likelihood: a scalar temperature, affine maps, and any convex objective (L-BFGS)."""

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional

from fedlas.errors import UserError
from fedlas.posthoc.base.calibrator import Samples, learned_like
from fedlas.predictions.probabilities import slices_of


def scaled_nll(samples: Samples, inverse: float) -> tuple[float, float, float]:
    """Return the mean NLL of logits times `inverse`, and its first and second derivative."""
    value = slope = curvature = 0.0
    for rows in slices_of(samples.logits):
        logits, labels = samples.logits[rows], samples.labels[rows]
        top = logits.amax(1, keepdim=True)
        below = logits - top
        label_logits = below.gather(1, labels[:, None])[:, 0] if labels.ndim == 1 else (below * labels).sum(1)
        weight = (below * inverse).exp_()
        total = weight.sum(1)
        weighted = weight.mul_(below)
        first = weighted.sum(1) / total
        second = torch.linalg.vecdot(weighted, below) / total
        parts = torch.stack([total.log() - inverse * label_logits, first - label_logits, second - first**2])
        sums = parts.sum(1, dtype=torch.float64).tolist()
        value, slope, curvature = value + sums[0], slope + sums[1], curvature + sums[2]
    n = len(samples.logits)
    return value / n, slope / n, curvature / n


def best_inverse_temperature(samples: Samples, low: float, high: float) -> float:
    """Return the factor between two bounds that minimises the NLL of the logits.

    The NLL is convex in the factor, so its slope has one root. It is found by Newton steps in the logarithm of the
    factor, with bisection whenever a step leaves the bracket.
    """
    if _separable(samples):
        return high
    left, right, log_factor = math.log(low), math.log(high), 0.0
    tried_left = tried_right = False
    tolerance = 1e-13 if samples.logits.dtype == torch.float64 else 1e-6
    for _ in range(100):
        _, slope, curvature = scaled_nll(samples, math.exp(log_factor))
        if slope == 0 and curvature == 0:
            # Either the NLL is constant, or every sample is correct with a probability that rounds to one.
            return 1.0 if bool((samples.logits == samples.logits[:, :1]).all()) else high
        if (slope < 0 and log_factor == math.log(high)) or (slope > 0 and log_factor == math.log(low)):
            return high if slope < 0 else low
        if slope < 0:
            left, tried_left = log_factor, True
        else:
            right, tried_right = log_factor, True
        newton = -slope / (curvature * math.exp(log_factor)) if curvature > 0 else math.copysign(math.inf, -slope)
        # Check convergence before clipping to the bracket, because a step of zero would trigger a bisection.
        if abs(newton) <= tolerance:
            return math.exp(log_factor)
        next_log_factor = min(right, max(left, log_factor + min(2.0, max(-2.0, newton))))
        if (next_log_factor == left and tried_left) or (next_log_factor == right and tried_right):
            next_log_factor = (left + right) / 2
        if abs(next_log_factor - log_factor) <= tolerance or (tried_left and tried_right and right - left <= tolerance):
            return math.exp(next_log_factor)
        log_factor = next_log_factor
    return math.exp(log_factor)


def _separable(samples: Samples) -> bool:
    """Return whether the best factor is infinite: every label has the largest logit, and not all logits are equal.

    Newton steps would become shorter and shorter, and stop at an arbitrary factor.
    """
    differs = False
    for rows in slices_of(samples.logits):
        logits, labels = samples.logits[rows], samples.labels[rows]
        top = logits.amax(1, keepdim=True)
        label_logits = logits.gather(1, labels[:, None]) if labels.ndim == 1 else (logits * labels).sum(1, keepdim=True)
        if not bool((label_logits == top).all()):
            return False
        differs |= bool((logits < top).any())
    return differs


def minimise(
    objective: Callable[..., Tensor], start: Mapping[str, Float64[Tensor, "..."]], steps: int = 500
) -> dict[str, Tensor]:
    """Minimise a smooth convex function of named tensors; the result is never worse than the start."""
    values = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    method = torch.optim.LBFGS(
        values.values(),
        max_iter=steps,
        history_size=20,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        method.zero_grad()
        loss = objective(**values)
        loss.backward()
        return loss

    with torch.enable_grad():
        method.step(closure)
    with torch.no_grad():
        minimum = {name: tensor.detach() for name, tensor in values.items()}
        better = float(objective(**minimum)) <= float(objective(**start))
    return minimum if better else dict(start)


def check_penalty(penalty: float) -> float:
    """Return a penalty; raise if it is negative."""
    if not 0 <= penalty < math.inf:
        raise UserError(f"penalty is {penalty}; zero or a positive number is needed")
    return float(penalty)


def fit_affine(samples: Samples, penalty: float, *, full_matrix: bool) -> dict[str, Tensor]:
    """Fit an affine map of the logits by penalised maximum likelihood, with temperature scaling as the prior.

    Args:
        samples: samples to fit on.
        penalty: strength of the regularisation towards temperature scaling.
        full_matrix: whether the map has a full matrix rather than a diagonal one.
    """
    n, classes = samples.logits.shape
    factor = best_inverse_temperature(samples, 1e-4, 1e3)
    size = float(samples.logits.double().std(correction=0)) or 1.0
    unit = samples.logits / size  # unit variance, so that the penalty does not depend on the scale
    hard = samples.labels.ndim == 1

    def objective(scale: Tensor, offset: Tensor, mixing: Tensor | None = None) -> Tensor:
        mapped = unit * scale + offset if mixing is None else torch.addmm(offset, unit, (mixing + scale.diag()).T)
        nll = functional.cross_entropy(mapped, samples.labels if hard else samples.label_probs)
        distance = (scale - factor * size).square().sum() + offset.square().sum()
        if mixing is not None:
            distance = distance + classes * mixing.square().sum()
        return nll + penalty / n * distance

    start = {"scale": torch.full_like(unit[0], factor * size), "offset": torch.zeros_like(unit[0])}
    if full_matrix:
        start["mixing"] = unit.new_zeros(classes, classes)
    minimum = minimise(objective, start)
    learned = {"scale": minimum["scale"] / size, "offset": minimum["offset"]}
    if full_matrix:
        learned["mixing"] = minimum["mixing"] / size
    return learned


def apply_affine(inputs: Float[Tensor, "n classes"], learned: Mapping[str, Tensor]) -> Float[Tensor, "n classes"]:
    """Apply a map of `fit_affine` with a full matrix."""
    scale, offset, mixing = (learned_like(learned[name], inputs) for name in ("scale", "offset", "mixing"))
    return torch.addmm(offset, inputs, (mixing + scale.diag()).T)
