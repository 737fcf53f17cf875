"""Session: data, network, loss, optimizer, step and all mutable state of one run, on the device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlas import ranks
from fedlas.catalog import keywords
from fedlas.data import CATALOG as DATA
from fedlas.data import AbstractDataset, Loader, Resident, build_data
from fedlas.data.base import part_of_batch
from fedlas.data.base.images import Transform
from fedlas.data.base.keyed import order
from fedlas.models import WithFeatures, build_model
from fedlas.predictions import check_class_names
from fedlas.progress import Progress
from fedlas.training.build import (
    build_network,
    build_recipe_loss,
    build_step,
    check_batch_size,
    check_image_size,
    steps_per_epoch,
)
from fedlas.training.capture import StepRunner
from fedlas.training.checkpoint import RESTORE_ERRORS, check_position, invalid_checkpoint, restore_module
from fedlas.training.compilation import ran_out_of_memory
from fedlas.training.distributed import gather_objects
from fedlas.training.optimizer import load_optimizer_state, optimizer_state
from fedlas.training.prediction import Source, build_source
from fedlas.training.random_state import random_state, restore_random_state, seed_everything
from fedlas.training.recipe import OFFICIAL_SUFFIX, Recipe
from fedlas.training.run_folder import RunError
from fedlas.training.validation import feedback_samples, with_first_half


class Session:
    """All mutable state of a run.

    Args:
        recipe: the recipe.
        device: where to train.
        data_root: folder of the data sets.
        capture: whether the step may be captured in a CUDA graph.
        progress: called while files of the data are downloaded.

    Attributes:
        data: the data set.
        train_source: batches of the training split.
        net: the network.
        loss: the loss.
        step: the training step, with optimizer, learning rates, metrics and gate statistics.
        runner: runs the step, captured if possible.
        epoch: number of finished epochs.
        position: number of finished steps of the current epoch.
        steps_per_epoch: number of batches of an epoch.
        best: weights of the best epoch so far.
        best_epoch: its number, counted from 1; 0 before the first validation.
        best_accuracy: its validation accuracy.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        data_root: str | Path | None = None,
        *,
        capture: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.recipe, self.device = recipe, device
        self._data_options: dict[str, Any] = {"progress": progress, "root": data_root}
        self.data = build_data(recipe.data, seed=recipe.seed, **self._data_options, **recipe.data_options)
        self._ood_data: dict[str, AbstractDataset] = {}
        self._check_classes()
        split = self.data.split("train")
        if recipe.train_on_v1:
            split = with_first_half(split, self.data.split("val"))
        self.num_samples = len(split)
        self.steps_per_epoch = steps_per_epoch(recipe, self.num_samples)
        check_batch_size(recipe, self.num_samples, ranks.count())
        transform = self.data.transform_for("train")
        self.train_source = build_source(split, transform, recipe, device, resident=self.data.resident, train=True)

        seed_everything(recipe.seed)
        num_classes = self.data.num_classes
        model = build_model(recipe.model, num_classes, **recipe.model_options)
        check_image_size(model, recipe, self.data)
        self.loss = build_recipe_loss(recipe, self.num_samples, num_classes).to(device)
        network = build_network(recipe, model, device)
        self.net: WithFeatures = network.net
        self.step = build_step(recipe, network, self.loss, self.train_source, self.num_samples, num_classes=num_classes)
        self.runner = StepRunner(self.step, capture=capture and recipe.capture and ranks.count() == 1)
        if ranks.count() > 1:
            seed_everything(recipe.seed + 7919 * ranks.rank())  # dropout must differ between ranks

        self.epoch, self.position = 0, 0
        self.best: dict[str, Tensor] = {}
        self.best_epoch, self.best_accuracy = 0, -1.0

    def _check_classes(self) -> None:
        if self.data.num_classes < 2:
            raise RunError(f"{self.data.title} has one class, {self.data.class_names[0]!r}; a classifier needs two")
        try:
            check_class_names(self.data.class_names)
        except ValueError as error:  # predictions would be refused after the training
            raise RunError(f"{self.data.title}: {error}") from error

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the inputs of the steps of an epoch, from a step on."""
        if isinstance(self.train_source, Resident):
            self.train_source.set_epoch(epoch)
            for whole in self.batch_indices(epoch)[start:]:
                yield (part_of_batch(whole, ranks.rank(), ranks.count()),)
        else:
            self.train_source.set_epoch(epoch, start)
            for sample in self.train_source:
                yield tuple(sample)

    def batch_indices(self, epoch: int) -> tuple[Tensor, ...]:
        """Return the positions in the training split of each batch of an epoch, over all ranks."""
        indices: Tensor = order(self.num_samples, self.recipe.seed, epoch, self.device)
        return tuple(indices.split(self.recipe.batch_size))[: self.steps_per_epoch]

    def evaluation_source(self, split: str) -> Source:
        """Return a source of a split of the run's data; "test-published" uses the transform of the official code."""
        name = split.removesuffix(OFFICIAL_SUFFIX)
        transform = self.data.transform_for(name) if name == split else self._official_transform(self.recipe.data)
        return build_source(self.data.split(name), transform, self.recipe, self.device, resident=self.data.resident)

    def feedback_source(self) -> Source:
        """Return a source of training samples without augmentation, as many as feedback needs."""
        count = len(self.data.split("val")) // (2 if self.recipe.halve_validation else 1)
        split = feedback_samples(self.data.split("train"), count)
        transform = self.data.transform_for("train")
        return build_source(split, transform, self.recipe, self.device, resident=self.data.resident)

    def ood_source(self, name: str) -> Source:
        """Return a source of the test split of an OOD data set, with the transform of the in-distribution test images.

        "cifar100-published" uses the transform that the official code has for that data set.
        """
        data, transform = self.ood_data(name), self.data.transform_for("test")
        if name.endswith(OFFICIAL_SUFFIX):
            transform = self._official_transform(name.removesuffix(OFFICIAL_SUFFIX))
        return build_source(data.split("test"), transform, self.recipe, self.device, resident=data.resident)

    def _official_transform(self, name: str) -> Transform:
        """Return the transform of the official code for test images; raise if it equals the default one."""
        options = self.recipe.data_options if name == self.recipe.data else {}
        options = {**options, **DATA.find(name).official_options}
        data = build_data(name, seed=self.recipe.seed, **self._data_options, **options)
        transform = data.transform_for("test")
        if transform == self.data.transform_for("test"):
            raise RunError(
                f"the official code transforms the test images of {name} like fedlas; leave out {OFFICIAL_SUFFIX}"
            )
        return transform

    def ood_data(self, name: str) -> AbstractDataset:
        """Return an OOD data set by its name, with or without the suffix of its transform."""
        name = name.removesuffix(OFFICIAL_SUFFIX)
        if name not in self._ood_data:
            if "path" in keywords(DATA.find(name)):
                raise RunError(
                    f"ood={name} does not say which images; see: fedlas predict RUN --data {name} --set path="
                )
            self._ood_data[name] = build_data(name, **self._data_options)
        return self._ood_data[name]

    @property
    def validates_on_test(self) -> bool:
        """Whether epochs are selected on the test split."""
        return self.data.selection == "official"

    def check(self) -> None:
        """Raise before training if validation, feedback of the loss or the final predictions would fail."""
        for name in dict.fromkeys(("val", *self.recipe.splits)):
            if not len(self.data.split(name.removesuffix(OFFICIAL_SUFFIX))):
                raise RunError(f"the {name} split of {self.data.title} is empty")
        for name in self.recipe.ood:
            self.ood_data(name).split("test")
            if name.endswith(OFFICIAL_SUFFIX):
                self._official_transform(name.removesuffix(OFFICIAL_SUFFIX))
        if f"test{OFFICIAL_SUFFIX}" in self.recipe.splits:
            self._official_transform(self.recipe.data)
        if not self.loss.needs_validation:
            return
        if self.validates_on_test:
            raise RunError(
                f"{self.recipe.loss} learns from validation data, which selection=official takes from the test split; "
                "set data_options.selection=held_out"
            )
        if self.recipe.train_on_v1:
            raise RunError(f"{self.recipe.loss} learns from V1, so that it cannot train on it; leave out train_on_v1")

    def close(self) -> None:
        """Stop the worker processes of the loader, and release the process group."""
        if isinstance(self.train_source, Loader):
            self.train_source.close()
        self.step.parallel_module = self.step.module  # DistributedDataParallel keeps the process group and its threads

    @torch.no_grad()
    def update_best(self, accuracy: float) -> None:
        """Remember the weights of this epoch if its validation accuracy is strictly better than that of all before."""
        if accuracy <= self.best_accuracy:
            return
        self.best_epoch, self.best_accuracy = self.epoch + 1, accuracy
        for name, value in self.net.model.state_dict().items():
            if name in self.best:
                self.best[name].copy_(value)
            else:
                self.best[name] = value.clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint: all state of the run; all ranks have to call it."""
        return {
            "recipe": self.recipe.key,
            "epoch": self.epoch,
            "position": self.position,
            "model": self.net.model.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": optimizer_state(self.step.optimizer),
            "step": {
                "count": self.step.count,
                "scale": self.step.scaler.value,
                "good_steps": self.step.scaler.good_steps,
                "metrics": self.step.metrics.state_dict(),
                "gate": self.step.gate.state_dict(),
            },
            "random": gather_objects(random_state(self.device)),
            "best": self.best,
            "best_epoch": self.best_epoch,
            "best_accuracy": self.best_accuracy,
        }

    def load_state_dict(self, state: dict[str, Any], path: Path | None = None) -> None:
        """Continue from a saved state, in place; errors name the file that it is from."""
        name = path or "the checkpoint"
        try:
            check_position(state, name, self.recipe.epochs, self.steps_per_epoch)
            if state["best"]:
                restore_module(self.net.model, state["best"])  # raises if the weights do not fit
            restore_module(self.net.model, state["model"])
            restore_module(self.loss, state["loss"])
            load_optimizer_state(self.step.optimizer, state["optimizer"])
            self._load_step(state["step"])
        except RunError:
            raise
        except (LookupError, TypeError, AttributeError) as error:
            raise invalid_checkpoint(name, f"{type(error).__name__}: {error}") from error
        except RESTORE_ERRORS as error:
            if ran_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())
            raise RunError(f"{name} does not match the network or data; has the data changed? ({reason})") from error
        self.epoch, self.position = state["epoch"], state["position"]
        self.best = {name: value.to(self.device) for name, value in state["best"].items()}
        self.best_epoch, self.best_accuracy = state["best_epoch"], state["best_accuracy"]
        try:
            if ranks.rank() < len(state["random"]):  # fewer processes may have saved it
                restore_random_state(state["random"][ranks.rank()], self.device)
        except RESTORE_ERRORS as error:
            raise invalid_checkpoint(name, f"its random state: {error}") from error

    def _load_step(self, state: dict[str, Any]) -> None:
        """Restore the state of the step in place; a saved step is never bad."""
        self.step.count.copy_(state["count"])
        self.step.scaler.value.copy_(state["scale"])
        self.step.scaler.good_steps.copy_(state["good_steps"])
        self.step.metrics.load_state_dict(state["metrics"])
        self.step.gate.load_state_dict(state["gate"])
        self.step.first_bad.fill_(-1)
