"""Disable the warning about a missing `end_epoch` call: contract tests repeat the same batch many times."""

import sys
from collections.abc import Iterator

import pytest

from fedlas.losses.base import usage_checks


@pytest.fixture(scope="module", autouse=True)
def repeated_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usage_checks, "VISITS_WITHOUT_END", sys.maxsize)
        yield
