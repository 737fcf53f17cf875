"""Time every metric, and every other library that computes it, on the same data in one run.

    python benchmarks/metrics.py [--shapes 50000x1000,1000000x100] [--only ece,nll] [--json FILE]
    python benchmarks/metrics.py --device cuda [--shapes 10000000x1000] [--chunk 500000]

On the CPU logits are float32, candidates take turns in every round, and the fastest round counts, which other load
affects least. Libraries that need probabilities or NumPy arrays get them ready-made. Candidates whose package is not
installed are left out; slow ones run once. `value` shows which candidates compute the same quantity. "existing
Predictions" are checked already; their construction is timed separately.

On a GPU logits are bfloat16 and processed in chunks. `read` is the time to read them once (their maximum).
"""

import argparse
import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlas import evaluation, metrics, ood, posthoc
from fedlas.predictions import Predictions

SHAPES = {"cpu": "50000x1000,1000000x100", "cuda": "10000000x1000"}
ONCE_IS_ENOUGH = 5.0  # seconds; slower candidates are not repeated
ROUNDS = 5
Candidate = Callable[[], Any]


@dataclass(frozen=True)
class Figure:
    """One measurement: seconds, and their ratio to those of fedlas."""

    shape: str
    metric: str
    candidate: str
    seconds: float
    ratio: float
    value: float | None


@dataclass(frozen=True)
class Data:
    """Logits of an over-confident model, and the inputs of other libraries."""

    logits: Tensor
    labels: Tensor
    probs: Tensor
    probs_numpy: Any
    labels_numpy: Any
    confidence: Any
    correct: Any


def installed(name: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def make_data(rows: int, classes: int) -> Data:
    """Draw logits, and labels that agree with about three of four predictions."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (rows,), generator=random)
    logits = torch.randn(rows, classes, generator=random)
    lift = 3.0 + 2 * torch.randn(rows, generator=random)
    logits[torch.arange(rows), labels] += lift
    logits *= 1.5
    probs = logits.softmax(1)
    top = probs.max(1)
    return Data(
        logits,
        labels,
        probs,
        probs.numpy(),
        labels.numpy(),
        top.values.double().numpy(),
        (top.indices == labels).double().numpy(),
    )


def candidates(data: Data) -> Iterator[tuple[str, dict[str, Candidate]]]:
    """Yield each quantity with the functions that compute it; fedlas comes first."""
    yield from errors(data)
    yield from scores(data)
    yield from detection(data)
    yield from calibration(data)
    yield from plain_numpy(data)


def plain_numpy(data: Data) -> Iterator[tuple[str, dict[str, Candidate]]]:
    """List metrics of existing `Predictions` beside a few lines of plain NumPy."""
    probs, labels, rows = data.probs_numpy, data.labels_numpy, np.arange(len(data.labels_numpy))
    predictions = Predictions.from_probs(data.probs, data.labels)

    def top() -> tuple[Any, Any]:
        prediction = probs.argmax(1)
        return probs[rows, prediction], prediction == labels

    def ece() -> float:
        confidence, correct = top()
        bins = np.clip(np.ceil(confidence * 15).astype(int) - 1, 0, 14)
        return float(np.abs(np.bincount(bins, confidence, 15) - np.bincount(bins, correct, 15)).sum() / len(rows))

    def aece() -> float:
        confidence, correct = top()
        parts = np.array_split(np.argsort(confidence), 15)
        return float(sum(abs(confidence[part].sum() - correct[part].sum()) for part in parts) / len(rows))

    def aurc() -> float:
        confidence, correct = top()
        return float((np.cumsum(~correct[np.argsort(-confidence)]) / (rows + 1)).mean())

    def brier() -> float:
        return float((np.einsum("ij,ij->i", probs, probs) - 2 * probs[rows, labels] + 1).mean())

    theirs: dict[str, Candidate] = {
        "accuracy": lambda: float((probs.argmax(1) == labels).mean()),
        "ece": ece,
        "aece": aece,
        "nll": lambda: float(-np.log(probs[rows, labels]).mean()),
        "brier": brier,
        "aurc": aurc,
    }
    for name, call in theirs.items():
        ours = partial(getattr(metrics, name), predictions)
        yield f"{name} of existing Predictions", {"fedlas": ours, "NumPy": call}
    yield "making Predictions", {"fedlas": lambda: len(Predictions.from_probs(data.probs, data.labels))}


def errors(data: Data) -> Iterator[tuple[str, dict[str, Candidate]]]:
    """List calibration errors."""
    logits, labels, probs = data.logits, data.labels, data.probs
    classes = probs.shape[1]
    ece: dict[str, Candidate] = {"fedlas": lambda: metrics.ece(probs, labels)}
    from_logits: dict[str, Candidate] = {
        "fedlas": lambda: metrics.ece.accumulator().update_logits(logits, labels).compute()
    }
    largest: dict[str, Candidate] = {"fedlas": lambda: metrics.mce(probs, labels)}
    mass: dict[str, Candidate] = {"fedlas": lambda: metrics.aece(probs, labels)}
    every: dict[str, Candidate] = {"fedlas": lambda: metrics.classwise_ece(probs, labels)}
    debiased: dict[str, Candidate] = {"fedlas": lambda: metrics.debiased_l2(probs, labels, scope="class-wise")}
    confidence, correct = torch.from_numpy(data.confidence), torch.from_numpy(data.correct)
    smooth: dict[str, Candidate] = {"fedlas": lambda: metrics.smooth_ece(confidence, correct, scope="positive")}
    if installed("torchmetrics"):
        from torchmetrics.functional.classification import multiclass_calibration_error as theirs

        ece["torchmetrics"] = lambda: theirs(probs, labels, classes, 15)
        from_logits["torchmetrics"] = lambda: theirs(logits, labels, classes, 15)
        largest["torchmetrics"] = lambda: theirs(probs, labels, classes, 15, "max")
    if installed("netcal"):
        import netcal.metrics

        ece["netcal"] = lambda: netcal.metrics.ECE(15).measure(data.probs_numpy, data.labels_numpy)
        largest["netcal"] = lambda: netcal.metrics.MCE(15).measure(data.probs_numpy, data.labels_numpy)
        mass["netcal"] = lambda: netcal.metrics.ECE(15, equal_intervals=False).measure(
            data.probs_numpy, data.labels_numpy
        )
    if installed("calibration"):
        import calibration

        ece["uncertainty-calibration"] = lambda: calibration.get_ece(data.probs_numpy, data.labels_numpy, num_bins=15)
        mass["uncertainty-calibration"] = lambda: calibration.get_ece_em(
            data.probs_numpy, data.labels_numpy, num_bins=15
        )
        debiased["uncertainty-calibration"] = lambda: calibration.get_calibration_error(
            data.probs_numpy, data.labels_numpy
        )
    if installed("torch_uncertainty"):
        from torch_uncertainty.metrics.classification import AdaptiveCalibrationError, ClasswiseCalibrationError

        mass["torch-uncertainty"] = lambda: update_and_compute(
            AdaptiveCalibrationError(task="multiclass", num_bins=15, num_classes=classes), probs, labels
        )
        every["torch-uncertainty"] = lambda: update_and_compute(
            ClasswiseCalibrationError(classes, num_bins=15), probs, labels
        )
    if installed("relplot"):
        import relplot

        smooth["relplot"] = lambda: relplot.smECE(data.confidence, data.correct)
    yield "ece", ece
    yield "ece from logits", from_logits
    yield "mce", largest
    yield "aece", mass
    yield "classwise_ece", every
    yield "debiased_l2, class-wise", debiased
    yield "smooth_ece of given confidences", smooth


def update_and_compute(metric: Any, probs: Tensor, labels: Tensor) -> Any:
    """Update a metric with all data and compute it."""
    metric.update(probs, labels)
    return metric.compute()


def scores(data: Data) -> Iterator[tuple[str, dict[str, Candidate]]]:
    """List proper scores, selective prediction and intervals."""
    logits, labels, probs = data.logits, data.labels, data.probs
    nll: dict[str, Candidate] = {"fedlas": lambda: metrics.nll(probs, labels)}
    from_logits: dict[str, Candidate] = {
        "fedlas": lambda: metrics.nll.accumulator().update_logits(logits, labels).compute(),
        "F.cross_entropy": lambda: torch.nn.functional.cross_entropy(logits, labels),
    }
    brier: dict[str, Candidate] = {"fedlas": lambda: metrics.brier(probs, labels)}
    aurc: dict[str, Candidate] = {"fedlas": lambda: metrics.aurc(probs, labels)}
    if installed("sklearn"):
        from sklearn.metrics import log_loss

        every = np.arange(probs.shape[1])
        nll["scikit-learn"] = lambda: log_loss(data.labels_numpy, data.probs_numpy, labels=every)
    if installed("torch_uncertainty"):
        from torch_uncertainty.metrics.classification import AURC, BrierScore

        brier["torch-uncertainty"] = lambda: update_and_compute(BrierScore(num_classes=probs.shape[1]), probs, labels)
        aurc["torch-uncertainty"] = lambda: update_and_compute(AURC(), probs, labels)
    yield "nll", nll
    yield "nll from logits", from_logits
    yield "brier", brier
    yield "aurc", aurc
    yield "ece with interval, 10,000 resamples", {"fedlas": lambda: metrics.bootstrap(metrics.ece, probs, labels)}


def detection(data: Data) -> Iterator[tuple[str, dict[str, Candidate]]]:
    """Yield the metrics of OOD detection, with half of the samples as ID and the other half as OOD."""
    half = len(data.confidence) // 2
    id_scores, ood_scores = torch.from_numpy(-data.confidence[:half]), torch.from_numpy(-data.confidence[half:] + 0.05)
    scores, truth = (
        torch.cat([id_scores, ood_scores]),
        torch.cat([torch.zeros(half), torch.ones(len(ood_scores))]).long(),
    )
    auroc: dict[str, Candidate] = {"fedlas": lambda: ood.auroc(id_scores, ood_scores)}
    aupr: dict[str, Candidate] = {"fedlas": lambda: ood.aupr(id_scores, ood_scores)}
    fpr: dict[str, Candidate] = {"fedlas": lambda: ood.fpr_at_tpr(id_scores, ood_scores)}
    if installed("sklearn"):
        from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

        auroc["scikit-learn"] = lambda: roc_auc_score(truth, scores)
        aupr["scikit-learn"] = lambda: average_precision_score(truth, scores)

        def fpr95() -> float:
            rate, result, _ = roc_curve(truth, scores)
            return float(rate[np.argmax(result >= 0.95)])

        fpr["scikit-learn"] = fpr95
    yield "auroc, with interval", auroc
    yield "aupr, with interval", aupr
    yield "fpr_at_tpr, with interval", fpr


def calibration(data: Data) -> Iterator[tuple[str, dict[str, Candidate]]]:
    """Yield fits of the temperature, and the complete evaluation."""
    logits, labels = data.logits, data.labels
    result: dict[str, Candidate] = {"fedlas": lambda: posthoc.Temperature().fit(logits, labels).temperature}
    if installed("probmetrics"):
        from probmetrics.calibrators import TemperatureScalingCalibrator
        from probmetrics.distributions import CategoricalLogits

        result["probmetrics"] = lambda: (
            1 / float(TemperatureScalingCalibrator().fit_torch(CategoricalLogits(logits), labels).invtemp_)
        )
    yield "temperature", result

    def evaluated(**options: Any) -> Candidate:
        return lambda: evaluation.evaluate(Predictions(logits, labels), **options)["ece"]

    temperature = posthoc.Temperature().fit(logits[:5000], labels[:5000])
    yield (
        "evaluate",
        {
            "fedlas": evaluated(),
            "without intervals": evaluated(intervals=False),
            "with temperature": evaluated(posthoc=[temperature]),
            "the softmax alone": lambda: logits.softmax(1)[0, 0],
        },
    )


def timed(call: Candidate) -> tuple[float, float | None]:
    """Return the seconds of one call, and its value if it is a number."""
    begin = time.perf_counter()
    value = call()
    seconds = time.perf_counter() - begin
    return seconds, float(value) if isinstance(value, float | Tensor | np.floating) else None


def measure(shape: str, only: list[str]) -> list[Figure]:
    """Time all candidates at one shape on the CPU."""
    rows, classes = (int(part) for part in shape.split("x"))
    data = make_data(rows, classes)
    figures = []
    for metric, calls in candidates(data):
        if only and metric.split(",")[0].split(" ")[0] not in only:
            continue
        best: dict[str, float] = {}
        values: dict[str, float | None] = {}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                if best.get(name, 0.0) < ONCE_IS_ENOUGH:
                    seconds, values[name] = timed(call)
                    best[name] = min(seconds, best.get(name, seconds))
        result = [Figure(shape, metric, name, best[name], best[name] / best["fedlas"], values[name]) for name in calls]
        figures += result
        print("\n".join(lines(result)), flush=True)
    return figures


def lines(figures: list[Figure]) -> list[str]:
    """Return measurements as rows of a Markdown table."""
    cells = [
        (f.metric, f.candidate, f"{f.seconds:.3g}", f"{f.ratio:.2f}", "" if f.value is None else f"{f.value:.6g}")
        for f in figures
    ]
    return [f"| {' | '.join(row)} |" for row in cells]


def measure_chunks(shape: str, chunk: int) -> list[Figure]:
    """Time metrics of chunks of bfloat16 logits on a GPU against reading the logits once."""
    rows, classes = (int(part) for part in shape.split("x"))
    random = torch.Generator("cuda").manual_seed(0)
    count = rows // chunk
    parts = [
        (3 * torch.randn(chunk, classes, device="cuda", dtype=torch.bfloat16, generator=random)) for _ in range(count)
    ]
    labels = [torch.randint(classes, (chunk,), device="cuda", generator=random) for _ in range(count)]

    def streamed(make: Callable[[], Any]) -> Candidate:
        def run() -> float:
            stream = make()
            for logits, truth in zip(parts, labels, strict=True):
                stream.update_logits(logits, truth)
            return float(stream.compute())

        return run

    def plain() -> float:
        """Compute the ECE in plain torch."""
        sums = torch.zeros(3, 15, dtype=torch.float64, device="cuda")
        edges = torch.linspace(0, 1, 16, device="cuda")
        for logits, truth in zip(parts, labels, strict=True):
            confidence, prediction = logits.float().softmax(1).max(1)
            bins = torch.bucketize(confidence, edges[1:-1])
            values = torch.stack([torch.ones_like(confidence), confidence, (prediction == truth).float()]).double()
            sums.scatter_add_(1, bins.expand(3, -1), values)
        return float((sums[1] - sums[2]).abs().sum() / sums[0].sum())

    calls: dict[str, Candidate] = {
        "read": lambda: torch.stack([part.amax() for part in parts]).amax().item(),
        "plain torch, ECE": plain,
        "ECE": streamed(metrics.ece.accumulator),
        "AECE": streamed(metrics.aece.accumulator),
        "NLL": streamed(metrics.nll.accumulator),
        "ClasswiseECE": streamed(metrics.classwise_ece.accumulator),
    }
    best: dict[str, float] = {}
    values: dict[str, float | None] = {}
    for _ in range(3):
        for name, call in calls.items():
            torch.cuda.synchronize()
            seconds, values[name] = timed(call)
            best[name] = min(seconds, best.get(name, seconds))
    figures = [Figure(shape, "from bf16 logits", n, best[n], best[n] / best["read"], values[n]) for n in calls]
    print("\n".join(lines(figures)), flush=True)
    return figures


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes")
    parser.add_argument("--only", default="", help="comma-separated metrics; default: all")
    parser.add_argument("--chunk", type=int, default=2_000_000, help="rows of a chunk on the GPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    gpu = arguments.device == "cuda"
    where = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}")
    only = [name for name in arguments.only.split(",") if name]
    figures = []
    for shape in (arguments.shapes or SHAPES[arguments.device]).split(","):
        print(
            f"\n### {shape.replace('x', ' x ')}\n\n| metric | library | s | ratio | value |\n|---|---|---:|---:|---:|"
        )
        figures += measure_chunks(shape, arguments.chunk) if gpu else measure(shape, only)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
