"""Devices on which the tests of custom kernels run: Triton's interpreter on the CPU, and a GPU.

    @pytest.mark.parametrize(("device", "rows"), [interpreted(3), on_cuda(4096)], indirect=["device"])
    def test_sums(device, rows):
        assert device.call(error_of_sums, rows) < 1e-5

`error_of_sums("cpu" or "cuda", rows)` runs in the test process on a GPU, and in another process in the interpreter,
because Triton selects it on import. Without `parametrize`, a test runs on both devices.
"""

import faulthandler
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import pytest
import torch

import shape_checks

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used, for equal bits
DEADLINE = 300  # seconds of an interpreted call
CUDA_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor warns of its choice of kernels, and uses deprecated functions of torch.
    pytest.mark.filterwarnings(
        "ignore:\\nOnline softmax is disabled",
        "ignore:.*torch.jit:DeprecationWarning",
        "ignore:TensorFloat32",
        "ignore:.*attribute of a Tensor that is not a leaf",
    ),
]


def interpreted(*values: Any) -> Any:
    """Return parameters of a test in the interpreter, which is slow; the first parameter is the device."""
    return pytest.param("interpreted", *values, marks=pytest.mark.campaign)


def on_cuda(*values: Any) -> Any:
    """Return parameters of a test on a GPU; the first parameter is the device."""
    return pytest.param("cuda", *values, marks=CUDA_MARKS)


def needs_cuda(test: Any) -> Any:
    """Mark a test that runs only on a GPU."""
    for mark in CUDA_MARKS:
        test = mark(test)
    return test


@dataclass(frozen=True)
class Device:
    """Calls functions of a test module on a device.

    Args:
        name: "interpreted" or "cuda".
        interpreter: process in which kernels are interpreted; None on a GPU.
    """

    name: str
    interpreter: Executor | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with the device of its tensors and the arguments; it returns plain values."""
        if self.interpreter is None:
            return function("cuda", *args)
        return self.interpreter.submit(call_with_deadline, function, "cpu", *args).result()


def call_with_deadline(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; a kernel that hangs ends the process, after a traceback."""
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    try:
        return function(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()


def enable_shape_checks() -> None:
    """Check annotations as in the test process; fedlas is imported later."""
    if os.environ.get("FEDLAS_SHAPE_CHECKS", "1") != "0":
        shape_checks.install("fedlas")


@contextmanager
def start_interpreter() -> Iterator[Device]:
    """Start a process in which kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.submit(enable_shape_checks).result()  # starts the process
        patch.undo()
        yield Device("interpreted", pool)


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products on a GPU without TF32."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = False
    yield
    for flag, allowed in zip(flags, before, strict=True):
        flag.allow_tf32 = allowed
