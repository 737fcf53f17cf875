"""FeDLaS: label smoothing with a strength that is computed per sample in every training step.

In the notation of the paper, for a sample with features z and logits s, sg the stopped gradient:

    symbol      equation                                                            here
    E           cross-entropy to the uniform distribution, -(1/C) Σ_k log p_k       `AbstractLoss.smoothed`
    R           (1/C) Σ_k max(0, max_l s_l - s_k - m)                               `FeDLaSMbLS._margin`
    mu, sigma   theta * (this batch) + (1 - theta) * (before), of ||z||_1           `NCI.mean`, `NCI.std`
    gamma       (||sg[z]||_1 - mu) / sigma                                          `NCI`
    psi         sgn(w^T softmax(F_gate(sg[s]))), +1 or -1                           `BCG`
    alpha_i     alpha * 2 * sigmoid(beta * psi * gamma), between 0 and 2 alpha      `AdaptiveSmoothing`
    L           (1 - alpha_i) CE_i + alpha_i E_i                                    `FeDLaSLS`
    L           (1 - alpha_i) CE_i + alpha_i R_i                                    `FeDLaSMbLS`

The network is trained through CE, E and R alone: features and logits are detached in alpha_i. The gate is trained
through alpha_i alone.

The gate is an MLP C -> width -> 2 with width * (C + 3) + 2 parameters, where `gate_width` is C // 2 by default: 67 for
10 classes, 501,502 for 1,000, but 238 million for 21,841. With many thousand classes, set it: `gate_width=64`.

Paper, official code and this file differ in a few details, which `preset` selects; explicit keywords override the
preset, and docs/decisions.md gives the reasons:

    keyword               default    "official"   "paper"
    margin_reduction      "mean"     "mean"       "sum"      over classes, in R
    gate_positive_index   1          1            0          gate output for psi = +1
    gate_zero             -1         0            -1         psi where both outputs are equal
    eps                   1e-3       1e-3         0          added to sigma

Degenerate batches, which fail in the official code: a batch with fewer than two usable norms (one sample, or all
ignored) does not change mu and sigma. A sample whose norm is NaN, infinite or too large for float32 is excluded from mu
and sigma and has gamma = 0, so alpha_i = alpha. gamma is 0 where sigma + eps is 0, and is clamped to +-1e6.
"""

import math
from typing import Literal, TypedDict, Unpack, cast, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from fedlas import ranks
from fedlas.errors import UserError
from fedlas.losses.base import (
    AbstractExact,
    AbstractLoss,
    AbstractPart,
    Batch,
    GateState,
    Options,
    at_least,
    at_least_float32,
    full_precision,
    one_of,
    whole,
    within,
)

Norm = float | Literal["inf"]
Source = Literal["features", "max_prob", "max_logit"]
Normalise = Literal["ema", "batch", "none"]
Start = Literal["paper", "first_batch"]
Gate = Literal["learned", "positive", "negative", "soft", "shuffled"]
Preset = Literal["default", "official", "paper"]


class PresetValues(TypedDict):
    """Options that a preset sets."""

    margin_reduction: Literal["mean", "sum"]
    gate_positive_index: Literal[0, 1]
    gate_zero: Literal[-1, 0]
    eps: float


CITATION = "FeDLaS: Feature-Modulated Bidirectional Label Smoothing for Neural Network Calibration, ECCV 2026."
PRESETS: dict[str, PresetValues] = {
    "default": {"margin_reduction": "mean", "gate_positive_index": 1, "gate_zero": -1, "eps": 1e-3},
    "official": {"margin_reduction": "mean", "gate_positive_index": 1, "gate_zero": 0, "eps": 1e-3},
    "paper": {"margin_reduction": "sum", "gate_positive_index": 0, "gate_zero": -1, "eps": 0.0},
}
GAMMA_LIMIT = 1e6
LARGEST = torch.finfo(torch.float32).max


class NCI(AbstractExact):
    """Norm-based confidence indicator: feature norm, standardised by its running mean and standard deviation.

    Args:
        theta: weight of the current batch in the running statistics; above 0 with normalise="ema" and
            start="paper".
        norm: p of the feature norm, at least 1; infinity may be written "inf".
        source: quantity to standardise: `features` (their norm), `max_prob` or `max_logit`.
        normalise: by running statistics (`ema`), by those of the batch (`batch`), or not (`none`).
        start: initialise the running statistics with 20 and 100 (`paper`), or with the first batch (`first_batch`).
        eps: added to the standard deviation.

    """

    def __init__(
        self,
        *,
        theta: float = 0.95,
        norm: Norm = 1.0,
        source: Source = "features",
        normalise: Normalise = "ema",
        start: Start = "paper",
        eps: float = 1e-3,
    ) -> None:
        super().__init__()
        self.theta = within("theta", theta, 0, 1)
        if isinstance(norm, str):
            one_of("norm", norm, ("inf",))
        infinite = norm in ("inf", math.inf)
        self.norm = math.inf if infinite else at_least("norm", cast("float", norm), 1)
        self.source = one_of("source", source, get_args(Source))
        self.normalise = one_of("normalise", normalise, get_args(Normalise))
        self.eps = at_least("eps", eps, 0)
        self.start = one_of("start", start, get_args(Start))
        if self.theta == 0 and (self.normalise, self.start) == ("ema", "paper"):
            raise UserError(
                "theta=0 keeps the mean and standard deviation at their initial values, 20 and 100; theta is the "
                "weight of the current batch: use a theta above 0, start='first_batch', or normalise='batch'"
            )
        self.mean: Tensor
        self.std: Tensor
        self.started: Tensor
        self.register_buffer("mean", torch.tensor(20.0, dtype=torch.float64))
        self.register_buffer("std", torch.tensor(100.0, dtype=torch.float64))
        self.register_buffer("started", torch.tensor(self.start == "paper"))

    def forward(
        self,
        logits: Float[Tensor, "n classes"],
        features: Float[Tensor, "n width"] | None,
        valid: Bool[Tensor, " n"] | None = None,
        *,
        shared: bool = False,
    ) -> Float[Tensor, " n"]:
        """Return gamma; in training mode, with gradients enabled, update the running statistics first."""
        updates_state = self.training and torch.is_grad_enabled()
        with torch.no_grad():
            values = self._values(logits, features)
            if valid is None and not shared and self.normalise == "ema" and self.is_eager_on_cpu(values):
                gamma = self._on_host(values, updates_state=updates_state)
                if gamma is not None:
                    return gamma.to(logits.dtype)
            usable = _all_or(valid, values) & (values.abs() <= LARGEST)
            values = torch.where(usable, values, 0).to(torch.promote_types(self.mean.dtype, values.dtype))
            if self.normalise == "none":
                gamma = values
            elif self.normalise == "batch":
                gamma = self._normalised(values, *_statistics(values, usable, shared=shared))
            else:
                if updates_state:
                    self.check_update()
                    self._update(*_statistics(values, usable, shared=shared))
                gamma = self._normalised(values, self.mean, self.std, self.started)
            gamma = torch.where(usable, gamma, 0).clamp(-GAMMA_LIMIT, GAMMA_LIMIT)
            return gamma.to(logits.dtype)

    def _on_host(self, values: Float[Tensor, " n"], *, updates_state: bool) -> Float[Tensor, " n"] | None:
        """Return gamma, computed with Python floats (a fifth of the operators), or None if a value is not usable."""
        values = values.to(torch.promote_types(self.mean.dtype, values.dtype))
        n = len(values)
        if n < 2 or self.source == "max_logit":
            return None
        batch_std, batch_mean = (value.item() for value in torch.std_mean(values))
        largest = batch_mean * n  # an upper bound, because no value is negative
        if not largest <= LARGEST:
            return None
        mean, std, started = self.mean.item(), self.std.item(), bool(self.started)
        if updates_state:
            weight = self.theta if started else 1.0
            mean = weight * batch_mean + (1 - weight) * mean
            std = weight * batch_std + (1 - weight) * std
            self.mean.fill_(mean)
            self.std.fill_(std)
            if not started:
                started = True
                self.started.fill_(True)
        scale = std + self.eps
        factor = 1 / scale if started and scale >= torch.finfo(values.dtype).tiny else 0.0
        gamma = (values - mean) * factor
        return gamma if (largest + abs(mean)) * factor <= GAMMA_LIMIT else gamma.clamp(-GAMMA_LIMIT, GAMMA_LIMIT)

    def _values(self, logits: Tensor, features: Tensor | None) -> Tensor:
        if self.source == "max_prob":
            return functional.softmax(logits, 1).amax(1)
        if self.source == "max_logit":
            return logits.amax(1)
        if features is None:
            raise UserError("the indicator needs features; source='max_prob' and 'max_logit' do not need them")
        dtype = at_least_float32(features.dtype)
        if self.norm == 1 and self.is_eager_on_cpu(features):  # four times as fast as the general norm
            return features.detach().abs().sum(1, dtype=dtype)
        norms: Tensor = torch.linalg.vector_norm(features, self.norm, 1, dtype=dtype)
        return norms

    def _update(self, mean: Tensor, std: Tensor, enough: Tensor) -> None:
        """Update the running statistics if the batch has enough samples."""
        one = torch.ones_like(self.mean)
        weight = torch.where(self.started, self.theta * one, one) * enough
        self.mean.copy_(torch.where(weight > 0, weight * mean + (1 - weight) * self.mean, self.mean))
        self.std.copy_(torch.where(weight > 0, weight * std + (1 - weight) * self.std, self.std))
        self.started.logical_or_(enough)

    def _normalised(self, values: Tensor, mean: Tensor, std: Tensor, known: Tensor) -> Tensor:
        scale = std + self.eps
        known = known & (scale >= torch.finfo(scale.dtype).tiny)
        # One division per batch, not per sample: float64 divisions are slow on a GPU.
        factor = torch.where(known, 1 / torch.where(known, scale, 1), 0)
        return (values - mean) * factor


def _statistics(values: Tensor, usable: Tensor, *, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and unbiased standard deviation of usable values on all ranks, and whether there are two or more."""
    count = usable.sum().to(values.dtype)
    mean = values.sum() / count.clamp_min(1)
    squares = torch.where(usable, (values - mean) ** 2, 0).sum()
    if shared:
        counts, means, all_squares = ranks.stacked(torch.stack([count, mean, squares])).unbind(1)
        count = counts.sum()
        mean = (counts * means).sum() / count.clamp_min(1)
        squares = (all_squares + counts * (means - mean) ** 2).sum()
    return mean, (squares / (count - 1).clamp_min(1)).sqrt(), count >= 2


class BCG(AbstractPart):
    """Bidirectional calibrating gate: predicts per sample whether a large norm increases or decreases the smoothing.

    Args:
        num_classes: number of classes C; the gate is an MLP C -> width -> 2.
        kind: see `gate` of `AdaptiveSmoothing`.
        width: hidden units, C // 2 by default and at least 1; the gate has width * (C + 3) + 2 parameters.
        zero: psi where both outputs are equal.
        positive_index: index of the output for psi = +1.

    """

    def __init__(
        self,
        num_classes: int,
        *,
        kind: Gate = "learned",
        width: int | None = None,
        zero: Literal[-1, 0] = -1,
        positive_index: Literal[0, 1] = 1,
    ) -> None:
        super().__init__()
        self.kind = one_of("gate", kind, get_args(Gate))
        if zero not in (-1, 0) or positive_index not in (0, 1):
            raise UserError(f"gate_zero must be -1 or 0 ({zero}), gate_positive_index 0 or 1 ({positive_index})")
        self.zero = float(zero)
        self.positive_index = positive_index
        self.width = max(1, num_classes // 2) if width is None else whole("gate_width", width)
        if self.kind not in ("positive", "negative"):
            self.fc_in = nn.Linear(num_classes, self.width)
            self.fc_out = nn.Linear(self.width, 2)

    def forward(
        self, logits: Float[Tensor, "n classes"], valid: Bool[Tensor, " n"] | None, *, shared: bool = False
    ) -> Float[Tensor, " n"]:
        """Return psi; a straight-through estimator passes its gradient to the difference of the two outputs."""
        if self.kind in ("positive", "negative"):
            return torch.full_like(logits[:, 0], 1.0 if self.kind == "positive" else -1.0)
        if shared:
            self._take_from_first_rank()
        (w_in, b_in), (w_out, b_out) = (
            _weights(layer, logits.dtype, shared=shared) for layer in (self.fc_in, self.fc_out)
        )
        inputs, plus, minus = logits.detach(), self.positive_index, 1 - self.positive_index
        # w^T softmax(o) with w = (1, -1) is tanh((o_0 - o_1) / 2).
        if self.is_eager_on_cpu(logits):  # the formula as written, with few operators
            hidden = functional.leaky_relu(functional.linear(inputs, w_in, b_in), 0.01)
            outputs = functional.linear(hidden, w_out, b_out).unbind(1)
            v = torch.tanh((outputs[plus] - outputs[minus]) / 2)
        else:
            # Units x samples, not samples x units: GPUs have a fast kernel for the gradient of w_in in this layout.
            # Multiply by the difference of the two output rows, a vector, instead of a two-column matrix.
            hidden = functional.leaky_relu(w_in @ inputs.t() + b_in.unsqueeze(1), 0.01)
            difference = (w_out[plus] - w_out[minus]).unsqueeze(1) * hidden
            v = torch.tanh((difference.sum(0) + (b_out[plus] - b_out[minus])) / 2)
        if self.kind == "soft":
            return v
        value = v.detach()
        other = -1.0 if self.zero == -1 else torch.where(value == 0, self.zero, -1.0)
        psi = torch.where(value > 0, 1.0, other).to(v.dtype) + (v - value)
        return psi[_shuffled(_all_or(valid, psi))] if self.kind == "shuffled" else psi

    @torch.no_grad()
    def _take_from_first_rank(self) -> None:
        """Copy the gate parameters of rank 0: without DDP around the loss, each rank initialises its own gate."""
        parameters = list(self.parameters())
        first = ranks.stacked(torch.cat([p.detach().flatten() for p in parameters]))[0]
        for parameter, values in zip(parameters, first.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(values.view_as(parameter))


def _weights(layer: nn.Linear, dtype: torch.dtype, *, shared: bool) -> tuple[Tensor, Tensor]:
    weight, bias = layer.weight.to(dtype), layer.bias.to(dtype)
    return (ranks.replicated(weight), ranks.replicated(bias)) if shared else (weight, bias)


def _all_or(valid: Tensor | None, rows: Tensor) -> Tensor:
    """Return the mask of valid samples; None means all."""
    return torch.ones_like(rows, dtype=torch.bool) if valid is None else valid


def _shuffled(valid: Tensor) -> Tensor:
    """Return a random permutation of the valid positions; ignored samples keep their positions."""
    keys = torch.rand(valid.shape, device=valid.device)
    permutation = torch.argsort(keys + 2 * ~valid)
    position = torch.arange(len(valid), device=valid.device)
    return torch.where(valid, permutation[(valid.cumsum(0) - 1).clamp_min(0)], position)


class SmoothingOptions(TypedDict, total=False):
    """Keywords of the smoothing, see `NCI`, `BCG` and `AdaptiveSmoothing`."""

    theta: float
    norm: Norm
    source: Source
    normalise: Normalise
    start: Start
    eps: float | None
    shuffle_indicator: bool
    gate: Gate
    gate_width: int | None
    gate_zero: Literal[-1, 0] | None
    gate_positive_index: Literal[0, 1] | None
    alpha_min: float | None
    alpha_max: float | None
    preset: Preset


class AdaptiveSmoothing(AbstractPart):
    """Adaptive smoothing module: computes alpha_i of each sample, for the losses below or for a custom loss.

    `psi`, `gamma` and `alpha_i` of the latest batch are attributes (detached, NaN where a sample is ignored).

    Args:
        num_classes: number of classes.
        alpha: base smoothing; alpha_i lies between 0 and 2 alpha.
        beta: sensitivity to the indicator; 0 means alpha_i = alpha.
        alpha_min: lower limit of alpha_i.
        alpha_max: upper limit of alpha_i.
        preset: `default`, `official` or `paper`: values of four keywords, in the table of this module's docstring.
        theta, norm, source, normalise, start, eps: see `NCI`.
        shuffle_indicator: shuffle the indicator across the batch, for ablation.
        gate: `learned`; for ablation `soft` (no sign), `shuffled` (learned, then shuffled across the batch), or a fixed
            `positive` or `negative`, which has no parameters.
        gate_width: hidden units of the gate, C // 2 by default.
        gate_zero: psi where both outputs of the gate are equal, -1 or 0; by default from the preset.
        gate_positive_index: index of the output of the gate for psi = +1; by default from the preset.

    """

    not_hyperparameters = frozenset({"sync"})

    def __init__(
        self,
        *,
        num_classes: int,
        alpha: float = 0.05,
        beta: float = 4.0,
        theta: float = 0.95,
        norm: Norm = 1.0,
        source: Source = "features",
        normalise: Normalise = "ema",
        start: Start = "paper",
        eps: float | None = None,
        shuffle_indicator: bool = False,
        gate: Gate = "learned",
        gate_width: int | None = None,
        gate_zero: Literal[-1, 0] | None = None,
        gate_positive_index: Literal[0, 1] | None = None,
        alpha_min: float | None = None,
        alpha_max: float | None = None,
        preset: Preset = "default",
        sync: bool = True,
    ) -> None:
        super().__init__()
        chosen = PRESETS[one_of("preset", preset, get_args(Preset))]
        self.num_classes = whole("num_classes", num_classes, 2)
        self.alpha = at_least("alpha", alpha, 0)
        self.beta = at_least("beta", beta, 0)
        self.alpha_min = None if alpha_min is None else within("alpha_min", alpha_min, 0, 1)
        self.alpha_max = None if alpha_max is None else within("alpha_max", alpha_max, alpha_min or 0, 1)
        self.sync = sync
        self.shuffle_indicator = shuffle_indicator
        eps = chosen["eps"] if eps is None else eps
        self.nci = NCI(theta=theta, norm=norm, source=source, normalise=normalise, start=start, eps=eps)
        self.bcg = BCG(
            self.num_classes,
            kind=gate,
            width=gate_width,
            zero=chosen["gate_zero"] if gate_zero is None else gate_zero,
            positive_index=chosen["gate_positive_index"] if gate_positive_index is None else gate_positive_index,
        )
        self.psi: Tensor | None = None
        self.gamma: Tensor | None = None
        self.alpha_i: Tensor | None = None

    def forward(
        self,
        logits: Float[Tensor, "n classes"],
        features: Float[Tensor, "n width"] | None = None,
        valid: Bool[Tensor, " n"] | None = None,
    ) -> Float[Tensor, " n"]:
        """Return alpha_i of each sample; its gradient reaches the gate, but not logits or features."""
        if logits.ndim != 2 or logits.shape[1] != self.num_classes:
            raise UserError(f"logits must have shape (N, {self.num_classes}), not {tuple(logits.shape)}")
        if features is not None and (features.ndim != 2 or len(features) != len(logits)):
            raise UserError(f"features must have shape ({len(logits)}, D), not {tuple(features.shape)}")
        with full_precision(logits):
            logits = logits.to(at_least_float32(logits.dtype))
            shared = self.training and torch.is_grad_enabled() and self.sync and ranks.count() > 1
            gamma = self.nci(logits.detach(), features, valid, shared=shared)
            gamma = gamma[_shuffled(_all_or(valid, gamma))] if self.shuffle_indicator else gamma
            psi = self.bcg(logits, valid, shared=shared)
            alpha_i = self.alpha * 2 * torch.sigmoid(psi * (self.beta * gamma))
            if self.alpha_min is not None or self.alpha_max is not None:
                alpha_i = alpha_i.clamp(self.alpha_min, self.alpha_max)
            if not self.is_transformed:
                latest = [x.detach() for x in (psi, gamma, alpha_i)]
                latest = latest if valid is None else [torch.where(valid, x, torch.nan) for x in latest]
                self.psi, self.gamma, self.alpha_i = latest
            return alpha_i


class FeDLaSOptions(SmoothingOptions, Options, total=False):
    """Keywords that both FeDLaS losses share."""


class AbstractFeDLaS(AbstractLoss):
    """Base class of both FeDLaS losses: adaptive smoothing, and its state in the latest batch."""

    citation = CITATION
    has_gate = True

    def __init__(self, *, num_classes: int, alpha: float, beta: float, **options: Unpack[FeDLaSOptions]) -> None:
        smoothing = {name: value for name, value in options.items() if name in SmoothingOptions.__annotations__}
        common = {name: value for name, value in options.items() if name not in smoothing}
        super().__init__(num_classes=num_classes, **cast("Options", common))
        self.smoothing = AdaptiveSmoothing(
            num_classes=num_classes, alpha=alpha, beta=beta, sync=self.sync, **cast("SmoothingOptions", smoothing)
        )
        self.needs_features = self.smoothing.nci.source == "features"

    def gate_state(self) -> GateState | None:
        """Return direction, normalised feature norm and smoothing of each sample of the latest batch."""
        module = self.smoothing
        if module.psi is None or module.gamma is None or module.alpha_i is None:
            return None
        return GateState(module.psi, module.gamma, module.alpha_i, module.alpha)

    @property
    def psi(self) -> Tensor | None:
        """Direction of each sample of the latest batch, +1 or -1."""
        return self.smoothing.psi

    @property
    def gamma(self) -> Tensor | None:
        """Normalised feature norm of each sample of the latest batch."""
        return self.smoothing.gamma

    @property
    def alpha_i(self) -> Tensor | None:
        """Smoothing of each sample of the latest batch."""
        return self.smoothing.alpha_i


class FeDLaSLS(AbstractFeDLaS):
    """Label smoothing whose alpha depends on the feature norm of each sample, with a sign from a learned gate.

    Args:
        num_classes: number of classes.
        alpha: base label smoothing; paper: 0.05, and 0.1 on CIFAR-100.
        beta: sensitivity to the indicator; 0 gives label smoothing.
        **options: see `AdaptiveSmoothing` and `AbstractLoss`.

    """

    name = "fedlas_ls"

    def __init__(
        self, *, num_classes: int, alpha: float = 0.05, beta: float = 4.0, **options: Unpack[FeDLaSOptions]
    ) -> None:
        super().__init__(num_classes=num_classes, alpha=within("alpha", alpha, 0, 0.5), beta=beta, **options)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        alpha_i = self.smoothing(batch.logits, batch.features, None if batch.all_valid else batch.valid)
        return {"classification": self.smoothed(batch, alpha_i)}


class FeDLaSMbLS(AbstractFeDLaS):
    """Margin-based label smoothing whose weight depends on the feature norm of each sample, signed by a learned gate.

    Unlike in MbLS, the cross-entropy is weighted by 1 - alpha_i: beta = 0 gives (1 - lambda) CE + lambda R, not MbLS.

    Args:
        num_classes: number of classes.
        lambda_: base weight of the margin term; paper: 0.1, and 0.05 on Tiny-ImageNet and fine-grained data sets.
        margin: m, the largest difference of logits without a penalty; paper: 6 on CIFAR, 10 elsewhere.
        beta: sensitivity to the indicator; paper: 0.5, and 1 on CIFAR-100.
        margin_reduction: `mean` or `sum` over classes in R; by default from the preset.
        **options: see `AdaptiveSmoothing` and `AbstractLoss`.

    """

    name = "fedlas_mbls"

    def __init__(
        self,
        *,
        num_classes: int,
        lambda_: float = 0.1,
        margin: float = 6.0,
        beta: float = 0.5,
        margin_reduction: Literal["mean", "sum"] | None = None,
        **options: Unpack[FeDLaSOptions],
    ) -> None:
        super().__init__(num_classes=num_classes, alpha=within("lambda_", lambda_, 0, 0.5), beta=beta, **options)
        self.margin = at_least("margin", margin, 0)
        if margin_reduction is None:
            margin_reduction = PRESETS[options.get("preset", "default")]["margin_reduction"]
        self.margin_reduction = one_of("margin_reduction", margin_reduction, ("mean", "sum"))

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        alpha_i = self.smoothing(batch.logits, batch.features, None if batch.all_valid else batch.valid)
        return {
            "classification": (1 - alpha_i) * self.cross_entropy(batch),
            "margin": alpha_i * self._margin(batch),
        }

    def _margin(self, batch: Batch) -> Float[Tensor, " n"]:
        excess = batch.excess(self.margin)
        return excess.mean(1) if self.margin_reduction == "mean" else excess.sum(1)
