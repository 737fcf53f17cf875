"""The HTML page of a report: a single file for one or more models, which needs no network access.

    save_page(predictions, "report.html")
    save_page({"ce": Model(predictions=..., calibration=..., ood=...), "fedlas_ls": Model(...)}, "report.html")

Texts that come from files (class names, paths, names of data sets) are untrusted. They are escaped, or written as JSON
into an element that is not executed, and the script inserts them as text. A content security policy allows only the
page's own script and style, by their hashes, and no network access.

The only time stamp of a page is the date in its header, in UTC; the environment variable SOURCE_DATE_EPOCH sets it.
With the same date, equal input gives equal bytes.
"""

import base64
import hashlib
import json
import os
import platform
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from fedlas.comparison import compare_models
from fedlas.errors import UserError, UserTypeError
from fedlas.evaluation_report import Report
from fedlas.extras import optional_module
from fedlas.formatting import count, level
from fedlas.io.atomic import write_atomic
from fedlas.metrics.base import Resampling
from fedlas.metrics.registry import all_metrics, summary_metrics
from fedlas.metrics.result import Result
from fedlas.report.evaluation_result import EvaluationResult, Models, named_models
from fedlas.report.model import Model
from fedlas.report.page_data import (
    Plain,
    class_data,
    comparison_data,
    confusion_data,
    model_data,
    names_data,
    norm_data,
    ood_data,
    sample_data,
    slice_data,
    text_data,
    training_data,
)
from fedlas.report.page_script import FOLDER, join_modules
from fedlas.report.recalibration import recommendations
from fedlas.report.sample_pictures import Pictures, Samples, samples_by_model
from fedlas.report.slices import RESAMPLES, SMALL, slices
from fedlas.report.summary_text import direction, headline, sentences

CLASS_DIAGRAMS = 3_000  # largest number of diagrams of classes on a page, over all models
MOST_SAMPLES = 50
MOST_SLICES = 50  # largest number of slices on a page, over all models; each model has at least 10
LONG = 2_000  # characters of a command, or of a value in a recipe


def report_page(
    models: Models,
    *,
    title: str = "Calibration report",
    ids: Sequence[object] | None = None,
    paths: Sequence[str | Path] | None = None,
    images: Any = None,
    samples: int = 12,
    command: str | None = None,
    environment: Mapping[str, Any] | None = None,
    bins: int | None = None,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
) -> str:
    """Return the HTML page of one model, or of several models on the same samples.

    Args:
        models: predictions, a report or a `Model`; or a mapping of names to these; or the result of
            `evaluate_files`, whose paired tests are used unchanged.
        title: heading of the page.
        ids: one name per sample; by default the ids of each model's predictions.
        paths: one image file per sample, from which thumbnails are made. By default the paths of each model's
            predictions, restricted to its `image_folders`.
        images: one image per sample, instead of files: an array, or a list of arrays, indexed by the row.
        samples: number of the most over-confident and of the most under-confident samples, at most 50 each.
        command: the command that wrote the page.
        environment: further entries of the section on the environment.
        bins: number of bins of calibration errors, also in paired tests; by default that of the first report in
            `models`, or 15 if there is none.
        level: confidence level.
        resamples: number of bootstrap resamples; by default that of each method.
        seed: random seed for bootstrap intervals and cross-fitting.
    """
    if not 0 <= samples <= MOST_SAMPLES:
        raise UserError(f"samples is {samples}; a number from 0 to {MOST_SAMPLES} is needed")
    models_by_name = named_models(models)
    samples_of_models = samples_by_model(models_by_name, ids, paths, images)
    if bins is None:
        bins = next((model.report["ece"].definition.bins for model in models_by_name.values() if model.report), None)
    options: Plain = {"bins": bins or 15, "level": level, "resamples": resamples, "seed": seed}
    reports = {name: model.evaluate(**options) for name, model in models_by_name.items()}
    comparisons = models.comparisons if isinstance(models, EvaluationResult) else ()
    compared = {name: model.predictions for name, model in models_by_name.items() if model.predictions is not None}
    if not comparisons and len(compared) == len(models_by_name):
        comparisons = compare_models(compared, **options)
    data = {
        "title": text_data(title),
        "level": level,
        **_models_data(models_by_name, reports, samples_of_models, samples, options),
        "comparison": comparison_data(list(models_by_name), comparisons),
    }
    if data["outside"]:
        warnings.warn(
            f"{data['outside']} pictures are not shown: their files lie outside of the folder of the predictions; "
            "another folder can be allowed (--images DIR, or image_folders of a Model)",
            UserWarning,
            stacklevel=2,
        )
    environment_entries = _environment() | {str(name): value for name, value in (environment or {}).items()}
    return _filled(data, models_by_name, reports, command, environment_entries)


def save_page(models: Models, path: str | Path, **options: Any) -> Path:
    """Write a page to a file, atomically; options are those of `report_page`."""
    if not isinstance(path, str | os.PathLike):
        raise UserTypeError(
            f"path is {type(path).__name__}; the name of a file is expected, and labels are given with the "
            "predictions: Predictions.from_probs(probs, labels)"
        )
    path = Path(path)
    write_atomic(path, report_page(models, **options).encode())
    return path


def embedded(data: Any) -> str:
    """Serialise data as ASCII JSON that is safe inside an HTML element: <, > and & are escaped."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def unbroken(text: str) -> str:
    """Replace spaces between numbers and units by non-breaking spaces."""
    return re.sub(r"(?<=\d) (?=%|points)|(?<=T) = ", lambda match: match[0].replace(" ", "\u00a0"), text)


def _models_data(
    models_by_name: Mapping[str, Model],
    reports: Mapping[str, Report],
    samples_of_models: Mapping[str, Samples],
    count: int,
    options: Plain,
) -> Plain:
    """Return the data of all models, and the class names and pictures that they share."""
    names: list[list[str]] = []
    models = [
        _model(name, model, reports[name], models=len(models_by_name), count=count, options=options)
        for name, model in models_by_name.items()
    ]
    for page_model, model in zip(models, models_by_name.values(), strict=True):
        class_names = None if model.predictions is None else names_data(model.predictions)
        if class_names is not None and class_names not in names:
            names.append(class_names)
        page_model["names"] = None if class_names is None else names.index(class_names)
    pictures = Pictures()
    for page_model, samples in zip(models, samples_of_models.values(), strict=True):
        for sample in (sample for kind in page_model.get("samples", {}).values() for sample in kind):
            sample.update(samples.identification(sample["row"]))
            pictures.add(samples, sample)
    return {
        "names": names,
        "models": models,
        "pictures": pictures.by_key,
        "lost": pictures.left_out,
        "outside": pictures.outside,
    }


def _model(name: str, model: Model, report: Report, *, models: int, count: int, options: Plain) -> Plain:
    data = model_data(name, report, options["level"])
    data |= {"direction": direction(report.before), "training": training_data(model.log, model.recipe)}
    predictions = model.predictions
    if predictions is None:
        return data
    data["ood"] = ood_data(predictions, model.ood, report)
    data["norms"] = norm_data(predictions)
    how = None
    if report.before["ece"].interval is not None:
        how = Resampling(options["level"], options["resamples"] or RESAMPLES, options["seed"])
    most = max(10, MOST_SLICES // models)
    data["slices"] = slice_data(slices(predictions, bins=options["bins"], most=most, how=how))
    if predictions.given_labels is not None and predictions.prediction is not None:
        data["class_table"] = class_data(predictions, report, most=CLASS_DIAGRAMS // models, level=options["level"])
        data["confusions"] = confusion_data(predictions)
        data["samples"] = sample_data(predictions, count=count)
    return data


def _filled(
    data: Plain,
    models_by_name: Mapping[str, Model],
    reports: Mapping[str, Report],
    command: str | None,
    environment: Mapping[str, Any],
) -> str:
    script, style = join_modules(), (FOLDER / "page.css").read_text(encoding="utf-8")
    jinja = optional_module("jinja2")
    engine = jinja.Environment(autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = engine.from_string((FOLDER / "page.html.jinja").read_text(encoding="utf-8"))
    first = next(iter(reports.values()))
    trusted = engine.filters["safe"]
    text: str = template.render(
        data=data,
        models=[
            _model_words(page_model, reports[name], models_by_name[name])
            for page_model, name in zip(data["models"], models_by_name, strict=True)
        ],
        numbers=_numbers(data, list(reports.values())),
        definitions=_definitions(first),
        environment=_lines(environment),
        header=_header(data, models_by_name, environment),
        command=None if command is None else text_data(command, LONG),
        script=trusted(script),
        style=trusted(style),
        embedded=trusted(embedded(data)),
        policy=_policy(script, style),
        sections=_sections(data, any(report.after for report in reports.values())),
        level=unbroken(level(data["level"])),
        small=SMALL,
    )
    return text


def _policy(script: str, style: str) -> str:
    """Allow the page's own script and style, small pictures in the page, and nothing else."""
    allowed = [f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in (script, style)]
    parts = ("default-src 'none'", f"script-src {allowed[0]}", f"style-src {allowed[1]}", "img-src data:")
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def _sections(data: Plain, has_calibrators: bool) -> list[tuple[str, str]]:
    """Return the id and title of each section that has data."""
    models = data["models"]
    has_pairs = any("risk" in state for model in models for state in model["states"])
    has_classes = any(model.get("class_table") for model in models)
    has_confusions = any(model.get("confusions") and model["confusions"]["by_count"] for model in models)
    sections = [
        ("summary", "Summary", True),
        ("recalibration", "Recalibration", has_calibrators),
        ("comparison", "Model comparison", len(models) > 1),
        ("reliability", "Reliability", True),
        ("confidences", "Confidence of correct and incorrect predictions", has_pairs),
        ("slices", "Slices", any(model.get("slices") and model["slices"]["rows"] for model in models)),
        ("classes", "Classes", has_classes),
        ("map", "Over- and under-confidence by class", has_classes),
        ("confusions", "Confused classes", has_confusions),
        ("selective", "Selective prediction", has_pairs),
        ("ood", "OOD detection", any(model.get("ood") for model in models)),
        ("norms", "Feature norms", any(model.get("norms") for model in models)),
        ("training", "Training", any(model.get("training") for model in models)),
        ("samples", "Most over- and under-confident samples", any(any(m.get("samples", {}).values()) for m in models)),
        ("method", "Definitions and environment", True),
    ]
    return [(name, title) for name, title, is_shown in sections if is_shown]


def _header(data: Plain, models_by_name: Mapping[str, Model], environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the header: model, data, split, samples, classes, date and version."""
    recipes = [dict(model.recipe or {}) for model in models_by_name.values()]
    values: dict[str, list[object]] = {
        "Model": [page_model["name"] for page_model in data["models"]],
        "Architecture": [recipe.get("model") for recipe in recipes],
        "Data": [recipe.get("data") for recipe in recipes],
        "File": [None if model.source is None else model.source.name for model in models_by_name.values()],
        "Split": [page_model["split"] for page_model in data["models"]],
        "Samples": [count(page_model["n"]) for page_model in data["models"]],
        "Classes": [
            count(page_model["classes"]) if page_model["classes"] else "unknown" for page_model in data["models"]
        ],
        "Date": [_date()],
        "fedlas": [environment["fedlas"]],
    }
    distinct = {name: list(dict.fromkeys(str(x) for x in entries if x is not None)) for name, entries in values.items()}
    return [
        (name, text_data(", ".join(map(text_data, entries)), LONG)) for name, entries in distinct.items() if entries
    ]


def _date() -> str:
    """Return the date of today, or of SOURCE_DATE_EPOCH, in UTC."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    return time.strftime("%Y-%m-%d", time.gmtime(int(seconds) if seconds.isdecimal() else None))


def _model_words(data: Plain, report: Report, model: Model) -> Plain:
    text = headline(report)
    return {
        "name": data["name"],
        "headline": unbroken(text[0].upper() + text[1:]),
        "direction": data["direction"],
        "sentences": [unbroken(text_data(line, LONG)) for line in sentences(report)],
        "recommendations": [
            {
                "title": unbroken(text_data(recommendation.title)),
                "verdict": recommendation.verdict,
                "code": [(language, text_data(code, LONG)) for language, code in recommendation.code],
            }
            for recommendation in recommendations(report, model.predictions)
        ],
        "recipe": _lines(model.recipe or {}),
        "environment": _lines(model.environment or {}),
    }


def _numbers(data: Plain, reports: Sequence[Report]) -> Plain:
    """Return the summary table, with a row for each state of each model."""
    names = [name for name in summary_metrics() if any(name in report.before.results for report in reports)]
    head = [next(r.before[name].heading() for r in reports if name in r.before.results) for name in names]
    rows, notes = [], []
    for model, report in zip(data["models"], reports, strict=True):
        for position, state in enumerate(report.states):
            cells = [_cell(state.results.get(name)) for name in names]
            rows.append({"model": model["name"], "state": model["states"][position]["name"], "cells": cells})
        notes += [f"{model['name']}: {note}" if len(reports) > 1 else note for note in report.notes]
    return {"head": head, "rows": rows, "notes": notes}


def _cell(result: Result | None) -> tuple[str, str]:
    """Return the text of a number and of its confidence interval."""
    if result is None:
        return "", ""
    value, _, interval = result.cell().partition(" ")
    return value, interval


def _definitions(report: Report) -> list[tuple[str, str, str]]:
    explanations = {name: metric.explanation for name, metric in all_metrics().items()}
    return [
        (result.definition.estimator, explanations.get(name, ""), text_data(result.definition, 400))
        for name, result in report.before.results.items()
    ]


def _lines(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Format a mapping as pairs of name and text."""
    lines = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        lines.append((text_data(name), text_data(text, LONG)))
    return lines


def _environment() -> dict[str, str]:
    versions = {}
    for name in ("fedlas", "torch", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions | {"python": platform.python_version(), "system": platform.platform()}
