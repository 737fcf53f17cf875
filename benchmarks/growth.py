"""How cost grows: time and memory of losses, metrics, evaluation and report against samples, classes and width.

    python benchmarks/growth.py                  measure, draw docs/pictures/growth_*.svg, print the table
    python benchmarks/growth.py --quick          a minute, for the tests
    python benchmarks/growth.py --only stream

Each series doubles or multiplies one number and keeps the others; it ends at the number that it is given, or where one
call would take longer than `--patience`. The exponent is the slope of a line through the later half of the points on
paper with logarithms on both axes: 1 is linear, N log N looks like 1.1, 2 is quadratic. One that exceeds the limit
of its series, `LINEAR` or `QUADRATIC`, is named at the end, and so is a stream of sums that takes more than `SUMS` for
each sample after the first chunks; the exit status is then 1. Seconds are those of one processor, whatever else it did
meanwhile, the fewest of some rounds. Every point is measured in a process of its own; memory is how far its highest use
rose above what the input takes. Training is watched epoch by epoch instead: nothing may grow there.
"""

import argparse
import ctypes
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
AT_LEAST = 0.2  # seconds that short calls are repeated for
PATIENCE = {"loss": 8.0, "metric": 8.0, "stream": 120.0, "evaluate": 60.0}
SMALL = 1e-3  # seconds below which a call measures its own overhead
CHUNK = 1_000_000
GATE_CLASSES, PAIR_CLASSES = 10_000, 2_000
CLASSES = (2, 10, 100, 1_000, 10_000, 100_000)
LINEAR, QUADRATIC = 1.5, 2.5  # largest exponents: halfway to the next whole one, as caches alone make 1 look like 1.3
SUMS = 0.5  # bytes that each further sample may add to a stream that keeps sums alone; a sample kept has one at least
KEEPING = {"AECE", "AURC", "SmoothECE"}  # streams that keep 5 bytes a sample
LITTLE = 2**24  # bytes below which memory is that of libraries
Call = Callable[[], object]


@dataclass(frozen=True)
class Point:
    """One measurement: of what, against which number, its size, seconds and bytes."""

    kind: str
    name: str
    against: str
    size: int
    seconds: float
    memory: int


def peak() -> int:
    """Say the most memory that this process has held, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def apart(make: Callable[[int], Call], size: int) -> tuple[float, int]:
    """Measure in a process of its own: what an earlier call has freed would hide what this one takes."""
    own, other = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)
        other.send(measured(make(size)))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    other.close()
    try:
        found: tuple[float, int] = own.recv()
    except EOFError:
        raise RuntimeError(f"the process that measured size {size:,} died") from None
    finally:
        process.join()
        own.close()
    return found


def measured(call: Call, rounds: int = ROUNDS) -> tuple[float, int]:
    """Give the fastest of some rounds, and the memory of the first beyond what was held."""
    ctypes.CDLL(None).malloc_trim(0)  # what making the input has left over
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, best = peak(), math.inf
    memory, turn, spent = 0, 0, 0.0
    while turn < rounds or (spent < AT_LEAST and turn < 10 * rounds):
        start = time.process_time()  # of one thread: other programs do not count
        call()
        took = time.process_time() - start
        best, spent = min(best, took), spent + took
        memory = peak() - before if turn == 0 else memory
        turn += 1
        if took > 1:
            break
    return best, memory


def series(  # noqa: PLR0917 (a sentence)
    kind: str, name: str, against: str, sizes: list[int], make: Callable[[int], Call], patience: float
) -> Iterator[Point]:
    """Measure one thing at growing sizes, until a call would take too long."""
    points: list[Point] = []
    for size in sizes:
        if points and _next(points, size) > patience:
            return
        points.append(Point(kind, name, against, size, *apart(make, size)))
        yield points[-1]


def _next(points: list[Point], size: int) -> float:
    """Guess how long a call will take, from the last two; the first may be all overhead."""
    last = points[-1]
    if len(points) < 2:
        return last.seconds
    slope = math.log(last.seconds / points[-2].seconds) / math.log(last.size / points[-2].size)
    return float(last.seconds * (size / last.size) ** max(slope, 0.0))


def powers(low: int, high: int, step: int = 10) -> list[int]:
    """List the powers between two numbers."""
    found = [low]
    while found[-1] * step <= high:
        found.append(found[-1] * step)
    return found


def problem(n: int, classes: int, width: int = 16) -> tuple[torch.Tensor, ...]:
    """Draw logits, labels, features and positions."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, classes, generator=draw)
    labels = torch.randint(classes, (n,), generator=draw)
    return logits, labels, torch.rand(n, width, generator=draw), torch.arange(n)


def loss_step(name: str, n: int, classes: int, width: int = 16) -> Call:
    """Make a training step of one loss: value and gradient."""
    record = next(one for one in fedlas.list_losses() if one.name == name)
    sizes = {"num_classes": classes, "num_samples": n, "epochs": 5}
    loss = fedlas.build_loss(name, **{word: size for word, size in sizes.items() if word in record.keywords})
    logits, labels, features, index = problem(n, classes, width)
    logits.requires_grad_()

    def step() -> None:
        logits.grad = None
        loss(logits, labels, features, index).backward()

    return step


def losses(most: int, patience: float) -> Iterator[Point]:
    """Every loss against samples and classes, those with features against width."""
    for record in fedlas.list_losses():
        name = record.name
        gated, paired = "gate" in record.keywords, "lambda_bec" in record.keywords
        yield from series("loss", name, "N", powers(1_000, most), partial(loss_step, name, classes=10), patience)
        top = GATE_CLASSES if gated else PAIR_CLASSES if paired else 100_000
        sizes = sorted({c for c in CLASSES if c <= top} | {top})
        yield from series("loss", name, "C", sizes, partial(loss_step, name, 64), patience)
        if gated:
            yield from series("loss", name, "D", powers(16, 65_536, 4), partial(loss_step, name, 256, 10), patience)


def metric_call(function: Callable[..., Any], n: int, classes: int) -> Call:
    """Make a call of one metric."""
    logits, labels, *_ = problem(n, classes)
    probs = logits.softmax(1)
    return lambda: function(probs, labels)


def metric_functions() -> dict[str, Callable[..., Any]]:
    """Find the public functions of probabilities and labels."""
    import inspect

    found = {name: getattr(metrics, name) for name in metrics.__all__}
    plain = {name: one for name, one in found.items() if inspect.isfunction(one)}
    return {n: f for n, f in plain.items() if list(inspect.signature(f).parameters)[:2] == ["probs", "labels"]}


def functions(most: int, patience: float) -> Iterator[Point]:
    """Every metric against samples and classes."""
    for name, one in metric_functions().items():
        yield from series("metric", name, "N", powers(1_000, most), partial(metric_call, one, classes=10), patience)
        yield from series("metric", name, "C", [*CLASSES], partial(metric_call, one, 100), patience)


def streams(most: int, patience: float) -> Iterator[Point]:
    """Every stream against samples, fed with the same chunk again and again."""
    logits, labels, *_ = problem(min(CHUNK, most), 10)
    probs = logits.softmax(1)
    for name, metric in all_metrics().items():

        def feed(n: int, metric: Any = metric) -> Call:
            def call() -> object:
                made = metric.accumulator()
                for start in range(0, n, CHUNK):
                    made.update(probs[: n - start], labels[: n - start])
                return made.compute()

            return call

        yield from series("stream", name, "N", powers(1_000, most), feed, patience)


def evaluations(most: int, patience: float) -> Iterator[Point]:
    """Measure evaluation, with and without intervals, and the report page."""

    def given(n: int, classes: int) -> Predictions:
        logits, labels, *_ = problem(n, classes)
        return Predictions(logits, labels)

    def page(n: int, classes: int) -> Call:
        made = given(n, classes)
        report = fedlas.evaluate(made, intervals=False)
        folder = tempfile.mkdtemp()
        return lambda: fedlas.save_page({"m": fedlas.Model(predictions=made, report=report)}, Path(folder) / "p.html")

    def evaluation(n: int, classes: int, **options: Any) -> Call:
        made = given(n, classes)
        return lambda: fedlas.evaluate(made, **options)

    calls: dict[str, Callable[..., Call]] = {
        "evaluate": evaluation,
        "evaluate, no intervals": partial(evaluation, intervals=False),
        "report page": page,
    }
    for name, one in calls.items():
        yield from series("evaluate", name, "N", powers(1_000, most), partial(one, classes=10), patience)
        yield from series("evaluate", name, "C", [*CLASSES], partial(one, 100), patience)


def training(epochs: int, **options: Any) -> list[dict[str, float]]:
    """Train on digits and note memory and open files after each epoch; options are those of a recipe."""
    from fedlas.training.callbacks import AbstractCallback

    class Watch(AbstractCallback):
        """Notes what is held."""

        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def on_epoch_end(self, record: Any) -> None:
            ctypes.CDLL(None).malloc_trim(0)  # what is free is not held
            text = Path("/proc/self/status").read_text(encoding="ascii")
            held = int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS"))) / 1024
            self.seen.append(
                {"epoch": record["epoch"], "mib": held, "files": len(list(Path("/proc/self/fd").iterdir()))}
            )

    watch = Watch()
    common: dict[str, Any] = {
        "data": "digits",
        "model": "small_cnn",
        "loss": "fedlas_ls",
        "batch_size": 256,
        "compile": False,
    }
    recipe = fedlas.Recipe(epochs=epochs, **common | options)
    with tempfile.TemporaryDirectory() as folder:
        fedlas.fit(recipe, out=Path(folder) / "run", callbacks=[watch], device="cpu", progress=False)
    return watch.seen


def exponent(points: list[Point], of: str = "seconds", least: float = SMALL) -> float | None:
    """Fit the slope of the later half of a series; None where calls are too short, or take too little, to say."""
    held = [point for point in points if getattr(point, of) > least][-max(2, len(points) // 2) :]
    if len(held) < 2:
        return None
    x, y = (np.log([getattr(point, name) for point in held]) for name in ("size", of))
    return float(np.polyfit(x, y, 1)[0])


def limit(kind: str, name: str, against: str) -> float:
    """Say which exponent a series may have; a gate of C // 2 units and pairs of classes may have the square of C."""
    if kind != "loss" or against != "C":
        return LINEAR
    keywords = next((one.keywords for one in fedlas.list_losses() if one.name == name), ())
    return QUADRATIC if {"gate", "lambda_bec"} & set(keywords) else LINEAR


def excesses(points: list[Point]) -> list[str]:
    """Name the series that grow faster than they may, in time or in memory, and streams that keep too much."""
    found = []
    for key, own in grouped(points).items():
        for of, slope in (("time", exponent(own)), ("memory", exponent(own, "memory", LITTLE))):
            if slope is not None and slope > limit(*key):
                found.append(f"{' '.join(key)}: {of} grows with the power {slope:.2f}; {limit(*key)} is allowed")
        kind, name, _ = key
        if kind == "stream" and name not in KEEPING and (each := bytes_a_sample(own)) > SUMS:
            found.append(f"{' '.join(key)}: takes {each:.1f} bytes for each further sample and should keep sums alone")
    return found


def bytes_a_sample(points: list[Point]) -> float:
    """Say how much memory a sample adds once chunks are full; their working space is the same however many follow."""
    full = [point for point in points if point.size > CHUNK][-2:]
    if len(full) < 2:
        return 0.0
    return (full[1].memory - full[0].memory) / (full[1].size - full[0].size)


def grouped(points: list[Point]) -> dict[tuple[str, str, str], list[Point]]:
    """Put the points of each series together."""
    found: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.kind, point.name, point.against), []).append(point)
    return found


def table(points: list[Point]) -> str:
    """Lay the series out for the page."""
    rows = [
        "| what | against | up to | seconds there | exponent | memory there, MiB | its exponent | limit |",
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
    for (what, name, over), own in grouped(points).items():
        if (what, over) == (kind, against):
            slope = exponent(own)
            text = name if slope is None else f"{name} ({slope:.2f})"
            axes.loglog([p.size for p in own], [p.seconds for p in own], marker=".", linewidth=1, label=text)
    axes.set(xlabel=against, ylabel="processor seconds", title=f"{kind} against {against} (fitted exponent)")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=5, ncols=2)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    """Measure, draw and print; the exit status is 1 if anything grows faster than its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["loss", "metric", "stream", "evaluate", "training"])
    parser.add_argument("--most", type=int, default=10_000_000, help="samples of metrics and evaluation")
    parser.add_argument("--streamed", type=int, default=100_000_000, help="samples of streams")
    parser.add_argument("--patience", type=float, help=f"seconds that one call may take (default: {PATIENCE})")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "growth.json")
    given = parser.parse_args()
    if given.quick:
        given.most, given.streamed, given.patience, given.epochs = 10_000, 100_000, 0.3, 3
    torch.set_num_threads(1)
    patience = PATIENCE if given.patience is None else dict.fromkeys(PATIENCE, given.patience)
    makers = {
        "loss": lambda: losses(min(given.most, 1_000_000), patience["loss"]),
        "metric": lambda: functions(given.most, patience["metric"]),
        "stream": lambda: streams(given.streamed, patience["stream"]),
        "evaluate": lambda: evaluations(given.most, patience["evaluate"]),
    }
    points: list[Point] = []
    for kind, make in makers.items():
        if kind in given.only:
            for point in make():
                points.append(point)
                print(f"{kind} {point.name} {point.against}={point.size:,} {point.seconds:.4g} s", flush=True)
    trained = training(given.epochs) if "training" in given.only else []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"points": [asdict(one) for one in points], "training": trained}), encoding="utf-8")
    print(table(points))
    if trained:
        first, last = trained[min(4, len(trained) - 1)], trained[-1]
        print(f"training, epoch {first['epoch']}: {first}; epoch {last['epoch']}: {last}")
    if not given.quick:
        for kind, against in sorted({(one.kind, one.against) for one in points}):
            draw(points, kind, against, ROOT / "docs" / "pictures" / f"growth_{kind}_{against}.svg")
    bad = excesses(points)
    print(*bad, sep="\n", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
