"""Models laid side by side: which are compared with which, in what, on the same samples.

Files may list the same samples in different orders, and equal labels do not show it. Where both models name their
samples (`ids`, else `index`), the names decide which samples belong together.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from fedlas.alignment import align_samples
from fedlas.metrics.calibration_error import ece
from fedlas.metrics.paired import RESAMPLES, check_draws, paired_bootstrap
from fedlas.metrics.registry import compared_metrics
from fedlas.metrics.result import Comparison
from fedlas.metrics.seeds import holm
from fedlas.predictions import AnyPredictions, TopLabelPredictions

ALL_PAIRS = 8  # up to so many models are compared with each other, more with the first and the best


@dataclass(frozen=True)
class PairedTest:
    """How two models differ in one metric; or why they cannot be compared.

    Args:
        first: name of the first model.
        second: name of the second.
        metric: what is compared.
        found: the paired test; None where there is none.
        why: the reason for that.
    """

    first: str
    second: str
    metric: str
    found: Comparison | None = None
    why: str = ""


def duels(
    models: Mapping[str, AnyPredictions],
    *,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    watch: Callable[[float], None] | None = None,
) -> list[PairedTest]:
    """Compare models on the same samples by paired tests; a pair that cannot be compared is named once.

    The p-values of each metric are corrected for the number of pairs by the method of Holm.

    Args:
        models: predictions of each, by its name.
        bins: how many bins calibration errors have.
        level: of all intervals.
        resamples: how many resamples a test draws, 2,000 by default; more where the correction needs them.
        seed: of its random numbers.
        watch: called with the share of pairs that are done.
    """
    pairs = _pairs(models)
    options: dict[str, Any] = {"level": level, "resamples": resamples or RESAMPLES, "seed": seed}
    found: list[PairedTest] = []
    if options["resamples"] + 1 > 2 / (1 - level):  # otherwise the tests say that these are too few
        # The smallest p-value, 2 / (resamples + 1), has to stay below 1 - level after the correction.
        options["resamples"] = max(options["resamples"], math.ceil(2 * len(pairs) / (1 - level)))
    for done, (first, second) in enumerate(pairs):
        if watch is not None:
            watch(done / len(pairs))
        found += _tests(first, second, models, bins, options)
    if watch is not None and pairs:
        watch(1.0)
    return _corrected(found, level)


def _pairs(models: Mapping[str, AnyPredictions]) -> list[tuple[str, str]]:
    """Choose the pairs: all of them, or of many models the first and the one with the lowest ECE with all others."""
    names = list(models)
    if len(names) <= ALL_PAIRS:
        return list(combinations(names, 2))
    best = min(names, key=lambda name: float(ece(models[name])))
    others = [(best, name) for name in names if name not in {best, names[0]}]
    return [(names[0], name) for name in names[1:]] + ([] if best == names[0] else others)


def correction_note(models: int) -> str:
    """Return which pairs of so many models are compared, and how p-values are corrected; empty for two models."""
    if models < 3:
        return ""
    which = "all pairs are compared"
    if models > ALL_PAIRS:
        which = "the first model and the one with the lowest ECE are compared with all others"
    return f"{which}; p-values are Holm-corrected for the number of pairs, confidence intervals are not"


def _tests(
    first: str, second: str, models: Mapping[str, AnyPredictions], bins: int, options: Mapping[str, Any]
) -> Iterator[PairedTest]:
    try:
        check_draws(options["level"], options["resamples"])
        held = (models[first], align_samples(models[first], models[second]))
    except ValueError as error:
        yield PairedTest(first, second, next(iter(compared_metrics())), why=str(error))
        return
    for name, metric in compared_metrics().items():
        if metric.needs_all_classes and any(isinstance(one, TopLabelPredictions) for one in held):
            continue
        more: dict[str, Any] = {"bins": bins} if metric.is_binned else {}
        try:
            yield PairedTest(first, second, name, paired_bootstrap(metric, held[0], held[1], **options, **more))
        except ValueError as error:
            yield PairedTest(first, second, name, why=str(error))
            return


def _corrected(found: Sequence[PairedTest], level: float) -> list[PairedTest]:
    """Correct the p-values of each metric for the number of pairs by the step-down method of Holm (1979)."""
    adjusted = list(found)
    for metric in compared_metrics():
        tests = [
            (one.found, place) for place, one in enumerate(found) if one.metric == metric and one.found is not None
        ]
        for (test, place), p_value in zip(tests, holm([test.p_value for test, _ in tests]), strict=True):
            better = test.better if p_value <= 1 - level or len(tests) == 1 else None
            adjusted[place] = replace(found[place], found=replace(test, p_value=p_value, better=better))
    return adjusted
