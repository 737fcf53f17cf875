"""Closed loop: self-distillation whose strength adapts to the calibration on held-out data.

    L   = mean_i (1 - a_i) CE_i + a_i CE(m_i, p_i),   a_i = a_b for the bin b that contains sg[x_i]
    a_b <- clip(a_b + step gap_b, alpha_min, alpha_max) after each epoch, gap_b = mean confidence - accuracy of bin b

m_i is the prediction of sample i at its previous visit (`past`: training mode, augmented view, no gradient; uniform at
the first visit) or the uniform distribution (`uniform`, which is label smoothing); `none` omits the second term, so
that a_i only reduces the weight of a sample. x_i is the confidence of the prediction, the L1 norm of the features, or
absent (`none`: one strength for all samples). After each epoch the bins become equal-mass bins of x on the validation
data, and gap_b is computed there: over-confident bins get a larger a_b, under-confident ones a smaller a_b. A bin
without validation samples keeps its strength. Training samples may be distributed unequally over these bins. Class
weights act on both terms, as in label smoothing.

Memory of `past`: num_samples x num_classes numbers, 18 MB for 45,000 samples of 100 classes; for ImageNet (1.28 million
samples, 1,000 classes) 5.1 GB in float32, 2.6 GB in bfloat16, on the device and in each checkpoint. Past predictions
are used in training only: in evaluation mode, or where gradients are disabled, the loss is the cross-entropy and no
index is needed; with `uniform` it remains the smoothed cross-entropy.

Related work. Targets: PS-KD (Kim et al., ICCV 2021: past predictions, linear schedule; here `pskd`);
Self-Distillation as Instance-Specific Label Smoothing (Zhang and Sabuncu, NeurIPS 2020); Adaptive Label Smoothing
with Self-Knowledge (Lee, Cheung and Zhang, 2021 and 2022: strength from the entropy of the prediction); online label
smoothing (Zhang et al., 2021: past predictions of each class). Feedback from held-out calibration: AdaFocal (Ghosh et
al., NeurIPS 2022: gamma of a focal loss per bin; here `adafocal`); CALS (Liu et al., CVPR 2023: penalty per class);
Meta-Calibration (Bohdal et al., 2021: label smoothing learned through a differentiable ECE); gamma-Net (Wang and
Golebiowski, TMLR 2024: gamma per sample).
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Unpack, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from fedlas.errors import UserError
from fedlas.losses.base import AbstractSelfDistillation, Batch, Options, TableType, at_least, one_of, whole, within
from fedlas.metrics.bin_sums import EdgeRule, add_up, bin_index, count_up, equal_mass_edges, exact
from fedlas.predictions import Predictions

Target = Literal["past", "uniform", "none"]
Indicator = Literal["confidence", "norm", "none"]


class _Recorded(tuple[Mapping[str, Sequence[float]], ...]):
    """Recorded strengths, with a short `repr`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} epochs>"


def _recorded(epochs: Sequence[Mapping[str, Sequence[float]]], strengths: int) -> _Recorded:
    """Check the numbers of recorded strengths and edges."""
    expected = {"strengths": strengths, "edges": strengths + 1}
    for epoch in epochs:
        sizes = {name: len(epoch.get(name, ())) for name in expected}
        if sizes != expected:
            raise UserError(f"an epoch of replay has {sizes} numbers, but {strengths} bins need {expected}")
    if not epochs:
        raise UserError("replay has no epoch; leave it out for strengths that follow the validation set")
    return _Recorded(epochs)


class ClosedLoop(AbstractSelfDistillation):
    """Self-distillation from past predictions, stronger in bins that are over-confident on held-out data.

    Args:
        num_classes: number of classes.
        num_samples: number of samples of the training split, whose positions are passed as `index`.
        target: `past`, the previous prediction of each sample, `uniform`, or `none` for (1 - a_i) CE_i alone.
        indicator: quantity whose bins have separate strengths: `confidence`, `norm` (L1 norm of the features, which
            the validation predictions must contain too) or `none`, one strength for all samples.
        bins: number of bins of the indicator; `none` has one.
        step: change of a strength after an epoch per unit of its calibration gap; with `uniform`, 3.0 was too large on
            CIFAR-100 (strengths oscillated between epochs).
        alpha_min: lower limit of the strengths.
        alpha_max: upper limit of the strengths.
        start: strength of every bin in the first epoch.
        replay: strengths and edges of the bins in each epoch, [{"strengths": [...], "edges": [...]}, ...], instead of
            feedback; after the last entry, they stay constant. The `loss_state` logged in an epoch is for the next one.
        table_dtype: `float32`, or `bfloat16` for half the memory of the past predictions.
        **options: see `AbstractLoss`.

    """

    name = "closed_loop"
    citation = "fedlas, 2026; past predictions as targets: Kim et al. (PS-KD), ICCV 2021."
    needs_validation = True

    def __init__(
        self,
        *,
        num_classes: int,
        num_samples: int,
        target: Target = "past",
        indicator: Indicator = "confidence",
        bins: int = 10,
        step: float = 3.0,
        alpha_min: float = 0.0,
        alpha_max: float = 0.9,
        start: float = 0.2,
        replay: Sequence[Mapping[str, Sequence[float]]] | None = None,
        table_dtype: TableType = "float32",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(num_classes=num_classes, **options)
        self.num_samples = whole("num_samples", num_samples)
        self.target = one_of("target", target, get_args(Target))
        self.indicator = one_of("indicator", indicator, get_args(Indicator))
        self.bins = whole("bins", bins)
        self.step = at_least("step", step, 0)
        self.alpha_min = within("alpha_min", alpha_min, 0, 1)
        self.alpha_max = within("alpha_max", alpha_max, self.alpha_min, 1)
        self.start = within("start", start, self.alpha_min, self.alpha_max)
        self.needs_features = self.indicator == "norm"
        self.needs_index = self.target == "past"
        self.table_dtype = one_of("table_dtype", table_dtype, get_args(TableType))
        if self.target == "past":
            self.index_limit = self.num_samples
            self.create_table(self.num_samples, int(num_classes), table_dtype, 1 / num_classes)
        strengths = 1 if self.indicator == "none" else self.bins
        self.alphas: Tensor
        self.gaps: Tensor
        self.edges: Tensor
        self.register_buffer("alphas", torch.full((strengths,), float(self.start), dtype=torch.float64))
        self.register_buffer("gaps", torch.zeros(strengths, dtype=torch.float64))
        # All strengths are equal until the first update, so the first edges have no effect.
        self.register_buffer("edges", torch.linspace(0, 1, strengths + 1, dtype=torch.float64))
        self.finished_epochs: Tensor
        self.register_buffer("finished_epochs", torch.zeros((), dtype=torch.int64))
        self.replay = None if replay is None else _recorded(replay, strengths)
        self.needs_validation = replay is None
        self._take_recorded()

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        if self.target == "uniform":
            return {"classification": self.smoothed(batch, self._strengths(batch))}
        if self.target == "none":
            weight = 1 - self._strengths(batch) if batch.updates_state else 1.0
            return {"classification": weight * self.cross_entropy(batch)}
        if not batch.updates_state:
            return {"classification": self.cross_entropy(batch)}
        value = self.distilled(batch, self._strengths(batch), self.read_past(batch))
        self.write_past(batch)
        return {"classification": value}

    @torch.no_grad()
    def learn_from_epoch(self, validation: Predictions | None) -> None:
        """Update bins and strengths from the calibration on the validation set; all ranks must pass the same data."""
        self.finished_epochs += 1
        if self.replay is not None:
            self._take_recorded()
            return
        assert validation is not None
        values = validation.confidence
        if self.indicator == "norm":
            if validation.features is None:
                raise UserError(
                    "closed_loop with indicator='norm' needs the features of the validation set: "
                    "loss.end_epoch(validation=fedlas.Predictions(logits, labels, features=features))"
                )
            values = validation.features.abs().sum(1, dtype=torch.float32)
        bins = len(self.alphas)
        edges = equal_mass_edges(values, bins)
        index = bin_index(values, edges, EdgeRule.RIGHT)
        gap = exact(validation.confidence) - exact(validation.correct)
        index = index.to(gap.device)
        self.edges.copy_(edges)
        self.update(add_up(gap, index, bins) / count_up(index, bins).clamp_min(1))

    @torch.no_grad()
    def update(self, gaps: Float[Tensor, " bins"]) -> None:
        """Update each strength by the gap between confidence and accuracy in its bin."""
        self.gaps.copy_(gaps)
        self.alphas.copy_((self.alphas + self.step * self.gaps).clamp(self.alpha_min, self.alpha_max))

    @torch.no_grad()
    def _take_recorded(self) -> None:
        """Set the recorded strengths and edges of the next epoch, if `replay` is set."""
        if self.replay is not None:
            recorded = self.replay[min(int(self.finished_epochs), len(self.replay) - 1)]
            self.alphas.copy_(torch.tensor(recorded["strengths"]))
            self.edges.copy_(torch.tensor(recorded["edges"]))

    def epoch_state(self) -> dict[str, list[float]]:
        """Return the strengths of the next epoch, the gaps that determined them, and the edges of their bins."""
        return {"strengths": self.alphas.tolist(), "gaps": self.gaps.tolist(), "edges": self.edges.tolist()}

    def _strengths(self, batch: Batch) -> Tensor:
        alphas = self.alphas.to(batch.logits.dtype)
        if len(alphas) == 1:  # Inductor does not compile `bucketize` without edges
            return alphas
        if self.indicator == "norm":
            assert batch.features is not None
            values = torch.linalg.vector_norm(batch.features.detach(), 1, 1, dtype=batch.logits.dtype)
        else:
            values = batch.confidence().detach()
        return alphas[torch.bucketize(values, self.edges[1:-1].to(values.dtype))]
