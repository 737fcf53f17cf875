"""A split kept on the training device as uint8 images, with augmentation and normalisation there.

    padded uint8 images on the device ─► rows and columns of each crop ─► scale, shift

The augmentation has the distribution of torchvision's RandomCrop(size, padding) and RandomHorizontalFlip, but depends
only on (seed, epoch, sample), not on batch, rank or device. The draws of an epoch are made for all samples at once by
`set_epoch`, in place, so that `batch` is six small kernels with fixed shapes, without synchronisation, and can be
compiled or captured in a CUDA graph; a captured `batch` uses the new draws after `set_epoch` is called outside.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from fedlas.data.base import Sample, Split, part_of_batch
from fedlas.data.base.images import Transform, normalised
from fedlas.data.base.keyed import Number, crops, order


class Resident:
    """A split on a device, read in batches.

    Args:
        split: uint8 images, or image files, which are then decoded.
        transform: transform of the data set on which the network was trained, also for OOD images.
        train: whether to augment, and to visit the samples in a new order each epoch.
        seed: random seed of augmentation and order.
        device: device of the images.
        dtype: dtype of the returned images.
        channels_last: whether returned images have the channels-last memory layout.
        cache: a folder in which decoded images are cached.
    """

    def __init__(
        self,
        split: Split,
        transform: Transform,
        *,
        train: bool,
        seed: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        cache: str | Path | None = None,
    ) -> None:
        self.transform, self.train, self.cache = transform, train, cache
        self.device, self.dtype, self.channels_last = torch.device(device), dtype, channels_last
        self.seed = torch.full((), seed, dtype=torch.int64, device=device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.images, self.labels, self.index = self._placed(split)
        self._steps = torch.arange(transform.size, device=device)
        self._constants = transform.constants(device)
        # For each sample: first row, first column, and the direction of the columns (-1 if flipped).
        self._crops = torch.full((len(split), 3), transform.centre, dtype=torch.int64, device=device)
        self._crops[:, 2] = 1
        self.set_epoch(0)

    def __len__(self) -> int:
        return len(self.labels)

    def _placed(self, split: Split) -> tuple[Tensor, Tensor, Tensor]:
        images = split.decoded(self.transform, cache=self.cache).images
        assert isinstance(images, Tensor)
        # Channels last, so that a crop copies contiguous pixels.
        images = images.to(self.device).permute(0, 2, 3, 1)
        border = self.transform.pad if self.train else 0
        images = functional.pad(images, (0, 0, border, border, border, border)).contiguous()
        return images, split.labels.to(self.device), split.index.to(self.device)

    def set_epoch(self, epoch: Number, seed: Number | None = None) -> None:
        """Draw the crops of an epoch; arguments may be tensors on the device.

        Args:
            epoch: number of the epoch.
            seed: if given, replaces the seed.
        """
        self.epoch.fill_(epoch)
        if seed is not None:
            self.seed.fill_(seed)
        if not self.train:
            return
        positions = torch.arange(len(self), device=self.device)
        top, left, mirrored = crops(
            positions, self.seed, self.epoch, self.transform.largest_offset, self.transform.flip
        )
        last = self.transform.size - 1
        self._crops.copy_(torch.stack([top, left + last * mirrored, 1 - 2 * mirrored.long()], dim=1))

    def batch(self, index: Int[Tensor, " n"]) -> Float[Tensor, "n channels size size"]:
        """Return the transformed images at some positions of the split, augmented for this epoch."""
        top, left, direction = self._crops[index].unbind(1)
        rows = top[:, None] + self._steps
        columns = torch.addcmul(left[:, None], direction[:, None], self._steps)
        pixels = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return normalised(pixels.permute(0, 3, 1, 2), self._constants, self.dtype, self.channels_last)

    def order(self) -> Int[Tensor, " n"]:
        """Return the positions of all samples in the order of this epoch (shuffled in training only)."""
        if not self.train:
            return torch.arange(len(self), device=self.device)
        return order(len(self), self.seed, self.epoch, self.device)

    def batches(self, batch_size: int, *, drop_last: bool = False, rank: int = 0, world: int = 1) -> Iterator[Sample]:
        """Iterate over the split once.

        `index` of a batch is the position in the split in training, and in the original data set order otherwise.
        In training, `world` ranks share each batch; otherwise each sample is assigned to one rank.

        Args:
            batch_size: samples in a batch of all ranks together when training, of one rank otherwise.
            drop_last: leave out a last batch that is not full.
            rank: rank of this process.
            world: number of ranks.
        """
        positions = self.order()
        if not self.train:
            positions = part_of_batch(positions, rank, world)
        for global_batch in positions.split(batch_size):
            if drop_last and len(global_batch) < batch_size:
                return
            part = part_of_batch(global_batch, rank, world) if self.train else global_batch
            yield Sample(self.batch(part), self.labels[part], part if self.train else self.index[part])
