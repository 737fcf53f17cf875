"""`torch.compile` with a fallback, and steps that compile: the first of a run, and the first of a batch size."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedlas import ranks
from fedlas.training.random_state import random_state, restore_random_state
from fedlas.training.run_folder import RunError
from fedlas.training.step import TrainStep

Inputs = tuple[Tensor, ...]
MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # of torch, Triton and cuBLAS


class CompiledCall:
    """Calls a module through `torch.compile`, or directly after compilation failed.

    Args:
        module: the module.
        options: options of `torch.compile`.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.module, self.active, self.failed = module, True, False
        self._compiled: Any = torch.compile(module, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if not self.active:
            return self.module(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except Exception:
            self.failed = True
            raise


def compiled_calls(step: TrainStep) -> list[CompiledCall]:
    """Return those of batch assembly, network and loss that go through the compiler."""
    calls = step.assemble_batch, *step.module.calls
    return [call for call in calls if isinstance(call, CompiledCall) and call.active]


def run_with_fallback(step: TrainStep, run: Callable[[], object]) -> None:
    """Run a step, or a part of one, that may compile; a module that cannot be compiled runs eagerly from then on.

    If the backward pass cannot be compiled, both network and loss run eagerly.

    Raises:
        RunError: a module cannot be compiled and there are several processes. They synchronise within a step, and one
            that repeats a step alone would wait for the others forever.
    """
    while compiled := compiled_calls(step):
        restore = snapshot(step)
        for call in compiled:
            call.failed = False
        try:
            run()
        except _compiler_errors() as error:
            failed = [call for call in compiled if call.failed]
            failed = failed or [call for call in compiled if call is not step.assemble_batch]
            if not failed or ran_out_of_memory(error):
                raise
            if ranks.count() > 1:
                raise RunError(
                    "the training step cannot be compiled, and only a run with one process continues without "
                    f"compilation; set compile=False: {first_line(error)}"
                ) from error
            warnings.warn(f"not compiled: {first_line(error)}", UserWarning, stacklevel=4)
            for call in failed:
                call.active = False
            restore()
        else:
            return
    run()


def snapshot(step: TrainStep) -> Callable[[], None]:
    """Remember what an incomplete step may change, except gradients; return a function that restores it."""
    random, names = random_state(step.device), list(step.metrics.sums)
    state: list[Tensor] = [*step.module.buffers(), *step.metrics.sums.values(), step.gate.sums, step.gate.history.now]
    before = [value.clone() for value in state]

    def restore() -> None:
        for value, old in zip(state, before, strict=True):
            value.copy_(old)
        step.metrics.keep(names)
        restore_random_state(random, step.device)

    return restore


def _compiler_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions of the compiler, if it was loaded; loading it takes a second."""
    module = sys.modules.get("torch._dynamo.exc")
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is, or was caused by, a lack of device memory."""
    reasons: list[BaseException | None] = [error]
    while reasons:
        reason = reasons.pop()
        if isinstance(reason, torch.OutOfMemoryError) or any(words in str(reason) for words in MEMORY_WORDS):
            return True
        if reason is not None:
            reasons += [getattr(reason, "inner_exception", None), reason.__cause__, reason.__context__]
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
