"""Run folders: the files of a run, and the lock that excludes other processes.

    RUN/recipe.json             the recipe
    RUN/environment.json        versions and device
    RUN/log.jsonl               one line for each epoch
    RUN/checkpoint.pt           state of the run, and the weights of its best epoch
    RUN/checkpoint-before.pt    the previous checkpoint, until the run is finished
    RUN/predictions/            {best,last}-{val,test,ood-NAME}.safetensors

Files are written atomically. A run is finished when its log has all epochs and all predictions exist; predictions are
written last. The checkpoint may be deleted then.
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
from fedlas.io import read_predictions
from fedlas.io.atomic import remove_partial_files, write_atomic
from fedlas.io.untrusted import check_file, path_inside
from fedlas.predictions import Predictions
from fedlas.training.recipe import Recipe, differences

STATES = ("best", "last")
# Key of the values in a log record that differ between equal runs, such as seconds.
MACHINE = "machine"
# Advice in error messages, for the command line and for Python.
RESUME = "--resume (in Python resume=True)"
ELSEWHERE = "choose another --out (in Python out=)"
WRITE_TO = "choose an output file: --out FILE (in Python out=)"


class RunError(UserError):
    """A run cannot continue; the message gives the reason in one line."""


@dataclass(frozen=True)
class Run:
    """A run folder, finished or not.

    Args:
        folder: its path.
    """

    folder: Path

    def path_of(self, name: str) -> Path:
        """Return the path of one of the run's files; raise if it is a link, a pipe or a device."""
        try:
            path = path_inside(self.folder, name, "a run")
            check_file(path)
        except ValueError as error:
            raise RunError(str(error)) from error
        return path

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        if not self.recipe_file.exists():
            raise RunError(f"{self.folder} is not a run folder: it has no recipe.json")
        with _reporting_file(self.recipe_file):
            return Recipe.from_dict(json.loads(self.recipe_file.read_text(encoding="utf-8")))

    @property
    def recipe_file(self) -> Path:
        """Path of the recipe."""
        return self.path_of("recipe.json")

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device and commit of the last process that trained the run, and checksums of the data.

        Environments of earlier processes, if different, are listed under "earlier".
        """
        if not self.environment_file.exists():
            return {}
        with _reporting_file(self.environment_file):
            return dict(json.loads(self.environment_file.read_text(encoding="utf-8")))

    @property
    def environment_file(self) -> Path:
        """Path of the environment."""
        return self.path_of("environment.json")

    @property
    def checkpoint(self) -> Path:
        """Path of the checkpoint."""
        return self.path_of("checkpoint.pt")

    @property
    def checkpoint_before(self) -> Path:
        """Path of the previous checkpoint, the fallback if the latest one is damaged."""
        return self.path_of("checkpoint-before.pt")

    @property
    def log_file(self) -> Path:
        """Path of the log."""
        return self.path_of("log.jsonl")

    @property
    def log(self) -> list[dict[str, Any]]:
        """One record for each epoch; a line that was truncated by a crash is left out."""
        if not self.log_file.exists():
            return []
        records = []
        with _reporting_file(self.log_file):
            for number, line in enumerate(self.log_file.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    break
                if not isinstance(record, dict):
                    raise UserError(f"line {number} is not a record of an epoch")
                records.append(record)
        return records

    def predictions_file(self, name: str) -> Path:
        """Return the path of predictions such as "best-test"."""
        return self.path_of(f"predictions/{name}.safetensors")

    def predictions(self, name: str = "best-test") -> Predictions:
        """Read predictions."""
        path = self.predictions_file(name)
        if not path.exists():
            available = ", ".join(sorted(p.stem for p in path.parent.glob("*.safetensors"))) or "none"
            unfinished = "" if self.finished else "; the run is not finished: continue it with --resume"
            raise RunError(f"{path} does not exist; predictions of this run: {available}{unfinished}")
        predictions = read_predictions(path)
        if not isinstance(predictions, Predictions):
            raise RunError(f"{path} holds no predictions of a run: it has only the top class of each sample")
        return predictions

    @property
    def finished(self) -> bool:
        """Whether the log and all predictions of the recipe are complete."""
        return self.finished_for(self.recipe)

    def finished_for(self, recipe: Recipe) -> bool:
        """Return whether the run is complete for a recipe, which may name other splits and OOD data sets."""
        if sum("diverged" not in record for record in self.log) < recipe.epochs:
            return False
        return all(path.exists() for path in self._prediction_files(recipe))

    def _prediction_files(self, recipe: Recipe) -> list[Path]:
        """Return the paths of all predictions of a recipe."""
        splits = [*recipe.splits, *(f"ood-{name}" for name in recipe.ood)]
        return [self.predictions_file(f"{state}-{split}") for state in STATES for split in splits]

    def holds_finished_run(self, recipe: Recipe) -> bool:
        """Return whether this folder holds a finished run of a recipe, with the same weights to evaluate."""
        if not self.finished_for(recipe) or not self.recipe_file.exists():
            return False
        stored = self.recipe
        return stored.evaluated == recipe.evaluated and not differences(stored, recipe)

    @property
    def started(self) -> bool:
        """Whether it holds a checkpoint, an epoch record or predictions; otherwise its recipe may be replaced."""
        predictions = self.predictions_file("any").parent
        trained = self.checkpoint.exists() or any("diverged" not in record for record in self.log)
        return trained or (predictions.exists() and any(predictions.iterdir()))

    def check(self, recipe: Recipe, *, resume: bool) -> bool:
        """Return whether anything is left to do; nothing is written yet.

        Raise if the folder holds another recipe, or an unfinished run and `resume` is False.
        """
        self._prediction_files(recipe)  # raises for a symbolic link, before training
        if not self.recipe_file.exists():
            if any(path.name[0] != "." for path in self.folder.glob("*")):
                raise RunError(f"{self.folder} is not empty and holds no run; {ELSEWHERE}")
        elif self.started:
            changed = differences(self.recipe, recipe)
            if changed:
                raise RunError(f"{self.folder} holds a run of another recipe ({'; '.join(changed)}); {ELSEWHERE}")
            if self.finished_for(recipe):
                return False
            if self.checkpoint.exists() and not resume and not self.finished:
                raise RunError(f"{self.folder} holds an unfinished run of this recipe; continue it with {RESUME}")
            if self.finished and not self.checkpoint.exists():
                raise RunError(f"{self.folder} is finished and has no checkpoint for further predictions; {ELSEWHERE}")
        else:
            _ = self.recipe  # raises if the file is not a recipe, so that it is not overwritten
        return True

    def begin(self, recipe: Recipe, device: torch.device, processes: int) -> None:
        """Write the recipe and the environment, when all else is ready: a finished run stays finished until then."""
        for folder in (self.folder, self.predictions_file("any").parent):
            remove_partial_files(folder)
        _write_json(self.recipe_file, recipe.to_dict())
        self._record_environment(environment(device, processes))

    def update_evaluated(self, recipe: Recipe) -> None:
        """Store which weights of a finished run are evaluated; predictions of both exist."""
        stored = self.recipe
        if stored.evaluated != recipe.evaluated:
            _write_json(self.recipe_file, stored.replace(evaluated=recipe.evaluated).to_dict())

    def update_environment(self, details: Mapping[str, Any]) -> None:
        """Add entries to the environment file."""
        _write_json(self.environment_file, self.environment | dict(details))

    def _record_environment(self, current: Mapping[str, Any]) -> None:
        """Write the current environment, and keep that of earlier epochs under "earlier"."""
        recorded = self.environment if self.started else {}
        previous = {name: recorded[name] for name in current if name in recorded}
        if previous and previous != current:
            recorded["earlier"] = [*recorded.get("earlier", []), previous]
        _write_json(self.environment_file, recorded | dict(current))

    def truncate_log(self, epochs: int) -> None:
        """Keep the records of the first epochs; later epochs will be trained again."""
        records = self.log[:epochs]
        if len(records) < epochs:
            raise RunError(
                f"{self.log_file} is damaged: it has {len(records)} of the {epochs} epochs of {self.checkpoint}; "
                "remove both to start again"
            )
        lines = [json.dumps(record) + "\n" for record in records]
        write_atomic(self.log_file, "".join(lines).encode())

    def append_log(self, record: dict[str, Any]) -> None:
        """Append the record of an epoch."""
        with self.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def run_in(folder: str | Path, recipe: Recipe) -> Run:
    """Return the run of a recipe in a folder of runs; raise if its folder is a symbolic link."""
    path = Path(folder) / recipe.name
    if path.is_symlink():
        raise RunError(
            f"{path} is a symbolic link, which is followed only if you pass its path; replace it by the folder "
            "itself, or remove the link"
        )
    return Run(path)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    write_atomic(file, (json.dumps(content, indent=1) + "\n").encode())


@contextmanager
def _reporting_file(file: Path) -> Iterator[None]:
    """Convert errors about the content of a file into a RunError that names the file."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{file} cannot be read: {error}; restore a copy of it, or remove its folder to start again"
        ) from error


# File descriptors of the locks of this process. A lock lasts until every copy of its descriptor is closed, and a forked
# process, such as a data-loading worker, would keep its copy open after its parent has ended.
_locks: set[int] = set()


def _close_locks_in_child() -> None:
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks_in_child)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes; the lock ends with the process, even if it is killed."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; {ELSEWHERE}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = Run(folder).path_of(".lock")
    descriptor, owner = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), os.getpid()
    _locks.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(
                f"another process is using {folder}; wait until it has ended, or choose another folder"
            ) from error
        except OSError as error:
            raise RunError(
                f"{folder} cannot be locked ({error.strerror}); choose a file system that supports locks"
            ) from error
        yield
    finally:
        if os.getpid() == owner:
            _locks.discard(descriptor)
            os.close(descriptor)


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Return versions, commit, system and device of this process."""
    versions = {name: _version(name) for name in ("fedlas", "torch", "torchvision", "timm", "numpy")}
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    return {
        "commit": commit(),
        "versions": {package: version for package, version in versions.items() if version},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "device_name": name,
        "cuda": torch.version.cuda if on_gpu else None,
        "processes": processes,
        "threads": torch.get_num_threads(),
    }


def commit() -> str | None:
    """Return the commit of this repository: `$FEDLAS_COMMIT`, else that of git, else None."""
    from_environment = os.environ.get("FEDLAS_COMMIT")
    git = shutil.which("git")
    if from_environment or git is None:
        return from_environment
    command = [git, "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (a fixed command)
    return result.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
