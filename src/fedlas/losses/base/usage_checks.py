"""Warnings about probabilities given as logits, parameters that are not updated, and epochs whose end is not reported.

Probabilities are noticed in the first step, other misuse only over many steps. Steps are counted in Python. Tensors on
a GPU are read in evaluation and at the end of an epoch only, because reading them synchronises the host. Compiled steps
are not observed.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from fedlas.errors import warn_caller
from fedlas.losses.base.input_checks import is_eager_on_cpu
from fedlas.predictions.arrays import are_probabilities

STEPS_WITHOUT_UPDATE = 200  # more than the batches over which gradients are usually accumulated
VISITS_WITHOUT_END = 3
STEPS_OF_AN_EPOCH = 10  # fewer could be the parts of a batch
EVALUATIONS_WITHOUT_END = 30  # more than the evaluations within one epoch
TRACKED = 64  # samples whose visits are counted; when sampling with replacement, some of many are rarely drawn


class LogitsCheck:
    """Warns once if the logits of the first training step are probabilities; only on the CPU."""

    def __init__(self) -> None:
        self.finished = False

    def before_step(self, name: str, logits: Tensor) -> None:
        """Check the logits of the first step."""
        if not self.finished and is_eager_on_cpu(logits) and are_probabilities(logits):
            warn_caller(
                f"every row of the logits of the loss {name!r} sums to 1, as after a softmax; the loss computes the "
                "softmax itself: pass the output of the last linear layer"
            )
        self.finished = True


class UpdateCheck:
    """Warns once about parameters of a loss that no optimizer updates."""

    def __init__(self) -> None:
        self.finished = False
        self.steps = 0
        self.epochs = 0
        self.versions: list[int] | None = None
        self.first_values: Tensor | None = None

    def before_step(self, name: str, loss: nn.Module) -> None:
        """Count a training step, and warn after many steps without an update."""
        if self.finished or self.steps > STEPS_WITHOUT_UPDATE:  # on a GPU the check is at the end of an epoch
            return
        trained = _trained(loss)
        self.finished = not trained
        if not trained or _is_captured(trained[0]):
            return
        self._compare_versions(trained)
        self.steps += 1
        if self.steps > STEPS_WITHOUT_UPDATE and not trained[0].is_cuda:
            self._warn_if_unchanged(name, trained)

    def after_step(self, loss: nn.Module) -> None:
        """Record the parameter versions after the step, which changes them itself in a distributed run."""
        if not self.finished and self.steps <= STEPS_WITHOUT_UPDATE:
            self.versions = [parameter._version for parameter in _trained(loss)]

    def end_epoch(self, name: str, loss: nn.Module) -> None:
        """Warn if nothing was updated in two epochs, or in many steps."""
        trained = _trained(loss)
        if self.finished or not trained:
            return
        known = self.first_values is not None
        self._compare_versions(trained)
        self.epochs += 1
        known &= self.steps > 0 or any(
            parameter.grad is not None for parameter in trained
        )  # compiled steps are not counted
        if known and (self.epochs > 1 or self.steps > STEPS_WITHOUT_UPDATE):
            self._warn_if_unchanged(name, trained)
        self.after_step(loss)

    def _compare_versions(self, trained: list[nn.Parameter]) -> None:
        # Optimizers of torch increase the version of a parameter; fused optimizers and replayed CUDA graphs do not.
        if self.versions is not None and self.versions != [parameter._version for parameter in trained]:
            self._finish()
        elif self.first_values is None:
            self.first_values = _smallest(trained).detach().clone()

    def _warn_if_unchanged(self, name: str, trained: list[nn.Parameter]) -> None:
        if self.finished or self.first_values is None:
            return
        values = _smallest(trained).detach()
        if torch.equal(values, self.first_values.to(values)):
            warn_caller(
                f"no optimizer updates the parameters of the loss {name!r}; build the optimizer with "
                "fedlas.parameters(net, loss), or freeze them with loss.requires_grad_(False)"
            )
        self._finish()

    def _finish(self) -> None:
        self.finished = True
        self.first_values = None


class EpochCheck:
    """Warns once if `end_epoch` of a loss that learns between epochs is never called."""

    def __init__(self) -> None:
        self.finished = False
        self.trains = False  # whether the latest call was a training step
        self.evaluations = 0
        self.steps = self.largest = 0
        self.smaller: list[tuple[int, int]] = []  # step and size of the latest batches below the largest size
        self.samples: Tensor | None = None
        self.visits: Tensor | None = None

    def before_step(self, name: str, call: str, rows: int, index: Tensor | None) -> None:
        """Count smaller last batches and the visits of the first batch's samples; warn after several epochs."""
        self.trains = True
        if not self.finished:
            self._count_last_batches(name, call, rows)
        if self.finished or index is None or index.ndim != 1 or not len(index) or _is_captured(index):
            return
        if self.samples is None or self.visits is None or self.samples.device != index.device:
            self.samples = index[:TRACKED].clone().long()
            self.visits = torch.zeros_like(self.samples)
        # Not torch.isin, which synchronises the host with a GPU.
        self.visits = self.visits + (self.samples[:, None] == index.long()).any(1)
        if index.device.type == "cpu":
            self._warn_if_visited(name, call)

    def _count_last_batches(self, name: str, call: str, rows: int) -> None:
        """Warn after several batches of one smaller size at equal distances, such as the last one of each epoch."""
        self.steps, self.largest = self.steps + 1, max(self.largest, rows)
        if rows == self.largest:
            return
        self.smaller = [*self.smaller[1 - VISITS_WITHOUT_END :], (self.steps, rows)]
        distances = {later - earlier for (earlier, _), (later, _) in pairwise(self.smaller)}
        if len(self.smaller) == VISITS_WITHOUT_END and len(distances) == len({size for _, size in self.smaller}) == 1:
            steps = distances.pop()
            if steps >= STEPS_OF_AN_EPOCH:
                self._warn(name, call, f"every {steps} steps a batch was smaller, as at the end of an epoch")

    def evaluated(self, name: str, call: str) -> None:
        """Count evaluations between training steps, and warn after many."""
        if self.finished or not self.trains:
            return
        self.trains = False
        self.evaluations += 1
        if self.visits is not None:
            self._warn_if_visited(name, call)
        elif self.evaluations >= EVALUATIONS_WITHOUT_END:
            self._warn(name, call, f"training was interrupted by {self.evaluations} evaluations")

    def finish(self) -> None:
        """Stop checking: the end of an epoch was reported, or the warning was issued."""
        self.finished = True
        self.samples = self.visits = None

    def _warn_if_visited(self, name: str, call: str) -> None:
        least = 0 if self.visits is None else int(self.visits.min())
        if least >= VISITS_WITHOUT_END:
            self._warn(
                name,
                call,
                f"samples of the same index were seen {least} times (index is the position in the training set)",
            )

    def _warn(self, name: str, call: str, reason: str) -> None:
        self.finish()
        warn_caller(
            f"the loss {name!r} learns between epochs: {reason}, but end_epoch was not called; call {call} after each"
        )


def _trained(loss: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in loss.parameters() if parameter.requires_grad and not parameter.is_inference()]


def _smallest(parameters: list[nn.Parameter]) -> nn.Parameter:
    return min(parameters, key=lambda parameter: parameter.numel())


def _is_captured(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, where values cannot be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
