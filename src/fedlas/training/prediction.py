"""Compute the predictions of a network on a split: logits, labels, feature norm and index, the same on every rank.

Files contain no times and no paths, so equal runs write equal bytes. With several processes, each computes its own part
of the samples, and the parts are gathered without padding or duplicates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedlas import ranks
from fedlas.data.base import Split
from fedlas.data.base.images import Transform
from fedlas.data.loading import Loader
from fedlas.data.resident import Resident
from fedlas.models.base import WithFeatures
from fedlas.predictions import Predictions
from fedlas.training.precision import autocast, autocast_dtype
from fedlas.training.recipe import Recipe

Source: TypeAlias = Resident | Loader


def build_source(
    split: Split, transform: Transform, recipe: Recipe, device: torch.device, *, resident: bool, train: bool = False
) -> Source:
    """Return the batches of a split, shuffled and augmented for training; each rank gets its own samples."""
    options: dict[str, Any] = {
        "train": train,
        "seed": recipe.seed,
        "device": device,
        "dtype": autocast_dtype(recipe.precision) or torch.float32,  # the input type of the first layer
        "channels_last": recipe.channels_last,
        "cache": recipe.cache,
    }
    if resident:
        return Resident(split, transform, **options)
    return Loader(
        split,
        transform,
        batch_size=recipe.batch_size if train else recipe.eval_batch_size,
        drop_last=train and recipe.drop_last,
        rank=ranks.rank(),
        world=ranks.count(),
        workers=recipe.workers,
        **options,
    )


@torch.no_grad()
def predictions_of(
    net: WithFeatures,
    source: Source,
    recipe: Recipe,
    *,
    device: torch.device,
    split: str,
    class_names: tuple[str, ...],
    labelled: bool = True,
) -> Predictions:
    """Return the predictions of a network on all samples of a source; the last layer computes in float32.

    Args:
        net: the network; it is in evaluation mode during the call.
        source: the batches.
        recipe: precision and batch size.
        device: device of the network.
        split: name of the predictions.
        class_names: the classes that the network was trained on.
        labelled: whether the labels of the samples are classes of the network.
    """
    was_training = net.training
    net.eval()
    no_index = torch.zeros(0, dtype=torch.int64, device=device)
    # A rank may have no samples.
    rows = [(torch.zeros(0, len(class_names), device=device), torch.zeros(0, 1, device=device), no_index, no_index)]
    batches = (
        source.batches(recipe.eval_batch_size, rank=ranks.rank(), world=ranks.count())
        if isinstance(source, Resident)
        else source
    )
    with _float32_head(net):
        for images, labels, index in batches:
            with autocast(recipe.precision, device):
                # Not compiled: compilation would take longer than validation.
                logits, features = net.forward(images)
            norm = torch.linalg.vector_norm(features.flatten(1), 1, 1, keepdim=True, dtype=torch.float32)
            rows.append((logits.float(), norm, labels, index))
    net.train(was_training)
    logits, norm, labels, index = (gather_rows(torch.cat(parts)) for parts in zip(*rows, strict=True))
    known_labels = labels if labelled else None
    return Predictions(logits, known_labels, features=norm, index=index, class_names=class_names, split=split)


@contextmanager
def _float32_head(net: WithFeatures) -> Iterator[None]:
    """Compute the last layer in float32; in bf16, logits would have ties and confidences would be coarse."""

    def in_float32(head: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            logits: Tensor = head.forward(inputs[0].float())
            return logits

    hook = net.model.get_submodule(net.head_name).register_forward_hook(in_float32, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate the rows of all ranks in the order of the ranks; ranks may have different numbers of rows."""
    if ranks.count() == 1:
        return rows
    counts = ranks.stacked(torch.tensor(len(rows), device=rows.device)).tolist()
    padding = rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])
    parts = ranks.stacked(torch.cat([rows, padding]))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
