"""`fedlas train`, `predict` and `search`: whatever needs a network."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.cli.endings import one_line_errors
from fedlas.cli.options import Device, Root, Settings, numbers, parsed, parsed_fields
from fedlas.cli.places import check_places, has_format, refuse_other_kind
from fedlas.cli.terminal import show, show_table


def train_run(
    data: Annotated[str, typer.Option(help="The data set; see: fedlas list data")],
    loss: Annotated[str, typer.Option(help="The loss; see: fedlas list losses")],
    model: Annotated[str | None, typer.Option(help="The network; by default that of the protocol.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="paper, official, fast, small or standard; see: fedlas list recipes")
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; else runs/<data>-<model>-<loss>-<key>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is there, or start.")] = False,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Train a network, and write its predictions."""
    with one_line_errors():
        from fedlas.training import fit, recipe_for

        check_places([], out)
        recipe = recipe_for(data, model, loss, protocol=protocol).with_settings(parsed_fields(settings))
        run = fit(recipe, out=out, resume=resume, data_root=data_root, device=device)
        if os.environ.get("RANK", "0") == "0":
            show(run.folder)
            show_run(run)


def predict_run(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    data: Annotated[str, typer.Option(help="The data set, or `folder` with --set path=DIR.")],
    split: Annotated[
        str | None,
        typer.Option(help="train, val, test or, of a folder, all; by default test, and all of another folder."),
    ] = None,
    state: Annotated[str, typer.Option(help="best or last weights.")] = "best",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEYWORD=VALUE", help="A keyword of the data set.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; else a new file in the run's predictions.")] = None,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Write the predictions of a trained run on any data."""
    with one_line_errors():
        from fedlas.training.predict_run import predict_with
        from fedlas.training.recipe_text import value_of

        check_places([out])
        options = {name: value_of(text) for name, text in parsed(settings).items()}
        path = predict_with(
            run, data, split=split, state=state, options=options, out=out, data_root=data_root, device=device
        )
        show(path)


def search_options(
    data: Annotated[str, typer.Option(help="The data set.")],
    loss: Annotated[str, typer.Option(help="The loss whose keywords are searched.")],
    over: Annotated[list[str], typer.Option(help="NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C; may be repeated.")],
    trials: Annotated[int, typer.Option(help="How many to try.")] = 20,
    metric: Annotated[str, typer.Option(help="nll, ece, aece, brier or accuracy, on the validation split.")] = "nll",
    model: Annotated[str | None, typer.Option(help="The network; by default that of the protocol.")] = None,
    protocol: Annotated[str | None, typer.Option(help="paper, official, fast, small or standard.")] = None,
    seeds: Annotated[str, typer.Option(help="A run for each, in every trial.")] = "1",
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="Where run folders and search.json go.")] = Path("runs/search"),
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Search keywords of a loss on the validation split; the test split is never looked at."""
    with one_line_errors():
        from fedlas.experiments.search import FILE_NAME, FORMAT, Range, search
        from fedlas.training import recipe_for

        check_places([], out)
        refuse_other_kind(out / FILE_NAME, "search of fedlas", partial(has_format, FORMAT))
        recipe = recipe_for(data, model, loss, protocol=protocol).with_settings(parsed_fields(settings))
        found = search(
            recipe, [Range.parse(text) for text in over], trials=trials, folder=out, metric=metric,
            seeds=numbers(seeds), device=device, data_root=data_root,
        )  # fmt: skip
        chosen = " ".join(f"--set loss_options.{name}={value}" for name, value in found.best.options.items())
        show(f"{metric} {found.best.mean:.5f} on the validation split: {chosen}")


def show_run(run: Any) -> None:
    """Say how a run ended."""
    from fedlas.metrics import accuracy, aece, ece, nll

    split = "test" if "test" in run.recipe.splits else run.recipe.splits[-1]
    rows = []
    for state in ("best", "last"):
        made = run.predictions(f"{state}-{split}")
        shown = [f"{100 * float(metric(made)):.2f}" for metric in (accuracy, ece, aece)]
        rows.append([state, *shown, f"{float(nll(made)):.4f}"])
    show_table([f"{split} split", "accuracy %", "ECE %", "AECE %", "NLL"], rows)
