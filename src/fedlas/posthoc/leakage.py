"""Which samples a calibrator was fitted on are judged too: what is measured on those is too good.

Where both sides name their samples (`ids` or `index`), rows of one name are the same sample if they also have the same
label, the same top class and the same confidence up to rounding. The name alone says little: files of two splits are
often both called `img_0000.png`, or counted from zero, and sorted by class. Else, and where names find nothing, rows of
the same scores and the same label are looked for.

Rows may agree by chance: few classes and few digits make them equal, and so does a confidence of one. How often that
happens between two splits is about how often it happens within one, so only what goes beyond that is taken as a sign.
"""

import math

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from fedlas.predictions import Predictions, slices_of

NEAR = 1e-3  # probabilities that were rounded to three digits are still those of the same sample
CHANCE = 0.01  # share of rows that two splits of many different rows may have in common
TELLING = 0.2  # a row that agrees with a larger share of its label's rows tells nothing


def samples_in_both(judged: Predictions, other: Predictions) -> int:
    """Count the samples of the second predictions that are among the first, as far as can be told."""
    if other is judged:
        return len(other)
    if other.num_classes != judged.num_classes:
        return 0
    found = 0
    if judged.ids is not None and other.ids is not None:
        found = _named_alike(judged, other, _places_of_words(judged.ids, other.ids))
    if not found and judged.index is not None and other.index is not None:
        found = _named_alike(judged, other, _places(judged.index.cpu(), other.index.cpu()))
    return found or _equal_rows(judged, other)


def _places_of_words(ours: tuple[str, ...], theirs: tuple[str, ...]) -> Int64[Tensor, " m"]:
    place = dict(zip(ours, range(len(ours)), strict=True))
    return torch.tensor([place.get(name, -1) for name in theirs])


def _places(ours: Int64[Tensor, " n"], theirs: Int64[Tensor, " m"]) -> Int64[Tensor, " m"]:
    """Find the row of ours that has each number of theirs; -1 where none has."""
    order = ours.argsort()
    known = ours[order]
    place = torch.searchsorted(known, theirs).clamp_max(len(known) - 1)
    return torch.where(known[place] == theirs, order[place], -1)


def _named_alike(judged: Predictions, other: Predictions, place: Int64[Tensor, " m"]) -> int:
    """Count rows that agree in more than their name, if that is more than chance."""
    row = (place >= 0).nonzero()[:, 0]
    if not len(row):
        return 0
    place = place[row]
    first, second = judged.confidence.cpu().double(), other.confidence.cpu().double()[row]
    alike = (first[place] - second).abs() <= NEAR
    alike &= judged.prediction.cpu()[place] == other.prediction.cpu()[row]
    alike &= _same_labels(judged.labels.cpu()[place], other.labels.cpu()[row])
    chance = _chances(judged, first)[place]
    telling = chance <= TELLING
    expected = float(chance[telling].sum())
    least = 1 + expected + 3 * math.sqrt(expected) + CHANCE * int(telling.sum())
    return int(alike.sum()) if int((alike & telling).sum()) > least else 0


def _same_labels(ours: Tensor, theirs: Tensor) -> Bool[Tensor, " n"]:
    if ours.shape != theirs.shape:
        return torch.zeros(len(ours), dtype=torch.bool)
    return ours == theirs if ours.ndim == 1 else ((ours - theirs).abs() <= NEAR).all(1)


def _chances(judged: Predictions, confidence: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Find with what share of the rows of its label, itself among them, each row agrees in class and confidence.

    Itself, because few rows of a label are no sign that the next would not agree.
    """
    labels = judged.labels.cpu()
    truth = labels if labels.ndim == 1 else labels.argmax(1)
    # Rows of one label and top class stand together, sorted by confidence, and too far from others to be near them.
    group = 2.0 * (truth * judged.num_classes + judged.prediction.cpu())
    key, order = (group + confidence).sort()
    near = torch.searchsorted(key, key + NEAR, right=True) - torch.searchsorted(key, key - NEAR)
    return torch.empty_like(key).index_copy_(0, order, near.double()) / torch.bincount(truth)[truth]


def _equal_rows(judged: Predictions, other: Predictions) -> int:
    ours, theirs = _marks(judged), _marks(other)
    if torch.equal(ours, theirs):
        return len(other)
    _, place, times = ours.unique(return_inverse=True, return_counts=True)
    expected = float((times[place] > 1).double().mean()) * len(theirs)
    least = 1 + 2 * expected + 3 * math.sqrt(max(expected, 1.0)) + CHANCE * len(theirs)
    common = int(torch.isin(theirs, ours).sum())
    return common if common > least else 0


def _marks(given: Predictions) -> Int64[Tensor, " n"]:
    """Give each sample a number that is made of its scores and its label alone, bit by bit."""
    scores = given.scores
    parts = [_mixed(scores[rows].cpu().double()) for rows in slices_of(scores)]
    labels = given.labels.cpu()
    soft = labels.ndim == 2
    return torch.cat(parts) * 31 + (_mixed(labels.double()) if soft else labels)


def _mixed(table: Tensor) -> Int64[Tensor, " n"]:
    factors = torch.randint(2**62, (table.shape[1],), generator=torch.Generator().manual_seed(0)) * 2 + 1
    bits = (table + 0.0).view(torch.int64)  # minus zero is zero
    return ((bits ^ (bits >> 29)) * factors).sum(1)  # whole numbers that overflow begin again, in any order
