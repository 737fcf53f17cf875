"""One run on several processes: who is who, how they agree, and who writes."""

import gc
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fedlas import ranks
from fedlas.training.prediction import rank
from fedlas.training.run_folder import RunError

Value = TypeVar("Value")
PATIENCE = timedelta(minutes=30)
_runs = count()
KEEPER = "torch.distributed.nn.functional"  # its functions keep the group of the moment at which it is imported
PAUSE = 0.2  # seconds
LOOK_EVERY = 10  # steps between two looks at the other ranks' signals, where a look makes the host wait


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the process group of a run that torchrun has started; without torchrun do nothing."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized()
    if alone:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Before there is a group: DistributedDataParallel comes to import it, and the group would stay with its threads.
    importlib.import_module(KEEPER)
    gc.collect()  # groups of a run that failed; found in a forked process, they would crash it
    room, here, world = _meeting_room()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=room, rank=here, world_size=world, timeout=PATIENCE)
    try:
        with warnings.catch_warnings():
            # The strides of a dimension of size 1 mean nothing, and DistributedDataParallel copes with any.
            warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
            yield
    finally:
        # Threads of gloo need Python to let go of a tensor: one that asks for it while Python ends aborts the process.
        # So they end here, with the group, unless an error remembers the network that holds it. With torch 2.6 this
        # thread keeps Python to itself while it waits for them, so they first get time to let go of what they hold.
        gc.collect()
        time.sleep(PAUSE)
        dist.destroy_process_group()


@cache
def _meeting_place() -> tuple[Any, int, int]:
    """Go where torchrun says that all processes meet, once."""
    store, here, world = next(dist.rendezvous("env://", timeout=PATIENCE))  # type: ignore[attr-defined]
    store.set_timeout(PATIENCE)
    return store, here, world


def _meeting_room() -> tuple[Any, int, int]:
    """Return a separate key space for each run: keys of the previous run would make it wait forever."""
    store, here, world = _meeting_place()
    return dist.PrefixStore(f"run {next(_runs)}", store), here, world  # type: ignore[attr-defined]


def is_rank_zero() -> bool:
    """Whether this process is the one that writes."""
    return rank() == 0


def decide_on_rank_zero(decide: Callable[[], Value]) -> Value:
    """Return what rank 0 decides, on all ranks; if it fails there, every rank raises."""
    if ranks.count() == 1:
        return decide()
    answer: list[Any] = [None, None]
    own_error: Exception | None = None
    if is_rank_zero():
        try:
            answer[0] = decide()
        except Exception as error:
            own_error = error
            portable = isinstance(error, RunError | OSError)
            answer[1] = error if portable else RuntimeError(f"rank 0 failed: {type(error).__name__}: {error}")
    dist.broadcast_object_list(answer)
    if own_error is not None:
        raise own_error
    if answer[1] is not None:
        raise answer[1]
    decided: Value = answer[0]
    return decided


def gather_objects(value: Value) -> list[Value]:
    """Collect a value from all processes."""
    if ranks.count() == 1:
        return [value]
    values: list[Any] = [None] * ranks.count()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast the buffers of rank 0, because the batch norms of each rank have processed other samples.

    During training, DistributedDataParallel does the same at the beginning of each step.
    """
    if ranks.count() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def any_signal(caught: int | None, step: int, device: torch.device) -> int | None:
    """Return whether any process was asked to stop; all get the same answer at the same step."""
    if ranks.count() == 1:
        return caught
    if device.type == "cuda" and step % LOOK_EVERY:
        return None
    highest = int(ranks.stacked(torch.tensor(caught or 0, device=device)).max())
    return highest or None
