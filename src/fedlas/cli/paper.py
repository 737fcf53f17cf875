"""`fedlas demo`, `reproduce` and `compare`: tables of many runs."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.cli.endings import one_line_errors
from fedlas.cli.options import LARGEST_SEED, Device, Level, Root, Settings, numbers, parsed, with_columns, words
from fedlas.cli.places import (
    check_places,
    has_format,
    refuse_other_figures,
    refuse_other_kind,
    refuse_other_tables,
    refuse_own_input,
    write_text,
)
from fedlas.cli.terminal import show, show_table

COMPARISON = "fedlas.compare/1"  # the format of what `compare --json` writes


class Launch(StrEnum):
    """Where runs are trained."""

    local = "local"
    ray = "ray"


class Detail(StrEnum):
    """What a table shows."""

    ours = "ours"
    both = "both"
    full = "full"


def demo_run(
    out: Annotated[Path, typer.Option(help="Where run folders and figures go.")] = Path("runs/demo"),
) -> None:
    """Train five losses on handwritten digits, and show what their confidence is worth."""
    with one_line_errors():
        from fedlas.experiments.demo import FIGURE, FIGURES, run_demo

        check_places([], out)
        refuse_other_figures(out / FIGURES, FIGURE)
        made = run_demo(out, told=lambda text: show(text, err=True))
        show(made.text)
        show_table(made.head, made.rows)
        for path in made.files:
            show(path)


def reproduce_experiment(
    experiment: Annotated[str, typer.Argument(help="A table or figure; see: fedlas list experiments")],
    data: Annotated[str | None, typer.Option(help="Data sets, separated by commas; by default all of it.")] = None,
    model: Annotated[str | None, typer.Option(help="Networks, separated by commas; by default the protocol's.")] = None,
    losses: Annotated[str | None, typer.Option(help="Rows, separated by commas; by default all.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Separated by commas; default: those of the experiment.")] = None,
    protocol: Annotated[str, typer.Option(help="paper, official, fast, small or standard.")] = "paper",
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
        from fedlas.experiments.launch import check_launch
        from fedlas.experiments.ledger import Ledger
        from fedlas.experiments.planning import HEAD, experiment_named, planned
        from fedlas.experiments.reproduce import check_limit, drawn, reproduce

        check_limit(limit_minutes)
        where: dict[str, Any] = {
            "how": launch.value, "address": address, "workers": workers, "gpus_per_run": gpus_per_run,
            "cpus_per_run": cpus_per_run,
        }  # fmt: skip
        check_launch(folder=runs, **where)
        chosen = experiment_named(experiment)
        check_places([], out)
        refuse_other_tables(out, chosen.file_names)
        refuse_other_figures(out, chosen.file_names)
        choice = Choice(
            data=words(data), models=words(model), losses=words(losses), protocol=protocol, changes=parsed(settings),
            seeds=chosen.seeds if seeds is None else numbers(seeds), split=split, data_root=data_root,
        )  # fmt: skip
        book = Ledger(ledger)
        plan = planned(chosen, choice, book, only, None if out is None or dry_run else runs)
        show(f"{experiment}, {plan.protocols or protocol} protocol: {plan}", err=True)
        if dry_run and plan.missing:
            show_table(HEAD, plan.rows())
        if not dry_run:
            options = {**where, "device": device, "data_root": data_root}
            told = partial(show, err=True)
            for tables in reproduce(
                chosen, choice, ledger=book, runs=runs, told=told, only=only, limit_minutes=limit_minutes,
                draws=out is not None, **options,
            ):  # fmt: skip
                for table in tables:
                    show(table.text(detail.value), err=True)
        made = chosen.tables(book, choice)
        for table in made:
            show(table.text(detail.value))
        if out is None and not made:
            show(f"{experiment} is a figure: --out DIR draws it", err=True)
        if out is not None:
            places = {"data_root": data_root, "device": device}
            written = drawn(chosen, choice, ledger=book, runs=runs, folder=out, **places)
            for path in written:
                show(path)
            if chosen.draws_runs and not written:
                show(f"nothing is drawn: no run that it is drawn of is finished in {runs}", err=True)
                raise typer.Exit(0 if dry_run or limit_minutes is not None else 1)


@with_columns
def compare_models(
    first: Annotated[str, typer.Argument(help="A run folder, a file of predictions, or ledger rows: data/method.")],
    second: Annotated[str, typer.Argument(help="The same, on the same test samples.")],
    metrics: Annotated[
        str | None,
        typer.Option(help="Metrics, separated by commas; by default those of reports, as far as they are known."),
    ] = None,
    level: Level = 0.95,
    resamples: Annotated[int | None, typer.Option(help="Bootstrap resamples; 2,000 by default.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Of the random numbers of intervals.")] = 0,
    ledger: Annotated[Path, typer.Option(help="Where the ledger lies.")] = Path("results"),
    json: Annotated[str | None, typer.Option(help="Write everything as JSON; - is standard output.")] = None,
    *,
    columns: Any,
) -> None:
    """Say whether one model is better than another on the same samples, and how sure that is."""
    with one_line_errors():
        from fedlas.comparison import TABLE_HEAD, compare_runs, comparison_notes
        from fedlas.experiments.ledger import Ledger
        from fedlas.experiments.ledger_lookup import find_runs

        kept = None if json in {None, "-"} else Path(str(json))
        check_places([kept])
        refuse_own_input([Path(first), Path(second)], [kept])
        refuse_other_kind(kept, "answer of `fedlas compare`", partial(has_format, COMPARISON))
        book, asked = Ledger(ledger), words(metrics)
        options: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
        ours, theirs = find_runs(first, book, **columns), find_runs(second, book, **columns)
        found = compare_runs(ours, theirs, asked, **options)
        show_table(TABLE_HEAD, [row for one in found for row in one.rows()], err=json == "-")
        seeds = any(one.standard_error is not None for one in found)
        over = "; ±: standard error over seeds; interval and p of a mean: over seeds and test samples" if seeds else ""
        show(f"Difference: first minus second{over}.", err=json == "-")
        for note in comparison_notes(ours, theirs):
            show(f"note: {note}", err=True)
        if json is not None:
            from json import dumps

            write_text(json, dumps([{"format": COMPARISON} | one.to_dict() for one in found], allow_nan=False))
