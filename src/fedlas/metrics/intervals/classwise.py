"""Bootstrap of the gaps in the bins of all classes.

With w_i the number of times that sample i is drawn, the weighted gaps change by Z = G (w - 1) / n, where G has a row
for each bin of each class and a column for each sample, with the gap of the sample in its bin. Few samples are outside
of the first bins, so G is stored as the dense table of gaps, as if all were in the first bins, plus a sparse matrix
that moves the entries of all other bins. This is the exact bootstrap in two matrix products.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fedlas.metrics.bin_sums import (
    Bins,
    EdgeRule,
    Entries,
    add_up,
    class_statistics,
    equal_width_edges,
    exact,
    upper_entries,
)
from fedlas.metrics.intervals.binomial import clopper_pearson_interval
from fedlas.metrics.intervals.resampling import (
    SPARSE,
    AbstractGaps,
    Binomial,
    BootstrapDistribution,
    Floats,
    mean_deviation,
)
from fedlas.predictions.probabilities import parts_of

MOST_AT_ONCE = 256  # largest number of resamples per matrix product
WEIGHTS_AT_ONCE = 2**26  # largest number of draws in memory


@dataclass(frozen=True)
class ClassGaps(AbstractGaps):
    """Probabilities and labels of all classes, and their equal-width bins.

    Args:
        probs: one row of probabilities per sample.
        labels: class numbers, or one row per sample.
        bins: number of bins per class.
        soft: whether labels are soft; these have less variance than hard ones.
    """

    probs: Float[Tensor, "n classes"]
    labels: Int64[Tensor, " n"] | Float[Tensor, "n classes"]
    bins: int
    soft: bool
    method = "bootstrap of all samples, test inversion"

    @cached_property
    def histogram(self) -> Bins:
        """Sums of each bin of each class."""
        return class_statistics(self.probs, self.labels, equal_width_edges(self.bins), EdgeRule.RIGHT, self._upper)

    @property
    def weighted(self) -> Floats:
        return _numpy(self.histogram.weighted_gap.flatten() / self.classes)

    @property
    def classes(self) -> int:
        """Number of classes."""
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
        # Compute in chunks, because the squares need as much memory as the table.
        for part in parts_of(self.probs):
            squares[:, 0] += exact(part.float().square().sum(0))
        squares[:, 0] -= squares[:, 1:].sum(1)
        sums = (self.histogram.counts, self.histogram.confidence_sum, squares)
        return Binomial.of(*(_numpy(values.flatten()) for values in sums))

    def resample(self, resamples: int | None, rng: np.random.Generator) -> BootstrapDistribution:
        """Return the bootstrap distribution, scaled to binomial noise.

        As with top-label gaps, the bootstrap underestimates the noise of sparse bins. Here the rate of each bin is set
        once: the mean confidence, moved by the part of the gap that exceeds two standard errors.
        """
        deviations, weighted = self.deviations(resamples or 1_000, rng), self.weighted
        expected = self.binomial()
        count, mean = expected.count, expected.mean
        occupied = count > 0
        if not self.soft:
            error = np.sqrt(count * mean * (1 - mean)) / self.samples
            significant = np.sign(weighted) * np.maximum(np.abs(weighted) - 2 * error, 0)
            rate = np.clip(mean - significant * self.samples / np.maximum(count, 1), 0, 1)
            observed = np.abs(deviations).mean(0) * self.samples
            expected_deviation = mean_deviation(count, rate) * expected.narrower
            deviations *= np.where(observed > 0, expected_deviation / np.where(observed > 0, observed, 1), 1.0)
        return BootstrapDistribution(weighted[occupied], deviations[:, occupied], count[occupied] / self.samples)

    def unseen(self, level: float) -> tuple[float, float]:
        """Return how much the total may be below and above the resampled totals if there are too few errors.

        An error changes two gaps by at most one each, or a single gap with multi-label targets.
        """
        if self.soft:
            wrong, gap_per_error = (self.probs != self.labels).any(1), 2 / self.classes
        elif self.labels.ndim == 2:
            wrong, gap_per_error = (self.probs > 0.5) != (self.labels > 0.5), 1.0
        else:
            wrong, gap_per_error = self.probs.argmax(1) != self.labels, 2 / self.classes
        count, n = int(wrong.sum()), wrong.numel()
        if min(count, n - count) >= SPARSE:
            return 0.0, 0.0
        most = clopper_pearson_interval(count, n, level)[1]
        return 1.0 if len(self.probs) < SPARSE else 0.0, gap_per_error * (most - count / n)

    def deviations(self, resamples: int, rng: np.random.Generator) -> Floats:
        """Draw deviations of the weighted gaps of all bins of all classes."""
        n, sparse = len(self.probs), self._sparse_gaps()
        table = (self.probs - self.labels if self.labels.ndim == 2 else self.probs).float()
        deviations = np.empty((resamples, self.classes * self.bins))
        at_once = max(1, min(MOST_AT_ONCE, WEIGHTS_AT_ONCE // n))
        for start in range(0, resamples, at_once):
            part = deviations[start : start + at_once]
            counts = np.empty((len(part), n), dtype=np.float32)
            for row in counts:
                row[:] = np.bincount(rng.integers(0, n, n, dtype=np.int32), minlength=n)
            weights = (torch.from_numpy(counts) - 1).to(table.device).T.contiguous()
            # On a GPU torch converts the sparse matrix and warns of the missing check unless it is disabled.
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                products = torch.sparse.mm(sparse, weights)
            products[:: self.bins] += table.T @ weights
            part[:] = _numpy(products.T)
        return deviations / self.samples

    @cached_property
    def _upper(self) -> Entries:
        return upper_entries(self.probs, equal_width_edges(self.bins), EdgeRule.RIGHT)

    def _sparse_gaps(self) -> Tensor:
        """Return the sparse matrix that moves gaps from the first bins to their bins, and subtracts hard labels."""
        n = len(self.probs)
        row, cell, values = self._upper
        column = cell // self.bins
        if self.labels.ndim == 2:
            gap = values - self.labels[row, column]
            label_row = label_column = row[:0]
        else:
            gap = values - (self.labels[row] == column).to(values.dtype)
            label_row, label_column = torch.arange(n, device=row.device), self.labels
        cells = torch.cat([cell, column * self.bins, label_column * self.bins])
        entries = torch.cat([gap.float(), -gap.float(), -torch.ones_like(label_row, dtype=torch.float32)])
        index = torch.stack([cells, torch.cat([row, row, label_row])])
        shape = (self.classes * self.bins, n)
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            return torch.sparse_coo_tensor(index, entries, shape).coalesce()


def _numpy(values: Tensor) -> Floats:
    return np.asarray(exact(values).cpu().numpy())
