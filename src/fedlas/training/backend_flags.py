"""Backend flags of PyTorch that a recipe sets: determinism, TF32, cuDNN benchmark, compile limits, streams."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedlas.training.random_state import random_state, restore_random_state
from fedlas.training.recipe import Recipe

COMPILATIONS = 4096  # of one function: every loss shares its forward with all others


@contextmanager
def backend_flags(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Set torch's global switches as a recipe wants them, and put them back afterwards."""
    before = _switches()
    generators = random_state(device)
    if recipe.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    try:
        _set(
            {
                "deterministic": recipe.deterministic,
                "warn_only": False,
                "cudnn_deterministic": recipe.deterministic,
                "cudnn_benchmark": not recipe.deterministic,
                "cudnn_tries": before["cudnn_tries"],
                "matmul": "highest" if recipe.precision == "fp32" else "high",
                "cudnn_tf32": recipe.precision != "fp32",
                "onednn": before["onednn"] and not (recipe.precision == "bf16" and _stumbles_over_bf16()),
            }
        )
        yield
    finally:
        _set(before)
        restore_random_state(generators, device)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work on one stream of our own: capture is not possible on the default one, and all steps share gradients."""
    if stream is None:
        yield
        return
    outside = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        yield
    outside.wait_stream(stream)


@contextmanager
def raise_compile_limit(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Let one process compile more variants of a function than torch allows by default."""
    if not recipe.compile or device.type != "cuda":
        yield
        return
    config = importlib.import_module("torch._dynamo.config")  # takes a second, which a CPU need not pay

    names = [name for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(config, name)]
    with config.patch(dict.fromkeys(names, COMPILATIONS)), warnings.catch_warnings():
        # While it traces the loss, the compiler looks at the gradient of its input, and warns of that itself.
        warnings.filterwarnings("ignore", message=".*attribute of a Tensor that is not a leaf")
        yield


def enable_cudnn_benchmark() -> None:
    """Let cuDNN time all of its ways to convolve and not ten, until `machine` ends; of small images, seconds."""
    if torch.backends.cudnn.benchmark_limit is not None:
        torch.backends.cudnn.benchmark_limit = 0


def _switches() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions announce new names for some of these
        return {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_tries": torch.backends.cudnn.benchmark_limit,  # None without cuDNN
            "matmul": torch.get_float32_matmul_precision(),
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "onednn": torch.backends.mkldnn.enabled,
        }


def _set(switches: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (switches["deterministic"], switches["warn_only"]):  # loads the compiler, which takes seconds
            torch.use_deterministic_algorithms(switches["deterministic"], warn_only=switches["warn_only"])
        torch.backends.cudnn.deterministic = switches["cudnn_deterministic"]
        torch.backends.cudnn.benchmark = switches["cudnn_benchmark"]
        if torch.backends.cudnn.benchmark_limit is not None:
            torch.backends.cudnn.benchmark_limit = switches["cudnn_tries"]
        torch.set_float32_matmul_precision(switches["matmul"])
        torch.backends.cudnn.allow_tf32 = switches["cudnn_tf32"]
        torch.backends.mkldnn.enabled = switches["onednn"]


def _stumbles_over_bf16() -> bool:
    """Whether oneDNN is there and has no bfloat16 on this processor.

    torch finds that out in the middle of a step, and from then on does without oneDNN in everything. A run that goes on
    in another process would have half a step more with it, so nobody has it from the beginning.
    """
    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
