"""Wait for a condition with a timeout, and detect host synchronisation with a GPU."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def until(happened: Callable[[], Any], seconds: float = 120) -> Any:
    """Call a function until its result is true, and return the result; fail after a timeout."""
    end = time.monotonic() + seconds
    while not (result := happened()):
        assert time.monotonic() < end, f"the condition was not met within {seconds:g} seconds"
        time.sleep(0.01)
    return result


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise if the host synchronises with the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
