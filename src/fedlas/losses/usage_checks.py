"""Warnings about a training loop that does not give a loss what it needs.

Misuse of this kind shows only over many steps: parameters of the loss that no optimizer updates, or epochs whose end is
never reported. Steps are counted in Python. Tensors on a GPU are read at the end of an epoch, or once in `READ_EVERY`
steps, because reading them makes the host wait. Compiled steps are not observed, except at the ends of epochs.
"""

import warnings

import torch
from torch import Tensor, nn

STEPS_WITHOUT_UPDATE = 100
PASSES_WITHOUT_END = 3
STEPS_WITHOUT_END = 10_000
READ_EVERY = 1000


class UpdateCheck:
    """Warns once about parameters that receive gradients and are never updated."""

    def __init__(self) -> None:
        self.finished = False
        self.steps = 0
        self.has_gradients = False
        self.versions: list[int] | None = None
        self.first_values: Tensor | None = None

    def before_step(self, name: str, loss: nn.Module) -> None:
        """Count a training step, and warn after many steps without an update."""
        if self.finished:
            return
        trained = _trained(loss)
        self.finished = not trained
        if not trained or _is_captured(trained[0]):
            return
        self._look(trained)
        self.steps += 1
        if self.steps > STEPS_WITHOUT_UPDATE:
            self._warn_if_unchanged(name, trained)

    def after_step(self, loss: nn.Module) -> None:
        """Note the versions of the parameters, which a distributed step changes itself."""
        if not self.finished:
            self.versions = [parameter._version for parameter in _trained(loss)]

    def end_epoch(self, name: str, loss: nn.Module) -> None:
        """Warn if nothing was updated since the first look."""
        trained = _trained(loss)
        if self.finished or not trained:
            return
        known = self.first_values is not None
        self._look(trained)
        if known:
            self._warn_if_unchanged(name, trained)
        self.after_step(loss)

    def _look(self, trained: list[nn.Parameter]) -> None:
        # An optimizer of torch raises the version of what it updates; others, and replayed CUDA graphs, do not.
        if self.versions is not None and self.versions != [parameter._version for parameter in trained]:
            self._finish()
            return
        self.has_gradients |= any(parameter.grad is not None for parameter in trained)
        if self.first_values is None:
            self.first_values = _smallest(trained).detach().clone()

    def _warn_if_unchanged(self, name: str, trained: list[nn.Parameter]) -> None:
        if self.finished or not self.has_gradients or self.first_values is None:
            return
        values = _smallest(trained).detach()
        if torch.equal(values, self.first_values.to(values)):
            warnings.warn(
                f"the parameters of the loss {name!r} receive gradients but no optimizer updates them; build the "
                "optimizer with fedlas.parameters(net, loss), or freeze them with loss.requires_grad_(False)",
                UserWarning,
                stacklevel=2,
            )
        self._finish()

    def _finish(self) -> None:
        self.finished = True
        self.first_values = None


class EpochCheck:
    """Warns once about a loss that learns between epochs and whose `end_epoch` is never called."""

    def __init__(self) -> None:
        self.finished = False
        self.steps = 0
        self.passes = 1
        self.was_evaluated = False
        self.sample: Tensor | None = None
        self.visits: Tensor | None = None

    def before_step(self, name: str, call: str, index: Tensor | None) -> None:
        """Count a training step, and warn where several epochs seem to have passed."""
        if self.finished or (index is not None and _is_captured(index)):
            return
        self.steps += 1
        if self.was_evaluated:
            self.was_evaluated = False
            self.passes += 1
        visits = 0 if index is None or index.ndim != 1 or not len(index) else self._visits(index)
        if visits >= PASSES_WITHOUT_END:
            reason = f"a training sample was seen {visits} times"
        elif self.passes >= PASSES_WITHOUT_END:
            reason = f"training was interrupted by {self.passes - 1} evaluations"
        elif index is None and self.steps >= STEPS_WITHOUT_END:
            reason = f"there were {self.steps:,} training steps"
        else:
            return
        self.finish()
        warnings.warn(
            f"the loss {name!r} learns between epochs: {reason}, but end_epoch was not called; after each epoch call "
            f"{call}",
            UserWarning,
            stacklevel=2,
        )

    def evaluated(self) -> None:
        """Note that the loss was used for evaluation since the latest training step."""
        self.was_evaluated = self.steps > 0

    def finish(self) -> None:
        """Stop looking: the end of an epoch was reported, or the warning was given."""
        self.finished = True
        self.sample = self.visits = None

    def _visits(self, index: Tensor) -> int:
        """Count the batches that held the first sample of the first batch, as far as that is known by now."""
        if self.sample is None or self.visits is None or self.sample.device != index.device:
            self.sample, self.visits = index[:1].clone(), torch.zeros((), dtype=torch.int64, device=index.device)
        self.visits = self.visits + (index == self.sample).any()
        readable = index.device.type == "cpu" or self.steps % READ_EVERY == 0
        return int(self.visits) if readable else 0


def _trained(loss: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in loss.parameters() if parameter.requires_grad and not parameter.is_inference()]


def _smallest(parameters: list[nn.Parameter]) -> nn.Parameter:
    return min(parameters, key=lambda parameter: parameter.numel())


def _is_captured(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, where values cannot be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
