"""The HTML page of a report: one file about one model or several, which works without a network.

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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from fedlas.comparison import PairedTest, compare_models
from fedlas.errors import UserError, UserTypeError
from fedlas.evaluation import Report, evaluate
from fedlas.extras import optional_module
from fedlas.formatting import cell, count, level
from fedlas.io.atomic import write_atomic
from fedlas.metrics.base import Resampling
from fedlas.metrics.registry import summary_metrics
from fedlas.metrics.result import Result
from fedlas.predictions import AnyPredictions
from fedlas.report.evaluation_result import EvaluationResult
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
from fedlas.report.slices import RESAMPLES, SMALL, slices
from fedlas.report.summary_text import direction, headline, sentences
from fedlas.report.thumbnails import picture_of

CLASS_DIAGRAMS = 3_000  # of all models together
MOST_SAMPLES = 50
MOST_SLICES = 50  # of all models together, but at least 10 of each
PICTURE_BYTES = 1_500_000  # of all pictures together
LONG = 2_000  # letters of a command, or of a value in a recipe

MEANINGS = {
    "accuracy": "Fraction of samples whose most likely class is the label.",
    "ece": "Absolute difference of confidence and accuracy, averaged over bins of confidence. 0 is perfect; a finite "
    "sample of a calibrated model has an ECE above 0, its noise floor.",
    "aece": "The same over bins with equally many samples.",
    "over_ece": "The part of the ECE from bins where confidence is above accuracy.",
    "under_ece": "The part of the ECE from bins where confidence is below accuracy.",
    "signed_ece": "Mean confidence minus accuracy: positive for over-confidence, negative for under-confidence.",
    "mce": "The largest absolute difference of confidence and accuracy in any bin, however few samples it has.",
    "rms_error": "Root of the mean squared difference of confidence and accuracy over bins.",
    "debiased_l2": "The same, without the bias from finite samples.",
    "smooth_ece": "Calibration error with a kernel instead of bins; its width is chosen from the samples.",
    "classwise_ece": "The ECE of the probability of each class, averaged over all classes.",
    "nll": "Mean negative log-likelihood of the labels, in nats: accuracy and calibration in one.",
    "brier": "Mean squared difference of the probabilities and the one-hot label, summed over classes.",
    "top_5": "Fraction of samples whose label is among the five most likely classes.",
    "aurc": "Error rate averaged over all coverages: whether confidence separates correct from incorrect predictions.",
    "e_aurc": "The AURC minus the lowest one that this accuracy allows.",
    "augrc": "Errors among the covered samples as a fraction of all samples, averaged over all coverages.",
    "ks_test": "Largest cumulative difference of confidence and correctness, from low to high confidence.",
    "kuiper_test": "Range of the same cumulative difference.",
    "spiegelhalter_test": "Brier score minus its expectation for a calibrated model, in standard deviations.",
}


Given = AnyPredictions | Report | Model
Models = Given | Mapping[str, Given] | EvaluationResult


@dataclass(frozen=True)
class _Asked:
    """What is asked of a page; see `report_page`."""

    title: str
    samples: int
    bins: int
    level: float
    resamples: int | None
    seed: int


@dataclass(frozen=True)
class _Samples:
    """What is known about the single samples of a model: names, paths, and pictures.

    Args:
        key: tells pictures of these samples from those of others on the page.
        ids: a name for each.
        paths: an image file for each.
        images: an image for each.
        folders: where the files are looked for; None where paths stand as they are.
    """

    key: str
    ids: Sequence[object] | None
    paths: Sequence[str | Path] | None
    images: Any
    folders: Sequence[Path] | None = None

    def about(self, row: int) -> Plain:
        """Name a sample."""
        names = {"id": self.ids, "path": self.paths}
        found = {word: text_data(given[row]) for word, given in names.items() if given is not None}
        return found | {"picture": f"{self.key}{row}"}

    @property
    def pictured(self) -> bool:
        """Whether there should be pictures at all."""
        return self.images is not None or self.paths is not None

    def outside(self, row: int) -> bool:
        """Return whether the image file of a sample lies outside of the allowed folders."""
        return self.images is None and self.paths is not None and self._file(self.paths[row]) is None

    def picture(self, row: int) -> str | None:
        """Make the picture of a sample; None where there is none, or its file cannot be read."""
        if self.images is not None:
            return picture_of(self.images[row])
        found = None if self.paths is None else self._file(self.paths[row])
        if found is None:
            return None
        try:
            return picture_of(found)
        except Exception:  # a missing or damaged file leaves a gap on the page, which says so
            return None

    def _file(self, path: str | Path) -> Path | None:
        """Find an image file; None where it lies outside of the folders, links followed."""
        if self.folders is None:
            return Path(path)
        try:
            roots = [folder.resolve() for folder in self.folders]
            places = [(root / path).resolve() for root in roots]
            inside = [place for place in places if any(place.is_relative_to(root) for root in roots)]
            return next((place for place in inside if place.is_file()), inside[0] if inside else None)
        except (OSError, ValueError, RuntimeError):  # a name that no file can have, or links that go round
            return None


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
    """Return the HTML page of one model, or of several on the same samples.

    Args:
        models: predictions, a report or a `Model`; several of them by name; or the result of `evaluate_files`, whose
            paired tests are shown as they are.
        title: heading of the page.
        ids: a name for each sample; by default those of each model's own predictions.
        paths: an image file for each sample; those of the samples shown are read and made small. By default those of
            each model's own predictions, as far as its `image_folders` allow.
        images: instead of files, something that gives an image for `images[row]`: an array, a list of arrays.
        samples: how many of the most over- and under-confident samples are shown, at most 50 of each kind.
        command: the command that made the page.
        environment: further lines for where it was made.
        bins: how many bins calibration errors have, also those of paired tests; by default as many as in the first
            report that is given, else 15.
        level: confidence level.
        resamples: number of bootstrap resamples; by default that of each method.
        seed: random seed for bootstrap intervals and cross-fitting.
    """
    if not 0 <= samples <= MOST_SAMPLES:
        raise UserError(f"samples is {samples}; a number from 0 to {MOST_SAMPLES} is needed")
    held = named_models(models)
    known = _samples(held, ids, paths, images)
    if bins is None:
        bins = next((model.report["ece"].definition.bins for model in held.values() if model.report), None)
    asked = _Asked(title, samples, bins or 15, level, resamples, seed)
    reports = {name: report_of(model, level, resamples, seed, asked.bins) for name, model in held.items()}
    comparisons = (models.comparisons or None) if isinstance(models, EvaluationResult) else None
    data = _data(held, reports, known, asked, comparisons)
    if data["outside"]:
        warnings.warn(
            f"{data['outside']} pictures are not shown: their files lie outside of the folder of the predictions; "
            "another folder can be allowed (--images DIR, or image_folders of a Model)",
            UserWarning,
            stacklevel=2,
        )
    about = _environment() | {str(name): value for name, value in (environment or {}).items()}
    return _filled(data, held, reports, command, about)


def _samples(
    held: Mapping[str, Model], ids: Sequence[object] | None, paths: Sequence[str | Path] | None, images: Any
) -> dict[str, _Samples]:
    """Return ids, paths and images of the samples: those of the arguments, else those of each model."""
    for what, given in {"ids": ids, "paths": paths, "images": images}.items():
        for name, model in held.items():
            if given is not None and model.predictions is not None and len(given) != len(model.predictions):
                raise UserError(f"{what} has {len(given)} entries, {name} has {len(model.predictions)} samples")
    found: dict[str, _Samples] = {}
    sources: list[object] = []
    for name, model in held.items():
        own = model.predictions
        called = ids if ids is not None else None if own is None else own.ids
        if images is not None or paths is not None or own is None or own.paths is None:
            found[name] = _Samples("", called, paths, images)
            continue
        source = (own.paths, model.image_folders)
        if source not in sources:
            sources.append(source)
        # Models whose files name the same images share their pictures.
        found[name] = _Samples(f"{sources.index(source)}-", called, own.paths, None, model.image_folders)
    return found


def save_page(models: Models, path: str | Path, **options: Any) -> Path:
    """Write a page to a file, atomically; options are those of `report_page`."""
    path = Path(path)
    write_atomic(path, report_page(models, **options).encode())
    return path


def embedded(data: Any) -> str:
    """Write data as JSON that may stand in an HTML element: without <, > and &, and in ASCII."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def unbroken(text: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(?<=\d) (?=%|points)|(?<=T) = ", lambda found: found[0].replace(" ", "\u00a0"), text)


def named_models(models: Models) -> dict[str, Model]:
    """Return a `Model` for each name."""
    given: Mapping[str, Any]
    if isinstance(models, EvaluationResult):
        given = models.models
    else:
        given = models if isinstance(models, Mapping) else {"model": models}
    if not given:
        raise UserError("no model is given")
    found: dict[str, Model] = {}
    for name, one in given.items():
        if isinstance(one, AnyPredictions):
            found[str(name)] = Model(predictions=one)
        elif isinstance(one, Report):
            found[str(name)] = Model(report=one)
        elif isinstance(one, Model):
            found[str(name)] = one
        else:
            raise UserTypeError(f"{name} is {type(one).__name__}; Predictions, a Report or a Model is expected")
        if found[str(name)].predictions is None and found[str(name)].report is None:
            raise UserError(f"{name} has neither predictions nor a report")
    return found


def report_of(model: Model, level: float = 0.95, resamples: int | None = None, seed: int = 0, bins: int = 15) -> Report:
    """Return the report of a model, computed if there is none."""
    if model.report is not None:
        return model.report
    assert model.predictions is not None
    return evaluate(
        model.predictions, **model.evaluate_options(), bins=bins, level=level, resamples=resamples, seed=seed
    )


def _data(
    held: Mapping[str, Model],
    reports: Mapping[str, Report],
    known: Mapping[str, _Samples],
    asked: _Asked,
    comparisons: Sequence[PairedTest] | None,
) -> Plain:
    names: list[list[str]] = []
    models = [_model(name, model, reports[name], asked, len(held)) for name, model in held.items()]
    for one, model in zip(models, held.values(), strict=True):
        called = None if model.predictions is None else names_data(model.predictions)
        if called is not None and called not in names:
            names.append(called)
        one["names"] = None if called is None else names.index(called)
    pictures: dict[str, str] = {}
    lost = outside = 0
    for one, samples in zip(models, known.values(), strict=True):
        for sample in (sample for kind in one.get("samples", {}).values() for sample in kind):
            sample.update(samples.about(sample["row"]))
            missing = samples.pictured and not _keep_picture(pictures, samples, sample)
            kept_out = missing and samples.outside(sample["row"])
            outside, lost = outside + kept_out, lost + (missing and not kept_out)
    if comparisons is None:
        compared = {name: model.predictions for name, model in held.items() if model.predictions is not None}
        if len(compared) == len(held):
            options: dict[str, Any] = {"level": asked.level, "resamples": asked.resamples, "seed": asked.seed}
            comparisons = compare_models(compared, bins=asked.bins, **options)
    return {
        "title": text_data(asked.title),
        "level": asked.level,
        "names": names,
        "models": models,
        "pictures": pictures,
        "lost": lost,
        "outside": outside,
        "comparison": None if comparisons is None else comparison_data(list(held), comparisons),
    }


def _model(name: str, model: Model, report: Report, asked: _Asked, models: int) -> Plain:
    one = model_data(name, report, asked.level)
    one |= {"direction": direction(report.before), "training": training_data(model.log, model.recipe)}
    given = model.predictions
    if given is not None:
        one["ood"] = ood_data(given, model.ood, report, model.train_features)
        one["norms"] = norm_data(given)
    if given is not None:
        most = max(10, MOST_SLICES // models)
        has_intervals = report.before["ece"].interval is not None
        how = Resampling(asked.level, asked.resamples or RESAMPLES, asked.seed) if has_intervals else None
        one["slices"] = slice_data(slices(given, bins=asked.bins, most=most, how=how))
    if given is not None and given.given_labels is not None and given.prediction is not None:
        one["class_table"] = class_data(given, report, most=CLASS_DIAGRAMS // models, level=asked.level)
        one["confusions"] = confusion_data(given)
        one["samples"] = sample_data(given, count=asked.samples)
    return one


def _keep_picture(pictures: dict[str, str], known: _Samples, sample: Plain) -> bool:
    """Add the picture of a sample to those of the page, as long as there is room."""
    if sample["picture"] in pictures:
        return True
    made = known.picture(sample["row"])
    if made is None or sum(map(len, pictures.values())) + len(made) > PICTURE_BYTES:
        return False
    pictures[sample["picture"]] = made
    return True


def _filled(
    data: Plain,
    held: Mapping[str, Model],
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
        models=[_model_words(one, reports[name], held[name]) for one, name in zip(data["models"], held, strict=True)],
        numbers=_numbers(data, list(reports.values())),
        definitions=_definitions(first),
        environment=_lines(environment),
        header=_header(data, held, environment),
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
    """List the sections that there is something to show in."""
    models = data["models"]
    there = {
        "summary": True,
        "recalibration": has_calibrators,
        "comparison": len(models) > 1,
        "reliability": True,
        "confidences": any("confidences" in state for one in models for state in one["states"]),
        "slices": any(one.get("slices") and one["slices"]["rows"] for one in models),
        "classes": any(one.get("class_table") for one in models),
        "map": any(one.get("class_table") for one in models),
        "confusions": any(one.get("confusions") and one["confusions"]["by_count"] for one in models),
        "selective": any("risk" in state for one in models for state in one["states"]),
        "ood": any(one.get("ood") for one in models),
        "norms": any(one.get("norms") for one in models),
        "training": any(one.get("training") for one in models),
        "samples": any(one.get("samples") and any(one["samples"].values()) for one in models),
        "method": True,
    }
    titles = {
        "summary": "Summary",
        "recalibration": "Recalibration",
        "comparison": "Model comparison",
        "reliability": "Reliability",
        "confidences": "Confidence of correct and incorrect predictions",
        "slices": "Slices",
        "classes": "Classes",
        "map": "Over- and under-confidence by class",
        "confusions": "Confused classes",
        "selective": "Selective prediction",
        "ood": "OOD detection",
        "norms": "Feature norms",
        "training": "Training",
        "samples": "Most over- and under-confident samples",
        "method": "Definitions and environment",
    }
    return [(name, titles[name]) for name, shown in there.items() if shown]


def _header(data: Plain, held: Mapping[str, Model], environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the header: model, data, split, samples, classes, date and version."""
    recipes = [dict(model.recipe or {}) for model in held.values()]
    values: dict[str, list[object]] = {
        "Model": [one["name"] for one in data["models"]],
        "Architecture": [recipe.get("model") for recipe in recipes],
        "Data": [recipe.get("data") for recipe in recipes],
        "File": [None if model.source is None else model.source.name for model in held.values()],
        "Split": [one["split"] for one in data["models"]],
        "Samples": [count(one["n"]) for one in data["models"]],
        "Classes": [count(one["classes"]) if one["classes"] else "unknown" for one in data["models"]],
        "Date": [_date()],
        "fedlas": [environment["fedlas"]],
    }
    distinct = {name: list(dict.fromkeys(str(x) for x in found if x is not None)) for name, found in values.items()}
    return [(name, text_data(", ".join(map(text_data, found)), LONG)) for name, found in distinct.items() if found]


def _date() -> str:
    """Return the date of today, or of SOURCE_DATE_EPOCH, in UTC."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
    return time.strftime("%Y-%m-%d", time.gmtime(int(seconds) if seconds.isdecimal() else None))


def _model_words(data: Plain, report: Report, model: Model) -> Plain:
    said = headline(report)
    return {
        "name": data["name"],
        "headline": unbroken(said[0].upper() + said[1:]),
        "direction": data["direction"],
        "sentences": [unbroken(text_data(line, LONG)) for line in sentences(report)],
        "recommendations": [
            {
                "title": unbroken(text_data(one.title)),
                "verdict": one.verdict,
                "code": [(language, text_data(code, LONG)) for language, code in one.code],
            }
            for one in recommendations(report, model.predictions)
        ],
        "recipe": _lines(model.recipe or {}),
        "environment": _lines(model.environment or {}),
    }


def _numbers(data: Plain, reports: Sequence[Report]) -> Plain:
    """Lay out the table of the summary: a row for each state of each model."""
    names = [name for name in summary_metrics() if any(name in report.before.results for report in reports)]
    head = [next(r.before[name].heading() for r in reports if name in r.before.results) for name in names]
    rows, notes = [], []
    for one, report in zip(data["models"], reports, strict=True):
        for place, state in enumerate(report.states):
            cells = [_cell(state.results.get(name)) for name in names]
            rows.append({"model": one["name"], "state": one["states"][place]["name"], "cells": cells})
        notes += [f"{one['name']}: {note}" if len(reports) > 1 else note for note in report.notes]
    return {"head": head, "rows": rows, "notes": notes}


def _cell(result: Result | None) -> tuple[str, str]:
    """Return the text of a number and of its confidence interval."""
    if result is None:
        return "", ""
    ends = (None, None) if result.interval is None else (result.interval.low, result.interval.high)
    value, _, interval = cell(float(result), *ends, percent=result.definition.unit == "fraction").partition(" ")
    return value, interval


def _definitions(report: Report) -> list[tuple[str, str, str]]:
    found = report.before.results
    return [
        (result.definition.estimator, MEANINGS.get(name, ""), text_data(result.definition, 400))
        for name, result in found.items()
    ]


def _lines(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Write a mapping as lines of words."""
    found = []
    for name, value in given.items():
        words = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        found.append((text_data(name), text_data(words, LONG)))
    return found


def _environment() -> dict[str, str]:
    found = {}
    for name in ("fedlas", "torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found | {"python": platform.python_version(), "system": platform.platform()}
