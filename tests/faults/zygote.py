"""Fork training processes from a warm parent and record the phase in which each was killed.

Importing torch takes seconds, so the campaigns fork a child for each trial from a process that has imported everything
but trained nothing. The child writes its phase to shared memory, which survives a kill. The hooks in this module wrap
functions of fedlas, which does not know them.
"""

import contextlib
import importlib
import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(path) for path in (TESTS, TESTS / "training") if str(path) not in sys.path]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads do not survive a fork
os.environ.setdefault("FEDLAS_COMMIT", "campaign")  # avoids a call of git in each trial

import torch  # noqa: E402
from runs_of import assert_same, log_without_times, prediction_bytes  # noqa: E402

from fedlas.experiments import stored_predictions  # noqa: E402
from fedlas.experiments.ledger import Ledger  # noqa: E402
from fedlas.metrics.base import Resampling  # noqa: E402
from fedlas.training import Recipe, Run, checkpoint, fit, loop  # noqa: E402
from fedlas.training.session import Session  # noqa: E402

PHASES = ("start-up", "step", "validation", "checkpoint writing", "between", "predictions", "ledger")
PROTOCOL = "small"
STATE = struct.Struct("<bbqq")  # phase, whether a checkpoint is being written, steps begun, checkpoints begun
TIMEOUT = 120.0  # seconds per trial
WARM: list[bool] = []


class Progress:
    """The progress of a child process, in shared memory that survives it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, STATE.size)

    def _read(self) -> list[int]:
        return list(STATE.unpack(self._memory[:]))

    def put(self, index: int, value: int) -> None:
        """Write one number; different threads of a child write different ones."""
        offset = struct.calcsize("<bbqq"[: index + 1])
        item = struct.Struct("<" + "bbqq"[index])
        self._memory[offset : offset + item.size] = item.pack(value)

    def add(self, index: int) -> None:
        self.put(index, self._read()[index] + 1)

    @property
    def phase(self) -> str:
        """Return the phase of a child, or its last phase; checkpoints are written during steps."""
        phase, writing, _, _ = self._read()
        return "checkpoint writing" if writing else PHASES[phase]

    @property
    def steps(self) -> int:
        return self._read()[2]

    @property
    def written(self) -> int:
        return self._read()[3]

    def clear(self) -> None:
        """Reset the state."""
        self._memory[:] = bytes(STATE.size)

    def reset_phase(self) -> None:
        """Reset the phase but keep the counts."""
        self.put(0, 0)
        self.put(1, 0)


PROGRESS = Progress()


@contextlib.contextmanager
def phase(name: str, then: str | None = None) -> Iterator[None]:
    """Record the phase during a block."""
    before = PROGRESS._read()[0]
    PROGRESS.put(0, PHASES.index(name))
    yield
    PROGRESS.put(0, before if then is None else PHASES.index(then))


def _install_hooks() -> None:
    """Wrap the functions of fedlas at which the phase changes."""
    epoch, predict, write_predictions = (
        loop._Training._epoch,
        loop._Training._predict,
        loop._Training._write_predictions,
    )
    write, batches = checkpoint._write, Session.batches

    def watched_epoch(self: Any, *arguments: Any) -> None:
        with phase("step", then="between"):
            epoch(self, *arguments)

    def watched_predict(self: Any, *arguments: Any, **options: Any) -> Any:
        if PROGRESS.phase == "predictions":
            return predict(self, *arguments, **options)
        with phase("validation", then="between"):
            return predict(self, *arguments, **options)

    def watched_everything(self: Any) -> None:
        with phase("predictions", then="between"):
            write_predictions(self)

    def watched_write(*arguments: Any) -> None:
        PROGRESS.add(3)
        PROGRESS.put(1, 1)
        write(*arguments)
        PROGRESS.put(1, 0)

    def watched_batches(self: Any, *arguments: Any) -> Iterator[Any]:
        for batch in batches(self, *arguments):
            PROGRESS.add(2)
            yield batch

    loop._Training._epoch, loop._Training._predict = watched_epoch, watched_predict
    loop._Training._write_predictions = watched_everything
    checkpoint._write, Session.batches = watched_write, watched_batches


def train_and_record(recipe: Recipe, folder: Path, ledger: Path) -> None:
    """Train or resume a run and record it in a ledger, as every child does."""
    run = fit(recipe, out=folder, resume=True, progress=False)
    with phase("ledger"):
        stored_predictions.record(run, PROTOCOL, Ledger(ledger))


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


def wait_for(child: int, seconds: float = TIMEOUT) -> int | None:
    """Wait for a child; return its exit code (negative for a signal), or None after a timeout."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    return None


def finish(child: int) -> int:
    """Wait for a child that is not to be killed; kill it if it hangs, which campaigns report."""
    code = wait_for(child)
    if code is None:
        os.kill(child, signal.SIGKILL)
        wait_for(child)
        return -999
    return code


def warm(recipe: Recipe, folder: Path) -> None:
    """Import everything that training needs and install the hooks, once."""
    if WARM:
        return
    WARM.append(True)
    torch.set_num_threads(1)
    stored_predictions.Resampling = lambda: Resampling(resamples=20)  # the default number takes longer than the run
    names = folder / "modules.json"

    def job() -> None:
        train_and_record(recipe, folder / "warm", folder / "warm-ledger")
        names.write_text(json.dumps(sorted(sys.modules)))

    code = finish(fork(job, folder / "warm.txt"))
    if code:
        raise RuntimeError((folder / "warm.txt").read_text())
    for name in json.loads(names.read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    _install_hooks()


def temporary_files(folder: Path) -> list[str]:
    """Return temporary files in a folder, and obsolete checkpoints."""
    return sorted(str(path) for pattern in (".*.part", "checkpoint-before.pt") for path in folder.rglob(pattern))


def count_lines(ledger: Path, name: str) -> int:
    """Count the lines of a run in the files of a ledger."""
    texts = [text for path in ledger.glob("*.jsonl") for text in path.read_text(encoding="utf-8").splitlines()]
    return sum(json.loads(text)["id"] == name for text in texts)


def differences(run: Run, uninterrupted: Run) -> list[str]:
    """Return the differences between a killed and an uninterrupted run."""
    messages = []
    if not run.finished:
        messages.append("it is not finished")
    if prediction_bytes(run) != prediction_bytes(uninterrupted):
        messages.append("its predictions are others")
    if log_without_times(run) != log_without_times(uninterrupted):
        messages.append("its log is another")
    try:
        assert_same(checkpoint.load(run.checkpoint), checkpoint.load(uninterrupted.checkpoint))
    except AssertionError:
        messages.append("its weights are others")
    return messages


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table."""
    names = list(rows[0])
    head = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return "\n".join([*head, *(f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows)])
