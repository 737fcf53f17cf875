"""Temperature scaling: divide all logits by a temperature T (Guo et al., 2017).

T is the factor that minimises the negative log-likelihood of the calibration samples. With b = 1 / T this is a convex
problem in one variable; its slope, mean_i (E_p[z_i] - z_i[y_i]) with p = softmax(b z_i), has one root, which is found
by safeguarded Newton steps in log T.

`objective="ece", search="grid"` is the search of the paper's official code: the T among 0.1, 0.2, ..., 10.0 with the
smallest ECE over 15 bins, the smallest T on ties. The ECE of this T on the calibration samples is too optimistic.

If probabilities are given instead of logits, some may be zero, for example after rounding, and their logarithms are
unknown. T is then fitted to the likelihood conditional on the classes above zero, which does not depend on the zeros. A
second parameter, `log_floor`, replaces the logarithm of all zeros in `transform`.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.calibration_error import ece
from fedlas.metrics.inputs import Pairs
from fedlas.metrics.result import Definition
from fedlas.posthoc.base import AbstractCalibrator, Samples
from fedlas.posthoc.base.solvers import best_inverse_temperature, scaled_nll
from fedlas.predictions.probabilities import slices_of

Objective = Literal["nll", "ece"]
Search = Literal["solve", "grid"]

GRID = tuple(round(0.1 * step, 1) for step in range(1, 101))
FAR_BELOW = 1e6  # difference of logits at which a class has probability zero for every T between the bounds
LARGEST_ERROR = math.log(1.3) / 1.96  # standard error of log T whose 95 % interval is +- 30 %
ENOUGH = 0.9  # fraction of informative samples above which zeros are not the cause of a large standard error
ABOUT = Definition(estimator="", scope="top-label")
UNDETERMINED = {"temperature": 1.0, "standard_error": math.inf}


class Temperature(AbstractCalibrator):
    """Divides all logits by a temperature.

    Args:
        objective: criterion to minimise: "nll", or "ece" on a grid.
        search: "solve" finds the exact minimum, "grid" tries 0.1, 0.2, ..., 10.0.
        low: smallest temperature that "solve" may return.
        high: largest temperature that "solve" may return.
    """

    name = "temperature"
    citation = "Guo et al., On Calibration of Modern Neural Networks, ICML 2017."
    keeps_order = True
    by_class = False

    def __init__(
        self, *, objective: Objective = "nll", search: Search = "solve", low: float = 1e-3, high: float = 1e4
    ) -> None:
        if objective not in {"nll", "ece"}:
            raise UserError(f'objective is {objective!r}; expected "nll" or "ece"')
        if search not in {"solve", "grid"}:
            raise UserError(f'search is {search!r}; expected "solve" or "grid"')
        if objective == "ece" and search == "solve":
            raise UserError('the ECE is not continuous in the temperature; give search="grid"')
        if not 0 < low < 1 < high < math.inf:
            raise UserError(f"low is {low} and high {high}; 0 < low < 1 < high is needed")
        self.objective, self.search = objective, search
        self.low, self.high = float(low), float(high)

    @property
    def temperature(self) -> float:
        """The fitted temperature."""
        if self.fitted is None:
            raise RuntimeError("temperature is not fitted yet; call fit(logits, labels) first")
        return float(self.learned["temperature"])

    @property
    def standard_error(self) -> float:
        """Standard error of the logarithm of the temperature."""
        if "standard_error" not in self.learned:
            raise RuntimeError('there is a standard error only for objective="nll", search="solve"')
        return float(self.learned["standard_error"])

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        known = samples if samples.zeros is None else known_classes(samples)
        if self.search == "grid":
            return self._learn_on_grid(samples, known)
        if len(known.logits) == 0:  # `doubt` returns a warning
            return {name: torch.tensor(value).double() for name, value in UNDETERMINED.items()}
        factor = best_inverse_temperature(known, 1 / self.high, 1 / self.low)
        if scaled_nll(known, factor)[0] > scaled_nll(known, 1.0)[0]:
            factor = 1.0
        learned = {"temperature": 1 / factor, "standard_error": _standard_error(known, factor)}
        if samples.zeros is not None:
            learned["log_floor"] = _log_floor(samples, factor)
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in learned.items()}

    def _learn_on_grid(self, samples: Samples, known: Samples) -> dict[str, Tensor]:
        """Choose a temperature of the grid; for the ECE, zeros are replaced by the maximum-likelihood value."""
        learned = {}
        if samples.zeros is not None and len(known.logits):
            factor = best_inverse_temperature(known, 1 / self.high, 1 / self.low)
            learned["log_floor"] = _log_floor(samples, factor)
            samples = Samples(samples.logits.masked_fill(samples.zeros, learned["log_floor"]), samples.labels)
        losses = _ece_on_grid(samples) if self.objective == "ece" else {t: scaled_nll(known, 1 / t)[0] for t in GRID}
        learned["temperature"] = min(GRID, key=losses.__getitem__)  # the smallest on ties
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in learned.items()}

    def fill_zeros(
        self, logits: Float[Tensor, "n classes"], zeros: Bool[Tensor, "n classes"] | None
    ) -> Float[Tensor, "n classes"]:
        if zeros is None or "log_floor" not in self.learned:
            return logits
        return logits.masked_fill(zeros, float(self.learned["log_floor"]))

    def doubt(self, samples: Samples) -> str:
        temperature, error = float(self.learned["temperature"]), float(self.learned.get("standard_error", math.nan))
        at_bound = any(math.isclose(temperature, bound) for bound in (self.low, self.high))
        used, n = len(samples.logits if samples.zeros is None else known_classes(samples).logits), len(samples.logits)
        if used < ENOUGH * n and (at_bound or error > LARGEST_ERROR):
            informative = f"{used:,} of {n:,} samples have a label and another class with a probability above zero"
            advice = "Give logits, or probabilities with more digits."
            return f"the probabilities do not determine the temperature: {informative}. {advice}"
        if self.search == "grid" or not at_bound:
            return ""
        problem = f"the best temperature of these {len(samples.logits):,} samples lies beyond the bound {temperature:g}"
        return f"{problem}: {_reason(samples, 1 / temperature)}"

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        return logits / float(self.learned["temperature"])


def _ece_on_grid(samples: Samples) -> dict[float, float]:
    """Return the ECE at every temperature of the grid, as in the official code of the paper."""
    prediction = samples.logits.argmax(1)
    soft = samples.labels.ndim == 2
    correct = samples.labels.gather(1, prediction[:, None])[:, 0] if soft else prediction == samples.labels
    return {
        temperature: float(ece(Pairs(_confidence(samples, temperature), correct, ABOUT), compat="official"))
        for temperature in GRID
    }


def _confidence(samples: Samples, temperature: float) -> Float[Tensor, " n"]:
    """Return the largest probability of each row, in float32 as in the official code of the paper."""
    parts = []
    for rows in slices_of(samples.logits):
        logits = samples.logits[rows]
        parts.append(1 / ((logits - logits.amax(1, keepdim=True)) / temperature).exp().sum(1))
    return torch.cat(parts).float()


def _reason(samples: Samples, factor: float) -> str:
    """Explain why there is no optimum between the bounds."""
    prediction, labels = samples.logits.argmax(1), samples.label_probs.argmax(1)
    first, second = samples.logits.topk(2, dim=1).values.unbind(1)
    if factor > 1 and bool(
        ((prediction == labels) | (first == second)).all()
    ):  # a tie stays a tie at every temperature
        return "every one is classified correctly, so no confidence is too high. Fit on more, held-out samples."
    if factor < 1 and scaled_nll(samples, 0.0)[1] >= 0:
        return (
            "the logits contradict the labels. Are both of the same samples, in the same order, and do larger "
            "logits mean more likely classes?"
        )
    size, bound = ("small", "low") if factor > 1 else ("large", "high")
    further = f"give the calibrator another bound, {bound}=NUMBER (fedlas calibrate fit --set {bound}=NUMBER)"
    return f"the logits are very {size}. Divide them by a number, or {further}."


def known_classes(samples: Samples) -> Samples:
    """Restrict the samples to the classes whose probability is not zero.

    Conditional on these classes, a label has the probability p_y / sum_j p_j at every temperature, independent of
    the unknown probabilities. Samples with another label, or with a single class above zero, are uninformative.
    """
    assert samples.zeros is not None
    zeros = samples.zeros
    far_below = samples.logits.amin().clamp_max(0) - FAR_BELOW
    if samples.labels.ndim == 1:
        mass, labels = (~zeros).gather(1, samples.labels[:, None])[:, 0].to(samples.logits.dtype), samples.labels
    else:
        weights = samples.label_probs.masked_fill(zeros, 0)
        mass = weights.sum(1)
        labels = weights / mass.clamp_min(torch.finfo(mass.dtype).tiny)[:, None]
    informative = (mass > 0) & ((~zeros).sum(1) > 1)
    return Samples(samples.logits.masked_fill(zeros, float(far_below))[informative], labels[informative])


def _log_floor(samples: Samples, factor: float) -> float:
    """Return the maximum-likelihood value of the log-probability of all zeros at a temperature.

    It is at most half of the smallest probability above zero. A pseudo-count of 1/2 is added to the labels among the
    zeros, so that the value is finite if there are none.
    """
    assert samples.zeros is not None
    rows = samples.zeros.any(1)
    logits, zeros = samples.logits[rows].double(), samples.zeros[rows]
    known_mass = (factor * logits).exp().masked_fill(zeros, 0).sum(1)
    count = zeros.sum(1).double()
    labels = float((samples.label_probs[rows] * zeros).sum()) + 0.5
    high = factor * (float(samples.logits[~samples.zeros].min()) - math.log(2))
    low = high - FAR_BELOW
    for _ in range(60):
        middle = (low + high) / 2
        weight = count * math.exp(middle)
        low, high = (middle, high) if float((weight / (known_mass + weight)).sum()) < labels else (low, middle)
    return low / factor


def _standard_error(samples: Samples, factor: float) -> float:
    """Estimate the standard error of log T by the sandwich estimator, which does not assume a correct model."""
    squares = 0.0
    for rows in slices_of(samples.logits):
        part = Samples(samples.logits[rows], samples.labels[rows])
        probs = (part.logits * factor).softmax(1)
        slope = ((probs - part.label_probs) * (part.logits - part.logits.amax(1, keepdim=True))).sum(1)
        squares += float(slope.square().sum(dtype=torch.float64))
    curvature = scaled_nll(samples, factor)[2]
    n = len(samples.logits)
    return math.sqrt(squares / n / n) / (curvature * factor) if curvature > 0 else math.inf
