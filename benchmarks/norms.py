"""Time the custom batch norms with other tiles, for the shapes of real networks; needs a GPU.

    python benchmarks/norms.py [--warps 4,8] [--rows 64] [--programs 132,264] [--stages 1,4]

For each shape and tile, in microseconds within a CUDA graph: both forward passes, both backward passes without a skip,
and with one. As in a network, something else has just written what they read, and reads what they wrote: a copy stands
for the convolution before, another for the one after, and both are part of the time, because what the cache holds
decides. The last lines add up what each tile costs a network.
"""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from unittest.mock import patch

import torch

from fedlas.training.accelerators import batch_norm

# Images, channels, side: norms without and with a skip; those of the skips themselves are left out.
NETWORKS = {
    "resnet50 at 128": {
        (128, 64, 32): (7, 0), (128, 128, 32): (1, 0), (128, 256, 32): (0, 3), (128, 128, 16): (7, 0),
        (128, 256, 16): (1, 0), (128, 512, 16): (0, 4), (128, 256, 8): (11, 0), (128, 512, 8): (1, 0),
        (128, 1024, 8): (0, 6), (128, 512, 4): (5, 0), (128, 2048, 4): (0, 3),
    },
    "resnet18 at 512": {(512, 64, 32): (3, 2), (512, 128, 16): (2, 2), (512, 256, 8): (2, 2), (512, 512, 4): (2, 2)},
}  # fmt: skip
REPEAT = 20


def microseconds(work: Callable[[], object]) -> float:
    """Time some work within a graph, the faster of two."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEAT):
            work()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / REPEAT)
    return 1e6 * min(times[1:])


def measured(shape: tuple[int, int, int], tile: batch_norm.Tile) -> dict[str, float]:
    """Time the passes that sum, with one tile."""
    count, channels, side = shape
    size = (count, channels, side, side)
    y, first, second, skip, before, after = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last) for _ in range(6)
    )
    weight, bias, mean, var = torch.ones(4, channels, device="cuda").unbind()
    norm = batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1)
    counter = torch.zeros(channels // batch_norm.CHANNEL_MULTIPLE, dtype=torch.int32, device="cuda")

    def forward() -> None:
        y.copy_(before)
        after.copy_(batch_norm.activation(y, batch_norm.statistics(y, norm, counter), None, None)[0])

    def backward(other: torch.Tensor | None, bits: torch.Tensor) -> None:
        first.copy_(before)
        sums = batch_norm.gradient_sums(first, other, y, bits, about, counter)
        after.copy_(batch_norm.gradients(sums, y, about).y)

    with patch.object(batch_norm, "tile_for_sums", lambda _: tile), patch.object(batch_norm, "SUMS_WITH_OUTPUT", tile):
        about = batch_norm.statistics(y, norm, counter)
        bits = batch_norm.activation(y, about, skip, None)[1]
        return {
            "forward": microseconds(forward),
            "back": microseconds(lambda: backward(None, bits[:0])),
            "back, skip": microseconds(lambda: backward(second, bits)),
        }


def main() -> None:
    """Try all tiles."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", default="64")
    parser.add_argument("--warps", default="4,8")
    parser.add_argument("--programs", default="132,264")
    parser.add_argument("--stages", default="1,4")
    options = parser.parse_args()
    words = options.rows, options.warps, options.programs, options.stages
    numbers = itertools.product(*([int(one) for one in some.split(",")] for some in words))
    tiles = [batch_norm.Tile(rows, 64, warps, programs, stages) for rows, warps, programs, stages in numbers]
    for name, shapes in NETWORKS.items():
        totals: dict[tuple[str, batch_norm.Tile], float] = defaultdict(float)
        for shape, (plain, skips) in shapes.items():
            for tile in tiles:
                found = measured(shape, tile)
                print(name, shape, tile, {what: round(took, 1) for what, took in found.items()}, flush=True)
                for what, times in {"forward": plain + skips, "back": plain, "back, skip": skips}.items():
                    totals[what, tile] += times * found[what]
        for (what, tile), took in sorted(totals.items(), key=lambda one: (one[0][0], one[1])):
            print(f"{name}: {what:10} {took:7.0f} us with {tile}")


if __name__ == "__main__":
    main()
