"""Publication figures.

Each `..._data` function computes the numbers that the matching `..._figure` function draws, so the numbers can be
checked or plotted with another tool. Figures are one column or one page wide and readable without colour, by line
styles, markers and hatches. `save_with_data` writes one figure as PDF and PNG, with its numbers as JSON;
`save_figures` writes all figures for which the models have data.
"""

from fedlas.report.figures.confidence import (
    ClassMap,
    Confidences,
    OverUnder,
    class_map_data,
    class_map_figure,
    confidence_data,
    confidence_figure,
    over_under_data,
    over_under_figure,
)
from fedlas.report.figures.gate import (
    EpochStatistics,
    GateStability,
    ModeCurve,
    SmoothingCurve,
    epoch_statistics,
    gate_data,
    gate_figure,
    smoothing_data,
    smoothing_figure,
)
from fedlas.report.figures.indicator import (
    ActivationExample,
    Activations,
    Indicator,
    Norms,
    activations_data,
    activations_figure,
    indicator_data,
    indicator_figure,
    norm_data,
    norm_figure,
)
from fedlas.report.figures.ood import OODFigureData, OODScore, OODSet, ood_data, roc_figure, score_figure
from fedlas.report.figures.reliability import (
    Reliability,
    SmoothReliability,
    reliability_data,
    reliability_figure,
    reliability_lines_figure,
    smooth_reliability_data,
    smooth_reliability_figure,
)
from fedlas.report.figures.saving import save_figures
from fedlas.report.figures.selective import RiskCurve, risk_data, risk_figure
from fedlas.report.figures.style import save_figure, save_with_data
from fedlas.report.figures.theorem import Theorem, Theorems, theorem_data, theorem_figure
from fedlas.report.figures.training import (
    Alphas,
    Feedback,
    LearningCurve,
    alpha_data,
    alpha_figure,
    feedback_data,
    feedback_figure,
    training_data,
    training_figure,
)

__all__ = [
    "ActivationExample",
    "Activations",
    "Alphas",
    "ClassMap",
    "Confidences",
    "EpochStatistics",
    "Feedback",
    "GateStability",
    "Indicator",
    "LearningCurve",
    "ModeCurve",
    "Norms",
    "OODFigureData",
    "OODScore",
    "OODSet",
    "OverUnder",
    "Reliability",
    "RiskCurve",
    "SmoothReliability",
    "SmoothingCurve",
    "Theorem",
    "Theorems",
    "activations_data",
    "activations_figure",
    "alpha_data",
    "alpha_figure",
    "class_map_data",
    "class_map_figure",
    "confidence_data",
    "confidence_figure",
    "epoch_statistics",
    "feedback_data",
    "feedback_figure",
    "gate_data",
    "gate_figure",
    "indicator_data",
    "indicator_figure",
    "norm_data",
    "norm_figure",
    "ood_data",
    "over_under_data",
    "over_under_figure",
    "reliability_data",
    "reliability_figure",
    "reliability_lines_figure",
    "risk_data",
    "risk_figure",
    "roc_figure",
    "save_figure",
    "save_figures",
    "save_with_data",
    "score_figure",
    "smooth_reliability_data",
    "smooth_reliability_figure",
    "smoothing_data",
    "smoothing_figure",
    "theorem_data",
    "theorem_figure",
    "training_data",
    "training_figure",
]
