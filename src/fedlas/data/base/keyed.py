"""Counter-based random numbers: a hash of (purpose, seed, epoch, sample) to 32 bits.

There is no generator and no state: a sample's crop is the same in every batch, on every rank and in every worker, and
the computation can be captured in a CUDA graph, with the seed and the epoch in tensors on the device. For one purpose,
seed and epoch the map from samples to bits is one-to-one below 2^32 samples; sorting samples by their bits is therefore
a permutation without ties, the same on every device.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Number = int | Int[Tensor, ""]

WORD = 0xFFFFFFFF
ORDER, CROP = 1, 2


def mixed(word: Tensor) -> Tensor:
    """Scramble 32 bits that are held in int64, one-to-one.

    The shifts and factors are those of the public-domain hash search (Wellons, hash-prospector, 2018 to 2023) with the
    lowest bias of which both factors are below 2^31: then no product leaves int64, whose overflow C++ does not define.
    """
    word = ((word ^ (word >> 16)) * 0x21F0AAAD) & WORD
    word = ((word ^ (word >> 15)) * 0x735A2D97) & WORD
    return word ^ (word >> 15)


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
    """Put a number into a tensor on the device of another one, without synchronisation."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.int64, device=like.device)


def order(samples: int, seed: Number, epoch: Number, device: torch.device | str = "cpu") -> Int[Tensor, " n"]:
    """Shuffle the numbers below `samples`: the order in which an epoch visits them."""
    return bits(torch.arange(samples, device=device), ORDER, seed, epoch).argsort()


def crops(
    sample: Int[Tensor, " n"], seed: Number, epoch: Number, room: int, flip: bool
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """Draw for each sample the top and left edge of its crop, each from 0 to `room`, and whether it is flipped."""
    side = room + 1
    # One draw from all combinations; 32 bits times their number, shifted down, is uniform up to 2^-32 each.
    draw = (bits(sample, CROP, seed, epoch) * (2 * side * side)) >> 32
    place = draw >> 1
    return place // side, place % side, (draw & 1).bool() if flip else torch.zeros_like(draw).bool()
