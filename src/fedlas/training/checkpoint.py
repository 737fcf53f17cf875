"""Where a run stands, on disk: written whole or not at all, and read without unpickling anything but tensors.

A checkpoint is one file with everything: weights, the loss's state, the optimizer's memory, the schedule's counter, the
loss scale, random states, sums of the epoch, position, and the weights of the best epoch so far. Everything is put back
in place, so a captured step stays valid. The copy to the host is made at once, the file is written in the background.

A checkpoint carries the checksum of its own bytes, for torch reads flipped ones without a word; and the one before it
is kept, until the run is finished, for the day on which the newest one is damaged.
"""

import hashlib
import io
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedlas.storage import also_called, check_file, memory_errors, read_torch, write_whole
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import Run, RunError

FORMAT = "fedlas.checkpoint/1"
NO_COMMENT = b"\0\0"  # with which a zip file ends: the length of a comment, and no comment
SEAL = b"sha256 "  # begins the comment that we add
# What is raised where a state of another kind is put back.
UNFIT = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError)


def on_host(value: Any) -> Any:
    """Copy all tensors of a nested structure to the host's memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: on_host(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(one) for one in value)
    return value


def restore_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Put a module's state back, in place."""
    with memory_errors():
        module.load_state_dict(dict(state))


def check_recipe(saved: Mapping[str, Any], path: Path, recipe: Recipe) -> None:
    """Raise an error if a checkpoint belongs to another recipe, such as another seed or loss."""
    if saved["recipe"] != recipe.key:
        raise RunError(
            f"{path} is a checkpoint of another recipe: its key is {saved['recipe']!r}, that of recipe.json "
            f"{recipe.key!r}; put back the checkpoint of this run, or remove its folder to train again"
        )


def check_stand(saved: Mapping[str, Any], path: Path, epochs: int, steps: int | None = None) -> None:
    """Make sure that a run of so many epochs, each of so many steps where that is known, can stand there."""
    epoch, position, count = saved["epoch"], saved["position"], int(saved["step"]["count"])
    if epoch > epochs:
        raise refused(path, f"it stands after epoch {epoch} of {epochs}")
    if steps is None:
        return
    if position > (steps if epoch < epochs else 0):
        raise refused(path, f"it stands after step {position} of {steps} in epoch {epoch + 1} of {epochs}")
    if count != epoch * steps + position:
        raise refused(path, f"it has counted {count} steps, and stands after {epoch * steps + position}")


class Writer:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is being written."""
        return self._last is None or self._last.done()

    def save(self, path: Path, content: dict[str, Any]) -> None:
        """Take a copy now, and write it while training goes on."""
        copy = on_host({"format": FORMAT, **content})
        self.wait()  # one copy in memory is enough
        self._last = self._pool.submit(_write, path, copy)

    def wait(self) -> None:
        """Wait until what was saved is on disk; an error of the writing thread is raised here."""
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
    """Write a checkpoint, and keep the one that was there; at any moment the newest whole one has its name."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with buffer.getbuffer() as written:  # no copies: it may be large
        write_whole(path, *sealed(written), before=Run(path.parent).checkpoint_before)


def sealed(content: memoryview) -> tuple[memoryview, bytes]:
    """Add the checksum of a zip file, such as torch writes, to its end, as the comment that such a file may have."""
    body, end = content[: -len(NO_COMMENT)], content[-len(NO_COMMENT) :]
    assert end == NO_COMMENT
    return body, _seal(body)


def _seal(body: bytes | memoryview) -> bytes:
    words = SEAL + hashlib.sha256(body).hexdigest().encode()
    return len(words).to_bytes(2, "little") + words


def intact(content: bytes) -> bool:
    """Return whether a checkpoint is what was written: by its checksum, or those of its parts where it has none."""
    end = len(content) - len(_seal(b""))
    if SEAL in content[max(0, end) :]:
        return _seal(memoryview(content)[:end]) == content[end:]  # a view: it may be large
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            return parts.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, OSError, zlib.error):
        return False


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint."""
    damaged = f"{path} cannot be read: it is damaged, or no checkpoint; remove its folder to begin anew"
    try:
        check_file(path)
    except ValueError as error:
        raise RunError(str(error)) from error
    try:
        written = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    if not intact(written):
        raise RunError(damaged)
    try:
        with warnings.catch_warnings(), memory_errors():
            warnings.simplefilter("ignore")  # about files that no checkpoint of ours can be
            content: dict[str, Any] = read_torch(path, written)
    except (*UNFIT, OSError) as error:
        raise RunError(damaged) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RunError(f"{path} is not a checkpoint that fedlas wrote")
    wrong = _fault(content)
    if wrong is not None:
        raise refused(path, wrong)
    return content


def refused(path: Path, reason: object) -> RunError:
    """Make the error about a checkpoint that can be read, and holds what none of ours can hold."""
    words = " ".join(str(reason).split())
    return RunError(f"{path} is damaged, or no checkpoint of this run: {words}; remove its folder to begin anew")


def _fault(content: Mapping[str, Any]) -> str | None:
    """Return what a checkpoint lacks or holds in another form, or None; the file may come from anyone."""
    for name, fits, form in PARTS:
        if name not in content:
            return f"it has no {name!r}"
        if not fits(content[name]):
            return f"{name!r} is not {form}"
    step = content["step"]
    for name, fits, form in STEP_PARTS:
        if name not in step or not fits(step[name]):
            return f"{name!r} of 'step' is not {form}"
    model, best = content["model"], content["best"]
    if content["best_epoch"] > content["epoch"]:
        return f"its best epoch, {content['best_epoch']}, comes after the {content['epoch']} that were trained"
    if (best or content["epoch"]) and _shapes(best) != _shapes(model):
        return "'best' does not hold the same weights as 'model'"
    return None


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items()}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_accuracy(value: Any) -> bool:
    return type(value) in (int, float) and -1 <= value <= 1  # -1: before the first epoch


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _are_tensors(value: Any) -> bool:
    return _is_named(value) and all(_is_tensor(one) for one in value.values())


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_nested)


def _are_memories(value: Any) -> bool:
    return isinstance(value, list) and all(_are_tensors(one) for one in value)


def _are_generators(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_named(one) for one in value)


def _is_number(value: Any) -> bool:
    plain = _is_tensor(value) and value.dtype in (torch.int64, torch.float32) and value.shape == ()
    return plain and bool(value.isfinite()) and bool(value >= 0)


def _is_gate_state(value: Any) -> bool:
    return _is_named(value) and _is_named(value.get("history")) and _is_tensor(value.get("sums"))


# What a checkpoint holds: the name, whether a value has its form, and the form in words.
Part: TypeAlias = tuple[str, Callable[[Any], bool], str]
PARTS: tuple[Part, ...] = (
    ("model", _are_tensors, "a table of tensors"),
    ("loss", _is_named, "a table of names"),
    ("optimizer", _are_memories, "a list of tables of tensors"),
    ("step", _is_named, "a table of names"),
    ("epoch", _is_count, "a number of epochs"),
    ("position", _is_count, "a number of steps"),
    ("random", _are_generators, "a list with the generators of each process"),
    ("best", _are_tensors, "a table of tensors"),
    ("best_epoch", _is_count, "a number of epochs"),
    ("best_accuracy", _is_accuracy, "an accuracy"),
    ("recipe", _is_text, "the key of a recipe"),
)
STEP_PARTS: tuple[Part, ...] = (
    ("count", _is_number, "a number of steps"),
    ("scale", _is_number, "a factor"),
    ("good_steps", _is_number, "a number of steps"),
    ("metrics", _are_tensors, "a table of tensors"),
    ("gate", _is_gate_state, "a history and its sums"),
)


def last_good(run: Run) -> bool:
    """Return whether a run has a checkpoint; a damaged one is put aside, and the one before it takes its place."""
    path, before = run.checkpoint, run.checkpoint_before
    if not path.exists():
        before.unlink(missing_ok=True)  # of a run that somebody wants to begin anew
        return False
    if intact(path.read_bytes()) or not before.exists():
        return True  # what is damaged and has no other before it, is named by who loads it
    if not intact(before.read_bytes()):
        raise RunError(f"{path} is damaged, and so is {before}; remove both to begin anew")
    aside = path.with_name("checkpoint-damaged.pt")
    also_called(path, aside)
    before.replace(path)
    warnings.warn(
        f"{path} is damaged: its checksum is wrong. The run goes on from the checkpoint before it; the damaged one "
        f"is now {aside.name}",
        stacklevel=2,
    )
    return True
