"""Session of a run: data, network, loss, optimizer and step of one recipe, on the device.

The next session can reuse a compiled network, whose weights are replaced in place. If only the seed changes, it reuses
the captured step too, with new data, weights and learning rates at the same addresses.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fedlas import ranks
from fedlas.catalog import keywords
from fedlas.data import CATALOG as DATA
from fedlas.data import AbstractDataset, Loader, Resident, Sample, build_data
from fedlas.data.base import Split, share_of_batch
from fedlas.data.base.fetching import Progress
from fedlas.data.base.images import Transform
from fedlas.data.base.keyed import order
from fedlas.losses import CATALOG as LOSSES
from fedlas.losses import AbstractLoss, build_loss
from fedlas.models import WithFeatures, WithLoss, build_model
from fedlas.predictions import check_distinct
from fedlas.training.capture import StepExecutor
from fedlas.training.checkpoint import UNFIT, restore_module
from fedlas.training.distributed import gather_objects
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.mixup import Mixer
from fedlas.training.optimizer import build_optimizer, load_optimizer_state, optimizer_state, reset_optimizer_state
from fedlas.training.prediction import Source, evaluation_source, images_dtype, rank
from fedlas.training.random_state import random_state, restore_random_state, seed_everything
from fedlas.training.recipe import PUBLISHED, Recipe
from fedlas.training.run_folder import RunError
from fedlas.training.schedule import LearningRates, lr_table
from fedlas.training.step import Parts, TrainStep
from fedlas.training.validation import feedback_samples, with_first_half

# What a captured step does not depend on: it finds these in tensors that can be refilled.
REFILLED = ("seed", "splits", "ood", "checkpoint_every", "workers", "cache", "tensorboard", "eval_batch_size")
COMPILER = {"combo_kernels": True}  # casts of all weights in one kernel, and the like
NETWORK = (
    "model",
    "model_options",
    "precision",
    "channels_last",
    "compile",
    "sync_batchnorm",
    "deterministic",
    "custom_kernels",
)


class Session:
    """Everything that a recipe needs on the device.

    Args:
        recipe: the recipe.
        device: where to train.
        data_root: where data lies.
        capture: whether the step may be captured.
        before: the session of the recipe before, of which this one takes over what fits.
        progress: told about files of the data that are fetched.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        data_root: str | Path | None = None,
        *,
        capture: bool = True,
        before: "Session | None" = None,
        progress: Progress | None = None,
    ) -> None:
        self.recipe, self.device = recipe, device
        self._common = {"progress": progress} | ({} if data_root is None else {"root": data_root})
        self.world = ranks.count()
        self.data = build_data(recipe.data, seed=recipe.seed, **self._common, **recipe.data_options)
        self._foreign: dict[str, AbstractDataset] = {}
        self.capture = capture and recipe.capture and self.world == 1
        self.epoch, self.position = 0, 0  # finished epochs, and steps of the next one
        self.best: dict[str, Tensor] = {}
        self.best_epoch, self.best_accuracy = 0, -1.0
        split = self.data.split("train")
        if recipe.train_on_v1:
            split = with_first_half(split, self.data.split("val"))
        self.samples = len(split)
        alike = before if before is not None and self._step_fits(before) else None
        self._place_training_data(split, alike)
        seed_everything(recipe.seed)
        if self.data.num_classes < 2:
            raise RunError(f"{self.data.title} has one class, {self.data.class_names[0]!r}; a classifier needs two")
        try:
            check_distinct(self.data.class_names)
        except ValueError as error:  # predictions would be refused after the training
            raise RunError(f"{self.data.title}: {error}") from error
        fresh = build_model(recipe.model, self.data.num_classes, **recipe.model_options)
        self._try(fresh)
        fresh_loss = self._drawn_loss()
        if before is not None and self._network_fits(before):
            self.net: WithFeatures = before.net
            restore_module(self.net.model, fresh.state_dict())
        else:
            self.net = self._prepared(fresh)
        if alike is not None:
            self._take_over(alike, fresh_loss)
        else:
            self._assemble(fresh_loss)
        if self.world > 1:
            seed_everything(recipe.seed + 7919 * rank())  # dropout shall differ between ranks

    @torch.no_grad()
    def _try(self, model: nn.Module) -> None:
        """Show the network one black image, so that one of a wrong size is known before anything is trained."""
        transform = self.data.transform_for("train")
        shape = transform.channels, transform.size, transform.size
        was_training = model.training
        try:
            seen = WithFeatures(model, self.recipe.head)
            seen.eval()(torch.zeros(1, *shape))
            seen.unwrap()
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if "head=" in reason:
                raise RunError(f"{self.recipe.model}: {reason}; in a recipe, head=PATH does that") from error
            words = ["model_options.in_channels", "the network's own keywords for the size of images"]
            if "image_size" in keywords(DATA.find(self.recipe.data)):
                words.insert(1, "data_options.image_size")
            raise RunError(
                f"{self.recipe.model} cannot look at images of {' x '.join(map(str, shape))}, which "
                f"{self.recipe.data} has here ({reason}); set {', or '.join(words)}, or choose another --model"
            ) from error
        model.train(was_training)

    def _network_fits(self, before: "Session") -> bool:
        same = all(getattr(before.recipe, name) == getattr(self.recipe, name) for name in (*NETWORK, "head"))
        return same and self.world == 1 and before.data.num_classes == self.data.num_classes

    def _step_fits(self, before: "Session") -> bool:
        """Say whether the step of a session can go on with this one's data; not with several processes.

        DistributedDataParallel is wrapped around one network for good.
        """
        mine, theirs = self.recipe.to_dict(), before.recipe.to_dict()
        same = all(mine[name] == theirs[name] for name in mine if name not in REFILLED)
        return same and self.world == 1 and before.capture == self.capture and before.samples == self.samples

    def _drawn_loss(self) -> AbstractLoss:
        options: dict[str, Any] = dict(self.recipe.loss_options)
        for name, size in (("num_samples", self.samples), ("epochs", self.recipe.epochs)):
            if name in keywords(LOSSES.find(self.recipe.loss)):
                options.setdefault(name, size)
        return build_loss(self.recipe.loss, num_classes=self.data.num_classes, **options)

    def _prepared(self, model: nn.Module) -> WithFeatures:
        if self.recipe.sync_batchnorm and self.world > 1:
            model = _with_shared_statistics(model, self.device)
        layout = torch.channels_last if self.recipe.channels_last else torch.contiguous_format
        net = WithFeatures(model.to(self.device, memory_format=layout), self.recipe.head)  # type: ignore[call-overload]
        # Who looks on decides whether a step is captured, but never by which kernels a network trains.
        fits = self.recipe.custom_kernels and self.recipe.channels_last and self.world == 1
        if self.compiled and not (fits and _fused(net.model, self.device)):
            # Apart from the loss, so that runs with other losses need not compile the network again.
            net.compile(fullgraph=True, dynamic=False, options=COMPILER)
        return net

    @property
    def compiled(self) -> bool:
        """Whether the loss is compiled, and the network, unless it has kernels of our own."""
        return self.recipe.compile and self.device.type == "cuda"

    def _assemble(self, loss: AbstractLoss) -> None:
        self.loss = loss.to(self.device)
        if self.compiled:
            self.loss.compile(fullgraph=True, dynamic=False)
        task: nn.Module = WithLoss(self.net, self.loss)
        if self.world > 1:
            devices = [self.device.index] if self.device.type == "cuda" else None
            task = DistributedDataParallel(task, device_ids=devices)
        table = lr_table(self.recipe, self.steps_per_epoch)
        optimizer, rates = build_optimizer(self.recipe, self.net, self.loss, table, self.device)
        mixer = Mixer(self.recipe, len(table), self.data.num_classes, self.device)
        feed = BatchAssembly(self.train)
        if self.compiled and isinstance(self.train, Resident):
            feed.compile(fullgraph=True, dynamic=False)
        alone = self.compiled and self.world == 1 and self.recipe.custom_kernels
        fused_step = _fused_step(self.recipe, self.loss, optimizer, rates) if alone else None
        precompilation = _precompilation(self.net.model, self.device) if alone else None
        parts = Parts(task, self.net, self.loss, optimizer, rates, feed, mixer, fused_step, precompilation)
        watch = GateStatistics(self.loss, self.samples, self.device, None if fused_step is None else fused_step.watch)
        self.step = TrainStep(self.recipe, parts, watch, self.device)
        self.execute = StepExecutor(self.step, capture=self.capture)

    def _take_over(self, before: "Session", loss: AbstractLoss) -> None:
        """Go on with the step of a recipe that differs in its seed only."""
        self.loss, self.step, self.execute = before.loss, before.step, before.execute
        restore_module(self.loss, loss.state_dict())
        reset_optimizer_state(self.step.parts.optimizer)
        mixer = Mixer(self.recipe, len(before.step.parts.rates.table), self.data.num_classes, self.device)
        self.step.parts.mixer.table.copy_(mixer.table)
        self.step.recipe = self.recipe
        self.step.reset()

    def _place_training_data(self, split: Split, before: "Session | None") -> None:
        recipe = self.recipe
        _check_shares(recipe, self.samples, self.world)
        transform = self.data.transform_for("train")
        shared: dict[str, Any] = {
            "train": True,
            "seed": recipe.seed,
            "device": self.device,
            "dtype": images_dtype(recipe),
            "channels_last": recipe.channels_last,
            "cache": recipe.cache,
        }
        if before is not None and isinstance(before.train, Resident):
            self.train: Source = before.train
            self.train.refill(split, recipe.seed)
        elif self.data.resident:
            self.train = Resident(split, transform, **shared)
        else:
            self.train = Loader(
                split,
                transform,
                batch_size=recipe.batch_size,
                drop_last=recipe.drop_last,
                rank=rank(),
                world=self.world,
                workers=recipe.workers,
                **shared,
            )

    @property
    def steps_per_epoch(self) -> int:
        """How many batches an epoch has."""
        rows = self.recipe.batch_size
        return self.samples // rows if self.recipe.drop_last else -(-self.samples // rows)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Go through the inputs of the steps of an epoch, from some step on."""
        if isinstance(self.train, Resident):
            self.train.set_epoch(epoch)
            for whole in self.batches_of_places(epoch)[start:]:
                yield (share_of_batch(whole, rank(), self.world),)
        else:
            self.train.set_epoch(epoch, start)
            for sample in self.train:
                yield tuple(sample)

    def batches_of_places(self, epoch: int) -> tuple[Tensor, ...]:
        """Give the positions in the training split of every batch of an epoch, over all ranks."""
        places: Tensor = order(self.samples, self.recipe.seed, epoch, self.device)
        return tuple(places.split(self.recipe.batch_size))[: self.steps_per_epoch]

    def evaluation(self, split: str) -> Source:
        """Make a split of the run's own data ready to be looked at; "test-published" as the published code does."""
        name = split.removesuffix(PUBLISHED)
        transform = self.data.transform_for(name)
        if name != split:
            transform = self._published_transform(self.recipe.data, transform)
        return evaluation_source(
            self.data.split(name), transform, self.recipe, self.device, resident=self.data.resident
        )

    def feedback(self) -> Source:
        """Make as many training samples ready as feedback takes of the validation split, without augmentation."""
        count = len(self.data.split("val")) // (2 if self.recipe.halve_validation else 1)
        split = feedback_samples(self.data.split("train"), count)
        transform = self.data.transform_for("train")
        return evaluation_source(split, transform, self.recipe, self.device, resident=self.data.resident)

    def foreign(self, name: str) -> Source:
        """Make the test split of other data ready, with the transform that this network's test images get.

        "cifar100-published" passes through the transform that the published code has for that data instead.
        """
        data, transform = self.foreign_data(name), self.data.transform_for("test")
        if name.endswith(PUBLISHED):
            transform = self._published_transform(name.removesuffix(PUBLISHED), transform)
        return evaluation_source(data.split("test"), transform, self.recipe, self.device, resident=data.resident)

    def _published_transform(self, name: str, usual: Transform) -> Transform:
        """Give the transform of the published code for a data set's test images, which has to be another one."""
        options = self.recipe.data_options if name == self.recipe.data else {}
        found = build_data(name, seed=self.recipe.seed, **self._common, **{**options, **DATA.find(name).published})
        transform = found.transform_for("test")
        if transform == usual:
            raise RunError(f"the published code looks at the test images of {name} as we do; leave out {PUBLISHED}")
        return transform

    def foreign_data(self, name: str) -> AbstractDataset:
        """Give a foreign data set by its name, however its images are looked at."""
        name = name.removesuffix(PUBLISHED)
        if name not in self._foreign:
            if "path" in keywords(DATA.find(name)):
                raise RunError(
                    f"ood={name} does not say which images; see: fedlas predict RUN --data {name} --set path="
                )
            self._foreign[name] = build_data(name, **self._common)
        return self._foreign[name]

    @property
    def validates_on_test(self) -> bool:
        """Whether the images that epochs are selected by are those of the test split."""
        return self.data.selection == "official"

    def check(self) -> None:
        """Find what would be missing at the end of the run, before it begins."""
        for name in dict.fromkeys(("val", *self.recipe.splits)):
            if not len(self.data.split(name.removesuffix(PUBLISHED))):
                raise RunError(f"the {name} split of {self.data.title} is empty")
        for name in self.recipe.ood:
            self.foreign_data(name).split("test")
        for name in (*self.recipe.splits, *self.recipe.ood):
            if name.endswith(PUBLISHED):
                data = name.removesuffix(PUBLISHED).replace("test", self.recipe.data)
                self._published_transform(data, self.data.transform_for("test"))
        if self.validates_on_test and self.loss.needs_validation:
            raise RunError(
                f"{self.recipe.loss} learns from validation data, which selection=official takes from the test split; "
                "set data_options.selection=held_out"
            )

        if self.recipe.train_on_v1 and self.loss.needs_validation:
            raise RunError(f"{self.recipe.loss} learns from V1, so that it cannot train on it; leave out train_on_v1")

    def close(self) -> None:
        """End the processes that read images, and leave the other processes of the run: this is its last use."""
        if isinstance(self.train, Loader):
            self.train.close()
        if self.world > 1:
            self.step.parts.task = WithLoss(self.net, self.loss)  # the wrapper would keep the group and its threads

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
        """Return all state of the run, for a checkpoint; all ranks have to call it."""
        return {
            "recipe": self.recipe.key,
            "epoch": self.epoch,
            "position": self.position,
            "model": self.net.model.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": optimizer_state(self.step.parts.optimizer),
            "step": self.step.state(),
            "random": gather_objects(random_state(self.device)),
            "best": self.best,
            "best_epoch": self.best_epoch,
            "best_accuracy": self.best_accuracy,
        }

    def load_state_dict(self, state: dict[str, Any], path: Path | None = None) -> None:
        """Continue from a saved state, in place; errors name the file that it is from."""
        try:
            restore_module(self.net.model, state["model"])
            restore_module(self.loss, state["loss"])
            load_optimizer_state(self.step.parts.optimizer, state["optimizer"])
            self.step.restore(state["step"], first=rank() == 0)
        except UNFIT as error:
            name, reason = path or "the checkpoint", " ".join(str(error).split())
            raise RunError(
                f"{name} does not fit the network and data of today; has the data changed? ({reason})"
            ) from error
        self.epoch, self.position = state["epoch"], state["position"]
        self.best = {name: value.to(self.device) for name, value in state["best"].items()}
        self.best_epoch, self.best_accuracy = state["best_epoch"], state["best_accuracy"]

    def load_random_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore the random state of this rank, if it was saved."""
        if rank() < len(states):
            restore_random_state(states[rank()], self.device)


class BatchAssembly(nn.Module):
    """Makes a batch of what `Session.batches` gives; for images that live on the device this is part of the step.

    Args:
        source: of the training data.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def forward(self, *inputs: Tensor) -> Sample:
        """Make images, labels and positions of the inputs of a step."""
        if isinstance(self.source, Resident):
            (places,) = inputs
            return Sample(self.source.batch(places), self.source.labels[places], places)
        return Sample(*inputs)


def _fused(model: nn.Module, device: torch.device) -> bool:
    """Use the custom kernels for a residual network, if they fit; it is then not compiled."""
    try:
        from fedlas.training.accelerators import batch_norm, resnet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        _check_optional(error)
        return False
    if not resnet.fits(model):
        return False
    reason = batch_norm.why_not(device)
    if reason is not None:
        warnings.warn(f"custom kernels cannot be used, torch.compile is used instead: {reason}", stacklevel=2)
        return False
    return resnet.fuse(model)


def _fused_step(recipe: Recipe, loss: nn.Module, optimizer: torch.optim.Optimizer, rates: LearningRates) -> Any:
    """Build the fused optimizer step, if it fits."""
    try:
        from fedlas.training.accelerators.optimizer_step import FusedOptimizerStep, fits  # noqa: PLC0415
    except ModuleNotFoundError as error:
        _check_optional(error)
        return None
    return FusedOptimizerStep(recipe, loss, optimizer, rates) if fits(recipe, optimizer, rates.table.device) else None


def _precompilation(model: nn.Module, device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    """Return a context that pre-compiles the custom kernels of a network in parallel, if any."""
    try:
        from fedlas.training.accelerators import precompile, resnet  # noqa: PLC0415
    except ModuleNotFoundError as error:
        _check_optional(error)
        return None
    # The compiler, whose turn comes after the network's, takes seconds to be loaded.
    compiler = partial(import_module, "torch._inductor.compile_fx")
    return partial(precompile.precompilation, device, compiler) if isinstance(model, resnet.FusedResNet) else None


def _check_optional(error: ModuleNotFoundError) -> None:
    """Raise an import error of the custom kernels unless they, Triton or torchvision are not installed."""
    if (error.name or "") not in ("triton", "torchvision", "fedlas.training.accelerators"):
        raise error


def _with_shared_statistics(model: nn.Module, device: torch.device) -> nn.Module:
    if device.type != "cuda":
        raise RunError("sync_batchnorm needs GPUs: torch shares statistics between processes only there")
    shared: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return shared


def _check_shares(recipe: Recipe, samples: int, world: int) -> None:
    """Make sure that all ranks get equally many samples in each step; some losses and statistics need that."""
    if samples < recipe.batch_size and recipe.drop_last:
        raise RunError(f"{samples} training samples do not fill one batch of {recipe.batch_size}; lower batch_size")
    parts = f"{world} processes" + (f" with {recipe.accumulate} parts each" if recipe.accumulate > 1 else "")
    shares = world * recipe.accumulate
    if recipe.batch_size % shares:
        raise RunError(
            f"{parts} cannot share a batch of {recipe.batch_size} evenly; change batch_size to a multiple of {shares}"
        )
    last = 0 if recipe.drop_last else samples % recipe.batch_size
    if last % world:
        raise RunError(f"{parts} cannot share the last batch of an epoch, {last} samples, evenly; set drop_last=true")


def select_device(device: str | torch.device | None = None) -> torch.device:
    """Take the device that was asked for, else a GPU if there is one; with several processes each has its own."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise RunError(f"device is {device!r}; it has to be cpu, cuda or cuda:NUMBER") from None
    if found.type not in ("cpu", "cuda"):
        raise RunError(f"device is {device}; it has to be cpu, cuda or cuda:NUMBER")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RunError("device is cuda, but torch sees no GPU here")
    if found.type == "cuda" and found.index is not None and found.index >= torch.cuda.device_count():
        raise RunError(f"device is {device}, but torch sees {torch.cuda.device_count()} GPUs here")
    if str(found) == "cuda":
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return found
