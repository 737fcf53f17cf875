"""Every calibrator of the probmetrics package, behind our interface.

`Probmetrics(method="svs")` hands softmax probabilities to that package's calibrator of the name and returns the
logarithms of what comes back. A method is a name that `probmetrics.calibrators.get_calibrator` knows, or one of its
classes, such as "ETSCalibrator". Such a calibrator cannot be saved: what it learned is known to probmetrics alone, and
we do not write pickles.
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
    """Lets a calibrator of the probmetrics package do the work.

    Args:
        method: its name there, such as "svs", "sms", "ivap" or "ETSCalibrator".
        settings: passed on to it.
        floor: smallest probability that it returns.
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
            raise UserError("probmetrics learns from class numbers; these labels are soft")
        with warnings.catch_warnings():
            # It uses what torch and scikit-learn have deprecated; nobody who calls us can do anything about that.
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
            classes = sorted(word for word in dir(package) if word.endswith("Calibrator"))
            known = ", ".join(classes)
            raise UserError(f"probmetrics has no calibrator {self.method!r}; its classes are {known}") from error

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        found = torch.from_numpy(np.asarray(self._inner.predict_proba(_probs(logits))))
        return log_probs_of(found.to(logits).clamp_min(0), logits.softmax(1), self.floor)

    def save(self, path: str | Path) -> None:
        """Refuse: there is no way to save it that is safe to load."""
        raise UserError(f"a calibrator of probmetrics cannot be written to {path} without pickle; fit it again instead")


def _probs(logits: Float[Tensor, "n classes"]) -> NDArray[np.float64]:
    """Make the probabilities that the package is given: in one type, because some of its calibrators cannot mix."""
    return logits.double().softmax(1).cpu().numpy()
