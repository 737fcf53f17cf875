"""`fedlas evaluate` and `ood`: from files of predictions to an answer."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedlas.cli.errors import one_line_errors, reader_may_leave
from fedlas.cli.options import LARGEST_SEED, Level, with_columns, words
from fedlas.cli.output_paths import (
    check_places,
    has_format,
    is_page,
    read_file,
    refuse_other_figures,
    refuse_other_kind,
    refuse_own_input,
    write_text,
)
from fedlas.cli.terminal import command_line, progress, show, show_table
from fedlas.errors import UserError

CONDITION_HOLDS = 3  # the exit code of `evaluate --fail-if`
FOREIGN = "fedlas.ood/1"  # the format of what `ood --json` writes


class Positive(StrEnum):
    """Which samples are the positives of OOD detection."""

    OOD = "ood"
    ID = "id"


@with_columns
def evaluate_files(
    files: Annotated[
        list[str],
        typer.Argument(help="Predictions of a model, or its run folder: FILE, or NAME=FILE; several are compared."),
    ],
    calibrate_on: Annotated[
        list[str] | None,
        typer.Option(help="Other predictions of the model, to fit calibrators on: FILE, or MODEL=FILE of several."),
    ] = None,
    calibrate_labels: Annotated[
        Path | None, typer.Option(help="Labels of the files of --calibrate-on, such as val_labels.npy.")
    ] = None,
    ood: Annotated[
        list[str] | None, typer.Option(help="Foreign data: NAME=FILE, or MODEL/NAME=FILE of several models.")
    ] = None,
    posthoc: Annotated[str, typer.Option(help="Calibrators to try, separated by commas.")] = "temperature",
    folds: Annotated[int | None, typer.Option(help="Folds for cross-fitting calibrators; 5 by default.")] = None,
    bins: Annotated[int, typer.Option(help="How many bins calibration errors have.")] = 15,
    level: Level = 0.95,
    resamples: Annotated[
        int | None, typer.Option(help="Resamples that intervals are made from; each method's own number by default.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Of the random numbers of intervals and of cross-fitting.")
    ] = 0,
    html: Annotated[Path | None, typer.Option(help="Write the report page.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="A folder that the page may show image files of; else that of the predictions.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write everything as JSON; - is standard output.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Write figures as PDF, PNG and SVG into this folder.")] = None,
    fail_if: Annotated[
        list[str] | None, typer.Option(help="End with exit code 3 if this holds, such as ece>0.05; may be repeated.")
    ] = None,
    *,
    columns: Any,
) -> None:
    """Say what the confidence of predictions is worth: from a file to an answer."""
    with one_line_errors():
        from fedlas.evaluation import FOLDS
        from fedlas.report.answers import FORMAT, check_conditions, judge_files, named_files
        from fedlas.report.figures.saving import NAMES

        tried = words(posthoc or None) or ()  # "" asks for none
        check_conditions(fail_if or (), tried)
        kept = None if json in {None, "-"} else Path(str(json))
        check_places([html, kept], figures)
        made: list[Path] = []
        named = named_files(files)
        refuse_own_input(named.values(), [html, kept])
        refuse_other_kind(kept, "answer of `fedlas evaluate`", partial(has_format, FORMAT))
        refuse_other_kind(html, "page of fedlas", is_page)
        refuse_other_figures(figures, NAMES)
        with progress() as watch:
            given = {name: run_model(path, images, watch) if path.is_dir() else path for name, path in named.items()}
            answer = judge_files(
                given, calibrate_on=calibrate_on or (), calibrate_labels=calibrate_labels, ood=ood or (),
                posthoc=tried, bins=bins, level=level,
                folds=FOLDS if folds is None else folds, resamples=resamples, seed=seed, images=images, watch=watch,
                **columns,
            )  # fmt: skip
            # Files come first: whoever reads the output may stop reading it.
            options: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
            if json not in {None, "-"}:
                write_text(str(json), answer.to_json())
            if html is not None:
                from fedlas.report.html import save_page

                about = {"title": " and ".join(answer.models), "command": command_line()}
                made.append(save_page(html, answer.models, bins=bins, **options, **about))
            if figures is not None:
                from fedlas.report.figures import save_figures

                made += save_figures(answer.models, figures, **options)
        with reader_may_leave():
            show_answer(answer, made, err=json == "-")
            if json == "-":
                write_text(json, answer.to_json())
        failed = answer.failed(fail_if or ())
        for line in failed:
            show(f"fedlas: {line}", err=True)
    if failed:
        raise typer.Exit(CONDITION_HOLDS)


@with_columns
def detect_foreign(
    known: Annotated[Path, typer.Argument(help="Predictions on known data.")],
    foreign: Annotated[list[str], typer.Argument(help="Predictions on foreign data: NAME=FILE ...")],
    scores: Annotated[str | None, typer.Option(help="Separated by commas; by default all that are possible.")] = None,
    tpr: Annotated[float, typer.Option(help="True positive rate at which the FPR is measured.")] = 0.95,
    positive: Annotated[
        Positive,
        typer.Option(
            help="Positives of TPR and FPR. ood (as in OpenOOD): the FPR is the fraction of ID samples flagged as OOD; "
            "id: the fraction of OOD samples accepted as ID."
        ),
    ] = Positive.OOD,
    level: Level = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of the random numbers of intervals.")] = 0,
    json: Annotated[str | None, typer.Option(help="Write everything as JSON; - is standard output.")] = None,
    *,
    columns: Any,
) -> None:
    """Evaluate out-of-distribution (OOD) detection: AUROC, AUPR (average precision), FPR at 95 % TPR."""
    with one_line_errors():
        from json import dumps

        from fedlas.ood import detect

        named = foreign_files(foreign)
        kept = None if json in {None, "-"} else Path(str(json))
        check_places([kept])
        refuse_own_input([known, *named.values()], [kept])
        refuse_other_kind(kept, "answer of `fedlas ood`", partial(has_format, FOREIGN))
        with progress() as watch:
            in_distribution = read_file(known, watch, columns)
            others = {word: value for word, value in columns.items() if word not in {"label_column", "labels"}}
            given = {name: read_file(path, watch, others) for name, path in named.items()}
            watch("telling apart", 0.0)
            side: Literal["ood", "id"] = "id" if positive is Positive.ID else "ood"
            found = detect(in_distribution, given, words(scores), tpr=tpr, positive=side, level=level, seed=seed)
            watch("telling apart", 1.0)
        if json is not None:
            write_text(json, dumps({"format": FOREIGN} | found.to_dict(), allow_nan=False))
        show(found, err=json == "-")


def run_model(folder: Path, images: Path | None, watch: Callable[[str, float], None]) -> Any:
    """Read all that a run folder says about its model: predictions of the weights to evaluate, its log, its recipe."""
    from fedlas.report.subjects import Model
    from fedlas.training.run_folder import Run
    from fedlas.training.validation import tuning_predictions

    run = Run(folder)
    recipe, state = run.recipe.to_dict(), run.recipe.evaluated
    word = f"reading {folder.resolve().name}"
    watch(word, 0.0)
    ood_files = sorted(run.predictions_file("any").parent.glob(f"{state}-ood-*.safetensors"))
    made = Model(
        predictions=run.predictions(f"{state}-test"),
        calibration=tuning_predictions(run) if run.predictions_file(f"{state}-val").exists() else None,
        ood={path.stem.removeprefix(f"{state}-ood-"): run.predictions(path.stem) for path in ood_files},
        source=folder,
        image_folders=(folder, *([] if images is None else [images])),
        log=run.log,
        recipe=recipe,
        environment=run.environment,
    )
    watch(word, 1.0)
    return made


def foreign_files(given: Sequence[str]) -> dict[str, Path]:
    """Take NAME=FILE apart."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise UserError(f"OOD data is given as NAME=FILE, not as {text!r}")
        if name in found:
            raise UserError(f"two files are called {name!r}")
        found[name] = Path(path)
    return found


def show_answer(answer: Any, made: Sequence[Path], *, err: bool) -> None:
    """Print what was found, and where files are."""
    for line in answer.lines():
        show(line, err=err)
    show_table(*answer.table(), err=err)
    for note in answer.footnotes():
        show(note, err=err)
    for title, table in answer.detections().items():
        show(f"\n{title}\n{table}", err=err)
    for path in made:
        show(path, err=err)
