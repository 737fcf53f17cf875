"""The base class of losses, `AbstractLoss` (`loss.py`), and its parts: batches, checks and shared formulas."""

from fedlas.catalog import one_of
from fedlas.losses.base.batch import IGNORE_INDEX, Batch, as_batch, at_least_float32, full_precision
from fedlas.losses.base.distillation import AbstractSelfDistillation, TableType
from fedlas.losses.base.functional import complement, focal, smoothed_cross_entropy
from fedlas.losses.base.hyperparameters import at_least, whole, within
from fedlas.losses.base.loss import AbstractLoss, Common, GateState, Options
from fedlas.losses.base.part import AbstractExact, AbstractPart

__all__ = [
    "IGNORE_INDEX",
    "AbstractExact",
    "AbstractLoss",
    "AbstractPart",
    "AbstractSelfDistillation",
    "Batch",
    "Common",
    "GateState",
    "Options",
    "TableType",
    "as_batch",
    "at_least",
    "at_least_float32",
    "complement",
    "focal",
    "full_precision",
    "one_of",
    "smoothed_cross_entropy",
    "whole",
    "within",
]
