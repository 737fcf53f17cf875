"""Compare training in bfloat16 with CUDA graphs to eager training in float32 (accuracy and calibration)."""

from collections.abc import Sequence
from typing import Any

from fedlas.experiments.base import Choice
from fedlas.experiments.grid import AbstractGrid, Benchmark
from fedlas.experiments.ledger import Ledger
from fedlas.training.recipe import Recipe

# The usual setup: float32 weights and images, TF32 matrix products, no compilation.
PLAIN: dict[str, Any] = {"precision": "tf32", "channels_last": False, "compile": False, "capture": False}
FAST, SLOW = "ce", "ce plain"


class Precision(AbstractGrid):
    """Accuracy and calibration of cross-entropy in bfloat16 with a captured step, and in float32 without."""

    name = "precision"
    title = "What the fast path costs: bfloat16, channels last, compiled and captured"
    one_network = True
    compared = False

    @property
    def methods(self) -> dict[str, str]:
        return {FAST: "as the protocol says", SLOW: "float32 (TF32 products), neither compiled nor captured"}

    def data_sets(self) -> Sequence[str]:
        return ("cifar10",)

    def recipe(self, benchmark: Benchmark, row: str, seed: int, choice: Choice, ledger: Ledger) -> Recipe | None:
        recipe = super().recipe(benchmark, FAST, seed, choice, ledger)
        return recipe if row == FAST or recipe is None else recipe.replace(**PLAIN).with_settings(choice.changes)
