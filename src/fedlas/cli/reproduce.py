"""`fedlas demo` and `fedlas reproduce`: train many runs and print their tables."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.cli.errors import one_line_errors
from fedlas.cli.options import parse_seeds, parse_settings, split_list
from fedlas.cli.output_paths import (
    FIGURE_SUFFIXES,
    TABLE_SUFFIXES,
    Overwrite,
    check_outputs,
    check_overwrite_in,
    check_writable,
    is_own_folder,
    mark_own_folder,
)
from fedlas.cli.terminal import command_line, is_quiet, show, show_table

WHAT, HOW, WHERE = "What to reproduce", "How to train", "Where to read and write"  # panels of the help


class Executor(StrEnum):
    """Where runs are trained."""

    local = "local"
    ray = "ray"


class Detail(StrEnum):
    """Content of a table."""

    ours = "ours"
    both = "both"
    full = "full"


def demo_run(
    out: Annotated[Path, typer.Option(help="Output folder for the report, figures and runs.")] = Path("runs/demo"),
    overwrite: Overwrite = False,
) -> None:
    """Train five losses on handwritten digits and compare their calibration."""
    with one_line_errors():
        from fedlas.experiments.demo import FIGURE, FIGURES, HEAD, PAGE, introduction, run_demo

        replace = overwrite or is_own_folder(out, "demo")
        check_outputs([out / PAGE], overwrite=replace, folder=out)
        check_overwrite_in(out / FIGURES, FIGURE, FIGURE_SUFFIXES, overwrite=replace)
        mark_own_folder(out, "demo")
        show(f"{introduction()}\n")
        result = run_demo(out, progress=False if is_quiet() else None, command=command_line())
        show(f"{result.explanation}\n")
        show_table(HEAD, result.rows)
        show(f"\n{result.conclusion}\n")
        for path in (result.page, *result.figures):
            show(path)


def reproduce_experiment(
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="Name of the table or figure; see: fedlas list experiments")
    ],
    data: Annotated[
        str | None, typer.Option(rich_help_panel=WHAT, help="Data sets, separated by commas; all by default.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(rich_help_panel=WHAT, help="Models, separated by commas; those of the protocol by default."),
    ] = None,
    losses: Annotated[
        str | None,
        typer.Option(rich_help_panel=WHAT, help="Losses (rows of the table), separated by commas; all by default."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(rich_help_panel=WHAT, help="Seeds, separated by commas; those of the experiment by default."),
    ] = None,
    protocol: Annotated[
        str, typer.Option(rich_help_panel=WHAT, help="Training protocol: paper, official, fast, small or standard.")
    ] = "paper",
    split: Annotated[
        str,
        typer.Option(
            rich_help_panel=WHAT,
            help="Split to evaluate: test, or test-published with the normalisation of the official code.",
        ),
    ] = "test",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            rich_help_panel=WHAT,
            help="Set a field of all recipes, such as epochs=10; may be repeated.",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(rich_help_panel=WHAT, help="Train only runs whose folder name contains this text.")
    ] = None,
    detail: Annotated[
        Detail,
        typer.Option(
            rich_help_panel=WHAT,
            help="Numbers in the tables: ours, both (ours and the paper's) or full (with intervals and differences).",
        ),
    ] = Detail.both,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", rich_help_panel=HOW, help="Print the missing runs and the table so far, without training."
        ),
    ] = False,
    limit_minutes: Annotated[
        float | None,
        typer.Option(rich_help_panel=HOW, help="Stop after this many minutes; run the same command again to continue."),
    ] = None,
    executor: Annotated[
        Executor, typer.Option(rich_help_panel=HOW, help="Train on this machine (local) or on a Ray cluster (ray).")
    ] = Executor.local,
    address: Annotated[
        str | None,
        typer.Option(rich_help_panel=HOW, help="Address of the Ray cluster; auto for the cluster of this machine."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(rich_help_panel=HOW, help="Processes on this machine; one per GPU by default.")
    ] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(rich_help_panel=HOW, help="Fraction of a GPU for each run, from 0 to 1.")
    ] = None,
    cpus_per_run: Annotated[float, typer.Option(rich_help_panel=HOW, help="CPUs that Ray reserves for each run.")] = 1,
    device: Annotated[
        str | None, typer.Option(rich_help_panel=HOW, help="cpu or cuda; by default a GPU, if there is one.")
    ] = None,
    runs: Annotated[Path, typer.Option(rich_help_panel=WHERE, help="Folder of the run folders, one per run.")] = Path(
        "runs"
    ),
    ledger: Annotated[
        Path, typer.Option(rich_help_panel=WHERE, help="Folder of the ledger, the results of finished runs.")
    ] = Path("results"),
    out: Annotated[
        Path | None, typer.Option(rich_help_panel=WHERE, help="Write tables and figures to this folder.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=WHERE, help="Replace existing files in --out.")
    ] = False,
    data_root: Annotated[
        Path | None,
        typer.Option(
            "--data-root", rich_help_panel=WHERE, help="Data folder; by default $FEDLAS_DATA, or the user's cache."
        ),
    ] = None,
) -> None:
    """Reproduce a table or figure of the paper: train missing runs and compare the results with the paper's."""
    with one_line_errors():
        from fedlas.experiments.base import Choice
        from fedlas.experiments.ledger import Ledger
        from fedlas.experiments.planning import HEAD, experiment_named, make_plan
        from fedlas.experiments.reproduce import check_limit, reproduce, save_results
        from fedlas.experiments.scheduler import check_options

        check_limit(limit_minutes)
        options: dict[str, Any] = {
            "executor": executor.value, "address": address, "workers": workers, "gpus_per_run": gpus_per_run,
            "cpus_per_run": cpus_per_run,
        }  # fmt: skip
        check_options(folder=runs, **options)
        chosen = experiment_named(experiment)
        check_writable([], out)
        suffixes = (*TABLE_SUFFIXES, *FIGURE_SUFFIXES)
        own = is_own_folder(out, experiment)
        check_overwrite_in(out, chosen.file_names, suffixes, overwrite=overwrite or own)
        choice = Choice(
            data=split_list(data), models=split_list(model), losses=split_list(losses), protocol=protocol,
            changes=parse_settings(settings), seeds=chosen.seeds if seeds is None else parse_seeds(seeds),
            split=split, data_root=data_root,
        )  # fmt: skip
        results = Ledger(ledger)
        plan = make_plan(chosen, choice, results, only, None if out is None or dry_run else runs)
        show_progress = not is_quiet()
        if show_progress:
            show(f"{experiment}, {plan.protocols or protocol} protocol: {plan}", err=True)
            if not ledger.is_dir():
                show(f"the ledger {ledger} does not exist, so no run counts as finished; see --ledger", err=True)
        if dry_run and plan.missing:
            show_table(HEAD, plan.rows())
        if not dry_run:
            options |= {"device": device, "data_root": data_root, "progress": None if show_progress else False}
            for tables in reproduce(
                chosen, choice, ledger=results, runs=runs, only=only, limit_minutes=limit_minutes,
                draws=out is not None, **options,
            ):  # fmt: skip
                for table in tables if show_progress else ():
                    show(table.text(detail.value), err=True)
        final_tables = chosen.tables(results, choice)
        for table in final_tables:
            show(table.text(detail.value))
        if out is None and not final_tables:
            show(f"{experiment} has no table to show; draw its figures with --out DIR", err=True)
        if out is not None:
            mark_own_folder(out, experiment)
            written = save_results(
                chosen, choice, ledger=results, runs=runs, folder=out, data_root=data_root, device=device
            )
            for path in written:
                show(path)
            if chosen.draws_runs and not written:
                show(f"no figure is drawn: none of its runs is finished in {runs}", err=True)
                raise typer.Exit(0 if dry_run or limit_minutes is not None else 1)
