"""Import timm without Weights & Biases, which it imports for its training script; that takes four seconds of CPU time."""

import sys

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "wandb", sys.modules.get("wandb"))  # None: not there
    import timm  # noqa: F401
