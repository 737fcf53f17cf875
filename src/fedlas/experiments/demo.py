"""The demonstration: five losses on handwritten digits, and what their confidence is worth.

As they come, the digits are too easy: nearly every network is right, and its confidence hardly ever wrong. So only
about four images of each digit are trained on, many times and without weight decay. The networks learn them by heart,
and with plain cross-entropy they are then too sure of all other images (with each of the seeds 1, 2 and 3).

About 17 settings were tried, with the numbers of all five losses in sight, until cross-entropy was clearly off. So the
demonstration shows what the numbers look like, and is no evidence for any loss.
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
FIGURES, FIGURE = "figures", "reliability"  # the folder, and the name of the files in it
METRICS = ("accuracy", "ece", "aece", "over_ece", "under_ece", "nll")
HEAD = ("loss", "paper", "", "accuracy %", "ECE %", "AECE %", "O-ECE %", "U-ECE %", "NLL")
TEXT = f"""\
Handwritten digits, 8 x 8 pixels. Only {SAMPLES} images of 800 are trained on, and learned by heart: so the networks are
often wrong, and too sure of it, and calibration is a real question. 200 images for validation, 797 for testing.
A row for each loss: first as trained, below it after temperature scaling on the validation split; in brackets the 95 %
interval. O-ECE is confidence that is too high, U-ECE too low; they add up to the ECE. One seed on few images: only
intervals that are far apart mean something. Chance alone makes these errors larger than they are, which intervals allow
for: where a value is mostly noise, its interval lies below it."""


@dataclass(frozen=True)
class DemoResult:
    """What a demonstration shows.

    Args:
        text: what was done.
        head: headings of the table.
        rows: one for each loss.
        files: figures and run folders.
    """

    text: str
    head: tuple[str, ...]
    rows: list[list[str]]
    files: list[Path]


def recipes() -> Iterator[Recipe]:
    """Make the recipes of the demonstration."""
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
    """Train, measure and draw; runs that are there already are not repeated.

    Args:
        folder: folder for run folders and figures.
        progress: show progress bars; None for terminals only.
    """
    wanted = list(recipes())
    reports: dict[str, Report] = {}
    runs: list[Run] = []
    trained = fit_many(wanted, folder=folder, progress=progress)
    for number, (recipe, run) in enumerate(zip(wanted, trained, strict=True), start=1):
        logger.info("trained %s (%d of %d)", recipe.loss, number, len(wanted))
        reports[recipe.loss] = evaluate(
            run.predictions("best-test"), posthoc=["temperature"], calibration=run.predictions("best-val")
        )
        runs.append(run)
    paper = compared_losses()
    rows = [_row(name, paper[name], report) for name, report in reports.items()]
    drawn = {
        "as trained": [_diagram(report.before, paper[name]) for name, report in reports.items()],
        "temperature": [_diagram(_repaired(report), paper[name]) for name, report in reports.items()],
    }
    figure = save_with_data(reliability_figure(drawn), drawn, folder / FIGURES, FIGURE, ("png",))
    return DemoResult(TEXT, HEAD, rows, [*figure, *(run.folder for run in runs)])


def _diagram(state: State, title: str) -> Reliability:
    return reliability_data(state.bins["width"], state["ece"], title)


def _repaired(report: Report) -> State:
    return report.after["temperature"]


def _row(name: str, paper: str, report: Report) -> list[str]:
    states = (report.before, _repaired(report))
    cells = ["\n".join(_cell(state[metric]) for state in states) for metric in METRICS]
    return [name, paper, "as trained\ntemperature", *cells]


def _cell(result: Result) -> str:
    scale, digits = (100, 1) if result.definition.unit == "fraction" else (1, 3)
    text = f"{scale * float(result):.{digits}f}"
    if result.interval is None:
        return text
    return f"{text} [{scale * result.interval.low:.{digits}f}, {scale * result.interval.high:.{digits}f}]"
