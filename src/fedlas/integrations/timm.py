"""Calibration losses for timm: a training task with a network and its loss.

    timm.task.ClassificationTask   criterion(network(x), y)       the optimizer has no parameters of the criterion
    CalibrationTask                loss(logits, y, features)      network and loss are one module

`CalibrationTask` replaces a task of timm: `task(x, y)["loss"]`, `prepare_distributed`, `compile`, `setup_ema`,
`CheckpointSaver(task=...)`, `resume_task_checkpoint`. Networks are saved by timm, with the same names; the loss is
part of the state of the task.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fedlas.errors import MissingPackageError
from fedlas.losses.base import AbstractLoss
from fedlas.models.base import WithFeatures, WithLoss
from fedlas.predictions import Predictions

try:
    from timm.task import TrainingTask
    from timm.utils.model import unwrap_model
except ImportError as missing:
    raise MissingPackageError(
        "timm, with its training tasks, is needed for this: pip install -U 'timm>=1.0.30'"
    ) from missing

Joined = dict[str, dict[str, Tensor]]


class CalibrationTask(TrainingTask):
    """Trains a network with a calibration loss, whose parameters and state are part of the task.

    Args:
        model: any network of timm, or another classifier.
        loss: a loss of `fedlas.build_loss`.
        head: path of the last layer of the network, if `WithFeatures` does not find it.
        device: device, as in timm's tasks.
        dtype: data type, as in timm's tasks.
        verbose: whether to log, as in timm's tasks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: AbstractLoss,
        *,
        head: str | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        # timm moves a network before it creates the task; move the loss too.
        self.trainable_module: nn.Module = WithLoss(WithFeatures(model, head), loss.to(device=self.device))

    @property
    def joined(self) -> WithLoss:
        """The network and its loss, without wrappers."""
        return _joined(self.trainable_module)

    def prepare_distributed(self, device_ids: list[int] | None = None, **ddp_kwargs: Any) -> "CalibrationTask":
        """Wrap network and loss in DistributedDataParallel."""
        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def compile(  # type: ignore[override]  # as in timm's tasks
        self, backend: str = "inductor", mode: str | None = None, **compile_kwargs: Any
    ) -> nn.Module:
        """Compile network and loss together, and the network alone for validation."""
        network = self.joined.net.model
        self.trainable_module = _compiled(self.trainable_module, backend, mode, compile_kwargs)
        self.eval_model = _compiled(network, backend, mode, compile_kwargs)
        return self.eval_model

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        """Return the network alone, for validation and checkpoints."""
        model: nn.Module | None = super().get_eval_model(module=module, ema=ema)
        if model is None:
            return None
        unwrapped = unwrap_model(model)
        return unwrapped.net.model if isinstance(unwrapped, WithLoss) else model

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> Joined:
        """Return the state of the loss, for a checkpoint."""
        target = module if module is not None else self.get_trainable_module(ema=ema)
        return {} if target is None else {"loss": _joined(target).loss.state_dict()}

    def load_task_state(
        self, state: Joined | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        """Restore the state of the loss from a checkpoint; skip it if the checkpoint has none."""
        if not state or "loss" not in state:
            return
        target = module if module is not None else self.get_trainable_module(ema=ema)
        if target is None:
            raise RuntimeError("there is no average of weights to load into; call setup_ema() first")
        _joined(target).loss.load_state_dict(state["loss"], strict=strict)

    def get_clip_parameters(self, exclude_head: bool = False) -> list[nn.Parameter]:
        """Return the parameters for gradient clipping: those of the network, as in the official code."""
        net = self.joined.net
        left_out = {id(p) for p in net.model.get_submodule(net.head_name).parameters()} if exclude_head else set()
        return [p for p in net.model.parameters() if id(p) not in left_out]

    def end_epoch(self, validation: Predictions | None = None) -> None:
        """Update the loss at the end of an epoch."""
        self._loss.end_epoch(validation)

    def forward(self, input: Tensor, target: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:  # noqa: A002
        """Return the loss of a batch, the logits, and the terms of the loss; labels may be soft (mixup)."""
        value, output = self.trainable_module(input, target, index)
        return {"loss": value, "output": output.logits, **self._loss.last_terms}

    @property
    def _loss(self) -> AbstractLoss:
        loss = self.joined.loss
        assert isinstance(loss, AbstractLoss)
        return loss


def _joined(module: nn.Module) -> WithLoss:
    unwrapped = unwrap_model(module)
    assert isinstance(unwrapped, WithLoss)
    return unwrapped


def _compiled(module: nn.Module, backend: str, mode: str | None, more: dict[str, Any]) -> nn.Module:
    compiled: Any = torch.compile(module, backend=backend, mode=mode, **more)
    assert isinstance(compiled, nn.Module)
    return compiled
