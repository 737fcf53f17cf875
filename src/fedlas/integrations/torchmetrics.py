"""Metrics of `fedlas.metrics` for torchmetrics: in a `MetricCollection`, in Lightning's `self.log`, on several ranks.

`CalibrationMetric("ece", given="logits")` wraps the accumulator of a metric. Its states are those of the accumulator:
sums, which are added across ranks, or lists of samples, which are concatenated. Values are float64 and equal those of
`fedlas.metrics` to 1e-12 for any split into updates and ranks. `given` declares whether updates are "logits" or
"probs". Metrics with equal states share them in a `MetricCollection` (compute groups).
"""

import zlib
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedlas.errors import MissingPackageError, UserError
from fedlas.extras import needed
from fedlas.metrics.accumulators import Accumulator
from fedlas.metrics.registry import find_metric

try:
    from torchmetrics import Metric
except ImportError as missing:
    raise MissingPackageError(needed("torchmetrics", "integrations", missing)) from missing

Given = Literal["logits", "probs"]
USUAL = ("accuracy", "ece", "over_ece", "under_ece", "aece", "nll")
OF_TORCHMETRICS = (
    "compute_on_cpu", "dist_sync_on_step", "process_group", "dist_sync_fn", "distributed_available_fn",
    "sync_on_compute", "compute_with_cache",
)  # fmt: skip


class CalibrationMetric(Metric):
    """A metric of `fedlas.metrics`, for logits or probabilities.

    Args:
        name: name of the metric, such as "ece" or "nll".
        given: type of the updates, "logits" or "probs".
        num_classes: number of classes; needed by "classwise_ece" and "brier".
        options: options of the metric, such as `bins` and `ignore_index`, and keywords of `torchmetrics.Metric`.
    """

    is_differentiable = False
    full_state_update = False

    def __init__(self, name: str, given: Given, *, num_classes: int | None = None, **options: Any) -> None:
        super().__init__(**{word: options.pop(word) for word in OF_TORCHMETRICS if word in options})
        if given not in get_args(Given):
            raise UserError(f'given is {given!r}; pass given="logits" or given="probs", the type of the updates')
        self.metric, self.given, self.options = find_metric(name), given, options
        self.num_classes = num_classes
        store = self._accumulator().store
        # A collection groups metrics whose states are equal after the first batch. Settings that have an effect only
        # later are a state too: as small numbers, because large ones are compared to five digits only.
        rules = repr((given, store.settings())).encode()
        self.add_state("rule_bytes", torch.tensor(list(zlib.crc32(rules).to_bytes(4, "big"))), dist_reduce_fx="max")
        self.names = list(state := store.empty_state(num_classes))
        for word, value in state.items():
            if isinstance(value, list):
                self.add_state(word, [], dist_reduce_fx="cat")
            else:
                self.add_state(word, value, dist_reduce_fx="max" if word == "floor" else "sum")

    @property
    def higher_is_better(self) -> bool | None:  # type: ignore[override]
        """Whether higher values are better, for torchmetrics."""
        return self.metric.higher_is_better

    def _accumulator(self) -> Accumulator:
        return self.metric.accumulator(**self.options)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add samples: logits or probabilities as `given` says, and their labels."""
        batch = self._accumulator()
        (batch.update_logits if self.given == "logits" else batch.update)(preds, target)
        for word, value in batch.store.state().items():
            held = getattr(self, word)
            if isinstance(value, list):
                setattr(self, word, [*_parts(held), *value])
            elif word == "floor":
                setattr(self, word, torch.maximum(held, value.to(held.device)))
            else:
                setattr(self, word, held + value.to(held.device))

    def compute(self) -> Tensor:
        """Return the metric of all samples so far, as float64."""
        whole = self._accumulator()
        held = {word: getattr(self, word) for word in self.names}
        whole.store.set_state({w: _parts(v) if isinstance(self._defaults[w], list) else v for w, v in held.items()})
        return torch.tensor(float(whole.compute()), dtype=torch.float64, device=self.device)


def calibration_metrics(given: Given, bins: int = 15, **options: Any) -> dict[str, Metric]:
    """Return the default metrics for a `MetricCollection`; metrics with equal-width bins share their sums."""
    metrics: dict[str, Metric] = {}
    for name in USUAL:
        more = {"bins": bins} if find_metric(name).is_binned else {}
        metrics[name] = CalibrationMetric(name, given, **more, **options)
    return metrics


def _parts(state: list[Tensor] | Tensor) -> list[Tensor]:
    """Return a list state as a list; after ranks were joined it is one tensor."""
    return [state] if isinstance(state, Tensor) else list(state)
