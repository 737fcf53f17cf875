"""Models laid side by side: which are compared with which, in what, on the same samples.

Files may list the same samples in different orders, and equal labels do not show it. Where both models name their
samples (`ids`, else `index`), the names decide which samples belong together.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from fedlas.errors import UserError
from fedlas.metrics.calibration_error import ece
from fedlas.metrics.catalogue import compared_metrics
from fedlas.metrics.paired import RESAMPLES, check_draws, paired_bootstrap
from fedlas.metrics.result import Comparison
from fedlas.metrics.seeds import holm
from fedlas.predictions import AnyPredictions, TopLabelPredictions

ALL_PAIRS = 8  # up to so many models are compared with each other, more with the first and the best
NAMES = ("ids", "index")  # what samples are called by, the better first
KINDS = ("train", "val", "test")  # begin the words for splits


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
        held = (models[first], paired_with(models[first], models[second]))
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


def paired_with(first: AnyPredictions, second: AnyPredictions) -> AnyPredictions:
    """Give the samples of the second model in the order of the first; refuse samples of another split.

    The same images may be a split of another name: `fedlas predict` calls them by a hash of the data's keywords. So
    `ids` decide without the split. `index` does where the names do not say, as "val" and "test" do, that these are two
    splits: both may be counted from zero, and sorted by class.
    """
    word = next((word for word in NAMES if None not in (getattr(first, word), getattr(second, word))), None)
    ours, theirs = first.split, second.split
    if word != "ids" and ours is not None and theirs is not None and ours != theirs:
        kinds = _kinds(ours), _kinds(theirs)
        if word is None or (all(kinds) and kinds[0].isdisjoint(kinds[1])):
            raise UserError(f"the first model was evaluated on the split {ours!r}, the second on {theirs!r}")
    return in_order_of(first, second)


def _kinds(split: str) -> set[str]:
    """Find the words in a split's name that say what it is for."""
    words = re.split("[^a-z]+", split.lower())
    return {kind for kind in KINDS for word in words if word.startswith(kind)}


def in_order_of(first: AnyPredictions, second: AnyPredictions) -> AnyPredictions:
    """Bring the samples of the second model into the order of the first, where both name their samples."""
    for word in NAMES:
        ours, theirs = _names(first, word), _names(second, word)
        if ours is None or theirs is None:
            continue
        if ours == theirs:
            return second
        for which, names in {"first": ours, "second": theirs}.items():
            twice, count = Counter(names).most_common(1)[0]
            if count > 1:
                raise UserError(f"samples differ in order, and {word} of the {which} model has {twice!r} {count} times")
        alone = len(set(ours) - set(theirs)), len(set(theirs) - set(ours))
        if any(alone):
            raise UserError(
                f"by their {word} these are not the same samples: {alone[0]:,} are in the first alone, {alone[1]:,} in "
                "the second alone"
            )
        place = {name: row for row, name in enumerate(theirs)}
        return second[[place[name] for name in ours]]
    return second


def _names(given: AnyPredictions, word: str) -> list[Any] | None:
    found = getattr(given, word)
    return None if found is None else list(found if isinstance(found, tuple) else found.tolist())
