"""Calibrated classification: losses, metrics, post-hoc calibration, evaluation and reports.

The names below are loaded when they are first used, so that `import fedlas` costs little more than `import torch`.
"""

from typing import TYPE_CHECKING

from fedlas.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from fedlas import data as data
    from fedlas import integrations as integrations
    from fedlas import io as io
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
    from fedlas.evaluation import calibrate as calibrate
    from fedlas.evaluation import evaluate as evaluate
    from fedlas.evaluation_report import Report as Report
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
    from fedlas.report.evaluate_files import evaluate_files as evaluate_files
    from fedlas.report.figures import save_figures as save_figures
    from fedlas.report.html import save_page as save_page
    from fedlas.report.model import Model as Model
    from fedlas.training import Recipe as Recipe
    from fedlas.training import fit as fit
    from fedlas.training import fit_many as fit_many
    from fedlas.training import list_recipes as list_recipes
    from fedlas.training import recipe_for as recipe_for

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_attributes(
    __name__,
    {
        "comparison": ["compare"],
        "data": ["build_data", "list_data"],
        "evaluation": ["calibrate", "evaluate"],
        "evaluation_report": ["Report"],
        "io": ["read_predictions", "write_predictions"],
        "losses": ["AdaptiveSmoothing", "GateHistory", "build_loss", "checks", "list_losses", "smoothed_cross_entropy"],
        "models": ["build_model", "list_models"],
        "models.base": ["Output", "WithFeatures", "WithLoss", "parameters"],
        "posthoc": ["build_calibrator", "list_calibrators", "load_calibrator"],
        "predictions": ["Predictions", "TopLabelPredictions"],
        "report.evaluate_files": ["evaluate_files"],
        "report.figures": ["save_figures"],
        "report.html": ["save_page"],
        "report.model": ["Model"],
        "training": ["Recipe", "fit", "fit_many", "list_recipes", "recipe_for"],
    },
    packages=["data", "integrations", "io", "losses", "metrics", "models", "ood", "posthoc", "report", "training"],
)
