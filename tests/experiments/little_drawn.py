"""Ledgers that are written quickly, and lines of which little is told."""

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
def little_drawn() -> Iterator[None]:
    """Write intervals of few resamples into ledgers: how good they are is tested with the metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_predictions, "Resampling", partial(Resampling, resamples=100))
        yield


def bare_line(recipe: Recipe, protocol: str, value: float = 0.5, **more: Any) -> Line:
    """Make a line with the least that a line of a ledger has."""
    measures = dict.fromkeys(SHOWN, (value, None, None))
    empty = {"file": "predictions/none.npz", "sha256": sha256(b"").hexdigest()}
    return Line(recipe.name, recipe, protocol, measures, empty, **more)


def bare_ledger(folder: Path, lines: Sequence[Line]) -> Ledger:
    """Write such lines, and the file of predictions that they share."""
    (folder / "predictions").mkdir(parents=True)
    (folder / "predictions" / "none.npz").touch()
    (folder / "x.jsonl").write_text("".join(f"{line.to_json()}\n" for line in lines))
    return Ledger(folder)
