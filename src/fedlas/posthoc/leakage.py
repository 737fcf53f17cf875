"""Which samples a calibrator was fitted on are judged too: what is measured on those is too good.

Names decide where both sides have them (`ids`, else `index`), and only where all that is named alike is alike: rows of
two splits are often both counted from zero. Names that are words have the same labels then, numbers the same scores as
well. Without names, rows of the same scores and the same label are looked for. Few classes and few digits make rows
equal by chance, about as often between two splits as within one, so only what goes beyond that is taken as a sign.
"""

from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from fedlas.predictions import Predictions, slices_of

NEAR = 1e-3  # probabilities that were rounded to three digits are still those of the same sample
CHANCE = 0.01  # share of rows that two splits of many different rows may have in common


def samples_in_both(judged: Predictions, other: Predictions) -> int:
    """Count the samples of the second predictions that are among the first, as far as can be told."""
    if other is judged:
        return len(other)
    if other.num_classes != judged.num_classes:
        return 0
    for word in ("ids", "index"):
        ours, theirs = _names(judged, word), _names(other, word)
        if ours is not None and theirs is not None:
            return _named_alike(judged, other, ours, theirs)
    return _equal_rows(judged, other)


def _named_alike(judged: Predictions, other: Predictions, ours: list[Any], theirs: list[Any]) -> int:
    place = {name: row for row, name in enumerate(ours)}
    rows = [(place[name], row) for row, name in enumerate(theirs) if name in place]
    if not rows:
        return 0
    first, second = (side[list(taken)] for side, taken in zip((judged, other), zip(*rows, strict=True), strict=True))
    alike = _same_labels(first, second)
    if all(str(theirs[row]).isdecimal() for _, row in rows):
        alike = alike & ((first.confidence - second.confidence.to(first.confidence)).abs() <= NEAR)
        alike = alike & (first.prediction == second.prediction.to(first.prediction))
    return len(rows) if bool(alike.all()) else 0


def _same_labels(first: Predictions, second: Predictions) -> Bool[Tensor, " n"]:
    ours, theirs = first.labels, second.labels.to(first.labels.device)
    if ours.shape != theirs.shape:
        return torch.zeros(len(first), dtype=torch.bool, device=ours.device)
    return ours == theirs if ours.ndim == 1 else ((ours - theirs).abs() <= NEAR).all(1)


def _equal_rows(judged: Predictions, other: Predictions) -> int:
    ours, theirs = _marks(judged), _marks(other)
    if torch.equal(ours, theirs):
        return len(other)
    _, place, times = ours.unique(return_inverse=True, return_counts=True)
    repeated = float((times[place] > 1).double().mean())
    common = int(torch.isin(theirs, ours).sum())
    return common if common > (2 * repeated + CHANCE) * len(theirs) else 0


def _marks(given: Predictions) -> Int64[Tensor, " n"]:
    """Give each sample a number that is made of its scores and its label alone, bit by bit."""
    scores = given.logits if given.given_probs is None else given.given_probs
    parts = [_mixed(scores[rows].cpu().double()) for rows in slices_of(scores)]
    labels = given.labels.cpu()
    soft = labels.ndim == 2
    return torch.cat(parts) * 31 + (_mixed(labels.double()) if soft else labels)


def _mixed(table: Tensor) -> Int64[Tensor, " n"]:
    factors = torch.randint(2**62, (table.shape[1],), generator=torch.Generator().manual_seed(0)) * 2 + 1
    bits = (table + 0.0).view(torch.int64)  # minus zero is zero
    return ((bits ^ (bits >> 29)) * factors).sum(1)  # whole numbers that overflow begin again, in any order


def _names(given: Predictions, word: str) -> list[Any] | None:
    found = getattr(given, word)
    return None if found is None else list(found if isinstance(found, tuple) else found.tolist())
