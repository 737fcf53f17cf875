"""The demonstration: the calibration of five losses on handwritten digits.

With all training images, nearly every model is accurate and well calibrated. Therefore the models are trained on only
about four images per digit, for many epochs and without weight decay. They overfit, and with plain cross-entropy they
are over-confident on test images (with each of the seeds 1, 2 and 3).

About 17 settings were tried, with the results of all five losses in view, until cross-entropy was clearly
miscalibrated. The demonstration illustrates the metrics and is no evidence for any loss.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedlas.evaluation import Report, State, evaluate
from fedlas.metrics.result import Result
from fedlas.report.figures import Reliability, reliability_data, reliability_figure, save_with_data
from fedlas.training import Recipe, Run, fit_many, recipe_for
from fedlas.training.protocols import compared_losses

logger = logging.getLogger(__name__)

SAMPLES, BATCH, EPOCHS = 40, 10, 60
FIGURES, FIGURE = "figures", "reliability"  # folder, and file name without extension
METRICS = ("accuracy", "ece", "aece", "over_ece", "under_ece", "nll")
HEAD = ("loss", "paper", "", "accuracy %", "ECE %", "AECE %", "O-ECE %", "U-ECE %", "NLL")
TEXT = f"""\
Handwritten digits, 8 x 8 pixels. Only {SAMPLES} images of 800 are trained on and memorised: so the
models are often wrong and over-confident. 200 images for validation, 797 for testing.
A row for each loss: first as trained, below it after temperature scaling on the validation split; in brackets the 95 %
interval. O-ECE is the over-confident part of the ECE, U-ECE the under-confident part. One seed on few images: only
large differences between intervals mean something. Estimates of these errors are biased upwards, intervals are not:
where a value is mostly noise, its interval lies below it."""


@dataclass(frozen=True)
class DemoResult:
    """Results of the demonstration.

    Args:
        text: description of the experiment.
        head: column headings of the table.
        rows: rows of the table, one for each loss.
        files: paths of the figures and run folders.
    """

    text: str
    head: tuple[str, ...]
    rows: list[list[str]]
    files: list[Path]


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


def run_demo(folder: Path, *, progress: bool | None = None) -> DemoResult:
    """Train and evaluate all models and draw the figures; skip training of finished runs.

    Args:
        folder: folder for run folders and figures.
        progress: show progress bars; None for terminals only.
    """
    planned = list(recipes())
    reports: dict[str, Report] = {}
    runs: list[Run] = []
    trained = fit_many(planned, folder=folder, progress=progress)
    for number, (recipe, run) in enumerate(zip(planned, trained, strict=True), start=1):
        logger.info("trained %s (%d of %d)", recipe.loss, number, len(planned))
        reports[recipe.loss] = evaluate(
            run.predictions("best-test"), posthoc=["temperature"], calibration=run.predictions("best-val")
        )
        runs.append(run)
    paper = compared_losses()
    rows = [_row(name, paper[name], report) for name, report in reports.items()]
    diagrams = {
        "as trained": [_diagram(report.before, paper[name]) for name, report in reports.items()],
        "temperature": [_diagram(_calibrated(report), paper[name]) for name, report in reports.items()],
    }
    figure = save_with_data(reliability_figure(diagrams), diagrams, folder / FIGURES, FIGURE, ("png",))
    return DemoResult(TEXT, HEAD, rows, [*figure, *(run.folder for run in runs)])


def _diagram(state: State, title: str) -> Reliability:
    return reliability_data(state.bins["width"], state["ece"], title)


def _calibrated(report: Report) -> State:
    return report.after["temperature"]


def _row(name: str, paper: str, report: Report) -> list[str]:
    states = (report.before, _calibrated(report))
    cells = ["\n".join(_cell(state[metric]) for state in states) for metric in METRICS]
    return [name, paper, "as trained\ntemperature", *cells]


def _cell(result: Result) -> str:
    scale, digits = (100, 1) if result.definition.unit == "fraction" else (1, 3)
    text = f"{scale * float(result):.{digits}f}"
    if result.interval is None:
        return text
    return f"{text} [{scale * result.interval.low:.{digits}f}, {scale * result.interval.high:.{digits}f}]"
