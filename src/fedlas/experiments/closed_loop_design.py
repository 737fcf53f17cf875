"""Recipes of the evaluation of `closed_loop`, as specified in docs/closed_loop_design.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from fedlas.experiments.base import Choice
from fedlas.experiments.ledger import TEMPERATURE, V2, Ledger, Line
from fedlas.training import recipe_for
from fedlas.training.recipe import Recipe

PROTOCOL = "standard"
SEARCH_SEED = 11
POSTHOC = (None, TEMPERATURE)
_DESIGN = json.loads(resources.files("fedlas.experiments").joinpath("closed_loop.json").read_text(encoding="utf-8"))
METHODS: Mapping[str, str] = _DESIGN["methods"]
OOD: Mapping[str, list[str]] = _DESIGN["ood"]
FAMILIES: Sequence[Sequence[str]] = _DESIGN["families"]  # data sets whose p-values are corrected together
# For each data set without a search, the data set whose selected configurations it uses.
CONFIRMATION: Mapping[str, str] = _DESIGN["confirmation"]
CONTROLS: Mapping[str, Any] = _DESIGN["controls"]
ABLATIONS: Mapping[str, Any] = _DESIGN["ablations"]
PUBLISHED: Mapping[str, Any] = _DESIGN["published"]  # losses with the settings of their papers, without a search
OURS = "closed_loop"
# For each method, the recipe fields that differ from the protocol, in the order of the design.
CONFIGURATIONS: Mapping[str, Sequence[Mapping[str, Any]]] = _DESIGN["configurations"]


@dataclass(frozen=True)
class Candidate:
    """A configuration in the search.

    Args:
        method: the loss.
        number: number of the configuration, starting at 1.
    """

    method: str
    number: int

    @property
    def row(self) -> str:
        """Its row in the table of the search."""
        return f"{self.method} {self.number}"

    @property
    def description(self) -> str:
        """Its settings in a few words."""
        changes = CONFIGURATIONS[self.method][self.number - 1]
        return ", ".join(f"{name} {value}" for name, value in changes.get("loss_options", changes).items())


def search_recipe(data: str, candidate: Candidate, choice: Choice) -> Recipe:
    """Return the recipe of a configuration in the search; it makes no test predictions."""
    return _recipe(data, candidate, SEARCH_SEED, choice, splits=("val",))


def primary_recipe(data: str, row: tuple[str, str | None], seed: int, choice: Choice, ledger: Ledger) -> Recipe | None:
    """Return the recipe of a primary-table row (method, calibrator or None); None if its search is incomplete."""
    chosen = select_configuration(data, *row, choice, ledger)
    if chosen is None:
        return None
    return _recipe(data, chosen, seed, choice, ood=tuple(OOD.get(data, ())))


def select_configuration(
    data: str, method: str, posthoc: str | None, choice: Choice, ledger: Ledger
) -> Candidate | None:
    """Return the configuration with the lowest NLL on V2 (half of the validation split); None if runs are missing."""
    data = CONFIRMATION.get(data, data)
    searched = _candidates_of(method)
    lines = [ledger.find(search_recipe(data, candidate, choice), posthoc, V2) for candidate in searched]
    nll = [line.metrics["nll"][0] for line in lines if line is not None]
    return searched[nll.index(min(nll))] if len(nll) == len(searched) else None


def control_recipe(data: str, row: str, seed: int, choice: Choice, ledger: Ledger) -> Recipe | None:
    """Return the recipe of a label-budget control, based on the configuration selected with temperature scaling."""
    control = CONTROLS["rows"][row]
    base = primary_recipe(data, (control["method"], TEMPERATURE), seed, choice, ledger)
    return None if base is None else base.replace(ood=(), **control["recipe"])


def ablation_recipe(row: str, seed: int, choice: Choice, ledger: Ledger) -> Recipe | None:
    """Return the recipe of an ablation; None if runs that it depends on are missing."""
    variant = ABLATIONS["variants"][row]
    base = primary_recipe(ABLATIONS["data"], (OURS, None), seed, choice, ledger)
    if base is None:
        return None
    options = {**base.loss_options, **variant.get("loss_options", {})}
    if "strengths" in variant:  # no feedback: use the smoothing strengths recorded in the run with the other seed
        other = next(other for other in ABLATIONS["seeds"] if other != seed)
        recorded = ledger.find(base.replace(seed=other))
        if recorded is None:
            return None
        options["replay"] = _strengths(recorded)[-1:] if variant["strengths"] == "last" else _strengths(recorded)
    return base.replace(ood=(), loss_options=options, **variant.get("recipe", {}))


def published_recipe(data: str, row: str, seed: int, choice: Choice) -> Recipe:
    """Return the recipe of a loss with the settings of its paper."""
    model = choice.models[0] if choice.models else None
    return recipe_for(data, model, row, protocol=PROTOCOL, seed=seed).with_settings(choice.changes)


def _strengths(line: Line) -> list[dict[str, Any]]:
    """Return the strengths and edges that each epoch used; the log of an epoch has the values for the next epoch."""
    states = [{name: epoch["loss_state"][name] for name in ("strengths", "edges")} for epoch in line.curve]
    # The first epoch is not logged; all of its strengths are equal, so its edges have no effect.
    start = {**states[0], "strengths": [ABLATIONS["start"]] * len(states[0]["strengths"])}
    return [start, *states[:-1]]


def row_name(method: str, posthoc: str | None) -> str:
    """Return the row of a method in the primary table."""
    return method if posthoc is None else f"{method}+{posthoc}"


def _recipe(data: str, candidate: Candidate, seed: int, choice: Choice, **fields: tuple[str, ...]) -> Recipe:
    model = choice.models[0] if choice.models else None
    return _standard_recipe(data, model, candidate, seed, tuple(choice.changes.items())).replace(**fields)


@lru_cache(maxsize=1024)  # tables look up the recipes of a search many times
def _standard_recipe(
    data: str, model: str | None, candidate: Candidate, seed: int, settings: tuple[tuple[str, str], ...]
) -> Recipe:
    changes = CONFIGURATIONS[candidate.method][candidate.number - 1]
    recipe = recipe_for(data, model, candidate.method, protocol=PROTOCOL, seed=seed, **changes)
    return recipe.with_settings(dict(settings))


def data_sets(choice: Choice) -> tuple[str, ...]:
    """Return the data sets of the primary table and of the confirmation."""
    return choice.data or tuple(data for family in FAMILIES for data in family)


def control_data_sets(choice: Choice) -> list[str]:
    """Return the data sets that have controls."""
    return [data for data in data_sets(choice) if data in CONTROLS["data"]]


def control_rows(choice: Choice) -> list[str]:
    """Return the rows of the table of controls."""
    return [row for row, control in CONTROLS["rows"].items() if control["method"] in methods(choice)]


def ablation_rows(choice: Choice) -> list[str]:
    """Return the rows of the table of ablations."""
    requested = ABLATIONS["data"] in data_sets(choice) and OURS in methods(choice)
    return list(ABLATIONS["variants"]) if requested else []


def methods(choice: Choice) -> list[str]:
    """Return the methods to compare."""
    return [method for method in _selected_losses(choice) if method in METHODS]


def candidates(choice: Choice) -> list[Candidate]:
    """Return the configurations of the search."""
    return [candidate for method in methods(choice) for candidate in _candidates_of(method)]


def published_data_sets(choice: Choice) -> list[str]:
    """Return the data sets of the losses with published settings."""
    return [data for data in data_sets(choice) if data in PUBLISHED["data"]]


def published_rows(choice: Choice) -> list[str]:
    """Return the losses with published settings."""
    return [row for row in _selected_losses(choice) if row in PUBLISHED["rows"]]


def published_seeds(choice: Choice) -> list[int]:
    """Return the seeds of the losses with published settings."""
    return [seed for seed in PUBLISHED["seeds"] if seed in choice.seeds]


def _selected_losses(choice: Choice) -> list[str]:
    return choice.select([*METHODS, *PUBLISHED["rows"]], choice.losses, "method")


def _candidates_of(method: str) -> list[Candidate]:
    return [Candidate(method, number) for number in range(1, len(CONFIGURATIONS[method]) + 1)]
