"""Calibrators as scikit-learn estimators, and calibration metrics as its scorers.

    X ─► estimator ─► decision_function or log predict_proba ─► calibrator ─► softmax ─► predict_proba

With `cv=5` each sample is scored by a clone of the estimator that was not fitted on it. One calibrator is fitted on the
scores of all samples, and one estimator on all samples, instead of an ensemble of five pairs. With `cv="prefit"` the
estimator is already fitted, and `fit` gets held-out samples for the calibrator alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedlas.errors import UserError, UserTypeError, short_list
from fedlas.evaluation import FOLDS
from fedlas.extras import optional_module
from fedlas.metrics.calibration_error import ece
from fedlas.metrics.proper_scores import top_k
from fedlas.metrics.registry import find_metric
from fedlas.metrics.selective import coverage_at_risk
from fedlas.posthoc import AbstractCalibrator, build_calibrator
from fedlas.predictions import Predictions

base = optional_module("sklearn.base", "train")
validation = optional_module("sklearn.utils.validation", "train")

RESPONSES = ("predict_proba", "decision_function")


class CalibratedClassifier(base.ClassifierMixin, base.MetaEstimatorMixin, base.BaseEstimator):  # type: ignore[misc,name-defined]
    """A scikit-learn classifier whose probabilities are calibrated.

    `fit` sets `estimator_` and `calibrator_`; `calibrator_.fitted` describes the fit of the latter. Sample weights are
    not supported, because no calibrator supports them.

    Args:
        estimator: a classifier; cloned unless `cv` is "prefit".
        calibrator: a name of `fedlas.list_calibrators()`, or a calibrator with options, such as
            `HistogramBinning(bins=10)`, of which a copy is fitted.
        response_method: output of the estimator to calibrate: "predict_proba", whose logarithms are the logits, or
            "decision_function", whose values are the logits.
        cv: number of folds, a splitter of scikit-learn, a list of pairs of train and test indices, or "prefit".
        floor: lower limit of the probabilities of the estimator, because log(0) is not finite; trees and nearest
            neighbours often return 0.
    """

    def __init__(
        self,
        estimator: Any,
        calibrator: Any = "temperature",
        *,
        response_method: Any = "predict_proba",
        cv: Any = FOLDS,
        floor: Any = 1e-7,
    ) -> None:
        # scikit-learn requires that the constructor stores parameters unchanged; `fit` checks them.
        self.estimator = estimator
        self.calibrator = calibrator
        self.response_method = response_method
        self.cv = cv
        self.floor = floor

    def fit(self, X: Any, y: Any) -> "CalibratedClassifier":  # noqa: N803 (scikit-learn's name)
        """Fit the estimator and the calibrator; with `cv="prefit"` the calibrator alone."""
        self._check_parameters()
        labels = validation.column_or_1d(y, warn=True)
        validation.assert_all_finite(labels, input_name="y")
        optional_module("sklearn.utils.multiclass", "train").check_classification_targets(labels)
        prefit = isinstance(self.cv, str)
        if prefit:
            validation.check_is_fitted(self.estimator)
        classes = np.asarray(self.estimator.classes_) if prefit else np.unique(labels)
        if len(classes) < 2:
            raise UserError(f"y has one class, {_shown(classes)}; a classifier needs two at least")
        codes = _codes(labels, classes)
        if prefit:
            fitted, logits = self.estimator, self._logits(self.estimator, X)
        else:
            logits = self._cross_logits(X, labels, classes)
            fitted = base.clone(self.estimator).fit(X, labels)
        self.estimator_ = fitted
        self.calibrator_ = self._fresh().fit(logits, codes, split="samples of fit" if prefit else "other folds")
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return calibrated probabilities, one column for each of `classes_`."""
        validation.check_is_fitted(self)
        logits = self.calibrator_.transform(self._logits(self.estimator_, X))
        return torch.from_numpy(logits).double().softmax(1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the most probable class."""
        best = self.predict_proba(X).argmax(axis=1)
        predicted: NDArray[Any] = self.classes_[best]
        return predicted

    @property
    def n_features_in_(self) -> int:
        """Number of columns that the estimator was fitted on."""
        return int(self.estimator_.n_features_in_)

    @property
    def feature_names_in_(self) -> Any:
        """Names of the columns that the estimator was fitted on."""
        return self.estimator_.feature_names_in_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        estimator_tags = optional_module("sklearn.utils", "train").get_tags(self.estimator)
        tags.input_tags = estimator_tags.input_tags
        tags.classifier_tags.multi_class = (
            estimator_tags.classifier_tags.multi_class if estimator_tags.classifier_tags else True
        )
        tags.array_api_support = False
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "calibrator_")

    def _check_parameters(self) -> None:
        if self.response_method not in RESPONSES:
            raise UserError(
                f"response_method is {self.response_method!r}; expected {' or '.join(map(repr, RESPONSES))}"
            )
        if not isinstance(self.calibrator, str | AbstractCalibrator):
            raise UserTypeError(f"calibrator is a name or a calibrator, such as Temperature(), not {self.calibrator!r}")
        if isinstance(self.cv, str) and self.cv != "prefit":
            raise UserError(f'cv is {self.cv!r}; a number of folds, a splitter or "prefit" is expected')
        if not 0 < self.floor < 0.1:
            raise UserError(f"floor is {self.floor}; a small positive probability is needed, such as 1e-7")
        if not hasattr(self.estimator, self.response_method):
            other = next(name for name in RESPONSES if name != self.response_method)
            advice = f'; it has {other}: pass response_method="{other}"' if hasattr(self.estimator, other) else ""
            raise UserError(f"{type(self.estimator).__name__} has no {self.response_method}{advice}")

    def _fresh(self) -> AbstractCalibrator:
        calibrator = self.calibrator
        return build_calibrator(calibrator) if isinstance(calibrator, str) else type(calibrator)(**calibrator.options)

    def _cross_logits(self, X: Any, labels: NDArray[Any], classes: NDArray[Any]) -> NDArray[np.float64]:  # noqa: N803
        """Return the logits of each sample from an estimator that was not fitted on it."""
        selection = optional_module("sklearn.model_selection", "train")
        folds = list(selection.check_cv(self.cv, labels, classifier=True).split(X, labels))
        for number, (train, _) in enumerate(folds, start=1):
            absent = np.setdiff1d(classes, labels[train])
            if len(absent):
                raise UserError(
                    f"the training part of fold {number} of {len(folds)} has no sample of {_shown(absent)}; each class "
                    'needs two samples at least, in different folds: use more samples, fewer folds, or cv="prefit"'
                )
        response = selection.cross_val_predict(self.estimator, X, labels, cv=folds, method=self.response_method)
        return self._as_logits(response, len(classes))

    def _logits(self, fitted: Any, X: Any) -> NDArray[np.float64]:  # noqa: N803
        """Return the logits of samples from a fitted estimator."""
        return self._as_logits(getattr(fitted, self.response_method)(X), len(fitted.classes_))

    def _as_logits(self, response: Any, classes: int) -> NDArray[np.float64]:
        """Convert the output of an estimator to logits, one column for each class."""
        table = np.asarray(response, dtype=np.float64)
        if table.ndim == 1:
            table = np.stack([np.zeros_like(table), table], axis=1)
        if table.ndim != 2 or table.shape[1] != classes:
            raise UserError(
                f"{self.response_method} of {type(self.estimator).__name__} has shape {table.shape} for {classes} "
                'classes; one column for each is expected (for SVC: decision_function_shape="ovr")'
            )
        if self.response_method == "predict_proba":
            return Predictions.from_probs(table).probs.clamp_min(self.floor).log().numpy()
        return Predictions(table).logits.numpy()


@dataclass(frozen=True)
class Scorer:
    """A calibration metric as a scikit-learn scorer: `scorer(estimator, X, y)`, greater is better.

    The classes come from the estimator, so a fold may lack samples of a class.

    Args:
        metric: a function of `fedlas.metrics`, or the name of a metric, such as "ece".
        higher_is_better: whether the metric is better when it is higher; otherwise the score is minus the metric. By
            default that of the metric; false for custom functions.
        options: passed to the metric, such as `{"bins": 10}`.
    """

    metric: str | Callable[..., float]
    higher_is_better: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.metric, str):
            object.__setattr__(self, "metric", find_metric(self.metric))
        if self.higher_is_better is None:
            higher = getattr(self.metric, "higher_is_better", self.metric in HIGHER)
            if higher is None:
                raise UserError(f"{self.metric!r} has no better direction; pass higher_is_better")
            object.__setattr__(self, "higher_is_better", higher)

    def __call__(self, estimator: Any, X: Any, y: Any) -> float:  # noqa: N803
        assert not isinstance(self.metric, str)
        probs = np.asarray(estimator.predict_proba(X), dtype=np.float64)
        codes = _codes(validation.column_or_1d(y), np.asarray(estimator.classes_))
        value = float(self.metric(Predictions.from_probs(probs, codes), **self.options))
        return value if self.higher_is_better else -value


HIGHER = (top_k, coverage_at_risk)  # functions of `fedlas.metrics` that are no metric objects
ece_scorer = Scorer(ece)
"""Minus the expected calibration error over 15 bins."""


def _codes(labels: NDArray[Any], classes: NDArray[Any]) -> NDArray[np.int64]:
    """Replace labels by their indices in the classes."""
    positions = {value: number for number, value in enumerate(classes.tolist())}
    try:
        return np.asarray([positions[value] for value in labels.tolist()], dtype=np.int64)
    except KeyError as error:
        raise UserError(f"y holds {error.args[0]!r}, which is none of the classes {_shown(classes)}") from None


def _shown(classes: Sequence[Any] | NDArray[Any]) -> str:
    return short_list(map(repr, np.asarray(classes).tolist()), 7)
