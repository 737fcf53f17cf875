"""Critical difference diagram: mean ranks of methods over data sets, and which differ significantly.

The Friedman test checks whether the methods differ at all. If they do, two methods differ significantly if their
average ranks are at least one critical difference apart (Nemenyi test): CD = q sqrt(k (k + 1) / (6 N)) for k methods
on N data sets, with q the quantile of the studentised range for k groups and infinite degrees of freedom, divided by
sqrt(2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlas import formatting
from fedlas.metrics.mean_rank import mean_ranks
from fedlas.report.figures.style import DARK, PAGE, figure_of_size, fit_label, safe_label


@dataclass(frozen=True)
class Ranks:
    """Average ranks of methods, best first, and groups that do not differ significantly.

    Args:
        title: title of the figure.
        names: names of the methods.
        ranks: average ranks; 1 is best, and tied values share their mean rank.
        groups: positions of the first and last of two or more methods that do not differ significantly.
        datasets: number of data sets.
        critical_difference: critical difference of the Nemenyi test.
        p_value: p-value of the Friedman test.
        alpha: significance level of both tests.
        test: names of the tests.
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
    """Rank methods on every data set and test which of them differ significantly.

    Args:
        table: values of each method, one per data set.
        title: title of the figure.
        higher_is_better: whether rank 1 goes to the largest value.
        alpha: significance level of the tests.
    """
    result = mean_ranks(table, higher_is_better=higher_is_better, alpha=alpha)
    order = sorted(result.average_ranks, key=lambda name: result.average_ranks[name])
    ranks = tuple(result.average_ranks[name] for name in order)
    # If the Friedman test is not significant, no two methods are called different.
    reach = result.critical_difference if result.p_value < alpha else float(len(order))
    return Ranks(
        title=title,
        names=tuple(order),
        ranks=ranks,
        groups=_groups(ranks, reach),
        datasets=result.datasets,
        critical_difference=result.critical_difference,
        p_value=result.p_value,
        alpha=alpha,
    )


def _groups(ranks: Sequence[float], reach: float) -> tuple[tuple[int, int], ...]:
    """Return the maximal runs of neighbours whose ranks differ by less than `reach`."""
    groups: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = max(position for position, other in enumerate(ranks) if other - rank < reach)
        if last > first and (not groups or last > groups[-1][1]):
            groups.append((first, last))
    return tuple(groups)


def rank_figure(data: Ranks) -> Any:
    """Draw a critical difference diagram; bars join methods that do not differ significantly."""
    count = len(data.names)
    left = (count + 1) // 2
    step, top = 0.17, 0.62 + 0.11 * len(data.groups)
    height = top + step * left + 0.5
    with figure_of_size(PAGE, height) as figure:
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
        for position, (name, rank) in enumerate(zip(data.names, data.ranks, strict=True)):
            on_left = position < left
            y = top + step * (position if on_left else count - 1 - position)
            end, side = (low - 0.05 * margin, "right") if on_left else (high + 0.05 * margin, "left")
            panel.plot([rank, rank, end], [0.5, y, y], color=DARK, linewidth=0.6)
            panel.text(
                end, y, f" {fit_label(name, 1.0, 7)} ({formatting.fixed(rank, 2)}) ", ha=side, va="center", fontsize=7
            )
        for number, (first, last) in enumerate(data.groups):
            y = 0.58 + 0.11 * number
            ends = [data.ranks[first] - 0.02 * (high - low), data.ranks[last] + 0.02 * (high - low)]
            panel.plot(ends, [y, y], color=DARK, linewidth=2.4, solid_capstyle="butt")
        outcome = f"{formatting.p_value(data.p_value)} on {data.datasets} data sets"
        test = f"{data.test}, level {formatting.level(data.alpha)}: {outcome}"
        panel.set_title(f"{safe_label(data.title, 80)}\n{test}", fontsize=8)
    return figure
