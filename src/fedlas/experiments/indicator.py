"""The paper's first figure: feature norms against confidence, activations of easy and of hard images, and the theorem.

The theorem (Park et al., ICCV 2023, as the paper's section 3 cites it). Let a be the features that enter the last
layer, W its weights, B = sign(W) the weights of a hidden classifier with logits B a, and sign(x) = 1 above zero and -1
otherwise. Then for every class j

    0 <= ||a||_1 - (B a)_j <= ||a||_inf ||sign(a) - b_j||_1

Proof: ||a||_1 = Σ_k sign(a_k) a_k, so the difference is Σ_k (sign(a_k) - b_jk) a_k. A unit adds 0 if its signs agree
and 2 |a_k| otherwise, which gives the left inequality; Hölder's inequality gives the right one. Both bounds hold for
all features and weights, trained or not, so checking them on every sample only validates the extraction of norms,
features and weights. After a ReLU (a >= 0), the difference is twice the activation of the units whose weight for class
j is not positive. Training can change the ratio of the largest hidden logit to the norm, and their correlation, so both
are measured at initialisation too.

The theorem ignores the bias of the last layer; `Theorem.remarks` mentions a bias and negative features, if any. The
paper's caption and text disagree about the axes of the scatter plot; this module follows the text (norm on x). The
paper does not define "normalised"; here it is the indicator, with mean and standard deviation of the test split.

The paper uses MNIST. If its files are missing, Fashion-MNIST is used, or else the 8 x 8 digits of scikit-learn; the
title of each figure names the data set.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fedlas.experiments.base import AbstractExperiment, Choice, Drawing, PlannedRun
from fedlas.experiments.ledger import Ledger
from fedlas.predictions import Predictions
from fedlas.report.figures import (
    Theorem,
    Theorems,
    activations_data,
    activations_figure,
    indicator_data,
    indicator_figure,
    save_with_data,
    theorem_data,
    theorem_figure,
)
from fedlas.training.backend_flags import backend_flags
from fedlas.training.build import select_device
from fedlas.training.checkpoint import load_for, restore_module
from fedlas.training.precision import autocast
from fedlas.training.protocols import list_recipes, recipe_for
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import Run, RunError
from fedlas.training.session import Session

PROTOCOL, MODEL, LOSS = "small", "small_cnn", "ce"
PAPER, ALWAYS_THERE = "mnist", "digits"


@dataclass(frozen=True, eq=False)
class ModelOutputs:
    """Outputs of a model on all test images.

    Args:
        predictions: predictions with all features, not only their norm.
        images: the images before any transform.
        weight: weight of the last layer.
        bias: bias of the last layer, if any.
    """

    predictions: Predictions
    images: UInt8[Tensor, "n channels rows columns"]
    weight: Float[Tensor, "classes width"]
    bias: Float[Tensor, " classes"] | None


class Indicator(AbstractExperiment):
    """Feature norm and confidence, activations, and the theorem, for a small network."""

    # It has no tables: the numbers need the model and are stored with the figures.

    name = "indicator"
    draws_runs = True

    def plan(self, choice: Choice, ledger: Ledger) -> list[PlannedRun]:
        """Return one run, on the first data set with a run or on disk; or one on each requested data set."""
        recipes = list(_recipes(choice))
        if choice.data is None:
            known = [recipe for recipe in recipes if ledger.find(recipe) is not None]
            recipes = known[:1] or [next(recipe for recipe in recipes if _at_hand(recipe, choice.data_root))]
        return [PlannedRun(recipe, PROTOCOL) for recipe in recipes]

    def draw(self, drawing: Drawing) -> list[Path]:
        """Draw the first finished run, or the runs on all requested data sets."""
        runs = [drawing.find(recipe) for recipe in _recipes(drawing.choice)]
        finished = [run for run in runs if run is not None]
        used = finished[:1] if drawing.choice.data is None else finished
        return [path for run in used for path in _drawn(drawing, run)]


def _recipes(choice: Choice) -> Iterator[Recipe]:
    """Return the recipes of all requested or available data sets, the paper's first."""
    choice.select([MODEL], choice.models, "network")
    choice.select([LOSS], choice.losses, "loss")
    small = {recipe.data for name, recipe in list_recipes([LOSS]) if name == PROTOCOL and recipe.model == MODEL}
    order = sorted(small, key=lambda data: (data != PAPER, data == ALWAYS_THERE, data))
    for data in choice.select(order, choice.data, "data set"):
        recipe = recipe_for(data, MODEL, LOSS, protocol=PROTOCOL, seed=choice.seeds[0])
        yield recipe.with_settings(choice.changes)


def _at_hand(recipe: Recipe, data_root: Path | None) -> bool:
    """Return whether the data can be read without a download."""
    # Experiments access data through a session. This recipe, which does not allow downloads, is never trained.
    offline = recipe.replace(data_options={**recipe.data_options, "download": False})
    cpu = torch.device("cpu")
    try:
        with backend_flags(offline, cpu):
            Session(offline, cpu, data_root, capture=False).evaluation_source("test")
    except FileNotFoundError:
        return False
    return True


def _drawn(drawing: Drawing, run: Run) -> Iterator[Path]:
    """Draw the three figures of one run."""
    recipe, device = run.recipe, select_device(drawing.device)
    with backend_flags(recipe, device):
        session = Session(recipe, device, drawing.data_root, capture=False)
        before = run_model(session)
        restore_module(session.net.model, load_for(run, recipe)["best"])
        after = run_model(session)
    written = run.predictions("best-test")
    if written.index is None or not torch.equal(written.index, cast("Tensor", after.predictions.index)):
        raise RunError(f"the test split of {recipe.data} is not the one that {run.folder} was evaluated on")
    title = session.data.title if recipe.data == PAPER else f"{session.data.title} instead of the paper's MNIST"
    indicator = indicator_data(written, title)
    yield from save_with_data(indicator_figure(indicator), indicator, drawing.folder, f"indicator-{recipe.data}")
    activations = activations_data(after.predictions, after.images, title)
    name = f"indicator-activations-{recipe.data}"
    yield from save_with_data(activations_figure(activations), activations, drawing.folder, name)
    theorems = Theorems(title, _theorem(after, "trained", written), _theorem(before, "at initialisation"))
    name = f"indicator-theorem-{recipe.data}"
    yield from save_with_data(theorem_figure(theorems), theorems, drawing.folder, name)


def _theorem(outputs: ModelOutputs, title: str, written: Predictions | None = None) -> Theorem:
    """Check the theorem with the norms that the run stored, if any."""
    norms = None if written is None or written.features is None else written.features[:, 0]
    return theorem_data(outputs.predictions, outputs.weight, outputs.bias, norms=norms, title=title)


@torch.no_grad()
def run_model(session: Session) -> ModelOutputs:
    """Run the model of a session on all test images."""
    split, net = session.data.split("test"), session.net
    source: Any = session.evaluation_source("test")  # small images are kept on the device
    net.eval()
    rows = []
    for images, labels, index in source.batches(session.recipe.eval_batch_size):
        with autocast(session.recipe.precision, session.device):
            logits, features = net.forward(images)  # not compiled, as in prediction
        rows.append((logits.float(), labels, features.float().flatten(1), index))
    logits, labels, features, index = (torch.cat(parts).cpu() for parts in zip(*rows, strict=True))
    head: Any = net.model.get_submodule(net.head_name)
    bias = None if head.bias is None else head.bias.detach().cpu().clone()
    return ModelOutputs(
        Predictions(logits, labels, features=features, index=index, class_names=split.class_names, split="test"),
        cast("Tensor", split.images),
        head.weight.detach().flatten(1).cpu().clone(),
        bias,
    )
