"""Ablations of FeDLaS: its parts are replaced one at a time; controls that the paper lacks are added.

Controls: label smoothing with the mean alpha of the last epoch of FeDLaS (is the effect only less smoothing?), the
directions of the learned gate shuffled across the samples of a batch (does the assignment to samples matter?), and the
indicator shuffled in the same way. The first control is planned once FeDLaS-LS is in the ledger.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlas.errors import UserError
from fedlas.experiments.base import Choice
from fedlas.experiments.grid import AbstractGrid, Benchmark, Measured, evaluated_split
from fedlas.experiments.ledger import ADVICE, Ledger
from fedlas.training import recipe_for
from fedlas.training.recipe import Recipe

OURS = "fedlas_ls"
BASE = OURS.removeprefix("fedlas_")
MARGIN = "fedlas_mbls"
HALF = "ls half"
SAME_ALPHA = "ls same mean alpha"
ALPHA = 0.05  # default of the losses, used if the protocol does not set alpha
DIGITS = 5  # decimals of the mean alpha; with more, rounding noise would change the recipe


@dataclass(frozen=True)
class Variant:
    """A row: a loss with some keywords changed.

    Args:
        loss: the loss.
        description: short description of the change.
        options: keywords of the loss that differ from the protocol.
    """

    loss: str
    description: str
    options: dict[str, Any] = field(default_factory=dict)


def _variants() -> dict[str, Variant]:
    variants = {
        "ce": Variant("ce", "cross-entropy"),
        BASE: Variant(BASE, "label smoothing"),
        HALF: Variant(BASE, "label smoothing, half the alpha"),
        OURS: Variant(OURS, "FeDLaS-LS as in the paper"),
        SAME_ALPHA: Variant(BASE, "control: label smoothing with the mean alpha that FeDLaS-LS ended with"),
        f"{OURS} gate=shuffled": Variant(OURS, "control: directions of other samples", {"gate": "shuffled"}),
        f"{OURS} indicator=shuffled": Variant(OURS, "control: norms of other samples", {"shuffle_indicator": True}),
    }
    changes: list[tuple[str, str, dict[str, Any]]] = [
        ("gate=positive", "gate fixed: more smoothing for larger norms", {"gate": "positive"}),
        ("gate=negative", "gate fixed: less smoothing for larger norms", {"gate": "negative"}),
        ("gate=soft", "gate without the sign", {"gate": "soft"}),
        ("norm=2", "L2 norm", {"norm": 2}),
        ("norm=inf", "largest feature", {"norm": "inf"}),
        ("source=max_prob", "largest probability in place of the norm", {"source": "max_prob"}),
        ("source=max_logit", "largest logit in place of the norm", {"source": "max_logit"}),
        ("normalise=batch", "statistics of the batch alone", {"normalise": "batch"}),
        ("normalise=none", "not normalised", {"normalise": "none"}),
        ("start=first_batch", "running statistics start with the first batch", {"start": "first_batch"}),
        *((f"theta={v}", f"weight of the batch {v}", {"theta": v}) for v in (0.001, 0.1, 0.5)),
        *((f"beta={v}", f"strength {v}", {"beta": v}) for v in (0.5, 1.0, 2.0, 8.0)),
    ]
    variants |= {f"{OURS} {name}": Variant(OURS, description, options) for name, description, options in changes}
    variants |= {MARGIN: Variant(MARGIN, "FeDLaS-MbLS as in the paper")}
    variants |= {
        f"{MARGIN} {name}": Variant(MARGIN, description, options)
        for name, description, options in (
            ("margin_reduction=sum", "margins added up over classes", {"margin_reduction": "sum"}),
            *(change for change in changes if change[0].startswith(("gate=", "start="))),
        )
    }
    return variants


class Ablations(AbstractGrid):
    """Source, normalisation, start, theta, beta, gate and margins exchanged one at a time, and three controls."""

    name = "ablations"
    title = "What each part of FeDLaS is worth"
    one_network = True
    compared = False

    @property
    def methods(self) -> dict[str, str]:
        return {name: variant.description for name, variant in _variants().items()}

    def data_sets(self) -> Sequence[str]:
        return ("cifar10",)

    def measured(self, data: str, choice: Choice) -> Sequence[Measured]:
        directions = Measured("over_ece", "O-ECE %"), Measured("under_ece", "U-ECE %")
        return (*super().measured(data, choice), *directions)

    def recipe(self, benchmark: Benchmark, row: str, seed: int, choice: Choice, ledger: Ledger) -> Recipe | None:
        variant = _variants()[row]
        options = dict(variant.options)
        if row == SAME_ALPHA:
            alpha = self._mean_alpha(benchmark, seed, choice, ledger)
            if alpha is None:
                return None
            options["alpha"] = alpha
        base = recipe_for(benchmark.data, benchmark.model, variant.loss, protocol=choice.protocol, seed=seed)
        if row == HALF:
            options["alpha"] = float(base.loss_options.get("alpha", ALPHA)) / 2
        varied = base.replace(loss_options={**base.loss_options, **options}).with_settings(choice.changes)
        return varied.replace(splits=tuple(dict.fromkeys((*varied.splits, evaluated_split(varied, choice)))))

    def _mean_alpha(self, benchmark: Benchmark, seed: int, choice: Choice, ledger: Ledger) -> float | None:
        """Return the mean alpha of the last epoch of FeDLaS-LS with the same seed."""
        ours = self.recipe(benchmark, OURS, seed, choice, ledger)
        line = None if ours is None else ledger.find(ours)
        if line is None or ours is None:
            return None
        ratio = line.curve[-1].get("gate", {}).get("alpha_ratio") if line.curve else None
        if ratio is None:
            raise UserError(f"{ledger.where(line)} has no alpha_ratio in the last epoch of its curve; {ADVICE}")
        return round(float(ratio) * float(ours.loss_options.get("alpha", ALPHA)), DIGITS)
