"""Time the 3 x 3 convolutions on 64 channels of `resnet18_cifar`, by the custom kernel and by cuDNN; needs a GPU.

    python benchmarks/windows.py [--batch 512] [--side 32]

In microseconds within a CUDA graph, each with the sums of its norm: forward from images to y and its statistics; back
from dy to the gradient before the ReLU of the norm that made the images, once plain and once where its result was
used twice and something had been added to it. Several images take turns, so that the cache does not know them.
Of a kind of GPU that has no such kernels it says so.
"""

import argparse
from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from fedlas.training.accelerators import batch_norm, conv3x3
from norms import microseconds

TURNS = 4


def images_of(batch: int, side: int) -> Tensor:
    """Make images."""
    shape = batch, conv3x3.CHANNELS, side, side
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


def ways(batch: int, side: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Give what is to be timed, by our kernels and by cuDNN with passes of the norm after it."""
    some, y, second = (
        cycle([images_of(batch, side) for _ in range(TURNS)]),
        images_of(batch, side),
        images_of(batch, side),
    )
    weight = torch.randn(conv3x3.CHANNELS, conv3x3.CHANNELS, 3, 3, device="cuda", dtype=torch.bfloat16) / 24
    weight = weight.contiguous(memory_format=torch.channels_last)
    if not conv3x3.fits(y, weight):
        raise SystemExit(f"there are no kernels of our own for {batch} images of {side} x {side} on this GPU")
    norm = batch_norm.example_norm(y.device)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    about = batch_norm.statistics(y, norm, counter)
    bits = batch_norm.activation(y, about, second, None)[1]

    def back() -> Tensor:
        given = (next(some), y, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
        found: Tensor = torch.ops.aten.convolution_backward(*given)[0]
        return found

    return {
        "forward": (
            lambda: conv3x3.convolve(next(some), weight, norm),
            lambda: batch_norm.statistics(functional.conv2d(next(some), weight, padding=1), norm, counter),
        ),
        "back": (
            lambda: conv3x3.gradient_sums(next(some), weight, None, y, bits[:0], about),
            lambda: batch_norm.gradient_sums(back(), None, y, bits[:0], about, counter),
        ),
        "back, used twice": (
            lambda: conv3x3.gradient_sums(next(some), weight, second, y, bits, about),
            lambda: batch_norm.gradient_sums(back(), second, y, bits, about, counter),
        ),
    }


def main() -> None:
    """Time all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--side", type=int, default=32)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here")
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, benchmark_limit=0):
        for name, (ours, usual) in ways(options.batch, options.side).items():
            print(f"{name:18} {microseconds(ours):7.1f}   cuDNN and a pass of the norm {microseconds(usual):7.1f}")


if __name__ == "__main__":
    main()
