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
from zygote import SHOWN, differences, ended, finish, fork, lines, parts, table, train_and_record, warm

from fedlas.experiments import stored_predictions
from fedlas.training import Recipe, Run

ENOUGH = 64 * 2**20
NO_ROOM = "No space left on device"
YEARS = 10 * 365.25 * 86400  # in seconds


@dataclass
class Trial:
    """The result of one trial.

    Args:
        about: what was done to it.
        said: the last line of what the process said when it could not go on.
        wrong: what is not as it should be.
    """

    about: str
    said: str = ""
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Session:
    """A recipe, its uninterrupted run, and a working folder."""

    recipe: Recipe
    unbroken: Run
    folder: Path

    def start(self, run: Path, words: str = "words.txt", before: Callable[[], None] | None = None) -> int:
        """Start or resume a run in a child process."""

        def job() -> None:
            if before is not None:
                before()
            train_and_record(self.recipe, run, run.parent / "ledger")

        return fork(job, self.folder / words)

    def said(self, words: str = "words.txt") -> str:
        """Return the last line printed by a child process."""
        result = (self.folder / words).read_text(encoding="utf-8").strip().splitlines()
        return result[-1] if result else ""

    def stopped(self, run: Path, dice: random.Random) -> None:
        """Start a run and stop it at a random step after its second checkpoint."""
        SHOWN.clear()
        child, until = self.start(run), dice.randint(7, STEPS - 6)
        while SHOWN.steps < until:
            if ended(child, 0.001) is not None:
                raise RuntimeError(self.said())
        os.kill(child, signal.SIGTERM)
        finish(child)

    def finished(self, trial: Trial, run: Path, *allowed: str) -> Trial:
        """Resume a run to its end and compare it with the uninterrupted run."""
        code = finish(self.start(run))
        if code:
            trial.wrong.append(f"resumed, it ended with {code}: {self.said()}")
            return trial
        trial.wrong += differences(Run(run), self.unbroken)
        trial.wrong += [f"{path} was left" for path in parts(run.parent)]
        count = lines(run.parent / "ledger", self.recipe.name)
        trial.wrong += [f"the ledger has it {count} times"] * (count != 1)
        usual = {path.name for path in self.unbroken.folder.iterdir()} | set(allowed)
        trial.wrong += [f"{path} was left" for path in run.iterdir() if path.name not in usual]
        return trial


@contextlib.contextmanager
def mounted(folder: Path, size: int = ENOUGH) -> Iterator[Path]:
    """Mount a small file system in memory."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def mount(*words: str) -> None:
    """Call mount; on failure, state the required rights."""
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"{done.stderr.strip()}; mounting takes root, or unshare -rm")


def can_mount() -> bool:
    """Return whether file systems can be mounted."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError), mounted(Path(folder) / "tried"):
        return True
    return False


def full_disk(session: Session, dice: random.Random) -> Trial:
    """Run on a disk with a random fraction of the required space, then resume with enough space."""
    needed = sum(file.stat().st_size for file in session.unbroken.folder.parent.rglob("*") if file.is_file())
    size = dice.randrange(4096, needed + 2 * session.unbroken.checkpoint.stat().st_size)
    with mounted(session.folder / "disk", size) as disk:
        code = finish(session.start(disk / "run"))
        trial = Trial(f"{size:,} bytes", session.said() if code else "it was enough")
        if code and not (NO_ROOM in trial.said and str(disk) in trial.said):
            trial.wrong.append(f"it ended with {code} and does not name the file that found no room: {trial.said}")
        trial.wrong += [f"{path} was left" for path in disk.rglob(".*.part")]
        mount("-o", f"remount,size={ENOUGH}", str(disk))
        return session.finished(trial, disk / "run")


def read_only(session: Session, dice: random.Random) -> Trial:
    """Make the file system read-only when the run is resumed, and when it is finished."""
    with mounted(session.folder / "disk") as disk:
        session.stopped(disk / "run", dice)
        held = contents(disk)
        mount("-o", "remount,ro", str(disk))
        code = finish(session.start(disk / "run"))
        trial = Trial("resumed, and asked for again when finished", session.said())
        if code != 1 or "Read-only file system" not in trial.said:
            trial.wrong.append(f"it ended with {code}: {trial.said}")
        if contents(disk) != held:
            trial.wrong.append("files were changed")
        mount("-o", "remount,rw", str(disk))
        session.finished(trial, disk / "run")
        mount("-o", "remount,ro", str(disk))
        if finish(session.start(disk / "run")):
            trial.wrong.append(f"finished, it was not found: {session.said()}")
        mount("-o", "remount,rw", str(disk))
        return trial


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut_short(session: Session, dice: random.Random) -> Trial:
    """Truncate the newest checkpoint."""
    run = session.folder / "run"
    session.stopped(run, dice)
    file = Run(run).checkpoint
    content = file.read_bytes()
    length = dice.randrange(len(content))
    replaced(file, content[:length])
    return said_so(session, Trial(f"cut to {length:,} of {len(content):,} bytes"), run)


def flipped_bits(session: Session, dice: random.Random) -> Trial:
    """Flip some bits of the newest checkpoint."""
    run = session.folder / "run"
    session.stopped(run, dice)
    file = Run(run).checkpoint
    content = bytearray(file.read_bytes())
    places = [dice.randrange(len(content)) for _ in range(dice.choice((1, 1, 8)))]
    for position in places:
        content[position] ^= 1 << dice.randrange(8)
    replaced(file, bytes(content))
    return said_so(session, Trial(f"bits in bytes {places}"), run)


def replaced(file: Path, content: bytes) -> None:
    """Replace the content of a file without changing its hard links."""
    file.unlink()
    file.write_bytes(content)


def said_so(session: Session, trial: Trial, run: Path) -> Trial:
    """Resume a run with a damaged checkpoint and check that the damage is reported."""
    session.finished(trial, run, "checkpoint-damaged.pt")
    words = (session.folder / "words.txt").read_text(encoding="utf-8")
    trial.said = next((line for line in words.splitlines() if "is damaged" in line), "")
    if "resumes from the previous checkpoint" not in trial.said:
        trial.wrong.append("nobody said that it was damaged")
    return trial


def two_processes(session: Session, dice: random.Random) -> Trial:
    """Start the same run in two processes at nearly the same time; one of them must be rejected."""
    run, trial = session.folder / "run", Trial("two at once")
    SHOWN.clear()
    children = []
    for number in range(2):
        children.append(session.start(run, f"words {number}.txt"))
        time.sleep(dice.uniform(0, 0.3))
    codes = [finish(child) for child in children]
    trial.said = session.said(f"words {codes.index(1)}.txt") if 1 in codes else ""
    if sorted(codes) != [0, 1] or "another process is using" not in trial.said:
        trial.wrong.append(f"they ended with {codes}: {trial.said}")
    if SHOWN.steps != STEPS:
        trial.wrong.append(f"both together took {SHOWN.steps} steps")
    return session.finished(trial, run)


def jumping_clock(session: Session, dice: random.Random) -> Trial:
    """Let the clock jump by years at every call, and give files modification times in the future or past."""
    run, trial = session.folder / "run", Trial("jumps of up to ten years")
    seed = dice.randrange(2**32)
    SHOWN.clear()
    child, until = session.start(run, before=partial(jumping, seed)), dice.randint(1, STEPS - 1)
    while SHOWN.steps < until:
        if ended(child, 0.001) is not None:
            trial.wrong.append(f"it failed: {session.said()}")
            return trial
    os.kill(child, signal.SIGKILL)
    finish(child)
    SHOWN.begin_again()
    for path in run.rglob("*"):
        os.utime(path, (time.time() + dice.uniform(-YEARS, YEARS),) * 2)
    if finish(session.start(run, before=partial(jumping, seed + 1))):
        trial.wrong.append(f"resumed, it failed: {session.said()}")
    if not STEPS <= SHOWN.steps < 1.5 * STEPS:
        trial.wrong.append(f"it took {SHOWN.steps} steps")
    return session.finished(trial, run)


def jumping(seed: int) -> None:
    """Let the wall clock of this process jump, but not the monotonic clock."""
    dice, now, now_ns = random.Random(seed), time.time, time.time_ns

    class Jumping(datetime.datetime):
        """Return a random time within twenty years."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(time.time(), tz)

    time.time = lambda: now() + dice.uniform(-YEARS, YEARS)
    time.time_ns = lambda: now_ns() + int(dice.uniform(-YEARS, YEARS) * 1e9)
    stored_predictions.datetime = Jumping


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
    runs: int, seed: int, folder: Path, only: list[str] | None = None, shown: bool = False
) -> dict[str, list[Trial]]:
    """Inject every fault `runs` times."""
    dice = random.Random(seed)
    warm(recipe_of(0), folder)
    sessions = [unbroken(recipe_of(number), folder / f"unbroken {number}") for number in range(min(runs, len(LOSSES)))]
    result: dict[str, list[Trial]] = {}
    for name in only or FAULTS:
        for number in range(runs):
            path = folder / f"{name} {number}"
            path.mkdir()
            session = replace(sessions[number % len(sessions)], folder=path)
            trial = FAULTS[name](session, dice)
            result.setdefault(name, []).append(trial)
            if shown:
                message = (name, session.recipe.loss, trial.about, trial.said, *trial.wrong)
                print(*message, sep=" | ", file=sys.stderr, flush=True)
            shutil.rmtree(path)
    return result


def unbroken(recipe: Recipe, folder: Path) -> Session:
    """Train a recipe without faults."""
    folder.mkdir()
    session = Session(recipe, Run(folder / "run"), folder)
    if finish(session.start(session.unbroken.folder)):
        raise RuntimeError(session.said())
    return session


def rows(found: dict[str, list[Trial]]) -> list[dict[str, Any]]:
    """Count successful trials by fault."""
    return [
        {
            "fault": name,
            "runs": len(trials),
            "stopped, or warned": sum(trial.said not in ("", "it was enough") for trial in trials),
            "finished, equal, once in the ledger": sum(not trial.wrong for trial in trials),
        }
        for name, trials in found.items()
    ]


def wrongs(found: dict[str, list[Trial]], asked: int) -> list[str]:
    """Return all problems, including faults with too few trials and full disks that were not full."""
    wrong = [f"{name}, {trial.about}: {text}" for name, held in found.items() for trial in held for text in trial.wrong]
    for name, held in found.items():
        wrong += [f"{name} was tried {len(held)} times, and should have been {asked} times"] * (len(held) != asked)
    disks = found.get("full disk", [])
    full = sum(NO_ROOM in trial.said for trial in disks)
    return wrong + [f"only {full} of {len(disks)} disks were full"] * (2 * full < len(disks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="of each fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=list(FAULTS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = campaign(given.runs, given.seed, Path(folder), given.only, shown=True)
    print(f"seed {given.seed}, {time.monotonic() - began:.0f} s\n\n{table(rows(result))}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        message = {name: [asdict(trial) for trial in trials] for name, trials in result.items()}
        given.json.write_text(json.dumps(message, indent=1) + "\n")
    wrong = wrongs(result, given.runs)
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
