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

LONG = 40  # epochs of a run that is to be hit in the middle
ENDLESS = 5000  # and of one that nobody waits for


def short(loss: str = "ce", **changes: Any) -> Recipe:
    """Return the recipe of a run of 2 epochs with 4 steps each of a narrow network."""
    usual = {"epochs": 2, "batch_size": 50, "deterministic": True}
    options = {"data_options": {"train_samples": 200}, "model_options": {"width": 8}}
    return recipe_for("digits", "small_cnn", loss, **{**usual, **options, **changes})


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
    """Whether a run has written checkpoints, of which the newest may still be under way, and has yet to go far."""
    return run.checkpoint.exists() and 4 <= len(run.log) < run.recipe.epochs - 4


def exists(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def times(run: Run) -> list[float]:
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
    recipes = [short(), short("ls"), short(seed=2), short()]
    expected = [short(), short(seed=2), short("ls")]  # one that differs in its seed alone comes first
    runs = list(train_recipes(recipes, folder=tmp_path))
    assert [run.recipe for run in runs] == expected
    assert_complete(runs, expected)
    assert caplog.messages == []
    before = [times(run) for run in runs]
    again = list(train_recipes([short("focal"), *recipes], folder=tmp_path))
    assert [run.recipe for run in again] == [*expected, short("focal")]  # what is finished is given at once
    assert [times(run) for run in again[:3]] == before
    (message,) = caplog.messages
    assert "3 of 4" in message


def test_failed_run_does_not_stop_others(tmp_path, caplog):
    bad, other = short(lr=1e30), short("ls")
    (tmp_path / other.name).mkdir()
    (tmp_path / other.name / "thesis.txt").write_text("Chapter 1")
    runs: list[Run] = []
    with pytest.raises(FailedRunsError, match=r"^2\b") as caught:
        runs.extend(train_recipes([bad, other, short("focal")], folder=tmp_path))
    assert_complete(runs, [short("focal")])
    assert list(caught.value.reasons) == [bad.name, other.name]
    assert caught.value.reasons[bad.name].startswith("DivergedError")
    assert str(tmp_path / other.name) in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert f"{bad.name}:\nTraceback" in caught.value.__notes__[0]
    assert re.match(f"{bad.name}.*DivergedError", caplog.messages[0])


def test_time_limit_stops_a_run_with_a_checkpoint(tmp_path, caplog):
    recipes = [short(epochs=ENDLESS), short("ls")]
    stopped, untouched = (Run(tmp_path / recipe.name) for recipe in recipes)
    steps, before = [0], []
    for _ in range(2):
        assert list(train_recipes(recipes, folder=tmp_path, limit_minutes=2 / 60)) == []
        saved = torch.load(stopped.checkpoint, weights_only=True)
        assert saved["epoch"] == len(stopped.log)
        steps.append(saved["epoch"] * 4 + saved["position"])
        assert times(stopped)[: len(before)] == before  # it went on, and did not start over
        before = times(stopped)
    assert steps[0] < steps[1] < steps[2]
    assert len(caplog.messages) == 2
    assert all("2 of 2" in message for message in caplog.messages)
    assert not untouched.folder.exists()


def test_zero_time_limit_yields_finished_runs_only(tmp_path, caplog):
    list(train_recipes([short()], folder=tmp_path))
    runs = list(train_recipes([short("ls"), short()], folder=tmp_path, limit_minutes=0))
    assert [run.recipe for run in runs] == [short()]
    assert "1 of 2" in caplog.messages[-1]
    assert not (tmp_path / short("ls").name).exists()


def test_time_limit_outside_the_main_thread_stops_the_run(tmp_path, caplog):
    def go() -> None:
        assert list(train_recipes([short(epochs=1000)], folder=tmp_path, limit_minutes=1 / 60)) == []

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    (message,) = caplog.messages
    assert "1 of 1" in message


def test_sigint_stops_all_runs(tmp_path):
    recipe = short(epochs=LONG)

    def interrupt() -> None:
        until(lambda: in_the_middle(Run(tmp_path / recipe.name)))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(StoppedError) as caught:
        list(train_recipes([recipe, short("ls")], folder=tmp_path))
    thread.join()
    assert caught.value.signal_number == signal.SIGINT
    assert not (tmp_path / short("ls").name).exists()


def test_locked_run_is_postponed(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(scheduler, "LOCK_RETRY_INTERVAL", 0.2)
    first, second = short(), short("ls")
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
        locked(tmp_path / short().name),
        pytest.raises(FailedRunsError, match=rf"{short().name}/\.lock"),
    ):
        list(train_recipes([short()], folder=tmp_path))
    (tmp_path / short().name / ".lock").unlink()  # the advice
    assert_complete(list(train_recipes([short()], folder=tmp_path)), [short()])


def test_time_limit_ends_the_wait_for_a_locked_run(tmp_path, caplog):
    with locked(tmp_path / short().name):
        assert list(train_recipes([short()], folder=tmp_path, limit_minutes=1 / 60)) == []
    assert "1 of 1" in caplog.messages[-1]


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.campaign)])
def test_run_of_a_killed_worker_is_resumed_by_another(tmp_path, caplog, monkeypatch, method):
    """The killed one's run goes on in another process; a run that diverges does not affect the others.

    Processes are spawned; here they are forked from a server that has imported torch once.
    """
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(["fedlas.experiments.executors.local", "fedlas.training.loop"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    hit, bad = short(epochs=LONG), short("focal", lr=1e30)
    recipes = [hit, short("ls", epochs=LONG), bad, short("mbls")]
    before: list[float] = []
    pids: list[int] = []

    def kill() -> None:
        run = Run(tmp_path / hit.name)
        until(lambda: in_the_middle(run))
        pids.append(until(lambda: holder(run)))
        os.kill(pids[0], signal.SIGKILL)
        before.extend(times(run))

    thread = threading.Thread(target=kill)
    thread.start()
    runs: list[Run] = []
    with pytest.raises(FailedRunsError, match=f"^1 .*{bad.name}: DivergedError"):
        runs.extend(train_recipes(recipes, folder=tmp_path, workers=2))
    thread.join()
    assert_complete(runs, [recipe for recipe in recipes if recipe != bad])
    assert pids[0] != os.getpid()
    assert any(hit.name in message and "-9" in message for message in caplog.messages)
    assert times(Run(tmp_path / hit.name))[: len(before) - 2] == before[:-2]  # it went on, and did not start over
    assert not any(exists(pid) for pid in pids)


@pytest.mark.campaign
def test_time_limit_stops_all_workers(tmp_path, caplog):
    recipes = [short(loss, epochs=ENDLESS) for loss in ("ce", "ls")]
    began = time.monotonic()
    assert list(train_recipes(recipes, folder=tmp_path, workers=2, limit_minutes=10 / 60)) == []
    assert time.monotonic() - began >= 10
    (message,) = caplog.messages
    assert "2 of 2" in message
    assert multiprocessing.active_children() == []
    assert [holder(Run(tmp_path / recipe.name)) for recipe in recipes] == [None, None]


@pytest.mark.campaign
def test_run_that_keeps_killing_workers_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_ATTEMPTS", 2)
    deadly, other = short(epochs=LONG), short("ls")

    def kill() -> None:
        for _ in range(2):
            os.kill(until(lambda: holder(Run(tmp_path / deadly.name))), signal.SIGKILL)
            time.sleep(0.5)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(FailedRunsError, match=rf"^1 .*{deadly.name}: .*-9.*\b2\b"):
        list(train_recipes([deadly, other], folder=tmp_path, workers=2))
    thread.join()
    assert Run(tmp_path / other.name).finished


LAUNCHER = """
import sys
from pathlib import Path
sys.path[:0] = [{here!r}, {above!r}]
from test_scheduler import LONG, short, train_recipes
if __name__ == "__main__":
    recipes = [short(epochs=LONG), short("ls", epochs=LONG), short("focal")]
    list(train_recipes(recipes, folder=Path({folder!r}), workers=2))
"""


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_write_checkpoints_when_the_launcher_ends(tmp_path, number):
    """Told to stop, or killed: its processes stop with a checkpoint, and the next launcher goes on."""
    recipes = [short(epochs=LONG), short("ls", epochs=LONG), short("focal")]
    hit = [Run(tmp_path / "runs" / recipe.name) for recipe in recipes[:2]]
    script = tmp_path / "script.py"
    script.write_text(LAUNCHER.format(here=str(HERE), above=str(HERE.parent), folder=str(tmp_path / "runs")))
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True) as launcher:
        try:
            pids = [until(lambda run=run: holder(run)) for run in hit]
            until(lambda: any(in_the_middle(run) for run in hit))
        finally:
            launcher.send_signal(number)
        _, complaint = launcher.communicate(timeout=60)
    assert launcher.returncode == {signal.SIGTERM: 1, signal.SIGKILL: -signal.SIGKILL}[number]
    assert number == signal.SIGKILL or "StoppedError" in complaint
    until(lambda: not any(exists(pid) for pid in pids))
    before = [times(run) for run in hit]
    assert max(len(kept) for kept in before) >= 4
    for run in hit:
        assert not run.finished
        assert torch.load(run.checkpoint, weights_only=True)["epoch"] == len(run.log)  # a checkpoint of the end
    runs = list(train_recipes(recipes, folder=tmp_path / "runs"))
    assert_complete(runs, recipes)
    assert [times(run)[: len(kept)] for run, kept in zip(hit, before, strict=True)] == before


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"executor": "ray", "workers": 2}, "workers.*gpus_per_run"),
        ({"address": "auto"}, "address.*Ray"),
        ({"workers": 0}, "workers.*1.*0"),
        ({"gpus_per_run": 2}, "gpus_per_run.*0.*1.*2.*torchrun"),
        ({"limit_minutes": -1}, "limit_minutes.*-1"),
        ({"limit_minutes": float("nan")}, "limit_minutes.*nan"),
    ],
)
def test_invalid_options_raise_immediately(tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        train_recipes([short()], folder=tmp_path, **options)


def test_train_recipes_under_torchrun_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun"):
        train_recipes([short()], folder=tmp_path)


def test_missing_ray_error_has_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"ray.*pip install 'fedlas\[cluster\]'"):
        train_recipes([short()], folder=tmp_path, executor="ray")
    assert_complete(list(train_recipes([short()], folder=tmp_path)), [short()])
