"""Publication figures.

Each `..._data` function computes the numbers that the matching `..._figure` function draws, so the numbers can be
checked or plotted with another tool. Figures are one column or one page wide and readable without colour, by line
styles, markers and hatches. `save_with_data` writes one figure as PDF and PNG, with its numbers as JSON;
`save_figures` writes all figures for which the models have data.

Names are imported on first use, because most modules need matplotlib or many other modules.
"""

from typing import TYPE_CHECKING

from fedlas.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from fedlas.report.figures.confidence import ClassMap as ClassMap
    from fedlas.report.figures.confidence import Confidences as Confidences
    from fedlas.report.figures.confidence import OverUnder as OverUnder
    from fedlas.report.figures.confidence import class_map_data as class_map_data
    from fedlas.report.figures.confidence import class_map_figure as class_map_figure
    from fedlas.report.figures.confidence import confidence_data as confidence_data
    from fedlas.report.figures.confidence import confidence_figure as confidence_figure
    from fedlas.report.figures.confidence import over_under_data as over_under_data
    from fedlas.report.figures.confidence import over_under_figure as over_under_figure
    from fedlas.report.figures.gate import EpochStatistics as EpochStatistics
    from fedlas.report.figures.gate import GateStability as GateStability
    from fedlas.report.figures.gate import ModeCurve as ModeCurve
    from fedlas.report.figures.gate import SmoothingCurve as SmoothingCurve
    from fedlas.report.figures.gate import epoch_statistics as epoch_statistics
    from fedlas.report.figures.gate import gate_data as gate_data
    from fedlas.report.figures.gate import gate_figure as gate_figure
    from fedlas.report.figures.gate import smoothing_data as smoothing_data
    from fedlas.report.figures.gate import smoothing_figure as smoothing_figure
    from fedlas.report.figures.indicator import ActivationExample as ActivationExample
    from fedlas.report.figures.indicator import Activations as Activations
    from fedlas.report.figures.indicator import Indicator as Indicator
    from fedlas.report.figures.indicator import Norms as Norms
    from fedlas.report.figures.indicator import activations_data as activations_data
    from fedlas.report.figures.indicator import activations_figure as activations_figure
    from fedlas.report.figures.indicator import indicator_data as indicator_data
    from fedlas.report.figures.indicator import indicator_figure as indicator_figure
    from fedlas.report.figures.indicator import norm_data as norm_data
    from fedlas.report.figures.indicator import norm_figure as norm_figure
    from fedlas.report.figures.ood import OODFigureData as OODFigureData
    from fedlas.report.figures.ood import OODScore as OODScore
    from fedlas.report.figures.ood import OODSet as OODSet
    from fedlas.report.figures.ood import ood_data as ood_data
    from fedlas.report.figures.ood import roc_figure as roc_figure
    from fedlas.report.figures.ood import score_figure as score_figure
    from fedlas.report.figures.ranks import Ranks as Ranks
    from fedlas.report.figures.ranks import rank_data as rank_data
    from fedlas.report.figures.ranks import rank_figure as rank_figure
    from fedlas.report.figures.reliability import Reliability as Reliability
    from fedlas.report.figures.reliability import SmoothReliability as SmoothReliability
    from fedlas.report.figures.reliability import reliability_data as reliability_data
    from fedlas.report.figures.reliability import reliability_figure as reliability_figure
    from fedlas.report.figures.reliability import reliability_lines_figure as reliability_lines_figure
    from fedlas.report.figures.reliability import smooth_reliability_data as smooth_reliability_data
    from fedlas.report.figures.reliability import smooth_reliability_figure as smooth_reliability_figure
    from fedlas.report.figures.saving import save_figures as save_figures
    from fedlas.report.figures.selective import RiskCurve as RiskCurve
    from fedlas.report.figures.selective import risk_data as risk_data
    from fedlas.report.figures.selective import risk_figure as risk_figure
    from fedlas.report.figures.style import save_figure as save_figure
    from fedlas.report.figures.style import save_with_data as save_with_data
    from fedlas.report.figures.theorem import Theorem as Theorem
    from fedlas.report.figures.theorem import Theorems as Theorems
    from fedlas.report.figures.theorem import theorem_data as theorem_data
    from fedlas.report.figures.theorem import theorem_figure as theorem_figure
    from fedlas.report.figures.training import Alphas as Alphas
    from fedlas.report.figures.training import Feedback as Feedback
    from fedlas.report.figures.training import LearningCurve as LearningCurve
    from fedlas.report.figures.training import alpha_data as alpha_data
    from fedlas.report.figures.training import alpha_figure as alpha_figure
    from fedlas.report.figures.training import feedback_data as feedback_data
    from fedlas.report.figures.training import feedback_figure as feedback_figure
    from fedlas.report.figures.training import training_data as training_data
    from fedlas.report.figures.training import training_figure as training_figure

__getattr__, __dir__, __all__ = lazy_attributes(
    __name__,
    {
        "confidence": [
            "ClassMap",
            "Confidences",
            "OverUnder",
            "class_map_data",
            "class_map_figure",
            "confidence_data",
            "confidence_figure",
            "over_under_data",
            "over_under_figure",
        ],
        "gate": [
            "EpochStatistics",
            "GateStability",
            "ModeCurve",
            "SmoothingCurve",
            "epoch_statistics",
            "gate_data",
            "gate_figure",
            "smoothing_data",
            "smoothing_figure",
        ],
        "indicator": [
            "ActivationExample",
            "Activations",
            "Indicator",
            "Norms",
            "activations_data",
            "activations_figure",
            "indicator_data",
            "indicator_figure",
            "norm_data",
            "norm_figure",
        ],
        "ood": ["OODFigureData", "OODScore", "OODSet", "ood_data", "roc_figure", "score_figure"],
        "ranks": ["Ranks", "rank_data", "rank_figure"],
        "reliability": [
            "Reliability",
            "SmoothReliability",
            "reliability_data",
            "reliability_figure",
            "reliability_lines_figure",
            "smooth_reliability_data",
            "smooth_reliability_figure",
        ],
        "saving": ["save_figures"],
        "selective": ["RiskCurve", "risk_data", "risk_figure"],
        "style": ["save_figure", "save_with_data"],
        "theorem": ["Theorem", "Theorems", "theorem_data", "theorem_figure"],
        "training": [
            "Alphas",
            "Feedback",
            "LearningCurve",
            "alpha_data",
            "alpha_figure",
            "feedback_data",
            "feedback_figure",
            "training_data",
            "training_figure",
        ],
    },
)
