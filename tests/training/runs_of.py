"""Shared helpers of the training tests: short recipes, stops at a step, and comparisons of runs."""

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlas.training import AbstractCallback, Recipe, Run, StoppedError, fit, recipe_for
from fedlas.training.run_folder import MACHINE

SHORT = {
    "epochs": 3,
    "batch_size": 50,
    "deterministic": True,
    "data_options": {"train_samples": 330, "label_noise": 0.1},
    "model_options": {"width": 8},
}


def short(loss: str = "fedlas_ls", **changes: Any) -> Recipe:
    """A run of 3 epochs with 7 steps each, the last one of 30 samples."""
    return recipe_for("digits", loss=loss, **{**SHORT, **changes})


def natural_images(folder: Path, count: int = 30, seed: int = 0) -> Path:
    """Write coloured images of three classes, a folder each."""
    image, random = pytest.importorskip("PIL.Image"), np.random.default_rng(seed)
    for number, name in enumerate(("cat", "dog", "owl")):
        (folder / name).mkdir(parents=True)
        for position in range(count):
            pixels = random.integers(0, 200, (20, 20, 3)).astype(np.uint8)
            pixels[..., number] += 55
            image.fromarray(pixels).save(folder / name / f"{position}.png")
    return folder


def large(path: Path, loss: str = "fedlas_ls", **changes: Any) -> Recipe:
    """A run of 2 epochs with 9 steps each, on images that are read from files."""
    defaults = {"epochs": 2, "batch_size": 8, "workers": 2, "deterministic": True, "lr": 0.05}
    options = {"data_options": {"path": str(path), "image_size": 16}, "model_options": {"in_channels": 3, "width": 8}}
    return Recipe(data="folder", model="small_cnn", loss=loss, **{**defaults, **options, **changes})


class AtStep(AbstractCallback):
    """Calls a function with the session after a step."""

    sees_steps = True

    def __init__(self, step: int, act: Callable[[Any], object]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, session: Any, step: int) -> None:
        if step == self.step:
            self.act(session)


def signal_at(step: int, number: int = signal.SIGTERM) -> AtStep:
    """Send this process a signal after a step."""
    return AtStep(step, lambda _: signal.raise_signal(number))


def stop_at(step: int, recipe: Recipe, out: Path, number: int = signal.SIGTERM) -> StoppedError:
    """Train until a signal stops the run after a step, and return the error."""
    with pytest.raises(StoppedError) as error_info:
        fit(recipe, out=out, callbacks=[signal_at(step, number)])
    return error_info.value


def log_without_times(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != MACHINE} for record in run.log]


def prediction_bytes(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run.folder / "predictions").iterdir())}


def checkpoint_of(run: Run) -> dict[str, Any]:
    content = torch.load(run.checkpoint, weights_only=True)
    for generators in content["random"]:
        del generators["python"]  # beartype, which checks shapes in tests, draws from it
    return content


def assert_equal_runs(run: Run, expected: Run) -> None:
    """Compare predictions, logs and checkpoints bit for bit."""
    assert run.finished
    assert prediction_bytes(run) == prediction_bytes(expected)
    assert log_without_times(run) == log_without_times(expected)
    assert_same(checkpoint_of(run), checkpoint_of(expected))


def assert_same(first: Any, second: Any) -> None:
    """Compare the contents of two checkpoints, tensor by tensor."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for name in first:
            assert_same(first[name], second[name])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for first_item, second_item in zip(first, second, strict=True):
            assert_same(first_item, second_item)
    else:
        assert first == second or (
            isinstance(first, float) and math.isnan(first) and math.isnan(second)
        )  # the flip rate of the first epoch
