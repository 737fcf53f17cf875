"""Provide a small ledger for the tests of experiments: four runs of one epoch on digits."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_ledgers import fast_intervals

from fedlas.experiments.base import Choice
from fedlas.experiments.ledger import Ledger
from fedlas.experiments.planning import experiment_named
from fedlas.experiments.reproduce import reproduce

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # for `reproduction_page`


@pytest.fixture
def few_resamples() -> Iterator[None]:
    with fast_intervals():
        yield


@pytest.fixture(scope="session")
def choice() -> Choice:
    return Choice(
        data=("digits",),
        losses=("ce", "ls", "ce+temperature"),
        seeds=(1, 2),
        protocol="small",
        changes={"epochs": "1", "batch_size": "100", "model_options.width": "8"},
    )


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, choice: Choice) -> Path:
    """Return a folder with `runs` and `results`; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("trained")
    ledger = Ledger(folder / "results")
    with fast_intervals():
        list(reproduce(experiment_named("sota"), choice, ledger=ledger, runs=folder / "runs"))
    return folder


@pytest.fixture
def ledger(trained: Path) -> Ledger:
    return Ledger(trained / "results")
