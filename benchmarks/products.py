"""Time the 1 x 1 convolutions of `resnet50_cifar`, by `fedlas.training.accelerators` and by cuDNN; needs a GPU.

    python benchmarks/products.py [--back] [--tiles 64x64x4x396x3,64x128x4x264x3] [--shapes 131072x64x256] [--batch 128]
    for i in 0 1 2 3; do python benchmarks/products.py --part $i/4 & done; wait   # compiles all kernels, prints nothing

A tile is rows x columns x warps x programs x stages; without any, some are tried that suit the shape, the usual one
first. A shape is rows x channels before x channels after, of which 64, 128 or 256 come before. In microseconds
within a CUDA graph, from x to y and its statistics. As in a network, something has just written x and something reads
y: copies stand for both. What they take alone is told too, and not taken off, because what the cache holds decides.
Behind each time, the distance of y from float64, and those of the mean and of one over the spread of y, relative.
With `--back` it is the way from dy to the gradient of x, met by another gradient and cut off, and to the sums that the
norm which made x wants; a shape is rows x channels of dy x channels of x. Distances are those of the gradient and of
both sums.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from fedlas.training.accelerators import batch_norm, conv1x1
from norms import microseconds

# Rows at a batch of one, channels before and after: how many of them are in the network, with a stride of one.
SHAPES = {
    (1024, 64, 64): 1, (1024, 64, 256): 4, (1024, 256, 64): 2, (1024, 256, 128): 1,
    (256, 128, 512): 4, (64, 256, 1024): 6,
}  # fmt: skip
BACK = {
    (1024, 64, 256): 2, (1024, 128, 256): 1, (256, 128, 512): 3, (256, 256, 512): 1, (64, 256, 1024): 5,
    (1024, 64, 64): 1,
}  # fmt: skip
SIDES = {1024: 32, 256: 16, 64: 8}
Way = Callable[[], Any]


def some_tiles(inputs: int, outputs: int) -> list[batch_norm.Tile]:
    """Give tiles that suit a shape, the usual one first."""
    wide = 128 if outputs % 128 == 0 else 64
    others = [
        batch_norm.Tile(64, wide, 4, 264, 3),
        batch_norm.Tile(128, wide, 8, 132, 3),
        batch_norm.Tile(64, 64, 4, 396, 3),
        batch_norm.Tile(64, wide, 8, 132, 3),
    ]
    return list(dict.fromkeys([conv1x1.tile_for(inputs), *others]))


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
        self.norm = batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1)
        self.counter = torch.zeros(outputs // batch_norm.CHANNEL_MULTIPLE, dtype=torch.int32, device="cuda")
        self.y, self.about = self.usual()
        self.after = torch.empty_like(self.y)

    @cached_property
    def right(self) -> Tensor:
        """Give y in float64, as a matrix."""
        return torch.mm(as_matrix(self.x), self.factors.double().flatten(1).T)

    def usual(self) -> tuple[Tensor, batch_norm.Normed]:
        """Convolve by cuDNN, and sum in a pass of its own."""
        y = functional.conv2d(self.x, self.factors)
        return y, batch_norm.statistics(y, self.norm, self.counter)

    def ours(self) -> tuple[Tensor, batch_norm.Normed]:
        """Convolve and sum in one kernel."""
        return conv1x1.multiply(self.x, self.factors, self.norm, self.counter)

    def far(self, found: tuple[Tensor, batch_norm.Normed]) -> list[float]:
        """Give the distances of results from the right ones."""
        y, about = as_matrix(found[0]), found[1]
        spread, mean = torch.var_mean(y, 0, correction=0)
        return [
            distance(y, self.right), distance(about.mean, mean), distance(about.rstd, (spread + 1e-5).rsqrt()),
        ]  # fmt: skip

    def measured(self, way: Way) -> float:
        """Time one way between two copies."""

        def work() -> None:
            self.x.copy_(self.before)
            self.after.copy_(way()[0])

        return microseconds(work)

    def shown(self, name: str, way: Way) -> float:
        """Print how long one way takes, and how far its results are from the right ones; endless where it fails."""
        try:
            far, took = " ".join(f"{one:.1e}" for one in self.far(way())), self.measured(way)
            print(f"{self.name:28} {name:72} {took:7.1f} us, {far} away", flush=True)
        except Exception as error:  # a tile that does not fit, say; the others are tried all the same
            print(f"{self.name:28} {name:72} {type(error).__name__}: {error}", flush=True)
            return float("inf")
        return took


class BackCase(Case):
    """A gradient and a weight of one shape, and both ways back through the norm before."""

    def __init__(self, shape: tuple[int, ...], batch: int, *, two_norms: bool = False) -> None:
        super().__init__(shape, batch)  # of which x is the gradient that comes, y what was normalised
        self.other, skip = torch.randn_like(self.y), torch.randn_like(self.y)
        self.met = (
            shape[2] > shape[1] or shape[1] == batch_norm.CHANNEL_MULTIPLE
        )  # at the end of a block, not inside of one
        _, bits = batch_norm.activation(self.y, self.about, skip, None)
        self.bits = bits if shape[2] > shape[1] else bits[:0]
        self.beside = (skip, batch_norm.statistics(skip, self.norm, self.counter)) if two_norms else ()
        self.weight = self.factors.transpose(0, 1).contiguous()

    @property
    def second(self) -> Tensor | None:
        """Give the gradient of the other use, where there is one."""
        return self.other if self.met else None

    @cached_property
    def right(self) -> Tensor:
        """Give the gradient before the ReLU in float64, as a matrix."""
        found = torch.mm(as_matrix(self.x), self.weight.double().flatten(1))
        found += as_matrix(self.other) if self.met else 0
        gradient = torch.ones_like(self.y)
        sums = batch_norm.gradient_sums(gradient, gradient * 0, self.y, self.bits, self.about, self.counter)
        return found * as_matrix(sums.gradient)

    def far(self, found: batch_norm.GradientSums) -> list[float]:  # type: ignore[override]
        """Give the distances of results from the right ones."""
        product = (self.right * (as_matrix(self.y) - self.about.mean)).sum(0) * self.about.rstd
        gradient = as_matrix(found.gradient)
        if found.mask == "y":
            gradient = gradient * (self.right != 0)
        return [
            distance(gradient, self.right), distance(found.bias, self.right.sum(0)), distance(found.weight, product),
        ]  # fmt: skip

    def usual(self) -> Any:
        """Multiply by cuDNN, and sum in a pass of its own."""
        if not hasattr(self, "weight"):
            return super().usual()
        about = None, (1, 1), (0, 0), (1, 1), False, [0, 0], 1, [True, False, False]
        first = torch.ops.aten.convolution_backward(self.x, self.y, self.weight, *about)[0]
        return batch_norm.gradient_sums(first, self.second, *self._norms)

    @property
    def _norms(self) -> tuple[Any, ...]:
        return self.y, self.bits, self.about, self.counter, *self.beside

    def ours(self) -> Any:
        """Multiply and sum in one kernel."""
        owed = conv1x1.Product(self.x, self.weight)
        return conv1x1.gradient_sums(owed, self.second, *self._norms)


def distance(found: Tensor, right: Tensor) -> float:
    """Say how far something is from what is right, relative to that."""
    return float((found.double() - right).norm() / right.norm())


def main() -> None:
    """Try all tiles."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tiles", default="")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--back", action="store_true")
    parser.add_argument("--two-norms", action="store_true", help="back to the end of a block whose skip has a norm too")
    parser.add_argument(
        "--part", default="", help="i/n: compile and run each n-th kernel, from the i-th on; print nothing"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    shapes: dict[tuple[int, ...], int] = dict.fromkeys(read(options.shapes, 3), 1) or {
        (rows * options.batch, *channels): times
        for (rows, *channels), times in (BACK if options.back else SHAPES).items()
    }
    make = partial(BackCase, two_norms=options.two_norms) if options.back else Case
    given = [batch_norm.Tile(*one) for one in read(options.tiles, 5)]
    chosen = [conv1x1.BACKWARD_TILE] if options.back else []
    tried = [(shape, given or list(dict.fromkeys(chosen + some_tiles(*shape[1:])))) for shape in shapes]
    if options.part:
        warm(
            [(shape, tile) for shape, tiles in tried for tile in tiles],
            options.part,
            lambda shape: make(shape, options.batch),
        )
        return
    saved = 0.0
    for shape, tiles in tried:
        case = make(shape, options.batch)
        copies = case.measured(lambda case=case: (case.y, case.about))  # type: ignore[misc]
        print(f"{case.name:28} {'two copies alone':72} {copies:7.1f} us")
        usual = case.shown("cuDNN and our norm", case.usual)
        best = usual
        for tile in tiles:
            with trying(tile):
                best = min(best, case.shown(f"{tile}", case.ours))
        saved += shapes[shape] * (usual - best)
    print(f"a step of the network saves {saved:.0f} us with the best of each")


@contextmanager
def trying(tile: batch_norm.Tile) -> Iterator[None]:
    """Let both kernels work with a tile."""
    with patch.object(conv1x1, "tile_for", lambda *_: tile), patch.object(conv1x1, "BACKWARD_TILE", tile):
        yield


def warm(
    tried: list[tuple[tuple[int, ...], batch_norm.Tile]], part: str, make: Callable[[tuple[int, ...]], Case]
) -> None:
    """Compile and run a part of the kernels, so that Triton finds them compiled afterwards."""
    first, step = (int(one) for one in part.split("/"))
    for shape, tile in tried[first::step]:
        with trying(tile):
            try:
                make(shape).ours()
            except Exception:  # told when the kernel is timed
                continue
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
