"""Schedule runs on a Ray cluster with real raylets and a real launcher, some of which are killed."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scheduler import (
    ENDLESS,
    HERE,
    LONG,
    assert_complete,
    epoch_seconds,
    exists,
    holder,
    in_the_middle,
    short_recipe,
)

from fedlas.experiments import scheduler
from fedlas.experiments.scheduler import FailedRunsError, train_recipes
from fedlas.training import Recipe, Run
from fedlas.training.run_folder import locked
from waiting import until

pytest.importorskip("ray")
pytestmark = pytest.mark.campaign


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def kill_raylet(node: Any) -> None:
    """Kill a raylet and wait for it, because its workers treat a zombie as alive."""
    os.kill(raylet(node), signal.SIGKILL)
    node.all_processes["raylet"][0].process.wait()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    result = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in result]


def run_on(node: Any, runs: list[Run]) -> Run | None:
    """Return a run that is being trained on a node."""
    for run in runs:
        pid = holder(run)
        if pid is not None and parent(pid) == raylet(node) and in_the_middle(run):
            return run
    return None


@pytest.fixture(autouse=True)
def _log_info(caplog):
    caplog.set_level(logging.INFO, logger="fedlas")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a head node with one CPU; tests add nodes."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # socket paths are limited to about 100 characters
        (folder / "ray").mkdir()
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        pids = [raylet(ray_cluster.head_node), *children(raylet(ray_cluster.head_node))]
        yield ray_cluster
        ray.shutdown()
        ray_cluster.shutdown()
        until(lambda: not any(exists(pid) for pid in pids))
        shutil.rmtree(folder)


def test_runs_survive_a_dead_ray_node(cluster, tmp_path, caplog, monkeypatch):
    """If one of two raylets is killed, every run still finishes once, and the interrupted one resumes on the other.

    One more run diverges, and another is locked by another process for a while.
    """
    diverging, externally_locked = short_recipe("focal", lr=1e30), short_recipe("mbls")
    epochs = 3 * LONG  # so many that each node starts one of them before any ends
    recipes = [externally_locked, short_recipe(epochs=epochs), short_recipe("ls", epochs=epochs), diverging]
    healthy = [recipe for recipe in recipes if recipe != diverging]
    node = cluster.add_node(num_cpus=1)
    interrupted: list[tuple[Run, list[float]]] = []
    node_pids: list[int] = []

    def kill_node() -> None:
        run = until(lambda: run_on(node, [Run(tmp_path / recipe.name) for recipe in healthy]))
        node_pids.extend(children(raylet(node)))
        kill_raylet(node)
        interrupted.append((run, epoch_seconds(run)))

    thread = threading.Thread(target=kill_node)
    thread.start()
    runs: list[Run] = []
    lock = ExitStack()
    lock.enter_context(locked(tmp_path / externally_locked.name))

    def unlock_when_reported(record: logging.LogRecord) -> bool:
        if externally_locked.name in record.getMessage():
            lock.close()
        return True

    monkeypatch.setattr(logging.getLogger(scheduler.__name__), "filters", [unlock_when_reported])

    with pytest.raises(FailedRunsError, match=f"^1 .*{diverging.name}: DivergedError"):
        runs.extend(train_recipes(recipes, folder=tmp_path, executor="ray", address=cluster.address))
    thread.join()
    assert_complete(runs, healthy)
    ((run, before),) = interrupted
    assert epoch_seconds(run)[: len(before) - 2] == before[:-2]  # it was resumed, not restarted
    assert re.match(r"Ray: 2\b.*\b0 GPU.*\b1 CPU", caplog.messages[0])
    assert sum(diverging.name in message for message in caplog.messages) == 1  # a diverged run is not retried
    assert sum(externally_locked.name in message for message in caplog.messages) == 1
    until(lambda: not any(exists(pid) for pid in node_pids))
    cluster.remove_node(node)


LAUNCHER = """
import sys
from pathlib import Path
sys.path[:0] = [{experiments!r}, {tests!r}]
from test_scheduler import LONG, short_recipe, train_recipes
recipes = [short_recipe(), short_recipe("ls", epochs=LONG), short_recipe("mbls", epochs=LONG)]
for run in train_recipes(recipes, folder=Path({folder!r}), executor="ray", address={address!r}):
    print(run.folder.name, flush=True)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_next_launcher_resumes_runs_of_a_dead_one(cluster, tmp_path, signal_number):
    """A killed launcher ends its tasks; a terminated one lets them write checkpoints first."""
    recipes = [short_recipe(), short_recipe("ls", epochs=LONG), short_recipe("mbls", epochs=LONG)]
    finished_run, interrupted_run, _ = [Run(tmp_path / "runs" / recipe.name) for recipe in recipes]
    script = tmp_path / "script.py"
    fields = {
        "experiments": str(HERE),
        "tests": str(HERE.parent),
        "folder": str(tmp_path / "runs"),
        "address": cluster.address,
    }
    script.write_text(LAUNCHER.format(**fields))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            # Ray prints other lines, too.
            assert any(line.strip() == finished_run.folder.name for line in launcher.stdout), launcher.wait()
            until(lambda: in_the_middle(interrupted_run))
        finally:
            launcher.send_signal(signal_number)
    finished_times, before = epoch_seconds(finished_run), epoch_seconds(interrupted_run)
    if signal_number == signal.SIGTERM:
        assert holder(interrupted_run) is None
        assert torch.load(interrupted_run.checkpoint, weights_only=True)["epoch"] == len(before)
    runs = list(train_recipes(recipes, folder=tmp_path / "runs", executor="ray", address=cluster.address))
    assert_complete(runs, recipes)
    assert runs[0] == finished_run
    assert epoch_seconds(finished_run) == finished_times
    assert epoch_seconds(interrupted_run)[: len(before) - 2] == before[:-2]


def test_time_limit_stops_ray_runs_with_a_checkpoint(cluster, tmp_path, caplog):
    """The run in progress writes a checkpoint; the run that waits for a CPU never starts."""
    recipes: list[Recipe] = [short_recipe(loss, epochs=ENDLESS) for loss in ("ce", "ls")]
    options: dict[str, Any] = {"folder": tmp_path, "executor": "ray", "address": cluster.address}
    assert list(train_recipes(recipes, limit_minutes=40 / 60, **options)) == []
    assert "2 of 2" in caplog.messages[-1]
    first, second = (Run(tmp_path / recipe.name) for recipe in recipes)
    assert holder(first) is None
    assert torch.load(first.checkpoint, weights_only=True)["epoch"] == len(first.log)
    assert not second.folder.exists()
