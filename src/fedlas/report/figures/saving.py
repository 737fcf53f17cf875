"""Save all figures that the data allow, in one call."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlas.errors import UserError
from fedlas.predictions import Predictions
from fedlas.report.figures.style import save_with_data

if TYPE_CHECKING:
    from fedlas.evaluation import Report, State
    from fedlas.report.figures.reliability import Reliability
    from fedlas.report.html import Models
    from fedlas.report.model import Model

ROWS = 4  # of diagrams in one figure
GATES = 7  # models with a gate in one figure: with the flip rates, two rows of panels
KNOWN = {"pdf", "png", "svg"}
# What all files are called, without ending.
NAMES = (
    r"(reliability|gate)(-\d+)?|reliability_(lines|smooth)|over_under|confidence|risk_coverage|norm|training|feedback|alpha"
    r"|(class_map|roc|scores)(-[\w-]*)?"
)

Drawn = tuple[str, Any, Any]  # name of the files, figure, and what it was drawn from


def save_figures(
    models: "Models",
    folder: str | Path,
    formats: Sequence[str] = ("pdf", "png", "svg"),
    *,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
) -> list[Path]:
    """Write every figure that the data allow, each with its numbers as JSON; return the paths.

    Args:
        models: predictions, a report or a `Model`; several of them by name; or the result of `evaluate_files`.
        folder: folder of all files.
        formats: file formats: "pdf", "png", "svg".
        bins: number of bins of calibration errors, if a report is computed.
        level: confidence level.
        resamples: number of bootstrap resamples; by default that of each method.
        seed: random seed for bootstrap intervals and cross-fitting.
    """
    from fedlas.report.html import named_models, report_of  # noqa: PLC0415

    endings = tuple(formats)
    unknown = sorted({*endings} - KNOWN)
    if isinstance(formats, str) or unknown or not endings:
        raise UserError(f"formats is {formats!r}; some of {sorted(KNOWN)} are needed")
    held = named_models(models)
    reports = {name: report_of(model, level, resamples, seed, bins) for name, model in held.items()}
    drawn = [*_of_all(reports, level), *_of_each(held, reports), *_of_logs(held)]
    return [path for name, figure, data in drawn for path in save_with_data(figure, data, folder, name, endings)]


def _of_all(reports: "Mapping[str, Report]", level: float) -> Iterator[Drawn]:
    """Draw the figures that show all models."""
    from fedlas.report.figures import confidence, reliability, selective  # noqa: PLC0415

    rows = {name: [_reliability(state, state.name, level) for state in one.states] for name, one in reports.items()}
    parts = [dict(list(rows.items())[start : start + ROWS]) for start in range(0, len(rows), ROWS)]
    for number, part in enumerate(parts, start=1):
        name = "reliability" if len(parts) == 1 else f"reliability-{number}"
        shown = part if len(rows) > 1 else {"": next(iter(part.values()))}
        yield name, reliability.reliability_figure(shown), part
    states = _states(reports)
    lines = [_reliability(state, title, level) for title, state in states]
    yield "reliability_lines", reliability.reliability_lines_figure(lines), lines
    parted = [confidence.over_under_data(state, title) for title, state in states]
    yield "over_under", confidence.over_under_figure(parted), parted
    known = [(title, state.pairs) for title, state in states if state.pairs is not None]
    if not known:
        return
    smooth = [reliability.smooth_reliability_data(found, title, level) for title, found in known]
    yield "reliability_smooth", reliability.smooth_reliability_figure(smooth), smooth
    spread = [confidence.confidence_data(found, title) for title, found in known]
    yield "confidence", confidence.confidence_figure(spread), spread
    risks = [selective.risk_data(found, title) for title, found in known]
    yield "risk_coverage", selective.risk_figure(risks), risks


def _states(reports: "Mapping[str, Report]") -> "list[tuple[str, State]]":
    """Return every state of a single model, or the uncalibrated state of every model."""
    if len(reports) == 1:
        return [(state.name, state) for report in reports.values() for state in report.states]
    return [(name, report.before) for name, report in reports.items()]


def _reliability(state: "State", title: str, level: float) -> "Reliability":
    from fedlas.report.figures import reliability  # noqa: PLC0415

    return reliability.reliability_data(state.bins["width"], state["ece"], title, level)


def _of_each(held: "Mapping[str, Model]", reports: "Mapping[str, Report]") -> Iterator[Drawn]:
    """Draw the figures of each model."""
    from fedlas.report.figures import confidence, indicator, ood  # noqa: PLC0415

    endings = _endings(list(held))
    norms = []
    for name, model in held.items():
        given, end = model.predictions, endings[name]
        if given is None:
            continue
        if given.prediction is not None:
            classes = confidence.class_map_data(given, name)
            yield f"class_map{end}", confidence.class_map_figure(classes), classes
        if reports[name].before.detection is not None and model.ood:
            found = ood.ood_data(given, model.ood, reports[name], name, model.train_features)
            yield f"roc{end}", ood.roc_figure(found), found
            names = _endings([one.name for one in found.sets])
            for one in found.sets:
                yield f"scores{end}{names[one.name]}", ood.score_figure(one), one
        if isinstance(given, Predictions) and indicator.has_norms(given):
            norms.append(indicator.norm_data(given, name))
    if norms:
        yield "norm", indicator.norm_figure(norms), norms


def _of_logs(held: "Mapping[str, Model]") -> Iterator[Drawn]:
    """Draw the training curves of models that have a log."""
    from fedlas.report.figures import gate, training  # noqa: PLC0415

    logged = {name: model for name, model in held.items() if training.has_epochs(model.log)}
    if logged:
        curves = [training.training_data(model.log, name) for name, model in logged.items()]
        yield "training", training.training_figure(curves), curves
    gated = [found for name, model in logged.items() if (found := training.alpha_data(model.log, name, model.recipe))]
    feedback = [training.feedback_data(model.log, name) for name, model in logged.items()]
    followed = [one for one in feedback if one is not None][:ROWS]
    if followed:
        yield "feedback", training.feedback_figure(followed), followed
    if gated:
        yield "alpha", training.alpha_figure(gated), gated
    modes = {name: [_with_modes(model.log)] for name, model in logged.items() if _with_modes(model.log)}
    parts = [dict(list(modes.items())[start : start + GATES]) for start in range(0, len(modes), GATES)]
    for number, part in enumerate(parts, start=1):
        shares = gate.gate_data(part, "")
        yield "gate" if len(parts) == 1 else f"gate-{number}", gate.gate_figure(shares), shares


def _with_modes(log: "Sequence[Mapping[str, Any]]") -> list[Mapping[str, Any]]:
    """Return the epochs whose record has the fraction of samples in each gate mode."""
    kept = [one for one in log if "epoch" in one and isinstance(one.get("gate"), Mapping)]
    return [one for one in kept if {"positive", "negative"} <= one["gate"].keys()]


def _endings(names: Sequence[str]) -> dict[str, str]:
    """Return a file name suffix for each name; a single name needs none, and equal suffixes are numbered."""
    if len(names) == 1:
        return {names[0]: ""}
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:40] or "model"
        number, end = 1, f"-{plain}"
        while end.lower() in {one.lower() for one in found.values()}:
            number += 1
            end = f"-{plain}-{number}"
        found[name] = end
    return found
