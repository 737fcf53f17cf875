"""Search hyperparameters of a loss on the validation split; the test split is not used.

The runs of a trial write predictions of the validation split only. The sampler is seeded and finished runs are reused,
so an interrupted search continues after its finished trials when it is started again. `search.json` records
the search ranges, every trial, and the best one.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedlas.errors import UserError
from fedlas.extras import optional_module
from fedlas.io.atomic import write_atomic
from fedlas.io.untrusted import path_inside
from fedlas.metrics.registry import all_metrics
from fedlas.training import DivergedError, fit
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import run_in
from fedlas.training.validation import tuning_predictions

logger = logging.getLogger(__name__)

FORMAT = "fedlas.search/1"
FILE_NAME = "search.json"
METRICS = {
    name: metric for name, metric in all_metrics().items() if metric.in_summary and metric.higher_is_better is not None
}


@dataclass(frozen=True)
class Range:
    """Search range of a keyword of the loss: an interval or a list of values.

    Args:
        name: name of the keyword.
        low: lower end.
        high: upper end.
        log: whether to sample on a log scale.
        values: list of values; empty for an interval.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    values: tuple[Any, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Range":
        """Parse `beta=0.5:8`, `beta=0.5:8:log` or `theta=0.1,0.5,0.95`."""
        name, _, specification = text.partition("=")
        parts = specification.split(":")
        log = parts[2:] == ["log"]
        try:
            if len(parts) == 1:
                return cls(name, values=tuple(json.loads(value) for value in specification.split(",")))
            low, high = float(parts[0]), float(parts[1])
        except ValueError:
            low = high = math.nan
        if not (name and len(parts) == 2 + log and math.isfinite(high - low)):
            raise UserError(f"a range is written NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B,C; not {text!r}")
        if low > high:
            raise UserError(f"{text}: the lower end, {parts[0]}, is above the upper, {parts[1]}; exchange them")
        if low == high:
            raise UserError(f"{text}: both ends are {parts[0]}; give it with --set loss_options.{name}={parts[0]}")
        if log and low <= 0:
            raise UserError(f"{text}: with :log the lower end has to be above zero, not {parts[0]}")
        return cls(name, low, high, log)

    def suggest(self, trial: Any) -> Any:
        """Return the value that an Optuna trial suggests."""
        if self.values:
            return trial.suggest_categorical(self.name, list(self.values))
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Trial:
    """One trial of a search.

    Args:
        options: keywords of the loss.
        values: metric on the validation split for each seed; None if the run diverged.
        mean: mean over seeds; None if a run diverged.
        runs: names of the run folders.
    """

    options: dict[str, Any]
    values: tuple[float | None, ...]
    mean: float | None
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Search:
    """The record of a search.

    Args:
        recipe: base recipe.
        ranges: the keywords and their ranges.
        metric: metric that was minimised (accuracy: maximised) on the validation split.
        seeds: seeds of the runs of each trial.
        sampler_seed: random seed of the sampler.
        trials: all trials, in order.
        versions: version of the sampler's package.
    """

    recipe: Recipe
    ranges: tuple[Range, ...]
    metric: str
    seeds: tuple[int, ...]
    sampler_seed: int
    trials: tuple[Trial, ...]
    versions: Mapping[str, str]

    @property
    def best(self) -> Trial:
        """The trial with the best mean."""
        finished = [trial for trial in self.trials if trial.mean is not None]
        if not finished:
            raise UserError("every trial diverged; there is nothing to choose from")
        sign = -1 if self.metric == "accuracy" else 1
        return min(finished, key=lambda trial: sign * (trial.mean or 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        fields = {"format": FORMAT, "split": "val", **asdict(self), "recipe": self.recipe.to_dict()}
        any_finished = any(trial.mean is not None for trial in self.trials)
        return fields | {"best": asdict(self.best) if any_finished else None}


def search(
    recipe: Recipe,
    ranges: Sequence[Range],
    *,
    trials: int,
    folder: Path,
    metric: str = "nll",
    seeds: Sequence[int] = (1,),
    sampler_seed: int = 0,
    **training: Any,
) -> Search:
    """Try keywords of a loss and record every trial in `folder/search.json`.

    Args:
        recipe: base recipe, whose loss keywords are varied.
        ranges: search ranges of the keywords.
        trials: number of trials.
        folder: folder of the run folders and the record.
        metric: "nll", "ece", "aece", "brier" or "accuracy", on the validation split.
        seeds: seeds of the runs of each trial; the mean over them is optimised.
        sampler_seed: random seed of the sampler.
        training: device and data_root.
    """
    if metric not in METRICS:
        raise UserError(f"{metric!r} cannot be searched for; known: {', '.join(METRICS)}")
    if not ranges or trials < 1:
        raise UserError("a search needs at least one range and one trial")
    names = [searched.name for searched in ranges]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--over names {', '.join(twice)} twice; give one range, or one list, for each keyword")
    if recipe.data_options.get("selection") == "official":
        raise UserError(
            "the official code selects on the test split, which a search must not look at; "
            "set data_options.selection=held_out, or take another protocol"
        )
    optuna = optional_module("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize" if METRICS[metric].higher_is_better else "minimize",
        sampler=optuna.samplers.TPESampler(seed=sampler_seed),
    )
    finished: list[Trial] = []
    for number in range(1, trials + 1):
        optuna_trial = study.ask()
        options = {searched.name: searched.suggest(optuna_trial) for searched in ranges}
        varied = recipe.replace(loss_options={**recipe.loss_options, **options}, splits=("val",), ood=())
        trial = _run_trial([varied.replace(seed=seed) for seed in seeds], options, METRICS[metric], folder, training)
        finished.append(trial)
        if trial.mean is None:
            study.tell(optuna_trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(optuna_trial, trial.mean)
        versions = {"optuna": optuna.__version__}
        result = Search(recipe, tuple(ranges), metric, tuple(seeds), sampler_seed, tuple(finished), versions)
        write_atomic(
            path_inside(folder, FILE_NAME, "a search"),
            (json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n").encode(),
        )
        settings = " ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in options.items()
        )
        outcome = "diverged" if trial.mean is None else f"{metric} {trial.mean:.5f}"
        logger.info("trial %d of %d: %s: %s", number, trials, settings, outcome)
    return result


def _run_trial(
    variants: Sequence[Recipe],
    options: dict[str, Any],
    metric: Callable[..., float],
    folder: Path,
    training: dict[str, Any],
) -> Trial:
    values: list[float | None] = []
    for variant in variants:
        try:
            run = fit(variant, out=run_in(folder / "runs", variant).folder, resume=True, **training)
            values.append(float(metric(tuning_predictions(run))))
        except DivergedError:
            values.append(None)
    finite = [value for value in values if value is not None]
    mean = math.fsum(finite) / len(finite) if len(finite) == len(values) else None
    return Trial(options, tuple(values), mean, tuple(variant.name for variant in variants))
