"""Adapter for the calibrators of the probmetrics package.

`Probmetrics(method="svs")` passes softmax probabilities to the calibrator of that name and returns the logarithms of
its probabilities. A method is a name of `probmetrics.calibrators.get_calibrator`, or a class of that module such as
"ETSCalibrator". These calibrators cannot be saved, as that would need pickle.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from fedlas.errors import UserError
from fedlas.extras import optional_module
from fedlas.posthoc.base import AbstractCalibrator, Samples, check_floor, log_probs_of


class Probmetrics(AbstractCalibrator):
    """Wraps a calibrator of the probmetrics package.

    Args:
        method: name of the calibrator, such as "svs", "sms", "ivap" or "ETSCalibrator".
        settings: keyword arguments of the calibrator.
        floor: smallest probability that the calibrator returns.
    """

    name = "probmetrics"
    citation = "Berta et al., probmetrics, 2025."

    def __init__(
        self, *, method: str = "logistic", settings: dict[str, Any] | None = None, floor: float = 1e-7
    ) -> None:
        self.method, self.settings, self.floor = method, dict(settings or {}), check_floor(floor)
        self._inner: Any = None

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        if samples.labels.ndim == 2:
            raise UserError("probmetrics needs class indices; these labels are soft")
        with warnings.catch_warnings():
            # The package uses deprecated functions of torch and scikit-learn.
            warnings.simplefilter("ignore", FutureWarning)
            self._inner = self._build(optional_module("probmetrics.calibrators", extra="posthoc"))
            self._inner.fit(_probs(samples.logits), samples.labels.cpu().numpy())
        return {}

    def _build(self, package: Any) -> Any:
        cls = getattr(package, self.method, None)
        if isinstance(cls, type) and issubclass(cls, package.Calibrator):
            return cls(**self.settings)
        try:
            return package.get_calibrator(self.method, **self.settings)
        except ValueError as error:
            classes = sorted(name for name in dir(package) if name.endswith("Calibrator"))
            class_names = ", ".join(classes)
            raise UserError(f"probmetrics has no calibrator {self.method!r}; its classes are {class_names}") from error

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        probs = torch.from_numpy(np.asarray(self._inner.predict_proba(_probs(logits))))
        return log_probs_of(probs.to(logits).clamp_min(0), logits.softmax(1), self.floor)

    def save(self, path: str | Path) -> None:
        """Raise an error, because these calibrators could only be saved by pickle."""
        raise UserError(f"a calibrator of probmetrics cannot be written to {path} without pickle; fit it again instead")


def _probs(logits: Float[Tensor, "n classes"]) -> NDArray[np.float64]:
    """Return probabilities in float64, since some calibrators of the package do not support mixed types."""
    return logits.double().softmax(1).cpu().numpy()
