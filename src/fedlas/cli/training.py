"""`fedlas train`, `predict` and `search`: commands that need a model."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.cli.errors import one_line_errors
from fedlas.cli.options import Device, Root, Settings, numbers, parsed, parsed_fields
from fedlas.cli.output_paths import Overwrite, check_overwrite, check_writable
from fedlas.cli.terminal import is_quiet, show, show_table


def train_run(
    data: Annotated[str, typer.Option(help="Data set; see: fedlas list data")],
    loss: Annotated[str, typer.Option(help="Loss; see: fedlas list losses")],
    model: Annotated[str | None, typer.Option(help="Model; that of the protocol by default.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="Training protocol: paper, official, fast, small or standard; see: fedlas list recipes"),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/<data>-<model>-<loss>-<key>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder, or start a new one.")] = False,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Train a model and write its predictions."""
    with one_line_errors():
        from fedlas.training import fit, recipe_for

        check_writable([], out)
        recipe = recipe_for(data, model, loss, protocol=protocol).with_settings(parsed_fields(settings))
        run = fit(recipe, out=out, resume=resume, data_root=data_root, device=device, progress=_progress())
        if os.environ.get("RANK", "0") == "0":
            show(run.folder)
            show_run(run)


def predict_run(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    data: Annotated[str, typer.Option(help="Data set, or `folder` with --set path=DIR.")],
    split: Annotated[
        str | None,
        typer.Option(help="train, val, test or all (image folders only); test, or all of another folder, by default."),
    ] = None,
    state: Annotated[str, typer.Option(help="Weights: best or last.")] = "best",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEYWORD=VALUE", help="Set a keyword of the data set; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output file; by default a new file in the predictions of the run.")
    ] = None,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Write the predictions of a trained model on any data."""
    with one_line_errors():
        from fedlas.training.predict_run import predict_with
        from fedlas.training.recipe_text import value_of

        check_writable([out])
        options = {name: value_of(text) for name, text in parsed(settings).items()}
        path = predict_with(
            run,
            data,
            split=split,
            state=state,
            options=options,
            out=out,
            data_root=data_root,
            device=device,
            progress=_progress(),
        )
        show(path)


def search_options(
    data: Annotated[str, typer.Option(help="Data set; see: fedlas list data")],
    loss: Annotated[str, typer.Option(help="Loss whose keywords are searched.")],
    over: Annotated[
        list[str], typer.Option(help="Search range: NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C; may be repeated.")
    ],
    trials: Annotated[int, typer.Option(help="Number of trials.")] = 20,
    metric: Annotated[
        str, typer.Option(help="Validation metric to optimise: nll, ece, aece, brier or accuracy.")
    ] = "nll",
    model: Annotated[str | None, typer.Option(help="Model; that of the protocol by default.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="Training protocol: paper, official, fast, small or standard.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the runs of each trial, separated by commas.")] = "1",
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="Output folder for runs and search.json.")] = Path("runs/search"),
    overwrite: Overwrite = False,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Search the keywords of a loss on the validation split; the test split is not used."""
    with one_line_errors():
        from fedlas.experiments.search import FILE_NAME, Range, search
        from fedlas.training import recipe_for

        check_writable([], out)
        check_overwrite([out / FILE_NAME], overwrite=overwrite)
        recipe = recipe_for(data, model, loss, protocol=protocol).with_settings(parsed_fields(settings))
        result = search(
            recipe, [Range.parse(text) for text in over], trials=trials, folder=out, metric=metric,
            seeds=numbers(seeds), device=device, data_root=data_root, progress=_progress(),
        )  # fmt: skip
        chosen = " ".join(f"--set loss_options.{name}={value}" for name, value in result.best.options.items())
        show(f"{metric} {result.best.mean:.5f} on the validation split: {chosen}")


def _progress() -> bool | None:
    return False if is_quiet() else None


def show_run(run: Any) -> None:
    """Print the metrics of a run."""
    from fedlas.metrics import accuracy, aece, ece, nll

    split = "test" if "test" in run.recipe.splits else run.recipe.splits[-1]
    rows = []
    for state in ("best", "last"):
        predictions = run.predictions(f"{state}-{split}")
        percentages = [f"{100 * float(metric(predictions)):.2f}" for metric in (accuracy, ece, aece)]
        rows.append([state, *percentages, f"{float(nll(predictions)):.4f}"])
    show_table([f"{split} split", "accuracy %", "ECE %", "AECE %", "NLL"], rows)
