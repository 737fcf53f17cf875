"""Two processes on the CPU, started by torchrun, give the numbers of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedlas.train import Run, fit, recipe_for
from fedlas.train.bench import _check_shares
from fedlas.train.runs import RunError

OPTIONS = {"epochs": "2", "batch_size": "50", "model_options.norm": "group", "data_options.train_samples": "330"}


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fedlas"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *words], capture_output=True, text=True, env=environment, timeout=180, check=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    folder = tmp_path_factory.mktemp("processes")
    words = [word for name, value in OPTIONS.items() for word in ("--set", f"{name}={value}")]
    done = torchrun("train", "--data", "digits", "--loss", "fedlas_ls", "--out", str(folder / "two"), *words)
    assert done.returncode == 0, done.stderr
    recipe = recipe_for("digits", loss="fedlas_ls").with_settings(OPTIONS)
    return Run(folder / "two"), fit(recipe, out=folder / "one")


def test_two_processes_equal_one(pair):
    two, one = pair
    for mine, theirs in zip(two.log, one.log, strict=True):
        for part in ("train", "val"):
            for name, value in theirs[part].items():
                assert mine[part][name] == pytest.approx(value, rel=1e-3, abs=1e-4), (part, name)
        assert mine["gate"]["gamma_histogram"] == theirs["gate"]["gamma_histogram"]
        assert mine["gate"]["positive"] == pytest.approx(theirs["gate"]["positive"], abs=0.01)
    for name in ("best-val", "best-test", "last-val", "last-test"):
        mine, theirs = two.predictions(name), one.predictions(name)
        assert torch.equal(mine.index, theirs.index)  # each sample once, in order, also where ranks have unequal parts
        assert torch.equal(mine.labels, theirs.labels)
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mine.features, theirs.features, rtol=1e-3, atol=1e-3)


def test_a_run_of_two_processes_is_found_again_and_errors_reach_all(pair):
    two, _ = pair
    assert (two.folder / "environment.json").read_text().count('"processes": 2') == 1
    done = torchrun("train", "--data", "digits", "--loss", "ce", "--out", str(two.folder))
    assert done.returncode != 0
    assert done.stderr.count("holds a run of another recipe") == 2


def test_batches_that_cannot_be_shared_are_refused():
    recipe = recipe_for("digits", batch_size=51)
    with pytest.raises(RunError, match="batch_size is 51, which 2 processes cannot share evenly"):
        _check_shares(recipe, 330, 2)
    with pytest.raises(RunError, match="the last batch of an epoch is 15"):
        _check_shares(recipe_for("digits", batch_size=50), 315, 2)
    _check_shares(recipe_for("digits", batch_size=50, drop_last=True), 315, 2)


def test_nothing_is_needed_of_a_network_path(tmp_path: Path):
    """A run folder may be moved: nothing in it holds its path."""
    run = fit(recipe_for("digits", loss="ce", epochs=1), out=tmp_path / "here")
    moved = (tmp_path / "here").rename(tmp_path / "there")
    assert Run(moved).finished
    assert str(tmp_path).encode() not in b"".join(p.read_bytes() for p in moved.rglob("*") if p.is_file())
    assert run.folder != moved
