"""The demonstration: the calibration of cross-entropy, FeDLaS and its base losses on handwritten digits.

With all training images, nearly every model is accurate and well calibrated. Therefore the models are trained on only
about four images per digit, for many epochs and without weight decay. They overfit, and with plain cross-entropy they
are over-confident on test images (with each of the seeds 1, 2 and 3).

About 17 settings were tried, with the results of all losses in view, until cross-entropy was clearly
miscalibrated. The demonstration illustrates the metrics and is no evidence for any loss.
"""

import logging
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlas.evaluation import evaluate
from fedlas.evaluation_report import Report, State
from fedlas.formatting import count, number
from fedlas.metrics.result import Result
from fedlas.report.figures import Reliability, reliability_data, reliability_figure, save_with_data
from fedlas.report.html import save_page
from fedlas.report.model import Model
from fedlas.training import Recipe, Run, fit_many, recipe_for
from fedlas.training.protocols import compared_losses

logger = logging.getLogger(__name__)

SAMPLES, BATCH, EPOCHS = 40, 10, 60
FIGURES, FIGURE = "figures", "reliability"  # folder, and file name without extension
WIDTH = 80  # of the text, in columns
PAGE = "report.html"
PAGE_LOSSES = ("ce", "fedlas_ls")  # losses whose models the page compares
HEAD = ("loss", "calibration", "accuracy %", "ECE %", "NLL")


@dataclass(frozen=True)
class DemoResult:
    """Results of the demonstration.

    Args:
        rows: rows of the table, two for each loss: as trained, and after temperature scaling.
        explanation: numbers of samples, and how to read the table.
        conclusion: the main result in one sentence.
        page: path of the HTML report.
        figures: paths of the figures and of the data drawn in them.
    """

    rows: list[list[str]]
    explanation: str
    conclusion: str
    page: Path
    figures: list[Path]


def introduction() -> str:
    """Return what the demonstration does, for the user."""
    return textwrap.fill(
        f"Training a small CNN with each of {len(list(recipes()))} losses on only {SAMPLES} images of handwritten "
        "digits, so that it overfits and its confidence on test images is unreliable.",
        WIDTH,
    )


def recipes() -> Iterator[Recipe]:
    """Yield the recipes of the demonstration."""
    for loss in compared_losses():
        yield recipe_for(
            "digits",
            "small_cnn",
            loss,
            epochs=EPOCHS,
            deterministic=True,
            batch_size=BATCH,
            lr=0.2,
            weight_decay=0.0,
            data_options={"train_samples": SAMPLES},
        )


def run_demo(folder: Path, *, progress: bool | None = None, command: str | None = None) -> DemoResult:
    """Train and evaluate all models, draw the figures and write the report; skip training of finished runs.

    Args:
        folder: folder for run folders, figures and the report.
        progress: show progress bars; None for terminals only.
        command: the command shown in the report.
    """
    planned = list(recipes())
    models: dict[str, Model] = {}
    trained = fit_many(planned, folder=folder, progress=progress)
    for finished, (recipe, run) in enumerate(zip(planned, trained, strict=True), start=1):
        logger.info("trained %s (%d of %d)", recipe.loss, finished, len(planned))
        models[recipe.loss] = _evaluated(run)
    reports = {name: model.report for name, model in models.items() if model.report is not None}
    paper = compared_losses()
    diagrams = {
        "as trained": [_diagram(report.before, paper[name]) for name, report in reports.items()],
        "temperature": [_diagram(report.after["temperature"], paper[name]) for name, report in reports.items()],
    }
    figures = save_with_data(reliability_figure(diagrams), diagrams, folder / FIGURES, FIGURE, ("png",))
    compared = {name: models[name] for name in PAGE_LOSSES}
    title = f"Handwritten digits: {' and '.join(paper[name] for name in PAGE_LOSSES)}"
    page = save_page(compared, folder / PAGE, title=title, command=command)
    rows = [row for name, report in reports.items() for row in _rows(name, report)]
    return DemoResult(rows, _explanation(reports), _conclusion(reports), page, list(figures))


def _evaluated(run: Run) -> Model:
    """Evaluate a run as trained and after temperature scaling on its validation split."""
    test, calibration = run.predictions("best-test"), run.predictions("best-val")
    report = evaluate(test, posthoc=["temperature"], calibration=calibration)
    return Model(
        predictions=test,
        calibration=calibration,
        report=report,
        log=run.log,
        recipe=run.recipe.to_dict(),
        environment=run.environment,
    )


def _diagram(state: State, title: str) -> Reliability:
    return reliability_data(state.bins["width"], state["ece"], title)


def _rows(name: str, report: Report) -> list[list[str]]:
    states = {"as trained": report.before, "temperature": report.after["temperature"]}
    rows = [
        [label, _rounded(state["accuracy"]), state["ece"].cell(), state["nll"].cell()]
        for label, state in states.items()
    ]
    return [["" if index else name, *row] for index, row in enumerate(rows)]


def _rounded(result: Result) -> str:
    """Write a value without its confidence interval, rounded to as many decimals as in the table."""
    return number(result) if result.interval is None else number(result, result.interval.low, result.interval.high)


def _explanation(reports: Mapping[str, Report]) -> str:
    """Return the numbers of samples, and how to read the table."""
    report = reports["ce"]
    (fit,) = report.after["temperature"].fits
    return textwrap.fill(
        f"{count(report.n)} test images; the temperature is fitted on {count(fit.n)} validation images. Brackets hold "
        "95 % intervals. With one seed and few images, only large differences count.",
        WIDTH,
    )


def _conclusion(reports: Mapping[str, Report]) -> str:
    """Return a sentence on the ECE of cross-entropy, as trained and after temperature scaling, and on the best loss."""
    before = {name: report.before["ece"] for name, report in reports.items()}
    calibrated = reports["ce"].after["temperature"]["ece"]
    confidence_gap = reports["ce"].before["signed_ece"]
    direction = "over" if confidence_gap > 0 else "under"
    best = min(before, key=lambda name: before[name])
    sentence = (
        f"Cross-entropy is {direction}-confident by {_rounded(confidence_gap).removeprefix('-')} points; "
        f"temperature scaling changes the ECE from {_rounded(before['ce'])} to {_rounded(calibrated)} %; "
        f"as trained, {best} has the lowest ECE ({_rounded(before[best])} %)."
    )
    return textwrap.fill(sentence, WIDTH)
