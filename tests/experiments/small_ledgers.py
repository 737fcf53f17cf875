"""Small ledgers for tests: lines with the required fields only, and intervals of few resamples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedlas.experiments import stored_predictions
from fedlas.experiments.ledger import SHOWN, Ledger, Line
from fedlas.metrics.base import Resampling
from fedlas.training import Recipe


@contextmanager
def fast_intervals() -> Iterator[None]:
    """Compute the intervals of ledger lines from 100 resamples; tests of the metrics check their quality."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_predictions, "Resampling", partial(Resampling, resamples=100))
        yield


def minimal_line(recipe: Recipe, protocol: str, value: float = 0.5, **fields: Any) -> Line:
    """Return a ledger line that has only the required fields, and `fields`."""
    metrics = dict.fromkeys(SHOWN, (value, None, None))
    no_predictions = {"file": "predictions/none.npz", "sha256": sha256(b"").hexdigest()}
    return Line(recipe.name, recipe, protocol, metrics, no_predictions, **fields)


def minimal_ledger(folder: Path, lines: Sequence[Line]) -> Ledger:
    """Write a ledger of such lines, and the empty file of predictions that they share."""
    (folder / "predictions").mkdir(parents=True)
    (folder / "predictions" / "none.npz").touch()
    (folder / "x.jsonl").write_text("".join(f"{line.to_json()}\n" for line in lines))
    return Ledger(folder)
