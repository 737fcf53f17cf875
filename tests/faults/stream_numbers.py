"""Campaign on accumulators: predictions in random chunks over many processes give the values of one pass.

    python tests/faults/stream_numbers.py                     1 million predictions, 8 processes
    python tests/faults/stream_numbers.py --n 50000000        the size in the documentation
    python tests/faults/stream_numbers.py --only SmoothECE    one accumulator

Samples depend only on seed and block, so each process generates its own: no process holds all of them, and the single
pass reads the same samples in blocks. Chunks start and end anywhere. Accumulators that store sums and those that store
5 bytes per sample are tested. Then one table is measured with other batch sizes, thread counts and memory layouts.
"""

import argparse
import json
import multiprocessing
import pickle
import resource
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlas import metrics
from fedlas.metrics.registry import all_metrics

BLOCK, CLASSES = 100_000, 5
STREAMS: tuple[Any, ...] = tuple(all_metrics().values())


def block(number: int, n: int, seed: int, length: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Draw the probabilities and labels of one block."""
    draw = torch.Generator().manual_seed(1_000_003 * seed + number)
    size = min(length, n - number * length)
    logits = 3 * torch.randn(size, CLASSES, generator=draw)
    return logits.softmax(1), torch.randint(CLASSES, (size,), generator=draw)


def blocks(n: int, length: int = BLOCK) -> range:
    return range(-(-n // length))


def chunks(numbers: range, n: int, seed: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the samples of some blocks in chunks of random length, independent of the blocks."""
    draw = torch.Generator().manual_seed(seed + numbers.start)
    for number in numbers:
        probs, labels = block(number, n, seed, length)
        position = 0
        while position < len(labels):
            step = int(10 ** (5 * float(torch.rand((), generator=draw)))) + 1
            yield probs[position : position + step], labels[position : position + step]
            position += step


def part(given: tuple[range, int, int, int], kinds: tuple[Any, ...] = STREAMS) -> tuple[bytes, int]:
    """Update all accumulators with the samples of one process; return bytes, as tensors would need open files."""
    torch.set_num_threads(1)
    made, seen = [kind.accumulator() for kind in kinds], 0
    for probs, labels in chunks(*given):
        seen += len(labels)
        for stream in made:
            stream.update(probs, labels)
    return pickle.dumps(made), seen


def campaign(
    n: int, processes: int, seed: int, kinds: tuple[Any, ...] = STREAMS, length: int = BLOCK
) -> dict[str, Any]:
    """Compare accumulators merged over processes, in a random order, with one pass."""
    start = time.monotonic()
    every = blocks(n, length)
    shares = [range(k * len(every) // processes, (k + 1) * len(every) // processes) for k in range(processes)]
    with multiprocessing.get_context("spawn").Pool(min(processes, len(every))) as pool:
        result = pool.map(partial(part, kinds=kinds), [(share, n, seed, length) for share in shares], chunksize=1)
    order = torch.randperm(processes, generator=torch.Generator().manual_seed(seed)).tolist()
    merged = pickle.loads(result[order[0]][0])
    for position in order[1:]:
        merged = [first.merge(other) for first, other in zip(merged, pickle.loads(result[position][0]), strict=True)]
    streamed = time.monotonic() - start
    rows = []
    whole = [kind.accumulator() for kind in kinds]
    for number in every:
        probs, labels = block(number, n, seed, length)
        for stream in whole:
            stream.update(probs, labels)
    for mine, other in zip(merged, whole, strict=True):
        rows.append({"stream": type(mine).__name__, **_compared(mine, other)})
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    about = {"n": n, "processes": processes, "streamed_s": streamed, "seconds": time.monotonic() - start}
    return about | {"process_mib": most, "streams": rows, "parts": [{"n": seen} for _, seen in result]}


def _compared(mine: Any, other: Any) -> dict[str, Any]:
    got, wanted = (_values(first.compute()) for first in (mine, other))
    same = all(a.n == b.n for a, b in zip(_results(mine), _results(other), strict=True))
    if hasattr(mine.store, "histogram"):
        same = same and torch.equal(*(first.store.histogram().bins.counts for first in (mine, other)))
    return {"counts_equal": same, "largest_difference": max(abs(a - b) for a, b in zip(got, wanted, strict=True))}


def _results(stream: Any) -> list[Any]:
    result = stream.compute()
    return [item.definition for item in (result if isinstance(result, tuple) else (result,))]


def _values(found: Any) -> list[float]:
    return [float(item) for item in (found if isinstance(found, tuple) else (found,))]


def ways(n: int, seed: int) -> list[dict[str, Any]]:
    """Compare other batch sizes, thread counts and memory layouts with one pass in float64."""
    parts = [block(number, n, seed) for number in blocks(n)]
    probs, labels = torch.cat([p for p, _ in parts]), torch.cat([y for _, y in parts])
    before = torch.get_num_threads()
    functions = (
        metrics.ece,
        metrics.aece,
        metrics.classwise_ece,
        metrics.mce,
        metrics.brier,
        metrics.nll,
        metrics.aurc,
    )
    expected = [float(function(probs, labels)) for function in functions]
    turned = probs.t().contiguous().t()
    rows = []
    for name, threads, table in (("1 thread", 1, probs), ("2 threads", 2, probs), ("4 threads", 4, probs),
                                 ("columns first", before, turned), ("numpy", before, probs.numpy())):  # fmt: skip
        torch.set_num_threads(threads)
        got = [float(function(table, labels)) for function in functions]
        rows.append(_row(name, got, expected))
    torch.set_num_threads(before)
    for size in (1, 7, 1000):
        some = min(n, 2000 if size == 1 else n)
        made = [metric.accumulator() for metric in functions]
        for start in range(0, some, size):
            for stream in made:
                stream.update(probs[start : start + size], labels[start : start + size])
        wanted = expected if some == n else [float(function(probs[:some], labels[:some])) for function in functions]
        rows.append(_row(f"batches of {size}" + (f", {some:,} samples" if some < n else ""), _floats(made), wanted))
    return rows


def _floats(made: list[Any]) -> list[float]:
    return [float(item.compute()) for item in made]


def _row(name: str, got: list[float], wanted: list[float]) -> dict[str, Any]:
    return {"way": name, "largest_difference": max(abs(a - b) for a, b in zip(got, wanted, strict=True))}


def main() -> int:
    """Run the campaign and print the table of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=[kind.name for kind in STREAMS], help="streams")
    parser.add_argument("--out", type=Path, default=Path("build/faults/streams.json"))
    given = parser.parse_args()
    kinds = tuple(kind for kind in STREAMS if given.only is None or kind.name in given.only)
    result = campaign(given.n, given.processes, given.seed, kinds) | {"ways": ways(min(given.n, 200_000), given.seed)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1))
    print(f"{result['n']:,} predictions, {result['processes']} processes: {result['streamed_s']:.0f} s streamed, "
          f"{result['seconds']:.0f} s in all, at most {result['process_mib']:,} MiB a process")  # fmt: skip
    print("\n| stream | counts equal | largest difference |\n|---|---|--:|")
    for row in result["streams"]:
        print(f"| `{row['stream']}` | {'yes' if row['counts_equal'] else 'NO'} | {row['largest_difference']:.1e} |")
    print("\n| the same table | largest difference |\n|---|--:|")
    for row in result["ways"]:
        print(f"| {row['way']} | {row['largest_difference']:.1e} |")
    good = all(row["counts_equal"] for row in result["streams"])
    return int(not good or any(row["largest_difference"] > 1e-12 for row in [*result["streams"], *result["ways"]]))


if __name__ == "__main__":
    sys.exit(main())
