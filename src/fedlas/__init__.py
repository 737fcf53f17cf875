"""Calibrated classification: losses, metrics, post-hoc calibration, evaluation and reports.

The names below are loaded when they are first used, so that `import fedlas` costs little more than `import torch`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlas import data as data
    from fedlas import losses as losses
    from fedlas import metrics as metrics
    from fedlas import models as models
    from fedlas import ood as ood
    from fedlas import posthoc as posthoc
    from fedlas import report as report
    from fedlas import training as training
    from fedlas.comparison import compare as compare
    from fedlas.data import build_data as build_data
    from fedlas.data import list_data as list_data
    from fedlas.evaluation import Report as Report
    from fedlas.evaluation import calibrate as calibrate
    from fedlas.evaluation import evaluate as evaluate
    from fedlas.io import read_predictions as read_predictions
    from fedlas.io import write_predictions as write_predictions
    from fedlas.losses import AdaptiveSmoothing as AdaptiveSmoothing
    from fedlas.losses import GateHistory as GateHistory
    from fedlas.losses import build_loss as build_loss
    from fedlas.losses import checks as checks
    from fedlas.losses import list_losses as list_losses
    from fedlas.losses import smoothed_cross_entropy as smoothed_cross_entropy
    from fedlas.models import build_model as build_model
    from fedlas.models import list_models as list_models
    from fedlas.models.base import Output as Output
    from fedlas.models.base import WithFeatures as WithFeatures
    from fedlas.models.base import WithLoss as WithLoss
    from fedlas.models.base import parameters as parameters
    from fedlas.posthoc import build_calibrator as build_calibrator
    from fedlas.posthoc import list_calibrators as list_calibrators
    from fedlas.posthoc import load_calibrator as load_calibrator
    from fedlas.predictions import Predictions as Predictions
    from fedlas.predictions import TopLabelPredictions as TopLabelPredictions
    from fedlas.report.evaluation_result import evaluate_files as evaluate_files
    from fedlas.report.figures import save_figures as save_figures
    from fedlas.report.html import save_page as save_page
    from fedlas.report.model import Model as Model
    from fedlas.training import Recipe as Recipe
    from fedlas.training import fit as fit
    from fedlas.training import fit_many as fit_many
    from fedlas.training import list_recipes as list_recipes
    from fedlas.training import recipe_for as recipe_for

__version__ = "0.1.0"

# The module of each name; None for a package of fedlas.
_HOMES = {
    "AdaptiveSmoothing": "fedlas.losses",
    "GateHistory": "fedlas.losses",
    "Model": "fedlas.report.model",
    "Output": "fedlas.models.base",
    "Predictions": "fedlas.predictions",
    "Recipe": "fedlas.training",
    "Report": "fedlas.evaluation",
    "TopLabelPredictions": "fedlas.predictions",
    "WithFeatures": "fedlas.models.base",
    "WithLoss": "fedlas.models.base",
    "build_calibrator": "fedlas.posthoc",
    "build_data": "fedlas.data",
    "build_loss": "fedlas.losses",
    "build_model": "fedlas.models",
    "calibrate": "fedlas.evaluation",
    "checks": "fedlas.losses",
    "compare": "fedlas.comparison",
    "data": None,
    "evaluate": "fedlas.evaluation",
    "evaluate_files": "fedlas.report.evaluation_result",
    "fit": "fedlas.training",
    "fit_many": "fedlas.training",
    "list_calibrators": "fedlas.posthoc",
    "list_data": "fedlas.data",
    "list_losses": "fedlas.losses",
    "list_models": "fedlas.models",
    "list_recipes": "fedlas.training",
    "load_calibrator": "fedlas.posthoc",
    "losses": None,
    "metrics": None,
    "models": None,
    "ood": None,
    "parameters": "fedlas.models.base",
    "posthoc": None,
    "read_predictions": "fedlas.io",
    "recipe_for": "fedlas.training",
    "report": None,
    "save_figures": "fedlas.report.figures",
    "save_page": "fedlas.report.html",
    "smoothed_cross_entropy": "fedlas.losses",
    "training": None,
    "write_predictions": "fedlas.io",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load a name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedlas' has no attribute {name!r}")
    home = _HOMES[name]
    return import_module(f"fedlas.{name}") if home is None else getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
