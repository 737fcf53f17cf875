"""How kernels are started: at once, or, in a precompilation, not at all but compiled, many of them side by side.

The first step of a network asks for some thirty kernels one after the other, and each is compiled before it runs. In a
precompilation the network is gone through with numbers that nobody has computed, and each kernel is only compiled, in a
thread of its own; meanwhile cuDNN tries its ways, and torch's compiler compiles the loss. Kernels are loaded
afterwards, so that it does not disturb cuDNN, which measures; meanwhile the compiler compiles what makes batches.

A precompilation holds for all threads, because a backward pass has its own: no other may train on its device meanwhile.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import MockTensor

TOGETHER = 16  # numbers that are a multiple of this one get a kernel of their own, as 1 does; so Triton has it


class Precompilation:
    """Compiles kernels side by side, each kind once.

    Args:
        device: what for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: set[tuple[Any, ...]] = set()
        self.tried: set[Any] = set()
        self.making: list[Future[Any]] = []
        self.loading: list[Future[Any]] = []
        self.pool = ThreadPoolExecutor(_processors())

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Let kernels of the device be compiled and not run; then they are loaded, and none may start meanwhile."""
        _now.append(self)
        try:
            yield
        finally:
            _now.pop()
            self.loading += [self.pool.submit(self._load, one) for one in self.making]
            self.making.clear()

    def concerns(self, given: tuple[Any, ...]) -> bool:
        """Return whether a kernel with these arguments is one of the device."""
        device = next((one.device for one in given if isinstance(one, Tensor)), self.device)
        return device == self.device or (device.type == self.device.type and self.device.index is None)

    def compile(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], about: dict[str, Any]) -> None:
        """Let a kernel be compiled, unless it is already; its tensors are not kept."""
        key = kernel, tuple(_kind(one) for one in given), *sorted(about.items())
        if key not in self.known:
            self.known.add(key)
            given = tuple(_like(one) for one in given)
            self.making.append(self.pool.submit(self._compile, kernel, grid, given, about))

    # What fails in these two is tried again, and told, when the kernel is to run.
    def _compile(self, kernel: Any, grid: tuple[int, ...], given: tuple[Any, ...], about: dict[str, Any]) -> Any:
        with torch.cuda.device(self.device):
            return kernel.warmup(*given, grid=grid, **about)

    def _load(self, making: Future[Any]) -> None:
        """Wait for a kernel, which is being compiled if it is not yet, and load it with what will start it."""
        made = making.result()
        try:
            with torch.cuda.device(self.device):
                made.run  # noqa: B018  # to ask for it is to load
        except Exception:
            made._run = None  # or Triton would start what was never loaded
            raise


_now: list[Precompilation] = []  # the last one counts


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **about: Any) -> None:
    """Start a kernel, or, in a precompilation, let it be compiled."""
    now = precompiling()
    if now is None or not now.concerns(given):
        kernel[grid](*given, **about)
    else:
        now.compile(kernel, grid, given, about)


def precompiling() -> Precompilation | None:
    """Return the precompilation that is going on, in which nothing can be tried."""
    return _now[-1] if _now else None


@contextmanager
def precompilation(device: torch.device, meanwhile: Callable[[], object] | None = None) -> Iterator[Precompilation]:
    """Return a precompilation, which can go on for a while, and in the end wait for what is being compiled and loaded.

    Args:
        device: whose kernels are compiled.
        meanwhile: what else may happen beside, and may fail.
    """
    made = Precompilation(device)
    if meanwhile is not None:
        made.pool.submit(meanwhile)
    try:
        yield made
    except BaseException:
        made.pool.shutdown(cancel_futures=True)
        raise
    made.pool.shutdown()
    failed = [error for one in made.loading if (error := one.exception()) is not None]
    if failed:  # each is compiled again when it first runs, and then raises
        warnings.warn(f"{len(failed)} kernels were not pre-compiled: {failed[0]!r}", stacklevel=3)


def _processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kind(one: Any) -> Any:
    """Return what of an argument decides which kernel is compiled, but for places that are odd and enormous numbers."""
    if isinstance(one, tuple):
        return tuple(_kind(part) for part in one)
    if isinstance(one, Tensor):
        return one.dtype
    return (one == 1, one % TOGETHER == 0) if type(one) is int else type(one)


def _like(one: Any) -> Any:
    """Return something that stands for an argument and keeps no memory."""
    if isinstance(one, tuple):
        return tuple(_like(part) for part in one)
    return MockTensor(one.dtype) if isinstance(one, Tensor) else one
