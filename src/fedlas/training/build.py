"""How a session is built: network, loss, optimizer and step of a recipe, and what a later session can reuse of them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fedlas import ranks
from fedlas.catalog import keywords
from fedlas.data import CATALOG as DATA
from fedlas.data import AbstractDataset, Resident, Sample
from fedlas.losses import CATALOG as LOSSES
from fedlas.losses import AbstractLoss, build_loss
from fedlas.models import Output, WithFeatures, build_model
from fedlas.training.capture import StepExecutor
from fedlas.training.checkpoint import restore_module
from fedlas.training.compilation import CompiledCall, has_failed
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.mixup import Mixer
from fedlas.training.optimizer import OptimizerStep, StepFunction, build_optimizer, reset_optimizer_state
from fedlas.training.prediction import Source
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import RunError
from fedlas.training.schedule import lr_table
from fedlas.training.step import Parts, TrainStep

if TYPE_CHECKING:
    from fedlas.training.accelerators.base import Accelerator

# Fields of a recipe on which a captured step does not depend: their values are in tensors that can be refilled.
FIELDS_NOT_CAPTURED = (
    "seed",
    "splits",
    "ood",
    "checkpoint_every",
    "workers",
    "cache",
    "tensorboard",
    "eval_batch_size",
)
NETWORK = (
    "model", "model_options", "head", "precision", "channels_last", "compile", "sync_batchnorm", "deterministic",
    "custom_kernels",
)  # fmt: skip
COMPILER = {"combo_kernels": True}  # one kernel for the casts of all weights, and the like


@dataclass
class Network:
    """A network on the device, and how it is called: as it is, or compiled."""

    recipe: Recipe
    num_classes: int
    net: WithFeatures
    call: Callable[..., Output]
    accelerator: "Accelerator | None"

    def fits(self, recipe: Recipe, num_classes: int) -> bool:
        """Return whether a recipe can train this network with new weights."""
        same = all(getattr(self.recipe, name) == getattr(recipe, name) for name in NETWORK)
        return same and not has_failed(self.call) and num_classes == self.num_classes and ranks.count() == 1


@dataclass
class Step:
    """A step with its loss and training data, perhaps captured."""

    recipe: Recipe
    samples: int
    capture: bool
    train: Source
    execute: StepExecutor

    def fits(self, recipe: Recipe, samples: int, *, capture: bool) -> bool:
        """Return whether a recipe differs only in what can be refilled; never with several processes."""
        own, other = self.recipe.to_dict(), recipe.to_dict()
        same = all(own[name] == other[name] for name in own if name not in FIELDS_NOT_CAPTURED)
        return same and (samples, capture) == (self.samples, self.capture) and ranks.count() == 1


class SessionCache:
    """What the next session can reuse of the previous one: a compiled network, a captured step."""

    def __init__(self) -> None:
        self.network: Network | None = None
        self.step: Step | None = None

    def find_network(self, recipe: Recipe, num_classes: int) -> Network | None:
        """Return the network of the previous session if it fits."""
        found = self.network
        return found if found is not None and found.fits(recipe, num_classes) else None

    def find_step(self, recipe: Recipe, network: Network | None, samples: int, *, capture: bool) -> Step | None:
        """Return the step of the previous session if it trains this network and fits."""
        found = self.step
        if found is None or network is None or found.execute.step.parts.net is not network.net:
            return None
        return found if found.fits(recipe, samples, capture=capture) else None


def is_compiled(recipe: Recipe, device: torch.device) -> bool:
    """Return whether network and loss are compiled."""
    return recipe.compile and device.type == "cuda"


def load_accelerator(recipe: Recipe, device: torch.device) -> "Accelerator | None":
    """Return the custom kernels, if they are installed, switched on and made for this run.

    Callbacks that see each step prevent its capture, but they do not change the kernels.
    """
    if not (is_compiled(recipe, device) and recipe.custom_kernels and ranks.count() == 1):
        return None
    try:
        from fedlas.training.accelerators.kernels import CustomKernels  # noqa: PLC0415
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name in ("triton", "torchvision") or name.startswith("fedlas.training.accelerators"):
            return None
        raise
    return CustomKernels(device)


def build_network(recipe: Recipe, model: nn.Module, num_classes: int, device: torch.device) -> Network:
    """Move a network to the device, accelerate or compile it."""
    if recipe.sync_batchnorm and ranks.count() > 1:
        model = with_sync_batchnorm(model, device)
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    model = model.to(device, memory_format=layout)  # type: ignore[call-overload]
    accelerator = load_accelerator(recipe, device)
    accelerated = accelerator.prepare_model(model) if accelerator is not None and recipe.channels_last else None
    net = WithFeatures(model if accelerated is None else accelerated, recipe.head)
    call: Callable[..., Output] = net
    if accelerated is None and is_compiled(recipe, device):
        # Apart from the loss, so that runs with other losses need not compile the network again.
        call = CompiledCall(net, fullgraph=True, dynamic=False, options=COMPILER)
    return Network(recipe, num_classes, net, call, accelerator)


def with_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a network whose batch norms share their statistics between processes."""
    if device.type != "cuda":
        raise RunError("sync_batchnorm needs GPUs: torch shares statistics between processes only there")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def build_recipe_loss(recipe: Recipe, samples: int, num_classes: int) -> AbstractLoss:
    """Build the loss of a recipe; it gets the number of samples and of epochs where it takes them."""
    options: dict[str, Any] = dict(recipe.loss_options)
    for name, size in (("num_samples", samples), ("epochs", recipe.epochs)):
        if name in keywords(LOSSES.find(recipe.loss)):
            options.setdefault(name, size)
    return build_loss(recipe.loss, num_classes=num_classes, **options)


def build_step(
    recipe: Recipe, network: Network, loss: AbstractLoss, train: Source, samples: int, *, capture: bool
) -> Step:
    """Build optimizer and step."""
    device = next(network.net.parameters()).device
    loss = loss.to(device)
    call_loss: Callable[..., Tensor] = loss
    feed: Callable[..., Sample] = BatchAssembly(train)
    if is_compiled(recipe, device):
        call_loss = CompiledCall(loss, fullgraph=True, dynamic=False)
        if isinstance(train, Resident):
            feed = CompiledCall(BatchAssembly(train), fullgraph=True, dynamic=False)
    task: nn.Module = Task(network.net, loss, network.call, call_loss)
    if ranks.count() > 1:
        task = DistributedDataParallel(task, device_ids=[device.index] if device.type == "cuda" else None)
    table = lr_table(recipe, steps_per_epoch(recipe, samples))
    mixer = Mixer(recipe, len(table), network.num_classes, device)
    optimizer, rates = build_optimizer(recipe, network.net, loss, table, device)
    plain = OptimizerStep(recipe, network.net, loss, optimizer, rates)
    optimizer_step: StepFunction = plain
    sums = precompile = None
    if network.accelerator is not None:
        optimizer_step = network.accelerator.optimizer_step(plain, network.net.model)
        precompile = network.accelerator.precompile(network.net.model)
        sums = None if optimizer_step is plain else network.accelerator.epoch_sums
    parts = Parts(
        task, network.net, loss, network.call, call_loss, feed, mixer, plain, optimizer_step, precompile
    )  # fmt: skip
    step = TrainStep(parts, EpochMetrics(device, sums), GateStatistics(loss, samples, device, sums))
    return Step(recipe, samples, capture, train, StepExecutor(step, capture=capture))


def reset_step(found: Step, recipe: Recipe, loss: AbstractLoss, num_classes: int) -> Step:
    """Start a run that differs in its seed, in place: a captured step stays valid."""
    step = found.execute.step
    restore_module(step.parts.loss, loss.state_dict())
    reset_optimizer_state(step.parts.plain.optimizer)
    mixer = Mixer(recipe, len(step.parts.plain.rates.table), num_classes, step.device)
    step.parts.mixer.table.copy_(mixer.table)
    step.count.zero_()
    step.first_bad.fill_(-1)
    for part in (step.scaler, step.metrics, step.gate):
        part.reset()
    return Step(recipe, found.samples, found.capture, found.train, found.execute)


def steps_per_epoch(recipe: Recipe, samples: int) -> int:
    """Return the number of batches of an epoch."""
    return samples // recipe.batch_size if recipe.drop_last else -(-samples // recipe.batch_size)


class Task(nn.Module):
    """Network and loss in one module, called as they are or compiled.

    Args:
        net: the network.
        loss: the loss.
        call_net: the network or its compiled form.
        call_loss: the loss or its compiled form.
    """

    def __init__(
        self, net: WithFeatures, loss: AbstractLoss, call_net: Callable[..., Output], call_loss: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.calls = call_net, call_loss  # in a tuple, which registers no module a second time
        # DistributedDataParallel broadcasts all other buffers in every step.
        self._ddp_params_and_buffers_to_ignore = [f"loss.{name}" for name in loss.identical_buffers]

    def forward(self, inputs: Tensor, labels: Tensor, index: Tensor | None = None) -> tuple[Tensor, Output]:
        """Return the loss of a batch and the output of the network."""
        call_net, call_loss = self.calls
        output = call_net(inputs)
        return call_loss(output.logits, labels, features=output.features, index=index), output


class BatchAssembly(nn.Module):
    """Makes a batch of what `Session.batches` yields; for images that live on the device this is part of the step.

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


@torch.no_grad()
def check_image_size(model: nn.Module, recipe: Recipe, data: AbstractDataset) -> None:
    """Run the network on one black image, so that a wrong size is known before anything is trained."""
    transform = data.transform_for("train")
    shape = transform.channels, transform.size, transform.size
    was_training = model.training
    try:
        wrapped = WithFeatures(model, recipe.head)
        wrapped.eval()(torch.zeros(1, *shape))
        wrapped.unwrap()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "head=" in reason:
            raise RunError(f"{recipe.model}: {reason}; in a recipe, head=PATH does that") from error
        options = ["model_options.in_channels", "the network's own keywords for the size of images"]
        if "image_size" in keywords(DATA.find(recipe.data)):
            options.insert(1, "data_options.image_size")
        raise RunError(
            f"{recipe.model} does not accept images of {' x '.join(map(str, shape))}, as {recipe.data} has them here "
            f"({reason}); set {', or '.join(options)}, or choose another --model"
        ) from error
    model.train(was_training)


def build_recipe_model(recipe: Recipe, data: AbstractDataset) -> nn.Module:
    """Build the network of a recipe and check that it accepts the images."""
    model = build_model(recipe.model, data.num_classes, **recipe.model_options)
    check_image_size(model, recipe, data)
    return model


def check_batch_size(recipe: Recipe, samples: int, world: int) -> None:
    """Check that all ranks get equally many samples in each step; some losses and statistics need that."""
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
    """Return the requested device, by default a GPU if there is one; each of several processes has its own."""
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
