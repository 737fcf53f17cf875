"""Time the 1 x 1 convolutions of `resnet50_cifar`, by `fedlas.train.products` and by cuDNN; needs a GPU.

    python benchmarks/products.py [--tiles 64x64x4x396x3,64x128x4x264x3] [--shapes 131072x64x256] [--batch 128]
    for i in 0 1 2 3; do python benchmarks/products.py --part $i/4 & done; wait   # compiles all kernels, prints nothing

A tile is rows x columns x warps x programs x stages; without any, some are tried that suit the shape, the usual one
first. A shape is rows x channels before x channels after, of which 64, 128 or 256 come before. In microseconds
within a CUDA graph, from x to y and its statistics. As in a network, something has just written x and something reads
y: copies stand for both. What they take alone is told too, and not taken off, because what the cache holds decides.
Behind each time, the distance of y from float64, and those of the mean and of one over the spread of y, relative.
"""

import argparse
from collections.abc import Callable
from functools import cached_property
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from fedlas.train import kernels, products
from norms import microseconds

# Rows at a batch of one, channels before and after: how many of them are in the network, with a stride of one.
SHAPES = {
    (1024, 64, 64): 1, (1024, 64, 256): 4, (1024, 256, 64): 2, (1024, 256, 128): 1,
    (256, 128, 512): 4, (64, 256, 1024): 6,
}  # fmt: skip
SIDES = {1024: 32, 256: 16, 64: 8}
Way = Callable[[], tuple[Tensor, kernels.Normed]]


def some_tiles(inputs: int, outputs: int) -> list[kernels.Tile]:
    """Give tiles that suit a shape, the usual one first."""
    wide = 128 if outputs % 128 == 0 else 64
    others = [
        kernels.Tile(64, wide, 4, 264, 3),
        kernels.Tile(128, wide, 8, 132, 3),
        kernels.Tile(64, 64, 4, 396, 3),
        kernels.Tile(64, wide, 8, 132, 3),
    ]
    return list(dict.fromkeys([products.tile_for(inputs), *others]))


def read(words: str, size: int) -> list[tuple[int, ...]]:
    """Read groups of numbers from the command line."""
    found = [tuple(int(one) for one in word.split("x")) for word in words.split(",") if word]
    if any(len(one) != size for one in found):
        raise SystemExit(f"{words}: {size} numbers are wanted in each group, with an x between them")
    return found


def as_matrix(images: Tensor) -> Tensor:
    """Give a row for each pixel, in float64."""
    return images.double().permute(0, 2, 3, 1).flatten(0, 2)


class Case:
    """Images and a weight of one shape, and both ways from one to the other."""

    def __init__(self, shape: tuple[int, ...], batch: int) -> None:
        rows, inputs, outputs = shape
        side = SIDES.get(rows // batch, 1)
        size = rows // side**2, inputs, side, side
        self.name = f"{rows} rows, {inputs} to {outputs}"
        self.before = torch.randn(size, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        self.x = self.before.clone()
        self.factors = (torch.randn(outputs, inputs, 1, 1, device="cuda") / inputs**0.5).to(torch.bfloat16)
        weight, bias, mean, var = (torch.full((outputs,), value, device="cuda") for value in (1.0, 0.0, 0.0, 1.0))
        self.norm = kernels.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1)
        self.counter = torch.zeros(outputs // kernels.NARROWEST, dtype=torch.int32, device="cuda")
        self.y, self.about = self.usual()
        self.after = torch.empty_like(self.y)

    @cached_property
    def right(self) -> Tensor:
        """Give y in float64, as a matrix."""
        return torch.mm(as_matrix(self.x), self.factors.double().flatten(1).T)

    def usual(self) -> tuple[Tensor, kernels.Normed]:
        """Convolve by cuDNN, and sum in a pass of its own."""
        y = functional.conv2d(self.x, self.factors)
        return y, kernels.statistics(y, self.norm, self.counter)

    def ours(self) -> tuple[Tensor, kernels.Normed]:
        """Convolve and sum in one kernel."""
        return products.multiply(self.x, self.factors, self.norm, self.counter)

    def measured(self, way: Way) -> float:
        """Time one way between two copies."""

        def work() -> None:
            self.x.copy_(self.before)
            self.after.copy_(way()[0])

        return microseconds(work)

    def shown(self, name: str, way: Way) -> float:
        """Print how long one way takes, and how far its results are from the right ones; endless where it fails."""
        try:
            (y, about), took = way(), self.measured(way)
            found = as_matrix(y)
            spread, mean = torch.var_mean(found, 0, correction=0)
            pairs = (found, self.right), (about.mean.double(), mean), (about.rstd.double(), (spread + 1e-5).rsqrt())
            far = " ".join(f"{((one - other).norm() / other.norm()).item():.1e}" for one, other in pairs)
            print(f"{self.name:28} {name:72} {took:7.1f} us, {far} away", flush=True)
        except Exception as error:  # a tile that does not fit, say; the others are tried all the same
            print(f"{self.name:28} {name:72} {type(error).__name__}: {error}", flush=True)
            return float("inf")
        return took


def main() -> None:
    """Try all tiles."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tiles", default="")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--part", default="", help="i/n: compile and run each n-th kernel, from the i-th on; print nothing"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    shapes: dict[tuple[int, ...], int] = dict.fromkeys(read(options.shapes, 3), 1) or {
        (rows * options.batch, inputs, outputs): times for (rows, inputs, outputs), times in SHAPES.items()
    }
    given = [kernels.Tile(*one) for one in read(options.tiles, 5)]
    tried = [(shape, given or some_tiles(*shape[1:])) for shape in shapes]
    if options.part:
        warm([(shape, tile) for shape, tiles in tried for tile in tiles], options.part, options.batch)
        return
    saved = 0.0
    for shape, tiles in tried:
        case = Case(shape, options.batch)
        copies = case.measured(lambda case=case: (case.y, case.about))  # type: ignore[misc]
        print(f"{case.name:28} {'two copies alone':72} {copies:7.1f} us")
        usual = case.shown(f"cuDNN and {kernels.SUMS}", case.usual)
        best = usual
        for tile in tiles:
            with patch.object(products, "tile_for", lambda *_, tile=tile: tile):
                best = min(best, case.shown(f"{tile}", case.ours))
        saved += shapes[shape] * (usual - best)
    print(f"a step of the network saves {saved:.0f} us with the best of each")


def warm(tried: list[tuple[tuple[int, ...], kernels.Tile]], part: str, batch: int) -> None:
    """Compile and run a part of the kernels, so that Triton finds them compiled afterwards."""
    first, step = (int(one) for one in part.split("/"))
    for shape, tile in tried[first::step]:
        with patch.object(products, "tile_for", lambda *_, tile=tile: tile):
            try:
                Case(shape, batch).ours()
            except Exception:  # told when the kernel is timed
                continue
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
