"""Checkpoints: written atomically, and read without unpickling anything but tensors.

A checkpoint is one file with the weights, the state of the loss, the optimizer state, the step counter, the loss scale,
the random state, the metric sums of the epoch, the position in the epoch, and the weights of the best epoch so far. The
state is restored in place, so a captured step stays valid. The copy to the host is synchronous, the file is written in
the background.

A checkpoint contains a checksum, because torch does not detect flipped bits. The previous checkpoint is kept until the
run is finished, in case the latest one is damaged.
"""

import hashlib
import io
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlas.io.atomic import link_atomic, write_atomic
from fedlas.io.torch import read_torch
from fedlas.io.untrusted import check_file, memory_errors
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import Run, RunError

FORMAT = "fedlas.checkpoint/1"
EMPTY_COMMENT = b"\0\0"  # the last bytes of a zip file without a comment: its length, 0
CHECKSUM_PREFIX = b"sha256 "  # start of the zip comment with the checksum
# Exceptions raised when a state does not fit.
RESTORE_ERRORS = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError)


# Entries of a checkpoint, which is untrusted input, and their types; `Session.load_state_dict` checks their content.
ENTRIES = {
    "model": dict,
    "loss": dict,
    "optimizer": list,
    "step": dict,
    "epoch": int,
    "position": int,
    "random": list,
    "best": dict,
    "best_epoch": int,
    "best_accuracy": float,
    "recipe": str,
}


def copy_to_host(value: Any) -> Any:
    """Copy all tensors of a nested structure to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copy_to_host(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_to_host(item) for item in value)
    return value


def restore_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the state of a module in place."""
    with memory_errors():
        module.load_state_dict(dict(state))


def check_position(saved: Mapping[str, Any], path: Path | str, epochs: int, steps: int) -> None:
    """Raise if the position of a checkpoint is impossible for this number of epochs and steps per epoch."""
    epoch, position, count = saved["epoch"], saved["position"], int(saved["step"]["count"])
    if not 0 <= position <= (steps if epoch < epochs else 0):
        raise invalid_checkpoint(
            path, f"its position is after step {position} of {steps} in epoch {epoch + 1} of {epochs}"
        )
    if count != epoch * steps + position or count < 0:
        raise invalid_checkpoint(
            path, f"its step counter is {count}, but its position is after step {epoch * steps + position}"
        )


class Writer:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is being written."""
        return self._last is None or self._last.done()

    def save(self, path: Path, content: dict[str, Any]) -> None:
        """Copy the content now and write it while training continues."""
        copy = copy_to_host({"format": FORMAT, **content})
        self.wait()  # keep at most one copy in memory
        self._last = self._pool.submit(_write, path, copy)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; raise the error of the writer thread, if any."""
        if self._last is not None:
            last, self._last = self._last, None
            last.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint atomically and keep the previous one."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with buffer.getbuffer() as view:  # no copy: the checkpoint may be large
        body, end = view[: -len(EMPTY_COMMENT)], view[-len(EMPTY_COMMENT) :]
        assert end == EMPTY_COMMENT
        write_atomic(path, body, _checksum_comment(body), backup=Run(path.parent).checkpoint_before)


def _checksum_comment(body: bytes | memoryview) -> bytes:
    """Return the zip comment with the checksum, which replaces the empty one."""
    comment = CHECKSUM_PREFIX + hashlib.sha256(body).hexdigest().encode()
    return len(comment).to_bytes(2, "little") + comment


def is_intact(content: bytes) -> bool:
    """Return whether the checksum of a checkpoint matches; without one, check those of the zip members."""
    end = len(content) - len(_checksum_comment(b""))
    if CHECKSUM_PREFIX in content[max(0, end) :]:
        view = memoryview(content)[:end]  # no copy: the checkpoint may be large
        return _checksum_comment(view) == content[end:]
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            return parts.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, OSError, zlib.error):
        return False


def load_for(run: Run, recipe: Recipe) -> dict[str, Any]:
    """Read the checkpoint of a run; raise if it belongs to another recipe, such as another seed or loss."""
    path, saved = run.checkpoint, load(run.checkpoint)
    if saved["recipe"] != recipe.key:
        raise RunError(
            f"{path} is a checkpoint of another recipe: its key is {saved['recipe']!r}, the key of recipe.json "
            f"is {recipe.key!r}; restore the checkpoint of this run, or remove its folder to train again"
        )
    if saved["epoch"] > recipe.epochs:
        raise invalid_checkpoint(path, f"its position is after epoch {saved['epoch']} of {recipe.epochs}")
    return saved


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint."""
    damaged = f"{path} cannot be read: it is damaged, or not a checkpoint; remove its folder to start again"
    check_file(path)
    data = path.read_bytes()
    if not is_intact(data):
        raise RunError(damaged)
    try:
        with warnings.catch_warnings(), memory_errors():
            warnings.simplefilter("ignore")  # warnings about files that fedlas did not write
            content: dict[str, Any] = read_torch(path, data)
    except (*RESTORE_ERRORS, OSError) as error:
        raise RunError(damaged) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunError(f"{path} is not a checkpoint that fedlas wrote")
    for name, kind in ENTRIES.items():
        if not isinstance(content.get(name), kind):
            raise invalid_checkpoint(path, f"{name!r} is missing or not of type {kind.__name__}")
    if not 0 <= content["best_epoch"] <= content["epoch"] or not content["random"]:
        raise invalid_checkpoint(path, "its epochs are impossible, or it has no random state")
    if content["epoch"] and not content["best"]:
        raise invalid_checkpoint(path, f"'best' has no weights after epoch {content['epoch']}, unlike 'model'")
    return content


def invalid_checkpoint(path: Path | str, reason: object) -> RunError:
    """Return the error for a checkpoint that is readable but has invalid content."""
    details = " ".join(str(reason).split())
    return RunError(f"{path} is damaged, or not a checkpoint of this run: {details}; remove its folder to start again")


def recover_checkpoint(run: Run) -> bool:
    """Return whether a run has a checkpoint; replace a damaged checkpoint by the previous one."""
    path, previous = run.checkpoint, run.checkpoint_before
    if not path.exists():
        previous.unlink(missing_ok=True)  # the user removed the checkpoint to start again
        return False
    if is_intact(path.read_bytes()) or not previous.exists():
        return True  # `load` reports a damaged checkpoint without a predecessor
    if not is_intact(previous.read_bytes()):
        raise RunError(f"{path} is damaged, and so is {previous}; remove both to start again")
    renamed = path.with_name("checkpoint-damaged.pt")
    link_atomic(path, renamed)
    previous.replace(path)
    warnings.warn(
        f"{path} is damaged: its checksum is wrong. The run resumes from the previous checkpoint; the damaged file "
        f"is now {renamed.name}",
        stacklevel=2,
    )
    return True
