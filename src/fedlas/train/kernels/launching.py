"""How kernels are started: at once, or, in a rehearsal, not at all but compiled, many of them side by side.

The first step of a network asks for some thirty kernels one after the other, and each is compiled before it runs. In a
rehearsal the same step is gone through with numbers that nobody has computed, and each kernel is only compiled, in a
thread of its own; meanwhile cuDNN tries its ways, and torch's compiler compiles the loss and what makes batches.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import MockTensor

TOGETHER = 16  # numbers that are a multiple of this one get a kernel of their own, as 1 does; so Triton has it


class Rehearsal:
    """Compiles kernels side by side, each kind once.

    Args:
        device: what for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: set[tuple[Any, ...]] = set()
        self.pool = ThreadPoolExecutor(os.cpu_count())

    def compile(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], about: dict[str, Any]) -> None:
        """Let a kernel be compiled, unless it is already; its tensors are not kept."""
        key = kernel, tuple(_kind(one) for one in given), *sorted(about.items())
        if key not in self.known:
            self.known.add(key)
            self.pool.submit(self._compile, kernel, grid, tuple(_like(one) for one in given), about)

    def _compile(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], about: dict[str, Any]) -> None:
        with torch.cuda.device(self.device), suppress(Exception):  # it will be told when the kernel is to run
            kernel.warmup(*given, grid=grid, **about)


_now: Rehearsal | None = None


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **about: Any) -> None:
    """Start a kernel, or, in a rehearsal, let it be compiled."""
    if _now is None:
        kernel[grid](*given, **about)
    else:
        _now.compile(kernel, grid, given, about)


def rehearsing() -> bool:
    """Say whether kernels are only compiled, so that nothing can be tried."""
    return _now is not None


@contextmanager
def rehearsal(device: torch.device) -> Iterator[None]:
    """Let kernels be compiled and not run; in the end, wait for them."""
    global _now  # a backward pass runs in another thread, which has to see it
    before, _now = _now, Rehearsal(device)
    try:
        yield
    finally:
        now, _now = _now, before
        now.pool.shutdown()


def _kind(one: Any) -> Any:
    """Say what of an argument decides which kernel is compiled."""
    if isinstance(one, tuple):
        return tuple(_kind(part) for part in one)
    if isinstance(one, Tensor):
        return one.dtype
    return (one == 1, one % TOGETHER == 0) if type(one) is int else type(one)


def _like(one: Any) -> Any:
    """Give something that stands for an argument and keeps no memory."""
    if isinstance(one, tuple):
        return tuple(_like(part) for part in one)
    return MockTensor(one.dtype) if isinstance(one, Tensor) else one
