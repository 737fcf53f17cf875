"""Ledgers that are written quickly."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from fedlas.experiments import kept
from fedlas.metrics.digest import Intervals


@contextmanager
def little_drawn() -> Iterator[None]:
    """Write intervals of few resamples into ledgers: how good they are is tested with the metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "Intervals", partial(Intervals, resamples=100))
        yield
