"""Out-of-distribution (OOD) detection: scores of samples, and detection metrics (AUROC, AUPR, FPR at a TPR)."""

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
