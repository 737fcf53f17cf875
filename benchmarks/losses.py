"""Time forward and backward of every loss against label-smoothed cross-entropy, in one run, as ratios.

    python benchmarks/losses.py [--device cuda] [--shapes 128x10,512x100] [--json FILE]

The reference is `F.cross_entropy(logits, labels, label_smoothing=0.05)`. Modes:

    eager      plain calls
    compiled   `torch.compile(loss, fullgraph=True)`
    autotuned  the same with `mode="max-autotune-no-cudagraphs"`

On a GPU two times are measured: `device`, the step replayed as a CUDA graph, as in a captured training step; and
`wall`, the step called from Python, which small batches spend mostly in the interpreter.

Candidates take turns within a round, and the median over rounds counts, so that other load affects all of them equally.
`fedlas_* (fixed gate)` computes no gate; the difference is the cost of the gate. Peak memory is what a step allocates
beyond its inputs, gradients included. Matrix products may use TF32 unless `--float32` is given.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import fedlas

SHAPES = "128x10,512x100,1024x1000,8192x1000"
REFERENCE = "F.cross_entropy"
EAGER_REFERENCE = "F.cross_entropy, eager"
PAIRS_LIMIT = {"cpu": 10**8, "cuda": 10**11}
COMPILE_MODE = {"compiled": None, "autotuned": "max-autotune-no-cudagraphs"}
Step = Callable[[], None]


@dataclass(frozen=True)
class Figure:
    """One measurement: microseconds a step, and ratios to the reference in the same mode and in eager mode."""

    shape: str
    mode: str
    loss: str
    clock: str
    microseconds: float
    ratio: float
    ratio_to_eager: float
    peak_mib: float


class Reference(nn.Module):
    """The reference that losses are compared with."""

    def forward(self, logits: Tensor, labels: Tensor, _features: Tensor, _index: Tensor) -> Tensor:
        """Compute label-smoothed cross-entropy."""
        return functional.cross_entropy(logits, labels, label_smoothing=0.05)


def candidates(rows: int, classes: int, device: str) -> dict[str, nn.Module]:
    """Build the reference and all losses."""
    modules: dict[str, nn.Module] = {REFERENCE: Reference()}
    for record in fedlas.list_losses():
        if record.name == "cpc" and rows * classes * classes > PAIRS_LIMIT[torch.device(device).type]:
            continue
        sizes = {"num_samples": 50_000, "epochs": 100}
        options = {key: size for key, size in sizes.items() if key in record.keywords}
        modules[record.name] = fedlas.build_loss(record.name, num_classes=classes, **options)
        if "gate" in record.keywords:
            modules[f"{record.name} (fixed gate)"] = fedlas.build_loss(
                record.name, num_classes=classes, gate="positive"
            )
    return {name: loss.to(device) for name, loss in modules.items()}


def step_of(loss: Callable[..., Tensor], parameters: list[nn.Parameter], batch: dict[str, Tensor]) -> Step:
    """Return one step: forward, backward, gradients freed."""
    logits = batch["logits"]

    def step() -> None:
        loss(logits, batch["labels"], batch["features"], batch["index"]).backward()
        for leaf in (logits, *parameters):
            leaf.grad = None

    return step


def captured(step: Step) -> Step:
    """Capture a step in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def make_batch(rows: int, classes: int, device: str) -> dict[str, Tensor]:
    """Draw logits, labels, features and indices."""
    generator = torch.Generator().manual_seed(0)
    return {
        "logits": (3 * torch.randn(rows, classes, generator=generator)).to(device).requires_grad_(),
        "labels": torch.randint(0, classes, (rows,), generator=generator).to(device),
        "features": torch.rand(rows, 512, generator=generator).to(device),
        "index": torch.randperm(50_000, generator=generator)[:rows].to(device),
    }


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds(step: Step, repeats: int, device: str) -> float:
    """Time one step as the mean over repeats."""
    synchronise(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronise(device)
    return (time.perf_counter() - begin) / repeats


def peak_mib(step: Step, device: str) -> float:
    """Return the peak memory that a step allocates."""
    step()
    if not device.startswith("cuda"):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
        moves = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes: list[int] = [event.nbytes() for event in sorted(moves, key=lambda event: event.start_ns())]
        return max(itertools.accumulate(sizes, initial=0)) / 2**20
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def times(steps: dict[str, Step], device: str, budget: float, rounds: int = 7) -> dict[str, float]:
    """Time all steps in turns; return the median over rounds."""
    repeats = {}
    for name, step in steps.items():
        seconds(step, 2, device)
        once = seconds(step, 2, device)
        repeats[name] = max(1, min(300, int(budget / rounds / once)))
    result: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            result[name].append(seconds(step, repeats[name], device))
    return {name: statistics.median(values) for name, values in result.items()}


def measure(shape: str, device: str, modes: list[str], budget: float, only: list[str]) -> list[Figure]:
    """Time every loss in every mode at one shape."""
    rows, classes = (int(part) for part in shape.split("x"))
    figures: list[Figure] = []
    clocks = ["device", "wall"] if device.startswith("cuda") else ["wall"]
    for mode in modes:
        torch._dynamo.reset()
        batch = make_batch(rows, classes, device)
        steps, peaks = {}, {}
        for name, loss in candidates(rows, classes, device).items():
            if only and name != REFERENCE and name.split(" ")[0] not in only:
                continue
            call = loss if mode == "eager" else torch.compile(loss, fullgraph=True, mode=COMPILE_MODE[mode])
            steps[name] = step_of(call, list(loss.parameters()), batch)
            peaks[name] = peak_mib(steps[name], device)
        # The eager reference is timed again in every mode, under the same load.
        steps[EAGER_REFERENCE] = step_of(Reference(), [], batch)
        for clock in clocks:
            timed = {name: captured(step) for name, step in steps.items()} if clock == "device" else steps
            result = times(timed, device, budget)
            eager = result.pop(EAGER_REFERENCE)
            figures += [
                Figure(
                    shape,
                    mode,
                    name,
                    clock,
                    t * 1e6,
                    t / result[REFERENCE],
                    t / eager,
                    peaks[name],
                )
                for name, t in result.items()
            ]
        print(table([figure for figure in figures if figure.mode == mode]), flush=True)
    return figures


def table(figures: list[Figure]) -> str:
    """Return the measurements of one shape and mode as a Markdown table."""
    clocks = sorted({figure.clock for figure in figures})
    head = [f"{clock} µs | x reference | x eager reference" for clock in clocks]
    lines = [
        f"\n### {figures[0].shape.replace('x', ' x ')}, {figures[0].mode}\n",
        f"| loss | {' | '.join(head)} | peak MiB |",
        "|---|" + "---:|" * (3 * len(clocks) + 1),
    ]
    for name in dict.fromkeys(figure.loss for figure in figures):
        row = sorted((figure for figure in figures if figure.loss == name), key=lambda figure: figure.clock)
        cells = [f"{f.microseconds:.0f} | {f.ratio:.2f} | {f.ratio_to_eager:.2f}" for f in row]
        lines.append(f"| {name} | {' | '.join(cells)} | {row[0].peak_mib:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--modes", default="eager,compiled", help="also: autotuned")
    parser.add_argument("--losses", default="", help="comma-separated names; default: all")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds for each loss, mode and shape")
    parser.add_argument("--float32", action="store_true", help="no TF32 in matrix products")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 100  # all losses share the code of one forward
    torch.set_float32_matmul_precision("highest" if arguments.float32 else "high")
    where = (
        torch.cuda.get_device_name()
        if arguments.device.startswith("cuda")
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(f"torch {torch.__version__}, {where}, TF32 {'off' if arguments.float32 else 'on'}")
    only = [name for name in arguments.losses.split(",") if name]
    figures = [
        figure
        for shape in arguments.shapes.split(",")
        for figure in measure(shape, arguments.device, arguments.modes.split(","), arguments.budget, only)
    ]
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
