"""Detection of foreign data: scores that say how foreign a sample looks, and numbers that say how well they tell."""

from fedlas.ood.detection import Detection, Separation, aupr, auroc, detect, detect_scores, fpr_at_tpr
from fedlas.ood.scores import (
    energy,
    entropy,
    feature_norm,
    generalised_entropy,
    knn,
    max_logit,
    max_probability,
    score_names,
    score_of,
)

__all__ = [
    "Detection",
    "Separation",
    "aupr",
    "auroc",
    "detect",
    "detect_scores",
    "energy",
    "entropy",
    "feature_norm",
    "fpr_at_tpr",
    "generalised_entropy",
    "knn",
    "max_logit",
    "max_probability",
    "score_names",
    "score_of",
]
