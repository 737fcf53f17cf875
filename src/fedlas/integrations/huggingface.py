"""Calibration losses for the Hugging Face Trainer, through compute_loss_func, compute_metrics and callbacks.

    calibration = Calibration(model, loss)
    Trainer(model, args, compute_loss_func=calibration.compute_loss, compute_metrics=calibration.compute_metrics,
            callbacks=[calibration], ...)

The loss becomes a submodule, `model.calibration_loss`, so that the Trainer trains the gate of FeDLaS with the network
and moves, wraps, saves and restores both. Features are recorded by a hook and are not part of the outputs, so the
configuration does not change.

With gradient accumulation, `num_items_in_batch` = n is the number of samples of all micro-batches. The loss of a
micro-batch is Σ_i l_i / n, so that the gradients of the micro-batches add up to the gradient of the full batch. Batch
statistics of a loss (mu and sigma of FeDLaS, the terms of MMCE, MDCA and CRL) are computed for each micro-batch. Class
weights multiply l_i; the Trainer does not provide their sum, so the denominator is n, whereas `nn.CrossEntropyLoss`
divides by the sum of weights.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedlas.errors import MissingPackageError, UserError
from fedlas.extras import needed
from fedlas.integrations.base import Gate, ValidationMetrics, count_samples
from fedlas.losses.base import IGNORE_INDEX, AbstractLoss
from fedlas.models.base import WithFeatures
from fedlas.predictions import Predictions

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise MissingPackageError(needed("transformers", "integrations", missing)) from missing

NAME = "calibration_loss"


class Calibration(TrainerCallback):
    """Connects a model and a loss with the Trainer: loss function, metrics, and updates between epochs.

    Args:
        model: a classifier of images, sequences or tokens.
        loss: a loss of `fedlas.build_loss`.
        head: path of the last layer of the model, if `WithFeatures` does not find it.
        bins: number of bins of calibration errors.
    """

    def __init__(self, model: nn.Module, loss: AbstractLoss, *, head: str | None = None, bins: int = 15) -> None:
        if loss.reduction != "mean":
            raise UserError(f'the Trainer needs a loss with reduction="mean", not {loss.reduction!r}')
        if loss.ignore_index != IGNORE_INDEX:
            raise UserError(f"the Trainer counts labels other than {IGNORE_INDEX}; ignore_index cannot differ")
        if hasattr(model, NAME):
            raise UserError("this model already has a calibration loss; call remove() of its Calibration first")
        self.model, self.loss, self.bins = model, loss, bins
        self._body = _Body(model)
        self._net = WithFeatures(self._body, None if head is None else f"network.{head}")
        self._features: Tensor | None = None
        self._index: Tensor | None = None
        self._gate = Gate(loss)
        self._samples: int | None = None
        self._predictions: Predictions | None = None  # of the latest data set
        self._validation: Predictions | None = None  # of the first data set of the latest evaluation
        self._was_evaluated = False  # since the latest step
        self._loss_was_called = False
        self._epoch_is_over = False
        # Assign the loss after `WithFeatures`, which searches the last linear layer: a gate has linear layers too.
        model.add_module(NAME, loss.to(next(model.parameters()).device))
        self._own_forward = vars(model).get("forward")
        model.forward = self._recording_forward(model.forward)

    def compute_loss(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the loss of the latest outputs of the model: `compute_loss_func` of the Trainer."""
        self._loss_was_called = True
        if labels is None:
            raise UserError(
                "a loss needs labels; name their column 'labels', or set TrainingArguments(label_names=...)"
            )
        features, index = self._features, self._index
        self._features = self._index = None
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if features is None:
            raise RuntimeError("the model was not called before its loss; pass this model to the Trainer")
        if logits.ndim > 2 and labels.shape == logits.shape[:-1]:  # tokens: move the classes to axis 1
            logits, features = logits.movedim(-1, 1), features.movedim(-1, 1)
        if num_items_in_batch is None:
            value: Tensor = self.loss(logits, labels, features, index)
        else:
            # The Trainer counts the entries of labels; a soft label has one per class.
            per_label = logits.shape[1] if labels.is_floating_point() else 1
            parts = self.loss.parts(logits, labels, features, index).values()
            value = torch.stack([part.sum() for part in parts]).sum() * per_label / num_items_in_batch
        if self.loss.training:
            self._gate.add(index, self._samples)
        return value

    def compute_metrics(self, evaluated: Any) -> dict[str, float]:
        """Return accuracy, NLL and calibration errors of an evaluation: `compute_metrics` of the Trainer.

        Statistics of the gate of a FeDLaS loss since the previous evaluation are included.
        """
        outputs, labels = evaluated.predictions, torch.as_tensor(evaluated.label_ids)
        logits = torch.as_tensor(outputs[0] if isinstance(outputs, tuple) else outputs)
        if logits.ndim > 2 and labels.shape == logits.shape[:-1]:
            logits = logits.movedim(-1, 1)
        # The Trainer has gathered the samples of all processes.
        metrics = ValidationMetrics(self.bins, self.loss.ignore_index, keep=self.loss.needs_validation, shared=False)
        metrics.add(logits, labels)
        self._predictions = metrics.predictions()
        return metrics.read() | self._gate.read()

    def remove(self) -> nn.Module:
        """Remove the loss from the model and return the model, for example to save it."""
        delattr(self.model, NAME)
        self._net.unwrap()
        if self._own_forward is None:
            del self.model.forward  # restores the method of the class
        else:
            self.model.forward = self._own_forward
        return self.model

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Record the number of training samples, for the flip rate."""
        self._samples = count_samples(more.get("train_dataloader"))
        self._validation, self._was_evaluated = None, False
        self.loss.disable_epoch_check()
        if self.loss.needs_validation and args.eval_strategy == "no":
            self._warn_without_validation('set eval_strategy="epoch"')

    def _warn_without_validation(self, advice: str) -> None:
        warnings.warn(
            f"the loss {self.loss.name!r} learns from validation predictions between epochs, but there are none, "
            f"so it does not change; {advice}",
            stacklevel=2,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Warn once if the first step did not call the loss."""
        self._was_evaluated = False
        if not self._loss_was_called:
            self._loss_was_called = True
            warnings.warn(
                f"the Trainer did not call the loss {self.loss.name!r} in its first step, so the model is trained with "
                "another loss; pass compute_loss_func=calibration.compute_loss to the Trainer",
                stacklevel=2,
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """End the epoch of the loss, unless an evaluation follows; `on_evaluate` then does so before the checkpoint."""
        self._epoch_is_over = True
        if not control.should_evaluate:
            self._end_epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Store the predictions, if this is the first data set since the latest step; end the epoch of the loss."""
        if not self._was_evaluated:
            self._validation, self._was_evaluated = self._predictions, True
            if self.loss.needs_validation and self._predictions is None:
                self._warn_without_validation("pass compute_metrics=calibration.compute_metrics to the Trainer")
        self._end_epoch()

    def _end_epoch(self) -> None:
        """End the epoch of the loss if it is over; skip it if the loss needs validation predictions and has none."""
        if self._epoch_is_over and not (self.loss.needs_validation and self._validation is None):
            validation, self._validation = self._validation, None
            self.loss.end_epoch(validation)
        self._epoch_is_over = False

    def _recording_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward method that records features, and indices if the data have a column `index`."""

        @functools.wraps(forward)
        def recording(*args: Any, index: Tensor | None = None, **kwargs: Any) -> Any:
            self._features, self._index = self._net(*args, **kwargs).features, index
            result, self._body.result = self._body.result, None
            return result

        # The Trainer drops columns that are not in the signature.
        signature = inspect.signature(forward)
        more = inspect.Parameter("index", inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        variadic = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        recording.__signature__ = signature.replace(parameters=[*parameters, more, *variadic])  # type: ignore[attr-defined]
        return recording


class _Body(nn.Module):
    """The original model, which stores its outputs: `WithFeatures` returns logits and features only."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.forward_of_network = network.forward
        self.result: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.result = self.forward_of_network(*args, **kwargs)
        return self.result
