"""One training step: augmentation, forward, loss, backward, clipping, optimizer and schedule, without a wait.

Everything that a step reads or changes lives in tensors on the device at fixed addresses: the counter of steps, the
table of learning rates, weights, the optimizer's memory, the loss's state, the sums of the epoch, the flag of the first
bad step. So the host has nothing to decide, and the whole step can be captured as one CUDA graph:

    places ─► images ─► mixing ─► network ─► loss ─► backward ─► norm, clipping ─► optimizer
       ▲                             │         │                      │                │
    order of the epoch           metrics    its state          first bad step     rate = table[step], step + 1

The first steps of a batch size run eagerly, as real steps, and warm everything up; then the step is captured and from
then on replayed. Capturing changes no number: an uncompiled captured step equals the eager one bit for bit.

A step whose loss or gradient is not finite, or whose loss is thousands of times that of guessing, sets a flag on the
device and from then on the optimizer changes nothing;
the host finds the flag when it next reads the sums. In float16 an overflow skips one step and lowers the scale; only
where the scale has come down to 1 it is a bad step like any other.
"""

import gc
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fedlas import ranks
from fedlas.data.base import Sample
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.mixup import Mixer
from fedlas.training.optimizer import SKIP, gradient_norm, scale_gradients
from fedlas.training.precision import Scale, autocast
from fedlas.training.random_state import random_state, restore_random_state
from fedlas.training.recipe import Recipe
from fedlas.training.schedule import LearningRates

DIVERGED = 1e4  # times the loss of guessing: a network that is so wrong does not come back
WARM = 3  # eager steps before a capture: enough for compilation, autotuning and allocation
Inputs = tuple[Tensor, ...]


@dataclass
class Parts:
    """What a step is made of.

    Args:
        task: network and loss as one module, wrapped for several processes if there are any.
        net: the network's own module, whose gradients are clipped.
        loss: the loss's own module.
        optimizer: fused, with the learning rate in tensors.
        rates: writes those tensors.
        feed: makes a batch of the inputs of a step.
        mixer: mixup and CutMix.
        descent: kernels of our own for the end of a step (`kernels.descent`), where they can be used.
        precompilation: in which kernels of our own are compiled and not run (`kernels.launching`), where there are any.
    """

    task: nn.Module
    net: nn.Module
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    rates: LearningRates
    feed: nn.Module
    mixer: Mixer
    descent: Any = None
    precompilation: Callable[[], AbstractContextManager[Any]] | None = None


class TrainStep:
    """Trains on one batch at a time, eagerly or by replaying what was captured.

    Args:
        recipe: precision, clipping and accumulation.
        parts: what the step works on.
        watch: looks at the gate of the loss.
        device: where all of it lives.
        capture: whether to capture; only on a CUDA device.
    """

    def __init__(
        self, recipe: Recipe, parts: Parts, watch: GateStatistics, device: torch.device, *, capture: bool = True
    ) -> None:
        self.recipe, self.parts, self.watch, self.device = recipe, parts, watch, device
        self.meter = EpochMetrics(device, None if parts.descent is None else parts.descent.tally)
        self.scale = Scale(recipe.precision, device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self.capture = capture and device.type == "cuda"
        self._started = False
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Inputs]] = {}

    def __call__(self, *inputs: Tensor) -> None:
        """Train on a batch; the inputs are what the feed takes."""
        if not self._started:
            self._started = True
            self._first(*inputs)
            return
        kind = tuple((tuple(value.shape), value.dtype) for value in inputs)
        if self.capture and kind not in self._graphs and self._seen[kind] >= WARM:
            self._capture(kind, inputs)
        if kind not in self._graphs:
            self._seen[kind] += 1
            self.eager(*inputs)
            return
        graph, places = self._graphs[kind]
        for place, value in zip(places, inputs, strict=True):
            place.copy_(value, non_blocking=True)
        graph.replay()

    def _first(self, *inputs: Tensor) -> None:
        """Do the first step; what cannot be compiled runs as it is from then on."""
        with self._rehearsed(inputs):
            self._try_feed(inputs)
        compiled = [m for m in (self.parts.net, self.parts.loss) if m._compiled_call_impl is not None]
        put_back = self._remembered() if compiled else None
        try:
            self.eager(*inputs)
        except _compiler_errors() as error:
            if put_back is None or _ran_out_of_memory(error):
                raise
            warnings.warn(f"not compiled: {_first_line(error)}", UserWarning, stacklevel=3)
            for module in compiled:
                module._compiled_call_impl = None
            put_back()
            self.eager(*inputs)

    @contextmanager
    def _rehearsed(self, inputs: Inputs) -> Iterator[None]:
        """Let kernels be compiled side by side, and beside what happens meanwhile; buffers are left as they were."""
        if self.parts.precompilation is None:
            yield
            return
        put_back = self._remembered()
        with ExitStack() as wait:
            try:
                with wait.enter_context(self.parts.precompilation()).going_on():
                    self._rehearse(tuple(value.chunk(self.recipe.accumulate)[0] for value in inputs))
            except Exception as error:
                if _ran_out_of_memory(error):
                    raise
                # Without pre-compilation kernels are compiled one by one when they first run.
                warnings.warn(f"kernels were not pre-compiled: {_first_line(error)}", UserWarning, stacklevel=4)
            self.parts.optimizer.zero_grad(set_to_none=True)
            put_back()
            yield

    def _rehearse(self, inputs: Inputs) -> None:
        """Go forth and back through the network, for what it lets be compiled, and then through the loss.

        Nobody has computed what the network says, so the loss sees zeros.
        """
        sample: Sample = self.parts.feed.forward(*inputs)  # without the compiler, whose turn comes later
        images, labels = self.parts.mixer(sample.images, sample.labels, self.count)
        with self._slots():
            with autocast(self.recipe.precision, self.device):
                output = self.parts.net(images)
            # From a number, whose kernel is the first of autograd's thread: if cuBLAS were, it would warn that there is
            # no CUDA context.
            (0 * sum(one.sum() for one in output)).backward()
        logits, features = (torch.zeros_like(one).requires_grad_() + 0 for one in output)
        with autocast(self.recipe.precision, self.device):
            value = self.parts.loss(logits, labels, features=features, index=sample.index)
        self.scale.of(value).backward()

    def _try_feed(self, inputs: Inputs) -> None:
        """Make a batch, which changes nothing; where that cannot be compiled, network and loss still may be."""
        feed = self.parts.feed
        if getattr(feed, "_compiled_call_impl", None) is None:
            return
        try:
            feed(*(value.chunk(self.recipe.accumulate)[0] for value in inputs))
        except _compiler_errors() as error:
            if _ran_out_of_memory(error):
                raise
            warnings.warn(f"batches are made without the compiler: {_first_line(error)}", UserWarning, stacklevel=4)
            feed._compiled_call_impl = None

    def _remembered(self) -> Callable[[], None]:
        """Remember what half a step may change, all but gradients, and give what puts it back."""
        random = random_state(self.device)
        names, watched = list(self.meter.sums), [self.watch.sums, self.watch.history.now]
        changed = [*self.parts.task.buffers(), *watched, *self.meter.sums.values()]
        before = [value.clone() for value in changed]

        def put_back() -> None:
            for value, old in zip(changed, before, strict=True):
                value.copy_(old)
            self.meter.sums = {name: self.meter.sums[name] for name in names}
            restore_random_state(random, self.device)

        return put_back

    def eager(self, *inputs: Tensor) -> None:
        """Do one step; nothing in here may wait for the device."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        pieces = list(zip(*(value.chunk(self.recipe.accumulate) for value in inputs), strict=True))
        fine = []
        with self._slots():
            for number, piece in enumerate(pieces, start=1):
                with self._reduced_once(last=number == len(pieces)):
                    fine.append(self._learn(piece, len(piece[0]) / len(inputs[0])))
        self._end(reduce(torch.logical_and, fine))

    def _reduced_once(self, *, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients across ranks only with the last part of an accumulated step."""
        task = self.parts.task
        if last or not isinstance(task, DistributedDataParallel):
            return nullcontext()
        deferred: AbstractContextManager[None] = task.no_sync()
        return deferred

    @contextmanager
    def _slots(self) -> Iterator[None]:
        """Let a network that can do so hand gradients over or write them to where they are needed, for a step."""
        model: Any = getattr(self.parts.net, "model", None)
        if self.parts.descent is None or not hasattr(model, "gradient_slots"):
            yield
            return
        model.gradient_slots, model.gradient_taker = self.parts.descent.slots, self.parts.descent.take
        try:
            yield
        finally:
            del model.gradient_slots, model.gradient_taker  # what is left says that there are none

    def _learn(self, inputs: Inputs, share: float) -> Bool[Tensor, ""]:
        """Add the gradient of a batch, or of a part of one; say whether its loss is finite."""
        sample: Sample = self.parts.feed(*inputs)
        images, labels = self.parts.mixer(sample.images, sample.labels, self.count)
        with autocast(self.recipe.precision, self.device):
            value, output = self.parts.task(images, labels, sample.index)
        terms = self._terms()
        most, summed = DIVERGED * math.log(output.logits.shape[1]), self._is_summed
        if share != 1 and summed:
            # What stands for the whole batch is the part's sum as many times as the part fits in.
            value, terms = value / share, {name: term / share for name, term in terms.items()}
        self.scale.of(value if share == 1 else value * share).backward()
        self.meter.add_batch(value, terms, output.logits.detach(), sample.labels)
        self.watch.add(sample.index)
        rows = len(sample.labels) / share if summed else 1
        fine: Bool[Tensor, ""] = value.detach().abs() < most * rows  # what is not a number is not less, either
        return fine

    @property
    def _is_summed(self) -> bool:
        return getattr(self.parts.loss, "reduction", "mean") == "sum"

    def _terms(self) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = getattr(self.parts.loss, "last_terms", {})
        return terms

    def _end(self, fine: Bool[Tensor, ""]) -> None:
        """Take the optimizer's step and count it, in few kernels where all parameters have a gradient."""
        descent = self.parts.descent
        if descent is not None and descent.ready:
            sums = self.meter.total("steps"), self.meter.total("gradient_norm")
            descent.step(fine, self.count, self.first_bad, *sums)
            return
        if descent is not None:
            descent.widen()
        self.parts.rates.set(self.count)
        self._update(fine)
        self.count.add_(1)

    @torch.no_grad()
    def _update(self, fine: Bool[Tensor, ""]) -> None:
        """Clip, look for bad numbers, and let the optimizer take its step unless there are any."""
        net, loss = ([p.grad for p in m.parameters() if p.grad is not None] for m in (self.parts.net, self.parts.loss))
        together = self.recipe.clip_loss
        norm = self.scale.undone(gradient_norm([*net, *loss] if together else net, self.device))
        overflow = ~is_finite(norm)
        if loss and not together:  # what is not clipped may be as bad
            overflow = overflow | ~is_finite(gradient_norm(loss, self.device))
        self._clip(net, loss, norm)
        if ranks.count() > 1:  # all ranks must freeze together
            fine = ranks.total((~fine).float()) == 0
        bad = ~fine | self.scale.beyond_help(overflow)
        self.first_bad.copy_(torch.where((self.first_bad < 0) & bad, self.count, self.first_bad))
        skip = (self.first_bad >= 0) | overflow
        getattr(self.parts.optimizer, SKIP).copy_(skip)
        self.parts.optimizer.step()
        self.scale.update(overflow)
        self.meter.add_norm(torch.where(skip, 0, norm))

    def _clip(self, net: list[Tensor], loss: list[Tensor], norm: Float[Tensor, ""]) -> None:
        """Shorten long gradients: those of the network alone, as published, or those of the loss with them."""
        clipped, spared = ([*net, *loss], []) if self.recipe.clip_loss else (net, loss)
        if self.recipe.clip is None:
            spared = [*net, *loss]
        else:
            scale_gradients(clipped, self.scale.undone((self.recipe.clip / (norm + 1e-6)).clamp_max(1.0)))
        if self.scale.used:
            scale_gradients(spared, 1 / self.scale.value)

    def _capture(self, kind: tuple[Any, ...], inputs: Inputs) -> None:
        """Record a step without executing it; if it cannot be captured, all steps stay eager."""
        places = tuple(value.clone() for value in inputs)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        # Other threads may use the device meanwhile: one of a loader pins memory, for example.
        recording = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
        try:
            with without_collector(), self._taking(), recording:
                self.eager(*places)
        except RuntimeError as error:
            if _ran_out_of_memory(error):
                raise
            self.capture = False
            warnings.warn(f"not captured: {_first_line(error)}", UserWarning, stacklevel=3)
        else:
            self._graphs[kind] = graph, places

    def _taking(self) -> AbstractContextManager[None]:
        """Let gradients stay as narrow as they come, where nobody adds to them."""
        descent = self.parts.descent
        if descent is None or self.recipe.accumulate > 1:
            return nullcontext()
        taking: AbstractContextManager[None] = descent.capturing()
        return taking

    def bad_step(self) -> int | None:
        """Wait for the device, and give the first step whose loss or gradient was bad."""
        step = int(self.first_bad)
        return None if step < 0 else step

    def state(self) -> dict[str, Any]:
        """Give what a resumed run needs of the step itself; all ranks have to ask."""
        return {
            "count": self.count,
            "scale": self.scale.value,
            "good_steps": self.scale.good_steps,
            "meter": self.meter.state(),
            "watch": self.watch.state(),
        }

    def restore(self, state: dict[str, Any], *, first: bool = True) -> None:
        """Go on from a saved state, in place; sums over all ranks go to the first."""
        self.count.copy_(state["count"])
        self.scale.value.copy_(state["scale"])
        self.scale.good_steps.copy_(state["good_steps"])
        self.meter.restore(state["meter"], first=first)
        self.watch.restore(state["watch"], first=first)
        self.first_bad.fill_(-1)

    def reset(self) -> None:
        """Begin another run, in place: what was captured stays valid."""
        self.count.zero_()
        self.scale.reset()
        self.meter.reset()
        self.watch.reset()
        self.first_bad.fill_(-1)


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect garbage now and not in between: a graph of an earlier run that is freed during a capture ruins it."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def is_finite(value: Float[Tensor, ""]) -> Bool[Tensor, ""]:
    """Say whether a number is finite, in two kernels; torch's own `isfinite` takes four."""
    return (value - value) == 0


def _compiler_errors() -> tuple[type[BaseException], ...]:
    """Name what the compiler raises, if it was loaded; loading it takes a second."""
    module = sys.modules.get("torch._dynamo.exc")
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def _ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is, or was caused by, a lack of device memory."""
    reasons: list[BaseException | None] = [error]
    while reasons:
        reason = reasons.pop()
        if isinstance(reason, torch.OutOfMemoryError):
            return True
        if reason is not None:
            reasons += [getattr(reason, "inner_exception", None), reason.__cause__, reason.__context__]
    return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
