"""Build the parts of a session: network, loss, optimizer and step of a recipe."""

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fedlas import ranks
from fedlas.catalog import keywords
from fedlas.data import CATALOG as DATA
from fedlas.data import AbstractDataset, Resident, Sample, build_data
from fedlas.errors import UserError
from fedlas.losses import CATALOG as LOSSES
from fedlas.losses import AbstractLoss, build_loss
from fedlas.models import Output, WithFeatures, check_model
from fedlas.training.compilation import CompiledCall, first_line
from fedlas.training.distributed import wrap_in_ddp
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.mixup import Mixer
from fedlas.training.network_with_loss import NetworkWithLoss
from fedlas.training.optimizer import build_optimizer
from fedlas.training.prediction import Source
from fedlas.training.recipe import OFFICIAL_SUFFIX, Recipe
from fedlas.training.run_folder import RunError
from fedlas.training.schedule import lr_table
from fedlas.training.step import TrainStep

if TYPE_CHECKING:
    from fedlas.training.accelerators.base import Accelerator

COMPILE_OPTIONS = {"combo_kernels": True}  # for example one kernel for the casts of all weights


class Network(NamedTuple):
    """A network on the device, its callable (eager or compiled), and the custom kernels, if there are any."""

    net: WithFeatures
    call: Callable[..., Output]
    accelerator: "Accelerator | None" = None


def is_compiled(recipe: Recipe, device: torch.device) -> bool:
    """Return whether network and loss are compiled."""
    return recipe.compile and device.type == "cuda"


def load_accelerator(recipe: Recipe, device: torch.device) -> "Accelerator | None":
    """Return the custom kernels, if they are installed, enabled and support this run.

    Callbacks that see each step prevent its capture, but they do not change the kernels.
    """
    if not (is_compiled(recipe, device) and recipe.custom_kernels and ranks.count() == 1):
        return None
    try:
        from fedlas.training.accelerators.kernels import CustomKernels  # noqa: PLC0415
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name not in ("triton", "torchvision") and not name.startswith("fedlas.training.accelerators"):
            raise
        warnings.warn(f"training without custom kernels, which is slower: {name} is missing", stacklevel=2)
        return None
    return CustomKernels(device)


def build_network(recipe: Recipe, model: nn.Module, device: torch.device) -> Network:
    """Move a network to the device, accelerate or compile it."""
    if recipe.sync_batchnorm and ranks.count() > 1:
        model = with_sync_batchnorm(model, device)
    model = move_to_device(model, recipe, device)
    accelerator = load_accelerator(recipe, device)
    accelerated = accelerator.prepare_model(model) if accelerator is not None and recipe.channels_last else None
    net = WithFeatures(model if accelerated is None else accelerated, recipe.head)
    call: Callable[..., Output] = net
    if accelerated is None and is_compiled(recipe, device):
        # Separate from the loss, so that runs with other losses use the same compiler cache.
        call = CompiledCall(net, fullgraph=True, dynamic=False, options=COMPILE_OPTIONS)
    return Network(net, call, accelerator)


def move_to_device(model: nn.Module, recipe: Recipe, device: torch.device) -> nn.Module:
    """Move a network to a device, in the memory layout of the recipe."""
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    moved: nn.Module = model.to(device, memory_format=layout)  # type: ignore[call-overload]
    return moved


def with_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a network whose batch norms share their statistics between processes."""
    if device.type != "cuda":
        raise RunError("sync_batchnorm needs GPUs: torch shares statistics between processes only there")
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


def build_recipe_loss(recipe: Recipe, samples: int, num_classes: int) -> AbstractLoss:
    """Build the loss of a recipe; pass the numbers of samples and epochs if it has these options."""
    options: dict[str, Any] = dict(recipe.loss_options)
    for name, size in (("num_samples", samples), ("epochs", recipe.epochs)):
        if name in keywords(LOSSES.find(recipe.loss)):
            options.setdefault(name, size)
    return build_loss(recipe.loss, num_classes=num_classes, **options)


def check_parts(recipe: Recipe) -> None:
    """Raise if data set, network, loss or their options do not exist or fit together, before data is read."""
    build_data(recipe.data, seed=recipe.seed, **recipe.data_options)
    for name in recipe.ood:
        DATA.find(name.removesuffix(OFFICIAL_SUFFIX))
    check_model(recipe.model, **recipe.model_options)
    classes, weight = getattr(DATA.find(recipe.data), "num_classes", None), recipe.loss_options.get("weight")
    if not isinstance(classes, int):  # the classes of an image folder are counted when it is read
        classes = len(weight) if isinstance(weight, list) else 2
    with torch.random.fork_rng(devices=[]):
        loss = build_recipe_loss(recipe, samples=1, num_classes=classes)  # samples are counted when the data is read
    if (recipe.mixup or recipe.cutmix) and not loss.takes_soft_labels:
        raise UserError(f"{loss.name} takes one class number per sample; mixup and cutmix must be 0")


def build_step(
    recipe: Recipe, network: Network, loss: AbstractLoss, train: Source, samples: int, *, num_classes: int
) -> TrainStep:
    """Build optimizer and step."""
    device = next(network.net.parameters()).device
    call_loss: Callable[..., Tensor] = loss
    assemble_batch: Callable[..., Sample] = BatchAssembly(train)
    if is_compiled(recipe, device):
        call_loss = CompiledCall(loss, fullgraph=True, dynamic=False)
        if isinstance(train, Resident):
            assemble_batch = CompiledCall(BatchAssembly(train), fullgraph=True, dynamic=False)
    module = NetworkWithLoss(network.net, loss, network.call, call_loss)
    table = lr_table(recipe, steps_per_epoch(recipe, samples))
    mixer = Mixer(recipe, len(table), num_classes, device)
    optimizer, rates = build_optimizer(recipe, network.net, loss, table, device)
    fused_step = sums = None
    if network.accelerator is not None:
        fused_step = network.accelerator.optimizer_step(recipe, optimizer, rates, loss, network.net.model)
        sums = None if fused_step is None else network.accelerator.epoch_sums
    return TrainStep(
        recipe, assemble_batch, mixer, module, wrap_in_ddp(module, device), optimizer, rates,
        EpochMetrics(device, sums), GateStatistics(loss, samples, device, sums), fused_step,
    )  # fmt: skip


def steps_per_epoch(recipe: Recipe, samples: int) -> int:
    """Return the number of batches of an epoch."""
    return samples // recipe.batch_size if recipe.drop_last else -(-samples // recipe.batch_size)


class BatchAssembly(nn.Module):
    """Assembles a batch from the inputs that `Session.batches` yields; part of the step if images are on the device.

    Args:
        source: of the training data.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def forward(self, *inputs: Tensor) -> Sample:
        """Return images, labels and positions of a batch."""
        if isinstance(self.source, Resident):
            (positions,) = inputs
            return Sample(self.source.batch(positions), self.source.labels[positions], positions)
        return Sample(*inputs)


@torch.no_grad()
def check_image_size(model: nn.Module, recipe: Recipe, data: AbstractDataset) -> None:
    """Run the network on one black image, to detect a wrong size before training."""
    transform = data.transform_for("train")
    shape = transform.channels, transform.size, transform.size
    was_training = model.training
    try:
        wrapped = WithFeatures(model, recipe.head)
        wrapped.eval()(torch.zeros(1, *shape))
        wrapped.unwrap()
    except (RuntimeError, ValueError, AssertionError) as error:  # of torch, fedlas and timm, for a wrong shape
        reason = first_line(error)
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


def check_batch_size(recipe: Recipe, samples: int, world_size: int) -> None:
    """Raise if ranks would get different numbers of samples in a step; some losses and statistics need equal ones."""
    if samples < recipe.batch_size and recipe.drop_last:
        raise RunError(f"{samples} training samples do not fill one batch of {recipe.batch_size}; lower batch_size")
    parts = f"{world_size} processes" + (f" with {recipe.accumulate} parts each" if recipe.accumulate > 1 else "")
    shares = world_size * recipe.accumulate
    if recipe.batch_size % shares:
        raise RunError(
            f"{parts} cannot share a batch of {recipe.batch_size} evenly; change batch_size to a multiple of {shares}"
        )
    last = 0 if recipe.drop_last else samples % recipe.batch_size
    if last % world_size:
        raise RunError(f"{parts} cannot share the last batch of an epoch, {last} samples, evenly; set drop_last=true")


def select_device(device: str | torch.device | None = None) -> torch.device:
    """Return the requested device, by default a GPU if available; each local process has its own."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    unknown = RunError(f"device is {str(device)!r}; it has to be cpu, cuda or cuda:NUMBER")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise unknown from None
    if chosen.type not in ("cpu", "cuda"):
        raise unknown
    if chosen.type == "cpu":
        return chosen
    if not torch.cuda.is_available():
        raise RunError("device is cuda, but torch sees no GPU here")
    number = int(os.environ.get("LOCAL_RANK", "0")) if chosen.index is None else chosen.index
    if number >= torch.cuda.device_count():
        raise RunError(f"GPU {number} is needed, but torch sees {torch.cuda.device_count()} GPUs here, counted from 0")
    return torch.device("cuda", number)
