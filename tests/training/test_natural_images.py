"""Runs on images that are read from files: reproducible, and without leftover processes or locks."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs_of import assert_equal_runs, large, natural_images, stop_at

from fedlas.data.folder import Folder
from fedlas.training import Run, RunError, fit
from fedlas.training.run_folder import locked
from waiting import until

HERE = Path(__file__).parent
# Python 3.12 and later warn of any fork in a process with threads; the workers do not use locks that the threads hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return natural_images(tmp_path_factory.mktemp("images") / "all")


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit(large(images, workers=0), out=tmp_path_factory.mktemp("run") / "natural_images")


def test_a_run_learns_and_its_workers_end_with_it(images, finished, tmp_path):
    before = set(multiprocessing.active_children())
    run = fit(large(images), out=tmp_path / "run")
    assert set(multiprocessing.active_children()) <= before
    with locked(run.folder):
        pass
    assert_equal_runs(run, finished)
    assert len(run.predictions("best-test")) == 9
    assert run.log[-1]["train"]["accuracy"] > 0.5


def test_a_stopped_run_resumes_in_the_same_process_bit_for_bit(images, finished, tmp_path):
    error = stop_at(14, large(images), tmp_path)  # its traceback keeps all objects of the run alive, workers too
    run = fit(large(images), out=tmp_path, resume=True)
    assert error.__traceback__ is not None
    assert_equal_runs(run, finished)
    assert run.log[1]["machine"]["continued_at_step"] == 5


def test_sigterm_to_the_process_group_stops_a_run_with_a_checkpoint(images, tmp_path):
    """Regression: `timeout`, scancel and systemd signal the workers too, which ended, and the run with an error."""
    arguments = ["--data", "folder", "--model", "small_cnn", "--loss", "ce", "--out", str(tmp_path / "run")]
    options = {"data_options.path": images, "data_options.image_size": 16, "model_options.in_channels": 3}
    settings = {**options, "epochs": 1000, "batch_size": 8, "workers": 2}
    arguments += [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "fedlas", "train", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        until(lambda: process.poll() is not None or (tmp_path / "run" / "checkpoint.pt").exists())
        os.killpg(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    assert 0 < len(Run(tmp_path / "run").log) < 1000
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no worker is left


@pytest.mark.campaign
def test_a_killed_run_leaves_no_lock(images, finished, tmp_path):
    """Forked workers notice the end of their parent seconds later; they must not hold its lock until then."""
    code = f"""
import signal, sys
from pathlib import Path
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
from runs_of import AtStep, large
from fedlas.training import fit
from waiting import until
out = Path({str(tmp_path)!r})
kill = AtStep(12, lambda _: until((out / "checkpoint.pt").exists) and signal.raise_signal(signal.SIGKILL))
fit(large(Path({str(images)!r})), out=out, callbacks=[kill])
"""
    process = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert process.returncode == -signal.SIGKILL
    with locked(tmp_path):
        pass
    assert_equal_runs(fit(large(images), out=tmp_path, resume=True), finished)


def test_child_processes_do_not_inherit_the_lock(tmp_path):
    def hold(ready, end):
        ready.set()
        end.wait(60)

    fork = multiprocessing.get_context("fork")
    ready, end = fork.Event(), fork.Event()
    with locked(tmp_path):
        child = fork.Process(target=hold, args=(ready, end))
        child.start()
        assert ready.wait(60)
        with pytest.raises(RunError, match="process"), locked(tmp_path):
            pass  # the child's copy is closed, ours is not
    with locked(tmp_path):
        pass
    end.set()
    child.join(60)


@pytest.mark.parametrize("resident", [False, True])
def test_cached_images_change_nothing(images, finished, tmp_path, monkeypatch, resident):
    monkeypatch.setattr(Folder, "resident", resident)
    recipe = large(images, workers=2 if resident else 0, cache=str(tmp_path / "kept"))
    assert_equal_runs(fit(recipe, out=tmp_path / "run"), finished)
    assert len(list((tmp_path / "kept").glob("*.npy"))) == 1  # training, validation and test images are one part
    monkeypatch.setattr("fedlas.data.base.images.decode", lambda *_: pytest.fail("decoded again"))
    fit(recipe.replace(seed=2), out=tmp_path / "other")


def test_too_few_images_raise_before_training(tmp_path):
    images = natural_images(tmp_path / "few", count=3)
    with pytest.raises(ValueError, match=r"val.*cat 3, dog 3, owl 3"):
        fit(large(images), out=tmp_path / "run")
    assert not Run(tmp_path / "run").log_file.exists()


def test_missing_evaluation_data_raises_before_training(images, tmp_path, monkeypatch):
    def offline(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    for name, message in (("folder", "ood=folder"), ("svhnn", "'svhn'")):
        with pytest.raises(ValueError, match=message):
            fit(large(images, ood=(name,)), out=tmp_path / name)
    with pytest.raises(OSError, match=r"test_32x32\.mat"):
        fit(large(images, ood=("svhn",)), out=tmp_path / "svhn", data_root=tmp_path / "nothing")
    assert not list(tmp_path.glob("*/log.jsonl"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_image_is_named(tmp_path, workers):
    images = natural_images(tmp_path / "images")
    broken = images / "dog" / "7.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(ValueError, match=rf"\A[^\n]*{broken}[^\n]*\Z"):  # without the traceback of a worker
        fit(large(images, workers=workers), out=tmp_path / "run")
    until(lambda: not multiprocessing.active_children())
