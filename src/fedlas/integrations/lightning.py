"""Calibration in Lightning: a callback that watches the loss of any LightningModule.

The loss is an attribute of the module, so Lightning moves it, gives its parameters to `self.parameters()` and saves it
with the checkpoint. `CalibrationCallback` does the rest. It sees what the module's own `validation_step` and
`test_step` hand to the loss, or return as {"logits": ..., "labels": ...}, and logs through the module's `self.log`

    val_accuracy, val_nll, val_ece, val_aece, val_o_ece, val_u_ece, and the same for test_
    train_gate_positive, train_gate_negative, train_alpha, train_flip_rate     of a FeDLaS loss, once an epoch

and it calls the loss's `end_epoch`, with the validation set, before the checkpoint of the epoch is written.

Both names of the package work: `import lightning.pytorch` and `import pytorch_lightning`.
"""

import sys
import warnings
from collections.abc import Mapping, Sized
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedlas.integrations.base import Gate, Numbers, learns_between_epochs
from fedlas.losses.base import AbstractLoss
from fedlas.predictions import Predictions

PAIR = {"logits", "labels"}


def _callbacks() -> tuple[type, ...]:
    """Find the class that callbacks derive from, once for each name under which Lightning is loaded."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    for name in loaded or names:
        try:
            first = import_module(name)
        except ImportError:
            continue
        others = [sys.modules[other] for other in loaded if other != name]
        return tuple(dict.fromkeys(package.Callback for package in (first, *others)))
    raise ImportError("lightning is needed for this: pip install 'fedlas[integrations]'")


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
        self._numbers: Numbers | None = None
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
        self._start()

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the numbers of validation; at the end of an epoch, let the loss learn from them."""
        numbers = self._numbers
        self._numbers = None
        if numbers is None or trainer.sanity_checking:
            return
        self._log(pl_module, "val_", numbers)
        if trainer.state.fn == "fit" and trainer.is_last_batch:
            self._end_epoch(trainer, pl_module, numbers.predictions())

    def on_validation_batch_end(  # noqa: PLR0917
        self,
        trainer: Any,  # noqa: ARG002
        pl_module: Any,  # noqa: ARG002
        outputs: Any,
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
        dataloader_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Look at what the step returns, where it has not called the loss."""
        if not self._saw and self._numbers is not None and isinstance(outputs, Mapping) and {*outputs} >= PAIR:
            self._numbers.add(outputs["logits"], outputs["labels"])
        self._saw = False

    on_test_batch_end = on_validation_batch_end

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Begin to count."""
        self._start()

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Log the numbers of the test."""
        numbers, self._numbers = self._numbers, None
        if numbers is not None:
            self._log(pl_module, "test_", numbers)

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

    def _start(self) -> None:
        assert self._loss is not None
        keep = learns_between_epochs(self._loss)
        self._numbers = Numbers(self.bins, self._loss.ignore_index, keep=keep)

    def _see(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        """Look at what the module gives to its loss."""
        if torch.compiler.is_compiling():  # the numbers are counted outside of any graph
            return
        given = dict(zip(("logits", "labels", "features", "index"), args, strict=False)) | kwargs
        if self._numbers is not None:
            self._numbers.add(given["logits"], given["labels"])
            self._saw = True
        else:
            self._index = given.get("index")

    def _log(self, module: Any, prefix: str, numbers: Numbers) -> None:
        found = numbers.read()
        if not found:
            step = "test_step" if prefix == "test_" else "validation_step"
            advice = 'call it there, outside of compiled code, or return {"logits": logits, "labels": labels}'
            warnings.warn(f"nothing to log: {step} never called the loss; {advice}", stacklevel=2)
        for name, value in found.items():
            module.log(prefix + name, value, sync_dist=True)  # equal on all ranks; Lightning would warn otherwise

    def _end_epoch(self, trainer: Any, module: Any, validation: Predictions | None) -> None:
        if self._ended_epoch == trainer.current_epoch:
            return
        self._ended_epoch = trainer.current_epoch
        assert self._loss is not None
        assert self._gate is not None
        self._loss.end_epoch(validation)
        for name, value in self._gate.read().items():
            module.log(f"train_{name}", value, sync_dist=True)


def _found(module: nn.Module, name: str | None) -> AbstractLoss:
    """Find the loss of a module, by its name or because there is only one."""
    losses = {path: part for path, part in module.named_modules() if isinstance(part, AbstractLoss)}
    if name is None and len(losses) == 1:
        return next(iter(losses.values()))
    if name in losses:
        return losses[name]
    known = ", ".join(losses) or "none"
    asked = "which loss is meant" if name is None else f"there is no loss {name!r}"
    raise ValueError(
        f"{asked}: {type(module).__name__} has {known}; assign self.loss = fedlas.build_loss(...) in its __init__, "
        "or pass CalibrationCallback(loss=...) the name of one of several"
    )


def _training_samples(trainer: Any) -> int | None:
    """Count the samples that sample numbers count in; unknown where the data are a stream or several sets."""
    data = getattr(trainer.train_dataloader, "dataset", None)
    return len(data) if isinstance(data, Sized) else None
