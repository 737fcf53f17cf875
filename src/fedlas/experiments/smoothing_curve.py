"""The smoothing alpha_i as a function of the indicator (NCI), for both modes of the gate and several beta.

The curves are computed by the loss itself, not from a formula: its gate is fixed to one mode, and the indicator is
passed as the largest logit, without normalisation.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fedlas.experiments.base import AbstractExperiment, Choice, Drawing, PlannedRun
from fedlas.experiments.ledger import Ledger
from fedlas.report.figures import save_with_data, smoothing_data, smoothing_figure
from fedlas.training.backend_flags import backend_flags
from fedlas.training.protocols import loss_options, recipe_for
from fedlas.training.session import Session

LOSS, PAPER_DATA = "fedlas_ls", "cifar10"
BETAS = (0.0, 0.5, 1.0, 4.0)  # label smoothing (0) and the values of the paper
MODES = ("positive", "negative")
NCI = torch.linspace(-3, 3, 121)


class SmoothingCurve(AbstractExperiment):
    """Smoothing as a function of the indicator, as the library computes it; needs no run."""

    name = "smoothing_curve"
    needs_runs = False

    def plan(self, choice: Choice, ledger: Ledger) -> list[PlannedRun]:
        """Return no runs."""
        del choice, ledger
        return []

    def draw(self, drawing: Drawing) -> list[Path]:
        """Draw the curves around the alpha of the paper for CIFAR-10."""
        alpha = float(loss_options(LOSS, PAPER_DATA)["alpha"])
        curves = {(beta, mode): alpha_of(NCI, alpha=alpha, beta=beta, mode=mode) for beta in BETAS for mode in MODES}
        data = smoothing_data(alpha, curves)
        return save_with_data(smoothing_figure(data), data, drawing.folder, self.name)


def alpha_of(nci: Float[Tensor, " n"], *, alpha: float, beta: float, mode: str) -> tuple[Tensor, Tensor]:
    """Return values of the indicator and the smoothing that the loss computes for them.

    Args:
        nci: values of the indicator.
        alpha: base smoothing.
        beta: sensitivity to the indicator.
        mode: mode of the gate, "positive" or "negative".
    """
    options = {"alpha": alpha, "beta": beta, "gate": mode, "source": "max_logit", "normalise": "none"}
    recipe, cpu = recipe_for("digits", loss=LOSS, protocol="small", loss_options=options), torch.device("cpu")
    with backend_flags(recipe, cpu), torch.no_grad():
        # Experiments build losses through a session.
        loss: Any = Session(recipe, cpu, capture=False).loss.eval()
        loss.smoothing(nci[:, None].expand(-1, loss.num_classes))
    return loss.gamma, loss.alpha_i
