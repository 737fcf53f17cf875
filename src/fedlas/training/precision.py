"""Numbers and switches of the machine: which precision, how reproducible, and a loss scale for float16.

The loss scale is torch's rule (halved after an overflow, doubled after 2,000 steps without one), with everything on the
device, so that it can be part of a captured step.
"""

import importlib
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedlas.training.recipe import Precision, Recipe

NUMPY_WORDS = 624  # of its generator
COMPILATIONS = 4096  # of one function: every loss shares its forward with all others
GROWTH_INTERVAL = 2000
FIRST_SCALE = 65536.0


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Give the narrow type that a network computes in, if any."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Let a network compute in the recipe's precision."""
    dtype = autocast_dtype(precision)
    # Each weight is used once a pass: a cache of narrow copies would save nothing, and captured graphs dislike it.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


class Scale:
    """The factor that keeps float16 gradients from vanishing; 1 and constant in any other precision.

    Args:
        precision: of the recipe.
        device: where it lives.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.used = precision == "fp16"
        self.value = torch.full((), FIRST_SCALE if self.used else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, overflow: Bool[Tensor, ""]) -> None:
        """Learn whether the gradients of a step were finite."""
        if not self.used:
            return
        good = (self.good_steps + 1) * ~overflow
        grown = good >= GROWTH_INTERVAL
        self.value.mul_(1 + grown.float() - overflow.float() / 2)
        self.good_steps.copy_(good * ~grown)

    def beyond_help(self, overflow: Bool[Tensor, ""]) -> Bool[Tensor, ""]:
        """Say whether gradients that are not finite would not become so by a lower scale."""
        return overflow & (self.value <= 1) if self.used else overflow

    def of(self, value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Scale a loss."""
        return value * self.value if self.used else value

    def undone(self, value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Take the scale out of what was computed with it."""
        return value / self.value if self.used else value

    def reset(self) -> None:
        """Start anew, in place."""
        self.value.fill_(FIRST_SCALE if self.used else 1.0)
        self.good_steps.zero_()


@contextmanager
def machine(recipe: Recipe, device: torch.device) -> Iterator[None]:
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


def seed_everything(seed: int) -> None:
    """Start all generators of random numbers from one seed."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Give the state of all generators of random numbers, as plain values and tensors."""
    kind, words, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(words).astype(np.int64)), position, has_gauss, gauss],
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put all generators of random numbers where they were."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"], device)
    version, words, gauss = state["python"]
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError("the number that Python has drawn in advance is none")
    random.setstate((version, tuple(words), gauss))
    kind, numbers, position, *gauss_too = state["numpy"]
    if type(position) is not int or not 0 <= position <= NUMPY_WORDS:
        raise ValueError(f"numpy stands at word {position} of {NUMPY_WORDS}")  # it would read there without a look
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), position, *gauss_too))  # noqa: NPY002
