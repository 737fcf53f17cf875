"""Time the first layer of `resnet18_cifar`, by the custom kernel and by cuDNN; needs a GPU.

    python benchmarks/stem.py [--forward 128x8x264x3,64x4x528x3] [--backward 64x4x264x3,64x4x528x1] [--batch 512,128]

A tile is rows x warps x programs x stages. In microseconds within a CUDA graph: forward from images to y and its
statistics; backward from the sums of the norm's first pass to the gradient of the filters. Beside each, its distance
from float64, of y or of the gradient, relative.
"""

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from fedlas.training.accelerators import batch_norm, stem
from norms import microseconds

FORWARD = "128x8x264x3,64x4x528x3,64x4x396x3,128x8x132x3,256x8x264x3"
BACKWARD = "64x4x264x3,64x4x528x1,64x4x396x1,128x4x264x2,128x8x132x3,128x8x264x1"


def tiles(words: str) -> list[batch_norm.Tile]:
    """Read tiles from the command line."""
    numbers = [[int(one) for one in word.split("x")] for word in words.split(",")]
    return [batch_norm.Tile(rows, 64, warps, programs, stages) for rows, warps, programs, stages in numbers]


def shown(name: str, work: Callable[[], Tensor], right: Tensor) -> None:
    """Print how long some work takes, and how far its result is from the right one."""
    try:
        far = ((work().double() - right).norm() / right.norm()).item()
        print(f"{name:70} {microseconds(work):7.1f} us, {far:.1e} away", flush=True)
    except Exception as error:  # a tile that does not fit, say; the others are tried all the same
        print(f"{name:70} {type(error).__name__}: {error}", flush=True)


def measured(batch: int, forward: list[batch_norm.Tile], backward: list[batch_norm.Tile]) -> None:
    """Time both directions, both ways."""
    wide = (torch.randn(batch, 3, 32, 32), torch.randn(64, 3, 3, 3) / 5, torch.randn(batch, 64, 32, 32))
    images, filters, given = (
        one.to("cuda", torch.bfloat16).contiguous(memory_format=torch.channels_last) for one in wide
    )
    weight, bias, mean, var = (torch.full((64,), value, device="cuda") for value in (1.0, 0.0, 0.0, 1.0))
    norm = batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1)
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")

    def usual_forward() -> Tensor:
        y = functional.conv2d(images, filters, padding=1)
        batch_norm.statistics(y, norm, counter)
        return y

    y = functional.conv2d(images.double(), filters.double(), padding=1)
    shown(f"{batch} forward, cuDNN and our norm", usual_forward, y)
    for tile in forward:
        with patch.object(stem, "FORWARD", tile):
            shown(f"{batch} forward, {tile}", lambda: stem.convolve(images, filters, norm, counter)[0], y)

    y = usual_forward()
    about = batch_norm.statistics(y, norm, counter)
    bits = torch.empty(0, device="cuda", dtype=torch.uint8)
    for second in (None, given):
        sums = batch_norm.gradient_sums(given, second, y, bits, about, counter)
        sides: list[int] = [1, 1]
        sizes = None, sides, sides, sides, False, [0, 0], 1, [False, True, False]

        def usual_backward(sums: batch_norm.GradientSums = sums, sizes: tuple[object, ...] = sizes) -> Tensor:
            dy = batch_norm.apply_gradient(sums, y, about, sums.slope, sums.offset)
            found: Tensor = torch.ops.aten.convolution_backward(dy, images, filters, *sizes)[1]
            return found

        value = sums.gradient.double()
        if sums.mask == "y":
            columns = (one.double()[None, :, None, None] for one in (about.scale, about.shift))
            value *= y * next(columns) + next(columns) > 0
        scale, slope, offset = (one.double()[None, :, None, None] for one in (about.scale, sums.slope, sums.offset))
        dy = scale * value + slope * y.double() + offset
        right = torch.ops.aten.convolution_backward(dy, images.double(), filters.double(), *sizes)[1]
        shown(f"{batch} backward, mask {sums.mask}, apply and cuDNN", usual_backward, right)
        for tile in backward:
            with patch.object(stem, "BACKWARD", tile):
                shown(
                    f"{batch} backward, mask {sums.mask}, {tile}",
                    lambda sums=sums: stem.gradient_of_filters(images, filters, y, about, sums),  # type: ignore[misc]
                    right,
                )


def main() -> None:
    """Try all tiles."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--forward", default=FORWARD)
    parser.add_argument("--backward", default=BACKWARD)
    parser.add_argument("--batch", default="512,128")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    for batch in options.batch.split(","):
        measured(int(batch), tiles(options.forward), tiles(options.backward))


if __name__ == "__main__":
    main()
