"""Calibration in Lightning: a callback that watches the loss of any LightningModule.

The loss is an attribute of the module, so Lightning moves it, gives its parameters to `self.parameters()` and saves it
with the checkpoint. `CalibrationCallback` does the rest. It sees what the module's own `validation_step` and
`test_step` hand to the loss, or return as {"logits": ..., "labels": ...}, and logs through the module's `self.log`

    val_accuracy, val_nll, val_ece, val_aece, val_over_ece, val_under_ece, and the same for test_
    train_gate_positive, train_gate_negative, train_alpha, train_flip_rate     of a FeDLaS loss, once an epoch

with `/dataloader_idx_0`, `/dataloader_idx_1` and so on behind the name where there are several loaders of one kind, as
Lightning does it; and it calls the loss's `end_epoch`, with the validation set, the first of several, before the
checkpoint of the epoch is written.

Both names of the package work: `import lightning.pytorch` and `import pytorch_lightning`.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence, Sized
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedlas.errors import MissingPackageError, UserError
from fedlas.extras import needed
from fedlas.integrations.base import Gate, ValidationMetrics
from fedlas.losses.base import AbstractLoss
from fedlas.predictions import Predictions

PAIR = {"logits", "labels"}


def _callbacks() -> tuple[type, ...]:
    """Find the class that callbacks derive from, once for each name under which Lightning is loaded."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    missing: ImportError | None = None
    for name in loaded or names:
        try:
            first = import_module(name)
        except ImportError as error:
            missing = missing or error
            continue
        others = [sys.modules[other] for other in loaded if other != name]
        return tuple(dict.fromkeys(package.Callback for package in (first, *others)))
    assert missing is not None
    raise MissingPackageError(needed("lightning", "integrations", missing)) from missing


if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
else:
    _Callback = type("_Callback", _callbacks(), {})


class CalibrationCallback(_Callback):
    """Logs calibration and the state of the gate, and ends the epochs of the loss.

    Args:
        loss: the name of the module's loss, as in "loss" or "task.loss"; found by itself where there is only one.
        bins: how many bins calibration errors have.
    """

    def __init__(self, loss: str | None = None, bins: int = 15) -> None:
        super().__init__()
        self.loss_name = loss
        self.bins = bins
        self._loss: AbstractLoss | None = None
        self._hook: Any = None
        self._gate: Gate | None = None
        self._numbers: list[ValidationMetrics] = []  # of each loader, while validation or a test goes on
        self._batches: list[float] = []
        self._loader: int | None = None  # known where there are several
        self._logged: set[int] = set()
        self._index: Tensor | None = None
        self._saw = False
        self._ended_epoch: int | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Find the loss and watch its calls."""
        self._loss = _found(pl_module, self.loss_name)
        if stage == "fit" or self._gate is None:  # a checkpoint to go on from is read after this
            self._gate, self._ended_epoch = Gate(self._loss), None
        self._hook = self._loss.register_forward_hook(self._see, with_kwargs=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Leave the loss as it was."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Note what the gate did to the batch."""
        index, self._index = self._index, None
        assert self._gate is not None
        self._gate.add(index, None if index is None else _training_samples(trainer))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch of the loss, if validation has not."""
        self._end_epoch(trainer, pl_module, None)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Begin to count."""
        self._start(trainer.num_val_batches)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the numbers of validation; at the end of an epoch, let the loss learn from them."""
        numbers, self._numbers = self._numbers, []
        if not numbers or trainer.sanity_checking:
            return
        self._log_rest(pl_module, "val_", numbers)
        if trainer.state.fn == "fit" and trainer.is_last_batch:
            self._end_epoch(trainer, pl_module, numbers[0].predictions())

    def on_validation_batch_start(
        self,
        trainer: Any,  # noqa: ARG002
        pl_module: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int | None = None,  # given where there are several, one after the other
    ) -> None:
        """Learn whose batch it is."""
        self._loader = dataloader_idx

    def on_validation_batch_end(  # noqa: PLR0917
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,  # noqa: ARG002
        batch_idx: int,
        dataloader_idx: int | None = None,
    ) -> None:
        """Look at what the step returns, where it has not called the loss; log the numbers of a loader that ends."""
        if not self._saw and self._numbers and isinstance(outputs, Mapping) and {*outputs} >= PAIR:
            self._numbers[self._loader or 0].add(outputs["logits"], outputs["labels"])
        self._saw = False
        # Here, and not when all have ended: Lightning would put the numbers of one loader into the rows of all.
        if dataloader_idx is not None and batch_idx + 1 == self._batches[dataloader_idx]:
            self._logged.add(dataloader_idx)
            if not trainer.sanity_checking:
                prefix = "test_" if trainer.testing else "val_"
                _log(pl_module, prefix, self._numbers[dataloader_idx].read(), batch_size=1)

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Begin to count."""
        self._start(trainer.num_test_batches)

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Log the numbers of the test."""
        numbers, self._numbers = self._numbers, []
        if numbers:
            self._log_rest(pl_module, "test_", numbers)

    def state_dict(self) -> dict[str, Any]:
        """Give the history of the gate and the latest epoch to a checkpoint."""
        history = {} if self._gate is None else self._gate.state()
        return {"ended_epoch": self._ended_epoch, **history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        state = dict(state_dict)
        self._ended_epoch = state.pop("ended_epoch")
        assert self._gate is not None
        self._gate.restore(state)

    def _start(self, batches: Sequence[float]) -> None:
        """Begin to count the samples of each loader, given how many batches each has."""
        assert self._loss is not None
        loss = self._loss
        self._batches, self._loader, self._logged = list(batches), None, set()
        places = range(max(1, len(self._batches)))
        self._numbers = [
            ValidationMetrics(self.bins, loss.ignore_index, keep=loss.needs_validation and place == 0)
            for place in places
        ]

    def _see(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        """Look at what the module gives to its loss."""
        if torch.compiler.is_compiling():  # the numbers are counted outside of any graph
            return
        given = dict(zip(("logits", "labels", "features", "index"), args, strict=False)) | kwargs
        if self._numbers:
            self._numbers[self._loader or 0].add(given["logits"], given["labels"])
            self._saw = True
        else:
            self._index = given.get("index")

    def _log_rest(self, module: Any, prefix: str, numbers: Sequence[ValidationMetrics]) -> None:
        """Log what is not logged yet: the numbers of a single loader, or of those whose length was not known."""
        found = {place: one.read() for place, one in enumerate(numbers) if place not in self._logged}
        several = len(numbers) > 1 and (self._loader is not None or bool(self._logged))
        for place, values in found.items():
            end = f"/dataloader_idx_{place}" if several else ""
            _log(module, prefix, {name + end: value for name, value in values.items()}, add_dataloader_idx=False)
        if not any(one.filled for one in numbers):
            step = "test_step" if prefix == "test_" else "validation_step"
            advice = 'call it there, outside of compiled code, or return {"logits": logits, "labels": labels}'
            warnings.warn(f"nothing to log: {step} never called the loss; {advice}", stacklevel=2)

    def _end_epoch(self, trainer: Any, module: Any, validation: Predictions | None) -> None:
        if self._ended_epoch == trainer.current_epoch:
            return
        self._ended_epoch = trainer.current_epoch
        assert self._loss is not None
        assert self._gate is not None
        self._loss.end_epoch(validation)
        for name, value in self._gate.read().items():
            module.log(f"train_{name}", value, sync_dist=True)


def _log(module: Any, prefix: str, found: Mapping[str, float], **how: Any) -> None:
    for name, value in found.items():
        module.log(prefix + name, value, sync_dist=True, **how)  # equal on all ranks; Lightning would warn otherwise


def _found(module: nn.Module, name: str | None) -> AbstractLoss:
    """Find the loss of a module, by its name or because there is only one."""
    losses = {path: part for path, part in module.named_modules() if isinstance(part, AbstractLoss)}
    if name is None and len(losses) == 1:
        return next(iter(losses.values()))
    if name in losses:
        return losses[name]
    known = ", ".join(losses) or "none"
    asked = "which loss is meant" if name is None else f"there is no loss {name!r}"
    raise UserError(
        f"{asked}: {type(module).__name__} has {known}; assign self.loss = fedlas.build_loss(...) in its __init__, "
        "or pass CalibrationCallback(loss=...) the name of one of several"
    )


def _training_samples(trainer: Any) -> int | None:
    """Count the samples that sample numbers count in; unknown where the data are a stream or several sets."""
    data = getattr(trainer.train_dataloader, "dataset", None)
    return len(data) if isinstance(data, Sized) else None
