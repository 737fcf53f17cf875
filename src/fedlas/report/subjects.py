"""What a page, figures or an answer are about: models, and all that is known of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlas.evaluation import FOLDS, Report
from fedlas.predictions import AnyPredictions, Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """What is known about one model of a page.

    Args:
        predictions: what it said about the samples, and the truth. Without them a page has summary and diagrams only.
        report: what `evaluate` found; computed where it is not given.
        calibration: other predictions of the model, to fit calibrators on; without them they are cross-fitted.
        posthoc: the calibrators to try, where the report is not given.
        folds: in how many parts they are cross-fitted, where the report is not given.
        ood: for the name of every foreign data set, predictions on it, or logits.
        train_features: features of the training set, for the "knn" score of foreign data.
        log: the log of its training run, one record for each epoch.
        recipe: what it was trained with.
        environment: where it was trained.
        source: the file or folder that it was read from.
        image_folders: where image files of the predictions are looked for, in this order; none outside of these folders
            is opened. None where the paths are the caller's own: they are taken as they stand.
    """

    predictions: AnyPredictions | None = None
    report: Report | None = None
    calibration: AnyPredictions | None = None
    posthoc: str | Sequence[Any] = ("temperature",)
    folds: int = FOLDS
    ood: Mapping[str, AnyPredictions | Array] = field(default_factory=dict)
    train_features: Array | None = None
    log: Sequence[Mapping[str, Any]] = ()
    recipe: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    source: Path | None = None
    image_folders: Sequence[Path] | None = None

    def asked(self) -> dict[str, Any]:
        """Give what `evaluate` is to know besides the predictions."""
        names = ("posthoc", "calibration", "train_features", "folds")
        return {"ood": self.ood or None} | {name: getattr(self, name) for name in names}
