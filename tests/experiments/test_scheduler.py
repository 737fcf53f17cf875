"""Schedule runs on one machine: killed, stopped or locked runs are resumed, and no run is trained twice."""

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlas.experiments import scheduler
from fedlas.experiments.scheduler import FailedRunsError, train_recipes
from fedlas.training import Recipe, Run, StoppedError, recipe_for
from fedlas.training.run_folder import locked
from waiting import until

HERE = Path(__file__).parent

LONG = 40  # epochs of a run that is interrupted in the middle
ENDLESS = 5000  # epochs of a run that does not finish within a test


def short_recipe(loss: str = "ce", **changes: Any) -> Recipe:
    """Return the recipe of a run of 2 epochs with 4 steps each of a narrow network."""
    defaults = {"epochs": 2, "batch_size": 50, "deterministic": True}
    options = {"data_options": {"train_samples": 200}, "model_options": {"width": 8}}
    return recipe_for("digits", "small_cnn", loss, **{**defaults, **options, **changes})


def holder(run: Run) -> int | None:
    """Return the process that holds the lock of a run folder."""
    lock = run.folder / ".lock"
    if not lock.exists():
        return None
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].split(":")[-1] == str(lock.stat().st_ino):
            return int(fields[4])
    return None


def in_the_middle(run: Run) -> bool:
    """Return whether a run has a checkpoint, at least 4 finished epochs and more than 4 epochs to go."""
    return run.checkpoint.exists() and 4 <= len(run.log) < run.recipe.epochs - 4


def exists(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def epoch_seconds(run: Run) -> list[float]:
    return [record["machine"]["seconds"] for record in run.log]


def assert_complete(runs: Sequence[Run], recipes: Sequence[Recipe]) -> None:
    """Check that every recipe and epoch was trained once and all files for the tables exist."""
    assert sorted(run.folder.name for run in runs) == sorted(recipe.name for recipe in recipes)
    for run in runs:
        assert [record["epoch"] for record in run.log] == list(range(1, run.recipe.epochs + 1))
        assert len(run.predictions("best-test").labels) == 797


@pytest.fixture(autouse=True)
def _log_info(caplog):
    caplog.set_level(logging.INFO, logger="fedlas")


def test_runs_are_yielded_as_they_finish_and_reused(tmp_path, caplog):
    recipes = [short_recipe(), short_recipe("ls"), short_recipe(seed=2), short_recipe()]
    # Recipes that differ only in the seed are trained one after the other.
    expected = [short_recipe(), short_recipe(seed=2), short_recipe("ls")]
    runs = list(train_recipes(recipes, folder=tmp_path))
    assert [run.recipe for run in runs] == expected
    assert_complete(runs, expected)
    assert caplog.messages == []
    before = [epoch_seconds(run) for run in runs]
    second_runs = list(train_recipes([short_recipe("focal"), *recipes], folder=tmp_path))
    assert [run.recipe for run in second_runs] == [*expected, short_recipe("focal")]  # finished runs come first
    assert [epoch_seconds(run) for run in second_runs[:3]] == before
    (message,) = caplog.messages
    assert "3 of 4" in message


def test_failed_run_does_not_stop_others(tmp_path, caplog):
    diverging, occupied = short_recipe(lr=1e30), short_recipe("ls")
    (tmp_path / occupied.name).mkdir()
    (tmp_path / occupied.name / "thesis.txt").write_text("Chapter 1")
    runs: list[Run] = []
    with pytest.raises(FailedRunsError, match=r"^2\b") as error:
        runs.extend(train_recipes([diverging, occupied, short_recipe("focal")], folder=tmp_path))
    assert_complete(runs, [short_recipe("focal")])
    assert list(error.value.reasons) == [diverging.name, occupied.name]
    assert error.value.reasons[diverging.name].startswith("DivergedError")
    assert str(tmp_path / occupied.name) in str(error.value)
    assert "Traceback" not in str(error.value)
    assert f"{diverging.name}:\nTraceback" in error.value.__notes__[0]
    assert re.match(f"{diverging.name}.*DivergedError", caplog.messages[0])


def test_time_limit_stops_a_run_with_a_checkpoint(tmp_path, caplog):
    recipes = [short_recipe(epochs=ENDLESS), short_recipe("ls")]
    stopped, untouched = (Run(tmp_path / recipe.name) for recipe in recipes)
    steps, before = [0], []
    for _ in range(2):
        assert list(train_recipes(recipes, folder=tmp_path, limit_minutes=2 / 60)) == []
        checkpoint = torch.load(stopped.checkpoint, weights_only=True)
        assert checkpoint["epoch"] == len(stopped.log)
        steps.append(checkpoint["epoch"] * 4 + checkpoint["position"])
        assert epoch_seconds(stopped)[: len(before)] == before  # it was resumed, not restarted
        before = epoch_seconds(stopped)
    assert steps[0] < steps[1] < steps[2]
    assert len(caplog.messages) == 2
    assert all("2 of 2" in message for message in caplog.messages)
    assert not untouched.folder.exists()


def test_zero_time_limit_yields_finished_runs_only(tmp_path, caplog):
    list(train_recipes([short_recipe()], folder=tmp_path))
    runs = list(train_recipes([short_recipe("ls"), short_recipe()], folder=tmp_path, limit_minutes=0))
    assert [run.recipe for run in runs] == [short_recipe()]
    assert "1 of 2" in caplog.messages[-1]
    assert not (tmp_path / short_recipe("ls").name).exists()


def test_time_limit_outside_the_main_thread_stops_the_run(tmp_path, caplog):
    def train() -> None:
        assert list(train_recipes([short_recipe(epochs=1000)], folder=tmp_path, limit_minutes=1 / 60)) == []

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    (message,) = caplog.messages
    assert "1 of 1" in message


def test_sigint_stops_all_runs(tmp_path):
    recipe = short_recipe(epochs=LONG)

    def interrupt() -> None:
        until(lambda: in_the_middle(Run(tmp_path / recipe.name)))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(StoppedError) as error:
        list(train_recipes([recipe, short_recipe("ls")], folder=tmp_path))
    thread.join()
    assert error.value.signal_number == signal.SIGINT
    assert not (tmp_path / short_recipe("ls").name).exists()


def test_locked_run_is_postponed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(scheduler, "LOCK_RETRY_INTERVAL", 0.2)
    first, second = short_recipe(), short_recipe("ls")
    with locked(tmp_path / first.name):
        runs = train_recipes([first, second], folder=tmp_path)
        assert next(runs).recipe == second
    assert [run.recipe for run in runs] == [first]
    (message,) = caplog.messages
    assert first.name in message


def test_stale_lock_error_names_the_lock_file(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "LOCK_RETRY_INTERVAL", 0.1)
    monkeypatch.setattr(scheduler, "LOCK_TIMEOUT", 0.5)
    with (
        locked(tmp_path / short_recipe().name),
        pytest.raises(FailedRunsError, match=rf"{short_recipe().name}/\.lock"),
    ):
        list(train_recipes([short_recipe()], folder=tmp_path))
    (tmp_path / short_recipe().name / ".lock").unlink()  # as the error advises
    assert_complete(list(train_recipes([short_recipe()], folder=tmp_path)), [short_recipe()])


def test_time_limit_ends_the_wait_for_a_locked_run(tmp_path, caplog):
    with locked(tmp_path / short_recipe().name):
        assert list(train_recipes([short_recipe()], folder=tmp_path, limit_minutes=1 / 60)) == []
    assert "1 of 1" in caplog.messages[-1]


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.campaign)])
def test_run_of_a_killed_worker_is_resumed_by_another(tmp_path, caplog, monkeypatch, method):
    """The run is resumed in another process; a run that diverges does not affect the others.

    Processes are spawned; here they are forked from a server that has imported torch once.
    """
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["fedlas.experiments.executors.local", "fedlas.training.loop"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    interrupted, diverging = short_recipe(epochs=LONG), short_recipe("focal", lr=1e30)
    recipes = [interrupted, short_recipe("ls", epochs=LONG), diverging, short_recipe("mbls")]
    before: list[float] = []
    pids: list[int] = []

    def kill_worker() -> None:
        run = Run(tmp_path / interrupted.name)
        until(lambda: in_the_middle(run))
        pids.append(until(lambda: holder(run)))
        os.kill(pids[0], signal.SIGKILL)
        before.extend(epoch_seconds(run))

    thread = threading.Thread(target=kill_worker)
    thread.start()
    runs: list[Run] = []
    with pytest.raises(FailedRunsError, match=f"^1 .*{diverging.name}: DivergedError"):
        runs.extend(train_recipes(recipes, folder=tmp_path, workers=2))
    thread.join()
    assert_complete(runs, [recipe for recipe in recipes if recipe != diverging])
    assert pids[0] != os.getpid()
    assert any(interrupted.name in message and "-9" in message for message in caplog.messages)
    after = epoch_seconds(Run(tmp_path / interrupted.name))
    assert after[: len(before) - 2] == before[:-2]  # it was resumed, not restarted
    assert not any(exists(pid) for pid in pids)


@pytest.mark.campaign
def test_time_limit_stops_all_workers(tmp_path, caplog):
    recipes = [short_recipe(loss, epochs=ENDLESS) for loss in ("ce", "ls")]
    start = time.monotonic()
    assert list(train_recipes(recipes, folder=tmp_path, workers=2, limit_minutes=10 / 60)) == []
    assert time.monotonic() - start >= 10
    (message,) = caplog.messages
    assert "2 of 2" in message
    assert multiprocessing.active_children() == []
    assert [holder(Run(tmp_path / recipe.name)) for recipe in recipes] == [None, None]


@pytest.mark.campaign
def test_run_that_keeps_killing_workers_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_ATTEMPTS", 2)
    killed, other = short_recipe(epochs=LONG), short_recipe("ls")

    def kill_worker() -> None:
        for _ in range(2):
            os.kill(until(lambda: holder(Run(tmp_path / killed.name))), signal.SIGKILL)
            time.sleep(0.5)

    thread = threading.Thread(target=kill_worker)
    thread.start()
    with pytest.raises(FailedRunsError, match=rf"^1 .*{killed.name}: .*-9.*\b2\b"):
        list(train_recipes([killed, other], folder=tmp_path, workers=2))
    thread.join()
    assert Run(tmp_path / other.name).finished


LAUNCHER = """
import sys
from pathlib import Path
sys.path[:0] = [{experiments!r}, {tests!r}]
from test_scheduler import LONG, short_recipe, train_recipes
if __name__ == "__main__":
    recipes = [short_recipe(epochs=LONG), short_recipe("ls", epochs=LONG), short_recipe("focal")]
    list(train_recipes(recipes, folder=Path({folder!r}), workers=2))
"""


@pytest.mark.campaign
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_write_checkpoints_when_the_launcher_ends(tmp_path, signal_number):
    """When the launcher is terminated or killed, its workers stop with a checkpoint; the next launcher resumes them."""
    recipes = [short_recipe(epochs=LONG), short_recipe("ls", epochs=LONG), short_recipe("focal")]
    interrupted = [Run(tmp_path / "runs" / recipe.name) for recipe in recipes[:2]]
    script = tmp_path / "script.py"
    script.write_text(LAUNCHER.format(experiments=str(HERE), tests=str(HERE.parent), folder=str(tmp_path / "runs")))
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True) as launcher:
        try:
            pids = [until(lambda run=run: holder(run)) for run in interrupted]
            until(lambda: any(in_the_middle(run) for run in interrupted))
        finally:
            launcher.send_signal(signal_number)
        _, stderr = launcher.communicate(timeout=60)
    assert launcher.returncode == {signal.SIGTERM: 1, signal.SIGKILL: -signal.SIGKILL}[signal_number]
    assert signal_number == signal.SIGKILL or "StoppedError" in stderr
    until(lambda: not any(exists(pid) for pid in pids))
    before = [epoch_seconds(run) for run in interrupted]
    assert max(len(seconds) for seconds in before) >= 4
    for run in interrupted:
        assert not run.finished
        # The last checkpoint was written when the run stopped.
        assert torch.load(run.checkpoint, weights_only=True)["epoch"] == len(run.log)
    runs = list(train_recipes(recipes, folder=tmp_path / "runs"))
    assert_complete(runs, recipes)
    assert [epoch_seconds(run)[: len(seconds)] for run, seconds in zip(interrupted, before, strict=True)] == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "ray", "workers": 2}, "workers.*gpus_per_run"),
        ({"limit_minutes": -1}, "limit_minutes.*-1"),
        ({"limit_minutes": float("nan")}, "limit_minutes.*nan"),
    ],
)
def test_invalid_options_raise_immediately(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train_recipes([short_recipe()], folder=tmp_path, **options)


def test_train_recipes_under_torchrun_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun"):
        train_recipes([short_recipe()], folder=tmp_path)


def test_missing_ray_error_has_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"ray.*pip install 'fedlas\[cluster\]'"):
        train_recipes([short_recipe()], folder=tmp_path, executor="ray")
    assert_complete(list(train_recipes([short_recipe()], folder=tmp_path)), [short_recipe()])
