"""Calibration in Lightning: a callback that monitors the loss of any LightningModule.

The loss is an attribute of the module, so Lightning moves it, includes its parameters in `self.parameters()` and saves
it in checkpoints. `CalibrationCallback` records the inputs of the loss in `validation_step` and `test_step`, or the
outputs {"logits": ..., "labels": ...} of these methods, and logs with `self.log` of the module

    val_accuracy, val_nll, val_ece, val_aece, val_over_ece, val_under_ece, and the same for test_
    train_gate_positive, train_gate_negative, train_alpha, train_flip_rate     of a FeDLaS loss, per epoch

with the suffix `/dataloader_idx_0`, `/dataloader_idx_1` and so on if there are several loaders, as in Lightning. It
calls `end_epoch` of the loss with the latest predictions of the epoch on the (first) validation set, before the
checkpoint of the epoch is written.

Both package names work: `import lightning.pytorch` and `import pytorch_lightning`.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedlas.errors import MissingPackageError, UserError
from fedlas.extras import needed
from fedlas.integrations.base import Gate, ValidationMetrics, count_samples
from fedlas.losses.base import AbstractLoss
from fedlas.predictions import Predictions

PAIR = {"logits", "labels"}


def _callbacks() -> tuple[type, ...]:
    """Return the base class of callbacks for each package name under which Lightning is imported."""
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
    """Logs calibration metrics and gate statistics, and calls `end_epoch` of the loss.

    Args:
        loss: name of the loss in the module, such as "loss" or "task.loss"; optional if there is only one.
        bins: number of bins of calibration errors.
    """

    def __init__(self, loss: str | None = None, bins: int = 15) -> None:
        super().__init__()
        self.loss_name = loss
        self.bins = bins
        self._loss: AbstractLoss | None = None
        self._hook: Any = None
        self._gate: Gate | None = None
        self._numbers: list[ValidationMetrics] = []  # one per loader, during validation or a test
        self._batches: list[float] = []
        self._loader: int | None = None  # None if there is only one
        self._logged: set[int] = set()
        self._index: Tensor | None = None
        self._called_loss = False
        self._ended_epoch: int | None = None
        self._validation: Predictions | None = None  # the latest ones since the last `end_epoch`

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Find the loss and register a hook for its calls."""
        self._loss = _find_loss(pl_module, self.loss_name)
        if stage == "fit" or self._gate is None:  # checkpoints are loaded after `setup`
            self._gate, self._ended_epoch, self._validation = Gate(self._loss), None, None
        if stage == "fit":
            self._loss.disable_epoch_check()
        self._hook = self._loss.register_forward_hook(self._record, with_kwargs=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Warn if the loss needs a validation set and the Trainer has none."""
        if not trainer.enable_validation:
            self._warn_without_validation()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Warn if the loss needs predictions on the validation set and no epoch had any."""
        if trainer.enable_validation and self._ended_epoch is None:
            self._warn_without_validation()

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Add the gate statistics of the batch."""
        index, self._index = self._index, None
        assert self._gate is not None
        self._gate.add(index, None if index is None else count_samples(trainer.train_dataloader))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """End the epoch of the loss, if validation did not."""
        self._end_epoch(trainer, pl_module)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Start the metrics."""
        self._start(trainer.num_val_batches)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the validation metrics; in an epoch, store the predictions, and at its end, pass them to the loss."""
        numbers, self._numbers = self._numbers, []
        if not numbers or trainer.sanity_checking:
            return
        self._log_rest(pl_module, "val_", numbers)
        if trainer.state.fn != "fit":
            return
        self._validation = numbers[0].predictions() if numbers[0].keep else None
        if trainer.is_last_batch:
            self._end_epoch(trainer, pl_module)

    def on_validation_batch_start(
        self,
        trainer: Any,  # noqa: ARG002
        pl_module: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int | None = None,  # passed if there are several loaders
    ) -> None:
        """Record the index of the loader."""
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
        """Add the outputs of a step that did not call the loss; log the metrics after the last batch of a loader."""
        if not self._called_loss and self._numbers and isinstance(outputs, Mapping) and {*outputs} >= PAIR:
            self._numbers[self._loader or 0].add(outputs["logits"], outputs["labels"])
        self._called_loss = False
        # Log after each loader rather than after all of them: otherwise Lightning assigns the values to all loaders.
        if dataloader_idx is not None and batch_idx + 1 == self._batches[dataloader_idx]:
            self._logged.add(dataloader_idx)
            if not trainer.sanity_checking:
                prefix = "test_" if trainer.testing else "val_"
                _log(pl_module, prefix, self._numbers[dataloader_idx].read(), batch_size=1)

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Start the metrics."""
        self._start(trainer.num_test_batches)

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Log the test metrics."""
        numbers, self._numbers = self._numbers, []
        if numbers:
            self._log_rest(pl_module, "test_", numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the gate statistics and the latest epoch, for a checkpoint."""
        history = {} if self._gate is None else self._gate.state()
        return {"ended_epoch": self._ended_epoch, **history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        state = dict(state_dict)
        self._ended_epoch = state.pop("ended_epoch")
        assert self._gate is not None
        self._gate.restore(state)

    def _start(self, batches: Sequence[float]) -> None:
        """Create the metrics of each loader from the numbers of batches."""
        assert self._loss is not None
        loss = self._loss
        self._batches, self._loader, self._logged = list(batches), None, set()
        loaders = range(max(1, len(self._batches)))
        self._numbers = [
            ValidationMetrics(self.bins, loss.ignore_index, keep=loss.needs_validation and loader == 0)
            for loader in loaders
        ]

    def _record(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        """Record the inputs of the loss."""
        if torch.compiler.is_compiling():  # metrics are computed outside of compiled graphs
            return
        inputs = dict(zip(("logits", "labels", "features", "index"), args, strict=False)) | kwargs
        if self._numbers:
            self._numbers[self._loader or 0].add(inputs["logits"], inputs["labels"])
            self._called_loss = True
        else:
            self._index = inputs.get("index")

    def _log_rest(self, module: Any, prefix: str, numbers: Sequence[ValidationMetrics]) -> None:
        """Log the metrics that were not logged after a batch: of a single loader, or of loaders of unknown length."""
        remaining = {loader: metrics.read() for loader, metrics in enumerate(numbers) if loader not in self._logged}
        several = len(numbers) > 1 and (self._loader is not None or bool(self._logged))
        for loader, values in remaining.items():
            end = f"/dataloader_idx_{loader}" if several else ""
            _log(module, prefix, {name + end: value for name, value in values.items()}, add_dataloader_idx=False)
        if not any(metrics.has_samples for metrics in numbers):
            step = "test_step" if prefix == "test_" else "validation_step"
            advice = 'call it there, outside of compiled code, or return {"logits": logits, "labels": labels}'
            warnings.warn(f"nothing to log: {step} never called the loss; {advice}", stacklevel=2)

    def _end_epoch(self, trainer: Any, module: Any) -> None:
        """End the epoch of the loss once; skip it if the loss needs validation predictions and there are none."""
        assert self._loss is not None
        assert self._gate is not None
        if self._ended_epoch == trainer.current_epoch or (self._loss.needs_validation and self._validation is None):
            return
        self._ended_epoch = trainer.current_epoch
        validation, self._validation = self._validation, None
        self._loss.end_epoch(validation)
        for name, value in self._gate.read().items():
            module.log(f"train_{name}", value, sync_dist=True)

    def _warn_without_validation(self) -> None:
        assert self._loss is not None
        if self._loss.needs_validation:
            warnings.warn(
                f"the loss {self._loss.name!r} learns from a validation set between epochs, but no epoch has "
                "predictions on one, so it does not change; pass one to trainer.fit, and validate more often",
                stacklevel=2,
            )


def _log(module: Any, prefix: str, values: Mapping[str, float], **options: Any) -> None:
    for name, value in values.items():
        module.log(
            prefix + name, value, sync_dist=True, **options
        )  # equal on all ranks; Lightning would warn otherwise


def _find_loss(module: nn.Module, name: str | None) -> AbstractLoss:
    """Return the loss of a module, by its name or because it is the only one."""
    losses = {path: part for path, part in module.named_modules() if isinstance(part, AbstractLoss)}
    if name is None and len(losses) == 1:
        return next(iter(losses.values()))
    if name in losses:
        return losses[name]
    names = ", ".join(losses) or "none"
    problem = "which loss is meant" if name is None else f"there is no loss {name!r}"
    raise UserError(
        f"{problem}: {type(module).__name__} has {names}; assign self.loss = fedlas.build_loss(...) in its __init__, "
        "or pass CalibrationCallback(loss=...) the name of one of several"
    )
