"""Look up the predictions of a model by a run folder, a file, or the name of ledger rows.

Ledger rows are named by a line's id, or by `data/method`, such as `cifar10/fedlas_ls` or
`cifar10/fast/ce+temperature`, which means all seeds of the protocol's own recipe; rows of other tables have their names
there, such as `cifar10/fast/fedlas_ls gate=shuffled` of the ablations.
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
from fedlas.metrics.paired import EachSample
from fedlas.predictions import AnyPredictions
from fedlas.training import recipe_for
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import Run


def find_runs(text: str, ledger: Ledger, **columns: Any) -> ModelRuns:
    """Return the predictions that a name stands for.

    Args:
        text: a run folder, a file of predictions, or ledger rows.
        ledger: where rows are looked up.
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
        held = ", ".join(_known(ledger)) or "it is empty, or not there: --ledger says where it lies"
        raise UserError(
            f"{text!r} is neither a run folder nor a file nor in the ledger {ledger.folder}; rows of the ledger are"
            f" written as data/method or data/protocol/method: {held}"
        )
    found: dict[int | None, AnyPredictions] = {}
    each: dict[int | None, Mapping[str, EachSample]] = {}
    for line in lines:
        if line.seed in found:
            several = ", ".join(one.id for one in lines if one.seed == line.seed)
            raise UserError(f"{text!r} means several runs of seed {line.seed}: {several}; name one of them")
        with content_errors(ledger.file_of(line)):
            kept = load_stored_predictions(line, ledger)
            found[line.seed], each[line.seed] = kept.tops(), kept.of_each_sample()
    return ModelRuns(text, found, each, {line.seed: _settings(line.recipe) for line in lines})


def _settings(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in ("model", "epochs", "seed")}


def find_lines(text: str, ledger: Ledger) -> list[Line]:
    """Return the lines that `data/method` or `data/protocol/method` stands for.

    Where a recipe of the protocol was run, its variants are left out; they can be named by their id.
    """
    data, *protocol, method = text.split("/") if "/" in text else ("", text)
    found = [
        line
        for line in ledger.lines.values()
        if line.recipe.data == data and line.method == method and line.split == TEST
        and (not protocol or line.protocol == protocol[0])
    ]  # fmt: skip
    usual = [line for line in found if _is_usual(line)]
    return usual or found or _lines_of_row(data, protocol, method, ledger)


def _lines_of_row(data: str, protocol: Sequence[str], row: str, ledger: Ledger) -> list[Line]:
    """Return the lines of a row that is a variant of a method, by its name in its table."""
    held = [line for line in ledger.lines.values() if line.recipe.data == data]
    places = {(line.protocol, line.recipe.model) for line in held if not protocol or line.protocol == protocol[0]}
    tables = [made for cls in CATALOG.entries.values() if isinstance(made := cls(), AbstractGrid)]
    seeds = tuple(sorted({line.seed for line in held}))
    found: dict[str, Line] = {}
    for table in tables:
        for name, model in sorted(places) if row in table.methods else ():
            choice = Choice(data=(data,), models=(model,), losses=(row,), protocol=name, seeds=seeds)
            for wanted in table.plan(choice, ledger):
                lines = [ledger.find(wanted.recipe, posthoc, wanted.split) for posthoc in wanted.posthoc]
                found |= {line.id: line for line in lines if line is not None}
    return list(found.values())


def _is_usual(line: Line) -> bool:
    """Return whether a line is of the unchanged recipe of its protocol."""
    recipe = line.recipe
    try:
        ready = recipe_for(recipe.data, recipe.model, recipe.loss, protocol=line.protocol, seed=recipe.seed)
    except ValueError:  # a custom protocol
        return False
    return ready.name == recipe.name


def _known(ledger: Ledger) -> list[str]:
    return sorted({f"{line.recipe.data}/{line.protocol}/{line.method}" for line in ledger.lines.values()})
