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


def process_part(chunk_arguments: tuple[range, int, int, int], kinds: tuple[Any, ...] = STREAMS) -> tuple[bytes, int]:
    """Update all accumulators with the samples of one process; return bytes, as tensors would need open files."""
    torch.set_num_threads(1)
    accumulators, samples = [kind.accumulator() for kind in kinds], 0
    for probs, labels in chunks(*chunk_arguments):
        samples += len(labels)
        for stream in accumulators:
            stream.update(probs, labels)
    return pickle.dumps(accumulators), samples


def campaign(
    n: int, processes: int, seed: int, kinds: tuple[Any, ...] = STREAMS, length: int = BLOCK
) -> dict[str, Any]:
    """Compare accumulators merged over processes, in a random order, with one pass."""
    start = time.monotonic()
    block_numbers = blocks(n, length)
    ranges = [
        range(k * len(block_numbers) // processes, (k + 1) * len(block_numbers) // processes) for k in range(processes)
    ]
    with multiprocessing.get_context("spawn").Pool(min(processes, len(block_numbers))) as pool:
        result = pool.map(
            partial(process_part, kinds=kinds), [(block_range, n, seed, length) for block_range in ranges], chunksize=1
        )
    order = torch.randperm(processes, generator=torch.Generator().manual_seed(seed)).tolist()
    merged = pickle.loads(result[order[0]][0])
    for position in order[1:]:
        merged = [first.merge(second) for first, second in zip(merged, pickle.loads(result[position][0]), strict=True)]
    streamed = time.monotonic() - start
    rows = []
    single_pass = [kind.accumulator() for kind in kinds]
    for number in block_numbers:
        probs, labels = block(number, n, seed, length)
        for stream in single_pass:
            stream.update(probs, labels)
    for merged_stream, single_stream in zip(merged, single_pass, strict=True):
        rows.append({"stream": type(merged_stream).__name__, **_compared(merged_stream, single_stream)})
    process_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    summary = {"n": n, "processes": processes, "streamed_s": streamed, "seconds": time.monotonic() - start}
    return summary | {"process_mib": process_mib, "streams": rows, "parts": [{"n": samples} for _, samples in result]}


def _compared(merged: Any, single: Any) -> dict[str, Any]:
    merged_values, single_values = (_values(first.compute()) for first in (merged, single))
    counts_equal = all(a.n == b.n for a, b in zip(_results(merged), _results(single), strict=True))
    if hasattr(merged.store, "histogram"):
        counts_equal = counts_equal and torch.equal(
            *(first.store.histogram().bins.counts for first in (merged, single))
        )
    return {
        "counts_equal": counts_equal,
        "largest_difference": max(abs(a - b) for a, b in zip(merged_values, single_values, strict=True)),
    }


def _results(stream: Any) -> list[Any]:
    result = stream.compute()
    return [item.definition for item in (result if isinstance(result, tuple) else (result,))]


def _values(result: Any) -> list[float]:
    return [float(item) for item in (result if isinstance(result, tuple) else (result,))]


def compare_variants(n: int, seed: int) -> list[dict[str, Any]]:
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
    column_major = probs.t().contiguous().t()
    rows = []
    for name, threads, table in (
        ("1 thread", 1, probs),
        ("2 threads", 2, probs),
        ("4 threads", 4, probs),
        ("columns first", before, column_major),
        ("numpy", before, probs.numpy()),
    ):
        torch.set_num_threads(threads)
        values = [float(function(table, labels)) for function in functions]
        rows.append(_row(name, values, expected))
    torch.set_num_threads(before)
    for size in (1, 7, 1000):
        samples = min(n, 2000 if size == 1 else n)
        accumulators = [metric.accumulator() for metric in functions]
        for start in range(0, samples, size):
            for stream in accumulators:
                stream.update(probs[start : start + size], labels[start : start + size])
        expected_values = (
            expected if samples == n else [float(function(probs[:samples], labels[:samples])) for function in functions]
        )
        rows.append(
            _row(
                f"batches of {size}" + (f", {samples:,} samples" if samples < n else ""),
                _floats(accumulators),
                expected_values,
            )
        )
    return rows


def _floats(accumulators: list[Any]) -> list[float]:
    return [float(item.compute()) for item in accumulators]


def _row(name: str, values: list[float], expected: list[float]) -> dict[str, Any]:
    return {"variant": name, "largest_difference": max(abs(a - b) for a, b in zip(values, expected, strict=True))}


def main() -> int:
    """Run the campaign and print the table of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=[kind.name for kind in STREAMS], help="streams")
    parser.add_argument("--out", type=Path, default=Path("build/faults/streams.json"))
    arguments = parser.parse_args()
    kinds = tuple(kind for kind in STREAMS if arguments.only is None or kind.name in arguments.only)
    result = campaign(arguments.n, arguments.processes, arguments.seed, kinds) | {
        "variants": compare_variants(min(arguments.n, 200_000), arguments.seed)
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1))
    print(f"{result['n']:,} predictions, {result['processes']} processes: {result['streamed_s']:.0f} s streamed, "
          f"{result['seconds']:.0f} s in all, at most {result['process_mib']:,} MiB a process")  # fmt: skip
    print("\n| stream | counts equal | largest difference |\n|---|---|--:|")
    for row in result["streams"]:
        print(f"| `{row['stream']}` | {'yes' if row['counts_equal'] else 'NO'} | {row['largest_difference']:.1e} |")
    print("\n| the same table | largest difference |\n|---|--:|")
    for row in result["variants"]:
        print(f"| {row['variant']} | {row['largest_difference']:.1e} |")
    counts_equal = all(row["counts_equal"] for row in result["streams"])
    return int(
        not counts_equal or any(row["largest_difference"] > 1e-12 for row in [*result["streams"], *result["variants"]])
    )


if __name__ == "__main__":
    sys.exit(main())
