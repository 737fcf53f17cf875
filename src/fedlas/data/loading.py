"""A data loader that reads images in worker processes and prefetches them into pinned memory.

Workers decode, resize, crop and flip uint8 images. Images are normalised on the device, so that uint8 and not float32
data is copied. As in `Resident`, the augmentation depends only on (seed, epoch, sample), not on the number of workers,
so both classes give the same images.
"""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fedlas.data.base import Images, Sample, Split, part_of_batch
from fedlas.data.base.fetching import DamagedFileError
from fedlas.data.base.images import Transform, decode, fitted, normalised
from fedlas.data.base.keyed import crops, order
from fedlas.extras import optional_module

EpochPosition = tuple[int, int]  # epoch and position in the split, sent to a worker


class Loader:
    """Iterate over the batches of a split, which are read in the background.

    `index` of a batch is the position in the split in training, and in the original data set order otherwise.
    In training, `world` ranks share each batch; otherwise each sample is assigned to one rank.

    Args:
        split: image files, or images as bytes.
        transform: transform of the data set on which the network was trained, also for OOD images.
        batch_size: samples in a batch of all ranks together when training, of one rank otherwise.
        train: whether to augment, and to visit the samples in a new order each epoch.
        seed: random seed of augmentation and order.
        device: device of the batches.
        dtype: dtype of the returned images.
        channels_last: whether returned images have the channels-last memory layout.
        drop_last: leave out a last batch that is not full.
        rank: rank of this process.
        world: number of ranks.
        workers: worker processes; 0 reads in this process. By default one per processor of this rank when training,
            and half as many otherwise.
        cache: a folder in which decoded and resized images are cached for the workers.
    """

    def __init__(
        self,
        split: Split,
        transform: Transform,
        *,
        batch_size: int,
        train: bool,
        seed: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self.split, self.transform, self.train = split, transform, train
        self.device, self.dtype, self.channels_last = torch.device(device), dtype, channels_last
        self._constants = transform.constants(device)
        self._sampler = _BatchPositions(
            len(split), batch_size=batch_size, train=train, seed=seed, drop_last=drop_last, rank=rank, world=world
        )
        workers = usual_workers(train) if workers is None else workers
        pinned = self.device.type == "cuda"
        self._loader: DataLoader[Any] = DataLoader(
            _Crops(split, transform, train, seed, cache),
            batch_sampler=self._sampler,
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=pinned,
            persistent_workers=train and workers > 0,  # evaluations are rare, so their workers are not kept
            worker_init_fn=_begin_worker,
            generator=torch.Generator().manual_seed(seed),
        )

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the epoch of the next pass and its first batch; earlier batches are not read."""
        self._sampler.epoch, self._sampler.start = epoch, start

    def close(self) -> None:
        """Stop the worker processes; another pass would start new ones."""
        # torch does this when the iterator is garbage-collected, which may be late, because tracebacks keep references.
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is not None and self._loader.num_workers:
            workers = iterator._workers  # type: ignore[attr-defined]
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            for worker in workers:
                worker.kill()  # a worker that hangs does not run the thread that obeys SIGTERM

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Sample]:
        with _sigterm_blocked():
            batches = iter(self._loader)  # starts the workers
        for batch in batches:
            if isinstance(batch, Exception):
                raise batch
            tensors = [tensor.to(self.device, non_blocking=True) for tensor in batch]
            images = normalised(tensors[0], self._constants, self.dtype, self.channels_last)
            yield Sample(images, tensors[1], tensors[2])


def usual_workers(train: bool) -> int:
    """Return the default number of workers: processors per rank of this machine, and half of that in evaluation."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, processors // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return workers if train else max(1, workers // 2)


class _BatchPositions(Sampler[list[EpochPosition]]):
    """Yield the sample positions of each batch together with the epoch, so that workers can persist across epochs."""

    def __init__(
        self, samples: int, *, batch_size: int, train: bool, seed: int, drop_last: bool, rank: int, world: int
    ) -> None:
        self.samples, self.batch_size, self.drop_last = samples, batch_size, drop_last
        self.train, self.seed = train, seed
        self.rank, self.world = rank, world
        self.epoch, self.start = 0, 0

    def _batches(self) -> tuple[Tensor, ...]:
        if self.train:
            positions = order(self.samples, self.seed, self.epoch)
        else:
            positions = part_of_batch(torch.arange(self.samples), self.rank, self.world)
        batches = positions.split(self.batch_size) if len(positions) else ()
        if self.drop_last and batches and len(batches[-1]) < self.batch_size:
            batches = batches[:-1]
        return batches

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[EpochPosition]]:
        epoch = self.epoch
        for global_batch in self._batches()[self.start :]:
            part = part_of_batch(global_batch, self.rank, self.world) if self.train else global_batch
            yield [(epoch, position) for position in part.tolist()]


class _Crops(Dataset[Any]):
    """Cropped and flipped uint8 images, a batch at a time."""

    def __init__(
        self, split: Split, transform: Transform, train: bool, seed: int, cache: str | Path | None = None
    ) -> None:
        self.split, self.transform, self.train, self.seed = split, transform, train, seed
        self.images: Images = split.images
        self.positions = torch.arange(len(split))
        if cache is not None:  # memory-mapped from a file that all splits share
            self.images, self.positions = split.cached_images(transform, cache)

    def __getitems__(self, positions: list[EpochPosition]) -> tuple[Tensor, Tensor, Tensor] | Exception:
        """Read a batch; return file errors instead of raising them, because torch would wrap them in a traceback."""
        try:
            return self._read(positions)
        except (OSError, DamagedFileError) as error:
            return error

    def _read(self, positions: list[EpochPosition]) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.tensor([position for _, position in positions], dtype=torch.int64)
        size, centre = self.transform.size, self.transform.centre
        if self.train and positions:
            random_crops = crops(index, self.seed, positions[0][0], self.transform.largest_offset, self.transform.flip)
            tops, lefts, mirrored = (values.tolist() for values in random_crops)
        else:
            tops, lefts, mirrored = [centre] * len(index), [centre] * len(index), [False] * len(index)
        images = torch.empty(len(index), self.transform.channels, size, size, dtype=torch.uint8)
        for number, position in enumerate(index.tolist()):
            images[number] = self._cropped(position, tops[number], lefts[number], mirrored[number])
        return images, self.split.labels[index], index if self.train else self.split.index[index]

    def _cropped(self, position: int, top: int, left: int, mirrored: bool) -> UInt8[Tensor, "channels size size"]:
        tools = optional_module("torchvision.transforms.v2.functional", "train")
        images, position = self.images, int(self.positions[position])
        if isinstance(images, Tensor):
            image = fitted(images[position : position + 1], self.transform)[0]
        else:
            image = decode(images[position], self.transform)
        # A crop that extends beyond the image is padded with black by torchvision.
        border = self.transform.pad if self.train else 0
        cropped: Tensor = tools.crop(image, top - border, left - border, self.transform.size, self.transform.size)
        return cropped.flip(-1) if mirrored else cropped


def _as_it_is(batch: Any) -> Any:
    return batch


_CAN_WAIT_FOR_SIGNALS = hasattr(signal, "sigwaitinfo")  # not on macOS and Windows


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread, and in the processes that it starts."""
    if not _CAN_WAIT_FOR_SIGNALS:
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _begin_worker(_: int) -> None:
    gc.freeze()  # never collect objects of the parent: its threads and devices do not exist here
    if _CAN_WAIT_FOR_SIGNALS:
        # Where workers are spawned, the mask is not inherited.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_sigterm_of_parent, daemon=True).start()


def _obey_sigterm_of_parent() -> None:
    """Exit when the parent sends SIGTERM.

    It is blocked otherwise: `timeout`, scancel and systemd send it to the workers too, but a run needs them until it
    has handled the signal.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
