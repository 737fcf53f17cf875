"""Our metrics for torchmetrics: in a `MetricCollection`, in Lightning's `self.log`, over several processes.

Each class is a stream of `fedlas.metrics` whose sums are states of a `torchmetrics.Metric`: counts are int64 and sums
float64, added over processes, so memory does not grow. AECE, smooth ECE and AURC need the order of all confidences;
their states are lists that are joined. Values are float64 and those of `fedlas.metrics`: to the last bit after one
update, and to 1e-12 however the samples are split into updates and processes.

Nothing is guessed: `given` says whether updates bring "logits" or "probs". Metrics with the same keywords share their
states in a `MetricCollection` (its compute groups), so that ten of them cost one update.
"""

import zlib
from abc import abstractmethod
from typing import Any, ClassVar, Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor

from fedlas.errors import MissingPackageError, UserError, UserTypeError
from fedlas.extras import needed
from fedlas.metrics import streaming
from fedlas.metrics.bins import Bins
from fedlas.metrics.presets import Compat
from fedlas.metrics.result import Definition, Result
from fedlas.metrics.stores import AbstractHistogram, BinStore, MassStore, PairStore
from fedlas.metrics.streaming import AbstractStream

try:
    from torchmetrics import Metric
except ImportError as missing:
    raise MissingPackageError(needed("torchmetrics", "integrations", missing)) from missing

Given = Literal["logits", "probs"]
BIN_SUMS = ("counts", "confidence_sum", "correct_sum")


class Options(TypedDict, total=False):
    """Keywords of `torchmetrics.Metric` that every metric passes on."""

    compute_on_cpu: bool
    dist_sync_on_step: bool
    process_group: Any
    dist_sync_fn: Any
    distributed_available_fn: Any
    sync_on_compute: bool
    compute_with_cache: bool


class AbstractMetric(Metric):
    """A metric that is fed with logits or with probabilities, as it was told when it was built.

    Args:
        given: what updates bring, "logits" or "probs".
        ignore_index: label of samples that do not count.
        options: passed on to `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better: bool | None = False
    full_state_update = False

    def __init__(self, given: Given, *, ignore_index: int | None = None, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        if given not in get_args(Given):
            raise UserError(f'given is {given!r}; say what updates bring: given="logits" or given="probs"')
        self.given = given
        self.ignore_index = ignore_index
        # A collection takes metrics for equal whose states are equal after the first batch. Other rules may only show
        # later, so they are a state too: as small numbers, because large ones would be compared to five digits.
        rules = zlib.crc32(repr(self.rules()).encode()).to_bytes(4, "big")
        self.add_state("rule_bytes", torch.tensor(list(rules)), dist_reduce_fx="max")

    def rules(self) -> tuple[object, ...]:
        """Name what two metrics must agree in to share their states."""
        return self.given, self.ignore_index

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add samples: logits or probabilities as `given` says, and their labels."""
        stream = self.stream()
        piece = stream.update_logits(preds, target) if self.given == "logits" else stream.update(preds, target)
        self.take(piece)

    @abstractmethod
    def stream(self) -> AbstractStream[Any]:
        """Make an empty stream of ours."""

    @abstractmethod
    def take(self, piece: AbstractStream[Any]) -> None:
        """Add what a stream keeps to the states."""


class AbstractStreamed(AbstractMetric):
    """A metric whose states hold all that its stream keeps, so that the stream computes it."""

    def compute(self) -> Tensor:
        """Give the metric of all samples so far, as float64."""
        stream = self.stream()
        self.give(stream)
        found = self.chosen(stream.compute())
        return torch.tensor(float(found), dtype=torch.float64, device=self.device)

    def chosen(self, found: Result | tuple[Result, Result]) -> Result:
        """Pick the number that this metric is."""
        if isinstance(found, tuple):
            raise UserTypeError(f"{type(self).__name__} gives two numbers")
        return found

    @abstractmethod
    def give(self, stream: AbstractStream[Any]) -> None:
        """Put what the states hold into an empty stream."""


class AbstractSums(AbstractStreamed):
    """A metric of equally wide bins, whose states are the sums of the bins."""

    counts: Tensor
    confidence_sum: Tensor
    correct_sum: Tensor
    samples: Tensor

    def __init__(self, given: Given, classes: int = 2, **more: Any) -> None:
        super().__init__(given, **more)
        # What one made-up sample leaves behind shows edges and shapes, whatever the rules of the bins are.
        row = torch.zeros(1, classes, dtype=torch.float64)
        row[0, 0] = 1
        self._made_up = _bins(self.stream().update(row, torch.zeros(1, dtype=torch.int64)))
        for name in BIN_SUMS:
            self.add_state(name, torch.zeros_like(getattr(self._made_up, name)), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")

    def take(self, piece: AbstractStream[Any]) -> None:
        if (filled := _store(piece).filled) is None:  # none of the samples counts
            return
        for name in BIN_SUMS:
            getattr(self, name).add_(getattr(filled, name).to(self.device))
        self.samples += filled.n

    def give(self, stream: AbstractStream[Any]) -> None:
        n = int(self.samples)
        if n:
            edges, rule = self._made_up.edges.to(self.device), self._made_up.rule
            store = _store(stream)
            store.filled = Bins(edges, self.counts, self.confidence_sum, self.correct_sum, n, rule)
            store.about = Definition(estimator="", n=n)


class AbstractBins(AbstractSums):
    """A metric of the gaps between confidence and accuracy in equally wide bins.

    Args:
        given: what updates bring, "logits" or "probs".
        bins: how many.
        compat: follow the rules of other code, to reproduce its numbers.
        more: ignore_index, and the keywords of `torchmetrics.Metric`.
    """

    def __init__(self, given: Given, bins: int = 15, *, compat: Compat | None = None, **more: Any) -> None:
        self.bins, self.compat = bins, compat
        super().__init__(given, **more)

    def rules(self) -> tuple[object, ...]:
        return *super().rules(), self.bins, self.compat


class ECE(AbstractBins):
    """Expected calibration error over equally wide bins."""

    def stream(self) -> streaming.ECE:
        return streaming.ECE(self.bins, compat=self.compat, ignore_index=self.ignore_index)


class AbstractSide(AbstractBins):
    """One of the two parts of the ECE."""

    place: ClassVar[int]

    def stream(self) -> streaming.OverUnder:
        return streaming.OverUnder(self.bins, compat=self.compat, ignore_index=self.ignore_index)

    def chosen(self, found: Result | tuple[Result, Result]) -> Result:
        assert isinstance(found, tuple)
        return found[self.place]


class OverECE(AbstractSide):
    """Over-confidence: the part of the ECE from bins whose confidence is above their accuracy."""

    place = 0


class UnderECE(AbstractSide):
    """Under-confidence: the part of the ECE from bins whose confidence is below their accuracy."""

    place = 1


class SignedECE(AbstractBins):
    """Over-confidence minus under-confidence."""

    higher_is_better = None

    def stream(self) -> streaming.SignedECE:
        return streaming.SignedECE(self.bins, compat=self.compat, ignore_index=self.ignore_index)


class MCE(AbstractBins):
    """The largest gap between confidence and accuracy of any bin."""

    def stream(self) -> streaming.MCE:
        return streaming.MCE(self.bins, compat=self.compat, ignore_index=self.ignore_index)


class Accuracy(AbstractBins):
    """How often the most probable class is the label; it has bins so that it shares the sums of the ECE."""

    higher_is_better = True

    def stream(self) -> streaming.ECE:
        return streaming.ECE(self.bins, compat=self.compat, ignore_index=self.ignore_index)

    def compute(self) -> Tensor:
        if not self.samples:
            raise UserError("no samples yet; call update first")
        return self.correct_sum.sum() / self.samples


class ClasswiseECE(AbstractSums):
    """Calibration error of each class's probability, averaged over all classes.

    Args:
        given: what updates bring, "logits" or "probs".
        num_classes: number of classes.
        bins: how many.
        more: ignore_index, and the keywords of `torchmetrics.Metric`.
    """

    def __init__(self, given: Given, num_classes: int, bins: int = 15, **more: Any) -> None:
        self.bins = bins
        super().__init__(given, num_classes, **more)

    def stream(self) -> streaming.ClasswiseECE:
        return streaming.ClasswiseECE(self.bins, ignore_index=self.ignore_index)


class AbstractPairs(AbstractStreamed):
    """A metric that needs the order of all confidences, whose states are lists of them."""

    columns: tuple[str, ...] = ("confidence", "correct")

    def __init__(self, given: Given, **more: Any) -> None:
        super().__init__(given, **more)
        for name in self.columns:
            self.add_state(name, [], dist_reduce_fx="cat")

    def take(self, piece: AbstractStream[Any]) -> None:
        kept = _pairs(piece)
        for name in self.columns:
            setattr(self, name, [*_parts(getattr(self, name)), *getattr(kept, name)])

    def give(self, stream: AbstractStream[Any]) -> None:
        kept = _pairs(stream)
        for name in self.columns:
            setattr(kept, name, _parts(getattr(self, name)))
        kept.about = Definition(estimator="", n=sum(len(part) for part in kept.confidence))


class AECE(AbstractPairs):
    """Calibration error over bins that hold equally many samples.

    Args:
        given: what updates bring, "logits" or "probs".
        bins: how many.
        compat: follow the rules of other code, to reproduce its numbers.
        more: ignore_index, and the keywords of `torchmetrics.Metric`.
    """

    def __init__(self, given: Given, bins: int = 15, *, compat: Compat | None = None, **more: Any) -> None:
        super().__init__(given, **more)
        self.bins, self.compat = bins, compat

    def stream(self) -> streaming.AECE:
        return streaming.AECE(self.bins, compat=self.compat, ignore_index=self.ignore_index)


class SmoothECE(AbstractPairs):
    """Calibration error with a kernel instead of bins."""

    def stream(self) -> streaming.SmoothECE:
        return streaming.SmoothECE(ignore_index=self.ignore_index)


class AURC(AbstractPairs):
    """Mean risk over all coverages."""

    columns = ("confidence", "correct", "uncertainty")

    def stream(self) -> streaming.AURC:
        return streaming.AURC(ignore_index=self.ignore_index)


class NLL(AbstractStreamed):
    """Mean negative log-likelihood of the labels."""

    total: Tensor
    samples: Tensor

    def __init__(self, given: Given, **more: Any) -> None:
        super().__init__(given, **more)
        self.add_state("total", torch.tensor(0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")

    def stream(self) -> streaming.NLL:
        return streaming.NLL(ignore_index=self.ignore_index)

    def take(self, piece: AbstractStream[Any]) -> None:
        self.total += piece.store.total
        self.samples += piece.store.about.n

    def give(self, stream: AbstractStream[Any]) -> None:
        stream.store.total = float(self.total)
        stream.store.about = Definition(estimator="", n=int(self.samples))


class Brier(AbstractMetric):
    """Mean squared distance between probabilities and labels."""

    squares: Tensor
    samples: Tensor

    def __init__(self, given: Given, **more: Any) -> None:
        super().__init__(given, **more)
        self.add_state("squares", torch.tensor(0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0, dtype=torch.int64), dist_reduce_fx="sum")

    def stream(self) -> streaming.Brier:
        return streaming.Brier(ignore_index=self.ignore_index)

    def take(self, piece: AbstractStream[Any]) -> None:
        if piece.store.bins.filled is not None:
            self.squares += piece.store.squares
            self.samples += piece.store.bins.filled.n

    def compute(self) -> Tensor:
        """Give the score of all samples so far; its parts are not kept, see fedlas.metrics.Brier."""
        if not self.samples:
            raise UserError("no samples yet; call update first")
        return self.squares / self.samples


def calibration_metrics(given: Given, bins: int = 15, **more: Any) -> dict[str, Metric]:
    """Make the usual metrics for a `MetricCollection`; all but AECE and NLL share one set of sums."""
    return {
        "accuracy": Accuracy(given, bins, **more),
        "ece": ECE(given, bins, **more),
        "over_ece": OverECE(given, bins, **more),
        "under_ece": UnderECE(given, bins, **more),
        "aece": AECE(given, bins, **more),
        "nll": NLL(given, **more),
    }


def _store(stream: AbstractStream[Any]) -> BinStore:
    store: AbstractHistogram = stream.store
    assert isinstance(store, BinStore)
    return store


def _bins(stream: AbstractStream[Any]) -> Bins:
    filled = _store(stream).filled
    assert filled is not None
    return filled


def _pairs(stream: AbstractStream[Any]) -> PairStore:
    store = stream.store
    kept = store.kept if isinstance(store, MassStore) else store
    assert isinstance(kept, PairStore)
    return kept


def _parts(state: list[Tensor] | Tensor) -> list[Tensor]:
    """Give a state that is a list as a list; after processes were joined it is one tensor."""
    return [state] if isinstance(state, Tensor) else list(state)
