"""`fedlas list`: what there is."""

from enum import StrEnum
from typing import Annotated

import typer

from fedlas.cli.endings import one_line_errors
from fedlas.cli.terminal import show_table


class Catalogue(StrEnum):
    """What can be listed."""

    losses = "losses"
    data = "data"
    models = "models"
    recipes = "recipes"
    experiments = "experiments"
    calibrators = "calibrators"


def list_catalogue(
    what: Annotated[Catalogue, typer.Argument(help="losses, data, models, calibrators, recipes or experiments")],
) -> None:
    """List what there is."""
    with one_line_errors():
        head, rows = listed(what)
        show_table(head, rows)


def listed(what: Catalogue) -> tuple[list[str], list[list[str]]]:
    """Make the table of a catalogue."""
    if what is Catalogue.losses:
        from fedlas.losses import list_losses

        return ["name", "in a sentence", "source"], [[r.name, r.summary, r.citation] for r in list_losses()]
    if what is Catalogue.data:
        from fedlas.data import list_data

        everywhere = set.intersection(*(set(r.keywords) for r in list_data()))
        own = {r.name: " ".join(word for word in r.keywords if word not in everywhere) for r in list_data()}
        head = ["name", "in a sentence", "keywords of its own", "source"]
        return head, [[r.name, r.summary, own[r.name], r.citation] for r in list_data()]
    if what is Catalogue.models:
        from fedlas.models import list_models

        rows = [[r.name, str(r.image_size or "any"), r.summary] for r in list_models()]
        return ["name", "images", "in a sentence"], rows
    if what is Catalogue.calibrators:
        from fedlas.posthoc import list_calibrators

        return ["name", "in a sentence", "source"], [[r.name, r.summary, r.citation] for r in list_calibrators()]
    if what is Catalogue.experiments:
        from fedlas.experiments.planning import list_experiments

        return ["name", "in a sentence"], list_experiments()
    from fedlas.training import list_recipes

    head = ["protocol", "data", "model", "loss", "epochs", "batch", "optimizer", "lr", "options of the loss", "key"]
    return head, [
        [p, r.data, r.model, r.loss, str(r.epochs), str(r.batch_size), r.optimizer, f"{r.lr:g}",
         " ".join(f"{k}={v}" for k, v in r.loss_options.items()), r.key]
        for p, r in list_recipes()
    ]  # fmt: skip
