"""Ledgers that are written quickly, and lines of which little is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from fedlas.experiments import kept
from fedlas.experiments.ledger import SHOWN, Line
from fedlas.metrics.digest import Intervals
from fedlas.train import Recipe


@contextmanager
def little_drawn() -> Iterator[None]:
    """Write intervals of few resamples into ledgers: how good they are is tested with the metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "Intervals", partial(Intervals, resamples=100))
        yield


def bare_line(recipe: Recipe, protocol: str, **more: Any) -> Line:
    """Make a line with the least that a line of a ledger has."""
    measures = dict.fromkeys(SHOWN, (0.5, None, None))
    return Line(recipe.name, recipe, protocol, measures, {"file": "predictions/none.npz", "sha256": ""}, **more)
