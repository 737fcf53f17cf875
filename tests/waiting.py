"""Waiting: for something that happens elsewhere, though not for ever; and a guard for code that must never wait."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def until(happened: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait for something, and give it."""
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
    return found


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail where the host would wait for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
