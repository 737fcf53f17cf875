"""On a GPU: the numbers of the CPU, sums that stay there, logits that never leave it, and counts beyond 2^24."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedlas import metrics
from fedlas.metrics import inputs
from fedlas.metrics.registry import all_metrics
from fedlas.predictions import Predictions
from fedlas.predictions.probabilities import top_of_logits
from metrics import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ece": metrics.ece,
    "ece of torchmetrics": lambda p, y: metrics.ece(p, y, compat="torchmetrics"),
    "ece of netcal": lambda p, y: metrics.ece(p, y, compat="netcal"),
    "ece, official": lambda p, y: metrics.ece(p, y, compat="official"),
    "aece": metrics.aece,
    "aece, official": lambda p, y: metrics.aece(p, y, compat="official"),
    "aece of netcal": lambda p, y: metrics.aece(p, y, compat="netcal"),
    "aece of uncertainty-calibration": lambda p, y: metrics.aece(p, y, compat="uncertainty-calibration"),
    "classwise_ece": metrics.classwise_ece,
    "classwise_ece, equal mass": lambda p, y: metrics.classwise_ece(p, y, binning="mass"),
    "classwise_ece, official": lambda p, y: metrics.classwise_ece(p, y, compat="official"),
    "over_ece": metrics.over_ece,
    "over_ece, class-wise": lambda p, y: metrics.over_ece(p, y, scope="class-wise"),
    "signed_ece": metrics.signed_ece,
    "mce": metrics.mce,
    "rms_error": metrics.rms_error,
    "lp_error": lambda p, y: metrics.lp_error(p, y, p=3),
    "debiased_l2": metrics.debiased_l2,
    "smooth_ece": metrics.smooth_ece,
    "accuracy": metrics.accuracy,
    "top_k": lambda p, y: metrics.top_k(p, y, 3),
    "nll": metrics.nll,
    "brier": metrics.brier,
    "ks_test": metrics.ks_test,
    "kuiper_test": metrics.kuiper_test,
    "spiegelhalter_test": metrics.spiegelhalter_test,
    "aurc": metrics.aurc,
    "e_aurc": metrics.e_aurc,
    "augrc": metrics.augrc,
    "risk_at_coverage": metrics.risk_at_coverage,
    "coverage_at_risk": metrics.coverage_at_risk,
    "noise_floor": metrics.noise_floor,
    "ece with its interval": lambda p, y: metrics.bootstrap(metrics.ece, p, y, resamples=200),
    "classwise_ece with its interval": lambda p, y: metrics.bootstrap(metrics.classwise_ece, p, y, resamples=50),
}
SOFT = {
    "ece",
    "aece",
    "classwise_ece",
    "over_ece",
    "signed_ece",
    "mce",
    "smooth_ece",
    "nll",
    "brier",
    "aurc",
    "top_k",
}
STREAMS: dict[str, Callable[[], Any]] = {
    **{name: metric.accumulator for name, metric in all_metrics().items()},
    "ece of every class": lambda: metrics.ece.accumulator(scope="class-wise"),
    "ece of torchmetrics": lambda: metrics.ece.accumulator(compat="torchmetrics"),
}


def numbers(result: metrics.Result) -> list[float]:
    """Value and interval of a result."""
    interval = result.interval
    return [float(result)] if interval is None else [float(result), interval.low, interval.high]


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    probs, labels = cases.saturated(3_000, 10)
    return probs.to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions_equal_the_cpu(name: str, dtype: torch.dtype) -> None:
    probs, labels = problem(dtype)
    gpu_result = FUNCTIONS[name](probs.cuda(), labels.cuda())
    cpu_result = FUNCTIONS[name](probs, labels)
    assert numbers(gpu_result) == pytest.approx(numbers(cpu_result), abs=1e-7)


@pytest.mark.parametrize("name", sorted(SOFT))
def test_soft_labels_equal_the_cpu(name: str) -> None:
    probs, labels = problem(torch.float32)
    soft = 0.9 * torch.nn.functional.one_hot(labels, 10).float() + 0.01
    gpu_result = FUNCTIONS[name](probs.cuda(), soft.cuda())
    assert numbers(gpu_result) == pytest.approx(numbers(FUNCTIONS[name](probs, soft)), abs=1e-6)


def test_other_scopes_equal_the_cpu() -> None:
    confidence, labels = cases.binary(500)
    binary = metrics.ece(confidence.cuda(), labels.cuda(), scope="positive")
    assert binary == pytest.approx(metrics.ece(confidence, labels, scope="positive"), abs=1e-12)
    probs, targets = torch.rand(200, 5), torch.randint(0, 2, (200, 5))
    multi_label = metrics.ece(probs.cuda(), targets.cuda(), scope="multi-label")
    assert multi_label == pytest.approx(metrics.ece(probs, targets, scope="multi-label"), abs=1e-9)
    maps, map_labels = torch.randn(3, 4, 9, 9).softmax(1), torch.randint(0, 4, (3, 9, 9))
    map_labels[0, 0] = 255
    for metric in (metrics.ece, metrics.classwise_ece, metrics.nll):
        pooled = metric(maps.cuda(), map_labels.cuda(), ignore_index=255)
        assert pooled == pytest.approx(metric(maps, map_labels, ignore_index=255), abs=1e-6)


@pytest.mark.parametrize("name", ["ece", "classwise_ece", "nll", "brier", "aurc"])
def test_predictions_may_be_on_the_gpu(name: str) -> None:
    logits, labels = cases.golden_logits()
    cpu_predictions = Predictions(logits, labels)
    gpu_predictions = Predictions(cpu_predictions.logits.cuda(), cpu_predictions.labels.cuda())
    assert gpu_predictions.probs.device.type == "cuda"
    assert numbers(FUNCTIONS[name](gpu_predictions, None)) == pytest.approx(
        numbers(FUNCTIONS[name](cpu_predictions, None)), abs=1e-6
    )
    assert metrics.paired_bootstrap(metrics.ece, gpu_predictions, gpu_predictions, resamples=50).better is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(STREAMS))
def test_streams_equal_the_cpu(name: str, dtype: torch.dtype) -> None:
    probs, labels = problem(dtype)
    cpu_stream, gpu_stream, mixed_stream = (STREAMS[name]() for _ in range(3))
    for start in range(0, 3_000, 700):
        part = slice(start, start + 700)
        cpu_stream.update(probs[part], labels[part])
        gpu_stream.update(probs[part].cuda(), labels[part].cuda())
        mixed_stream.update(*((probs[part].cuda(), labels[part]) if start else (probs[part], labels[part])))
    assert numbers(gpu_stream.compute()) == pytest.approx(numbers(cpu_stream.compute()), abs=1e-8)
    assert numbers(mixed_stream.compute()) == pytest.approx(numbers(cpu_stream.compute()), abs=1e-8)
    assert numbers(gpu_stream.merge(cpu_stream).compute()) == pytest.approx(
        numbers(STREAMS[name]().update(probs.repeat(2, 1), labels.repeat(2)).compute()), abs=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(STREAMS))
def test_streams_of_logits_equal_the_cpu(name: str, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(20_000, 12, generator=source)).to(dtype)
    labels = torch.randint(12, (20_000,), generator=source)
    cpu_result = STREAMS[name]().update_logits(logits, labels).compute()
    gpu_result = STREAMS[name]().update_logits(logits.cuda(), labels.cuda()).compute()
    assert numbers(gpu_result) == pytest.approx(numbers(cpu_result), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("classes", [2, 10, 100, 1000, 1024, 5000, 40_000])
def test_kernel_matches_softmax(classes: int, dtype: torch.dtype) -> None:
    rows = 10_001
    logits = (4 * torch.randn(rows, classes, device="cuda")).to(dtype)
    logits[3] = 0
    logits[4, :2] = logits[4].amax() + 1
    expected = logits.softmax(1, dtype=torch.float32).max(1)
    top = inputs.top_of_logits_by_kernel(logits)
    if classes > inputs.MOST_CLASSES:
        assert top is None
        top = top_of_logits(logits)
    assert top is not None, "triton did not build the kernel"
    torch.testing.assert_close(top[0], expected.values, rtol=2e-6, atol=0)
    assert torch.equal(top[1], expected.indices)
    assert top[1][3] == 0
    assert top[1][4] == 0
    wide_logits = torch.randn(rows, 2 * classes, device="cuda").to(dtype)
    for view in (wide_logits[:, ::2], wide_logits[:, :classes]):
        view_top = inputs.top_of_logits_by_kernel(view) or top_of_logits(view)
        assert torch.equal(view_top[1], view.softmax(1, dtype=torch.float32).max(1).indices)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_on_the_gpu_raise(value: float) -> None:
    logits = torch.randn(20_000, 10, device="cuda")
    logits[12_345, 3] = value
    labels = torch.zeros(20_000, dtype=torch.long, device="cuda")
    for stream in (metrics.ece.accumulator, metrics.nll.accumulator):
        with pytest.raises(ValueError, match=r"logits.*row 12345"):
            stream().update_logits(logits, labels)
    labels[7] = 10
    logits[12_345, 3] = 0
    with pytest.raises(ValueError, match=r"labels.*row 7"):
        metrics.ece.accumulator().update_logits(logits, labels)


class DeviceToHostCopies(TorchDispatchMode):
    """Records the size of every tensor that an operation copies from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        input_tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        output_tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(tensor.is_cuda for tensor in input_tensors):
            self.sizes += [tensor.numel() for tensor in output_tensors if tensor.device.type == "cpu"]
        return result


@contextlib.contextmanager
def recorded_copies() -> Iterator[list[int]]:
    with DeviceToHostCopies() as recorder:
        yield recorder.sizes


def test_moves_are_noted() -> None:
    with recorded_copies() as sizes:
        torch.zeros(5, device="cuda").cpu()
    assert 5 in sizes


@pytest.mark.parametrize("name", list(STREAMS))
def test_logits_never_leave_the_device(name: str) -> None:
    rows, classes = 20_000, 50
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(classes, (rows,), device="cuda")
    stream = STREAMS[name]()
    with recorded_copies() as sizes:
        stream.update_logits(logits, labels)
    assert max(sizes, default=0) <= 2  # the smallest and the largest label


def test_the_top_label_of_logits_needs_no_table_of_its_own() -> None:
    logits = torch.randn(200_000, 1_000, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(1_000, (200_000,), device="cuda")
    stream = metrics.ece.accumulator()
    stream.update_logits(logits[:20_000], labels[:20_000])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stream.update_logits(logits, labels)
    assert torch.cuda.max_memory_allocated() - before < 0.1 * logits.numel() * logits.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_counts_are_right_beyond_two_to_the_24(dtype: torch.dtype) -> None:
    """All in one bin: float32 counts stop at 16,777,216, and bf16 atomics at 256."""
    rows = 20_000_000
    probs = torch.tensor([[0.75, 0.25]], dtype=dtype, device="cuda").expand(rows, 2).contiguous()
    labels = (torch.arange(rows, device="cuda") % 4 == 0).long()
    for stream in (metrics.ece.accumulator(4), metrics.classwise_ece.accumulator(4)):
        stream.update(probs, labels).update(probs, labels)
        bins = stream.histogram().bins
        assert int(bins.counts[..., 2].max()) == 2 * rows
        assert int(bins.counts.sum()) == bins.counts.shape.numel() // 4 * 2 * rows
        assert float(bins.correct_sum[..., 2].max()) == 2 * rows * 0.75
        assert stream.compute() == pytest.approx(0, abs=1e-12)
        assert stream.compute().n == 2 * rows


def test_more_probabilities_than_fit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probs, labels = problem(torch.float32)
    expected = metrics.classwise_ece(probs.cuda(), labels.cuda())
    monkeypatch.setattr("fedlas.metrics.bin_sums.MOST_AT_ONCE", 10_000)
    assert metrics.classwise_ece(probs.cuda(), labels.cuda()) == pytest.approx(expected, abs=1e-12)
