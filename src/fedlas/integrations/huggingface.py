"""Calibration losses for the Hugging Face Trainer, by its own doors: compute_loss_func, compute_metrics, callbacks.

    calibration = Calibration(model, loss)
    Trainer(model, args, compute_loss_func=calibration.compute_loss, compute_metrics=calibration.compute_metrics,
            callbacks=[calibration], ...)

The loss becomes a part of the model, `model.calibration_loss`. So the Trainer trains the gate of FeDLaS with the
network, moves both, wraps both, saves both in every checkpoint and finds both when it goes on from one. The features
are seen while the model runs, and are not among its outputs: nothing has to be asked for in the configuration.

With `num_items_in_batch` = n samples in all parts of a batch that is put together by gradient accumulation, the value
of each part is Σ_i l_i / n, so that the gradients of the parts add up to those of the whole batch. What a loss computes
from the batch as a whole (mu and sigma of FeDLaS, the terms of MMCE, MDCA and CRL) is computed from each part. Class
weights multiply l_i; the Trainer does not tell their sum, so n divides here, where `nn.CrossEntropyLoss` would divide
by the sum of weights.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedlas.errors import MissingPackageError, UserError
from fedlas.extras import needed
from fedlas.integrations.base import Gate, ValidationMetrics
from fedlas.losses.base import IGNORE_INDEX, AbstractLoss
from fedlas.models.base import WithFeatures
from fedlas.predictions import Predictions

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise MissingPackageError(needed("transformers", "integrations", missing)) from missing

NAME = "calibration_loss"


class Calibration(TrainerCallback):
    """Joins a model with a loss, for the Trainer: its loss, its metrics, and what happens between epochs.

    Args:
        model: a classifier of images, sequences or tokens.
        loss: a loss of `fedlas.build_loss`.
        head: the path of the model's last layer, where `WithFeatures` does not find it.
        bins: how many bins calibration errors have.
    """

    def __init__(self, model: nn.Module, loss: AbstractLoss, *, head: str | None = None, bins: int = 15) -> None:
        if loss.reduction != "mean":
            raise UserError(f'the Trainer needs a loss with reduction="mean", not {loss.reduction!r}')
        if loss.ignore_index != IGNORE_INDEX:
            raise UserError(f"the Trainer counts labels other than {IGNORE_INDEX}; ignore_index cannot be another one")
        if hasattr(model, NAME):
            raise UserError("this model has a calibration loss already; call remove() of the one that gave it")
        self.model, self.loss, self.bins = model, loss, bins
        self._body = _Body(model)
        self._net = WithFeatures(self._body, None if head is None else f"network.{head}")
        self._features: Tensor | None = None
        self._index: Tensor | None = None
        self._gate = Gate(loss)
        self._samples: int | None = None
        self._validation: Predictions | None = None
        self._epoch_is_over = False
        # Only now: `WithFeatures` looks for the last linear layer, and a gate has two.
        model.add_module(NAME, loss.to(next(model.parameters()).device))
        self._own_forward = vars(model).get("forward")
        model.forward = self._seen_forward(model.forward)

    def compute_loss(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Compute the loss of what the model just said: the Trainer's `compute_loss_func`."""
        if labels is None:
            raise UserError(
                "a loss needs labels; name their column 'labels', or set TrainingArguments(label_names=...)"
            )
        features, index = self._features, self._index
        self._features = self._index = None
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        if features is None:
            raise RuntimeError("the model was not called before its loss, or not this model: pass it to the Trainer")
        if logits.ndim > 2 and labels.shape == logits.shape[:-1]:  # tokens: ours have the classes second
            logits, features = logits.movedim(-1, 1), features.movedim(-1, 1)
        if num_items_in_batch is None:
            value: Tensor = self.loss(logits, labels, features, index)
        else:
            # The Trainer counts the entries of labels; a soft label has one for each class.
            per_label = logits.shape[1] if labels.is_floating_point() else 1
            parts = self.loss.parts(logits, labels, features, index).values()
            value = torch.stack([part.sum() for part in parts]).sum() * per_label / num_items_in_batch
        if self.loss.training:
            self._gate.add(index, self._samples)
        return value

    def compute_metrics(self, evaluated: Any) -> dict[str, float]:
        """Give accuracy, NLL and calibration errors of an evaluation: the Trainer's `compute_metrics`.

        Beside them stands what the gate of a FeDLaS loss did in training since the evaluation before.
        """
        given, labels = evaluated.predictions, torch.as_tensor(evaluated.label_ids)
        logits = torch.as_tensor(given[0] if isinstance(given, tuple) else given)
        if logits.ndim > 2 and labels.shape == logits.shape[:-1]:
            logits = logits.movedim(-1, 1)
        # The Trainer has gathered the samples of all processes.
        numbers = ValidationMetrics(self.bins, self.loss.ignore_index, keep=self.loss.needs_validation, shared=False)
        numbers.add(logits, labels)
        self._validation = numbers.predictions()
        return numbers.read() | self._gate.read()

    def remove(self) -> nn.Module:
        """Take the loss out of the model again, and give the model, to be saved or shared on its own."""
        delattr(self.model, NAME)
        self._net.unwrap()
        if self._own_forward is None:
            del self.model.forward  # what is the class's own shows again
        else:
            self.model.forward = self._own_forward
        return self.model

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """Learn how many samples there are, for the flip rate."""
        data = getattr(more.get("train_dataloader"), "dataset", None)
        self._samples = len(data) if hasattr(data, "__len__") and data is not None else None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """End the epoch of the loss, or wait for the evaluation that follows and comes before the checkpoint."""
        self._epoch_is_over = True
        if not control.should_evaluate:
            self._end_epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """End the epoch of the loss after its evaluation."""
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._epoch_is_over:
            self._epoch_is_over = False
            self.loss.end_epoch(self._validation)

    def _seen_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Make a forward that notes the features, and takes sample numbers where the data have a column `index`."""

        @functools.wraps(forward)
        def seen(*args: Any, index: Tensor | None = None, **kwargs: Any) -> Any:
            self._features, self._index = self._net(*args, **kwargs).features, index
            result, self._body.result = self._body.result, None
            return result

        # The Trainer drops every column that the signature does not name.
        signature = inspect.signature(forward)
        more = inspect.Parameter("index", inspect.Parameter.KEYWORD_ONLY, default=None)
        named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [p for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        seen.__signature__ = signature.replace(parameters=[*named, more, *rest])  # type: ignore[attr-defined]
        return seen


class _Body(nn.Module):
    """The model as it was, which keeps what it returns: `WithFeatures` gives logits and features only."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.forward_of_network = network.forward
        self.result: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.result = self.forward_of_network(*args, **kwargs)
        return self.result
