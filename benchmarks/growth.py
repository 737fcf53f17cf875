"""Measure how time and memory of losses, metrics, evaluation and report grow with samples, classes and feature width.

    python benchmarks/growth.py                  measure, draw build/growth_*.svg, print the table
    python benchmarks/growth.py --quick          small sizes, about a minute
    python benchmarks/growth.py --only stream

Each series increases one size and fixes the others. It ends at its largest size, or where a call would take longer than
`--patience`. The exponent is the slope of the later half of the points on log-log axes: 1 is linear, N log N looks like
1.1, 2 is quadratic. The command prints every series whose exponent exceeds `LINEAR` or `QUADRATIC` and every
constant-memory accumulator that needs more than `SUMS` bytes per additional sample; its exit status is then 1. Times
are CPU seconds of one thread, the minimum over several rounds. Each point is measured in its own process; memory is the
peak above the memory of the input. For training, memory and open files are recorded after each epoch.
"""

import argparse
import ctypes
import inspect
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedlas
from fedlas import metrics
from fedlas.metrics.registry import all_metrics
from fedlas.predictions import Predictions

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 3
MIN_SECONDS = 0.2  # short calls are repeated for this time
PATIENCE = {"loss": 8.0, "metric": 8.0, "stream": 120.0, "evaluate": 60.0}
SMALL = 1e-3  # seconds; shorter calls measure mostly overhead
CHUNK = 1_000_000
GATE_CLASSES, PAIR_CLASSES = 10_000, 2_000
CLASSES = (2, 10, 100, 1_000, 10_000, 100_000)
LINEAR, QUADRATIC = 1.5, 2.5  # largest exponents; caches alone make a linear series look like 1.3
SUMS = 0.5  # largest number of bytes per additional sample of an accumulator that stores sums only
LITTLE = 2**24  # bytes; smaller amounts are memory of libraries
Call = Callable[[], object]


@dataclass(frozen=True)
class Point:
    """One measurement: kind and name, the size that is varied ("N", "C" or "D"), its value, seconds and bytes."""

    kind: str
    name: str
    against: str
    size: int
    seconds: float
    memory: int


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def measure_in_process(make: Callable[[int], Call], size: int) -> tuple[float, int]:
    """Measure a call in a new process, where no memory freed by earlier calls can be reused."""
    own, other = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        other.send(measure(make(size)))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    other.close()
    try:
        measurement: tuple[float, int] = own.recv()
    except EOFError:
        raise RuntimeError(f"the process that measured size {size:,} died") from None
    finally:
        process.join()
        own.close()
    return measurement


def measure(call: Call, rounds: int = ROUNDS) -> tuple[float, int]:
    """Return the time of the fastest round, and the additional peak memory of the first."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed while the input was made
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, best = peak(), math.inf
    memory, turn, spent = 0, 0, 0.0
    while turn < rounds or (spent < MIN_SECONDS and turn < 10 * rounds):
        start = time.process_time()  # other programs do not count
        call()
        took = time.process_time() - start
        best, spent = min(best, took), spent + took
        memory = peak() - before if turn == 0 else memory
        turn += 1
        if took > 1:
            break
    return best, memory


def series(  # noqa: PLR0917
    kind: str, name: str, against: str, sizes: list[int], make: Callable[[int], Call], patience: float
) -> Iterator[Point]:
    """Measure a call at increasing sizes, until it would take too long."""
    points: list[Point] = []
    for size in sizes:
        if points and _next(points, size) > patience:
            return
        points.append(Point(kind, name, against, size, *measure_in_process(make, size)))
        yield points[-1]


def _next(points: list[Point], size: int) -> float:
    """Extrapolate the time of the next call from the last two; the first may be mostly overhead."""
    last = points[-1]
    if len(points) < 2:
        return last.seconds
    slope = math.log(last.seconds / points[-2].seconds) / math.log(last.size / points[-2].size)
    return float(last.seconds * (size / last.size) ** max(slope, 0.0))


def powers(low: int, high: int, step: int = 10) -> list[int]:
    """Return a geometric sequence of sizes."""
    sizes = [low]
    while sizes[-1] * step <= high:
        sizes.append(sizes[-1] * step)
    return sizes


def problem(n: int, classes: int, width: int = 16) -> tuple[torch.Tensor, ...]:
    """Draw logits, labels, features and indices."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, classes, generator=draw)
    labels = torch.randint(classes, (n,), generator=draw)
    return logits, labels, torch.rand(n, width, generator=draw), torch.arange(n)


def loss_step(name: str, n: int, classes: int, width: int = 16) -> Call:
    """Return a call of a loss and its backward pass."""
    record = next(record for record in fedlas.list_losses() if record.name == name)
    sizes = {"num_classes": classes, "num_samples": n, "epochs": 5}
    loss = fedlas.build_loss(name, **{key: size for key, size in sizes.items() if key in record.keywords})
    logits, labels, features, index = problem(n, classes, width)
    logits.requires_grad_()

    def step() -> None:
        logits.grad = None
        loss(logits, labels, features, index).backward()

    return step


def losses(most: int, patience: float) -> Iterator[Point]:
    """Measure every loss against samples and classes, and losses with a gate against the feature width."""
    for record in fedlas.list_losses():
        name = record.name
        gated, paired = "gate" in record.keywords, "lambda_bec" in record.keywords
        yield from series("loss", name, "N", powers(1_000, most), partial(loss_step, name, classes=10), patience)
        top = GATE_CLASSES if gated else PAIR_CLASSES if paired else 100_000
        sizes = sorted({c for c in CLASSES if c <= top} | {top})
        yield from series("loss", name, "C", sizes, partial(loss_step, name, 64), patience)
        if gated:
            yield from series("loss", name, "D", powers(16, 65_536, 4), partial(loss_step, name, 256, 10), patience)


def metric_call(metric: Callable[..., Any], n: int, classes: int) -> Call:
    """Return a call of one metric."""
    logits, labels, *_ = problem(n, classes)
    probs = logits.softmax(1)
    return lambda: metric(probs, labels)


def metric_callables() -> dict[str, Callable[..., Any]]:
    """Return all metrics, and the other public functions of probabilities and labels."""
    functions = {name: getattr(metrics, name) for name in metrics.__all__ if inspect.isfunction(getattr(metrics, name))}
    takes_probs = {
        n: f for n, f in functions.items() if list(inspect.signature(f).parameters)[:2] == ["probs", "labels"]
    }
    return all_metrics() | takes_probs


def metric_series(most: int, patience: float) -> Iterator[Point]:
    """Measure every metric against samples and classes."""
    for name, metric in metric_callables().items():
        yield from series("metric", name, "N", powers(1_000, most), partial(metric_call, metric, classes=10), patience)
        yield from series("metric", name, "C", [*CLASSES], partial(metric_call, metric, 100), patience)


def streams(most: int, patience: float) -> Iterator[Point]:
    """Measure every accumulator against samples, updated with the same chunk repeatedly."""
    logits, labels, *_ = problem(min(CHUNK, most), 10)
    probs = logits.softmax(1)
    for name, metric in all_metrics().items():

        def accumulate(n: int, metric: Any = metric) -> Call:
            def call() -> object:
                accumulator = metric.accumulator()
                for start in range(0, n, CHUNK):
                    accumulator.update(probs[: n - start], labels[: n - start])
                return accumulator.compute()

            return call

        yield from series("stream", name, "N", powers(1_000, most), accumulate, patience)


def evaluations(most: int, patience: float) -> Iterator[Point]:
    """Measure evaluation, with and without intervals, and the report page."""

    def predictions(n: int, classes: int) -> Predictions:
        logits, labels, *_ = problem(n, classes)
        return Predictions(logits, labels)

    def page(n: int, classes: int) -> Call:
        evaluated = predictions(n, classes)
        model = fedlas.Model(predictions=evaluated, report=fedlas.evaluate(evaluated, intervals=False))
        folder = tempfile.mkdtemp()
        return lambda: fedlas.save_page({"m": model}, Path(folder) / "p.html")

    def evaluation(n: int, classes: int, **options: Any) -> Call:
        evaluated = predictions(n, classes)
        return lambda: fedlas.evaluate(evaluated, **options)

    calls: dict[str, Callable[..., Call]] = {
        "evaluate": evaluation,
        "evaluate, no intervals": partial(evaluation, intervals=False),
        "report page": page,
    }
    for name, make in calls.items():
        yield from series("evaluate", name, "N", powers(1_000, most), partial(make, classes=10), patience)
        yield from series("evaluate", name, "C", [*CLASSES], partial(make, 100), patience)


def training(epochs: int, **options: Any) -> list[dict[str, float]]:
    """Train on digits and record memory and open files after each epoch; options are those of a recipe."""
    from fedlas.training.callbacks import AbstractCallback

    class ResourceMonitor(AbstractCallback):
        """Records resident memory and open files."""

        def __init__(self) -> None:
            self.records: list[dict[str, float]] = []

        def on_epoch_end(self, record: Any) -> None:
            ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
            status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            resident = int(next(line.split()[1] for line in status if line.startswith("VmRSS"))) / 1024
            files = len(list(Path("/proc/self/fd").iterdir()))
            self.records.append({"epoch": record["epoch"], "mib": resident, "files": files})

    monitor = ResourceMonitor()
    common: dict[str, Any] = {
        "data": "digits",
        "model": "small_cnn",
        "loss": "fedlas_ls",
        "batch_size": 256,
        "compile": False,
    }
    recipe = fedlas.Recipe(epochs=epochs, **common | options)
    with tempfile.TemporaryDirectory() as folder:
        fedlas.fit(recipe, out=Path(folder) / "run", callbacks=[monitor], device="cpu", progress=False)
    return monitor.records


def exponent(points: list[Point], of: str = "seconds", least: float = SMALL) -> float | None:
    """Return the log-log slope of the later half of a series; None if its values are too small to measure."""
    later = [point for point in points if getattr(point, of) > least][-max(2, len(points) // 2) :]
    if len(later) < 2:
        return None
    x, y = (np.log([getattr(point, name) for point in later]) for name in ("size", of))
    return float(np.polyfit(x, y, 1)[0])


def limit(kind: str, name: str, against: str) -> float:
    """Return the largest exponent of a series: quadratic in C for a gate of C // 2 units and for pairs of classes."""
    if kind != "loss" or against != "C":
        return LINEAR
    keywords = next((record.keywords for record in fedlas.list_losses() if record.name == name), ())
    return QUADRATIC if {"gate", "lambda_bec"} & set(keywords) else LINEAR


def stores_sums(name: str) -> bool:
    """Return whether the accumulator of a metric stores sums only, and no samples."""
    state = all_metrics()[name].accumulator().empty_state(num_classes=2)
    return not any(isinstance(part, list) for part in state.values())


def excesses(points: list[Point]) -> list[str]:
    """Return a message for each series that grows too fast in time or memory."""
    messages = []
    for (kind, name, against), own in grouped(points).items():
        title, largest = f"{kind} {name} {against}", limit(kind, name, against)
        for of, slope in (("time", exponent(own)), ("memory", exponent(own, "memory", LITTLE))):
            if slope is not None and slope > largest:
                messages.append(f"{title}: {of} grows with the power {slope:.2f}; {largest} is allowed")
        if kind == "stream" and stores_sums(name) and (added := bytes_per_sample(own)) > SUMS:
            messages.append(f"{title}: needs {added:.1f} bytes per additional sample, but should store sums only")
    return messages


def bytes_per_sample(points: list[Point]) -> float:
    """Return the memory per additional sample, from the two largest sizes above one chunk."""
    full = [point for point in points if point.size > CHUNK][-2:]
    if len(full) < 2:
        return 0.0
    return (full[1].memory - full[0].memory) / (full[1].size - full[0].size)


def grouped(points: list[Point]) -> dict[tuple[str, str, str], list[Point]]:
    """Return the points of each series."""
    points_of: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        points_of.setdefault((point.kind, point.name, point.against), []).append(point)
    return points_of


def table(points: list[Point]) -> str:
    """Return a Markdown table with one row for each series."""
    rows = [
        "| series | against | up to | seconds | exponent | memory, MiB | its exponent | limit |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (kind, name, against), own in grouped(points).items():
        last, slopes = own[-1], (exponent(own), exponent(own, "memory", LITTLE))
        time_slope, memory_slope = ("-" if slope is None else f"{slope:.2f}" for slope in slopes)
        numbers = f"{last.size:,} | {last.seconds:.3g} | {time_slope} | {last.memory / 2**20:.0f} | {memory_slope}"
        numbers += f" | {limit(kind, name, against)}"
        rows.append(f"| {kind} `{name}` | {against} | {numbers} |")
    return "\n".join(rows)


def draw(points: list[Point], kind: str, against: str, path: Path) -> None:
    """Draw the series of one kind on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "fedlas"
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for (own_kind, name, own_against), own in grouped(points).items():
        if (own_kind, own_against) == (kind, against):
            slope = exponent(own)
            text = name if slope is None else f"{name} ({slope:.2f})"
            axes.loglog([p.size for p in own], [p.seconds for p in own], marker=".", linewidth=1, label=text)
    axes.set(xlabel=against, ylabel="CPU seconds", title=f"{kind} against {against} (fitted exponent)")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=5, ncols=2)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """Measure, draw and print; return 1 if a series grows faster than its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["loss", "metric", "stream", "evaluate", "training"])
    parser.add_argument("--most", type=int, default=10_000_000, help="samples of metrics and evaluation")
    parser.add_argument("--streamed", type=int, default=100_000_000, help="samples of accumulators")
    parser.add_argument("--patience", type=float, help=f"seconds that one call may take (default: {PATIENCE})")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "growth.json")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.most, arguments.streamed, arguments.patience, arguments.epochs = 10_000, 100_000, 0.3, 3
    torch.set_num_threads(1)
    patience = PATIENCE if arguments.patience is None else dict.fromkeys(PATIENCE, arguments.patience)
    makers = {
        "loss": lambda: losses(min(arguments.most, 1_000_000), patience["loss"]),
        "metric": lambda: metric_series(arguments.most, patience["metric"]),
        "stream": lambda: streams(arguments.streamed, patience["stream"]),
        "evaluate": lambda: evaluations(arguments.most, patience["evaluate"]),
    }
    points: list[Point] = []
    for kind, make in makers.items():
        if kind in arguments.only:
            for point in make():
                points.append(point)
                print(f"{kind} {point.name} {point.against}={point.size:,} {point.seconds:.4g} s", flush=True)
    trained = training(arguments.epochs) if "training" in arguments.only else []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"points": [asdict(point) for point in points], "training": trained}
    arguments.out.write_text(json.dumps(results), encoding="utf-8")
    print(table(points))
    if trained:
        first, last = trained[min(4, len(trained) - 1)], trained[-1]
        print(f"training, epoch {first['epoch']}: {first}; epoch {last['epoch']}: {last}")
    if not arguments.quick:
        for kind, against in sorted({(point.kind, point.against) for point in points}):
            draw(points, kind, against, arguments.out.parent / f"growth_{kind}_{against}.svg")
    messages = excesses(points)
    print(*messages, sep="\n", file=sys.stderr)
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
