"""The network of a trained run, and its predictions on other data: other splits, OOD data sets, or a user's images.

Predictions on the data of the recipe are named after the split, such as "best-test". Predictions on other data, or with
other data options, get another file name. Existing predictions are never overwritten by different ones.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedlas.catalog import keywords, one_of
from fedlas.data import AbstractDataset, MissingFileError, Split, build_data
from fedlas.errors import short_list
from fedlas.io import read_existing, read_predictions, same_predictions, write_predictions
from fedlas.models import WithFeatures, build_model
from fedlas.predictions import AnyPredictions
from fedlas.training import checkpoint
from fedlas.training.backend_flags import backend_flags
from fedlas.training.build import move_to_device, select_device
from fedlas.training.prediction import build_source, predictions_of
from fedlas.training.progress import downloads
from fedlas.training.recipe import Recipe
from fedlas.training.recipe_text import Plain
from fedlas.training.run_folder import ELSEWHERE, RESUME, STATES, WRITE_TO, Run, RunError, locked

# Entries of a checkpoint that hold the weights of each state.
_ENTRIES = {"best": "best", "last": "model"}


def load_network(folder: str | Path, state: str | None = None) -> nn.Module:
    """Return the network of a finished run, on the CPU and in eval mode.

    Args:
        folder: the run folder.
        state: "best" or "last" weights; by default those that are evaluated, `evaluated` of the recipe.
    """
    run = Run(Path(folder))
    recipe = run.recipe
    state = one_of("state", state or recipe.evaluated, STATES)
    _require_checkpoint(run)
    predictions = run.predictions(f"{state}-{recipe.splits[-1]}")  # with the number of classes, without the data set
    weights = checkpoint.load_for(run, recipe)[_ENTRIES[state]]
    return _network(recipe, predictions.num_classes, run, weights, torch.device("cpu")).unwrap().eval()


def predict_with(
    folder: str | Path,
    data: str,
    *,
    split: str | None = None,
    state: str = "best",
    options: Mapping[str, Plain] | None = None,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    device: str | torch.device | None = None,
    progress: bool | None = None,
) -> Path:
    """Compute the predictions of a trained run on a data set, and return the path of the file.

    Images are preprocessed by the transform of the training data. Labels are kept if the classes are those of the
    network; otherwise the data is out-of-distribution.

    Args:
        folder: the run folder.
        data: name of the data set.
        split: split of that data set; by default "test" for the data of the recipe, otherwise "all" if the data set has
            it (image folders), else "test".
        state: "best" or "last" weights.
        options: options of the data set, added to those of the recipe if it is the recipe's data set.
        out: output file; by default in `predictions` of the run, which then has to be finished. Different predictions
            in that file are not overwritten.
        data_root: folder of the data sets.
        device: device of the computation.
        progress: whether to show a progress bar for downloads; by default in a terminal.
    """
    run = Run(Path(folder))
    recipe = run.recipe
    one_of("state", state, STATES)
    if out is not None and (Path(out).suffix != ".safetensors" or Path(out).is_dir()):
        raise RunError(f"predictions are written to a file that ends in .safetensors, not to {out}")
    _require_checkpoint(run)
    overrides = recipe.replace(data_options=dict(options or {})).data_options
    data_options = {**recipe.data_options, **overrides} if data == recipe.data else dict(overrides)
    with nullcontext() if out is not None else locked(run.folder), downloads(progress) as show_download:
        saved = checkpoint.load_for(run, recipe)
        if out is None and saved["epoch"] < recipe.epochs:
            raise RunError(
                f"{run.folder} is not finished: {saved['epoch']} of {recipe.epochs} epochs; "
                f"continue it with {RESUME}, or {WRITE_TO}"
            )
        common = {"seed": recipe.seed, "progress": show_download, "root": data_root}
        training_data = _training_data(run, recipe, common)
        dataset = build_data(data, **common, **data_options)
        is_training_data = data == recipe.data and (
            _with_full_path(data_options, dataset) == _with_full_path(recipe.data_options, training_data)
        )
        split = split or ("all" if "all" in dataset.splits and not is_training_data else "test")
        name = split if is_training_data else _split_name(data, split, data_options)
        path = run.predictions_file(f"{state}-{name}") if out is None else Path(out)
        existing = _existing_predictions(path)
        samples = dataset.split(split)
        recorded = run.environment.get("data", {}).get(name)
        if is_training_data and out is None and recorded is not None and recorded != samples.checksum():
            changed = f"images or labels of its {name} split have changed since {run.folder} was trained"
            raise RunError(f"{changed}; restore the original data, or {WRITE_TO}")
        class_names = training_data.class_names
        labelled = samples.class_names == class_names
        conflict = RunError(f"{path} exists and holds other predictions; remove it, or {WRITE_TO}")
        if existing is not None and not _have_same_samples(
            existing, samples, class_names, name=name, labelled=labelled
        ):
            raise conflict
        chosen = select_device(device)
        net = _network(recipe, training_data.num_classes, run, saved[_ENTRIES[state]], chosen)
        _warn_about_labels(training_data, dataset)
        transform = training_data.transform_for(split if split in training_data.splits else "test")
        with backend_flags(recipe, chosen):
            source = build_source(samples, transform, recipe, chosen, resident=dataset.resident)
            predictions = predictions_of(
                net, source, recipe, device=chosen, split=name, class_names=class_names, labelled=labelled
            )
        if existing is not None and not same_predictions(predictions, existing):
            raise conflict
        write_predictions(predictions, path)
    return path


def _require_checkpoint(run: Run) -> None:
    """Raise if a run has no checkpoint."""
    if not run.checkpoint.exists():
        reason = f"is finished, but its checkpoint was removed: train it again, and {ELSEWHERE}" if run.finished else ""
        raise RunError(f"{run.folder} {reason or 'has no checkpoint; train it first'}")


def _training_data(run: Run, recipe: Recipe, common: dict[str, Any]) -> AbstractDataset:
    """Return the training data of a run; if its files are gone, take the class names from stored predictions."""
    training_data = build_data(recipe.data, **common, **recipe.data_options)
    try:
        _ = training_data.class_names
    except MissingFileError as error:
        files = (run.predictions_file(f"{state}-{split}") for state in STATES for split in recipe.splits)
        names = next((read_predictions(file).class_names for file in files if file.exists()), None)
        if names is None or "class_names" not in keywords(type(training_data)):
            raise MissingFileError(
                f"{run.folder} needs its training data for the names of the classes: {error}"
            ) from error
        return build_data(recipe.data, **common, **{**recipe.data_options, "class_names": list(names)})
    return training_data


def _warn_about_labels(training_data: AbstractDataset, dataset: AbstractDataset) -> None:
    """Warn that labels of a user's images are ignored if their classes are not those of the network."""
    trained, present = training_data.class_names, dataset.class_names
    if "all" in dataset.splits and len(present) > 1 and trained != present:
        warnings.warn(
            f"labels are ignored: the classes of the data ({short_list(present, 5)}) are not those of the network "
            f"({short_list(trained, 5)}); pass class_names=[...] with the classes of the network, in its order",
            stacklevel=3,
        )


def _with_full_path(options: Mapping[str, Plain], dataset: AbstractDataset) -> dict[str, Plain]:
    """Return data options with the absolute path of the images, if the data set has a path."""
    path = getattr(dataset, "path", None)
    return {**options, "path": str(path.resolve())} if isinstance(path, Path) else dict(options)


def _split_name(data: str, split: str, options: Mapping[str, Plain]) -> str:
    """Return the name of predictions on other data: data set, split, and a hash of the options, if any."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
    return f"{data}-{split}-{digest}" if options else f"{data}-{split}"


def _network(
    recipe: Recipe, num_classes: int, run: Run, weights: Mapping[str, Any], device: torch.device
) -> WithFeatures:
    options = {name: value for name, value in recipe.model_options.items() if name != "pretrained"}
    model = build_model(recipe.model, num_classes, **options)
    if not weights:
        raise RunError(f"{run.checkpoint} holds no such weights yet")
    try:
        checkpoint.restore_module(model, weights)
    except checkpoint.RESTORE_ERRORS as error:
        first = " ".join(str(error).split("\n")[:2])
        raise RunError(f"{run.checkpoint} does not fit {recipe.model} for {num_classes} classes: {first}") from error
    return WithFeatures(move_to_device(model, recipe, device), recipe.head)


def _existing_predictions(path: Path) -> AnyPredictions | None:
    """Read the predictions at a path, if it exists; raise if the file is something else."""
    try:
        return read_existing(path)
    except ValueError as error:
        raise RunError(f"{path} exists and holds no predictions; remove it, or choose another output file") from error


def _have_same_samples(
    existing: AnyPredictions, samples: Split, names: tuple[str, ...], *, name: str, labelled: bool
) -> bool:
    """Return whether existing predictions have these samples; checked before the slow forward pass."""
    index, labels = existing.index, existing.given_labels
    return (
        existing.split == name
        and existing.class_names == names
        and (index is None or torch.equal(index, samples.index.cpu()))
        and len(existing) == len(samples)
        and (labels is not None) == labelled
        and (labels is None or torch.equal(labels, samples.labels.cpu()))
    )
