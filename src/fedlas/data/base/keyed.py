"""Counter-based random numbers: a hash of (purpose, seed, epoch, sample) to 32 bits.

There is no generator and no state: the crop of a sample is the same in every batch, on every rank and in every worker,
and the computation can be captured in a CUDA graph, with seed and epoch as tensors on the device. For fixed purpose,
seed and epoch, the map from samples to bits is one-to-one (up to 2^32 samples). Sorting samples by their bits therefore
gives a permutation without ties, the same on every device.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Number = int | Int[Tensor, ""]

WORD = 0xFFFFFFFF
ORDER, CROP = 1, 2


def mixed(x: Tensor) -> Tensor:
    """Mix 32 bits (stored in int64) with a bijective hash.

    Shifts and factors are from a public-domain search (Wellons, hash-prospector, 2018 to 2023): the hash with the
    lowest bias among those with both factors below 2^31, so that no product overflows int64 (undefined in C++).
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def bits(sample: Int[Tensor, " n"], purpose: int, seed: Number, epoch: Number) -> Int[Tensor, " n"]:
    """Draw 32 bits for each sample."""
    seed, epoch = number(seed, sample), number(epoch, sample)
    # Two keys, before and after a round: with only one, two epochs could be shifted copies of each other.
    keys = []
    for salt in (0x9E3779B9, 0x3C6EF372):
        key = mixed((seed + salt) & WORD)
        key = mixed((key + (seed >> 32) + (purpose << 24)) & WORD)
        keys.append(mixed((key + epoch) & WORD))
    return mixed(mixed((sample + keys[0]) & WORD) ^ keys[1])


def number(value: Number, like: Tensor) -> Tensor:
    """Convert a number to a tensor on the device of another tensor, without synchronisation."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.int64, device=like.device)


def order(samples: int, seed: Number, epoch: Number, device: torch.device | str = "cpu") -> Int[Tensor, " n"]:
    """Return a random permutation of the sample positions for one epoch."""
    return bits(torch.arange(samples, device=device), ORDER, seed, epoch).argsort()


def crops(
    sample: Int[Tensor, " n"], seed: Number, epoch: Number, largest_offset: int, flip: bool
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """Draw the top and left offset of each crop, from 0 to `largest_offset`, and whether the image is flipped."""
    side = largest_offset + 1
    # Draw one number for both offsets and the flip: (32 random bits * combinations) >> 32 is uniform up to 2^-32.
    draw = (bits(sample, CROP, seed, epoch) * (2 * side * side)) >> 32
    corner = draw >> 1
    return corner // side, corner % side, (draw & 1).bool() if flip else torch.zeros_like(draw).bool()
