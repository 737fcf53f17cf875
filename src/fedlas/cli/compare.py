"""`fedlas compare`: compare two models on the same samples."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.cli.errors import one_line_errors
from fedlas.cli.options import Json, LedgerFolder, Level, Seed, split_list, with_columns
from fedlas.cli.output_paths import Overwrite, check_outputs, json_file, write_text
from fedlas.cli.terminal import show, show_table

COMPARE_FORMAT = "fedlas.compare/1"  # format of the file that `compare --json` writes


@with_columns
def compare_models(
    first: Annotated[
        str,
        typer.Argument(
            metavar="FIRST",
            help="Run folder, file of predictions, or finished runs in the ledger, such as cifar10/fast/ce.",
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Second model, given in the same way.")],
    metrics: Annotated[
        str | None,
        typer.Option(help="Metrics, separated by commas, such as ece,nll; by default those of `fedlas evaluate`."),
    ] = None,
    level: Level = 0.95,
    resamples: Annotated[int | None, typer.Option(help="Number of bootstrap resamples; 2,000 by default.")] = None,
    seed: Seed = 0,
    ledger: LedgerFolder = Path("results"),
    json: Json = None,
    overwrite: Overwrite = False,
    *,
    columns: Any,
) -> None:
    """Compare two models on the same samples by paired tests."""
    with one_line_errors():
        from json import dumps

        from fedlas.comparison import TABLE_HEAD, compare_runs, comparison_notes
        from fedlas.experiments.ledger import Ledger
        from fedlas.experiments.ledger_lookup import find_runs

        check_outputs([json_file(json)], overwrite=overwrite, inputs=[Path(first), Path(second)])
        selected_metrics, finished_runs = split_list(metrics), Ledger(ledger)
        options: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
        runs = find_runs(first, finished_runs, **columns), find_runs(second, finished_runs, **columns)
        comparisons = compare_runs(*runs, selected_metrics, **options)
        table = [list(TABLE_HEAD), *(row for comparison in comparisons for row in comparison.rows())]
        if not any(row[1] for row in table[1:]):  # files have no seeds
            table = [[row[0], *row[2:]] for row in table]
        show_table(table[0], table[1:], err=json == "-")
        seeds = any(comparison.standard_error is not None for comparison in comparisons)
        over = "; ±: standard error over seeds; interval and p of a mean: over seeds and test samples" if seeds else ""
        show(f"Difference: first minus second{over}.", err=json == "-")
        for note in comparison_notes(*runs):
            show(f"note: {note}", err=True)
        if json is not None:
            content = [{"format": COMPARE_FORMAT} | comparison.to_dict() for comparison in comparisons]
            write_text(json, dumps(content, allow_nan=False))
