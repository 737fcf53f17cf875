"""The first step of a run: pre-compilation of custom kernels, and a fallback where `torch.compile` fails."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from fedlas.data.base import Sample
from fedlas.training.precision import autocast
from fedlas.training.random_state import random_state, restore_random_state
from fedlas.training.step import Inputs, TrainStep


def run_first_step(step: TrainStep, inputs: Inputs) -> None:
    """Execute the first step; modules that cannot be compiled run eagerly from then on."""
    with precompiled(step, inputs):
        _try_batch_assembly(step, inputs)
    compiled = [m for m in (step.parts.net, step.parts.loss) if m._compiled_call_impl is not None]
    put_back = remember(step) if compiled else None
    try:
        step(*inputs)
    except _compiler_errors() as error:
        if put_back is None or ran_out_of_memory(error):
            raise
        warnings.warn(f"not compiled: {first_line(error)}", UserWarning, stacklevel=4)
        for module in compiled:
            module._compiled_call_impl = None
        put_back()
        step(*inputs)


@contextmanager
def precompiled(step: TrainStep, inputs: Inputs) -> Iterator[None]:
    """Compile custom kernels in parallel, also while the body runs; buffers are left as they were."""
    if step.parts.precompilation is None:
        yield
        return
    put_back = remember(step)
    with ExitStack() as wait:
        try:
            with wait.enter_context(step.parts.precompilation()).going_on():
                trace(step, _first_part(step, inputs))
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            # Without pre-compilation kernels are compiled one by one when they first run.
            warnings.warn(f"kernels were not pre-compiled: {first_line(error)}", UserWarning, stacklevel=5)
        step.parts.optimizer.zero_grad(set_to_none=True)
        put_back()
        yield


def trace(step: TrainStep, inputs: Inputs) -> None:
    """Run forward and backward of the network, which collects its kernels, and then of the loss.

    The network's output is not computed meanwhile, so the loss gets zeros.
    """
    parts, precision = step.parts, step.recipe.precision
    sample: Sample = parts.feed.forward(*inputs)  # not compiled: that happens later
    images, labels = parts.mixer(sample.images, sample.labels, step.count)
    with step.gradient_slots():
        with autocast(precision, step.device):
            output = parts.net(images)
        # From a number, whose kernel is the first of autograd's thread: if cuBLAS were, it would warn that there is
        # no CUDA context.
        (0 * sum(one.sum() for one in output)).backward()
    logits, features = (torch.zeros_like(one).requires_grad_() + 0 for one in output)
    with autocast(precision, step.device):
        value = parts.loss(logits, labels, features=features, index=sample.index)
    step.scale.of(value).backward()


def remember(step: TrainStep) -> Callable[[], None]:
    """Remember what an incomplete step may change, except gradients; return a function that restores it."""
    random = random_state(step.device)
    names, watched = list(step.metrics.sums), [step.gate.sums, step.gate.history.now]
    changed: list[Tensor] = [*step.parts.task.buffers(), *watched, *step.metrics.sums.values()]
    before = [value.clone() for value in changed]

    def put_back() -> None:
        for value, old in zip(changed, before, strict=True):
            value.copy_(old)
        step.metrics.sums = {name: step.metrics.sums[name] for name in names}
        restore_random_state(random, step.device)

    return put_back


def _try_batch_assembly(step: TrainStep, inputs: Inputs) -> None:
    """Assemble a batch; if that cannot be compiled, network and loss still may be."""
    feed = step.parts.feed
    if getattr(feed, "_compiled_call_impl", None) is None:
        return
    try:
        feed(*_first_part(step, inputs))
    except _compiler_errors() as error:
        if ran_out_of_memory(error):
            raise
        warnings.warn(f"batches are made without the compiler: {first_line(error)}", UserWarning, stacklevel=5)
        feed._compiled_call_impl = None


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
        if isinstance(reason, torch.OutOfMemoryError):
            return True
        if reason is not None:
            reasons += [getattr(reason, "inner_exception", None), reason.__cause__, reason.__context__]
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
