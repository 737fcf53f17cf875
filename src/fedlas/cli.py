"""The command line: parses, calls one function, prints.

Errors of the user end in one line and exit code 1; `FEDLAS_DEBUG=1` shows where they come from. What a command prints
for a program to read goes to standard output, everything else to standard error. A table that does not go to a terminal
is as wide as it has to be.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train classifiers that say what they know, and measure whether they do.",
)

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any field of the recipe; may be repeated.")
]
Root = Annotated[
    Path | None, typer.Option("--data-root", help="Where data lies; else $FEDLAS_DATA, else the user's cache.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")]


class Catalogue(StrEnum):
    """What can be listed."""

    losses = "losses"
    data = "data"
    models = "models"
    recipes = "recipes"


@app.command("train")
def train_run(
    data: Annotated[str, typer.Option(help="The data set; see: fedlas list data")],
    loss: Annotated[str, typer.Option(help="The loss; see: fedlas list losses")],
    model: Annotated[str | None, typer.Option(help="The network; by default that of the protocol.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="paper, official, fast or small; see: fedlas list recipes")
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; else runs/<data>-<model>-<loss>-<key>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is there, or start.")] = False,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Train a network, and write its predictions."""
    with one_line_errors():
        from fedlas.train import fit, recipe_for

        recipe = recipe_for(data, model, loss, protocol=protocol).with_settings(parsed(settings))
        run = fit(recipe, out=out, resume=resume, data_root=data_root, device=device)
        if os.environ.get("RANK", "0") == "0":
            typer.echo(run.folder)
            show_run(run)


@app.command("predict")
def predict_run(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str, typer.Option(help="The data set, or `folder` with --set path=DIR.")],
    split: Annotated[str, typer.Option(help="train, val, test, or all of a folder.")] = "test",
    state: Annotated[str, typer.Option(help="best or last weights.")] = "best",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEYWORD=VALUE", help="A keyword of the data set.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; else into the run's predictions.")] = None,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Write the predictions of a trained run on any data."""
    with one_line_errors():
        from fedlas.train.again import predict_again

        options = parsed(settings)
        path = predict_again(
            run, data, split=split, state=state, options=options, out=out, data_root=data_root, device=device
        )
        typer.echo(path)


@app.command("list")
def list_catalogue(what: Annotated[Catalogue, typer.Argument(help="losses, data, models or recipes")]) -> None:
    """List what there is."""
    with one_line_errors():
        head, rows = listed(what)
        show_table(head, rows)


@app.command("demo")
def demo_run(
    out: Annotated[Path, typer.Option(help="Where run folders and figures go.")] = Path("runs/demo"),
) -> None:
    """Train five losses on handwritten digits, and show what their confidence is worth."""
    with one_line_errors():
        from fedlas.experiments.demo import run_demo

        made = run_demo(out, told=lambda text: typer.echo(text, err=True))
        typer.echo(made.text)
        show_table(made.head, made.rows)
        for path in made.files:
            typer.echo(path)


def parsed(settings: Sequence[str] | None) -> dict[str, str]:
    """Take FIELD=VALUE apart."""
    found: dict[str, str] = {}
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--set takes FIELD=VALUE, not {text!r}")
        found[name.strip()] = value.strip()
    return found


def listed(what: Catalogue) -> tuple[list[str], list[list[str]]]:
    """Make the table of a catalogue."""
    if what is Catalogue.losses:
        from fedlas.losses import list_losses

        return ["name", "in a sentence", "source"], [[r.name, r.summary, r.citation] for r in list_losses()]
    if what is Catalogue.data:
        from fedlas.data import list_data

        return ["name", "in a sentence", "source"], [[r.name, r.summary, r.citation] for r in list_data()]
    if what is Catalogue.models:
        from fedlas.models import list_models

        rows = [[r.name, str(r.image_size or "any"), r.summary] for r in list_models()]
        return ["name", "images", "in a sentence"], rows
    from fedlas.train import list_recipes

    head = ["protocol", "data", "model", "loss", "epochs", "batch", "optimizer", "lr", "options of the loss", "key"]
    return head, [
        [p, r.data, r.model, r.loss, str(r.epochs), str(r.batch_size), r.optimizer, f"{r.lr:g}",
         " ".join(f"{k}={v}" for k, v in r.loss_options.items()), r.key]
        for p, r in list_recipes()
    ]  # fmt: skip


def show_run(run: Any) -> None:
    """Say how a run ended."""
    from fedlas.metrics import accuracy, aece, ece, nll

    rows = []
    for state in ("best", "last"):
        made = run.predictions(f"{state}-test")
        numbers = [f"{100 * float(metric(made)):.2f}" for metric in (accuracy, ece, aece)]
        rows.append([state, *numbers, f"{float(nll(made)):.4f}"])
    show_table(["test split", "accuracy %", "ECE %", "AECE %", "NLL"], rows)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; nothing in it is cut off."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold", no_wrap=not terminal)
    for row in rows:
        table.add_row(*row)
    widest = sum(max(len(row[n]) for row in [head, *rows]) + 4 for n in range(len(head)))
    console = (
        Console(highlight=False, markup=False) if terminal else Console(width=widest, highlight=False, markup=False)
    )
    console.print(table)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with one line where the user can do something about it."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        if os.environ.get("FEDLAS_DEBUG"):
            raise
        typer.echo(f"fedlas: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        number = getattr(error, "signal_number", None)
        if number is None:
            raise
        typer.echo(f"fedlas: {error}", err=True)
        raise typer.Exit(128 + number) from None


def main() -> None:
    """Run the command line."""
    app(prog_name="fedlas")
