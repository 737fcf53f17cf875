"""Predictions of a trained run on any data: other splits, foreign data, or images of one's own.

A name without the data set's, such as "best-test", belongs to predictions on the very data of the recipe. Other data,
or other keywords of the same, give the file another name, and no file is replaced by other predictions.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from fedlas.catalog import keywords, nearest
from fedlas.data import AbstractDataset, MissingFileError, Split, build_data
from fedlas.errors import UserError
from fedlas.files import held_at, same_predictions
from fedlas.models import WithFeatures, build_model
from fedlas.predictions import AnyPredictions, Predictions
from fedlas.training import checkpoint
from fedlas.training.backend_flags import backend_flags
from fedlas.training.build import select_device
from fedlas.training.prediction import evaluation_source, predictions_of
from fedlas.training.progress import downloads
from fedlas.training.recipe import Recipe
from fedlas.training.recipe_text import Plain
from fedlas.training.run_folder import ELSEWHERE, RESUME, STATES, WRITE_TO, Run, RunError, locked


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
    """Let the network of a run look at data, and give the file of its predictions.

    Images pass through the transform of the data that the network was trained on. Labels are kept where the classes are
    those of the network; otherwise the data is foreign to it.

    Args:
        folder: of the run.
        data: name of the data set.
        split: of that data set; by default "test", and all images of a folder that the network was not trained on.
        state: "best" or "last" weights.
        options: keywords of the data set, beside those of the recipe if it is the recipe's.
        out: file to write; by default in the `predictions` of the run, which has to be finished then. Other predictions
            that are there are not written over.
        data_root: where data lies.
        device: where to compute.
        progress: whether to show a bar while data is fetched; by default in a terminal.
    """
    run = Run(Path(folder))
    recipe = run.recipe
    if state not in STATES:
        raise UserError(f"state is {state!r}; {nearest(state, list(STATES))}")
    if out is not None and (Path(out).suffix != ".safetensors" or Path(out).is_dir()):
        raise RunError(f"predictions are written to a file that ends in .safetensors, not to {out}")
    held = None if out is None else _held(Path(out))
    if not run.checkpoint.exists():
        more = f"is finished, but its checkpoint is gone: train it again, and {ELSEWHERE}" if run.finished else ""
        raise RunError(f"{run.folder} {more or 'has no checkpoint; train it first'}")
    given = recipe.replace(data_options=dict(options or {})).data_options
    wanted = {**recipe.data_options, **given} if data == recipe.data else dict(given)
    own = data == recipe.data and wanted == recipe.data_options
    with nullcontext() if out is not None else locked(run.folder), downloads(progress) as shown:
        saved = checkpoint.load(run.checkpoint)
        checkpoint.check_recipe(saved, run.checkpoint, recipe)
        checkpoint.check_stand(saved, run.checkpoint, recipe.epochs)
        if out is None and saved["epoch"] < recipe.epochs:
            stands = f"{run.folder} is not finished: {saved['epoch']} of {recipe.epochs} epochs"
            raise RunError(f"{stands}; continue it with {RESUME}, or {WRITE_TO}")
        common = {"seed": recipe.seed, "progress": shown} | ({} if data_root is None else {"root": data_root})
        home = _home(run, recipe, common)
        other = build_data(data, **common, **wanted)
        split = split or ("all" if "all" in other.splits and not own else "test")
        name = split if own else _name(data, split, wanted)
        path = run.predictions_file(f"{state}-{name}") if out is None else Path(out)
        held = _held(path) if out is None else held
        found = other.split(split)
        known = run.environment.get("data", {}).get(name)
        if own and out is None and known is not None and known != found.checksum():
            changed = f"images or labels of its {name} split have changed since {run.folder} looked at them"
            raise RunError(f"{changed}; put back what was there, or {WRITE_TO}")
        labelled = found.class_names == home.class_names
        if held is not None and not _about(held, found, home.class_names, name=name, labelled=labelled):
            raise _others(path)
        net = _network(recipe, home, run, saved["best" if state == "best" else "model"], select_device(device))
        _tell_of_labels(home, other)
        made = _predictions(net, recipe, home, found, name=name, resident=other.resident, labelled=labelled)
        if held is not None and not same_predictions(made, held):
            raise _others(path)
        made.save(path)
    return path


def _home(run: Run, recipe: Recipe, common: dict[str, Any]) -> AbstractDataset:
    """Return the data that a network was trained on; where it is gone, what the run wrote down knows the classes."""
    home = build_data(recipe.data, **common, **recipe.data_options)
    try:
        _ = home.class_names
    except MissingFileError as error:
        files = (run.predictions_file(f"{state}-{split}") for state in STATES for split in recipe.splits)
        names = next((Predictions.load(one).class_names for one in files if one.exists()), None)
        if names is None or "class_names" not in keywords(type(home)):
            raise MissingFileError(
                f"{run.folder} was trained on data that is needed for its classes: {error}"
            ) from error
        return build_data(recipe.data, **common, **{**recipe.data_options, "class_names": list(names)})
    return home


def _tell_of_labels(home: AbstractDataset, other: AbstractDataset) -> None:
    """Say that labels of one's own images are left out, where they might have been meant for this network."""
    mine, theirs = home.class_names, other.class_names
    if "all" in other.splits and len(theirs) > 1 and mine != theirs:
        warnings.warn(
            f"labels are left out: the classes of the data ({_some(theirs)}) are not those of the network "
            f"({_some(mine)}); class_names=[...] names those of the network, in its order",
            stacklevel=3,
        )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _name(data: str, split: str, options: Mapping[str, Plain]) -> str:
    """Call predictions on other data by its name, and by a hash of its keywords if there are any."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
    return f"{data}-{split}-{digest}" if options else f"{data}-{split}"


def _network(
    recipe: Recipe, data: AbstractDataset, run: Run, weights: Mapping[str, Any], device: torch.device
) -> WithFeatures:
    options = {name: value for name, value in recipe.model_options.items() if name != "pretrained"}
    model = build_model(recipe.model, data.num_classes, **options)
    if not weights:
        raise RunError(f"{run.checkpoint} holds no such weights yet")
    try:
        checkpoint.restore_module(model, weights)
    except checkpoint.UNFIT as error:
        first = " ".join(str(error).split("\n")[:2])
        raise RunError(
            f"{run.checkpoint} does not fit {recipe.model} for {data.num_classes} classes: {first}"
        ) from error
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return WithFeatures(model.to(device, memory_format=layout), recipe.head)  # type: ignore[call-overload]


def _predictions(
    net: WithFeatures,
    recipe: Recipe,
    home: AbstractDataset,
    found: Split,
    *,
    name: str,
    resident: bool,
    labelled: bool,
) -> Predictions:
    device = next(net.parameters()).device
    transform = home.transform_for(found.name if found.name in home.splits else "test")
    with backend_flags(recipe, device):
        source = evaluation_source(found, transform, recipe, device, resident=resident)
        return predictions_of(
            net, source, recipe, device=device, split=name, class_names=home.class_names, labelled=labelled
        )


def _held(path: Path) -> AnyPredictions | None:
    """Read the predictions that are at a place already; what is something else is not written over."""
    try:
        return held_at(path)
    except ValueError as error:
        raise RunError(f"{path} is there and holds no predictions; remove it, or say where else to write") from error


def _about(held: AnyPredictions, found: Split, names: tuple[str, ...], *, name: str, labelled: bool) -> bool:
    """Return whether predictions are about the samples that a network is going to look at, which takes much longer."""
    index, labels = held.index, held.given_labels
    return (
        held.split == name
        and held.class_names == names
        and (index is None or torch.equal(index, found.index.cpu()))
        and len(held) == len(found)
        and (labels is not None) == labelled
        and (labels is None or torch.equal(labels, found.labels.cpu()))
    )


def _others(path: Path) -> RunError:
    return RunError(f"{path} is there and holds other predictions; remove it, or {WRITE_TO}")
