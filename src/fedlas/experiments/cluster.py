"""Those who train on many machines: Ray tasks, one for each run.

Ray finds a node for a task, and another one when that dies; the run continues from its checkpoint in the folder that
all nodes share.
"""

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedlas.experiments.crews import AbstractCrew, Outcome, Trainer, Word, even_if_stopped, heard
from fedlas.training import Recipe, Run

RETRIES = 5  # of a run whose node died; Ray counts them
VISIBLE_AFTER = 60.0  # seconds until all machines see a file; what NFS remembers of a folder is that old at most
MARK = ".shared"


class Share(NamedTuple):
    """What a run gets of a node."""

    gpus: float | None
    cpus: float
    device: str | None


class Tasks(AbstractCrew):
    """Ray tasks, one for each run. Ray finds a node for them, and another one when that dies."""

    def __init__(
        self,
        ray: Any,
        address: str | None,
        share: Share,
        told: Callable[[str], None],
        *,
        data_root: Path | None,
        folder: Path,
    ) -> None:
        self._ray, self._ours = ray, not ray.is_initialized()
        if self._ours:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        gpus, cpus, device = share
        if gpus is None:
            gpus = 1 if device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0
        wanted = {"CPU": cpus, "GPU": gpus}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        told(f"Ray: {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}; {gpus:g} GPU and {cpus:g} CPU for each run")
        if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
            told("Ray: no node has that much; the runs wait for one")
        # Said here and not in .options(), so that Ray gives every run on a GPU a process of its own: the memory of a
        # process that has ended is free, and a process cannot be moved to another GPU.
        remote = ray.remote(num_gpus=gpus, num_cpus=cpus, max_retries=RETRIES, retry_exceptions=False)
        self._task = remote(_task)
        self._shared = (device if gpus else device or "cpu", data_root, _mark(folder))
        self._refs: dict[Any, str] = {}
        self._stopping = False

    def has_room(self) -> bool:
        return True

    def give(self, recipe: Recipe, run: Run) -> None:
        ref = self._task.options(name=recipe.name).remote(recipe, run.folder, *self._shared)
        self._refs[ref] = recipe.name

    def outcomes(self, seconds: float) -> list[Outcome]:
        if not self._refs:
            heard(lambda: time.sleep(seconds))
            return []
        done, _ = heard(lambda: self._ray.wait(list(self._refs), timeout=seconds))
        return [self._outcome(ref, self._refs.pop(ref)) for ref in done]

    def _outcome(self, ref: Any, name: str) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [""]
            line = lines[-1] if isinstance(error, self._ray.exceptions.RayTaskError) else lines[0]
            word: Word = "stopped" if self._stopping else "failed"
            return Outcome(name, word, f"{type(error).__name__}: {line}", str(error))
        return outcome

    def stop(self) -> None:
        # Ray interrupts what runs, which the engine takes for SIGINT: it stops after its step, with a checkpoint.
        self._stopping = True
        for ref in self._refs:
            self._ray.cancel(ref, force=False, recursive=False)

    def close(self) -> None:
        try:
            if self._refs:
                if not self._stopping:
                    self.stop()
                self._ray.wait(list(self._refs), num_returns=len(self._refs), timeout=VISIBLE_AFTER)
        finally:
            if self._ours:
                self._ray.shutdown()


def _task(recipe: Recipe, folder: Path, device: str | None, data_root: Path | None, mark: str) -> Outcome:
    """Train one run on whatever node this is."""
    if not _is_marked(folder.parent, mark):
        reason = f"{folder.parent} on this node is not that of the launcher; all nodes need one shared folder"
        return Outcome(recipe.name, "failed", reason)
    return even_if_stopped(Trainer(device, data_root, progress=False), recipe, folder, lambda: False)


def _mark(folder: Path) -> str:
    """Leave a word in a folder by which other machines know it again."""
    word = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{MARK}.{word}").write_text(word, encoding="ascii")
    with suppress(FileExistsError):  # the word of another launcher is as good
        (folder / MARK).hardlink_to(folder / f"{MARK}.{word}")
    (folder / f"{MARK}.{word}").unlink()
    return (folder / MARK).read_text(encoding="ascii")


def _is_marked(folder: Path, mark: str) -> bool:
    end = time.monotonic() + VISIBLE_AFTER
    while not (folder / MARK).exists() or (folder / MARK).read_text(encoding="ascii") != mark:
        if time.monotonic() > end:
            return False
        time.sleep(1)
    return True
