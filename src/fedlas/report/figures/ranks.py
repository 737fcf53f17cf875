"""Many methods on many data sets: mean ranks, and which of them differ by more than chance.

The Friedman test asks whether the methods differ at all. If it finds that they do, two methods differ where their
average ranks lie at least one critical difference apart (Nemenyi): CD = q sqrt(k (k + 1) / (6 N)) for k methods on N
data sets, with q the quantile of the studentised range for k groups and no end of degrees of freedom, over sqrt(2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlas import formatting
from fedlas.metrics.mean_rank import mean_ranks
from fedlas.report.figures.style import DARK, PAGE, fitted, paper, shown


@dataclass(frozen=True)
class Ranks:
    """Average ranks of methods, best first, and which do not differ significantly.

    Args:
        title: what was compared.
        names: of the methods.
        ranks: their average ranks; 1 is best, and equal values share the mean of their ranks.
        groups: first and last place of methods among which no two are shown to differ, of two or more.
        datasets: how many data sets there are.
        critical_difference: of Nemenyi.
        p_value: of the Friedman test.
        alpha: level of both tests.
        test: how it was tested.
    """

    title: str
    names: tuple[str, ...]
    ranks: tuple[float, ...]
    groups: tuple[tuple[int, int], ...]
    datasets: int
    critical_difference: float
    p_value: float
    alpha: float
    test: str = "Friedman, then Nemenyi"


def rank_data(
    table: Mapping[str, Sequence[float]], title: str, *, higher_is_better: bool = False, alpha: float = 0.05
) -> Ranks:
    """Rank methods on every data set, and find those that do not differ significantly.

    Args:
        table: for every method its values, one per data set.
        title: what was compared.
        higher_is_better: whether rank 1 goes to the largest value.
        alpha: level of the tests.
    """
    found = mean_ranks(table, higher_is_better=higher_is_better, alpha=alpha)
    order = sorted(found.average_ranks, key=lambda name: found.average_ranks[name])
    ranks = tuple(found.average_ranks[name] for name in order)
    # Without a difference among all methods, none between two of them may be claimed.
    reach = found.critical_difference if found.p_value < alpha else float(len(order))
    return Ranks(
        title=title,
        names=tuple(order),
        ranks=ranks,
        groups=_groups(ranks, reach),
        datasets=found.datasets,
        critical_difference=found.critical_difference,
        p_value=found.p_value,
        alpha=alpha,
    )


def _groups(ranks: Sequence[float], reach: float) -> tuple[tuple[int, int], ...]:
    """Find the longest stretches of neighbours that all lie closer together than `reach`."""
    found: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = max(place for place, other in enumerate(ranks) if other - rank < reach)
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return tuple(found)


def rank_figure(data: Ranks) -> Any:
    """Draw methods on a line of ranks, the best on the left; bars join those that do not differ significantly."""
    count = len(data.names)
    left = (count + 1) // 2
    step, top = 0.17, 0.62 + 0.11 * len(data.groups)
    height = top + step * left + 0.5
    with paper(PAGE, height) as figure:
        panel = figure.subplots()
        panel.set_axis_off()
        low, high = 1.0, float(count)
        margin = 0.3 * (high - low)
        panel.set(xlim=(low - margin, high + margin), ylim=(height - 0.35, 0))
        panel.plot([low, high], [0.5, 0.5], color=DARK, linewidth=0.8)
        for tick in range(1, count + 1):
            panel.plot([tick, tick], [0.5, 0.44], color=DARK, linewidth=0.8)
            panel.text(tick, 0.4, str(tick), ha="center", va="bottom", fontsize=7)
        reach = min(data.critical_difference, high - low)
        panel.plot([low, low + reach], [0.14, 0.14], color=DARK, linewidth=0.8, marker="|", markersize=5)
        panel.text(
            low, 0.1, f"critical difference {formatting.fixed(data.critical_difference, 2)}", fontsize=7, va="bottom"
        )
        for place, (name, rank) in enumerate(zip(data.names, data.ranks, strict=True)):
            on_left = place < left
            y = top + step * (place if on_left else count - 1 - place)
            end, side = (low - 0.05 * margin, "right") if on_left else (high + 0.05 * margin, "left")
            panel.plot([rank, rank, end], [0.5, y, y], color=DARK, linewidth=0.6)
            panel.text(
                end, y, f" {fitted(name, 1.0, 7)} ({formatting.fixed(rank, 2)}) ", ha=side, va="center", fontsize=7
            )
        for number, (first, last) in enumerate(data.groups):
            y = 0.58 + 0.11 * number
            ends = [data.ranks[first] - 0.02 * (high - low), data.ranks[last] + 0.02 * (high - low)]
            panel.plot(ends, [y, y], color=DARK, linewidth=2.4, solid_capstyle="butt")
        outcome = f"{formatting.p_value(data.p_value)} on {data.datasets} data sets"
        test = f"{data.test}, level {formatting.level(data.alpha)}: {outcome}"
        panel.set_title(f"{shown(data.title, 80)}\n{test}", fontsize=8)
    return figure
