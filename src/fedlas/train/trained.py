"""Predictions of a trained run on any data: other splits, foreign data, or images of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedlas.catalog import nearest
from fedlas.data import AbstractDataset, build_data
from fedlas.models import WithFeatures, build_model
from fedlas.train import checkpoint
from fedlas.train.bench import chosen_device
from fedlas.train.precision import machine
from fedlas.train.predict import evaluation_source, predictions_of
from fedlas.train.recipe import Recipe
from fedlas.train.runs import STATES, Run, RunError


def predict_again(
    folder: str | Path,
    data: str,
    *,
    split: str = "test",
    state: str = "best",
    options: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    device: str | torch.device | None = None,
) -> Path:
    """Let the network of a run look at data, and give the file of its predictions.

    Images pass through the transform of the data that the network was trained on. Labels are kept where the classes are
    those of the network; otherwise the data is foreign to it.

    Args:
        folder: of the run.
        data: name of the data set.
        split: of that data set.
        state: "best" or "last" weights.
        options: keywords of the data set; text is read by `Recipe.with_settings`'s rules.
        out: file to write; by default in the run's `predictions`.
        data_root: where data lies.
        device: where to compute.
    """
    run = Run(Path(folder))
    recipe = run.recipe
    if state not in STATES:
        raise ValueError(f"state is {state!r}; {nearest(state, list(STATES))}")
    if not run.checkpoint.exists():
        raise RunError(f"{run.folder} has no checkpoint; train it first")
    given = recipe.with_settings({f"data_options.{name}": str(value) for name, value in (options or {}).items()})
    own = {name: value for name, value in given.data_options.items() if name in (options or {})}
    home = _built(recipe.data, {"seed": recipe.seed, **recipe.data_options}, data_root)
    if data == recipe.data:
        own = {**recipe.data_options, **own}
    other = _built(data, {"seed": recipe.seed, **own}, data_root)
    found = other.split(split)
    labelled = found.class_names == home.class_names
    place = chosen_device(device)
    net = _network(recipe, home, run, state, place)
    with machine(recipe, place):
        transform = home.transform_for("test" if split not in home.splits else split)
        source = evaluation_source(found, transform, recipe, place, resident=other.resident)
        name = split if data == recipe.data else f"{data}-{split}"
        made = predictions_of(
            net, source, recipe, device=place, split=name, class_names=home.class_names, labelled=labelled
        )
    path = run.predictions_file(f"{state}-{name}") if out is None else Path(out)
    made.save(path)
    return path


def _built(name: str, options: dict[str, Any], root: str | Path | None) -> AbstractDataset:
    return build_data(name, **options) if root is None else build_data(name, root=root, **options)


def _network(recipe: Recipe, data: AbstractDataset, run: Run, state: str, device: torch.device) -> WithFeatures:
    options = {name: value for name, value in recipe.model_options.items() if name != "pretrained"}
    model = build_model(recipe.model, data.num_classes, **options)
    saved = checkpoint.load(run.checkpoint)
    weights = saved["best" if state == "best" else "model"]
    if not weights:
        raise RunError(f"{run.checkpoint} holds no {state} weights yet")
    checkpoint.restore_module(model, weights)
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return WithFeatures(model.to(device, memory_format=layout))  # type: ignore[call-overload]
