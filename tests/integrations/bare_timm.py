"""timm without Weights & Biases: it imports that where it is there, and no test logs by it.

Classes of wandb look for their own source in all modules that there are: with those of torch and transformers that took
longer than to import timm.
"""

import sys

import pytest

with pytest.MonkeyPatch.context() as patch:
    if "wandb" not in sys.modules:
        patch.setitem(sys.modules, "wandb", None)
    import timm

__all__ = ["timm"]
