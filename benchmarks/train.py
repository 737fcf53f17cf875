"""Images per second of training on CIFAR-10, rung by rung from a plain loop to one captured graph, in one run.

    python benchmarks/train.py [--synthetic] [--settings resnet50_cifar:128,resnet18_tiny:512] [--rungs graph,...]
                               [--losses NAMES] [--epochs N] [--json FILE] [--profile] [--no-first-step]
                               [--data-root DIR]

    reference    a plain training loop: float32 with TF32, torchvision transforms in a DataLoader with 16 workers, one
                 .item() in each step
    resident     images on the device, augmented there; no synchronisation in the step; fused optimizer
    bf16         the same in bfloat16, channels last
    compile      network and loss compiled, or with custom kernels where they apply
    captured     the whole step captured as one CUDA graph, network and loss by torch.compile
    graph        the same with custom kernels: what `fit` does

Before all rungs: the first step of a fresh process with an empty compiler cache. Every figure is the wall time of
whole epochs, after warm-up; of several, the median. On the last rung the losses of `--losses` alternate with `ce`, so
that a slow moment of the machine affects all of them; the update of a loss after an epoch is included. Then: a
validation pass over 5,000 images, and the FLOPs and bytes of an image relative to the limits of the GPU.
`--synthetic` needs no data: random images, 32 x 32 or, for networks named `_tiny`, 64 x 64 with 200 classes as in
Tiny-ImageNet. `--profile` lists the kernels that take most of the time.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn

from fedlas.data import CATALOG, AbstractDataset
from fedlas.data.base import Part
from fedlas.data.base.images import CIFAR, Transform
from fedlas.models import CATALOG as MODELS
from fedlas.models import build_model
from fedlas.predictions import Predictions
from fedlas.training import Recipe
from fedlas.training.backend_flags import backend_flags, enable_cudnn_benchmark
from fedlas.training.build import select_device
from fedlas.training.prediction import predictions_of
from fedlas.training.session import Session

RUNGS: dict[str, dict[str, Any]] = {
    "resident": {"precision": "tf32", "channels_last": False, "compile": False, "capture": False},
    "bf16": {"precision": "bf16", "channels_last": True, "compile": False, "capture": False},
    "compile": {"precision": "bf16", "channels_last": True, "compile": True, "capture": False},
    "captured": {
        "precision": "bf16",
        "channels_last": True,
        "compile": True,
        "capture": True,
        "custom_kernels": False,
    },
    "graph": {"precision": "bf16", "channels_last": True, "compile": True, "capture": True},
}
# Dense bfloat16 TFLOP/s and memory bandwidth in TB/s, from the data sheets.
PEAKS = {"H200": (989.0, 4.8), "H100": (989.0, 3.35), "A100": (312.0, 2.0)}
WARM_STEPS = 24
ROUNDS = 7  # in which losses alternate


class Synthetic(AbstractDataset):
    """Random images of the size of CIFAR-10's, and as many."""

    name = "synthetic"
    title = "Synthetic"
    citation = "Random bytes."
    num_classes = 10
    transform = Transform(size=32, channels=3, mean=CIFAR[0], std=CIFAR[1], pad=4, flip=True)
    sizes: ClassVar[dict[str, int]] = {"train": 50_000, "test": 10_000}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Numbers."""
        return tuple(map(str, range(self.num_classes)))

    def read(self, part: str) -> Part:
        """Draw the images."""
        generator = torch.Generator().manual_seed(0)
        count, size = self.sizes[part], self.transform.size
        images = torch.randint(0, 256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
        return Part(images, torch.randint(0, self.num_classes, (count,), generator=generator))


class SyntheticTiny(Synthetic):
    """Random images of the size of Tiny-ImageNet's, half as many."""

    name = "synthetic_tiny"
    num_classes = 200
    transform = Transform(size=64, channels=3, mean=CIFAR[0], std=CIFAR[1], pad=4, flip=True)


def recipe(data: str, model: str, rows: int, loss: str, rung: str) -> Recipe:
    """Return the recipe of a rung."""
    values = {"epochs": 1000, "batch_size": rows, "drop_last": True, "clip": 2.0, "schedule": "constant", "lr": 0.01}
    return Recipe(data=data, model=model, loss=loss).replace(**values, **RUNGS[rung])


@contextmanager
def on_stream(device: torch.device) -> Iterator[None]:
    """Use a side stream, as the training engine does."""
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield
    else:
        yield


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def steps(session: Session, count: int) -> None:
    """Train some steps of the first epoch."""
    session.net.train()
    for number, inputs in enumerate(session.batches(0)):
        if number == count:
            return
        session.runner.run(*inputs)


def epoch(session: Session, number: int, validation: Predictions | None = None) -> float:
    """Train an epoch, read its metrics, end the epoch of the loss, and return images per second."""
    session.net.train()
    synchronize(session.device)
    start = time.perf_counter()
    for inputs in session.batches(number):
        session.runner.run(*inputs)
    session.step.metrics.read()
    if validation is not None:
        session.loss.end_epoch(validation)
        synchronize(session.device)
    return session.steps_per_epoch * session.recipe.batch_size / (time.perf_counter() - start)


class PILImages(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Images as PIL images, with the transforms of torchvision."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        from torchvision import transforms

        self.images, self.labels = images.permute(0, 2, 3, 1).numpy(), labels.tolist()
        crop = [transforms.RandomCrop(images.shape[-1], padding=4), transforms.RandomHorizontalFlip()]
        self.transform = transforms.Compose([*crop, transforms.ToTensor(), transforms.Normalize(*CIFAR)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(np.asarray(self.images[index]))), self.labels[index]


def reference(data: AbstractDataset, model: str, rows: int, device: torch.device, epochs: int) -> float:
    """Measure the plain training loop."""
    split = data.split("train")
    assert isinstance(split.images, Tensor)
    workers = min(16, os.cpu_count() or 1)
    loader = torch.utils.data.DataLoader(
        PILImages(split.images, split.labels),
        batch_size=rows,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    net = build_model(model, data.num_classes).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def train_epoch(limit: int | None = None) -> int:
        seen, running = 0, 0.0
        for number, (images, labels) in enumerate(loader):
            if number == limit:
                break
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)  # noqa: PLW2901
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            optimizer.step()
            running += loss.item()
            seen += len(labels)
        return seen

    train_epoch(WARM_STEPS)
    speeds = []
    for _ in range(epochs):
        start = time.perf_counter()
        seen = train_epoch()
        speeds.append(seen / (time.perf_counter() - start))
    return statistics.median(speeds)


def validation_seconds(session: Session) -> float:
    """Measure a pass over the validation split, without metrics."""
    source = session.evaluation_source("val")
    times = []
    for _ in range(4):
        synchronize(session.device)
        start = time.perf_counter()
        predictions_of(
            session.net,
            source,
            session.recipe,
            device=session.device,
            split="val",
            class_names=session.data.class_names,
        )
        synchronize(session.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def first_step(data: str, model: str, rows: int, device: torch.device, root: str | None) -> None:
    """Train one step and print a line, for which the parent process waits."""
    with backend_flags(graph := recipe(data, model, rows, "fedlas_ls", "graph"), device), on_stream(device):
        enable_cudnn_benchmark()
        steps(Session(graph, device, root), 1)
        synchronize(device)
    print("first step done", flush=True)


def first_step_seconds(options: argparse.Namespace, model: str, rows: int) -> float:
    """Start a fresh process, with an empty compiler cache, and wait for its first step."""
    command = [sys.executable, __file__, "--first-step", "--settings", f"{model}:{rows}", "--device", options.device]
    command += ["--synthetic"] if options.synthetic else []
    command += ["--data-root", options.data_root] if options.data_root else []
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "first step done" in line:
                seconds = time.perf_counter() - start
                process.wait()
                return seconds
    raise RuntimeError(f"the process of the first step ended with exit code {process.returncode}")


@contextmanager
def empty_compiler_cache() -> Iterator[None]:
    """Use an empty compiler cache, which all rungs share."""
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ) as environment:
        environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        yield


def work_per_image(model: str) -> tuple[float, float]:
    """Estimate GFLOPs and megabytes of memory traffic per training image.

    FLOPs: three times the forward pass. Bytes: the bfloat16 output of each layer is written once and read twice, its
    gradient is written once and read twice: six passes. Weights are left out, because a batch shares them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    net, size = build_model(model, 10).eval(), MODELS.find(model).image_size or 32
    sizes: list[int] = []
    for layer in net.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda _m, _i, output: sizes.append(output.numel()))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.zeros(1, 3, size, size))
    return 3 * counter.get_total_flops() / 1e9, 6 * 2 * sum(sizes) / 1e6


def profile(session: Session) -> None:
    """Print the kernels of a step by time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    steps(session, 5)
    synchronize(session.device)
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        steps(session, 10)
        synchronize(session.device)
    print(profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=18, max_name_column_width=70))


def ladder(options: argparse.Namespace, data: str, model: str, rows: int) -> dict[str, Any]:
    """Measure all rungs with one network and batch size."""
    device = select_device(options.device)
    results: dict[str, Any] = {"model": model, "batch_size": rows, "images_per_second": {}, "machine": name_of(device)}
    speeds = results["images_per_second"]

    def log(rung: str, loss: str, speed: float) -> None:
        speeds[f"{rung} {loss}".strip()] = speed
        base = speeds.get("reference")
        print(f"{model} b{rows}  {rung:10} {loss:12} {speed:10,.0f} images/s" + _ratio(speed, base), flush=True)

    if options.measure_first_step:
        results["first_step_seconds"] = first_step_seconds(options, model, rows)
        print(f"{model} b{rows}  first step of a fresh process after {results['first_step_seconds']:.1f} s", flush=True)
    if "reference" in options.rungs:
        with backend_flags(recipe(data, model, rows, "ce", "resident"), device):
            dataset = CATALOG.build(data, **({"root": options.data_root} if options.data_root else {}))
            log("reference", "", reference(dataset, model, rows, device, options.epochs))
    for rung in [name for name in RUNGS if name in options.rungs]:
        with backend_flags(recipe(data, model, rows, "ce", rung), device), on_stream(device):
            session = Session(recipe(data, model, rows, "ce", rung), device, options.data_root)
            if rung == "graph":
                enable_cudnn_benchmark()  # as `fit` does
            steps(session, WARM_STEPS)
            if rung == "graph":
                results |= top(options, session, log)
            else:
                log(rung, "ce", statistics.median(epoch(session, n) for n in range(options.epochs)))
        del session
        gc.collect()
        torch.cuda.empty_cache() if device.type == "cuda" else None
    return results | roofline(model, max(speeds.values(), default=0.0), results["machine"])


def top(options: argparse.Namespace, session: Session, log: Callable[[str, str, float], None]) -> dict[str, Any]:
    """Measure the last rung: alternating losses, and a validation pass."""
    sessions = {"ce": session}
    for loss in options.losses.split(","):
        sessions[loss] = Session(session.recipe.replace(loss=loss), session.device, options.data_root)
        steps(sessions[loss], WARM_STEPS)
    validation = predictions_of(
        session.net, session.evaluation_source("val"), session.recipe, device=session.device, split="val",
        class_names=session.data.class_names,
    )  # fmt: skip
    rounds = [
        {loss: epoch(of_loss, n, validation) for loss, of_loss in sessions.items()}
        for n in range(max(ROUNDS, options.epochs))
    ]
    medians = {loss: statistics.median(speeds[loss] for speeds in rounds) for loss in sessions}
    for loss, speed in medians.items():
        log("graph", loss, speed)
    ratios = {
        loss: statistics.median(speeds[loss] / speeds["ce"] for speeds in rounds) for loss in sessions if loss != "ce"
    }
    seconds = validation_seconds(session)
    print(f"{session.recipe.model}  of plain CE: {', '.join(f'{k} {v:.3f}' for k, v in ratios.items())}; ", end="")
    print(f"validation pass over {len(session.data.split('val')):,} images: {seconds:.3f} s", flush=True)
    if options.profile:
        profile(Session(session.recipe, session.device, options.data_root, capture=False))
    return {"of_plain_ce": ratios, "validation_seconds": seconds}


def roofline(model: str, speed: float, machine_name: str) -> dict[str, Any]:
    """Compare the fastest rung with the limits of the GPU."""
    flops, megabytes = work_per_image(model)
    limits: dict[str, Any] = {"gflop_per_image": flops, "megabytes_per_image": megabytes}
    peaks = next((peak for name, peak in PEAKS.items() if name in machine_name), None)
    if peaks is not None:
        by_flops, by_bytes = peaks[0] * 1e3 / flops, peaks[1] * 1e6 / megabytes
        limits |= {"limit_by_flops": by_flops, "limit_by_bytes": by_bytes, "reached": speed / min(by_flops, by_bytes)}
        print(
            f"{model}  {flops:.2f} GFLOP and {megabytes:.1f} MB an image: at most {by_flops:,.0f} by arithmetic, "
            f"{by_bytes:,.0f} by memory; reached {limits['reached']:.0%} of the lower one"
        )
    return limits


def data_for(model: str, options: argparse.Namespace) -> str:
    """Return the name of the data set for a network."""
    if options.synthetic:
        return (SyntheticTiny if model.endswith("_tiny") else Synthetic).name
    return "tiny_imagenet" if model.endswith("_tiny") else "cifar10"


def name_of(device: torch.device) -> str:
    """Return the name of the GPU, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _ratio(speed: float, base: float | None) -> str:
    return f"  {speed / base:6.2f} x reference" if base else ""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--settings", default="resnet50_cifar:128,resnet18_cifar:512", help="network:batch size, ...")
    parser.add_argument("--rungs", default=",".join(["reference", *RUNGS]))
    parser.add_argument("--epochs", type=int, default=1, help="timed epochs of each rung; the median counts")
    parser.add_argument("--losses", default="fedlas_ls,fedlas_mbls,closed_loop,pskd", help="on the last rung")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--synthetic", action="store_true", help="random images instead of CIFAR-10")
    parser.add_argument("--data-root")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-first-step", dest="measure_first_step", action="store_false")
    options = parser.parse_args()
    options.rungs = options.rungs.split(",")
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 4096)
    if options.synthetic:
        CATALOG.entries |= {data_set.name: data_set for data_set in (Synthetic, SyntheticTiny)}
    settings = [text.partition(":") for text in options.settings.split(",")]
    pairs = [(model, int(rows)) for model, _, rows in settings]
    if options.first_step:
        first_step(data_for(pairs[0][0], options), *pairs[0], select_device(options.device), options.data_root)
        return
    print(f"torch {torch.__version__}, {name_of(torch.device(options.device))}", flush=True)
    with empty_compiler_cache():
        ladders = [ladder(options, data_for(model, options), model, rows) for model, rows in pairs]
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "ladders": ladders}, indent=1) + "\n")


if __name__ == "__main__":
    main()
