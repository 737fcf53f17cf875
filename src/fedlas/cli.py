"""The command line: parses, calls one function, prints.

Errors of the user end in one line and exit code 1, a wrong use of the command line ends in 2, and a condition of
`--fail-if` that holds in 3; `FEDLAS_DEBUG=1` shows where errors come from. What a command prints for a program to read
goes to standard output, everything else to standard error; a program that stops reading is no error. A table that does
not go to a terminal is as wide as it has to be.
"""

import os
import select
import shlex
import signal
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

CONDITION_HOLDS = 3  # the exit code of `evaluate --fail-if`
usual_warning = warnings.formatwarning
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
Level = Annotated[float, typer.Option(help="How often an interval should hold the true value.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")]


class Catalogue(StrEnum):
    """What can be listed."""

    losses = "losses"
    data = "data"
    models = "models"
    recipes = "recipes"
    experiments = "experiments"
    calibrators = "calibrators"


class Launch(StrEnum):
    """Where runs are trained."""

    local = "local"
    ray = "ray"


class Detail(StrEnum):
    """What a table shows."""

    ours = "ours"
    both = "both"
    full = "full"


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
    split: Annotated[
        str | None, typer.Option(help="train, val, test or, of a folder, all; by default test, and all of a folder.")
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
        from fedlas.train.recipe import value_of
        from fedlas.train.trained import predict_with

        options = {name: value_of(text) for name, text in parsed(settings).items()}
        path = predict_with(
            run, data, split=split, state=state, options=options, out=out, data_root=data_root, device=device
        )
        typer.echo(path)


@app.command("list")
def list_catalogue(
    what: Annotated[Catalogue, typer.Argument(help="losses, data, models, calibrators, recipes or experiments")],
) -> None:
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


@app.command("reproduce")
def reproduce_experiment(
    experiment: Annotated[str, typer.Argument(help="A table or figure; see: fedlas list experiments")],
    data: Annotated[str | None, typer.Option(help="Data sets, separated by commas; by default all of it.")] = None,
    model: Annotated[str | None, typer.Option(help="Networks, separated by commas; by default the protocol's.")] = None,
    losses: Annotated[str | None, typer.Option(help="Rows, separated by commas; by default all.")] = None,
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "1,2,3",
    protocol: Annotated[str, typer.Option(help="paper, official, fast or small.")] = "paper",
    split: Annotated[str, typer.Option(help="test, or test-published: normalised as in the published code.")] = "test",
    settings: Settings = None,
    only: Annotated[str | None, typer.Option(help="Train only runs whose folder's name contains this.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show plan and table; start nothing.")] = False,
    limit_minutes: Annotated[float | None, typer.Option(help="Stop after so many minutes; go on next time.")] = None,
    detail: Annotated[Detail, typer.Option(help="ours, both (with the paper's numbers) or full.")] = Detail.both,
    launch: Annotated[Launch, typer.Option(help="local, or ray: many machines.")] = Launch.local,
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster, such as auto.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes on this machine; by default one for each GPU.")] = None,
    gpus_per_run: Annotated[float | None, typer.Option(help="Share of a GPU for each run.")] = None,
    cpus_per_run: Annotated[float, typer.Option(help="Processors that Ray sets aside for each run.")] = 1,
    runs: Annotated[Path, typer.Option(help="Where run folders lie.")] = Path("runs"),
    ledger: Annotated[Path, typer.Option(help="Where the ledger lies.")] = Path("results"),
    out: Annotated[Path | None, typer.Option(help="Write tables and figures into this folder.")] = None,
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Make a table or figure of the paper again: run what is missing, and lay it beside the printed numbers."""
    with one_line_errors():
        from fedlas.experiments.base import Choice
        from fedlas.experiments.ledger import Ledger
        from fedlas.experiments.planning import HEAD, experiment_named, planned
        from fedlas.experiments.reproduce import drawn, reproduce

        chosen = experiment_named(experiment)
        choice = Choice(
            data=words(data), models=words(model), losses=words(losses), protocol=protocol, changes=parsed(settings),
            seeds=numbers(seeds), split=split,
        )  # fmt: skip
        book = Ledger(ledger)
        plan = planned(chosen, choice, book, only)
        typer.echo(f"{experiment}, {protocol} protocol: {plan}", err=True)
        if dry_run and plan.missing:
            show_table(HEAD, plan.rows())
        if not dry_run:
            options = {
                "how": launch.value, "address": address, "workers": workers, "gpus_per_run": gpus_per_run,
                "cpus_per_run": cpus_per_run, "device": device, "data_root": data_root,
            }  # fmt: skip
            told = partial(typer.echo, err=True)
            for tables in reproduce(
                chosen, choice, ledger=book, runs=runs, told=told, only=only, limit_minutes=limit_minutes, **options
            ):
                for table in tables:
                    typer.echo(table.text(detail.value), err=True)
        for table in chosen.tables(book, choice):
            typer.echo(table.text(detail.value))
        if out is not None:
            where = {"data_root": data_root, "device": device}
            for path in drawn(chosen, choice, ledger=book, runs=runs, folder=out, **where):
                typer.echo(path)


@app.command("evaluate")
def evaluate_files(
    files: Annotated[
        list[str],
        typer.Argument(help="Predictions of a model, or its run folder: FILE, or NAME=FILE; several are compared."),
    ],
    calibrate_on: Annotated[
        list[str] | None,
        typer.Option(help="Other predictions of the model, to fit calibrators on: FILE, or MODEL=FILE of several."),
    ] = None,
    ood: Annotated[
        list[str] | None, typer.Option(help="Foreign data: NAME=FILE, or MODEL/NAME=FILE of several models.")
    ] = None,
    posthoc: Annotated[str, typer.Option(help="Calibrators to try, separated by commas.")] = "temperature",
    folds: Annotated[int | None, typer.Option(help="Parts that calibrators are cross-fitted in; else two.")] = None,
    bins: Annotated[int, typer.Option(help="How many bins calibration errors have.")] = 15,
    level: Level = 0.95,
    resamples: Annotated[
        int | None, typer.Option(help="Resamples that intervals are made from; each method's own number by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random numbers of intervals and of cross-fitting.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Write the report page.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="A folder that the page may show image files of; else that of the predictions.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write everything as JSON; - is standard output.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Write figures as PDF, PNG and SVG into this folder.")] = None,
    fail_if: Annotated[
        list[str] | None, typer.Option(help="End with exit code 3 if this holds, such as ece>0.05; may be repeated.")
    ] = None,
) -> None:
    """Say what the confidence of predictions is worth: from a file to an answer."""
    with one_line_errors():
        from fedlas.report.answers import check_conditions, judge_files, named_files
        from fedlas.report.subjects import FOLDS

        tried = words(posthoc) or ()
        check_conditions(fail_if or (), tried)
        kept = None if json in {None, "-"} else Path(str(json))
        check_places([html, kept], figures)
        made: list[Path] = []
        named = named_files(files)
        refuse_own_input(named.values(), [html, kept])
        refuse_other_kind(kept, "answer of fedlas", is_answer)
        refuse_other_kind(html, "page of fedlas", is_page)
        with progress() as watch:
            given = {name: run_model(path, images, watch) if path.is_dir() else path for name, path in named.items()}
            answer = judge_files(
                given, calibrate_on=calibrate_on or (), ood=ood or (), posthoc=tried, bins=bins, level=level,
                folds=FOLDS if folds is None else folds, resamples=resamples, seed=seed, images=images, watch=watch,
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
            typer.echo(f"fedlas: {line}", err=True)
    if failed:
        raise typer.Exit(CONDITION_HOLDS)


calibrate = typer.Typer(no_args_is_help=True, help="Learn a calibrator from predictions, and repair others with it.")
app.add_typer(calibrate, name="calibrate")


@calibrate.command("fit")
def calibrate_fit(
    file: Annotated[Path, typer.Argument(help="Predictions with labels, on samples that nothing is judged on.")],
    out: Annotated[Path, typer.Option(help="Where the calibrator goes: a .safetensors file.")],
    method: Annotated[str, typer.Option(help="The calibrator; see: fedlas list calibrators")] = "temperature",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEYWORD=VALUE", help="A keyword of the calibrator.")
    ] = None,
) -> None:
    """Learn a calibrator, and save it."""
    with one_line_errors():
        from fedlas.metrics import nll as loss_of
        from fedlas.posthoc import build_calibrator, load_calibrator
        from fedlas.train.recipe import value_of

        if out.suffix.lower() != ".safetensors":
            raise ValueError(f"--out {out}: a calibrator is kept in a .safetensors file")
        refuse_own_input([file], [out])
        refuse_other_kind(out, "calibrator", load_calibrator)
        options = {name: value_of(text) for name, text in parsed(settings).items()}
        calibrator = build_calibrator(method, **options)
        with progress() as watch:
            given = read_file(file, watch)
            watch(f"fitting {method}", 0.0)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* lies beyond ")  # said below, where it cannot be overlooked
                calibrator.fit(given)
            watch(f"fitting {method}", 1.0)
            calibrator.save(out)
        words = {"standard_error": "standard error of its logarithm"}
        numbers = {name: value for name, value in calibrator.learned.items() if value.numel() == 1}
        learned = [f"{words.get(name, name)} {float(value):.4g}" for name, value in numbers.items()]
        zeros = int(loss_of(given).details["floored"])
        if zeros:
            few = f"{zeros:,} {'label has' if zeros == 1 else 'labels have'} probability zero"
            show(
                f"warning: {few}, which decides what is learned; keep more digits of probabilities, or logits", err=True
            )
        fit = calibrator.fitted
        nll = [] if fit is None else [f"NLL {fit.before:.4g} before, {fit.after:.4g} after, on {fit.n:,} samples"]
        show(f"{method}: {', '.join([*learned, *nll])}", err=True)
        if fit is not None and fit.doubt:
            show(f"warning: {out} is written, but do not rely on it: {fit.doubt}", err=True)
        show(out)


@calibrate.command("apply")
def calibrate_apply(
    calibrator: Annotated[Path, typer.Argument(help="A file that `fedlas calibrate fit` wrote.")],
    file: Annotated[Path, typer.Argument(help="Predictions to repair; labels are not needed.")],
    out: Annotated[Path, typer.Option(help="Where they go: .safetensors, .npz, .csv, .parquet or .jsonl.")],
    probs: Annotated[bool, typer.Option("--probs", help="Write probabilities, not logits.")] = False,
) -> None:
    """Repair predictions with a saved calibrator."""
    with one_line_errors():
        from fedlas.files import read_predictions, write_predictions
        from fedlas.posthoc import load_calibrator

        refuse_own_input([calibrator, file], [out])
        refuse_other_kind(out, "file of predictions", read_predictions)
        with progress() as watch:
            given = read_file(file, watch)
            repaired = load_calibrator(calibrator).transform(given)
            # A table of probabilities becomes another one.
            write_predictions(repaired, out, probs=probs or given.given_probs is not None)
        show(out)


@app.command("ood")
def detect_foreign(
    known: Annotated[Path, typer.Argument(help="Predictions on known data.")],
    foreign: Annotated[list[str], typer.Argument(help="Predictions on foreign data: NAME=FILE ...")],
    scores: Annotated[str | None, typer.Option(help="Separated by commas; by default all that are possible.")] = None,
    tpr: Annotated[float, typer.Option(help="Share of foreign samples that is to be found, for the FPR.")] = 0.95,
    level: Level = 0.95,
    seed: Annotated[int, typer.Option(help="Of the random numbers of intervals.")] = 0,
    json: Annotated[str | None, typer.Option(help="Write everything as JSON; - is standard output.")] = None,
) -> None:
    """Say how well confidence and other scores tell foreign data from known data."""
    with one_line_errors():
        from json import dumps

        from fedlas.ood import detect

        named = foreign_files(foreign)
        kept = None if json in {None, "-"} else Path(str(json))
        refuse_own_input([known, *named.values()], [kept])
        refuse_other_kind(kept, "answer of fedlas", is_answer)
        with progress() as watch:
            judged = read_file(known, watch)
            given = {name: read_file(path, watch) for name, path in named.items()}
            watch("telling apart", 0.0)
            found = detect(judged, given, words(scores), tpr=tpr, level=level, seed=seed)
            watch("telling apart", 1.0)
        if json is not None:
            write_text(json, dumps(found.to_dict(), allow_nan=False))
        show(found, err=json == "-")


@app.command("compare")
def compare_models(
    first: Annotated[str, typer.Argument(help="A run folder, a file of predictions, or ledger rows: data/method.")],
    second: Annotated[str, typer.Argument(help="The same, on the same test samples.")],
    metrics: Annotated[
        str | None,
        typer.Option(help="Of accuracy, ece, aece, nll, brier; by commas. By default accuracy, ece, and nll if known."),
    ] = None,
    level: Level = 0.95,
    resamples: Annotated[int, typer.Option(help="Resamples that intervals are made from.")] = 2_000,
    seed: Annotated[int, typer.Option(help="Of the random numbers of intervals.")] = 0,
    ledger: Annotated[Path, typer.Option(help="Where the ledger lies.")] = Path("results"),
    json: Annotated[str | None, typer.Option(help="Write everything as JSON; - is standard output.")] = None,
) -> None:
    """Say whether one model is better than another on the same samples, and how sure that is."""
    with one_line_errors():
        from fedlas.experiments.ledger import Ledger
        from fedlas.experiments.versus import HEAD, side, versus

        kept = None if json in {None, "-"} else Path(str(json))
        refuse_own_input([Path(first), Path(second)], [kept])
        refuse_other_kind(kept, "answer of fedlas", is_answer)
        book = Ledger(ledger)
        options = {"level": level, "resamples": resamples, "seed": seed}
        found = versus(side(first, book), side(second, book), words(metrics), **options)
        show_table(HEAD, [row for one in found for row in one.rows()], err=json == "-")
        if json is not None:
            from json import dumps

            write_text(json, dumps([one.to_dict() for one in found], allow_nan=False))


@app.command("search")
def search_options(
    data: Annotated[str, typer.Option(help="The data set.")],
    loss: Annotated[str, typer.Option(help="The loss whose keywords are searched.")],
    over: Annotated[list[str], typer.Option(help="NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C; may be repeated.")],
    trials: Annotated[int, typer.Option(help="How many to try.")] = 20,
    metric: Annotated[str, typer.Option(help="nll, ece, aece, brier or accuracy, on the validation split.")] = "nll",
    model: Annotated[str | None, typer.Option(help="The network; by default that of the protocol.")] = None,
    protocol: Annotated[str | None, typer.Option(help="paper, official, fast or small.")] = None,
    seeds: Annotated[str, typer.Option(help="A run for each, in every trial.")] = "1",
    settings: Settings = None,
    out: Annotated[Path, typer.Option(help="Where run folders and search.json go.")] = Path("runs/search"),
    data_root: Root = None,
    device: Device = None,
) -> None:
    """Search keywords of a loss on the validation split; the test split is never looked at."""
    with one_line_errors():
        from fedlas.experiments.search import Range, search
        from fedlas.train import recipe_for

        recipe = recipe_for(data, model, loss, protocol=protocol).with_settings(parsed(settings))
        found = search(
            recipe, [Range.parse(text) for text in over], trials=trials, folder=out, metric=metric,
            seeds=numbers(seeds), told=partial(typer.echo, err=True), device=device, data_root=data_root,
        )  # fmt: skip
        chosen = " ".join(f"--set loss_options.{name}={value}" for name, value in found.best.options.items())
        typer.echo(f"{metric} {found.best.mean:.5f} on the validation split: {chosen}")


def run_model(folder: Path, images: Path | None, watch: Callable[[str, float], None]) -> Any:
    """Read all that a run folder says about its model: predictions of its best epoch, its log, and its recipe."""
    from fedlas.report.subjects import Model
    from fedlas.train.runs import Run

    run, recipe = Run(folder), Run(folder).recipe.to_dict()
    word = f"reading {folder.resolve().name}"
    watch(word, 0.0)
    foreign = sorted(run.predictions_file("any").parent.glob("best-ood-*.safetensors"))
    made = Model(
        predictions=run.predictions("best-test"),
        calibration=run.predictions("best-val") if run.predictions_file("best-val").exists() else None,
        ood={path.stem.removeprefix("best-ood-"): run.predictions(path.stem) for path in foreign},
        source=folder,
        image_folders=(folder, *([] if images is None else [images])),
        log=run.log,
        recipe=recipe,
        environment=run.environment,
    )
    watch(word, 1.0)
    return made


def read_file(path: Path, watch: Callable[[str, float], None]) -> Any:
    """Read predictions, and tell how far that is."""
    from fedlas.files import read_predictions

    stage = partial(watch, f"reading {path.name}")
    stage(0.0)
    found = read_predictions(path, watch=stage)
    stage(1.0)
    return found


def foreign_files(given: Sequence[str]) -> dict[str, Path]:
    """Take NAME=FILE apart."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"foreign data is given as NAME=FILE, not as {text!r}")
        if name in found:
            raise ValueError(f"two files are called {name!r}")
        found[name] = Path(path)
    return found


def show_answer(answer: Any, made: Sequence[Path], *, err: bool) -> None:
    """Print what was found, and where files are."""
    for line in answer.lines():
        show(line, err=err)
    show_table(*answer.table(), err=err)
    for title, table in answer.detections().items():
        show(f"\n{title}\n{table}", err=err)
    for path in made:
        show(path, err=err)


def show(text: object, *, err: bool = False) -> None:
    """Print a text; what files say cannot steer the terminal."""
    typer.echo(harmless(str(text)), err=err)


def harmless(text: str) -> str:
    """Replace letters that would steer a terminal, such as those that begin a colour or set its title."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in {"Cc", "Cf"} else "\ufffd" for letter in text
    )


def refuse_own_input(given: Iterable[Path], made: Iterable[Path | None]) -> None:
    """Refuse to write over what is read."""
    read = {path.resolve() for path in given}
    for path in filter(None, made):
        if path.resolve() in read:
            raise ValueError(f"{path} is read, so it is not written over; name another file")


def refuse_other_kind(path: Path | None, what: str, written: Callable[[Path], object]) -> None:
    """Refuse to write over a file that is not of the kind that this command writes.

    Args:
        path: the file; one that is not there, or is empty, may be written.
        what: the kind in words.
        written: reads such a file; an error, or False, means that it is another kind.
    """
    if path is None or not path.is_file() or not path.stat().st_size:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is about to go
            fine = written(path) is not False
    except (ValueError, TypeError, KeyError):
        fine = False
    if not fine:
        raise ValueError(
            f"{path} is there and is no {what}, so it is not written over; remove it, or name another file"
        )


def is_answer(path: Path) -> bool:
    """Say whether a file is one that `--json` wrote."""
    from json import loads

    found = loads(path.read_text(encoding="utf-8"))
    first = found[0] if isinstance(found, list) and found else found
    known = ({"format", "models"}, {"sets", "mean"}, {"metric", "pairs"})  # of evaluate, ood and compare
    return isinstance(first, dict) and any(names <= first.keys() for names in known)


def is_page(path: Path) -> bool:
    """Say whether a file is one that `--html` wrote."""
    return b'<meta name="generator" content="fedlas">' in path.read_bytes()[:4096]


def check_places(files: Sequence[Path | None], folder: Path | None) -> None:
    """Find out before long work whether its results can be written."""
    for path in filter(None, files):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; the name of a file is needed")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; the name of a folder is needed")
    for start in [*(path.absolute().parent for path in files if path), *([folder.absolute()] if folder else [])]:
        there = next(one for one in (start, *start.parents) if one.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"nothing can be written to {start}: {there} is no folder that may be written to")


def write_text(place: str, text: str) -> None:
    """Write a text to a file, whole or not at all, or to standard output."""
    if place == "-":
        typer.echo(text)
    else:
        from fedlas.predictions import write_whole

        write_whole(Path(place), text.encode())


def command_line() -> str:
    """Write the command that was given, as one would type it."""
    return shlex.join(["fedlas", *sys.argv[1:]])


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show how far something is, on a terminal only; a program that reads the output sees nothing of it."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def watch(word: str, share: float) -> None:
            if word not in tasks:
                tasks[word] = bar.add_task(escape(word), total=1.0)  # names of files may look like markup
            bar.update(tasks[word], completed=share)

        yield watch


def words(text: str | None) -> tuple[str, ...] | None:
    """Take words apart that are separated by commas."""
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(text: str) -> tuple[int, ...]:
    """Take whole numbers apart that are separated by commas."""
    try:
        return tuple(int(word) for word in words(text) or ())
    except ValueError:
        raise ValueError(f"--seeds takes whole numbers separated by commas, not {text!r}") from None


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

    split = "test" if "test" in run.recipe.splits else run.recipe.splits[-1]
    rows = []
    for state in ("best", "last"):
        made = run.predictions(f"{state}-{split}")
        shown = [f"{100 * float(metric(made)):.2f}" for metric in (accuracy, ece, aece)]
        rows.append([state, *shown, f"{float(nll(made)):.4f}"])
    show_table([f"{split} split", "accuracy %", "ECE %", "AECE %", "NLL"], rows)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print a table; nothing in it is cut off."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    terminal = (sys.stderr if err else sys.stdout).isatty()
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold", no_wrap=not terminal)
    for row in rows:
        table.add_row(*map(harmless, row))
    widest = sum(max(len(row[n]) for row in [head, *rows]) + 4 for n in range(len(head)))
    width = None if terminal else widest
    console = Console(width=width, highlight=False, markup=False, stderr=err)
    # Rich ends the process by itself where nobody reads on, so it only draws.
    with console.capture() as drawn:
        console.print(table)
    typer.echo(drawn.get(), nl=False, err=err)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with one line where the user can do something about it."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        if from_interrupt(error):
            raise typer.Exit(interrupted()) from None
        if isinstance(error, BrokenPipeError) and reader_left():
            raise typer.Exit(128 + signal.SIGPIPE) from None
        if os.environ.get("FEDLAS_DEBUG"):
            raise
        show(f"fedlas: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        number = getattr(error, "signal_number", None)
        if number is None and from_interrupt(error):
            raise typer.Exit(interrupted()) from None
        if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of pathlib, before Python 3.13
            show(f"fedlas: {error}", err=True)
            raise typer.Exit(1) from None
        if number is None:
            raise
        typer.echo(f"fedlas: {error}", err=True)
        raise typer.Exit(128 + number) from None
    except KeyboardInterrupt:
        raise typer.Exit(interrupted()) from None


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Go on where nobody reads standard output any more, as in `fedlas ... | head`; there is more to do."""
    try:
        yield
    except BrokenPipeError:
        if not reader_left():
            raise


def reader_left() -> bool:
    """Say whether standard output is a pipe that nobody reads; nothing more is written to it then.

    Pipes to other processes of a training may break too, and that is worth an error.
    """
    try:
        place = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file
        return False
    waiting = select.poll()
    waiting.register(place, select.POLLOUT)
    gone = any(state & select.POLLERR for _, state in waiting.poll(0))
    if gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, place)  # what is left in the buffer goes there when Python ends
        os.close(nowhere)
    return gone


def interrupted() -> int:
    """Say that Ctrl-C was heard where there is nothing to save, and give the exit code that shells know."""
    typer.echo("fedlas: interrupted", err=True)
    return 128 + signal.SIGINT


def from_interrupt(error: BaseException | None) -> bool:
    """Say whether an error only wraps Ctrl-C, as errors in compiled modules that are being imported do."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def plain_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
    """Write a warning for users in one line; others keep the place that they come from."""
    if category is UserWarning and not os.environ.get("FEDLAS_DEBUG"):
        return f"fedlas: {' '.join(str(message).split())}\n"
    return usual_warning(message, category, *place, **more)


def main() -> None:
    """Run the command line."""
    warnings.formatwarning = plain_warning
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as it runs
    try:
        app(prog_name="fedlas")
    except KeyboardInterrupt:
        sys.exit(interrupted())
