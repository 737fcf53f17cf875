"""Metrics of `fedlas.metrics` for torchmetrics: in a `MetricCollection`, in Lightning's `self.log`, on several ranks.

`CalibrationMetric("ece", inputs="logits")` wraps the accumulator of a metric. Its states are those of the accumulator:
sums, which are added across ranks, or lists of samples, which are concatenated. Values are float64 and equal those of
`fedlas.metrics` to 1e-12 for any split into updates and ranks. `inputs` declares whether updates are "logits" or
"probs". Metrics with equal states share them in a `MetricCollection` (compute groups).
"""

import zlib
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedlas.errors import MissingPackageError, UserError
from fedlas.extras import needed
from fedlas.metrics.accumulators import MAXIMA, AbstractAccumulator
from fedlas.metrics.registry import find_metric, logged_metrics

try:
    from torchmetrics import Metric
except ImportError as missing:
    raise MissingPackageError(needed("torchmetrics", "integrations", missing)) from missing

InputKind = Literal["logits", "probs"]
OF_TORCHMETRICS = (
    "compute_on_cpu", "dist_sync_on_step", "process_group", "dist_sync_fn", "distributed_available_fn",
    "sync_on_compute", "compute_with_cache",
)  # fmt: skip


class CalibrationMetric(Metric):
    """A metric of `fedlas.metrics`, for logits or probabilities.

    Args:
        name: name of the metric, such as "ece" or "nll".
        inputs: type of the updates, "logits" or "probs".
        num_classes: number of classes; needed by "classwise_ece", and by "brier" with `bins`.
        options: options of the metric, such as `bins` and `ignore_index`, and keywords of `torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, name: str, inputs: InputKind, *, num_classes: int | None = None, **options: Any) -> None:
        super().__init__(**{key: options.pop(key) for key in OF_TORCHMETRICS if key in options})
        if inputs not in get_args(InputKind):
            raise UserError(f'inputs is {inputs!r}; pass inputs="logits" or inputs="probs", the type of the updates')
        self.metric, self.inputs, self.options = find_metric(name), inputs, options
        self.num_classes, self._was_checked = num_classes, False
        accumulator = self._accumulator()
        # A collection groups metrics whose states are equal after the first batch. A hash of the settings is a state
        # too, because settings may have an effect only later. It is stored as bytes, because large numbers are
        # compared with five digits only.
        rules = repr((inputs, accumulator.settings())).encode()
        self.add_state("rule_bytes", torch.tensor(list(zlib.crc32(rules).to_bytes(4, "big"))), dist_reduce_fx="max")
        self.names = list(state := accumulator.empty_state(num_classes))
        for key, value in state.items():
            if isinstance(value, list):
                self.add_state(key, [], dist_reduce_fx="cat")
            else:
                self.add_state(key, value, dist_reduce_fx="max" if key in MAXIMA else "sum")

    @property
    def higher_is_better(self) -> bool | None:  # type: ignore[override]
        """Whether higher values are better, for torchmetrics."""
        return self.metric.higher_is_better

    def _accumulator(self) -> AbstractAccumulator:
        return self.metric.accumulator(**self.options)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add samples: logits or probabilities, depending on `inputs`, and their labels."""
        batch = self._accumulator()
        batch.was_checked = self._was_checked
        (batch.update_logits if self.inputs == "logits" else batch.update)(preds, target)
        self._was_checked = batch.was_checked
        for key, value in batch.state().items():
            state = getattr(self, key)
            if isinstance(value, list):
                setattr(self, key, [*_parts(state), *value])
            elif key in MAXIMA:
                setattr(self, key, torch.maximum(state, value.to(state.device)))
            else:
                setattr(self, key, state + value.to(state.device))

    def compute(self) -> Tensor:
        """Return the metric of all samples so far, as float64."""
        accumulator = self._accumulator()
        states = {key: getattr(self, key) for key in self.names}
        accumulator.set_state({w: _parts(v) if isinstance(self._defaults[w], list) else v for w, v in states.items()})
        return torch.tensor(float(accumulator.compute()), dtype=torch.float64, device=self.device)


def calibration_metrics(inputs: InputKind, bins: int = 15, **options: Any) -> dict[str, Metric]:
    """Return the default metrics for a `MetricCollection`; metrics with equal-width bins share their sums."""
    return {
        name: CalibrationMetric(name, inputs, **({"bins": bins} if metric.is_binned else {}), **options)
        for name, metric in logged_metrics().items()
    }


def _parts(state: list[Tensor] | Tensor) -> list[Tensor]:
    """Return a list state as a list; after synchronisation of the ranks it is a single tensor."""
    return [state] if isinstance(state, Tensor) else list(state)
