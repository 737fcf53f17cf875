"""Campaign on full and read-only disks, damaged files, concurrent processes and clock jumps.

    python tests/faults/disk.py --runs 100 --seed 1 --json build/disk.json
    python tests/faults/disk.py --runs 100 --seed 1 --only "full disk"

Every trial is compared with an uninterrupted run of the same recipe, alternating between the four losses of `kill.py`.
Full and read-only disks are separate file systems in memory, because permissions do not stop root from writing.
Mounting them requires root, or root in a namespace: `unshare -rm python tests/faults/disk.py`.
At least half of the full disks must actually have been full.
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kill import LOSSES, STEPS, recipe_of
from zygote import (
    PROGRESS,
    count_lines,
    differences,
    finish,
    fork,
    table,
    temporary_files,
    train_and_record,
    wait_for,
    warm,
)

from fedlas.experiments import stored_predictions
from fedlas.training import Recipe, Run

ENOUGH_BYTES = 64 * 2**20
NO_ROOM = "No space left on device"
YEARS = 10 * 365.25 * 86400  # in seconds


@dataclass
class Trial:
    """The result of one trial.

    Args:
        description: the fault that was injected.
        message: the last line that the failed process printed.
        failures: what is not as it should be.
    """

    description: str
    message: str = ""
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Session:
    """A recipe, its uninterrupted run, and a working folder."""

    recipe: Recipe
    uninterrupted: Run
    folder: Path

    def start(self, run: Path, output_name: str = "words.txt", before: Callable[[], None] | None = None) -> int:
        """Start or resume a run in a child process."""

        def job() -> None:
            if before is not None:
                before()
            train_and_record(self.recipe, run, run.parent / "ledger")

        return fork(job, self.folder / output_name)

    def last_line(self, output_name: str = "words.txt") -> str:
        """Return the last line printed by a child process."""
        result = (self.folder / output_name).read_text(encoding="utf-8").strip().splitlines()
        return result[-1] if result else ""

    def stop_midway(self, run: Path, rng: random.Random) -> None:
        """Start a run and stop it at a random step after its second checkpoint."""
        PROGRESS.clear()
        child, last_step = self.start(run), rng.randint(7, STEPS - 6)
        while PROGRESS.steps < last_step:
            if wait_for(child, 0.001) is not None:
                raise RuntimeError(self.last_line())
        os.kill(child, signal.SIGTERM)
        finish(child)

    def resume_and_compare(self, trial: Trial, run: Path, *allowed: str) -> Trial:
        """Resume a run to its end and compare it with the uninterrupted run."""
        code = finish(self.start(run))
        if code:
            trial.failures.append(f"resumed, it ended with {code}: {self.last_line()}")
            return trial
        trial.failures += differences(Run(run), self.uninterrupted)
        trial.failures += [f"{path} was left" for path in temporary_files(run.parent)]
        count = count_lines(run.parent / "ledger", self.recipe.name)
        trial.failures += [f"the ledger has it {count} times"] * (count != 1)
        expected_names = {path.name for path in self.uninterrupted.folder.iterdir()} | set(allowed)
        trial.failures += [f"{path} was left" for path in run.iterdir() if path.name not in expected_names]
        return trial


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
    """Call mount; on failure, state the required rights."""
    process = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise PermissionError(f"{process.stderr.strip()}; mounting takes root, or unshare -rm")


def can_mount() -> bool:
    """Return whether file systems can be mounted."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError), mounted(Path(folder) / "tried"):
        return True
    return False


def full_disk(session: Session, rng: random.Random) -> Trial:
    """Run on a disk with a random fraction of the required space, then resume with enough space."""
    required = sum(file.stat().st_size for file in session.uninterrupted.folder.parent.rglob("*") if file.is_file())
    size = rng.randrange(4096, required + 2 * session.uninterrupted.checkpoint.stat().st_size)
    with mounted(session.folder / "disk", size) as disk:
        code = finish(session.start(disk / "run"))
        trial = Trial(f"{size:,} bytes", session.last_line() if code else "it was enough")
        if code and not (NO_ROOM in trial.message and str(disk) in trial.message):
            trial.failures.append(f"it ended with {code} and does not name the file that did not fit: {trial.message}")
        trial.failures += [f"{path} was left" for path in disk.rglob(".*.part")]
        mount("-o", f"remount,size={ENOUGH_BYTES}", str(disk))
        return session.resume_and_compare(trial, disk / "run")


def read_only(session: Session, rng: random.Random) -> Trial:
    """Make the file system read-only when the run is resumed, and when it is finished."""
    with mounted(session.folder / "disk") as disk:
        session.stop_midway(disk / "run", rng)
        contents_before = contents(disk)
        mount("-o", "remount,ro", str(disk))
        code = finish(session.start(disk / "run"))
        trial = Trial("resumed, and asked for again when finished", session.last_line())
        if code != 1 or "Read-only file system" not in trial.message:
            trial.failures.append(f"it ended with {code}: {trial.message}")
        if contents(disk) != contents_before:
            trial.failures.append("files were changed")
        mount("-o", "remount,rw", str(disk))
        session.resume_and_compare(trial, disk / "run")
        mount("-o", "remount,ro", str(disk))
        if finish(session.start(disk / "run")):
            trial.failures.append(f"the finished run was not found: {session.last_line()}")
        mount("-o", "remount,rw", str(disk))
        return trial


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut_short(session: Session, rng: random.Random) -> Trial:
    """Truncate the newest checkpoint."""
    run = session.folder / "run"
    session.stop_midway(run, rng)
    file = Run(run).checkpoint
    content = file.read_bytes()
    length = rng.randrange(len(content))
    replace_content(file, content[:length])
    return check_damage_reported(session, Trial(f"cut to {length:,} of {len(content):,} bytes"), run)


def flipped_bits(session: Session, rng: random.Random) -> Trial:
    """Flip some bits of the newest checkpoint."""
    run = session.folder / "run"
    session.stop_midway(run, rng)
    file = Run(run).checkpoint
    content = bytearray(file.read_bytes())
    positions = [rng.randrange(len(content)) for _ in range(rng.choice((1, 1, 8)))]
    for position in positions:
        content[position] ^= 1 << rng.randrange(8)
    replace_content(file, bytes(content))
    return check_damage_reported(session, Trial(f"bits in bytes {positions}"), run)


def replace_content(file: Path, content: bytes) -> None:
    """Replace the content of a file without changing its hard links."""
    file.unlink()
    file.write_bytes(content)


def check_damage_reported(session: Session, trial: Trial, run: Path) -> Trial:
    """Resume a run with a damaged checkpoint and check that the damage is reported."""
    session.resume_and_compare(trial, run, "checkpoint-damaged.pt")
    output = (session.folder / "words.txt").read_text(encoding="utf-8")
    trial.message = next((line for line in output.splitlines() if "is damaged" in line), "")
    if "resumes from the previous checkpoint" not in trial.message:
        trial.failures.append("the damage was not reported")
    return trial


def two_processes(session: Session, rng: random.Random) -> Trial:
    """Start the same run in two processes at nearly the same time; one of them must be rejected."""
    run, trial = session.folder / "run", Trial("two at once")
    PROGRESS.clear()
    children = []
    for number in range(2):
        children.append(session.start(run, f"words {number}.txt"))
        time.sleep(rng.uniform(0, 0.3))
    codes = [finish(child) for child in children]
    trial.message = session.last_line(f"words {codes.index(1)}.txt") if 1 in codes else ""
    if sorted(codes) != [0, 1] or "another process is using" not in trial.message:
        trial.failures.append(f"they ended with {codes}: {trial.message}")
    if PROGRESS.steps != STEPS:
        trial.failures.append(f"both together took {PROGRESS.steps} steps")
    return session.resume_and_compare(trial, run)


def jumping_clock(session: Session, rng: random.Random) -> Trial:
    """Let the clock jump by years at every call, and give files modification times in the future or past."""
    run, trial = session.folder / "run", Trial("jumps of up to ten years")
    seed = rng.randrange(2**32)
    PROGRESS.clear()
    child, kill_step = session.start(run, before=partial(let_clock_jump, seed)), rng.randint(1, STEPS - 1)
    while PROGRESS.steps < kill_step:
        if wait_for(child, 0.001) is not None:
            trial.failures.append(f"it failed: {session.last_line()}")
            return trial
    os.kill(child, signal.SIGKILL)
    finish(child)
    PROGRESS.reset_phase()
    for path in run.rglob("*"):
        os.utime(path, (time.time() + rng.uniform(-YEARS, YEARS),) * 2)
    if finish(session.start(run, before=partial(let_clock_jump, seed + 1))):
        trial.failures.append(f"resumed, it failed: {session.last_line()}")
    if not STEPS <= PROGRESS.steps < 1.5 * STEPS:
        trial.failures.append(f"it took {PROGRESS.steps} steps")
    return session.resume_and_compare(trial, run)


def let_clock_jump(seed: int) -> None:
    """Let the wall clock of this process jump, but not the monotonic clock."""
    rng, real_time, real_time_ns = random.Random(seed), time.time, time.time_ns

    class JumpingDatetime(datetime.datetime):
        """Return a random time within twenty years."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(time.time(), tz)

    time.time = lambda: real_time() + rng.uniform(-YEARS, YEARS)
    time.time_ns = lambda: real_time_ns() + int(rng.uniform(-YEARS, YEARS) * 1e9)
    stored_predictions.datetime = JumpingDatetime


FAULTS: dict[str, Callable[[Session, random.Random], Trial]] = {
    "full disk": full_disk,
    "read-only disk": read_only,
    "checkpoint cut short": cut_short,
    "bits flipped in a checkpoint": flipped_bits,
    "two processes on one folder": two_processes,
    "clock that jumps": jumping_clock,
}


MOUNTED = ("full disk", "read-only disk")  # these need a separate file system


def campaign(
    runs: int, seed: int, folder: Path, only: list[str] | None = None, verbose: bool = False
) -> dict[str, list[Trial]]:
    """Inject every fault `runs` times."""
    rng = random.Random(seed)
    warm(recipe_of(0), folder)
    sessions = [
        uninterrupted_session(recipe_of(number), folder / f"uninterrupted {number}")
        for number in range(min(runs, len(LOSSES)))
    ]
    result: dict[str, list[Trial]] = {}
    for name in only or FAULTS:
        for number in range(runs):
            path = folder / f"{name} {number}"
            path.mkdir()
            session = replace(sessions[number % len(sessions)], folder=path)
            trial = FAULTS[name](session, rng)
            result.setdefault(name, []).append(trial)
            if verbose:
                message = (name, session.recipe.loss, trial.description, trial.message, *trial.failures)
                print(*message, sep=" | ", file=sys.stderr, flush=True)
            shutil.rmtree(path)
    return result


def uninterrupted_session(recipe: Recipe, folder: Path) -> Session:
    """Train a recipe without faults."""
    folder.mkdir()
    session = Session(recipe, Run(folder / "run"), folder)
    if finish(session.start(session.uninterrupted.folder)):
        raise RuntimeError(session.last_line())
    return session


def rows(results: dict[str, list[Trial]]) -> list[dict[str, Any]]:
    """Count successful trials by fault."""
    return [
        {
            "fault": name,
            "runs": len(trials),
            "stopped, or warned": sum(trial.message not in ("", "it was enough") for trial in trials),
            "finished, equal, once in the ledger": sum(not trial.failures for trial in trials),
        }
        for name, trials in results.items()
    ]


def all_failures(results: dict[str, list[Trial]], runs: int) -> list[str]:
    """Return all problems, including faults with too few trials and full disks that were not full."""
    failures = [
        f"{name}, {trial.description}: {text}"
        for name, trials in results.items()
        for trial in trials
        for text in trial.failures
    ]
    for name, trials in results.items():
        failures += [f"{name} was tried {len(trials)} times, and should have been {runs} times"] * (len(trials) != runs)
    full_disk_trials = results.get("full disk", [])
    full = sum(NO_ROOM in trial.message for trial in full_disk_trials)
    return failures + [f"only {full} of {len(full_disk_trials)} disks were full"] * (2 * full < len(full_disk_trials))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="of each fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=list(FAULTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = campaign(arguments.runs, arguments.seed, Path(folder), arguments.only, verbose=True)
    print(f"seed {arguments.seed}, {time.monotonic() - start:.0f} s\n\n{table(rows(result))}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        records = {name: [asdict(trial) for trial in trials] for name, trials in result.items()}
        arguments.json.write_text(json.dumps(records, indent=1) + "\n")
    failures = all_failures(result, arguments.runs)
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
