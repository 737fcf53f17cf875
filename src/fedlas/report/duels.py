"""Models laid side by side: which are compared with which, in what, on the same samples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from fedlas.metrics.calibration import ece
from fedlas.metrics.comparison import Comparison, paired_bootstrap
from fedlas.metrics.scoring import accuracy, brier, nll
from fedlas.predictions import Predictions

METRICS = {"accuracy": accuracy, "ece": ece, "nll": nll, "brier": brier}
WHOLE = {"nll", "brier"}  # metrics of all probabilities, not of the top one alone
ALL_PAIRS = 4  # up to so many models are compared with each other, more with the first alone


@dataclass(frozen=True)
class Duel:
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
    models: Mapping[str, Predictions],
    *,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
    watch: Callable[[float], None] | None = None,
) -> Iterator[Duel]:
    """Compare models on the same samples by paired tests; a pair that cannot be compared is named once.

    Args:
        models: predictions of each, by its name.
        level: of all intervals.
        resamples: how many resamples a test draws.
        seed: of its random numbers.
        watch: called with the share of pairs that are done.
    """
    names = list(models)
    pairs = list(combinations(names, 2)) if len(names) <= ALL_PAIRS else [(names[0], other) for other in names[1:]]
    for done, (first, second) in enumerate(pairs):
        held = (models[first], models[second])
        if watch is not None:
            watch(done / len(pairs))
        for name, metric in METRICS.items():
            if name in WHOLE and any(one.top_only for one in held):
                continue
            try:
                found = paired_bootstrap(metric, *held, level=level, resamples=resamples, seed=seed)
            except ValueError as error:
                yield Duel(first, second, name, why=str(error))
                break
            yield Duel(first, second, name, found)
