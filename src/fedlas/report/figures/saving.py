"""Write all figures of one or more models in one call."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlas.errors import UserError
from fedlas.evaluation_report import Report, State
from fedlas.predictions import Predictions
from fedlas.report import page_data
from fedlas.report.evaluation_result import Models, named_models
from fedlas.report.figures import confidence, gate, indicator, ood, reliability, selective, training
from fedlas.report.figures.reliability import Reliability
from fedlas.report.figures.style import save_with_data
from fedlas.report.model import Model

ROWS = 4  # largest number of rows of diagrams in one figure
GATES = 7  # largest number of models in a figure of gates; with the panel of flip rates, two rows of panels
FORMATS = {"pdf", "png", "svg"}
# File names of all figures, without extension.
NAMES = (
    r"(reliability|gate)(-\d+)?|reliability_(lines|smooth)|over_under|confidence|risk_coverage|norm|training|feedback|alpha"
    r"|(class_map|roc|scores)(-[\w-]*)?"
)

NamedFigure = tuple[str, Any, Any]  # file name without extension, figure, data of the figure


def save_figures(
    models: Models,
    folder: str | Path,
    formats: Sequence[str] = ("pdf", "png", "svg"),
    *,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
) -> list[Path]:
    """Write all figures for which the models have data, each with its numbers as JSON; return the paths.

    Args:
        models: predictions, a report or a `Model`; a mapping of names to these; or the result of `evaluate_files`.
        folder: folder of all files.
        formats: file formats: "pdf", "png", "svg".
        bins: number of bins of calibration errors, if a report is computed.
        level: confidence level.
        resamples: number of bootstrap resamples; by default that of each method.
        seed: random seed for bootstrap intervals and cross-fitting.
    """
    endings = tuple(formats)
    unknown = sorted({*endings} - FORMATS)
    if isinstance(formats, str) or unknown or not endings:
        raise UserError(f"formats is {formats!r}; choose from {sorted(FORMATS)}")
    models_by_name = named_models(models)
    options = {"bins": bins, "level": level, "resamples": resamples, "seed": seed}
    reports = {name: model.evaluate(**options) for name, model in models_by_name.items()}
    figures = [
        *_shared_figures(reports, level),
        *_model_figures(models_by_name, reports),
        *_training_figures(models_by_name),
    ]
    return [path for name, figure, data in figures for path in save_with_data(figure, data, folder, name, endings)]


def _shared_figures(reports: Mapping[str, Report], level: float) -> Iterator[NamedFigure]:
    """Draw the figures that compare all models, or the states of a single model."""

    def diagram(state: State, title: str) -> Reliability:
        return reliability.reliability_data(state.bins["width"], state["ece"], title, level)

    rows = {name: [diagram(state, state.name) for state in report.states] for name, report in reports.items()}
    for name, part in _parts("reliability", rows, ROWS):
        labelled = part if len(rows) > 1 else {"": next(iter(part.values()))}
        yield name, reliability.reliability_figure(labelled), part
    states = [(name, report.before) for name, report in reports.items()]
    if len(reports) == 1:
        states = [(state.name, state) for report in reports.values() for state in report.states]
    lines = [diagram(state, title) for title, state in states]
    yield "reliability_lines", reliability.reliability_lines_figure(lines), lines
    over_under = [confidence.over_under_data(state, title) for title, state in states]
    yield "over_under", confidence.over_under_figure(over_under), over_under
    with_samples = [(title, state.pairs, state["aurc"]) for title, state in states if state.pairs is not None]
    if not with_samples:
        return
    smooth = [reliability.smooth_reliability_data(samples, title, level) for title, samples, _ in with_samples]
    if any(data.confidence for data in smooth):
        yield "reliability_smooth", reliability.smooth_reliability_figure(smooth), smooth
    histograms = [confidence.confidence_data(samples, title) for title, samples, _ in with_samples]
    yield "confidence", confidence.confidence_figure(histograms), histograms
    risks = [selective.risk_data(samples, title, area) for title, samples, area in with_samples]
    yield "risk_coverage", selective.risk_figure(risks), risks


def _model_figures(models_by_name: Mapping[str, Model], reports: Mapping[str, Report]) -> Iterator[NamedFigure]:
    """Draw the figures of each model."""
    suffixes = _suffixes(list(models_by_name))
    norms = []
    for name, model in models_by_name.items():
        predictions, suffix = model.predictions, suffixes[name]
        if predictions is None:
            continue
        if predictions.prediction is not None:
            classes = confidence.class_map_data(predictions, name)
            yield f"class_map{suffix}", confidence.class_map_figure(classes), classes
        if reports[name].before.detection is not None and model.ood:
            detection = ood.ood_data(predictions, model.ood, reports[name], name)
            yield f"roc{suffix}", ood.roc_figure(detection), detection
            set_suffixes = _suffixes([ood_set.name for ood_set in detection.sets])
            for ood_set in detection.sets:
                yield f"scores{suffix}{set_suffixes[ood_set.name]}", ood.score_figure(ood_set), ood_set
        if isinstance(predictions, Predictions) and page_data.norm_data(predictions) is not None:
            norms.append(indicator.norm_data(predictions, name))
    if norms:
        yield "norm", indicator.norm_figure(norms), norms


def _training_figures(models_by_name: Mapping[str, Model]) -> Iterator[NamedFigure]:
    """Draw the training curves of models that have a log."""
    logged = {name: model for name, model in models_by_name.items() if page_data.training_data(model.log) is not None}
    if logged:
        curves = [training.training_data(model.log, name) for name, model in logged.items()]
        yield "training", training.training_figure(curves), curves
    feedback = [data for name, model in logged.items() if (data := training.feedback_data(model.log, name))][:ROWS]
    if feedback:
        yield "feedback", training.feedback_figure(feedback), feedback
    gated = [alphas for name, model in logged.items() if (alphas := training.alpha_data(model.log, name, model.recipe))]
    if gated:
        yield "alpha", training.alpha_figure(gated), gated
    modes = {name: [epochs] for name, model in logged.items() if (epochs := _with_modes(model.log))}
    for name, part in _parts("gate", modes, GATES):
        stability = gate.gate_data(part, "")
        yield name, gate.gate_figure(stability), stability


def _parts(name: str, models: Mapping[str, Any], most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Split models into figures of at most `most`; a single figure has this name, several are numbered."""
    parts = [dict(list(models.items())[start : start + most]) for start in range(0, len(models), most)]
    for number, part in enumerate(parts, start=1):
        yield name if len(parts) == 1 else f"{name}-{number}", part


def _with_modes(log: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the epochs whose record has the fraction of samples in each gate mode."""
    epochs = [record for record in log if "epoch" in record and isinstance(record.get("gate"), Mapping)]
    return [record for record in epochs if {"positive", "negative"} <= record["gate"].keys()]


def _suffixes(names: Sequence[str]) -> dict[str, str]:
    """Return a file name suffix for each name; a single name needs none, and equal suffixes are numbered."""
    if len(names) == 1:
        return {names[0]: ""}
    suffixes: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:40] or "model"
        number, suffix = 1, f"-{plain}"
        while suffix.lower() in {used.lower() for used in suffixes.values()}:
            number += 1
            suffix = f"-{plain}-{number}"
        suffixes[name] = suffix
    return suffixes
