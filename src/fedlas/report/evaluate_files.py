"""Evaluate files of predictions; the implementation of `fedlas evaluate`.

    result = evaluate_files(["resnet.csv"], ood=["svhn=svhn.npz"])
    for line in result.lines():
        ...
    result.failed(["ece>0.05"])

`NAME=FILE` names a model; otherwise it has the name of its file. A `Model`, for example one of a run folder, can be
passed instead of a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

from fedlas.comparison import compare_models, correction_note
from fedlas.errors import UserError, UserTypeError
from fedlas.evaluation import FOLDS
from fedlas.io import read_predictions, require_labels
from fedlas.io.columns import ReadOptions
from fedlas.predictions import AnyPredictions, TopLabelPredictions, check_same_classes
from fedlas.progress import Progress
from fedlas.report.evaluation_result import EvaluationResult
from fedlas.report.model import Model

File = str | Path
Files = File | Sequence[File] | Mapping[str, File]


def evaluate_files(
    files: File | Sequence[File] | Mapping[str, File | Model],
    *,
    calibration: Files = (),
    calibration_labels: File | None = None,
    ood: Files = (),
    posthoc: str | Sequence[Any] = "temperature",
    folds: int = FOLDS,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    images: File | None = None,
    progress: Progress | None = None,
    **columns: Unpack[ReadOptions],
) -> EvaluationResult:
    """Read files of predictions, evaluate each model, and compare models by paired tests.

    Args:
        files: FILE or NAME=FILE for each model; or a mapping of names to files or `Model` objects.
        calibration: predictions of the same models on held-out samples, to fit calibrators on: FILE for a single model,
            MODEL=FILE or {MODEL: FILE} for several. Without them, calibrators are cross-fitted.
        calibration_labels: file of the labels of the calibration data, if `calibration` has no labels.
        ood: predictions on OOD data: NAME=FILE or {NAME: FILE} for a single model; with several models, MODEL/NAME
            instead of NAME.
        posthoc: names of calibrators, or calibrators.
        folds: number of folds for cross-fitting.
        bins: number of bins of calibration errors.
        level: confidence level.
        resamples: number of bootstrap resamples; by default that of each method.
        seed: random seed for bootstrap intervals and cross-fitting.
        images: folder of image files; by default that of the predictions.
        progress: called with the name of the current step and the fraction of it that is done (None if unknown).
        columns: roles of the columns of the files, as in `read_predictions`.
    """
    entries = files.values() if isinstance(files, Mapping) else files if isinstance(files, Sequence) else [files]
    for entry in entries:
        if not isinstance(entry, str | PathLike | Model):
            raise UserTypeError(
                f"evaluate_files takes names of files and Model objects, not {type(entry).__name__}; fedlas.evaluate "
                "takes tables and arrays"
            )
    named = files if isinstance(files, Mapping) else named_files([files] if isinstance(files, str | Path) else files)
    if not named:
        raise UserError("no file of predictions is given")
    calibration_files = _calibration_files_by_model(calibration, list(named))
    if calibration_labels is not None and not calibration_files:
        raise UserError(
            f"{calibration_labels} has the labels of calibration data: pass the data as well, with --calibration "
            "(calibration=)"
        )
    ood_files = _ood_files_by_model(ood, list(named))
    sources = {
        name: file_or_model.source if isinstance(file_or_model, Model) else Path(file_or_model)
        for name, file_or_model in named.items()
    }
    for name, path in calibration_files.items():
        source = sources[name]
        if source is not None and path.resolve() == source.resolve():
            raise UserError(f"{path} is the evaluated file; without calibration data, calibrators are cross-fitted")
    calibrators = (posthoc,) if isinstance(posthoc, str) or not isinstance(posthoc, Sequence) else tuple(posthoc)
    options: dict[str, Any] = {"bins": bins, "level": level, "resamples": resamples, "seed": seed}
    models, notes = {}, []
    for name, file_or_model in named.items():
        model = (
            file_or_model
            if isinstance(file_or_model, Model)
            else _model(Path(file_or_model), images, progress, columns)
        )
        if model.report is None:
            more = (calibration_files.get(name), ood_files.get(name, {}), progress)
            model = _with_data(model, name, *more, columns=columns, labels=calibration_labels)
            reason = _no_calibrator(model, folds)
            if reason and calibrators:
                notes.append(f"{name}: no calibrator is fitted: {reason}")
            model = replace(model, posthoc=() if reason else calibrators, folds=folds)
            model = replace(model, report=model.evaluate(**options, progress=_with_name(progress, name)))
        elif name in calibration_files or name in ood_files:
            raise UserError(f"{name} has a report already, so no further predictions of it can be evaluated")
        models[name] = model
    predictions_by_name = {name: each.predictions for name, each in models.items() if each.predictions is not None}
    comparisons = compare_models(predictions_by_name, **options, progress=progress)
    if any(test.comparison is not None for test in comparisons) and (note := correction_note(len(predictions_by_name))):
        notes.append(note)
    return EvaluationResult(
        models, {name: path for name, path in sources.items() if path is not None}, comparisons, notes
    )


def named_files(files: Sequence[File]) -> dict[str, Path]:
    """Return files by name: NAME of NAME=FILE, or the name of the file, with its folder if names are equal."""
    pairs = [_pair(file) for file in files]
    short_names = [name or (path.resolve().name if path.is_dir() else _stem(path)) for name, path in pairs]
    paths_by_name: dict[str, Path] = {}
    for (name, path), short_name in zip(pairs, short_names, strict=True):
        path_without_suffix = path if path.is_dir() else path.with_suffix("")
        model_name = short_name if name or short_names.count(short_name) == 1 else path_without_suffix.as_posix()
        if model_name in paths_by_name:
            raise UserError(f"two models are called {model_name!r}; name them: NAME=FILE")
        paths_by_name[model_name] = path
    return paths_by_name


def _stem(path: Path) -> str:
    return Path(path.stem).stem if path.suffix.lower() == ".gz" else path.stem


def _model(path: Path, images: File | None, progress: Progress | None, columns: ReadOptions) -> Model:
    # The paths in an untrusted file may point to any file of this machine, which a page must not expose.
    folders = (path.parent, *([] if images is None else [Path(images)]))
    return Model(
        predictions=require_labels(read_predictions(path, progress=progress, **columns), path),
        source=path,
        image_folders=folders,
    )


def _with_data(
    model: Model,
    name: str,
    calibration: Path | None,
    ood_files: Mapping[str, Path],
    progress: Progress | None,
    *,
    columns: ReadOptions,
    labels: File | None,
) -> Model:
    """Add calibration data and OOD data to a model."""
    if model.predictions is None:
        raise UserError(f"{name} has neither predictions nor a report")
    predictions = model.predictions
    # The labels of calibration data have a separate option; OOD samples have no labels.
    unlabelled: Any = {key: value for key, value in columns.items() if key not in {"labels", "label_column"}}
    labelled: Any = {**columns, "labels": labels}
    ood_predictions = {
        key: _like(read_predictions(path, progress=progress, **unlabelled), predictions, path)
        for key, path in ood_files.items()
    }
    held_out = model.calibration
    if calibration is not None:
        held_out = require_labels(
            read_predictions(calibration, progress=progress, **labelled), calibration, "calibration_labels"
        )
        held_out = _like(held_out, predictions, calibration)
    return replace(model, calibration=held_out, ood={**model.ood, **ood_predictions})


def _no_calibrator(model: Model, folds: int) -> str:
    """Return why no calibrator can be fitted; empty if one can."""
    predictions = model.predictions
    assert predictions is not None
    if isinstance(predictions, TopLabelPredictions):
        return "only the top class of each sample is known"
    if model.calibration is None and len(predictions) < 2 * folds:
        have = "1 sample is" if len(predictions) == 1 else f"{len(predictions)} samples are"
        return f"{have} too few to cross-fit one in {folds} parts; other ones can be given"
    return ""


def _with_name(progress: Progress | None, name: str) -> Progress | None:
    """Return a callback that adds the name of a model to that of each step."""
    return None if progress is None else lambda step, fraction: progress(f"{step} {name}", fraction)


def _pair(text: str | Path) -> tuple[str, Path]:
    """Split NAME=FILE; the name of an existing file that contains "=" is not split."""
    name, equals, path = str(text).partition("=")
    return ("", Path(text)) if not equals or Path(text).exists() else (name.strip(), Path(path))


def _calibration_files_by_model(files: Files, models: Sequence[str]) -> dict[str, Path]:
    paths_by_model: dict[str, Path] = {}
    for name, path in _pairs(files):
        model = name or (models[0] if len(models) == 1 else "")
        if model not in models:
            raise UserError(f"which model is calibration data {path} of? Write MODEL=FILE, with {', '.join(models)}")
        if model in paths_by_model:
            raise UserError(f"two files of calibration data are given for {model}")
        paths_by_model[model] = path
    return paths_by_model


def ood_files(arguments: Sequence[str]) -> dict[str, Path]:
    """Return files of OOD data by name, each given as NAME=FILE."""
    paths_by_name: dict[str, Path] = {}
    for name, path in _pairs(arguments, named=True):
        if name in paths_by_name:
            raise UserError(f"two files are called {name!r}")
        paths_by_name[name] = path
    return paths_by_name


def _ood_files_by_model(files: Files, models: Sequence[str]) -> dict[str, dict[str, Path]]:
    paths_by_model: dict[str, dict[str, Path]] = {}
    for name, path in _pairs(files, named=True):
        # The name of a model may contain a slash.
        matching = [known_model for known_model in models if name.startswith(f"{known_model}/")]
        model = models[0] if len(models) == 1 else max(matching, key=len, default="")
        set_name = name if len(models) == 1 else name.removeprefix(f"{model}/")
        if model not in models or not set_name:
            known = ", ".join(models)
            raise UserError(f"OOD data {name}={path}: which model is it of? Write MODEL/NAME=FILE, with {known}")
        if set_name in paths_by_model.setdefault(model, {}):
            raise UserError(f"two files of OOD data are given for {set_name}")
        paths_by_model[model][set_name] = path
    return paths_by_model


def _pairs(files: Files, *, named: bool = False) -> list[tuple[str, Path]]:
    """Return pairs of name and file; raise if a required name is missing."""
    if isinstance(files, Mapping):
        return [(str(name), Path(path)) for name, path in files.items()]
    pairs = []
    for file in [files] if isinstance(files, str | Path) else files:
        name, _, path = str(file).partition("=")
        if named and not (name and path):
            raise UserError(f"OOD data is given as NAME=FILE, not as {str(file)!r}")
        pairs.append((name, Path(path)) if named else _pair(file))
    return pairs


def _like(other: AnyPredictions, evaluated: AnyPredictions, path: Path) -> AnyPredictions:
    """Return predictions of the same model after a check that they have the same classes in the same order."""
    check_same_classes(other, str(path), evaluated, "the evaluated predictions")
    return other
