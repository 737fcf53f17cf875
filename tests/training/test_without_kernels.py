"""Training without the custom kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import needs_cuda
from runs_of import prediction_bytes, short

import fedlas
from fedlas.training import Run, fit
from fedlas.training.build import load_accelerator

TRAIN = """
import sys
import warnings

import torch
from runs_of import short

import fedlas
from fedlas.training import fit
from fedlas.training.build import load_accelerator

assert fedlas.__file__.startswith(sys.argv[1]), fedlas.__file__
warnings.simplefilter("ignore")
assert load_accelerator(short(compile=True), torch.device("cuda")) is None
fit(short(), out=sys.argv[2])
"""


@pytest.fixture
def no_kernels(monkeypatch):
    """Make every import of the custom kernels fail, as if their folder were deleted."""
    name = "fedlas.training.accelerators"
    for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.campaign
def test_cpu_training_gives_the_same_with_the_folder_of_the_kernels_deleted(tmp_path):
    source, tests = tmp_path / "source", Path(__file__).parent
    shutil.copytree(
        Path(fedlas.__file__).parent, source / "fedlas", ignore=shutil.ignore_patterns("accelerators", "__pycache__")
    )
    assert not (source / "fedlas" / "training" / "accelerators").exists()
    paths = os.pathsep.join(map(str, (source, tests, tests.parent)))
    subprocess.run(
        [sys.executable, "-c", TRAIN, str(source), str(tmp_path / "without")],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        check=True,
    )
    without = Run(tmp_path / "without")
    assert prediction_bytes(fit(short(), out=tmp_path / "with")) == prediction_bytes(without)


def test_missing_kernels_are_reported(no_kernels):
    with pytest.warns(UserWarning, match="without custom kernels, which is slower: fedlas.training.accelerators"):
        assert load_accelerator(short(compile=True), torch.device("cuda")) is None


@needs_cuda
@pytest.mark.filterwarnings("ignore:training without custom kernels")
def test_gpu_training_gives_the_same_without_the_kernels(tmp_path, no_kernels, request):
    recipe = short(model="resnet18_cifar", model_options={"in_channels": 1}, channels_last=True, precision="bf16")
    without = fit(recipe, out=tmp_path / "without")
    request.getfixturevalue("monkeypatch").undo()
    switched_off = fit(recipe.replace(custom_kernels=False), out=tmp_path / "off")
    with_kernels = fit(recipe, out=tmp_path / "with")
    losses = [[record["train"]["loss"] for record in run.log] for run in (without, switched_off, with_kernels)]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[2]), rtol=5e-2, atol=5e-2)
