"""Backend flags of PyTorch that a recipe sets: determinism, TF32, cuDNN benchmark, compile limits, streams."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from fedlas.training.random_state import random_state, restore_random_state
from fedlas.training.recipe import Recipe

RECOMPILE_LIMIT = 4096  # per function: all losses share one forward


@contextmanager
def backend_flags(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Set the global flags of torch for a recipe, and restore flags and random state afterwards."""
    previous = _read_flags()
    generators = random_state(device)
    if recipe.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    try:
        _set_flags(
            previous
            | {
                "deterministic": recipe.deterministic,
                "warn_only": False,
                "cudnn_deterministic": recipe.deterministic,
                "cudnn_benchmark": not recipe.deterministic,
                "matmul": "highest" if recipe.precision == "fp32" else "high",
                "cudnn_tf32": recipe.precision != "fp32",
                "onednn": previous["onednn"] and not (recipe.precision == "bf16" and _lacks_onednn_bf16()),
            }
        )
        yield
    finally:
        _set_flags(previous)
        restore_random_state(generators, device)


@cache
def _training_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all runs, so that the allocator can reuse memory that an earlier run freed on it."""
    return torch.cuda.Stream(device)


@contextmanager
def on_training_stream(device: torch.device) -> Iterator[None]:
    """Use a side stream for all steps: CUDA graphs cannot be captured on the default stream."""
    if device.type != "cuda":
        yield
        return
    stream, outer = _training_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        yield
    outer.wait_stream(stream)


@contextmanager
def raise_compile_limit(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """Raise the limit of compiled variants per function."""
    if not recipe.compile or device.type != "cuda":
        yield
        return
    config = importlib.import_module("torch._dynamo.config")  # imported here because it takes a second

    names = [name for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(config, name)]
    with config.patch(dict.fromkeys(names, RECOMPILE_LIMIT)), warnings.catch_warnings():
        # The compiler reads the gradient of the loss's input while tracing, and triggers this warning itself.
        warnings.filterwarnings("ignore", message=".*attribute of a Tensor that is not a leaf")
        yield


def enable_cudnn_benchmark() -> None:
    """Let cuDNN benchmark all convolution algorithms, not ten, until `backend_flags` ends."""
    if torch.backends.cudnn.benchmark_limit is not None:
        torch.backends.cudnn.benchmark_limit = 0


def _read_flags() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions deprecate some of these names
        return {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_benchmark_limit": torch.backends.cudnn.benchmark_limit,  # None without cuDNN
            "matmul": torch.get_float32_matmul_precision(),
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "onednn": torch.backends.mkldnn.enabled,
        }


def _set_flags(flags: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        current = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        # Only if it changes: the call imports the compiler, which takes seconds.
        if current != (flags["deterministic"], flags["warn_only"]):
            torch.use_deterministic_algorithms(flags["deterministic"], warn_only=flags["warn_only"])
        torch.backends.cudnn.deterministic = flags["cudnn_deterministic"]
        torch.backends.cudnn.benchmark = flags["cudnn_benchmark"]
        if torch.backends.cudnn.benchmark_limit is not None:
            torch.backends.cudnn.benchmark_limit = flags["cudnn_benchmark_limit"]
        torch.set_float32_matmul_precision(flags["matmul"])
        torch.backends.cudnn.allow_tf32 = flags["cudnn_tf32"]
        torch.backends.mkldnn.enabled = flags["onednn"]


def _lacks_onednn_bf16() -> bool:
    """Return whether oneDNN is available but has no bfloat16 on this processor.

    torch detects this in the middle of a step and then disables oneDNN. A resumed run would use oneDNN for half a step
    more, so it is disabled from the start.
    """
    return torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
