"""Campaign on crashed runs: a resumed run equals an uninterrupted one bit for bit and is in the ledger once.

    python tests/faults/recovery.py --runs 100 --seed 1
    python tests/faults/recovery.py --runs 100 --only "full disk"

Runs are killed at a random time, every fifth while a checkpoint is written; terminated; trained on a disk that becomes
full or read-only; and started twice. Importing torch takes seconds, so each run is a child that is forked from a
process that has imported everything but trained nothing. It counts its steps and checkpoints in shared memory.
Disks are file systems in memory, because permissions do not stop root. Mounting them takes root or `unshare -rm`.
"""

import argparse
import contextlib
import importlib
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "training")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads do not survive a fork
os.environ.setdefault("FEDLAS_COMMIT", "campaign")  # avoids a call of git in each trial

import numpy as np  # noqa: E402
import torch  # noqa: E402
from runs_of import assert_same, log_without_times, prediction_bytes  # noqa: E402

from fedlas.experiments import stored_predictions  # noqa: E402
from fedlas.experiments.ledger import Ledger  # noqa: E402
from fedlas.metrics.base import Resampling  # noqa: E402
from fedlas.training import Recipe, Run, checkpoint, fit, recipe_for  # noqa: E402
from fedlas.training.session import Session  # noqa: E402

LOSSES = ("ce", "fedlas_ls", "adafocal", "crl")  # three of them have state
STEPS = 28
TIMEOUT = 120.0  # seconds of a child
ENOUGH_BYTES = 64 * 2**20
NO_ROOM, WRITE_PROTECTED = "No space left on device", "Read-only file system"
WRITING = "while a checkpoint was written"
COUNTS = np.frombuffer(mmap.mmap(-1, 24), dtype=np.int64)  # in memory shared with the children
STEPS_BEGUN, WRITES_BEGUN, WRITES_ENDED = range(3)


def recipe_of(number: int) -> Recipe:
    """Return a recipe of four epochs of seven steps, with a checkpoint every third step."""
    return recipe_for(
        "digits", "small_cnn", LOSSES[number], epochs=4, batch_size=50, deterministic=True, checkpoint_every=3,
        seed=number, data_options={"train_samples": 330}, model_options={"width": 8},
    )  # fmt: skip


def train_and_record(recipe: Recipe, folder: Path) -> None:
    run = fit(recipe, out=folder, resume=True, progress=False)
    stored_predictions.record(run, "small", Ledger(folder.parent / "ledger"))


def count_steps_and_checkpoints() -> None:
    """Wrap the functions of fedlas that make steps and write checkpoints."""
    write, batches = checkpoint._write, Session.batches

    def counted_write(*arguments: Any) -> None:
        COUNTS[WRITES_BEGUN] += 1
        write(*arguments)
        COUNTS[WRITES_ENDED] += 1

    def counted_batches(self: Any, *arguments: Any) -> Iterator[Any]:
        for batch in batches(self, *arguments):
            COUNTS[STEPS_BEGUN] += 1
            yield batch

    checkpoint._write, Session.batches = counted_write, counted_batches


def fork(job: Callable[[], Any], output_file: Path) -> int:
    """Start a child; an error that ends it is written to a file, and its exit code is 1."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with output_file.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        job()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait_for(child: int, seconds: float) -> int | None:
    """Wait for a child; return its exit code (negative for a signal), or None after a timeout."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    return None


def finish(child: int) -> int:
    """Wait for a child that is not to be killed; raise if it hangs."""
    code = wait_for(child, TIMEOUT)
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise TimeoutError(f"a run took more than {TIMEOUT:g} s")
    return code


def warm_up(folder: Path) -> None:
    """Import everything that training needs."""
    torch.set_num_threads(1)
    stored_predictions.Resampling = lambda: Resampling(resamples=20)  # the default number takes longer than the run
    names = folder / "modules.json"

    def job() -> None:
        train_and_record(recipe_of(0), folder / "warm-up" / "run")
        names.write_text(json.dumps(sorted(sys.modules)))

    if finish(fork(job, folder / "output.txt")):
        raise RuntimeError((folder / "output.txt").read_text())
    for name in json.loads(names.read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    count_steps_and_checkpoints()


@dataclass
class Trial:
    """A run to disturb in `folder`, and the uninterrupted run of its recipe with its duration and checkpoints."""

    recipe: Recipe
    uninterrupted: Run
    seconds: float
    writes: int
    folder: Path
    number: int = 0

    def start(self, run: Path, output_name: str = "output.txt") -> int:
        return fork(partial(train_and_record, self.recipe, run), self.folder / output_name)

    def last_line(self, output_name: str = "output.txt") -> str:
        """Return the last line printed by a child."""
        lines = (self.folder / output_name).read_text(encoding="utf-8").strip().splitlines()
        return lines[-1] if lines else ""

    def signal_when(self, child: int, reached: Callable[[], bool], number: int) -> int:
        """Signal a child in a certain moment; return its exit code, which is 0 if it finished before."""
        while not reached():
            if (code := wait_for(child, 0.001)) is not None:
                assert code == 0, self.last_line()
                return 0
        os.kill(child, number)
        return finish(child)

    def resume_and_compare(self, run: Path) -> None:
        """Resume a run, record it a second time, and compare it with the uninterrupted run."""
        for _ in range(2):
            code = finish(self.start(run))
            assert code == 0, self.last_line()
        assert Run(run).finished
        assert prediction_bytes(Run(run)) == prediction_bytes(self.uninterrupted)
        assert log_without_times(Run(run)) == log_without_times(self.uninterrupted)
        assert_same(checkpoint.load(Run(run).checkpoint), checkpoint.load(self.uninterrupted.checkpoint))
        names, expected_names = ({path.name for path in item.iterdir()} for item in (run, self.uninterrupted.folder))
        assert names == expected_names
        assert list(run.parent.rglob(".*.part")) == []
        ledger = run.parent / "ledger"
        lines = [line for path in ledger.glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
        assert [json.loads(line)["id"] for line in lines].count(self.recipe.name) == 1, lines
        assert list(stored_predictions.problems(Ledger(ledger))) == []


def kill(trial: Trial, rng: random.Random, number: int = signal.SIGKILL) -> str:
    """Send a signal at a random time, every fifth time while a checkpoint is written."""
    run, code = trial.folder / "run", 0
    while code == 0:
        for folder in (run, trial.folder / "ledger"):
            shutil.rmtree(folder, ignore_errors=True)
        COUNTS[:] = 0
        child = trial.start(run)
        if trial.number % 5 == 0:
            write, delay = rng.randint(1, trial.writes), rng.uniform(0, 0.005)
            code = trial.signal_when(child, partial(_has_begun, write, delay), number)
        else:
            end = time.monotonic() + rng.uniform(0, trial.seconds)
            code = trial.signal_when(child, lambda end=end: time.monotonic() > end, number)
    moment = WRITING if COUNTS[WRITES_BEGUN] > COUNTS[WRITES_ENDED] else "otherwise"
    trial.resume_and_compare(run)
    steps = COUNTS[STEPS_BEGUN]
    assert STEPS <= steps < 1.5 * STEPS
    assert number == signal.SIGKILL or steps == STEPS  # a terminated run does no step twice
    return moment


def _has_begun(write: int, delay: float) -> bool:
    begun = bool(COUNTS[WRITES_BEGUN] >= write)
    time.sleep(delay * begun)
    return begun


@contextlib.contextmanager
def mounted(folder: Path, size: int = ENOUGH_BYTES) -> Iterator[Path]:
    """Mount a small file system in memory."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def mount(*arguments: str) -> None:
    process = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise PermissionError(f"{process.stderr.strip()}; mounting takes root, or unshare -rm")


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError), mounted(Path(folder) / "tried"):
        return True
    return False


def full_disk(trial: Trial, rng: random.Random) -> str:
    """Run on a disk with a random fraction of the required space, then resume with enough space."""
    required = sum(file.stat().st_size for file in trial.uninterrupted.folder.parent.rglob("*") if file.is_file())
    size = rng.randrange(4096, required + 2 * trial.uninterrupted.checkpoint.stat().st_size)
    with mounted(trial.folder / "disk", size) as disk:
        code = finish(trial.start(disk / "run"))
        message = trial.last_line() if code else "it was enough"
        if code:
            assert NO_ROOM in message, message
            assert str(disk) in message, message  # names the file that did not fit
        assert list(disk.rglob(".*.part")) == []
        mount("-o", f"remount,size={ENOUGH_BYTES}", str(disk))
        trial.resume_and_compare(disk / "run")
    return message


def read_only_disk(trial: Trial, rng: random.Random) -> str:
    """Make the file system read-only when the run is resumed, and when it is finished."""
    with mounted(trial.folder / "disk") as disk:
        COUNTS[:] = 0
        step = rng.randint(7, STEPS - 6)
        assert trial.signal_when(trial.start(disk / "run"), lambda: COUNTS[STEPS_BEGUN] >= step, signal.SIGTERM)
        contents = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
        mount("-o", "remount,ro", str(disk))
        code, message = finish(trial.start(disk / "run")), trial.last_line()
        assert code == 1
        assert WRITE_PROTECTED in message, message
        assert contents == {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
        mount("-o", "remount,rw", str(disk))
        trial.resume_and_compare(disk / "run")
        mount("-o", "remount,ro", str(disk))
        assert finish(trial.start(disk / "run")) == 0, trial.last_line()
        mount("-o", "remount,rw", str(disk))
    return message


def two_processes(trial: Trial, rng: random.Random) -> str:
    """Start the same run in two processes at nearly the same time; one of them must be rejected."""
    COUNTS[:] = 0
    children = []
    for number in range(2):
        children.append(trial.start(trial.folder / "run", f"output {number}.txt"))
        time.sleep(rng.uniform(0, 0.3))
    codes = [finish(child) for child in children]
    assert sorted(codes) == [0, 1]
    message = trial.last_line(f"output {codes.index(1)}.txt")
    assert "another process is using" in message, message
    assert COUNTS[STEPS_BEGUN] == STEPS
    trial.resume_and_compare(trial.folder / "run")
    return message


FAULTS: dict[str, Callable[[Trial, random.Random], str]] = {
    "SIGKILL": kill,
    "SIGTERM": partial(kill, number=signal.SIGTERM),
    "two processes": two_processes,
    "full disk": full_disk,
    "read-only disk": read_only_disk,
}
MOUNTED = ("full disk", "read-only disk")


def uninterrupted_trial(recipe: Recipe, folder: Path) -> Trial:
    """Train a recipe without faults."""
    folder.mkdir()
    trial = Trial(recipe, Run(folder / "run"), 0.0, 0, folder)
    start = time.monotonic()
    COUNTS[:] = 0
    assert finish(trial.start(trial.uninterrupted.folder)) == 0, trial.last_line()
    assert COUNTS[STEPS_BEGUN] == STEPS
    trial.seconds, trial.writes = time.monotonic() - start, int(COUNTS[WRITES_BEGUN])
    return trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="of each fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=list(FAULTS))
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        warm_up(folder)
        trials = [
            uninterrupted_trial(recipe_of(number), folder / f"uninterrupted {number}")
            for number in range(min(arguments.runs, len(LOSSES)))
        ]
        for name in arguments.only or FAULTS:
            if name in MOUNTED and not can_mount():
                print(f"{name}: not tried, because mounting takes root or unshare -rm")
                continue
            messages = []
            for number in range(arguments.runs):
                trial = trials[number % len(trials)]
                trial.number, trial.folder = number, folder / f"{name} {number}"
                trial.folder.mkdir()
                messages.append(FAULTS[name](trial, rng))
                print(f"{name} {number}: {messages[-1]}", flush=True)
                shutil.rmtree(trial.folder)
            if name == "SIGKILL":
                assert messages.count(WRITING) >= arguments.runs // 10
            if name == "full disk":
                assert 2 * sum(NO_ROOM in message for message in messages) >= arguments.runs


if __name__ == "__main__":
    main()
