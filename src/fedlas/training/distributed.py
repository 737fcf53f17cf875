"""Distributed training: process group, gradient reduction, decisions on rank 0, and exchange of buffers and signals."""

import gc
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fedlas import ranks
from fedlas.training.run_folder import RunError

Value = TypeVar("Value")
TIMEOUT = timedelta(minutes=30)
_run_numbers = count()
FUNCTIONAL = "torch.distributed.nn.functional"  # keeps the default process group that exists when it is imported
SHUTDOWN_PAUSE = 0.2  # seconds for threads of gloo to release their tensors
SIGNAL_INTERVAL = 10  # steps between two exchanges of signals on GPUs, because an exchange blocks the host


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the process group of torchrun for one run; do nothing without torchrun."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several and device.type == "cuda":
        torch.cuda.set_device(device)
    if not several or dist.is_initialized():
        yield
        return
    # Imported before the group exists: DistributedDataParallel imports this module, which would keep the group alive.
    importlib.import_module(FUNCTIONAL)
    gc.collect()  # groups of a failed run would crash a forked process
    store, own_rank, world_size = _rendezvous()
    # A key space for this run; with the keys of the previous run it would wait forever.
    store = dist.PrefixStore(f"run {next(_run_numbers)}", store)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=own_rank, world_size=world_size, timeout=TIMEOUT)
    try:
        with warnings.catch_warnings():
            # Strides of a dimension of size 1 have no effect, and DistributedDataParallel supports all of them.
            warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
            yield
    finally:
        # Threads of gloo release tensors under the GIL; one that asks for it while Python exits aborts the process.
        # So they end here, with the group, unless a traceback refers to the network that holds the group. torch 2.6
        # waits for them without releasing the GIL, so they first get time to release tensors.
        gc.collect()
        time.sleep(SHUTDOWN_PAUSE)
        dist.destroy_process_group()


@cache
def _rendezvous() -> tuple[Any, int, int]:
    """Return the store, rank and world size from torchrun's rendezvous, once per process."""
    store, own_rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))  # type: ignore[attr-defined]
    store.set_timeout(TIMEOUT)
    return store, own_rank, world_size


def wrap_in_ddp(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a module wrapped in DistributedDataParallel; the module itself if there is one process."""
    if ranks.count() == 1:
        return module
    return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)


def gradient_reduction(module: nn.Module, *, needed: bool) -> AbstractContextManager[None]:
    """Return a context for a backward pass that reduces gradients across ranks only if needed."""
    if needed or not isinstance(module, DistributedDataParallel):
        return nullcontext()
    deferred: AbstractContextManager[None] = module.no_sync()
    return deferred


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, which writes all files."""
    return ranks.rank() == 0


def decide_on_rank_zero(decide: Callable[[], Value]) -> Value:
    """Return the result of a function that runs on rank 0; if it fails there, every rank raises."""
    if ranks.count() == 1:
        return decide()
    outcome: list[Any] = [None, None]
    own_error: Exception | None = None
    if is_rank_zero():
        try:
            outcome[0] = decide()
        except Exception as error:
            own_error = error
            portable = isinstance(error, RunError | OSError)
            outcome[1] = error if portable else RuntimeError(f"rank 0 failed: {type(error).__name__}: {error}")
    dist.broadcast_object_list(outcome)
    if own_error is not None:
        raise own_error
    if outcome[1] is not None:
        raise outcome[1]
    decided: Value = outcome[0]
    return decided


def gather_objects(value: Value) -> list[Value]:
    """Return the values of all ranks."""
    if ranks.count() == 1:
        return [value]
    values: list[Any] = [None] * ranks.count()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def broadcast_buffers(module: nn.Module) -> None:
    """Copy the buffers of rank 0 to all ranks, such as the batch norm statistics of the last step.

    DistributedDataParallel does the same at the start of every training step.
    """
    if ranks.count() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def any_signal(caught: int | None, step: int, device: torch.device) -> int | None:
    """Return the signal that any rank caught, if any; all ranks get the same result at the same step."""
    if ranks.count() == 1:
        return caught
    if device.type == "cuda" and step % SIGNAL_INTERVAL:
        return None
    highest = int(ranks.stacked(torch.tensor(caught or 0, device=device)).max())
    return highest or None
