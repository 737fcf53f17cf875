"""Campaign on dead nodes: kill nodes and the driver of a Ray cluster at random, and a worker of torchrun.

    python tests/faults/nodes.py --kills 20 --seed 1 --json build/nodes.json
    python tests/faults/nodes.py --kills 0 --torchrun 5

The cluster has a head without CPUs and two nodes with one CPU each; the driver is `fedlas reproduce` with a table of 12
runs. Whenever a run is being trained, a node (its raylet, whose workers end with it) or the driver is killed after up
to three seconds. A node is replaced, and a driver restarted with the same arguments, as a user would. At the end the
table must be complete, every run must be in the ledger once, and the requested number of kills must have happened.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("", "training", "experiments")]

from runs_of import log_without_times, prediction_bytes  # noqa: E402
from test_scheduler import exists, holder  # noqa: E402
from test_scheduler_ray import children, kill_raylet, parent, raylet  # noqa: E402
from zygote import count_lines, table, temporary_files  # noqa: E402

from fedlas.experiments.ledger import Ledger  # noqa: E402
from fedlas.experiments.stored_predictions import problems  # noqa: E402
from fedlas.training import Run  # noqa: E402
from waiting import until  # noqa: E402

LOSSES, SEEDS = ("ce", "ls", "focal", "mbls"), (1, 2, 3)
LIMIT = 1500.0  # seconds for everything
DRIVER = "driver"


class KillableCluster:
    """A cluster and its driver."""

    def __init__(self, cluster: Any, folder: Path, epochs: int) -> None:
        self.cluster, self.folder, self.epochs = cluster, folder, epochs
        self.nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        self.driver = self._start_driver()
        self.starts = 1

    def _start_driver(self) -> subprocess.Popen[bytes]:
        options = {
            "--data": "digits", "--losses": ",".join(LOSSES), "--seeds": ",".join(map(str, SEEDS)),
            "--protocol": "small", "--executor": "ray", "--address": self.cluster.address, "--device": "cpu",
            "--runs": str(self.folder / "runs"), "--ledger": str(self.folder / "results"),
        }  # fmt: skip
        settings = {"epochs": self.epochs, "batch_size": 100, "data_options.train_samples": 400}
        arguments = [text for pair in options.items() for text in pair]
        arguments += [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
        with (self.folder / "driver.txt").open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "fedlas", "reproduce", "sota", *arguments], stdout=file, stderr=file
            )

    def kill(self, target: str) -> None:
        """Kill the driver or a node, and start a replacement."""
        if target == DRIVER:
            self.driver.kill()
            self.driver.wait()
            self.driver = self._start_driver()
            self.starts += 1
            return
        number = int(target.removeprefix("node ")) - 1
        workers = children(raylet(self.nodes[number]))
        kill_raylet(self.nodes[number])
        until(lambda: not any(exists(pid) for pid in workers))
        self.cluster.remove_node(self.nodes[number])
        self.nodes[number] = self.cluster.add_node(num_cpus=1)

    def busy_node(self) -> str | None:
        """Return a node that is training a run."""
        for run in runs_in(self.folder):
            pid = holder(run)
            for number, node in enumerate(self.nodes, start=1):
                if pid is not None and exists(pid) and parent(pid) == raylet(node):
                    return f"node {number}"
        return None

    def exit_code(self) -> int | None:
        """Return the exit code of the driver, if it has ended."""
        return self.driver.poll()


def runs_in(folder: Path) -> list[Run]:
    return [Run(path.parent) for path in sorted(folder.glob("runs/*/recipe.json"))]


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Start a head node without CPUs."""
    import ray
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # socket names must be short
    (folder / "ray").mkdir()
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def cluster_campaign(kills: int, seed: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Produce a table while nodes and the driver are killed."""
    rng, start, killed = random.Random(seed), time.monotonic(), []
    with ray_cluster() as cluster:
        killable = KillableCluster(cluster, folder, epochs)
        try:
            while killable.exit_code() is None and time.monotonic() - start < LIMIT:
                if len(killed) < kills and killable.busy_node() is not None:
                    time.sleep(rng.uniform(0, 3))
                    target = rng.choice(["node 1", "node 2", DRIVER])
                    if killable.exit_code() is None:
                        killable.kill(target)
                        killed.append({"what": target, "after": round(time.monotonic() - start, 1)})
                        print(killed[-1], file=sys.stderr, flush=True)
                time.sleep(0.05)
            code = killable.exit_code()
        finally:
            killable.driver.kill()
            killable.driver.wait()
    return {"kills": killed, "seconds": round(time.monotonic() - start), "starts": killable.starts} | evaluate_run(
        folder, code
    )


def evaluate_run(folder: Path, code: int | None) -> dict[str, Any]:
    """Check the results of the driver."""
    runs = runs_in(folder)
    failures = [] if code == 0 else [f"the driver ended with {code}: {(folder / 'driver.txt').read_text()[-2000:]}"]
    failures += [] if len(runs) == len(LOSSES) * len(SEEDS) else [f"there are {len(runs)} runs"]
    for run in runs:
        count = count_lines(folder / "results", run.recipe.name)
        failures += [f"{run.folder.name} stands in the ledger {count} times"] * (count != 1)
        failures += [] if run.finished else [f"{run.folder.name} is not finished"]
        epochs = [record["epoch"] for record in run.log]
        failures += (
            [] if epochs == list(range(1, run.recipe.epochs + 1)) else [f"{run.folder.name} has epochs {epochs}"]
        )
    failures += [f"{path} was left" for path in temporary_files(folder)]
    failures += problems(Ledger(folder / "results"))
    continued = sum(record["machine"]["continued_at_step"] is not None for run in runs for record in run.log)
    return {"runs": len(runs), "epochs continued in the middle": continued, "failures": failures}


TORCHRUN = """
import sys
from pathlib import Path
from fedlas.training import fit, recipe_for
options = {"model_options": {"norm": "group", "width": 8}, "data_options": {"train_samples": 400}}
training = {"epochs": int(sys.argv[1]), "batch_size": 100, "checkpoint_every": 3, "deterministic": True}
recipe = recipe_for("digits", loss="fedlas_ls", **training, **options)
for folder in sys.argv[2:]:
    fit(recipe, out=Path(folder), resume=True)
"""


def torchrun(folder: Path, epochs: int, *runs: Run) -> subprocess.Popen[bytes]:
    """Start two workers that train a recipe in each folder, one after the other."""
    script = folder / "train.py"
    script.write_text(TORCHRUN)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), str(epochs)]
    arguments += [str(run.folder) for run in runs]
    with (folder / "torchrun.txt").open("wb") as file:
        return subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=file)


def torchrun_campaign(count: int, seed: int, folder: Path, epochs: int = 30) -> list[dict[str, Any]]:
    """Repeatedly kill one of two workers at a random epoch and resume the run."""
    rng = random.Random(seed)
    return [worker_dies(number, epochs, rng, folder) for number in range(count)]


def worker_dies(number: int, epochs: int, rng: random.Random, folder: Path) -> dict[str, Any]:
    """Kill one worker, resume, and compare the result with an uninterrupted run."""
    failures: list[str] = []
    run, uninterrupted = Run(folder / f"run {number}"), Run(folder / "uninterrupted")
    process = torchrun(folder, epochs, uninterrupted, run)  # the first run is trained only by the first call
    epoch, rank = rng.randint(1, epochs - 10), rng.randrange(2)
    try:
        until(lambda: len(run.log) >= epoch or process.poll() is not None, 480)  # the machine may be busy
        assert process.poll() is None, f"torchrun ended by itself: {(folder / 'torchrun.txt').read_text()[-2000:]}"
        workers = children(process.pid)
        os.kill(workers[rank], signal.SIGKILL)
        start = time.monotonic()
        code = process.wait(120)
    finally:
        process.terminate()
    seconds = time.monotonic() - start
    text = (folder / "torchrun.txt").read_text()
    failures += [] if code else ["torchrun ended as if nothing had happened"]
    failures += (
        []
        if re.search(r"exitcode\s*:\s*-9|Signal 9 \(SIGKILL\)", text)
        else [f"the dead worker is not named: {text[-500:]}"]
    )
    failures += [f"worker {pid} is left" for pid in workers if exists(pid)]
    failures += [] if not run.finished else ["it was finished already"]
    if torchrun(folder, epochs, run).wait(300):
        failures.append(f"it could not go on: {(folder / 'torchrun.txt').read_text()[-2000:]}")
    elif prediction_bytes(run) != prediction_bytes(uninterrupted) or log_without_times(run) != log_without_times(
        uninterrupted
    ):
        failures.append("it ends with other numbers")
    failures += [f"{path} was left" for path in temporary_files(run.folder)]
    return {"rank": rank, "epoch": epoch, "seconds until all had ended": round(seconds, 1), "failures": failures}


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return table rows for both campaigns."""
    table_rows = []
    if "cluster" in results:
        result = results["cluster"]
        killed = Counter("driver" if kill["what"] == DRIVER else "node" for kill in result["kills"])
        table_rows.append({
            "campaign": "Ray, two nodes, a table of 12 runs",
            "killed": f"{killed['node']} times a node, {killed['driver']} times the driver",
            "runs": result["runs"],
            "wrong": len(result["failures"]),
            "seconds": result["seconds"],
        })  # fmt: skip
    if results.get("torchrun"):
        worker_results = results["torchrun"]
        longest = max(item["seconds until all had ended"] for item in worker_results)
        table_rows.append({
            "campaign": "torchrun, two processes",
            "killed": f"{len(worker_results)} times a worker; all had ended within {longest} s",
            "runs": len(worker_results),
            "wrong": sum(bool(item["failures"]) for item in worker_results),
            "seconds": results["torchrun seconds"],
        })  # fmt: skip
    return table_rows


def all_failures(results: dict[str, Any], kills: int, workers: int) -> list[str]:
    """Return all problems, including too few kills."""
    cluster, worker_results = results.get("cluster", {"kills": [], "failures": []}), results.get("torchrun", [])
    failures = [*cluster["failures"], *(text for item in worker_results for text in item["failures"])]
    for kind, count, expected in (
        ("nodes and drivers", len(cluster["kills"]), kills),
        ("workers", len(worker_results), workers),
    ):
        failures += [f"{count} {kind} were killed, and {expected} should have been"] * (count != expected)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--epochs", type=int, default=200, help="of each run; must be enough for all kills to hit a run in training"
    )
    parser.add_argument("--torchrun", type=int, default=5, help="workers to kill")
    parser.add_argument("--torchrun-epochs", type=int, default=30, help="of each run of torchrun")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.kills:
            result["cluster"] = cluster_campaign(arguments.kills, arguments.seed, arguments.epochs, Path(folder))
        if arguments.torchrun:
            start = time.monotonic()
            result["torchrun"] = torchrun_campaign(
                arguments.torchrun, arguments.seed, Path(folder), arguments.torchrun_epochs
            )
            result["torchrun seconds"] = round(time.monotonic() - start)
    print(f"seed {arguments.seed}\n\n{table(rows(result))}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    failures = all_failures(result, arguments.kills, arguments.torchrun)
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
