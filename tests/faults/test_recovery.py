"""Crashed runs resume bit for bit; docs/reliability.md has the numbers of longer campaigns."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "training"))

from runs_of import log_without_times, prediction_bytes  # noqa: E402

from fedlas.training import Run  # noqa: E402
from waiting import until  # noqa: E402

pytestmark = pytest.mark.campaign


def namespace() -> list[str]:
    """Return the command prefix that allows mounting file systems without root, if supported."""
    unshare = ["unshare", "-rm"]
    if os.geteuid() == 0 or shutil.which(unshare[0]) is None:
        return []
    return [] if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode else unshare


def test_killed_runs_and_runs_on_bad_disks_resume_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [*namespace(), sys.executable, str(HERE / "recovery.py"), "--runs", "3", "--seed", "3"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert process.returncode == 0, process.stdout + process.stderr
    if "not tried" in process.stdout:
        pytest.skip("no file system can be mounted here, which takes root or unshare -rm: no full or read-only disk")


TORCHRUN = """
import sys
from pathlib import Path
from fedlas.training import fit, recipe_for
options = {"model_options": {"norm": "group", "width": 8}, "data_options": {"train_samples": 400}}
training = {"epochs": 12, "batch_size": 100, "checkpoint_every": 3, "deterministic": True}
recipe = recipe_for("digits", loss="fedlas_ls", **training, **options)
for folder in sys.argv[1:]:
    fit(recipe, out=Path(folder), resume=True)
"""


def torchrun(folder: Path, *runs: Run) -> subprocess.Popen[bytes]:
    """Start two workers that train a recipe in each folder, one after the other."""
    script = folder / "train.py"
    script.write_text(TORCHRUN)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with (folder / "torchrun.txt").open("wb") as file:
        command = [sys.executable, *arguments, *(str(run.folder) for run in runs)]
        return subprocess.Popen(command, stdout=file, stderr=file)


def test_a_run_resumes_after_a_dead_torchrun_worker(tmp_path):
    """There must be an error, no remaining worker, and after resuming the results of an uninterrupted run."""
    run, uninterrupted, rng = Run(tmp_path / "run"), Run(tmp_path / "uninterrupted"), random.Random(1)
    output = tmp_path / "torchrun.txt"
    process = torchrun(tmp_path, uninterrupted, run)
    epoch, rank = rng.randint(1, 2), rng.randrange(2)
    try:
        until(lambda: len(run.log) >= epoch or process.poll() is not None, 480)  # the machine may be busy
        assert process.poll() is None, output.read_text()
        workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        os.kill(workers[rank], signal.SIGKILL)
        assert process.wait(120) != 0
    finally:
        process.terminate()
    assert re.search(r"exitcode\s*:\s*-9|Signal 9 \(SIGKILL\)", output.read_text())
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []
    assert not run.finished
    assert torchrun(tmp_path, run).wait(300) == 0, output.read_text()
    assert prediction_bytes(run) == prediction_bytes(uninterrupted)
    assert log_without_times(run) == log_without_times(uninterrupted)
    assert list(run.folder.rglob(".*.part")) == []
