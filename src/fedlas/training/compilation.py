"""`torch.compile` with a fallback, and the first step of a run, which compiles."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedlas.data.base import Sample
from fedlas.training.precision import autocast
from fedlas.training.random_state import random_state, restore_random_state
from fedlas.training.step import Inputs, TrainStep

MEMORY_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # of torch, Triton and cuBLAS


class CompiledCall:
    """Calls a module through `torch.compile`, or directly after compilation failed.

    Args:
        module: the module.
        options: options of `torch.compile`.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.module, self.active = module, True
        self._compiled: Any = torch.compile(module, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return (self._compiled if self.active else self.module)(*args, **kwargs)


def compiled_calls(*calls: object) -> list[CompiledCall]:
    """Return those calls that go through the compiler."""
    return [call for call in calls if isinstance(call, CompiledCall) and call.active]


def run_first_step(step: TrainStep, inputs: Inputs) -> None:
    """Execute the first step; modules that cannot be compiled run eagerly from then on."""
    with precompiled(step, inputs):
        _try_batch_assembly(step, inputs)
    compiled = compiled_calls(step.parts.call_net, step.parts.call_loss)
    restore = snapshot(step) if compiled else None
    try:
        step(*inputs)
    except _compiler_errors() as error:
        if restore is None or ran_out_of_memory(error):
            raise
        warnings.warn(f"not compiled: {first_line(error)}", UserWarning, stacklevel=4)
        for call in compiled:
            call.active = False
        restore()
        step(*inputs)


@contextmanager
def precompiled(step: TrainStep, inputs: Inputs) -> Iterator[None]:
    """Compile custom kernels in parallel, also while the body runs; buffers are left as they were."""
    if step.parts.precompile is None:
        yield
        return
    restore = snapshot(step)
    with ExitStack() as wait:
        try:
            with wait.enter_context(step.parts.precompile()).active():
                trace(step, _first_part(step, inputs))
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            # Without pre-compilation kernels are compiled one by one when they first run.
            warnings.warn(f"kernels were not pre-compiled: {first_line(error)}", UserWarning, stacklevel=5)
        step.parts.optimizer.zero_grad(set_to_none=True)
        restore()
        yield


def trace(step: TrainStep, inputs: Inputs) -> None:
    """Run forward and backward of the network, which collects its kernels, and then of the loss.

    The network's output is not computed meanwhile, so the loss gets zeros.
    """
    parts, precision = step.parts, step.recipe.precision
    feed = parts.feed.module if isinstance(parts.feed, CompiledCall) else parts.feed  # it is compiled later
    sample: Sample = feed(*inputs)
    images, labels = parts.mixer(sample.images, sample.labels, step.count)
    with parts.optimizer_step.gradient_slots():
        with autocast(precision, step.device):
            output = parts.call_net(images)
        # From a number, whose kernel is the first of autograd's thread: if cuBLAS were, it would warn that there is
        # no CUDA context.
        (0 * (output.logits.sum() + output.features.sum())).backward()
    logits, features = (torch.zeros_like(one).requires_grad_() + 0 for one in output)
    with autocast(precision, step.device):
        value = parts.call_loss(logits, labels, features=features, index=sample.index)
    step.scaler.scale(value).backward()


def snapshot(step: TrainStep) -> Callable[[], None]:
    """Remember what an incomplete step may change, except gradients; return a function that restores it."""
    random = random_state(step.device)
    names, watched = list(step.metrics.sums), [step.gate.sums, step.gate.history.now]
    modules = step.parts.net, step.parts.loss
    changed: list[Tensor] = [
        *(one for module in modules for one in module.buffers()),
        *watched,
        *step.metrics.sums.values(),
    ]
    before = [value.clone() for value in changed]

    def restore() -> None:
        for value, old in zip(changed, before, strict=True):
            value.copy_(old)
        step.metrics.sums = {name: step.metrics.sums[name] for name in names}
        restore_random_state(random, step.device)

    return restore


def _try_batch_assembly(step: TrainStep, inputs: Inputs) -> None:
    """Assemble a batch; if that cannot be compiled, network and loss still may be."""
    calls = compiled_calls(step.parts.feed)
    if not calls:
        return
    try:
        step.parts.feed(*_first_part(step, inputs))
    except _compiler_errors() as error:
        if ran_out_of_memory(error):
            raise
        warnings.warn(f"batches are made without the compiler: {first_line(error)}", UserWarning, stacklevel=5)
        calls[0].active = False


def _first_part(step: TrainStep, inputs: Inputs) -> Inputs:
    return tuple(value.chunk(step.recipe.accumulate)[0] for value in inputs)


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
