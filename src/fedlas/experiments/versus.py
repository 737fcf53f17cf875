"""Whether one model is better than another, on the same test samples, over seeds.

A side is a run folder, a file of predictions, or rows of the ledger: a line's id, or `data/method`, such as
`cifar10/fedlas_ls` or `cifar10/fast/ce+temperature`, which stands for all seeds of the protocol's own recipe; rows of
other tables have their names there, such as `cifar10/fast/fedlas_ls gate=shuffled` of the ablations. Runs of both sides
are paired by seed, their samples by `ids` or `index` where both have them, and each pair is compared by the paired
bootstrap; over seeds the mean difference and its standard error are told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from fedlas.alignment import SAMPLE_NAMES, align_samples, check_same_samples
from fedlas.errors import UserError
from fedlas.experiments.base import Choice
from fedlas.experiments.grid import AbstractGrid
from fedlas.experiments.ledger import TEST, Ledger, Line
from fedlas.experiments.planning import CATALOG
from fedlas.experiments.stored_predictions import load_stored_predictions
from fedlas.io import read_predictions, require_labels
from fedlas.io.untrusted import content_errors
from fedlas.metrics.base import AbstractMetric, Resampling
from fedlas.metrics.paired import (
    RESAMPLES,
    EachSample,
    check_draws,
    of_each_sample,
    paired_bootstrap,
    paired_method,
)
from fedlas.metrics.registry import all_metrics
from fedlas.metrics.result import Comparison
from fedlas.metrics.seeds import SeedComparison, over_seeds
from fedlas.predictions import AnyPredictions, TopLabelPredictions
from fedlas.training import recipe_for
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import Run

METRICS: Mapping[str, AbstractMetric] = {name: one for name, one in all_metrics().items() if one.paired is not None}
USUAL = ("accuracy", "ece", "nll")


@dataclass(frozen=True)
class Side:
    """The predictions of one side, by seed; a single file has the seed None.

    Args:
        name: as it was asked for.
        runs: the predictions.
        each: what is known of each sample where not all probabilities are: by seed, and by metric.
        recipes: what was trained, by seed, where that is known.
    """

    name: str
    runs: Mapping[int | None, AnyPredictions]
    each: Mapping[int | None, Mapping[str, EachSample]] = field(default_factory=dict)
    recipes: Mapping[int | None, Recipe] = field(default_factory=dict)

    def of_each_sample(self, seed: int | None, metric: str, given: AnyPredictions) -> EachSample:
        """Measure a metric of a run sample by sample."""
        known = self.each.get(seed, {})
        return known[metric] if metric in known else of_each_sample(METRICS[metric], given)

    def lacks(self, metric: str) -> bool:
        """Say whether a metric needs probabilities that some run has not kept."""
        return METRICS[metric].needs_all_classes and any(
            isinstance(given, TopLabelPredictions) and metric not in self.each.get(seed, {})
            for seed, given in self.runs.items()
        )


@dataclass(frozen=True)
class Versus:
    """The difference of two sides in one metric.

    Args:
        metric: name of the metric.
        pairs: the comparison of each seed.
        others: the seed of the second side, by that of the first, where it is another one.
        seeds: the comparison over seeds and test samples, of metrics that are means over samples and of the AURC.
        level: of its interval.
    """

    metric: str
    pairs: Mapping[int | None, Comparison]
    others: Mapping[int | None, int | None] = field(default_factory=dict)
    seeds: SeedComparison | None = None
    level: float = 0.95

    @property
    def difference(self) -> float:
        """The first side's value minus the second's, averaged over seeds."""
        return fmean(one.difference for one in self.pairs.values())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean difference over seeds; None for a single one."""
        values = [one.difference for one in self.pairs.values()]
        return stdev(values) / sqrt(len(values)) if len(values) > 1 else None

    def rows(self) -> list[list[str]]:
        """Lay the comparison out: a row for each seed, and one for their mean."""
        unit = _unit(next(iter(self.pairs.values())))
        name = f"{self.metric} %" if unit == 100 else self.metric
        found = [[name, self._seeds(seed), *_shown(one)] for seed, one in self.pairs.items()]
        if self.standard_error is not None:
            shown = f"{unit * self.difference:+.4g} ± {unit * self.standard_error:.2g}"
            found.append([name, "mean", "", "", shown, *self._shown_over_seeds(unit)])
        return found

    def _shown_over_seeds(self, unit: int) -> list[str]:
        if self.seeds is None:
            return ["", "", ""]
        ends, p_value = self.seeds.interval(self.level), self.seeds.p_value
        first = (self.difference > 0) == (self.metric == "accuracy")
        better = "" if ends.low <= 0 <= ends.high else "first" if first else "second"
        return [f"[{unit * ends.low:+.4g}, {unit * ends.high:+.4g}]", f"{p_value:.3g}", better]

    def _seeds(self, seed: int | None) -> str:
        known = dict.fromkeys(one for one in (seed, self.others.get(seed, seed)) if one is not None)
        return ", ".join(map(str, known))

    def to_dict(self) -> dict[str, Any]:
        """List everything as plain values that JSON knows."""
        pairs = [
            {"seed": seed, "second_seed": self.others.get(seed, seed)} | one.to_dict()
            for seed, one in self.pairs.items()
        ]
        about = {"metric": self.metric, "difference": self.difference, "standard_error": self.standard_error}
        about |= {"over_seeds": None if self.seeds is None else self.seeds.to_dict(self.level)}
        return about | {"pairs": pairs}


HEAD = ("metric", "seed", "first", "second", "difference", "interval", "p", "better")


def _unit(one: Comparison) -> int:
    return 100 if one.first.definition.unit == "fraction" else 1


def _shown(one: Comparison) -> list[str]:
    unit = _unit(one)
    low, high = (unit * end for end in (one.interval.low, one.interval.high))
    return [
        f"{unit * float(one.first):.4g}",
        f"{unit * float(one.second):.4g}",
        f"{unit * one.difference:+.4g}",
        f"[{low:+.4g}, {high:+.4g}]",
        f"{one.p_value:.3g}",
        one.better or "",
    ]


def side(text: str, ledger: Ledger, **columns: Any) -> Side:
    """Find what a side stands for; `columns` are the options of `read_predictions` for files."""
    path = Path(text)
    if path.is_dir():
        run = Run(path)
        seed = run.recipe.seed
        return Side(text, {seed: run.predictions(f"{run.recipe.evaluated}-test")}, recipes={seed: run.recipe})
    if path.is_file():
        return Side(text, {None: require_labels(read_predictions(path, **columns), path)})
    lines = [ledger.lines[text]] if text in ledger.lines else lines_of(text, ledger)
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
    return Side(text, found, each, {line.seed: line.recipe for line in lines})


def lines_of(text: str, ledger: Ledger) -> list[Line]:
    """Find the rows that `data/method` or `data/protocol/method` stands for.

    Where a recipe of the protocol was run, variants of it are not meant: they have an id to be named by.
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
    """Find the runs of a row that is a variant of a method, by the name that it has in its table."""
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
    """Say whether a line is of the ready recipe of its protocol."""
    recipe = line.recipe
    try:
        ready = recipe_for(recipe.data, recipe.model, recipe.loss, protocol=line.protocol, seed=recipe.seed)
    except ValueError:  # a protocol of somebody's own
        return False
    return ready.name == recipe.name


def _known(ledger: Ledger) -> list[str]:
    return sorted({f"{line.recipe.data}/{line.protocol}/{line.method}" for line in ledger.lines.values()})


def _paired_seeds(first: Side, second: Side) -> dict[int | None, int | None]:
    """Say which run of the second side belongs to each of the first."""
    if len(first.runs) == len(second.runs) == 1:
        return dict(zip(first.runs, second.runs, strict=True))
    seeds: dict[int | None, int | None] = {seed: seed for seed in first.runs if seed in second.runs}
    if not seeds:
        raise UserError(f"no seed is on both sides: {list(first.runs)} and {list(second.runs)}")
    return seeds


def remarks(first: Side, second: Side) -> list[str]:
    """Say what somebody who reads the numbers alone would not see of two sides."""
    seeds = _paired_seeds(first, second)
    pairs = [(seed, first.runs[seed], second.runs[other]) for seed, other in seeds.items()]
    said = []
    for name, left in (("first", set(first.runs) - set(seeds)), ("second", set(second.runs) - set(seeds.values()))):
        if left:
            said.append(f"seeds of the {name} side alone are left out: {', '.join(sorted(map(str, left)))}")
    said += _otherwise(first, second, seeds)
    if any(seed is None and _name_nothing(*both) for seed, *both in pairs):
        said.append("samples are paired by their rows, because no id or index is on both sides")
    same = [seed for seed, ours, theirs in pairs if _are_equal(ours.scores, theirs.scores)]
    if same:
        which = "" if len(same) == len(seeds) else f" of seed {', '.join(map(str, same))}"
        said.append(f"both sides are the same predictions{which}, so nothing differs; was another one meant?")
    return said


def _otherwise(first: Side, second: Side, seeds: Mapping[int | None, int | None]) -> list[str]:
    """Name what was trained otherwise on both sides, beside the loss."""
    both = [(first.recipes[one], second.recipes[other]) for one, other in seeds.items()
            if one in first.recipes and other in second.recipes]  # fmt: skip
    found = {
        name: (getattr(ours, name), getattr(theirs, name))
        for ours, theirs in both
        for name in ("model", "epochs", "seed")
        if getattr(ours, name) != getattr(theirs, name)
    }
    return [f"{name} is {ours} on the first side and {theirs} on the second" for name, (ours, theirs) in found.items()]


def _name_nothing(ours: AnyPredictions, theirs: AnyPredictions) -> bool:
    return all(None in (getattr(ours, word), getattr(theirs, word)) for word in SAMPLE_NAMES)


def _are_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def versus(first: Side, second: Side, metrics: Sequence[str] | None = None, **options: Any) -> list[Versus]:
    """Compare two sides, seed by seed; by default in what is usual and can be known of both."""
    sides = (first, second)
    check_draws(options.get("level", 0.95), options.get("resamples", RESAMPLES))
    if metrics is None:
        metrics = [name for name in USUAL if not any(one.lacks(name) for one in sides)]
    for name in metrics:
        if name not in METRICS:
            raise UserError(f"{name!r} cannot be compared; known: {', '.join(METRICS)}")
        if tops := [one.name for one in sides if one.lacks(name)]:
            possible = [word for word, one in METRICS.items() if not one.needs_all_classes]
            raise UserError(
                f"{name} needs the probabilities of all classes, and of {tops[0]} only the largest are kept; "
                f"compare {', '.join(possible)}, or name run folders"
            )
    seeds = _paired_seeds(first, second)
    pairs = {
        seed: (first.runs[seed], align_samples(first.runs[seed], second.runs[other])) for seed, other in seeds.items()
    }

    how = Resampling(**{"resamples": RESAMPLES, **options})

    def compared(name: str) -> Versus:
        metric, each = METRICS[name], {}
        if metric.is_binned:
            found = {seed: paired_bootstrap(metric, *pairs[seed], **options) for seed in pairs}
            return Versus(name, found, others)
        for seed, (ours, theirs) in pairs.items():
            check_same_samples(ours, theirs)
            each[seed] = first.of_each_sample(seed, name, ours), second.of_each_sample(seeds[seed], name, theirs)
        found = {seed: paired_method(metric).compare_means(metric, *both, how) for seed, both in each.items()}
        values = [[both[side].values for both in each.values()] for side in (0, 1)]
        same = len({len(one) for one in values[0]}) == 1
        together = over_seeds(*values) if len(each) > 1 and same else None
        return Versus(name, found, others, together, options.get("level", 0.95))

    others = {seed: other for seed, other in seeds.items() if seed != other}
    return [compared(name) for name in metrics]
