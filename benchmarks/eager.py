"""Time forward and backward of losses against `nn.CrossEntropyLoss`, eagerly on one CPU thread, as ratios of one run.

    python benchmarks/eager.py [--losses ce,fedlas_ls] [--rounds 15]

Batch 128, 10 classes, 512 features, float32, no optimizer. Candidates take turns within a round; each figure is the
median over rounds. `calls` counts ATen operators of a step, forward and backward.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedlas

ROWS, CLASSES, WIDTH, REPEATS = 128, 10, 512, 100
REFERENCE = "nn.CrossEntropyLoss"
LOSSES = "ce,ls,focal,mbls,fedlas_ls,fedlas_mbls"
Step = Callable[[], None]


class Calls(TorchDispatchMode):
    """Counts ATen operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Count a call and pass it on."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def steps(names: list[str]) -> dict[str, Step]:
    """Build a step of each loss on one batch."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(ROWS, CLASSES, generator=generator)).requires_grad_()
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    features = torch.rand(ROWS, WIDTH, generator=generator)
    plain = nn.CrossEntropyLoss()
    losses = {name: fedlas.build_loss(name, num_classes=CLASSES) for name in names}
    optimizer = torch.optim.SGD(fedlas.parameters(*losses.values(), nn.Linear(1, 1)), lr=1e-6)

    def step_of(loss: Callable[..., Tensor], parameters: list[nn.Parameter], *inputs: Tensor) -> Step:
        def step() -> None:
            loss(logits, *inputs).backward()
            for leaf in (logits, *parameters):
                leaf.grad = None

        return step

    found = {REFERENCE: step_of(plain, [], labels)}
    for name, loss in losses.items():
        loss(logits, labels, features).backward()
        found[name] = step_of(loss, list(loss.parameters()), labels, features)
    optimizer.step()  # as in training: what watches for missing updates is at rest from then on
    return found


def seconds(step: Step) -> float:
    """Time one step as the mean over repeats."""
    begin = time.perf_counter()
    for _ in range(REPEATS):
        step()
    return (time.perf_counter() - begin) / REPEATS


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--losses", default=LOSSES)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = steps(arguments.losses.split(","))
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(arguments.rounds):
        for name, step in found.items():
            times[name].append(seconds(step))
    middle = {name: statistics.median(values) for name, values in times.items()}
    print(f"torch {torch.__version__}\n\n| loss | µs | x {REFERENCE} | calls |\n|---|---:|---:|---:|")
    for name, step in found.items():
        with Calls() as calls:
            step()
        print(f"| {name} | {middle[name] * 1e6:.0f} | {middle[name] / middle[REFERENCE]:.2f} | {calls.count} |")


if __name__ == "__main__":
    main()
