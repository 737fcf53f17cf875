"""`fedlas train`, `predict` and `search`: commands that train or apply a model."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.cli.errors import one_line_errors
from fedlas.cli.options import Device, ProtocolName, Root, Settings, parse_recipe_fields, parse_seeds, parse_settings
from fedlas.cli.output_paths import Overwrite, check_overwrite, check_writable
from fedlas.cli.terminal import is_quiet, show, show_table


def train_run(
    data: Annotated[str, typer.Option(help="Data set; see: fedlas list data")],
    loss: Annotated[str, typer.Option(help="Loss; see: fedlas list losses")],
    model: Annotated[
        str | None, typer.Option(help="Model (see: fedlas list models); by default that of the protocol.")
    ] = None,
    protocol: ProtocolName = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/<data>-<model>-<loss>-<key>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder, if there is one.")] = False,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Train a model and write its predictions."""
    with one_line_errors():
        from fedlas.training import fit, recipe_for

        check_writable([], out)
        recipe = recipe_for(data, model, loss, protocol=protocol).with_settings(parse_recipe_fields(settings))
        run = fit(recipe, out=out, resume=resume, data_root=data_root, device=device, progress=_progress())
        if os.environ.get("RANK", "0") == "0":
            show(run.folder)
            show_run(run)


def predict_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, as written by `fedlas train`.")],
    data: Annotated[
        str, typer.Option(help="Data set (see: fedlas list data); for your own images: folder, with --set path=DIR.")
    ],
    split: Annotated[
        str | None,
        typer.Option(
            help="Split: train, val, test, or all (image folders only); by default test for the data of the recipe, "
            "otherwise all, if the data set has it."
        ),
    ] = None,
    state: Annotated[str, typer.Option(help="Weights to use: best (on the validation split) or last.")] = "best",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEYWORD=VALUE", help="Set an option of the data set; may be repeated."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file (.safetensors); by default in RUN/predictions.")] = None,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Write the predictions of a trained model on any data."""
    with one_line_errors():
        from fedlas.training.predict_run import predict_with
        from fedlas.training.recipe_text import value_of

        check_writable([out])
        options = {name: value_of(text) for name, text in parse_settings(settings).items()}
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
    loss: Annotated[str, typer.Option(help="Loss whose options are searched; see: fedlas list losses")],
    over: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=RANGE", help="Option and its range: LOW:HIGH, LOW:HIGH:log or A,B,C; may be repeated."
        ),
    ],
    trials: Annotated[int, typer.Option(help="Number of trials.")] = 20,
    metric: Annotated[
        str, typer.Option(help="Validation metric to optimise: nll, ece, aece, brier or accuracy.")
    ] = "nll",
    model: Annotated[
        str | None, typer.Option(help="Model (see: fedlas list models); by default that of the protocol.")
    ] = None,
    protocol: ProtocolName = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the runs of each trial, separated by commas.")] = "1",
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="Output folder for runs and search.json.")] = Path("runs/search"),
    overwrite: Overwrite = False,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Search options of a loss on the validation split; the test split is not used."""
    with one_line_errors():
        from fedlas.experiments.search import FILE_NAME, Range, search
        from fedlas.training import recipe_for

        check_writable([], out)
        recipe = recipe_for(data, model, loss, protocol=protocol).with_settings(parse_recipe_fields(settings))
        searched: dict[str, Any] = {"metric": metric, "seeds": parse_seeds(seeds)}
        ranges = [Range.parse(text) for text in over]
        record = out / FILE_NAME
        check_overwrite([record], overwrite=overwrite or is_same_search(record, recipe, ranges, **searched))
        result = search(
            recipe, ranges, **searched, trials=trials, folder=out, device=device, data_root=data_root,
            progress=_progress(),
        )  # fmt: skip
        chosen = " ".join(f"--set loss_options.{name}={value}" for name, value in result.best.options.items())
        show(f"{metric} {result.best.mean:.5f} on the validation split: {chosen}")


def is_same_search(path: Path, recipe: Any, ranges: Sequence[Any], *, metric: str, seeds: Sequence[int]) -> bool:
    """Return whether a file is the record of this search, which may then continue."""
    from fedlas.experiments.search import Search

    expected = Search(recipe, tuple(ranges), metric, tuple(seeds), 0, (), {}).to_dict()
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    names = ("format", "recipe", "ranges", "metric", "seeds")
    return isinstance(stored, dict) and all(stored.get(n) == json.loads(json.dumps(expected[n])) for n in names)


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
