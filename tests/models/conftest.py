"""Import timm without Weights & Biases, whose import takes four CPU seconds and is only needed by a script of timm."""

import sys

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "wandb", sys.modules.get("wandb"))  # None makes its import fail
    import timm  # noqa: F401
