"""`fedlas evaluate` and `fedlas ood`: evaluate files of predictions."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedlas.cli.errors import ignore_closed_pipe, one_line_errors
from fedlas.cli.options import Json, Level, Seed, seed_option, split_list, with_columns
from fedlas.cli.output_paths import (
    FIGURE_SUFFIXES,
    Overwrite,
    check_outputs,
    check_overwrite_in,
    json_file,
    write_text,
)
from fedlas.cli.terminal import command_line, progress, show, show_table
from fedlas.progress import Progress

CONDITION_HOLDS = 3  # exit code of `evaluate --fail-if`
OOD_FORMAT = "fedlas.ood/1"  # format of the file that `ood --json` writes
OUTPUT = "Output"  # panel of the help


class Positive(StrEnum):
    """Positive class of OOD detection."""

    OOD = "ood"
    ID = "id"


@with_columns
def evaluate_command(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Predictions of each model, a file or a run folder, as FILE or NAME=FILE.",
            show_default=False,
        ),
    ],
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            help="Predictions on other samples to fit calibrators on: FILE, or MODEL=FILE for several models."
        ),
    ] = None,
    calibration_labels: Annotated[
        Path | None, typer.Option(help="File of the labels of --calibration, such as val_labels.npy.")
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(
            help="Predictions on out-of-distribution (OOD) data: NAME=FILE, or MODEL/NAME=FILE for several models."
        ),
    ] = None,
    posthoc: Annotated[
        str,
        typer.Option(help="Calibrators to evaluate, separated by commas, '' for none; see: fedlas list calibrators"),
    ] = "temperature",
    folds: Annotated[
        int, typer.Option(help="Number of folds for cross-fitting calibrators, if --calibration is not given.")
    ] = 5,
    bins: Annotated[int, typer.Option(help="Number of bins of the ECE and other binned metrics.")] = 15,
    level: Level = 0.95,
    resamples: Annotated[
        int | None, typer.Option(help="Number of bootstrap resamples; by default as many as each metric needs.")
    ] = None,
    seed: Annotated[int, seed_option("Random seed for bootstrap intervals and cross-fitting.")] = 0,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML report to this file.", rich_help_panel=OUTPUT)
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the images shown in the report; by default the folder of the predictions.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Write all results as JSON to this file; - is standard output.", rich_help_panel=OUTPUT),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write figures as PDF, PNG and SVG to this folder.", rich_help_panel=OUTPUT)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing files.", rich_help_panel=OUTPUT)
    ] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Exit with code 3 if this holds, such as 'ece>0.05'; may be repeated.", rich_help_panel=OUTPUT
        ),
    ] = None,
    *,
    columns: Any,
) -> None:
    """Evaluate the calibration of a model from its predictions.

    Several models on the same samples are compared by paired tests.
    """
    with one_line_errors():
        from fedlas.report.conditions import check_conditions
        from fedlas.report.evaluate_files import evaluate_files, named_files
        from fedlas.report.figures.saving import NAMES

        calibrators = split_list(posthoc or None) or ()
        check_conditions(fail_if or (), calibrators)
        written: list[Path] = []
        paths_by_name = named_files(files)
        check_outputs([html, json_file(json)], overwrite=overwrite, inputs=paths_by_name.values(), folder=figures)
        check_overwrite_in(figures, NAMES, FIGURE_SUFFIXES, overwrite=overwrite)
        with progress() as report:
            inputs = {
                name: run_model(path, images, report) if path.is_dir() else path for name, path in paths_by_name.items()
            }
            result = evaluate_files(
                inputs, calibration=calibration or (), calibration_labels=calibration_labels, ood=ood or (),
                posthoc=calibrators, folds=folds, bins=bins, level=level, resamples=resamples, seed=seed, images=images,
                progress=report, **columns,
            )  # fmt: skip
            # Write files first, because standard output may be a closed pipe.
            options: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
            if json not in {None, "-"}:
                write_text(str(json), result.to_json())
            if html is not None:
                from fedlas.report.html import save_page

                header = {"title": " and ".join(result.models), "command": command_line()}
                written.append(save_page(result, html, bins=bins, **options, **header))
            if figures is not None:
                from fedlas.report.figures import save_figures

                written += save_figures(result, figures, **options)
        with ignore_closed_pipe():
            show_result(result, written, err=json == "-")
            if json == "-":
                write_text(json, result.to_json())
        failed = result.failed(fail_if or ())
        for line in failed:
            show(f"fedlas: {line}", err=True)
    if failed:
        raise typer.Exit(CONDITION_HOLDS)


@with_columns
def detect_ood(
    predictions: Annotated[
        Path, typer.Argument(metavar="ID", help="File of predictions on in-distribution (ID) data.")
    ],
    ood: Annotated[list[str], typer.Argument(metavar="OOD", help="Predictions on OOD data, each as NAME=FILE.")],
    scores: Annotated[
        str | None, typer.Option(help="OOD scores, separated by commas; by default all that the files allow.")
    ] = None,
    tpr: Annotated[float, typer.Option(help="True-positive rate at which the false-positive rate is measured.")] = 0.95,
    positive: Annotated[
        Positive,
        typer.Option(
            help="Positive class: ood (as in OpenOOD; FPR is the fraction of ID samples detected as OOD) or id (FPR is "
            "the fraction of OOD samples accepted as ID)."
        ),
    ] = Positive.OOD,
    level: Level = 0.95,
    seed: Seed = 0,
    json: Json = None,
    overwrite: Overwrite = False,
    *,
    columns: Any,
) -> None:
    """Evaluate out-of-distribution (OOD) detection (AUROC, AUPR, FPR at 95 % TPR)."""
    with one_line_errors():
        from json import dumps

        from fedlas.io import read_predictions
        from fedlas.ood import detect
        from fedlas.report.evaluate_files import ood_files

        paths_by_name = ood_files(ood)
        check_outputs([json_file(json)], overwrite=overwrite, inputs=[predictions, *paths_by_name.values()])
        with progress() as report:
            in_distribution = read_predictions(predictions, progress=report, **columns)
            without_labels = {
                option: value for option, value in columns.items() if option not in {"label_column", "labels"}
            }
            ood_predictions = {
                name: read_predictions(path, progress=report, **without_labels) for name, path in paths_by_name.items()
            }
            report("OOD detection", 0.0)
            side: Literal["ood", "id"] = "id" if positive is Positive.ID else "ood"
            result = detect(
                in_distribution, ood_predictions, split_list(scores), tpr=tpr, positive=side, level=level, seed=seed
            )
            report("OOD detection", 1.0)
        if json is not None:
            write_text(json, dumps({"format": OOD_FORMAT} | result.to_dict(), allow_nan=False))
        show(result, err=json == "-")


def run_model(folder: Path, images: Path | None, progress: Progress) -> Any:
    """Return the model of a run folder: predictions of the weights to evaluate, training log, recipe."""
    from fedlas.report.model import Model
    from fedlas.training.run_folder import Run
    from fedlas.training.validation import tuning_predictions

    run = Run(folder)
    recipe, state = run.recipe.to_dict(), run.recipe.evaluated
    step = f"reading {folder.resolve().name}"
    progress(step, 0.0)
    ood_paths = sorted(run.predictions_file("any").parent.glob(f"{state}-ood-*.safetensors"))
    model = Model(
        predictions=run.predictions(f"{state}-test"),
        calibration=tuning_predictions(run) if run.predictions_file(f"{state}-val").exists() else None,
        ood={path.stem.removeprefix(f"{state}-ood-"): run.predictions(path.stem) for path in ood_paths},
        source=folder,
        image_folders=(folder, *([] if images is None else [images])),
        log=run.log,
        recipe=recipe,
        environment=run.environment,
    )
    progress(step, 1.0)
    return model


def show_result(result: Any, written: Sequence[Path], *, err: bool) -> None:
    """Print the result and the paths of written files."""
    for line in result.lines():
        show(line, err=err)
    show_table(*result.table(), err=err)
    for note in result.footnotes():
        show(note, err=err)
    for title, table in result.detections().items():
        show(f"\n{title}\n{table}", err=err)
    for path in written:
        show(path, err=err)
