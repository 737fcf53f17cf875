"""Random state of Python, NumPy and PyTorch: seeding, saving and restoring."""

import random
from typing import Any

import numpy as np
import torch

from fedlas.errors import UserError

NUMPY_WORDS = 624  # of its generator


def seed_everything(seed: int) -> None:
    """Start all generators of random numbers from one seed."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators of random numbers, as plain values and tensors."""
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
        raise UserError("the number that Python has drawn in advance is none")
    random.setstate((version, tuple(words), gauss))
    kind, numbers, position, *gauss_too = state["numpy"]
    if type(position) is not int or not 0 <= position <= NUMPY_WORDS:
        raise UserError(f"numpy stands at word {position} of {NUMPY_WORDS}")  # it would read there without a look
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), position, *gauss_too))  # noqa: NPY002
