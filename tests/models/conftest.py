"""Import timm without Weights & Biases, which it imports for its training script: this takes four CPU seconds."""

import sys

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "wandb", sys.modules.get("wandb"))  # None: not there
    import timm  # noqa: F401
