"""Fixtures of the training tests."""

from collections.abc import Iterator
from typing import Any

import pytest
from devices import Device, exact_products, interpreted, on_cuda, start_interpreter


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Device]:
    with start_interpreter() as device:
        yield device


@pytest.fixture(params=[interpreted(), on_cuda()])
def device(request: Any) -> Iterator[Device]:
    """Each device on which custom kernels are tested."""
    if request.param == "cuda":
        with exact_products():
            yield Device("cuda")
    else:
        yield request.getfixturevalue("interpreter")
