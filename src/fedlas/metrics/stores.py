"""What a streaming metric keeps between updates.

    `BinStore`                  the sums of equal-width bins; memory does not grow, counts are exact
    `PairStore`                 confidence and correctness of every sample, 5 bytes each (9 for float64 input); 8 more
                                where samples are ranked
    `MassStore`                 the same, sorted into equal-mass bins in the end
    `LossStore`, `BrierStore`   the sums that NLL and the Brier score are made of

Every store takes in samples (`add`, `add_logits`), those of another store (`merge`) and of all processes (`sync`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fedlas import ranks
from fedlas.errors import UserError, UserTypeError
from fedlas.metrics.bins import Bins, exact
from fedlas.metrics.calibration import EVERY_CLASS, Histogram, histogram_of
from fedlas.metrics.presets import Binning
from fedlas.metrics.result import Definition
from fedlas.metrics.samples import Pairs, Rows, Scope, logit_rows, pairs, pairs_of_logits, rows, rows_of_logits
from fedlas.metrics.scoring import Losses, label_squares, logit_losses, losses_of, prob_losses, squared_errors
from fedlas.metrics.selective import answers
from fedlas.predictions import AnyPredictions, Array, as_tensor

JOINED = 2**16  # samples below which a piece is not kept by itself
Store = TypeVar("Store", bound="AbstractStore")


class AbstractStore(ABC):
    """Something that samples can be added to.

    Args:
        scope: what is compared: "top-label", "class-wise", "positive" or "multi-label".
        ignore_index: label of samples that do not count.
    """

    ranked = False  # whether the order of samples of equal confidence matters

    def __init__(self, scope: Scope = "top-label", ignore_index: int | None = None) -> None:
        self.scope: Scope = scope
        self.ignore_index = ignore_index
        self.about = Definition(estimator="")

    @abstractmethod
    def take(self, found: Pairs | Rows) -> None:
        """Add samples that are checked: rows for scopes that look at every class, pairs for the others."""

    @abstractmethod
    def merge(self, other: "AbstractStore") -> None:
        """Add the samples of another store of the same kind."""

    def sync(self) -> None:
        """Add the samples of all processes of a distributed run, in the order of their ranks."""
        if ranks.count() == 1:
            return
        self.to_host()
        every: list[AbstractStore] = [self] * ranks.count()
        dist.all_gather_object(every, self)
        vars(self).update(vars(every[0]))
        for other in every[1:]:
            self.merge(other)

    def to_host(self) -> None:
        """Bring what is kept to the host, so that any process can take it over."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Bins):
                setattr(self, name, value.cpu())
            elif isinstance(value, list):
                setattr(self, name, [part.cpu() for part in value])
            elif isinstance(value, AbstractStore):
                value.to_host()

    def add(self, probs: AnyPredictions | Array, labels: Array | None) -> None:
        """Add samples, given as probabilities."""
        if self.scope in EVERY_CLASS:
            self.take(rows(probs, labels, self.scope, self.ignore_index))
        else:
            self.take(pairs(probs, labels, self.scope, self.ignore_index, ranked=self.ranked))

    def add_logits(self, logits: Array, labels: Array) -> None:
        """Add samples, given as logits."""
        if self.scope in EVERY_CLASS:
            self.take(rows_of_logits(logits, labels, self.scope, self.ignore_index))
        else:
            self.take(pairs_of_logits(logits, labels, self.scope, self.ignore_index, ranked=self.ranked))

    def skips(self, labels: Array | None) -> bool:
        """Say whether none of some labels counts, as happens to a piece of a stream."""
        if labels is None:
            return False
        truth = as_tensor(labels, "labels")
        return not len(truth) or (self.ignore_index is not None and bool((truth == self.ignore_index).all()))

    def settings(self) -> tuple[object, ...]:
        """Name what has to be equal for two stores to be merged."""
        return (type(self).__name__, self.scope, self.ignore_index)

    def same(self: Store, other: "AbstractStore") -> Store:
        """Take another store for one of this kind, or raise an error."""
        if not isinstance(other, type(self)) or other.settings() != self.settings():
            raise UserError(f"cannot merge what was kept by {other.settings()} into {self.settings()}")
        return other


class AbstractHistogram(AbstractStore):
    """A store that ends in bins."""

    @abstractmethod
    def histogram(self) -> Histogram:
        """Give the bins of all samples so far."""

    def error_bound(self) -> float | None:
        """Say how far off an error read from the bins can be, where they are not exact."""
        return None


class BinStore(AbstractHistogram):
    """Keeps the sums of bins whose edges are known beforehand."""

    def __init__(self, way: Binning, scope: Scope, ignore_index: int | None) -> None:
        super().__init__(scope, ignore_index)
        if way.compat == "official" and scope == "class-wise":
            raise UserError("the official class-wise ECE needs all labels at once: use the function")
        self.way = way
        self.filled: Bins | None = None

    def take(self, found: Pairs | Rows) -> None:
        filled = histogram_of(found, self.way)
        self._take(filled.bins, filled.about)

    def merge(self, other: AbstractStore) -> None:
        known = self.same(other)
        if known.filled is not None:
            self._take(known.filled, known.about)

    def histogram(self) -> Histogram:
        if self.filled is None:
            raise UserError("no samples yet; call update first")
        return Histogram(self.filled, self.about)

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.way)

    def _take(self, filled: Bins, about: Definition) -> None:
        self.filled = filled if self.filled is None else self.filled + filled
        self.about = joined(self.about, about)


class PairStore(AbstractStore):
    """Keeps the confidence and correctness of every sample, on the device that they came from.

    Args:
        scope: as in every store.
        ignore_index: as in every store.
        ranked: whether to keep log(1 - confidence) of every prediction in float64 as well, which ranks samples.
    """

    def __init__(self, scope: Scope = "top-label", ignore_index: int | None = None, *, ranked: bool = False) -> None:
        super().__init__(scope, ignore_index)
        self.ranked = ranked
        self.confidence: list[Tensor] = []
        self.correct: list[Tensor] = []
        self.uncertainty: list[Tensor] = []

    def take(self, found: Pairs | Rows) -> None:
        found = as_pairs(found)
        if self.ranked:
            found = answers(found)
            known = found.log_uncertainty
            _append(self.uncertainty, torch.full_like(exact(found.confidence), torch.nan) if known is None else known)
        half = found.confidence.dtype not in {torch.float32, torch.float64}
        # Copies, because a caller may fill the same buffers again.
        _append(self.confidence, found.confidence.float() if half else found.confidence.clone())
        _append(self.correct, found.correct.clone())
        self.about = joined(self.about, found.about)

    def merge(self, other: AbstractStore) -> None:
        known = self.same(other)
        self.confidence += known.confidence
        self.correct += known.correct
        self.uncertainty += known.uncertainty
        self.about = joined(self.about, known.about)

    def pairs(self) -> Pairs:
        """Give all samples so far."""
        if not self.confidence:
            raise UserError("no samples yet; call update first")
        confidence, uncertainty = _cat(self.confidence), None
        if self.ranked:
            # Where logits are not known. Computed for all parts at once: the last digit depends on the device, and
            # equal confidences would not be ties.
            known = _cat(self.uncertainty)
            rest = torch.log1p(-exact(confidence)).to(known.device)
            uncertainty = torch.where(known.isnan(), rest, known)
        return Pairs(confidence, _cat(self.correct), self.about, uncertainty)


class MassStore(AbstractHistogram):
    """Keeps every sample until equal-mass bins can be made."""

    def __init__(self, way: Binning, scope: Scope, ignore_index: int | None) -> None:
        super().__init__(scope, ignore_index)
        if scope not in {"top-label", "positive"}:
            raise UserError("equal-mass bins of every class need all probabilities at once: use the function")
        self.way = way
        self.kept = PairStore(scope, ignore_index)

    def take(self, found: Pairs | Rows) -> None:
        self.kept.take(found)

    def merge(self, other: AbstractStore) -> None:
        self.kept.merge(self.same(other).kept)

    def histogram(self) -> Histogram:
        found = self.kept.pairs()
        return Histogram(self.way.fill(found.confidence, found.correct), self.way.define(found.about))

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.way)


class LossStore(AbstractStore):
    """Keeps the sum of the log-losses of all samples."""

    def __init__(self, ignore_index: int | None) -> None:
        super().__init__("class-wise", ignore_index)
        self.total, self.floored, self.floor = 0.0, 0, 0.0

    def take(self, found: Pairs | Rows) -> None:
        table = as_rows(found)
        self._count(prob_losses(table.probs, table.labels), table.about)

    def add(self, probs: AnyPredictions | Array, labels: Array | None) -> None:
        self._count(*losses_of(probs, labels, self.ignore_index))

    def add_logits(self, logits: Array, labels: Array) -> None:
        table = logit_rows(logits, labels, self.ignore_index)
        self._count(logit_losses(table.probs, table.labels), table.about)

    def merge(self, other: AbstractStore) -> None:
        known = self.same(other)
        self._take(known.total, known.floored, known.floor, known.about)

    def _count(self, losses: Losses, about: Definition) -> None:
        self._take(float(losses.values.sum()), losses.floored, losses.floor, about)

    def _take(self, total: float, floored: int, floor: float, about: Definition) -> None:
        self.total += total
        self.floored += floored
        self.floor = max(self.floor, floor)
        self.about = joined(self.about, about)


class BrierStore(AbstractStore):
    """Keeps the sum of squared errors, and the bins that its parts are read from."""

    def __init__(self, bins: int, ignore_index: int | None) -> None:
        super().__init__("class-wise", ignore_index)
        self.bins = BinStore(Binning(bins), "class-wise", ignore_index)
        self.squares, self.label_squares = 0.0, 0.0

    def take(self, found: Pairs | Rows) -> None:
        table = as_rows(found)
        self.bins.take(table)
        self.squares += float(squared_errors(table.probs, table.labels).sum())
        self.label_squares += float(label_squares(table.labels).sum())

    def merge(self, other: AbstractStore) -> None:
        known = self.same(other)
        self.bins.merge(known.bins)
        self.squares += known.squares
        self.label_squares += known.label_squares

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.bins.way)


def as_pairs(found: Pairs | Rows) -> Pairs:
    """Take samples for pairs of confidence and correctness, which the scope of the store made them."""
    if isinstance(found, Rows):
        raise UserTypeError("rows of class probabilities cannot be kept as pairs")
    return found


def as_rows(found: Pairs | Rows) -> Rows:
    """Take samples for rows of class probabilities, which the scope of the store made them."""
    if isinstance(found, Pairs):
        raise UserTypeError("pairs of confidence and correctness have no rows")
    return found


def joined(mine: Definition, other: Definition) -> Definition:
    """Describe the samples of two stores together."""
    if mine.n == 0 or other.n == 0:
        return other if mine.n == 0 else mine
    words = {name: _both(getattr(mine, name), getattr(other, name)) for name in ("dtype", "split", "scope")}
    return replace(mine, n=mine.n + other.n, **words)


def _both(mine: str | None, other: str | None) -> Any:
    """Join two lists of words, each word once."""
    words = dict.fromkeys(word for text in (mine, other) if text for word in text.split(" and "))
    return " and ".join(words) or None


def _append(parts: list[Tensor], new: Tensor) -> None:
    """Add a piece, and join it with small ones before it: a tensor of one sample takes more room than a hundred."""
    parts.append(new)
    while len(parts) > 1 and len(parts[-2]) < min(2 * len(parts[-1]), JOINED):
        before, last = parts[-2:]
        if before.dtype != last.dtype or before.device != last.device:
            return
        parts[-2:] = [torch.cat([before, last])]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    parts = [part.to(parts[0].device) for part in parts]
    if not any(part.is_floating_point() for part in parts):
        return torch.cat(parts)
    widest = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return torch.cat([part.to(widest) for part in parts])
