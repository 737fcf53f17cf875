"""A model under evaluation: its predictions, calibration and OOD data, report and training log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlas.errors import UserTypeError
from fedlas.evaluation import FOLDS, evaluate
from fedlas.evaluation_report import Report
from fedlas.predictions import AnyPredictions
from fedlas.predictions.arrays import Array


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A model under evaluation.

    Args:
        predictions: predictions and labels of the test samples. If None, a page has only the summary and diagrams.
        report: result of `evaluate`; computed by default.
        calibration: predictions on other samples, to fit calibrators on; without them, calibrators are cross-fitted.
        posthoc: names of calibrators, or calibrators, if the report is computed.
        folds: number of folds for cross-fitting, if the report is computed.
        ood: predictions or arrays on OOD data, by the name of the data set, as in `evaluate`.
        log: log of the training run, one record per epoch.
        recipe: fields of the training recipe.
        environment: versions and hardware of the training run.
        source: file or folder that the model was read from.
        image_folders: folders that are searched for the image files of the predictions, in this order; files outside
            of these folders are never opened. None if paths are trusted.
    """

    predictions: AnyPredictions | None = None
    report: Report | None = None
    calibration: AnyPredictions | None = None
    posthoc: str | Sequence[Any] = "temperature"
    folds: int = FOLDS
    ood: Mapping[str, AnyPredictions | Array] = field(default_factory=dict)
    log: Sequence[Mapping[str, Any]] = ()
    recipe: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    source: Path | None = None
    image_folders: Sequence[Path] | None = None

    def __post_init__(self) -> None:
        for name in ("predictions", "calibration"):
            data = getattr(self, name)
            if data is not None and not isinstance(data, AnyPredictions):
                raise UserTypeError(
                    f"{name} of a Model is {type(data).__name__}; pass Predictions.from_probs(probs, labels), "
                    "Predictions(logits, labels) or read_predictions(file)"
                )

    def evaluate(self, **options: Any) -> Report:
        """Return the report, computed with further options of `evaluate` if there is none."""
        if self.report is not None:
            return self.report
        assert self.predictions is not None
        return evaluate(
            self.predictions,
            calibration=self.calibration if self.posthoc else None,
            posthoc=self.posthoc,
            folds=self.folds,
            ood=self.ood or None,
            **options,
        )
