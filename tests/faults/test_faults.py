"""Short versions of the fault injection campaigns in this folder; docs/reliability.md has the long ones.

Campaigns that fork children do it from a process that has trained nothing, so each of them runs in one of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import disk
import kill
import nodes
import pytest
from collectives import run_processes
from nodes import torchrun_campaign

HERE = Path(__file__).parent
pytestmark = pytest.mark.campaign


def campaign(script: str, *options: str) -> Any:
    """Run a campaign and return its results; its exit code is non-zero after a failure."""
    result_file = Path(os.environ["FAULTS_OUT"])
    command = [sys.executable, str(HERE / script), *options, "--json", str(result_file)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(result_file.read_text(encoding="utf-8"))


def namespace() -> list[str]:
    """Return the command prefix that allows mounting file systems without root, if supported."""
    unshare = ["unshare", "-rm"]
    if os.geteuid() == 0 or shutil.which(unshare[0]) is None:
        return []
    return [] if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode else unshare


@pytest.fixture(autouse=True)
def out(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS_OUT", str(tmp_path / "found.json"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_terminated_trainings_resume():
    kills = campaign("kill.py", "--runs", "3", "--seed", "3", "--signal", "SIGTERM")
    assert all(kill["steps"] == 28 for kill in kills)  # nothing is done twice


def test_runs_survive_dead_nodes_and_workers():
    """One node of a cluster also dies in tests/experiments/test_scheduler_ray.py."""
    result = campaign("nodes.py", "--kills", "2", "--epochs", "30", "--torchrun", "1")
    assert len(result["cluster"]["kills"]) == 2


SHORT = """
import json, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import disk, kill
from zygote import count_lines, differences, temporary_files
from runs_of import short
from fedlas.training import fit
folder = Path(sys.argv[2])
kill.NETWORK["width"] = 8
for name in ("kills", "terminated", "faults", "results"):
    (folder / name).mkdir()
kills = kill.campaign(2, 3, signal.SIGKILL, folder / "kills")
terminated = kill.campaign(1, 4, signal.SIGTERM, folder / "terminated")
mounts = disk.can_mount()
faults = disk.campaign(1, 3, folder / "faults", [name for name in disk.FAULTS if mounts or name not in disk.MOUNTED])
small = short("ce", epochs=1, data_options={"train_samples": 50})
runs = [fit(small.replace(seed=seed), out=folder / str(seed)) for seed in (1, 2)]
(folder / "results" / "a.jsonl").write_text('{"id": "x"}\\n{"id": "x"}\\n')
(folder / "1" / ".log.jsonl.abc.part").touch()
leftovers, count = len(temporary_files(folder / "1")), count_lines(folder / "results", "x")
checks = [differences(runs[0], runs[0]), differences(*runs), leftovers, count]
failures = {name: trials[0].failures for name, trials in faults.items()}
messages = {name: trials[0].message for name, trials in faults.items()}
killed = [[(trial.code, trial.steps, trial.failures) for trial in trials] for trials in (kills, terminated)]
print(json.dumps([*killed, failures, messages, checks]))
"""


def test_short_campaigns_pass_and_detect_faults(tmp_path):
    """Two kills, a SIGTERM and each fault pass; other numbers, leftover files and duplicate records are detected.

    All in one process, because its start takes longest. Without root, file systems are mounted in a namespace.
    """
    command = [*namespace(), sys.executable, "-c", SHORT, str(HERE), str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr
    kills, terminated, failures, messages, checks = json.loads(process.stdout)
    assert [(code, problems) for code, _, problems in kills] == [(-9, [])] * 2
    assert [(steps, problems) for _, steps, problems in terminated] == [(28, [])]  # nothing is done twice
    assert failures == {name: [] for name in failures}
    assert {"checkpoint cut short", "bits flipped in a checkpoint", "clock that jumps"} <= set(failures)
    assert "RunError" in messages["two processes on one folder"]
    equal_runs, different_seeds, leftovers, count = checks
    assert equal_runs == []
    assert different_seeds == ["its predictions are others", "its log is another", "its weights are others"]
    assert (leftovers, count) == (1, 2)
    if "full disk" not in failures:
        pytest.skip("no file system can be mounted here, which takes root or unshare -rm: no full or read-only disk")
    assert "Read-only file system" in messages["read-only disk"]
    assert disk.NO_ROOM in messages["full disk"]


def test_too_few_kills_fail_the_campaign():
    cluster = {"kills": [{"what": "driver", "after": 1.0}] * 19, "failures": []}
    result = {"cluster": cluster, "torchrun": [{"failures": []}] * 5}
    assert nodes.all_failures(result, 19, 5) == []
    assert nodes.all_failures(result, 20, 5) == ["19 nodes and drivers were killed, and 20 should have been"]
    assert nodes.all_failures({"cluster": cluster}, 19, 5) == ["0 workers were killed, and 5 should have been"]
    assert nodes.all_failures({"torchrun": [{"failures": ["it is late"]}]}, 0, 1) == ["it is late"]


def test_too_few_kills_during_checkpoints_fail_the_campaign():
    def kills_in(writing, others):
        phases = ["checkpoint writing"] * writing + ["step"] * others
        return [kill.Kill(number, phase, -9, 28) for number, phase in enumerate(phases)]

    assert kill.all_failures(kills_in(10, 90), 100) == []
    assert kill.all_failures(kills_in(9, 91), 100) == ["only 9 of 100 kills came during checkpoint writing"]
    assert kill.all_failures(kills_in(10, 89), 100) == ["99 runs were killed, and 100 should have been"]
    assert kill.all_failures([kill.Kill(3, "step", -9, 28, ["its log is another"])], 1) == ["run 3: its log is another"]


def test_disks_that_were_not_full_fail_the_campaign():
    full, enough = disk.Trial("9 bytes", f"OSError: {disk.NO_ROOM}: 'x'"), disk.Trial("99 bytes", "it was enough")
    assert disk.all_failures({"full disk": [full, full, enough]}, 3) == []
    assert disk.all_failures({"full disk": [full, enough, enough]}, 3) == ["only 1 of 3 disks were full"]
    assert disk.all_failures({"full disk": [enough]}, 1) == ["only 0 of 1 disks were full"]
    assert disk.all_failures({"clock that jumps": [disk.Trial("x", failures=["it failed"])]}, 1) == [
        "clock that jumps, x: it failed"
    ]
    assert disk.all_failures({"full disk": []}, 1) == ["full disk was tried 0 times, and should have been 1 times"]


def test_a_run_resumes_after_a_dead_torchrun_worker(tmp_path):
    """There must be an error, no remaining worker, and after resuming the results of an uninterrupted run."""
    (result,) = torchrun_campaign(1, 1, tmp_path, epochs=12)
    assert result["failures"] == []


def test_compiled_collectives_of_two_processes_complete():
    """Collectives of compiled functions; tests/training/test_distributed.py covers eager ones."""
    assert run_processes(100, "compiled", limit=200) == "every round right"
