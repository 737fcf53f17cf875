"""Selective prediction: risk-coverage curves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedlas.metrics.inputs import MetricInput, pairs
from fedlas.metrics.result import Result
from fedlas.metrics.selective import aurc
from fedlas.report import page_data
from fedlas.report.figures.style import COLUMN, PALE, figure_of_size, fit_label, legend_below, line_style


@dataclass(frozen=True)
class RiskCurve:
    """Risk-coverage curve: error rate among the most confident samples, by the fraction of samples kept.

    Args:
        title: name of the model.
        coverage: fractions of samples for which a prediction is made.
        risk: error rate among them (selective risk).
        best: risk of a perfect ranking, with every correct prediction before every incorrect one.
        aurc: area under the risk-coverage curve; a `Result` is shown with the digits of its interval.
    """

    title: str
    coverage: tuple[float, ...]
    risk: tuple[float, ...]
    best: tuple[float, ...]
    aurc: Result


def risk_data(given: MetricInput, title: str, area: Result | None = None) -> RiskCurve:
    """Return the risk-coverage curve at about 160 points or fewer; its area is computed unless it is given."""
    samples = pairs(given)
    curve = page_data.risk_data(samples)
    coverage, risk, best = (tuple(map(float, curve[name])) for name in ("coverage", "risk", "best"))
    return RiskCurve(title, coverage, risk, best, aurc(samples) if area is None else area)


def risk_figure(models: Sequence[RiskCurve]) -> Any:
    """Draw risk-coverage curves, with thin lines for a perfect ranking; return the matplotlib figure."""
    with figure_of_size(COLUMN, 2.4 + 0.14 * -(-len(models) // 2)) as figure:
        panel = figure.subplots()
        for number, data in enumerate(models):
            look = line_style(number)
            scaled = [[100 * value for value in values] for values in (data.coverage, data.risk, data.best)]
            name = f"{fit_label(data.title, 1.5, 7)}, AURC {data.aurc.text()}"
            panel.plot(scaled[0], scaled[2], linewidth=0.5, **look.options)
            panel.plot(scaled[0], scaled[1], label=name, clip_on=False, **look.with_markers(len(data.risk)))
        panel.plot([], [], color=PALE, linewidth=0.5, label="thin: perfect ranking")
        panel.set(xlim=(0, 100), ylim=(0, None), xlabel="coverage (%)", ylabel="selective risk (%)")
        if panel.get_ylim()[1] < 0.1:  # no errors: avoid an axis of zero length
            panel.set_ylim(0, 1)
        legend_below(figure, panel)
    return figure
