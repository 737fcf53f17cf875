"""Executor for Ray clusters: one Ray task per run.

Ray assigns each task to a node. If the node dies, Ray assigns the task to another one, where the run resumes from its
checkpoint in the folder that all nodes share.
"""

import logging
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlas.experiments.executors.base import AbstractExecutor, Outcome, Status, train_in_worker, wait_or_stop
from fedlas.training import Recipe, Run

logger = logging.getLogger(__name__)

RETRIES = 5  # how often Ray restarts a run whose node died
VISIBLE_AFTER = 60.0  # seconds until all machines see a file; NFS caches folders no longer than this
SHUTDOWN_TIMEOUT = 60.0  # seconds for interrupted runs to write their checkpoints
MARKER = ".shared"  # file by which nodes recognise the folder


class RayExecutor(AbstractExecutor):
    """Train every run as a Ray task; Ray assigns nodes and replaces nodes that die.

    Args:
        ray: the module.
        address: address of the cluster, as for `ray.init`.
        gpus: GPUs that Ray reserves for each run; None for one if there are GPUs.
        cpus: CPUs that Ray reserves for each run.
        device: where to train; None for a GPU if there is one.
        data_root: folder of the data on every node.
        folder: folder of the run folders, on storage that all nodes share.
    """

    def __init__(
        self,
        ray: Any,
        address: str | None,
        *,
        gpus: float | None,
        cpus: float,
        device: str | None,
        data_root: Path | None,
        folder: Path,
    ) -> None:
        self._ray, self._started_here = ray, not ray.is_initialized()
        if self._started_here:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        if gpus is None:
            gpus = 1 if device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0
        required = {"CPU": cpus, "GPU": gpus}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        count = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}"
        logger.info("Ray: %s; %g GPU and %g CPU for each run", count, gpus, cpus)
        if not any(all(node.get(name, 0) >= amount for name, amount in required.items()) for node in nodes):
            logger.warning("Ray: no node has these resources; the runs wait for one")
        # Set resources here, not in .options(): only then does Ray start a new process for every run on a GPU. A reused
        # process would keep its GPU memory and could not switch to another GPU.
        remote = ray.remote(num_gpus=gpus, num_cpus=cpus, max_retries=RETRIES, retry_exceptions=False)
        self._task = remote(_train_task)
        self._common_args = (device if gpus else device or "cpu", data_root, _write_marker(folder))
        self._names: dict[Any, str] = {}  # run names by Ray reference
        self._stopping = False

    def submit(self, recipe: Recipe, run: Run) -> None:
        reference = self._task.options(name=recipe.name).remote(recipe, run.folder, *self._common_args)
        self._names[reference] = recipe.name

    def as_completed(self, timeout: float) -> list[Outcome]:
        if not self._names:
            wait_or_stop(lambda: time.sleep(timeout))
            return []
        ready, _ = wait_or_stop(lambda: self._ray.wait(list(self._names), timeout=timeout))
        return [self._outcome(reference, self._names.pop(reference)) for reference in ready]

    def _outcome(self, reference: Any, name: str) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [""]
            line = lines[-1] if isinstance(error, self._ray.exceptions.RayTaskError) else lines[0]
            status: Status = "stopped" if self._stopping else "failed"
            return Outcome(name, status, f"{type(error).__name__}: {line}", str(error))
        return outcome

    def shutdown(self, *, wait: bool = True) -> None:
        try:
            if not self._stopping:
                # Ray interrupts the tasks. The training loop treats that as SIGINT: it stops after the current step,
                # with a checkpoint.
                self._stopping = True
                for reference in self._names:
                    self._ray.cancel(reference, force=False, recursive=False)
            if wait and self._names:
                self._ray.wait(list(self._names), num_returns=len(self._names), timeout=SHUTDOWN_TIMEOUT)
        finally:
            if wait and self._started_here:
                self._ray.shutdown()


def _train_task(recipe: Recipe, folder: Path, device: str | None, data_root: Path | None, marker: str) -> Outcome:
    """Train one run on the node of this task."""
    if not _has_marker(folder.parent, marker):
        reason = f"{folder.parent} on this node is not the scheduler's folder; put it on storage that all nodes share"
        return Outcome(recipe.name, "failed", reason)
    return train_in_worker(recipe, folder, lambda: False, device=device, data_root=data_root)


def _write_marker(folder: Path) -> str:
    """Write a random token to a file by which other nodes recognise the folder; return the token."""
    token = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{MARKER}.{token}").write_text(token, encoding="ascii")
    with suppress(FileExistsError):  # another scheduler has written its token, which is equally valid
        (folder / MARKER).hardlink_to(folder / f"{MARKER}.{token}")
    (folder / f"{MARKER}.{token}").unlink()
    return (folder / MARKER).read_text(encoding="ascii")


def _has_marker(folder: Path, token: str) -> bool:
    deadline = time.monotonic() + VISIBLE_AFTER
    while not (folder / MARKER).exists() or (folder / MARKER).read_text(encoding="ascii") != token:
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    return True
