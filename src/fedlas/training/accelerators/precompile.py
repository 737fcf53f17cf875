"""Kernel launches, and parallel pre-compilation of kernels.

The first step of a network needs about thirty kernels, and each is compiled before it runs. During a precompilation
the network runs with uninitialised data, and each kernel is only compiled, in a thread pool; meanwhile cuDNN benchmarks
its algorithms, and torch.compile compiles the loss. Kernels are loaded afterwards, so that loading does not disturb the
benchmarks of cuDNN; meanwhile torch.compile compiles the batch assembly.

A precompilation is global to all threads, because the backward pass has its own thread: no other thread may train on
its device meanwhile.
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

DIVISIBILITY = 16  # Triton specialises kernels for integers that are 1 or a multiple of this


class Precompilation:
    """Compiles kernels in parallel, each specialisation once.

    Args:
        device: device of the kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.requested: set[tuple[Any, ...]] = set()
        self.tried: set[Any] = set()
        self.compiling: list[Future[Any]] = []
        self.failed: list[Exception] = []
        self.loading: list[Future[None]] = []
        self.pool = ThreadPoolExecutor(_processors())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compile kernels of the device instead of running them; load them at the end."""
        _active.append(self)
        try:
            yield
        finally:
            _active.pop()
            self.loading += [self.pool.submit(self._load, future) for future in self.compiling]
            self.compiling.clear()

    def handles(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether a kernel with these arguments belongs to the device."""
        device = next((argument.device for argument in arguments if isinstance(argument, Tensor)), self.device)
        return device == self.device or (device.type == self.device.type and self.device.index is None)

    def compile(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compile a kernel in the background, unless it was requested before; keeps no tensors."""
        key = kernel, tuple(_signature(argument) for argument in arguments), *sorted(options.items())
        if key not in self.requested:
            self.requested.add(key)
            arguments = tuple(_placeholder(argument) for argument in arguments)
            self.compiling.append(self.pool.submit(self._compile, kernel, grid, arguments, options))

    def _compile(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with torch.cuda.device(self.device):
            return kernel.warmup(*arguments, grid=grid, **options)

    def _load(self, compilation: Future[Any]) -> None:
        """Wait until a kernel is compiled, and load it with its launcher."""
        try:
            kernel = compilation.result()
        except Exception as error:  # it is compiled again when it first runs, and raises then
            self.failed.append(error)
        else:
            with torch.cuda.device(self.device):
                kernel.run  # noqa: B018  # the property loads the kernel


_active: list[Precompilation] = []  # the last one is active


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel, or compile it during a precompilation."""
    active = precompiling()
    if active is None or not active.handles(arguments):
        kernel[grid](*arguments, **options)
    else:
        active.compile(kernel, grid, arguments, options)


def precompiling() -> Precompilation | None:
    """Return the active precompilation, if any; kernels do not run in it."""
    return _active[-1] if _active else None


@contextmanager
def precompilation(device: torch.device, meanwhile: Callable[[], object] | None = None) -> Iterator[Precompilation]:
    """Yield a precompilation; at the end, wait until all kernels are compiled and loaded.

    A kernel that cannot be loaded, for lack of memory for example, raises: Triton would launch it without its binary.

    Args:
        device: device of the kernels.
        meanwhile: function to run in the background; its errors are ignored.
    """
    active = Precompilation(device)
    if meanwhile is not None:
        active.pool.submit(meanwhile)
    try:
        yield active
    except BaseException:
        active.pool.shutdown(cancel_futures=True)
        raise
    active.pool.shutdown()
    if active.failed:
        warnings.warn(f"{len(active.failed)} kernels were not pre-compiled: {active.failed[0]!r}", stacklevel=3)
    for future in active.loading:
        future.result()


def _processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _signature(argument: Any) -> Any:
    """Return the properties of an argument that select a specialisation, except alignment and integer size."""
    if isinstance(argument, tuple):
        return tuple(_signature(part) for part in argument)
    if isinstance(argument, Tensor):
        return argument.dtype
    return (argument == 1, argument % DIVISIBILITY == 0) if type(argument) is int else type(argument)


def _placeholder(argument: Any) -> Any:
    """Return a stand-in for an argument that keeps no memory."""
    if isinstance(argument, tuple):
        return tuple(_placeholder(part) for part in argument)
    return MockTensor(argument.dtype) if isinstance(argument, Tensor) else argument
