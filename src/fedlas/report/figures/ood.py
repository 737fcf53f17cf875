"""OOD detection: ROC curves and histograms of scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedlas.errors import UserError
from fedlas.evaluation_report import Report
from fedlas.formatting import number
from fedlas.predictions import AnyPredictions
from fedlas.predictions.arrays import Array
from fedlas.report import page_data
from fedlas.report.figures.style import (
    DARK,
    OVER,
    PALE,
    fit_label,
    label_outer_axes,
    legend_below,
    line_style,
    panel_grid,
    safe_label,
    title_width,
)


@dataclass(frozen=True)
class OODScore:
    """One score on ID and OOD samples.

    Args:
        name: name of the score.
        quantity: definition of the score, such as "1 − max probability".
        auroc: area under the ROC curve.
        false: false-positive rates: fractions of ID samples detected as OOD.
        true: true-positive rates at the same thresholds.
        edges: edges of the histograms; the outermost bins hold all values beyond them.
        id: fraction of the ID samples in each bin.
        ood: fraction of the OOD samples in each bin.
        auroc_interval: confidence interval of the AUROC, if known; its width sets the digits that are shown.
    """

    name: str
    quantity: str
    auroc: float
    false: tuple[float, ...]
    true: tuple[float, ...]
    edges: tuple[float, ...]
    id: tuple[float, ...]
    ood: tuple[float, ...]
    auroc_interval: tuple[float, float] | None = None

    @property
    def auroc_text(self) -> str:
        """The AUROC in percent, without the unit."""
        return number(self.auroc, *(self.auroc_interval or ()))


@dataclass(frozen=True)
class OODSet:
    """All scores on one OOD data set.

    Args:
        name: name of the data set.
        scores: the scores.
    """

    name: str
    scores: tuple[OODScore, ...]


@dataclass(frozen=True)
class OODFigureData:
    """OOD detection of one model.

    Args:
        title: name of the model.
        sets: the OOD data sets.
    """

    title: str
    sets: tuple[OODSet, ...]


def ood_data(
    predictions: AnyPredictions,
    ood: Mapping[str, AnyPredictions | Array],
    report: Report,
    title: str,
) -> OODFigureData:
    """Return ROC curve and histograms of every score on every OOD data set.

    Args:
        predictions: predictions on ID samples.
        ood: predictions or logits on OOD data, by the name of the data set.
        report: the report with the same OOD data.
        title: name of the model.
    """
    data = page_data.ood_data(predictions, ood, report)
    if data is None:
        raise UserError("the report has no OOD data; pass it to evaluate(..., ood=...)")
    sets = []
    for ood_set in data["sets"]:
        scores = tuple(_score(score) for score in ood_set["scores"] if "roc" in score)
        if scores:
            sets.append(OODSet(ood_set["name"], scores))
    if not sets:
        raise UserError(f"of the OOD data in the report ({len(data['sets'])} sets), none is given in ood")
    return OODFigureData(title, tuple(sets))


def _score(data: page_data.Plain) -> OODScore:
    auroc, roc, histogram = data["results"][0], data["roc"], data["histogram"]
    columns = (roc["fpr"], roc["tpr"], histogram["edges"], histogram["id"], histogram["ood"])
    false, true, edges, in_distribution, out_of_distribution = (tuple(map(float, column)) for column in columns)
    interval = None if auroc["low"] is None else (auroc["low"], auroc["high"])
    fractions = (in_distribution, out_of_distribution)
    return OODScore(data["name"], data["quantity"], auroc["value"], false, true, edges, *fractions, interval)


def roc_figure(data: OODFigureData) -> Any:
    """Draw the ROC curves of all scores, a panel for each OOD data set; return the matplotlib figure.

    The legend gives the AUROC of each score, in the order of the panels.
    """
    names = list(dict.fromkeys(score.name for ood_set in data.sets for score in ood_set.scores))
    with panel_grid(len(data.sets), height=2.2, per_column=1, extra_height=0.14 * len(names)) as (figure, axes):
        for panel, ood_set in zip(axes, data.sets, strict=True):
            panel.plot([0, 1], [0, 1], color=PALE, linewidth=0.8, linestyle="--")
            for score in ood_set.scores:
                look = line_style(names.index(score.name)).with_markers(len(score.true), most=5)
                panel.plot(score.false, score.true, **look)
            panel.set(xlim=(0, 1), ylim=(0, 1))
            panel.set_title(fit_label(ood_set.name, title_width(panel)), fontsize=8)
        for number, name in enumerate(names):
            values = [score.auroc_text for ood_set in data.sets for score in ood_set.scores if score.name == name]
            label = f"{name.replace('_', ' ')}: {', '.join(values)}"
            axes[0].plot([], [], label=label, **line_style(number).with_markers(1))
        label_outer_axes(axes, "false positive rate", "true positive rate")
        figure.suptitle(safe_label(data.title), fontsize=8)
        legend_below(figure, axes[0], most=3, title="AUROC (%)", title_fontsize=7)
    return figure


def score_figure(data: OODSet) -> Any:
    """Draw histograms of each score on ID and OOD samples; return the matplotlib figure."""
    with panel_grid(len(data.scores), height=1.5, share_axes=False) as (figure, axes):
        for panel, score in zip(axes, data.scores, strict=True):
            panel.stairs(score.id, score.edges, label="ID", fill=True, facecolor="0.8", edgecolor=DARK, linewidth=0.8)
            panel.stairs(
                score.ood,
                score.edges,
                label=safe_label(data.name),
                fill=True,
                facecolor="none",
                edgecolor=OVER,
                hatch="/////",
                linewidth=0.8,
            )
            panel.set(ylim=(0, None))
            panel.set_title(f"{score.quantity}\nAUROC {score.auroc_text} %", fontsize=8)
            panel.locator_params(axis="x", nbins=5)
        label_outer_axes(axes, "score (higher: more likely OOD)", "fraction")
        legend_below(figure, axes[0])
    return figure
