"""What is gained when a model may leave samples unanswered: risk over coverage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedlas.formatting import percent
from fedlas.metrics.inputs import Given, pairs
from fedlas.metrics.selective import aurc
from fedlas.report import page_data
from fedlas.report.figures.style import COLUMN, PALE, fitted, legend_below, paper, stroke


@dataclass(frozen=True)
class RiskCurve:
    """Share of errors among the samples that are answered, the most confident first.

    Args:
        title: whose curve it is.
        coverage: shares of samples that are answered.
        risk: share of errors among them.
        best: the same, if every right answer came before every wrong one.
        aurc: mean of the risk over all coverages.
    """

    title: str
    coverage: tuple[float, ...]
    risk: tuple[float, ...]
    best: tuple[float, ...]
    aurc: float


def risk_data(given: Given, title: str) -> RiskCurve:
    """Trace the risk over coverage, in at most some 160 points."""
    found = pairs(given)
    held = page_data.risk_data(found)
    coverage, risk, best = (tuple(map(float, held[name])) for name in ("coverage", "risk", "best"))
    return RiskCurve(title, coverage, risk, best, float(aurc(found)))


def risk_figure(models: Sequence[RiskCurve]) -> Any:
    """Draw risk over coverage of several models, and as thin lines the best order of answers; a matplotlib figure."""
    with paper(COLUMN, 2.4 + 0.14 * -(-len(models) // 2)) as figure:
        panel = figure.subplots()
        for number, data in enumerate(models):
            look = stroke(number)
            scaled = [[100 * value for value in values] for values in (data.coverage, data.risk, data.best)]
            name = f"{fitted(data.title, 1.5, 7)}, AURC {percent(data.aurc)}"
            panel.plot(scaled[0], scaled[2], linewidth=0.5, **look.line)
            panel.plot(scaled[0], scaled[1], label=name, clip_on=False, **look.marked(len(data.risk)))
        panel.plot([], [], color=PALE, linewidth=0.5, label="thin: the best order")
        panel.set(xlim=(0, 100), ylim=(0, None), xlabel="coverage (%)", ylabel="selective risk (%)")
        if panel.get_ylim()[1] < 0.1:  # no errors: an axis has to have some length
            panel.set_ylim(0, 1)
        legend_below(figure, panel)
    return figure
