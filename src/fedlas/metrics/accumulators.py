"""Accumulators, which take the samples of a metric batch by batch, and hold them, or sums over them.

`BinAccumulator`     sums of equal-width bins; constant memory, exact counts, values agree to 1e-12
`SumAccumulator`     sums of values per sample, and sums of the equal-width bins of every class if they are needed
`PairAccumulator`    confidence and correctness, 5 bytes per sample (9 for float64 input); 8 more if `ranked`
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fedlas import ranks
from fedlas.errors import UserError, UserTypeError, warn_caller
from fedlas.metrics.bin_sums import SUMS, Bins, EdgeRule, exact
from fedlas.metrics.binning import EVERY_CLASS, Binning, Histogram, histogram_of
from fedlas.metrics.inputs import Pairs, Rows, Scope, binary_predictions, pairs, pairs_of_logits, rows, rows_of_logits
from fedlas.metrics.result import Definition, Result
from fedlas.predictions import AnyPredictions
from fedlas.predictions.arrays import ENOUGH, Array, are_probabilities, as_tensor

JOINED = 2**16  # tensors with fewer samples than this are concatenated
MAXIMA = {"nll_floor"}  # columns and states of which the largest value counts and not the sum
State: TypeAlias = dict[str, Tensor | list[Tensor]]  # across processes, tensors are added and lists are concatenated


class AbstractAccumulator(ABC):
    """A metric of data that do not fit into memory, or that are distributed over processes.

    Args:
        metric: the metric.
        scope: which confidences are used: "top-label", "class-wise", "positive" or "multi-label".
        ignore_index: label of samples that are ignored.
    """

    ranked = False  # whether the order of samples of equal confidence matters

    def __init__(self, metric: Any, scope: Scope = "top-label", ignore_index: int | None = None) -> None:
        self.metric = metric
        self.scope: Scope = scope
        self.ignore_index = ignore_index
        self.definition = Definition(estimator="")
        self.was_checked = False

    def update(self, probs: AnyPredictions | Array, labels: Array | None = None) -> "AbstractAccumulator":
        """Add samples, given as probabilities; a batch whose labels are all ignored is skipped."""
        if self._skips(labels):
            return self
        if self.scope in EVERY_CLASS:
            self.take(rows(probs, labels, self.scope, self.ignore_index))
        else:
            self.take(pairs(probs, labels, self.scope, self.ignore_index, ranked=self.ranked))
        return self

    def update_logits(self, logits: Array, labels: Array) -> "AbstractAccumulator":
        """Add samples, given as logits; a batch whose labels are all ignored is skipped."""
        if self._skips(labels):
            return self
        if self.scope in EVERY_CLASS:
            self.take(rows_of_logits(logits, labels, self.scope, self.ignore_index))
        else:
            self.take(pairs_of_logits(logits, labels, self.scope, self.ignore_index, ranked=self.ranked))
        if not self.was_checked and len(logits) >= ENOUGH:
            self.was_checked = True
            if are_probabilities(logits):
                warn_caller(
                    "the logits are probabilities, whose softmax is meaningless: use update in place of update_logits "
                    '(torchmetrics: pass inputs="probs")'
                )
        return self

    def merge(self, other: "AbstractAccumulator") -> "AbstractAccumulator":
        """Add the samples of another accumulator of the same metric with the same settings."""
        if other.metric.name != self.metric.name:
            raise UserError(f"cannot merge {other.metric.name} into {self.metric.name}")
        if not isinstance(other, type(self)) or other.settings() != self.settings():
            raise UserError(f"cannot merge the state of {other.settings()} into {self.settings()}")
        self.add(other)
        return self

    def sync(self) -> "AbstractAccumulator":
        """Add the samples of all processes of a distributed run; call it once, after the last update."""
        if ranks.count() == 1:
            return self
        self.to_host()
        every: list[Any] = [self] * ranks.count()
        dist.all_gather_object(every, self)
        vars(self).update(vars(every[0]))
        for other in every[1:]:  # in the order of their ranks
            self.add(other)
        return self

    def compute(self) -> Result:
        """Compute the metric of all samples so far."""
        result: Result = self.metric.compute(self)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        return {"metric": self.metric.name, "state": self.state(), "definition": asdict(self.definition)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore from the output of `state_dict`."""
        if state["metric"] != self.metric.name:
            raise UserError(f"this is the state of {state['metric']}, not of {self.metric.name}")
        self.set_state(state["state"])
        self.definition = Definition(**state["definition"])

    @abstractmethod
    def take(self, batch: Pairs | Rows) -> None:
        """Add validated samples: `Rows` if the scope needs all classes, else `Pairs`."""

    @abstractmethod
    def add(self, other: Any) -> None:
        """Add the samples of an accumulator of the same kind and settings."""

    @abstractmethod
    def state(self) -> State:
        """Return the state: tensors, which are added across processes, and lists of tensors, which are concatenated."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Tensor | list[Tensor]]) -> None:
        """Replace the state."""

    def empty_state(self, num_classes: int | None = None) -> State:
        """Return the state before the first sample, with the shapes for a number of classes."""
        del num_classes
        return self.state()

    def to_host(self) -> None:
        """Move the state to the CPU, so that it can be sent to other processes."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Bins):
                setattr(self, name, value.cpu())
            elif isinstance(value, list):
                setattr(self, name, [part.cpu() for part in value])
            elif isinstance(value, AbstractAccumulator):
                value.to_host()

    def settings(self) -> tuple[object, ...]:
        """Return the settings that have to be equal for a merge."""
        return (type(self).__name__, self.scope, self.ignore_index)

    def _skips(self, labels: Array | None) -> bool:
        """Return whether all labels are ignored."""
        if labels is None:
            return False
        truth = as_tensor(labels, "labels")
        return not len(truth) or (self.ignore_index is not None and bool((truth == self.ignore_index).all()))


class AbstractHistogram(AbstractAccumulator):
    """Base class of accumulators from which bins are computed."""

    @abstractmethod
    def histogram(self) -> Histogram:
        """Return the histogram of all samples so far."""


class BinAccumulator(AbstractHistogram):
    """Stores the sums of bins with fixed edges."""

    def __init__(self, metric: Any, binning: Binning, scope: Scope, ignore_index: int | None) -> None:
        super().__init__(metric, scope, ignore_index)
        if binning.compat == "official" and scope == "class-wise":
            raise UserError("the official class-wise ECE needs all labels at once: use the function")
        self.binning = binning
        self.sums: Bins | None = None

    def take(self, batch: Pairs | Rows) -> None:
        histogram = histogram_of(batch, self.binning)
        self._take(histogram.bins, histogram.definition)

    def add(self, other: Any) -> None:
        if other.sums is not None:
            self._take(other.sums, other.definition)

    def histogram(self) -> Histogram:
        if self.sums is None:
            raise UserError("no samples yet; call update first")
        return Histogram(self.sums, self.definition)

    def state(self) -> State:
        return {} if self.sums is None else self.state_of(self.sums)

    def empty_state(self, num_classes: int | None = None) -> State:
        bins = self.binning.bins + (self.binning.rule == EdgeRule.LEFT_OPEN)
        shape = (bins,) if self.scope not in EVERY_CLASS else (_needed(num_classes), bins)
        counts, sums = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float64)
        return {"counts": counts, "confidence_sum": sums, "correct_sum": sums.clone(), "samples": _count(0)}

    @staticmethod
    def state_of(bins: Bins) -> State:
        """Return the sums of bins."""
        return {name: getattr(bins, name) for name in SUMS} | {"samples": _count(bins.n)}

    def set_state(self, state: Mapping[str, Tensor | list[Tensor]]) -> None:
        self.sums, n = None, int(_one(state, "samples")) if state else 0
        self.definition = replace(self.definition, n=n)
        if n:
            counts, confidence, correct = (_one(state, name) for name in SUMS)
            edges = self.binning.edges(torch.empty(0, dtype=torch.float64, device=counts.device))
            self.sums = Bins(edges, counts, confidence, correct, n, self.binning.rule)
            self.definition = self.binning.define(self.definition)

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.binning)

    def _take(self, bins: Bins, definition: Definition) -> None:
        self.sums = bins if self.sums is None else self.sums + bins
        self.definition = merge_definitions(self.definition, definition)


class PairAccumulator(AbstractHistogram):
    """Stores the confidence and correctness of each sample, on the device of the samples.

    Args:
        metric: the metric.
        scope: as in every accumulator.
        ignore_index: as in every accumulator.
        ranked: whether to store log(1 - confidence) in float64 too, which ranks samples.
        binning: equal-mass bins, into which `histogram` sorts the samples.
    """

    def __init__(
        self,
        metric: Any,
        scope: Scope = "top-label",
        ignore_index: int | None = None,
        *,
        ranked: bool = False,
        binning: Binning | None = None,
    ) -> None:
        super().__init__(metric, scope, ignore_index)
        self.ranked, self.binning = ranked, binning
        self.confidence: list[Tensor] = []
        self.correct: list[Tensor] = []
        self.uncertainty: list[Tensor] = []

    def take(self, batch: Pairs | Rows) -> None:
        if isinstance(batch, Rows):
            raise UserTypeError("rows of class probabilities cannot be stored as pairs")
        if self.ranked:
            batch = binary_predictions(batch)
            log_uncertainty = batch.log_uncertainty
            _append(
                self.uncertainty,
                torch.full_like(exact(batch.confidence), torch.nan) if log_uncertainty is None else log_uncertainty,
            )
        half = batch.confidence.dtype not in {torch.float32, torch.float64}
        # Copies, because callers may reuse their buffers.
        _append(self.confidence, batch.confidence.float() if half else batch.confidence.clone())
        _append(self.correct, batch.correct.clone())
        self.definition = merge_definitions(self.definition, batch.definition)

    def add(self, other: Any) -> None:
        self.confidence += other.confidence
        self.correct += other.correct
        self.uncertainty += other.uncertainty
        self.definition = merge_definitions(self.definition, other.definition)

    def state(self) -> State:
        state: State = {"confidence": self.confidence, "correct": self.correct}
        return state | ({"uncertainty": self.uncertainty} if self.ranked else {})

    def set_state(self, state: Mapping[str, Tensor | list[Tensor]]) -> None:
        for name, parts in state.items():
            setattr(self, name, [parts] if isinstance(parts, Tensor) else list(parts))
        self.definition = replace(self.definition, n=sum(map(len, self.confidence)))

    def pairs(self) -> Pairs:
        """Return all samples so far."""
        if not self.confidence:
            raise UserError("no samples yet; call update first")
        confidence, uncertainty = _cat(self.confidence), None
        if self.ranked:
            # Samples without logits are ranked by their confidence. This is computed for all samples together, because
            # the last digit depends on the device and equal confidences must get equal values.
            stored = _cat(self.uncertainty)
            by_confidence = torch.log1p(-exact(confidence)).to(stored.device)
            uncertainty = torch.where(stored.isnan(), by_confidence, stored)
        return Pairs(confidence, _cat(self.correct), self.definition, uncertainty)

    def histogram(self) -> Histogram:
        assert self.binning is not None
        return histogram_of(self.pairs(), self.binning)

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.binning)


class SumAccumulator(AbstractAccumulator):
    """Stores sums of the columns of a mean, and one histogram per class if it needs bins.

    Args:
        metric: the metric, an `AbstractMean`.
        names: names of its columns.
        ignore_index: as in every accumulator.
        binning: bins of the histograms; None for none.
    """

    def __init__(
        self, metric: Any, names: Sequence[str], ignore_index: int | None, binning: Binning | None = None
    ) -> None:
        super().__init__(metric, "class-wise", ignore_index)
        self.sums = dict.fromkeys(names, 0.0)
        self.bins = None if binning is None else BinAccumulator(metric, binning, "class-wise", ignore_index)

    def take(self, batch: Pairs | Rows) -> None:
        assert isinstance(batch, Rows)
        if self.bins is not None:
            self.bins.take(batch)
        self._add(sums_of(self.metric.columns(batch)), batch.definition)

    def add(self, other: Any) -> None:
        if self.bins is not None and other.bins is not None:
            self.bins.add(other.bins)
        self._add(other.sums, other.definition)

    @property
    def class_bins(self) -> Bins | None:
        """Bins of the probabilities of every class, if the metric needs them."""
        return None if self.bins is None else self.bins.sums

    def totals(self) -> dict[str, float]:
        """Return the sum of each column over all samples so far."""
        if self.definition.n == 0:
            raise UserError("no samples yet; call update first")
        return self.sums

    def state(self) -> State:
        sums: State = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.sums.items()}
        return sums | {"samples": _count(self.definition.n)} | ({} if self.bins is None else self.bins.state())

    def empty_state(self, num_classes: int | None = None) -> State:
        return self.state() | ({} if self.bins is None else self.bins.empty_state(num_classes))

    def set_state(self, state: Mapping[str, Tensor | list[Tensor]]) -> None:
        self.sums = {name: float(_one(state, name)) for name in self.sums}
        self.definition = replace(self.definition, n=int(_one(state, "samples")))
        if self.bins is not None:
            self.bins.set_state(state if self.definition.n else {})

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), tuple(self.sums), None if self.bins is None else self.bins.binning)

    def _add(self, sums: Mapping[str, float], definition: Definition) -> None:
        for name, value in sums.items():
            self.sums[name] = max(self.sums[name], value) if name in MAXIMA else self.sums[name] + value
        self.definition = merge_definitions(self.definition, definition)


def sums_of(columns: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the sum of each column."""
    return {name: float(exact(values).sum()) for name, values in columns.items()}


def merge_definitions(first: Definition, second: Definition) -> Definition:
    """Return the definition for the samples of two accumulators."""
    if first.n == 0 or second.n == 0:
        return second if first.n == 0 else first
    merged = {name: _both(getattr(first, name), getattr(second, name)) for name in ("dtype", "split", "scope")}
    return replace(first, n=first.n + second.n, **merged)


def _both(first: str | None, second: str | None) -> Any:
    """Join two lists of names without duplicates."""
    names = dict.fromkeys(name for text in (first, second) if text for name in text.split(" and "))
    return " and ".join(names) or None


def _append(parts: list[Tensor], new: Tensor) -> None:
    """Append a tensor and concatenate small ones, because a tensor has as much overhead as about a hundred samples."""
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


def _count(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64)


def _one(state: Mapping[str, Tensor | list[Tensor]], name: str) -> Tensor:
    value = state[name]
    assert isinstance(value, Tensor)
    return value


def _needed(num_classes: int | None) -> int:
    if num_classes is None:
        raise UserError("a metric of all classes needs num_classes")
    return num_classes
