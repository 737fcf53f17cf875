"""`fedlas list`: losses, data sets, models, calibrators, recipes and experiments."""

from enum import StrEnum
from typing import Annotated

import typer

from fedlas.cli.errors import one_line_errors
from fedlas.cli.terminal import show_table


class Catalogue(StrEnum):
    """Catalogues that `fedlas list` can print."""

    losses = "losses"
    data = "data"
    models = "models"
    recipes = "recipes"
    experiments = "experiments"
    calibrators = "calibrators"


def list_catalogue(
    kind: Annotated[
        Catalogue,
        typer.Argument(metavar="KIND", help="What to list."),
    ],
) -> None:
    """List losses, data sets, models, calibrators, recipes or experiments."""
    with one_line_errors():
        head, rows = list_entries(kind)
        show_table(head, rows)


def list_entries(kind: Catalogue) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of a catalogue."""
    if kind is Catalogue.losses:
        from fedlas.losses import list_losses

        return ["name", "description", "source"], [[r.name, r.summary, r.citation] for r in list_losses()]
    if kind is Catalogue.data:
        from fedlas.data import list_data

        shared = set.intersection(*(set(r.keywords) for r in list_data()))
        options = {r.name: " ".join(keyword for keyword in r.keywords if keyword not in shared) for r in list_data()}
        head = ["name", "description", "own keywords", "source"]
        return head, [[r.name, r.summary, options[r.name], r.citation] for r in list_data()]
    if kind is Catalogue.models:
        from fedlas.models import list_models

        rows = [[r.name, str(r.cls.image_size or "any"), r.summary] for r in list_models()]
        return ["name", "images", "description"], rows
    if kind is Catalogue.calibrators:
        from fedlas.posthoc import list_calibrators

        return ["name", "description", "source"], [[r.name, r.summary, r.citation] for r in list_calibrators()]
    if kind is Catalogue.experiments:
        from fedlas.experiments.planning import list_experiments

        return ["name", "description"], list_experiments()
    from fedlas.training import list_recipes

    head = ["protocol", "data", "model", "loss", "epochs", "batch", "optimizer", "lr", "options of the loss", "key"]
    return head, [
        [p, r.data, r.model, r.loss, str(r.epochs), str(r.batch_size), r.optimizer, f"{r.lr:g}",
         " ".join(f"{k}={v}" for k, v in r.loss_options.items()), r.key]
        for p, r in list_recipes()
    ]  # fmt: skip
