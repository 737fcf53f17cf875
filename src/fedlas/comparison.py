"""Paired comparison of models on the same test samples: pairs of models, and runs of two methods over seeds.

Two files may list the same samples in different orders, which cannot be detected if their labels happen to be equal.
Therefore samples are matched by `ids` or `index` if both models have them, and by row otherwise. Runs of two methods
are paired by seed; the standard error of their mean difference accounts for the variance over seeds and samples.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Unpack

import torch

from fedlas import formatting
from fedlas.alignment import SAMPLE_NAMES, align_samples, check_same_samples
from fedlas.errors import UserError, UserTypeError
from fedlas.io import as_predictions
from fedlas.io.columns import ColumnOptions, check_options
from fedlas.metrics.base import AbstractMetric, EachSample, Resampling
from fedlas.metrics.calibration_error import ece
from fedlas.metrics.paired import RESAMPLES, check_draws, of_each_sample, paired_bootstrap, paired_method
from fedlas.metrics.registry import all_metrics, default_comparison_metrics
from fedlas.metrics.result import Comparison
from fedlas.metrics.seeds import SeedComparison, holm, over_seeds
from fedlas.predictions import AnyPredictions, TopLabelPredictions
from fedlas.predictions.arrays import Array, check_row_names
from fedlas.progress import Progress

MAX_MODELS_ALL_PAIRS = 8  # with more models, only pairs that include the first or the best one are compared
TABLE_HEAD = ("metric", "seed", "first", "second", "difference", "interval", "p", "better")


def paired_metrics() -> dict[str, AbstractMetric]:
    """Return the metrics by which models can be compared."""
    return {name: metric for name, metric in all_metrics().items() if metric.paired is not None}


@dataclass(frozen=True)
class PairedTest:
    """The comparison of two models in one metric, or the reason why there is none.

    Args:
        first: name of the first model.
        second: name of the second model.
        metric: name of the metric.
        comparison: the paired test; None if the models cannot be compared.
        reason: reason why the models cannot be compared; empty if they can.
    """

    first: str
    second: str
    metric: str
    comparison: Comparison | None = None
    reason: str = ""


@dataclass(frozen=True)
class ModelRuns:
    """The predictions of one model or method, by seed; a single file has the seed None.

    Args:
        name: name of the model.
        runs: predictions on the test samples.
        per_sample: per-sample values of metrics, by seed and metric, where not all probabilities are stored.
        settings: model, epochs and seed of the training runs, if known.
    """

    name: str
    runs: Mapping[int | None, AnyPredictions]
    per_sample: Mapping[int | None, Mapping[str, EachSample]] = field(default_factory=dict)
    settings: Mapping[int | None, Mapping[str, Any]] = field(default_factory=dict)

    def values(self, seed: int | None, metric: str, predictions: AnyPredictions) -> EachSample:
        """Return the stored per-sample values of a metric, or compute them."""
        stored = self.per_sample.get(seed, {})
        return stored[metric] if metric in stored else of_each_sample(paired_metrics()[metric], predictions)

    def lacks(self, metric: str) -> bool:
        """Return whether a metric needs probabilities that at least one run has not stored."""
        return paired_metrics()[metric].needs_all_classes and any(
            isinstance(predictions, TopLabelPredictions) and metric not in self.per_sample.get(seed, {})
            for seed, predictions in self.runs.items()
        )


@dataclass(frozen=True)
class RunsComparison:
    """The difference between two methods in one metric.

    Args:
        metric: name of the metric.
        by_seed: one comparison per seed.
        second_seeds: maps the seed of the first method to the paired seed of the second, where the two differ.
        over_seeds: the comparison over seeds and test samples; only for the AURC and means over samples.
        level: confidence level.
    """

    metric: str
    by_seed: Mapping[int | None, Comparison]
    second_seeds: Mapping[int | None, int | None] = field(default_factory=dict)
    over_seeds: SeedComparison | None = None
    level: float = 0.95

    @property
    def difference(self) -> float:
        """Value of the first method minus that of the second, averaged over seeds."""
        return fmean(comparison.difference for comparison in self.by_seed.values())

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean difference over seeds; None for a single one."""
        values = [comparison.difference for comparison in self.by_seed.values()]
        return stdev(values) / sqrt(len(values)) if len(values) > 1 else None

    def rows(self) -> list[list[str]]:
        """Return a table row for each seed, and one for their mean."""
        percent = _is_percentage(next(iter(self.by_seed.values())))
        name = f"{self.metric} %" if percent else self.metric
        rows = [[name, self._seeds(seed), *_cells(comparison)] for seed, comparison in self.by_seed.items()]
        if (error := self.standard_error) is not None:
            rows.append([name, "mean", "", "", *self._cells_over_seeds(error, percent=percent)])
        return rows

    def _cells_over_seeds(self, error: float, *, percent: bool) -> list[str]:
        error_text = formatting.number(error, -error, error, percent=percent)
        if self.over_seeds is None:
            value, _ = formatting.difference(self.difference, -error, error, percent=percent)
            return [f"{value} ± {error_text}", "", "", ""]
        interval = self.over_seeds.interval(self.level)
        value, interval_text = formatting.difference(self.difference, interval.low, interval.high, percent=percent)
        first = (self.difference > 0) == bool(paired_metrics()[self.metric].higher_is_better)
        better = "" if interval.low <= 0 <= interval.high else "first" if first else "second"
        return [f"{value} ± {error_text}", interval_text, formatting.p_value_cell(self.over_seeds.p_value), better]

    def _seeds(self, seed: int | None) -> str:
        """Return the seeds of a pair of runs; a single number if they are equal, empty if they are unknown."""
        pair = dict.fromkeys((seed, self.second_seeds.get(seed, seed)))
        return ", ".join(str(number) for number in pair if number is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        pairs = [
            {"seed": seed, "second_seed": self.second_seeds.get(seed, seed)} | comparison.to_dict()
            for seed, comparison in self.by_seed.items()
        ]
        fields = {"metric": self.metric, "difference": self.difference, "standard_error": self.standard_error}
        fields |= {"over_seeds": None if self.over_seeds is None else self.over_seeds.to_dict(self.level)}
        return fields | {"pairs": pairs}


def _is_percentage(comparison: Comparison) -> bool:
    return comparison.first.definition.unit == "fraction"


def _cells(comparison: Comparison) -> list[str]:
    ends, percent = (comparison.interval.low, comparison.interval.high), _is_percentage(comparison)
    values = [
        formatting.number(float(result), *ends, percent=percent) for result in (comparison.first, comparison.second)
    ]
    p_value = formatting.p_value_cell(comparison.p_value, is_bound=comparison.p_value_is_bound)
    return [*values, *comparison.cells(), p_value, comparison.better or ""]


def compare(
    first: Any,
    second: Any,
    labels: Array | str | None = None,
    *,
    metrics: Sequence[str] | None = None,
    logits: bool = False,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    **columns: Unpack[ColumnOptions],
) -> dict[str, Comparison]:
    """Compare two models on the same samples by paired tests; return a comparison for each metric.

    Args:
        first: predictions of the first model: an array of probabilities, a file, a DataFrame or `Predictions`.
        second: predictions of the second model.
        labels: labels of the samples, the same for both models; omit them if the predictions include labels.
        metrics: names of metrics; by default the metrics of comparisons in reports that the predictions allow.
        logits: whether arrays hold logits.
        bins: number of bins of calibration errors.
        level: confidence level.
        resamples: number of bootstrap resamples, 2,000 by default.
        seed: random seed of the bootstrap.
        columns: roles of the columns of a file or table, as in `read_predictions`.
    """
    check_options(columns, compare)

    def read(name: str, model: Any) -> ModelRuns:
        own_labels = isinstance(model, AnyPredictions)
        return ModelRuns(name, {None: as_predictions(model, None if own_labels else labels, logits=logits, **columns)})

    check_row_names(first, second, ("first", "second"))
    first, second = read("first", first), read("second", second)
    tests = compare_runs(first, second, metrics, bins=bins, level=level, resamples=resamples, seed=seed)
    return {test.metric: test.by_seed[None] for test in tests}


def compare_models(
    models: Mapping[str, AnyPredictions],
    *,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[PairedTest]:
    """Compare models on the same samples by paired tests; return a test for each pair and metric.

    Up to eight models are compared in all pairs. With more models, only pairs that include the first model or the one
    with the lowest ECE are compared. A pair that cannot be compared has a single test, which holds the reason. The
    p-values of each metric are corrected for the number of pairs by the method of Holm.

    Args:
        models: predictions by the name of the model.
        bins: number of bins of calibration errors.
        level: confidence level.
        resamples: number of bootstrap resamples, 2,000 by default; increased where the correction needs more.
        seed: random seed of the bootstrap.
        progress: called with "comparing models" and the fraction of pairs that are done.
    """
    pairs = _pairs(models, bins)
    resamples = resamples or RESAMPLES
    if resamples + 1 > 2 / (1 - level):  # with fewer resamples, each test reports that they are too few
        # The smallest p-value, 2 / (resamples + 1), has to stay below 1 - level after the correction.
        resamples = max(resamples, math.ceil(2 * len(pairs) / (1 - level)))
    tests: list[PairedTest] = []
    for done, (first, second) in enumerate(pairs):
        if progress is not None:
            progress("comparing models", done / len(pairs))
        runs = ModelRuns(first, {None: models[first]}), ModelRuns(second, {None: models[second]})
        tests += _test_pair(*runs, bins, Resampling(level, resamples, seed))
    if progress is not None and pairs:
        progress("comparing models", 1.0)
    return _corrected(tests, level)


def _pairs(models: Mapping[str, AnyPredictions], bins: int) -> list[tuple[str, str]]:
    names = list(models)
    if len(names) <= MAX_MODELS_ALL_PAIRS:
        return list(combinations(names, 2))
    best = min(names, key=lambda name: float(ece(models[name], bins=bins)))
    pairs_with_best = [(best, name) for name in names if name not in {best, names[0]}]
    return [(names[0], name) for name in names[1:]] + ([] if best == names[0] else pairs_with_best)


def correction_note(models: int) -> str:
    """Return a note on which pairs are compared and how p-values are corrected; empty for two models."""
    if models < 3:
        return ""
    which = "all pairs are compared"
    if models > MAX_MODELS_ALL_PAIRS:
        which = "the first model and the one with the lowest ECE are compared with all others"
    return f"{which}; p-values are Holm-corrected for the number of pairs, confidence intervals are not"


def _test_pair(first: ModelRuns, second: ModelRuns, bins: int, how: Resampling) -> Iterator[PairedTest]:
    """Yield a test for each metric, or a single one with the reason if the models cannot be compared."""
    metric = next(iter(default_comparison_metrics()))  # of the test that has the reason, if the samples do not match
    try:
        check_draws(how)
        paired = _PairedRuns.of(first, second)
        for metric in paired.known_metrics():
            yield PairedTest(first.name, second.name, metric, paired.compare(metric, bins, how).by_seed[None])
    except ValueError as error:
        yield PairedTest(first.name, second.name, metric, reason=str(error))


def _corrected(tests: Sequence[PairedTest], level: float) -> list[PairedTest]:
    """Correct the p-values of each metric for the number of pairs by the step-down method of Holm (1979)."""
    corrected = list(tests)
    for metric in default_comparison_metrics():
        family = [
            (paired_test.comparison, i)
            for i, paired_test in enumerate(tests)
            if paired_test.metric == metric and paired_test.comparison
        ]
        for (test, i), p_value in zip(family, holm([test.p_value for test, _ in family]), strict=True):
            better = test.better if p_value <= 1 - level or len(family) == 1 else None
            corrected[i] = replace(tests[i], comparison=replace(test, p_value=p_value, better=better))
    return corrected


def compare_runs(
    first: ModelRuns,
    second: ModelRuns,
    metrics: Sequence[str] | None = None,
    *,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
) -> list[RunsComparison]:
    """Compare the runs of two methods, seed by seed and over seeds.

    Args:
        first: predictions of the first method.
        second: predictions of the second method, on the same samples.
        metrics: names of metrics; by default the metrics of comparisons in reports that the predictions allow.
        bins: number of bins of calibration errors.
        level: confidence level.
        resamples: number of bootstrap resamples, 2,000 by default.
        seed: random seed of the bootstrap.
    """
    how = Resampling(level, resamples or RESAMPLES, seed)
    check_draws(how)
    if isinstance(metrics, str):
        raise UserTypeError(f"metrics takes a list of names, such as [{metrics!r}], not {metrics!r}")
    for name in metrics or ():
        if name not in paired_metrics():
            raise UserError(f"{name!r} cannot be compared; known: {', '.join(paired_metrics())}")
        if lacking := [side.name for side in (first, second) if side.lacks(name)]:
            possible = [other for other, metric in paired_metrics().items() if not metric.needs_all_classes]
            raise UserError(
                f"{name} needs the probabilities of all classes, but only the largest ones of {lacking[0]} are stored; "
                f"compare {', '.join(possible)}, or pass run folders instead"
            )
    paired = _PairedRuns.of(first, second)
    return [paired.compare(name, bins, how) for name in (paired.known_metrics() if metrics is None else metrics)]


@dataclass(frozen=True)
class _PairedRuns:
    """Runs of two methods, paired by seed, with their samples in the same order.

    Args:
        first: the first method.
        second: the second method.
        seeds: maps the seed of the first method to the paired seed of the second.
        aligned: predictions of both methods on the same samples in the same order, by the seed of the first.
    """

    first: ModelRuns
    second: ModelRuns
    seeds: Mapping[int | None, int | None]
    aligned: Mapping[int | None, tuple[AnyPredictions, AnyPredictions]]

    @classmethod
    def of(cls, first: ModelRuns, second: ModelRuns) -> "_PairedRuns":
        seeds = _paired_seeds(first, second)
        aligned = {
            seed: (first.runs[seed], align_samples(first.runs[seed], second.runs[other]))
            for seed, other in seeds.items()
        }
        for both in aligned.values():
            check_same_samples(*both)
        return cls(first, second, seeds, aligned)

    def known_metrics(self) -> list[str]:
        """Return the default metrics that can be computed for both methods."""
        return [
            name for name in default_comparison_metrics() if not (self.first.lacks(name) or self.second.lacks(name))
        ]

    def compare(self, name: str, bins: int, how: Resampling) -> RunsComparison:
        """Compare both methods in one metric."""
        metric = paired_metrics()[name]
        different_seeds = {seed: other for seed, other in self.seeds.items() if seed != other}
        if metric.is_binned:
            options: dict[str, Any] = {"bins": bins, "level": how.level, "resamples": how.resamples, "seed": how.seed}
            return RunsComparison(
                name,
                {seed: paired_bootstrap(metric, *both, **options) for seed, both in self.aligned.items()},
                different_seeds,
            )
        values = {
            seed: (self.first.values(seed, name, first), self.second.values(self.seeds[seed], name, second))
            for seed, (first, second) in self.aligned.items()
        }
        by_seed = {seed: paired_method(metric).compare_means(metric, *both, how) for seed, both in values.items()}
        same_size = len({len(first.values) for first, _ in values.values()}) == 1
        across_seeds = None
        if len(values) > 1 and same_size:
            across_seeds = over_seeds(*([both[side].values for both in values.values()] for side in (0, 1)))
        return RunsComparison(name, by_seed, different_seeds, across_seeds, how.level)


def _paired_seeds(first: ModelRuns, second: ModelRuns) -> dict[int | None, int | None]:
    """Return the seed of the second method for each seed of the first."""
    if len(first.runs) == len(second.runs) == 1:
        return dict(zip(first.runs, second.runs, strict=True))
    seeds: dict[int | None, int | None] = {seed: seed for seed in first.runs if seed in second.runs}
    if not seeds:
        raise UserError(f"the two methods have no seed in common: {list(first.runs)} and {list(second.runs)}")
    return seeds


def comparison_notes(first: ModelRuns, second: ModelRuns) -> list[str]:
    """Return warnings about a comparison of two methods: unpaired seeds, different settings, equal predictions."""
    seeds = _paired_seeds(first, second)
    pairs = [(seed, first.runs[seed], second.runs[other]) for seed, other in seeds.items()]
    notes = []
    for name, left in (("first", set(first.runs) - set(seeds)), ("second", set(second.runs) - set(seeds.values()))):
        if left:
            notes.append(f"seeds that only the {name} method has are ignored: {', '.join(sorted(map(str, left)))}")
    notes += _different_settings(first, second, seeds)
    if any(seed is None and _share_no_sample_ids(*both) for seed, *both in pairs):
        notes.append("samples are paired by row, because the predictions share neither ids nor an index")
    identical_seeds = [seed for seed, first_run, second_run in pairs if _are_equal(first_run.scores, second_run.scores)]
    if identical_seeds:
        which = "" if len(identical_seeds) == len(seeds) else f" of seed {', '.join(map(str, identical_seeds))}"
        notes.append(f"both methods have identical predictions{which}; check that the intended ones are compared")
    return notes


def _different_settings(first: ModelRuns, second: ModelRuns, seeds: Mapping[int | None, int | None]) -> list[str]:
    different: dict[str, tuple[Any, Any]] = {}
    for seed, other in seeds.items():
        first_settings, second_settings = first.settings.get(seed, {}), second.settings.get(other, {})
        common = {
            name: (first_settings[name], second_settings[name]) for name in first_settings if name in second_settings
        }
        different |= {name: pair for name, pair in common.items() if pair[0] != pair[1]}
    return [f"{name} is {pair[0]} for the first method, {pair[1]} for the second" for name, pair in different.items()]


def _share_no_sample_ids(first: AnyPredictions, second: AnyPredictions) -> bool:
    """Return whether neither `ids` nor `index` is available for both."""
    return all(None in (getattr(first, name), getattr(second, name)) for name in SAMPLE_NAMES)


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)
