"""Random state of Python, NumPy and PyTorch: seeding, saving and restoring."""

import random
from typing import Any

import numpy as np
import torch

from fedlas.errors import UserError

NUMPY_STATE_SIZE = 624  # 32-bit words of the Mersenne Twister


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all random number generators, as plain values and tensors."""
    kind, key, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(key).astype(np.int64)), position, has_gauss, gauss],
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the state of all random number generators."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"], device)
    version, key, gauss = state["python"]
    if gauss is not None and not isinstance(gauss, float):
        raise UserError("the cached Gaussian of Python's generator is not a number")
    random.setstate((version, tuple(key), gauss))
    kind, numpy_key, position, *numpy_gauss = state["numpy"]
    if type(position) is not int or not 0 <= position <= NUMPY_STATE_SIZE:  # numpy does not check it
        raise UserError(f"the position of numpy's generator is {position}, not within 0 to {NUMPY_STATE_SIZE}")
    np.random.set_state((kind, numpy_key.numpy().astype(np.uint32), position, *numpy_gauss))  # noqa: NPY002
