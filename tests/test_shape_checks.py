"""The shape checks of the tests detect wrong shapes and do not prevent `torch.compile`."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedlas.catalog
import shape_checks

SOURCE = """
from dataclasses import dataclass
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

@dataclass(frozen=True)
class Pair:
    logits: Float[Tensor, "n classes"]
    labels: Int[Tensor, " n"]

def share(pair: Pair) -> Float[Tensor, " n"]:
    return torch.nn.functional.cross_entropy(pair.logits, pair.labels, reduction="none")

def wrong(pair: Pair) -> Float[Tensor, " n"]:
    return share(pair)[:, None]

class Loss(nn.Module):
    def forward(self, logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, ""]:
        return share(Pair(logits, labels)).mean()
"""


@pytest.fixture
def sample(tmp_path, monkeypatch):
    pytest.importorskip("beartype")
    name = "shape_checked_sample"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("jaxtyping.jaxtyped", None)  # restored after the test
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    shape_checks.install(name)
    yield importlib.import_module(name)
    del sys.modules[name]


def test_wrong_shapes_are_found_in_arguments_fields_and_results(sample):
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2])
    with pytest.raises(Exception, match=r"Type-check error whilst checking the parameters of .*Pair"):
        sample.Pair(logits, labels)
    with pytest.raises(Exception, match=r"Type-check error whilst checking the parameters of .*Loss\.forward"):
        sample.Loss()(logits, labels)
    with pytest.raises(Exception, match=r"Type-check error whilst checking the return value of .*wrong"):
        sample.wrong(sample.Pair(logits[:3], labels))


def test_the_first_calls_in_every_test_are_checked(sample):
    pair = sample.Pair(torch.randn(3, 3), torch.tensor([0, 1, 2]))
    for _ in range(2):
        for _ in range(shape_checks.CALLS):
            with pytest.raises(Exception, match="Type-check error"):
                sample.wrong(pair)
        assert sample.wrong(pair).shape == (3, 1)
        shape_checks.next_test()


def test_compiling_in_one_graph_passes_through(sample):
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    loss = sample.Loss()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(logits, labels)
    torch.testing.assert_close(compiled, loss(logits, labels))
    compiled.backward()
    assert logits.grad.abs().sum() > 0


def test_the_package_is_checked():
    pytest.importorskip("beartype")
    assert hasattr(fedlas.catalog.nearest, "__wrapped__") == (os.environ.get("FEDLAS_SHAPE_CHECKS", "1") != "0")


@pytest.mark.campaign
def test_checks_can_be_switched_off():
    pytest.importorskip("beartype")
    code = "import conftest, fedlas.catalog; print(hasattr(fedlas.catalog.nearest, '__wrapped__'))"
    environment = {**os.environ, "FEDLAS_SHAPE_CHECKS": "0"}
    tests_folder = Path(__file__).parent  # the working directory of `python -c` is first on the path
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tests_folder, stdout=subprocess.PIPE, check=True
    )
    assert run.stdout.decode().strip() == "False"
