"""Measure every loss in three small situations, for docs/howto/choose_a_method.md.

Handwritten digits and `small_cnn`, so that it takes minutes on a CPU: `python benchmarks/choosing.py`. Each loss has
its default keywords, and nothing was searched. The epoch is the one with the best validation accuracy, the
temperature is fitted on the validation split, and all numbers are of the 797 test images, one for each seed.

    enough       all 800 training images, 15 epochs: nearly all predictions are correct
    overfitting  40 images, 60 epochs, no weight decay: low accuracy, and plain cross-entropy is over-confident (the
                 recipe of `make demo`, whose settings were chosen for this)
    noise        800 images, 30 % of the training labels wrong: networks become under-confident on clean labels

The numbers are written to benchmarks/choosing.json, and `scripts/pages` makes the tables of them.
"""

import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedlas.evaluation import evaluate
from fedlas.losses import list_losses
from fedlas.metrics import bootstrap, ece
from fedlas.training import Recipe, fit_many, recipe_for

SEEDS = (1, 2, 3, 4, 5)
SITUATIONS: dict[str, dict[str, Any]] = {
    "enough": {},
    "overfitting": {
        "epochs": 60,
        "batch_size": 10,
        "lr": 0.2,
        "weight_decay": 0.0,
        "data_options": {"train_samples": 40},
    },
    "noise": {"data_options": {"label_noise": 0.3}},
}
BEFORE, AFTER = ("accuracy", "ece", "signed_ece", "nll"), ("ece", "nll")
OUT = Path(__file__).with_suffix(".json")


def recipes() -> Iterator[tuple[str, Recipe]]:
    """Yield every situation with each of its recipes."""
    for situation, changes in SITUATIONS.items():
        for record in list_losses():
            for seed in SEEDS:
                yield situation, recipe_for("digits", loss=record.name, seed=seed, deterministic=True, **changes)


def main() -> None:
    """Train, measure and write."""
    torch.set_num_threads(1)  # more threads are slower for a network of this size
    situations_and_recipes = list(recipes())
    measured: dict[str, dict[str, dict[str, list[float]]]] = {situation: {} for situation in SITUATIONS}
    with tempfile.TemporaryDirectory() as folder:
        runs = fit_many([recipe for _, recipe in situations_and_recipes], folder=folder)
        for (situation, recipe), run in zip(situations_and_recipes, runs, strict=True):
            report = evaluate(
                run.predictions("best-test"),
                posthoc=["temperature"],
                calibration=run.predictions("best-val"),
                intervals=False,
            )
            values = {name: float(report[name]) for name in BEFORE}
            values |= {f"{name}+temperature": float(report.after["temperature"][name]) for name in AFTER}
            interval = bootstrap(ece, run.predictions("best-test"), resamples=200)
            values["chance"] = float(interval.details["noise_floor"])
            values_of_seeds = measured[situation].setdefault(recipe.loss, {})
            for name, value in values.items():
                values_of_seeds.setdefault(name, []).append(round(value, 5))
            print(situation, recipe.loss, recipe.seed, values, flush=True)
    machine = f"{platform.machine()} CPU, torch {torch.__version__.partition('+')[0]}"
    OUT.write_text(json.dumps({"machine": machine, "seeds": SEEDS, "measured": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
