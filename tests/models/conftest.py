"""Fixtures for networks; timm is imported without Weights & Biases, which takes four CPU seconds and is not needed."""

import sys

import pytest

from fedlas.models import resnet

with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "wandb", sys.modules.get("wandb"))  # None makes its import fail
    import timm  # noqa: F401


@pytest.fixture
def single_block_resnets(monkeypatch):
    """ResNets with one block in each stage: every layer of the deep ones, in a fraction of the time."""
    monkeypatch.setattr(resnet, "BLOCKS", dict.fromkeys(resnet.BLOCKS, (1, 1, 1, 1)))
