"""Look up the predictions of a model by a run folder, a file, or the name of ledger rows.

Ledger rows are named by the id of a line, or by `data/method` or `data/protocol/method`, such as `cifar10/fedlas_ls` or
`cifar10/fast/ce+temperature`, which selects all seeds of the unchanged recipe of the protocol. Other table rows are
selected by their names, such as `cifar10/fast/fedlas_ls gate=shuffled` of the ablations.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlas.comparison import ModelRuns
from fedlas.errors import UserError
from fedlas.experiments.base import Choice
from fedlas.experiments.grid import AbstractGrid
from fedlas.experiments.ledger import TEST, Ledger, Line
from fedlas.experiments.planning import CATALOG
from fedlas.experiments.stored_predictions import load_stored_predictions
from fedlas.io import read_predictions, require_labels
from fedlas.io.untrusted import content_errors
from fedlas.metrics.base import EachSample
from fedlas.predictions import AnyPredictions
from fedlas.training import recipe_for
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import Run


def find_runs(text: str, ledger: Ledger, **columns: Any) -> ModelRuns:
    """Return the predictions that a name stands for.

    Args:
        text: a run folder, a file of predictions, or ledger rows.
        ledger: ledger that contains the rows.
        columns: options of `read_predictions` for files.
    """
    path = Path(text)
    if path.is_dir():
        run = Run(path)
        seed = run.recipe.seed
        predictions = run.predictions(f"{run.recipe.evaluated}-test")
        return ModelRuns(text, {seed: predictions}, settings={seed: _settings(run.recipe)})
    if path.is_file():
        return ModelRuns(text, {None: require_labels(read_predictions(path, **columns), path)})
    lines = [ledger.lines[text]] if text in ledger.lines else find_lines(text, ledger)
    if not lines:
        rows = {f"{line.recipe.data}/{line.protocol}/{line.method}" for line in ledger.lines.values()}
        known = ", ".join(sorted(rows)) or "none, because it is empty or missing; see --ledger"
        raise UserError(
            f"there is no file or run folder {text!r}, and no such row in the ledger {ledger.folder}, whose rows are "
            f"(data/protocol/method): {known}"
        )
    predictions_of_seed: dict[int | None, AnyPredictions] = {}
    samples_of_seed: dict[int | None, Mapping[str, EachSample]] = {}
    for line in lines:
        if line.seed in predictions_of_seed:
            ids = ", ".join(other.id for other in lines if other.seed == line.seed)
            raise UserError(f"{text!r} means several runs of seed {line.seed}: {ids}; name one of them")
        with content_errors(ledger.file_of(line)):
            stored = load_stored_predictions(line, ledger)
            predictions_of_seed[line.seed], samples_of_seed[line.seed] = stored.tops(), stored.of_each_sample()
    return ModelRuns(text, predictions_of_seed, samples_of_seed, {line.seed: _settings(line.recipe) for line in lines})


def _settings(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in ("model", "epochs", "seed")}


def find_lines(text: str, ledger: Ledger) -> list[Line]:
    """Return the lines that `data/method` or `data/protocol/method` stands for.

    If the ledger has unchanged recipes of a protocol, variants are omitted; select those by their id.
    """
    data, *protocol, method = text.split("/") if "/" in text else ("", text)
    matching = [
        line
        for line in ledger.lines.values()
        if line.recipe.data == data and line.method == method and line.split == TEST
        and (not protocol or line.protocol == protocol[0])
    ]  # fmt: skip
    unchanged = [line for line in matching if _is_unchanged(line)]
    return unchanged or matching or _lines_of_row(data, protocol, method, ledger)


def _lines_of_row(data: str, protocol: Sequence[str], row: str, ledger: Ledger) -> list[Line]:
    """Return the lines of a table row, by the name of the row."""
    lines_of_data = [line for line in ledger.lines.values() if line.recipe.data == data]
    benchmarks = {
        (line.protocol, line.recipe.model) for line in lines_of_data if not protocol or line.protocol == protocol[0]
    }
    grids = [experiment for cls in CATALOG.entries.values() if isinstance(experiment := cls(), AbstractGrid)]
    seeds = tuple(sorted({line.seed for line in lines_of_data}))
    lines_by_id: dict[str, Line] = {}
    for grid in grids:
        for name, model in sorted(benchmarks) if row in grid.methods else ():
            choice = Choice(data=(data,), models=(model,), losses=(row,), protocol=name, seeds=seeds)
            for planned in grid.plan(choice, ledger):
                lines_by_id |= {line.id: line for line in planned.lines(ledger) if line is not None}
    return list(lines_by_id.values())


def _is_unchanged(line: Line) -> bool:
    """Return whether a line has the unchanged recipe of its protocol."""
    recipe = line.recipe
    try:
        unchanged = recipe_for(recipe.data, recipe.model, recipe.loss, protocol=line.protocol, seed=recipe.seed)
    except ValueError:  # a custom protocol
        return False
    return unchanged.name == recipe.name
