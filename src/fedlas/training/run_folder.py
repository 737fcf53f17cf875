"""A run folder: all that a run leaves behind, and the lock that keeps a second process out of it.

    RUN/recipe.json             what was asked for
    RUN/environment.json        versions and device
    RUN/log.jsonl               one line for each epoch
    RUN/checkpoint.pt           where the run stands, and the weights of its best epoch
    RUN/checkpoint-before.pt    where it stood before that, until it is finished
    RUN/predictions/            {best,last}-{val,test,ood-NAME}.safetensors

Files are written whole or not at all. A run is finished when its log knows all epochs, and all predictions are there;
they come last. The checkpoint may be thrown away then.
"""

import fcntl
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedlas.errors import UserError
from fedlas.predictions import Predictions
from fedlas.storage import check_file, clear_parts, own_file, write_whole
from fedlas.training.recipe import Recipe, differences

STATES = ("best", "last")
# In the log of each epoch, what differs between equal runs.
MACHINE = "machine"
# What to do, for those who gave a command and for those who write Python.
RESUME = "--resume (in Python resume=True)"
ELSEWHERE = "choose another --out (in Python out=)"
WRITE_TO = "say where to write: --out FILE (in Python out=)"


class RunError(UserError):
    """A run cannot go on; the message says why, in one line."""


@dataclass(frozen=True)
class Run:
    """A run folder, finished or not.

    Args:
        folder: where it lies.
    """

    folder: Path

    def own(self, name: str) -> Path:
        """Return the path of one of the run's files; one that is a link, a pipe or a device is refused."""
        try:
            path = own_file(self.folder, name, "a run")
            check_file(path)
        except ValueError as error:
            raise RunError(str(error)) from error
        return path

    @property
    def recipe(self) -> Recipe:
        """What was asked for."""
        if not self.recipe_file.exists():
            raise RunError(f"{self.folder} is no run folder: it has no recipe.json")
        with _readable(self.recipe_file):
            return Recipe.from_dict(json.loads(self.recipe_file.read_text(encoding="utf-8")))

    @property
    def recipe_file(self) -> Path:
        """Where the recipe lies."""
        return self.own("recipe.json")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device and commit of the process that worked here last, and checksums of the data.

        Where another environment began the run, it is listed under "earlier".
        """
        if not self.environment_file.exists():
            return {}
        with _readable(self.environment_file):
            return dict(json.loads(self.environment_file.read_text(encoding="utf-8")))

    @property
    def environment_file(self) -> Path:
        """Where that lies."""
        return self.own("environment.json")

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint lies."""
        return self.own("checkpoint.pt")

    @property
    def checkpoint_before(self) -> Path:
        """Where the checkpoint lies that is taken if the newest one is damaged."""
        return self.own("checkpoint-before.pt")

    @property
    def log_file(self) -> Path:
        """Where the log lies."""
        return self.own("log.jsonl")

    @property
    def log(self) -> list[dict[str, Any]]:
        """One record for each epoch; a line that was cut off by a crash is left out."""
        if not self.log_file.exists():
            return []
        records = []
        with _readable(self.log_file):
            for number, line in enumerate(self.log_file.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    break
                if not isinstance(record, dict):
                    raise UserError(f"line {number} is no record of an epoch")
                records.append(record)
        return records

    def predictions_file(self, name: str) -> Path:
        """Where predictions lie, such as "best-test"."""
        return self.own(f"predictions/{name}.safetensors")

    def predictions(self, name: str = "best-test") -> Predictions:
        """Read predictions."""
        path = self.predictions_file(name)
        if not path.exists():
            there = ", ".join(sorted(p.stem for p in path.parent.glob("*.safetensors"))) or "none"
            raise RunError(f"{path} is not there; predictions of this run: {there}")
        found = Predictions.load(path)
        if not isinstance(found, Predictions):
            raise RunError(f"{path} holds no predictions of a run: of every sample only the top class is known")
        return found

    @property
    def finished(self) -> bool:
        """Whether everything that the recipe asks for is there."""
        return self.finished_for(self.recipe)

    def finished_for(self, recipe: Recipe) -> bool:
        """Return whether everything is there that a recipe asks for, which may name other splits and foreign data."""
        if sum("diverged" not in record for record in self.log) < recipe.epochs:
            return False
        return all(path.exists() for path in self._asked(recipe))

    def _asked(self, recipe: Recipe) -> list[Path]:
        """Return where all predictions lie that a recipe asks for."""
        splits = [*recipe.splits, *(f"ood-{name}" for name in recipe.ood)]
        return [self.predictions_file(f"{state}-{split}") for state in STATES for split in splits]

    def holds(self, recipe: Recipe) -> bool:
        """Return whether a recipe was carried out here, to its end."""
        known = self.recipe_file.exists() and self.started and not differences(self.recipe, recipe)
        return known and self.finished_for(recipe)

    @property
    def started(self) -> bool:
        """Whether anything was trained here; a recipe that was not, or diverged at once, can be replaced by another."""
        predictions = self.predictions_file("any").parent
        trained = self.checkpoint.exists() or any("diverged" not in record for record in self.log)
        return trained or (predictions.exists() and any(predictions.iterdir()))

    def prepare(self, recipe: Recipe, *, resume: bool, device: str, processes: int) -> str:
        """Return whether a recipe has to "start", "continue", or is "finished" in this folder, and write it down.

        Another recipe in the folder is an error, and so is a run that stands still and nobody asked to continue.
        """
        self._asked(recipe)  # an error about a link comes before all training
        if self.recipe_file.exists() and self.started:
            others = differences(self.recipe, recipe)
            if others:
                raise RunError(f"{self.folder} holds a run of another recipe ({'; '.join(others)}); {ELSEWHERE}")
            if self.finished_for(recipe):
                return "finished"
            if self.checkpoint.exists() and not resume and not self.finished:
                raise RunError(f"{self.folder} holds an unfinished run of this recipe; continue it with {RESUME}")
            if self.finished and not self.checkpoint.exists():
                raise RunError(
                    f"{self.folder} is finished and has no checkpoint, so it can predict nothing more; {ELSEWHERE}"
                )
        elif not self.recipe_file.exists() and any(one for one in self.folder.glob("*") if one.name[0] != "."):
            raise RunError(f"{self.folder} is not empty and holds no run; {ELSEWHERE}")
        elif self.recipe_file.exists():
            _ = self.recipe  # an error where it is something else of that name, which is not written over
        for folder in (self.folder, self.predictions_file("any").parent):
            clear_parts(folder)
        write_whole(self.recipe_file, (json.dumps(recipe.to_dict(), indent=1) + "\n").encode())
        self._note_environment(environment(device, processes))
        return "continue" if self.checkpoint.exists() else "start"

    def note(self, about: Mapping[str, Any]) -> None:
        """Write down where and on what a run takes place, beside what is known already."""
        write_whole(self.environment_file, (json.dumps(self.environment | dict(about), indent=1) + "\n").encode())

    def _note_environment(self, now: Mapping[str, Any]) -> None:
        """Write down who works here now, and keep those who trained the epochs before."""
        known = self.environment if self.started else {}
        before = {name: known[name] for name in now if name in known}
        if before and before != now:
            known["earlier"] = [*known.get("earlier", []), before]
        write_whole(self.environment_file, (json.dumps(known | dict(now), indent=1) + "\n").encode())

    def keep_log(self, epochs: int) -> None:
        """Keep the first epochs of the log; later ones will be trained again."""
        kept = self.log[:epochs]
        if len(kept) < epochs:
            raise RunError(
                f"{self.log_file} is damaged: it has {len(kept)} of the {epochs} epochs that {self.checkpoint} knows; "
                "remove both to begin anew"
            )
        lines = [json.dumps(record) + "\n" for record in kept]
        write_whole(self.log_file, "".join(lines).encode())

    def append_log(self, record: dict[str, Any]) -> None:
        """Add the line of an epoch."""
        with self.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def run_in(folder: str | Path, recipe: Recipe) -> Run:
    """Return the run folder of a recipe in a folder of many; one that is a link was named by nobody, and is refused."""
    place = Path(folder) / recipe.name
    if place.is_symlink():
        raise RunError(
            f"{place} is a link, and followed only where you name it yourself; put the folder itself there, or remove "
            "the link"
        )
    return Run(place)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Name a file of a run that does not hold what it should."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{file} cannot be read: {error}; put back a copy of it, or remove its folder to begin anew"
        ) from error


# Files that are locked by this process. A lock lasts as long as anybody has its file open, and a forked process, such
# as one that reads images, would keep it open after its parent's end.
_locks: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run folder; the lock goes when its process does, however it ends."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; {ELSEWHERE}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = Run(folder).own(".lock")
    descriptor, owner = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), os.getpid()
    _locks.add(descriptor)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        if os.getpid() == owner:
            _locks.discard(descriptor)
            os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunError(
            f"another process is working in {folder}; wait until it has ended, or choose another folder"
        ) from error
    except OSError as error:
        raise RunError(
            f"{folder} cannot be locked ({error.strerror}); choose a file system that knows locks"
        ) from error


def environment(device: str, processes: int) -> dict[str, Any]:
    """Describe where a run takes place."""
    found = {name: _version(name) for name in ("fedlas", "torch", "torchvision", "timm", "numpy")}
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "commit": commit(),
        "versions": {word: version for word, version in found.items() if version},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "device_name": name,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "processes": processes,
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """Return the commit of this repository that is running: `$FEDLAS_COMMIT`, or that of the checkout, or None."""
    given = os.environ.get("FEDLAS_COMMIT")
    git = shutil.which("git")
    if given or git is None:
        return given
    asked = [git, "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 (our own words)
    return answer.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
