"""What the fast path costs: the same training in bfloat16 as one captured graph, and in float32 step by step."""

from collections.abc import Sequence
from typing import Any

from fedlas.experiments.base import Choice
from fedlas.experiments.grid import AbstractGrid, Place
from fedlas.experiments.ledger import Ledger
from fedlas.training.recipe import Recipe

# As most people train: float32 weights and images, TF32 products, nothing compiled.
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

    def recipe(self, place: Place, row: str, seed: int, choice: Choice, ledger: Ledger) -> Recipe | None:
        made = super().recipe(place, FAST, seed, choice, ledger)
        return made if row == FAST or made is None else made.replace(**PLAIN).with_settings(choice.changes)
