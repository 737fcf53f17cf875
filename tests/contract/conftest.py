"""The contract asks a loss about the same batch many times, which in a training loop would be epochs without an end."""

import sys
from collections.abc import Iterator

import pytest

from fedlas.losses import usage_checks


@pytest.fixture(scope="module", autouse=True)
def repeated_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usage_checks, "VISITS_WITHOUT_END", sys.maxsize)
        yield
