"""Run training steps: the first ones eagerly, then by replaying a CUDA graph of the same step.

The first steps of a batch size run eagerly, as real steps, and warm everything up; then the step is captured and from
then on replayed. Capturing changes no number: an uncompiled captured step equals the eager one bit for bit.
"""

import gc
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedlas.training.compilation import Inputs, first_line, ran_out_of_memory, run_with_fallback
from fedlas.training.step import TrainStep

WARM_UP_STEPS = 3  # eager steps between the one that compiles and the capture: enough for autotuning and allocation


class StepRunner:
    """Runs the step of each batch, eagerly or by replaying a captured graph.

    Args:
        step: the step.
        capture: whether to capture the step; only on a CUDA device.
    """

    def __init__(self, step: TrainStep, *, capture: bool = True) -> None:
        self.step = step
        self.capture = capture and step.device.type == "cuda"
        self.graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Inputs]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.capture else None  # batches of all sizes share memory
        self._eager_steps: Counter[tuple[Any, ...]] = Counter()

    def run(self, *inputs: Tensor) -> None:
        """Train on a batch."""
        kind = tuple((tuple(value.shape), value.dtype) for value in inputs)
        if self.capture and kind not in self.graphs and self._eager_steps[kind] > WARM_UP_STEPS:
            self._capture(kind, inputs)
        if kind in self.graphs:
            graph, static_inputs = self.graphs[kind]
            for target, value in zip(static_inputs, inputs, strict=True):
                target.copy_(value, non_blocking=True)
            graph.replay()
            return
        if kind in self._eager_steps:
            self.step(*inputs)
        else:  # the first batch of a size is compiled
            run_with_fallback(self.step, lambda: self.step(*inputs))
        self._eager_steps[kind] += 1

    def _capture(self, kind: tuple[Any, ...], inputs: Inputs) -> None:
        """Record a step without executing it; if it cannot be captured, all steps stay eager."""
        static_inputs = tuple(value.clone() for value in inputs)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.step.device)
        # Other threads may use the device during a capture, such as the pin-memory thread of a loader.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        try:
            with without_collector(), recording:
                self.step(*static_inputs)
        except RuntimeError as error:
            if ran_out_of_memory(error):
                raise
            self.capture = False
            warnings.warn(f"not captured, so training is slow: {first_line(error)}", UserWarning, stacklevel=3)
        else:
            self.graphs[kind] = graph, static_inputs


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect garbage before a capture: freeing a graph of an earlier run during a capture invalidates it."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
