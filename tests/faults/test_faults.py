"""Short versions of the campaigns in this folder; docs/reliability.md has the long ones.

The campaigns fork children from a process that has trained nothing, so each runs in a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def campaign(script: str, *words: str) -> Any:
    """Run a campaign, and give what it wrote; its exit code says whether anything was wrong."""
    out = Path(os.environ["FAULTS_OUT"])
    command = [sys.executable, str(HERE / script), *words, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def out(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS_OUT", str(tmp_path / "found.json"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.slow
def test_terminated_trainings_go_on():
    kills = campaign("kill.py", "--runs", "3", "--seed", "3", "--signal", "SIGTERM")
    assert all(kill["steps"] == 28 for kill in kills)  # nothing is done twice


@pytest.mark.slow
def test_disks_that_are_full_or_cannot_be_written():
    if os.geteuid():
        pytest.skip("mounting a file system takes root: unshare -rm pytest ...")
    found = campaign("disk.py", "--runs", "2", "--only", "full disk", "--only", "read-only disk")
    assert all("Read-only file system" in trial["said"] for trial in found["read-only disk"])


@pytest.mark.slow
def test_nodes_and_workers_die():
    found = campaign("nodes.py", "--kills", "2", "--epochs", "30", "--torchrun", "1")
    assert len(found["cluster"]["kills"]) == 2


SHORT = """
import json, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import disk, kill
from zygote import differences, lines, parts
from runs_of import short
from fedlas.train import fit
folder = Path(sys.argv[2])
for name in ("kills", "faults", "results"):
    (folder / name).mkdir()
kills = kill.campaign(2, 3, signal.SIGKILL, folder / "kills")
names = [name for name in disk.FAULTS if name not in disk.MOUNTED]
faults = disk.campaign(1, 3, folder / "faults", names)
small = short("ce", epochs=1, data_options={"train_samples": 50})
runs = [fit(small.replace(seed=seed), out=folder / str(seed)) for seed in (1, 2)]
(folder / "results" / "a.jsonl").write_text('{"id": "x"}\\n{"id": "x"}\\n')
(folder / "1" / ".log.jsonl.abc.part").touch()
noticed = [differences(runs[0], runs[0]), differences(*runs), len(parts(folder / "1")), lines(folder / "results", "x")]
wrong = {name: trials[0].wrong for name, trials in faults.items()}
print(json.dumps([[(one.phase, one.code, one.wrong) for one in kills], wrong, noticed]))
"""


def test_short_campaigns_find_nothing_and_would_notice(tmp_path):
    """Two kills and a fault of each kind; and made-up offenders: other numbers, rests of files, two lines in a ledger.

    All in one start, which takes longer than the rest.
    """
    words = [sys.executable, "-c", SHORT, str(HERE), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    kills, faults, noticed = json.loads(done.stdout)
    assert [(code, wrong) for _, code, wrong in kills] == [(-9, [])] * 2
    assert faults == {name: [] for name in faults}
    same, unlike, rests, count = noticed
    assert same == []
    assert unlike == ["its predictions are others", "its log is another", "its weights are others"]
    assert (rests, count) == (1, 2)
