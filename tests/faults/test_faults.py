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
from collectives import outcome
from nodes import torchrun_campaign

HERE = Path(__file__).parent
pytestmark = pytest.mark.campaign


def campaign(script: str, *words: str) -> Any:
    """Run a campaign and return its results; its exit code is non-zero after a failure."""
    out = Path(os.environ["FAULTS_OUT"])
    command = [sys.executable, str(HERE / script), *words, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text(encoding="utf-8"))


def namespace() -> list[str]:
    """Return the command prefix that allows mounting file systems without root, if supported."""
    apart = ["unshare", "-rm"]
    if os.geteuid() == 0 or shutil.which(apart[0]) is None:
        return []
    return [] if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode else apart


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
from zygote import differences, lines, parts
from runs_of import short
from fedlas.training import fit
folder = Path(sys.argv[2])
kill.NETWORK["width"] = 8
for name in ("kills", "ends", "faults", "results"):
    (folder / name).mkdir()
kills = kill.campaign(2, 3, signal.SIGKILL, folder / "kills")
ends = kill.campaign(1, 4, signal.SIGTERM, folder / "ends")
mounts = disk.can_mount()
faults = disk.campaign(1, 3, folder / "faults", [name for name in disk.FAULTS if mounts or name not in disk.MOUNTED])
small = short("ce", epochs=1, data_options={"train_samples": 50})
runs = [fit(small.replace(seed=seed), out=folder / str(seed)) for seed in (1, 2)]
(folder / "results" / "a.jsonl").write_text('{"id": "x"}\\n{"id": "x"}\\n')
(folder / "1" / ".log.jsonl.abc.part").touch()
noticed = [differences(runs[0], runs[0]), differences(*runs), len(parts(folder / "1")), lines(folder / "results", "x")]
wrong = {name: trials[0].wrong for name, trials in faults.items()}
said = {name: trials[0].said for name, trials in faults.items()}
killed = [[(one.code, one.steps, one.wrong) for one in found] for found in (kills, ends)]
print(json.dumps([*killed, wrong, said, noticed]))
"""


def test_short_campaigns_pass_and_detect_faults(tmp_path):
    """Two kills, a SIGTERM and a fault of each kind; and made-up offenders: other numbers, rests, a run twice.

    All in one start, which takes longer than the rest. Who is not root mounts file systems in a namespace.
    """
    words = [*namespace(), sys.executable, "-c", SHORT, str(HERE), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    kills, ends, faults, text, noticed = json.loads(done.stdout)
    assert [(code, wrong) for code, _, wrong in kills] == [(-9, [])] * 2
    assert [(steps, wrong) for _, steps, wrong in ends] == [(28, [])]  # nothing is done twice
    assert faults == {name: [] for name in faults}
    assert {"checkpoint cut short", "bits flipped in a checkpoint", "clock that jumps"} <= set(faults)
    assert "RunError" in text["two processes on one folder"]
    same, unlike, rests, count = noticed
    assert same == []
    assert unlike == ["its predictions are others", "its log is another", "its weights are others"]
    assert (rests, count) == (1, 2)
    if "full disk" not in faults:
        pytest.skip("no file system can be mounted here, which takes root or unshare -rm: no full or read-only disk")
    assert "Read-only file system" in text["read-only disk"]
    assert disk.NO_ROOM in text["full disk"]


def test_too_few_kills_fail_the_campaign():
    cluster = {"kills": [{"what": "driver", "after": 1.0}] * 19, "wrong": []}
    result = {"cluster": cluster, "torchrun": [{"wrong": []}] * 5}
    assert nodes.wrongs(result, 19, 5) == []
    assert nodes.wrongs(result, 20, 5) == ["19 nodes and drivers were killed, and 20 should have been"]
    assert nodes.wrongs({"cluster": cluster}, 19, 5) == ["0 workers were killed, and 5 should have been"]
    assert nodes.wrongs({"torchrun": [{"wrong": ["it is late"]}]}, 0, 1) == ["it is late"]


def test_too_few_kills_during_checkpoints_fail_the_campaign():
    def made(writing, rest):
        phases = ["checkpoint writing"] * writing + ["step"] * rest
        return [kill.Kill(number, phase, -9, 28) for number, phase in enumerate(phases)]

    assert kill.wrongs(made(10, 90), 100) == []
    assert kill.wrongs(made(9, 91), 100) == ["only 9 of 100 kills came during checkpoint writing"]
    assert kill.wrongs(made(10, 89), 100) == ["99 runs were killed, and 100 should have been"]
    assert kill.wrongs([kill.Kill(3, "step", -9, 28, ["its log is another"])], 1) == ["run 3: its log is another"]


def test_disks_that_were_not_full_fail_the_campaign():
    full, enough = disk.Trial("9 bytes", f"OSError: {disk.NO_ROOM}: 'x'"), disk.Trial("99 bytes", "it was enough")
    assert disk.wrongs({"full disk": [full, full, enough]}, 3) == []
    assert disk.wrongs({"full disk": [full, enough, enough]}, 3) == ["only 1 of 3 disks were full"]
    assert disk.wrongs({"full disk": [enough]}, 1) == ["only 0 of 1 disks were full"]
    assert disk.wrongs({"clock that jumps": [disk.Trial("x", wrong=["it failed"])]}, 1) == [
        "clock that jumps, x: it failed"
    ]
    assert disk.wrongs({"full disk": []}, 1) == ["full disk was tried 0 times, and should have been 1 times"]


def test_a_run_resumes_after_a_dead_torchrun_worker(tmp_path):
    """There must be an error, no remaining worker, and after resuming the results of an uninterrupted run."""
    (result,) = torchrun_campaign(1, 1, tmp_path, epochs=12)
    assert result["wrong"] == []


def test_compiled_collectives_of_two_processes_complete():
    """Collectives of compiled functions; tests/training/test_distributed.py covers eager ones."""
    assert outcome(100, "compiled", limit=200) == "every round right"
