"""Metrics over data that do not fit into memory, or that many processes see: `update`, `merge`, `sync`, `compute`.

Each class gives the same number as the function of the same name on all data at once. A stream is fed with
`update(probs, labels)` or `update_logits(logits, labels)`; `a.merge(b)` adds the samples of `b` to `a`, and `sync()`
those of all processes of a distributed run, after which every process computes the same value.

Metrics of equal-width bins keep their sums only: memory does not grow, counts are exact however the data are split,
and values agree to 1e-12. Equal-mass bins, smooth ECE and AURC need the order of all confidences, so they keep 5 bytes
a sample (AURC 13); `AECE(memory="bounded")` keeps sums in fine cells instead and states its largest possible error in
`details`.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, Literal, TypeVar

from fedlas.errors import UserError
from fedlas.metrics import calibration, scoring, selective, smooth
from fedlas.metrics.cells import CellStore
from fedlas.metrics.presets import Binning, Compat, Kind
from fedlas.metrics.result import Result
from fedlas.metrics.samples import Scope
from fedlas.metrics.stores import (
    AbstractHistogram,
    AbstractStore,
    BinStore,
    BrierStore,
    LossStore,
    MassStore,
    PairStore,
)
from fedlas.predictions import AnyPredictions, Array

Stream = TypeVar("Stream", bound="AbstractStream[AbstractStore]")
Kept_co = TypeVar("Kept_co", bound=AbstractStore, covariant=True)


class AbstractStream(ABC, Generic[Kept_co]):
    """A metric that is fed piece by piece.

    Args:
        store: what is kept between the pieces.
    """

    def __init__(self, store: Kept_co) -> None:
        self.store = store

    def update(self: Stream, probs: AnyPredictions | Array, labels: Array | None = None) -> Stream:
        """Add samples, given as probabilities; a piece without any that counts is left out."""
        if not self.store.skips(labels):
            self.store.add(probs, labels)
        return self

    def update_logits(self: Stream, logits: Array, labels: Array) -> Stream:
        """Add samples, given as logits; a piece without any that counts is left out."""
        if not self.store.skips(labels):
            self.store.add_logits(logits, labels)
        return self

    def merge(self: Stream, other: Stream) -> Stream:
        """Add the samples of another stream to this one."""
        if type(other) is not type(self):
            raise UserError(f"cannot merge {type(other).__name__} into {type(self).__name__}")
        self.store.merge(other.store)
        return self

    def sync(self: Stream) -> Stream:
        """Add the samples of all processes of a distributed run; to be called once, after the last update."""
        self.store.sync()
        return self

    @abstractmethod
    def compute(self) -> Result | tuple[Result, Result]:
        """Give the metric of all samples so far."""


class AbstractBinned(AbstractStream[AbstractHistogram]):
    """A metric of bins of equal width or of equal mass; `calibration.histogram` explains its arguments."""

    def __init__(
        self,
        bins: int = 15,
        *,
        binning: Kind = "width",
        scope: Scope = "top-label",
        compat: Compat | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(histogram_store(Binning(bins, binning, compat), scope, ignore_index))


class ECE(AbstractStream[AbstractHistogram]):
    """Expected calibration error over equally wide bins."""

    def __init__(
        self,
        bins: int = 15,
        *,
        scope: Scope = "top-label",
        compat: Compat | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(BinStore(Binning(bins, "width", compat), scope, ignore_index))

    def compute(self) -> Result:
        """Add up the gaps of all bins."""
        return calibration.l1_error(self.store.histogram(), "ECE")


class ClasswiseECE(AbstractStream[AbstractHistogram]):
    """Calibration error of each class's probability, averaged over all classes."""

    def __init__(self, bins: int = 15, *, compat: Compat | None = None, ignore_index: int | None = None) -> None:
        super().__init__(BinStore(Binning(bins, "width", compat), "class-wise", ignore_index))

    def compute(self) -> Result:
        """Add up the gaps of all bins, and average over classes."""
        return calibration.l1_error(self.store.histogram(), "class-wise ECE")


class AECE(AbstractStream[AbstractHistogram]):
    """Calibration error over bins that hold equally many samples.

    Args:
        bins: how many.
        scope: "top-label" or "positive".
        compat: follow the rules of other code, to reproduce its numbers.
        ignore_index: label of samples that do not count.
        memory: "exact" keeps 5 bytes a sample; "bounded" keeps fine cells and states its largest possible error.
    """

    def __init__(
        self,
        bins: int = 15,
        *,
        scope: Scope = "top-label",
        compat: Compat | None = None,
        ignore_index: int | None = None,
        memory: Literal["exact", "bounded"] = "exact",
    ) -> None:
        super().__init__(histogram_store(Binning(bins, "mass", compat), scope, ignore_index, memory))

    def compute(self) -> Result:
        """Make the bins, and add up their gaps."""
        found = calibration.l1_error(self.store.histogram(), "AECE")
        bound = self.store.error_bound()
        details = found.details if bound is None else {**found.details, "error_bound": bound}
        return Result(float(found), found.definition, None, details)


class OverUnder(AbstractBinned):
    """Over-confidence and under-confidence, which add up to the calibration error."""

    def compute(self) -> tuple[Result, Result]:
        """Add up the gaps of over-confident and of under-confident bins."""
        filled = self.store.histogram()
        return calibration.over(filled), calibration.under(filled)


class SignedECE(AbstractBinned):
    """Over-confidence minus under-confidence."""

    def compute(self) -> Result:
        """Add up the gaps with their signs."""
        return calibration.signed(self.store.histogram())


class MCE(AbstractBinned):
    """The largest gap between confidence and accuracy of any bin."""

    def compute(self) -> Result:
        """Find the largest gap."""
        return calibration.largest(self.store.histogram())


class AbstractOrdered(AbstractStream[PairStore]):
    """A metric that needs the order of all confidences."""

    ranked = False

    def __init__(self, *, scope: Scope = "top-label", ignore_index: int | None = None) -> None:
        super().__init__(PairStore(scope, ignore_index, ranked=self.ranked))


class SmoothECE(AbstractOrdered):
    """Calibration error with a kernel instead of bins."""

    def compute(self) -> Result:
        """Choose the kernel's width and measure the error there."""
        return smooth.smooth_result(self.store.pairs())


class AURC(AbstractOrdered):
    """Mean risk over all coverages."""

    ranked = True

    def compute(self) -> Result:
        """Order all samples by confidence and average the risk."""
        return selective.aurc_result(self.store.pairs())


class Accuracy(AbstractStream[AbstractHistogram]):
    """How often the most probable class is the label."""

    def __init__(self, *, ignore_index: int | None = None) -> None:
        super().__init__(BinStore(Binning(1), "top-label", ignore_index))

    def compute(self) -> Result:
        """Divide the number of right answers by that of samples."""
        filled, about = self.store.histogram()
        plain = replace(about, estimator="accuracy", bins=None, edges=None)
        return Result(float(filled.correct_sum.sum()) / filled.n, plain)


class NLL(AbstractStream[LossStore]):
    """Mean negative log-likelihood of the labels."""

    def __init__(self, *, ignore_index: int | None = None) -> None:
        super().__init__(LossStore(ignore_index))

    def compute(self) -> Result:
        """Divide the sum of losses by the number of samples."""
        kept = self.store
        if kept.about.n == 0:
            raise UserError("no samples yet; call update first")
        return scoring.nll_result(kept.total / kept.about.n, kept.floored, kept.floor, kept.about)


class Brier(AbstractStream[BrierStore]):
    """Mean squared distance between probabilities and labels; with `bins`, decomposed over bins of probability."""

    def __init__(self, bins: int | None = None, *, ignore_index: int | None = None) -> None:
        super().__init__(BrierStore(bins or 1, ignore_index))
        self.decomposed = bins is not None

    def compute(self) -> Result:
        """Return the score, and its parts in `details` where they were asked for."""
        filled, about = self.store.bins.histogram()
        whole = scoring.brier_result(self.store.squares, self.store.label_squares, filled, about)
        return whole if self.decomposed else scoring.brier_alone(float(whole), about)


def histogram_store(
    way: Binning,
    scope: Scope,
    ignore_index: int | None,
    memory: Literal["exact", "bounded"] = "exact",
) -> AbstractHistogram:
    """Choose what has to be kept for a way of making bins."""
    if memory == "bounded":
        if way.compat is not None:
            raise UserError(f'memory="bounded" cannot follow the rules of {way.compat}')
        return CellStore(way.bins, scope, ignore_index)
    return BinStore(way, scope, ignore_index) if way.kind == "width" else MassStore(way, scope, ignore_index)
