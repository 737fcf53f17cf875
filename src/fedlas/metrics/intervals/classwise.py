"""How the gaps of the bins of every class vary when samples are drawn anew.

With w_i how often sample i is drawn, the weighted gaps of all bins move by Z = G (w - 1) / n, where G has a row for
every bin of every class and holds the gap of a sample in the bin its probability falls into. All but the first bin of a
class hold few samples, so G is kept in two parts: a sparse one, and the whole table of gaps, which stands in for the
first bins once what lies in the others is taken off again. That is the exact bootstrap, in two matrix products.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedlas.metrics.bin_statistics import (
    Bins,
    EdgeRule,
    Entries,
    add_up,
    class_statistics,
    equal_width_edges,
    exact,
    upper_entries,
)
from fedlas.metrics.intervals.resampling import RARE, AbstractGaps, Binomial, Floats, World, few_range, mean_deviation
from fedlas.predictions import parts_of

MOST_AT_ONCE = 256  # resamples that share one reading of the table
WEIGHTS_AT_ONCE = 2**26  # numbers of draws held in memory at a time


@dataclass(frozen=True)
class ClassGaps(AbstractGaps):
    """Probabilities and labels of every class, and the equal-width bins they fall into.

    Args:
        probs: one row of probabilities per sample.
        labels: class numbers, or a row for each sample.
        bins: how many bins each class has.
        soft: whether labels are shares, which vary less than hits do.
    """

    probs: Float[Tensor, "n classes"]
    labels: Int64[Tensor, " n"] | Float[Tensor, "n classes"]
    bins: int
    soft: bool
    method = "bootstrap of all samples, test inversion"

    @cached_property
    def filled(self) -> Bins:
        """What fell into every bin of every class."""
        return class_statistics(self.probs, self.labels, equal_width_edges(self.bins), EdgeRule.RIGHT, self._upper)

    @property
    def weighted(self) -> Floats:
        return _numpy(self.filled.weighted_gap.flatten() / self.classes)

    @property
    def classes(self) -> int:
        """How many histograms there are."""
        return self.probs.shape[1]

    @property
    def samples(self) -> int:
        return self.probs.numel()

    @property
    def sample_gaps(self) -> Floats:
        truth = self.labels.sum(1) if self.labels.ndim == 2 else torch.ones_like(self.labels)
        return _numpy((exact(self.probs).sum(1) - exact(truth)) / self.classes)

    def binomial(self) -> Binomial:
        _, cell, values = self._upper
        squares = add_up(exact(values) ** 2, cell, self.classes * self.bins).view(self.classes, self.bins)
        # Parts of the table, because the squares of all of it would be as large as itself.
        for part in parts_of(self.probs):
            squares[:, 0] += exact(part.float().square().sum(0))
        squares[:, 0] -= squares[:, 1:].sum(1)
        sums = (self.filled.counts, self.filled.confidence_sum, squares)
        return Binomial.of(*(_numpy(one.flatten()) for one in sums))

    def resample(self, resamples: int | None, rng: np.random.Generator) -> World:
        """Draw deviations of the weighted gaps, scaled to what a bin of this size and rate shows.

        Bins that expect few hits mislead the bootstrap, as in a single histogram; but of the very many bins of all
        classes the rate is set once: the mean confidence, moved by what of the gap exceeds two standard errors.
        """
        deviations, weighted = self.deviations(resamples or 1_000, rng), self.weighted
        expected = self.binomial()
        count, mean = expected.count, expected.mean
        there = count > 0
        if not self.soft:
            error = np.sqrt(count * mean * (1 - mean)) / self.samples
            sure = np.sign(weighted) * np.maximum(np.abs(weighted) - 2 * error, 0)
            rate = np.clip(mean - sure * self.samples / np.maximum(count, 1), 0, 1)
            shown = np.abs(deviations).mean(0) * self.samples
            wanted = mean_deviation(count, rate) * expected.narrower
            deviations *= np.where(shown > 0, wanted / np.where(shown > 0, shown, 1), 1.0)
        return World(weighted[there], deviations[:, there], count[there] / self.samples)

    def unseen(self, level: float) -> tuple[float, float]:
        """Return what errors may add that are too few to show in resampling.

        An error moves two gaps by at most one each; one of several labels moves only its own. A soft label differs
        from its probabilities or not.
        """
        if self.soft:
            wrong, each = (self.probs != self.labels).any(1), 2 / self.classes
        elif self.labels.ndim == 2:
            wrong, each = (self.probs > 0.5) != (self.labels > 0.5), 1.0
        else:
            wrong, each = self.probs.argmax(1) != self.labels, 2 / self.classes
        count, n = int(wrong.sum()), wrong.numel()
        if min(count, n - count) >= RARE:
            return 0.0, 0.0
        most = few_range(count, n, level)[1]
        return 1.0 if len(self.probs) < RARE else 0.0, each * (most - count / n)

    def deviations(self, resamples: int, rng: np.random.Generator) -> Floats:
        """Draw how far the weighted gaps of all bins of all classes are from the observed ones."""
        n, table, sparse = len(self.probs), self._dense_gaps(), self._sparse_gaps()
        drawn = np.empty((resamples, self.classes * self.bins))
        at_once = max(1, min(MOST_AT_ONCE, WEIGHTS_AT_ONCE // n))
        for start in range(0, resamples, at_once):
            part = drawn[start : start + at_once]
            counts = np.empty((len(part), n), dtype=np.float32)
            for one in counts:
                one[:] = np.bincount(rng.integers(0, n, n, dtype=np.int32), minlength=n)
            weights = (torch.from_numpy(counts) - 1).to(table.device).T.contiguous()
            # On a device torch makes another layout of the sparse table, and warns unless told not to check that one.
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                moved = torch.sparse.mm(sparse, weights)
            moved[:: self.bins] += table.T @ weights
            part[:] = _numpy(moved.T)
        return drawn / self.samples

    @cached_property
    def _upper(self) -> Entries:
        return upper_entries(self.probs, equal_width_edges(self.bins), EdgeRule.RIGHT)

    def _dense_gaps(self) -> Float[Tensor, "n classes"]:
        return (self.probs - self.labels).float() if self.labels.ndim == 2 else self.probs.float()

    def _sparse_gaps(self) -> Tensor:
        """Give the gaps in all but the first bins, and take them, and the hits, off the first ones."""
        n = len(self.probs)
        row, cell, values = self._upper
        column = cell // self.bins
        if self.labels.ndim == 2:
            gap = values - self.labels[row, column]
            hit_row = hit_column = row[:0]
        else:
            gap = values - (self.labels[row] == column).to(values.dtype)
            hit_row, hit_column = torch.arange(n, device=row.device), self.labels
        place = torch.cat([cell, column * self.bins, hit_column * self.bins])
        entries = torch.cat([gap.float(), -gap.float(), -torch.ones_like(hit_row, dtype=torch.float32)])
        index = torch.stack([place, torch.cat([row, row, hit_row])])
        shape = (self.classes * self.bins, n)
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return torch.sparse_coo_tensor(index, entries, shape).coalesce()


def _numpy(values: Tensor) -> Floats:
    return np.asarray(exact(values).cpu().numpy())
