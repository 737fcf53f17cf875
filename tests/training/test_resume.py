"""Stop and resume: a resumed run equals an uninterrupted run bit for bit."""

import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs_of import AtStep, assert_equal_runs, checkpoint_of, short, signal_at, stop_at

from fedlas.io import write_predictions
from fedlas.predictions import Predictions
from fedlas.training import AbstractCallback, Run, RunError, StoppedError, checkpoint, fit, fit_many
from fedlas.training.signals import StopSignals
from waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:fp16 is very slow")
FP16 = {"precision": "fp16", "batch_size": 10, "data_options": {"train_samples": 65}}
RECIPES = {
    "fedlas_ls": short("fedlas_ls", checkpoint_every=3),
    "adafocal": short("adafocal", optimizer="adamw", lr=0.003),
    "crl": short("crl", accumulate=2, **FP16),
    "fp16": short("fedlas_mbls", **FP16),
    "mixed": short("ls", mixup=0.4),
    "bf16": short("ce", precision="bf16"),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """Run a recipe without a stop, once."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return lambda name: fit(RECIPES[name], out=folder / name)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("fedlas_ls", 14),
        ("adafocal", 9),
        ("crl", 18),
        ("mixed", 4),
        pytest.param("fp16", 10, marks=pytest.mark.campaign),
        pytest.param("bf16", 10, marks=pytest.mark.campaign),
    ],
)
def test_a_stopped_run_continues_bit_for_bit(uninterrupted, tmp_path, name, step):
    error = stop_at(step, RECIPES[name], tmp_path)
    assert "--resume" in str(error)
    assert error.signal_number == signal.SIGTERM
    content = checkpoint_of(Run(tmp_path))
    assert divmod(step, 7) == (content["epoch"], content["position"]) or content["position"] == 7
    assert len(Run(tmp_path).log) == (step - 1) // 7
    with pytest.raises(RunError, match=r"--resume.*resume=True"):
        fit(RECIPES[name], out=tmp_path)
    run = fit(RECIPES[name], out=tmp_path, resume=True)
    assert_equal_runs(run, uninterrupted(name))
    assert run.log[(step - 1) // 7]["machine"]["continued_at_step"] is not None


def test_a_crashed_run_continues_bit_for_bit(uninterrupted, tmp_path):
    run = Run(tmp_path)

    def crash(_: Any) -> None:
        until(run.checkpoint.exists)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(RECIPES["fedlas_ls"], out=tmp_path, callbacks=[AtStep(13, crash)])
    assert len(run.log) == 1
    assert not run.finished
    times = run.log[0]["machine"]
    assert_equal_runs(fit(RECIPES["fedlas_ls"], out=tmp_path, resume=True), uninterrupted("fedlas_ls"))
    assert run.log[0]["machine"] == times  # the first epoch was not repeated


def test_a_run_killed_while_predicting_only_predicts(uninterrupted, tmp_path):
    run = Run(shutil.copytree(uninterrupted("mixed").folder, tmp_path / "run"))
    times = [record["machine"] for record in run.log]
    run.predictions_file("best-val").unlink()
    assert_equal_runs(fit(RECIPES["mixed"], out=run.folder, resume=True), uninterrupted("mixed"))
    assert [record["machine"] for record in run.log] == times


def test_sighup_stops_a_run_unless_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert stop_at(3, short(), tmp_path / "heard", signal.SIGHUP).signal_number == signal.SIGHUP
        assert checkpoint_of(Run(tmp_path / "heard"))["position"] == 3
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert fit(short(epochs=1), out=tmp_path / "ignored", callbacks=[signal_at(3, signal.SIGHUP)]).finished
    finally:
        signal.signal(signal.SIGHUP, before)


def test_partial_files_of_a_killed_run_are_removed(tmp_path):
    """Regression: only partial checkpoints were removed; other partial files stayed forever."""
    stop_at(12, short("ce"), tmp_path)
    (tmp_path / "predictions").mkdir()
    names = ("recipe.json", "environment.json", "log.jsonl", "checkpoint.pt", "predictions/best-test.safetensors")
    files = [tmp_path / name for name in names]
    partial_files = [file.with_name(f".{file.name}.abcd1234.part") for file in files]
    for partial_file in partial_files:
        partial_file.write_bytes(b"half")
    run = fit(short("ce"), out=tmp_path, resume=True)
    assert [partial_file for partial_file in partial_files if partial_file.exists()] == []
    file_names = {path.name for path in run.folder.iterdir()}
    assert file_names == {".lock", "recipe.json", "environment.json", "log.jsonl", "checkpoint.pt", "predictions"}


class SignalAfterEpoch(AbstractCallback):
    """Sends this process a signal while no step is under way."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, record: Any) -> None:
        if record["epoch"] == self.epoch:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("epoch", [2, 3])  # after the last epoch too: fit_many would start the next run
def test_a_signal_after_an_epoch_stops_the_run(uninterrupted, tmp_path, epoch):
    with pytest.raises(StoppedError, match=rf"\b{epoch} .*\b3\b.*--resume") as error_info:
        fit(RECIPES["fedlas_ls"].replace(checkpoint_every=1000), out=tmp_path, callbacks=[SignalAfterEpoch(epoch)])
    assert error_info.value.signal_number == signal.SIGTERM
    content = checkpoint_of(Run(tmp_path))
    assert (content["epoch"], content["position"]) == (epoch, 0)
    assert_equal_runs(fit(RECIPES["fedlas_ls"], out=tmp_path, resume=True), uninterrupted("fedlas_ls"))


def test_a_signal_while_predicting_ends_fit_many(tmp_path, monkeypatch):
    recipes = [short("ce", epochs=2), short("ls", epochs=1)]

    def write_and_signal(predictions: Predictions, path: Path) -> None:
        write_predictions(predictions, path)
        if path.stem == "best-test":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fedlas.training.loop.write_predictions", write_and_signal)
    with pytest.raises(StoppedError) as error_info:
        list(fit_many(recipes, folder=tmp_path))
    assert error_info.value.signal_number == signal.SIGINT
    assert Run(tmp_path / recipes[0].name).finished
    assert not Run(tmp_path / recipes[0].name).checkpoint_before.exists()
    assert not (tmp_path / recipes[1].name).exists()


def test_a_repeated_signal_does_not_interrupt_the_checkpoint(monkeypatch):
    """Terminal and launcher both forward Ctrl-C; only a later signal is a second request."""
    clock = 100.0
    monkeypatch.setattr("fedlas.training.signals.time.monotonic", lambda: clock)
    received = []
    original_handler = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        for ignore_repeats, expected in ((True, []), (False, [signal.SIGTERM])):
            signals = StopSignals(ignore_repeats=ignore_repeats)
            with signals.listening():
                for _ in range(3):
                    signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)
                assert (signals.caught, received) == (signal.SIGTERM, [])
                clock += 60
                signal.raise_signal(signal.SIGTERM)
            assert received == expected
    finally:
        signal.signal(signal.SIGTERM, original_handler)


def test_a_damaged_checkpoint_is_named(tmp_path):
    stop_at(3, short(), tmp_path)
    Run(tmp_path).checkpoint.write_bytes(b"nothing of value")
    with pytest.raises(RunError, match=r"checkpoint\.pt"):
        fit(short(), out=tmp_path, resume=True)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has written two checkpoints and has not ended."""
    folder = tmp_path_factory.mktemp("stopped")
    stop_at(12, RECIPES["fedlas_ls"], folder)
    return Run(folder)


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_flipped_bit(content: bytes) -> bytes:
    """One bit in the middle of the file, which is in the middle of some weights."""
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


def test_every_flipped_bit_is_detected_or_changes_nothing(stopped):
    """Only a bit in the marker before the checksum may flip: then the checksums of the zip members are compared."""
    content, random = stopped.checkpoint.read_bytes(), np.random.default_rng(0)
    assert checkpoint.is_intact(content)
    end = len(content) - 64
    positions = [*random.integers(0, len(content), 300).tolist(), *range(end - 9, len(content))]
    for position in positions:
        changed = bytearray(content)
        changed[position] ^= 1 << int(random.integers(8))
        detected = not checkpoint.is_intact(bytes(changed))
        assert detected != (end - 7 <= position < end), position
    for length in random.integers(0, len(content), 100).tolist():
        assert not checkpoint.is_intact(content[:length])


def test_a_checkpoint_without_a_checksum_is_checked_by_its_zip_members(stopped, tmp_path):
    """Checkpoints of earlier versions have none."""
    torch.save(torch.load(stopped.checkpoint, weights_only=True), tmp_path / "checkpoint.pt")
    content = (tmp_path / "checkpoint.pt").read_bytes()
    assert checkpoint.is_intact(content)
    assert not checkpoint.is_intact(with_flipped_bit(content))
    assert not checkpoint.is_intact(truncated(content))


@pytest.mark.parametrize(
    "damage",
    [
        with_flipped_bit,
        *(pytest.param(damage, marks=pytest.mark.campaign) for damage in (truncated, lambda content: b"")),
    ],
)
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one_with_a_warning(uninterrupted, stopped, tmp_path, damage):
    folder = shutil.copytree(stopped.folder, tmp_path / "run")
    run = Run(folder)
    damaged = damage(run.checkpoint.read_bytes())
    run.checkpoint.write_bytes(damaged)
    with pytest.warns(UserWarning, match=r"checkpoint\.pt"):
        fit(RECIPES["fedlas_ls"], out=folder, resume=True)
    assert_equal_runs(run, uninterrupted("fedlas_ls"))
    assert run.log[1]["machine"]["continued_at_step"] == 2  # step 9, which was saved before step 12
    assert (folder / "checkpoint-damaged.pt").read_bytes() == damaged
    assert not run.checkpoint_before.exists()  # removed after the run: it is not needed any more


def test_two_damaged_checkpoints_are_both_named(stopped, tmp_path):
    run = Run(shutil.copytree(stopped.folder, tmp_path / "run"))
    for file in (run.checkpoint, run.checkpoint_before):
        file.write_bytes(with_flipped_bit(file.read_bytes()))
    with pytest.raises(RunError, match=r"checkpoint\.pt.*checkpoint-before\.pt"):
        fit(RECIPES["fedlas_ls"], out=run.folder, resume=True)
    run.checkpoint.unlink()  # half of what the message advises
    fit(RECIPES["fedlas_ls"].replace(checkpoint_every=1000), out=run.folder, resume=True)
    assert run.log[0]["machine"]["continued_at_step"] is None
    content = checkpoint_of(run)
    assert (content["epoch"], content["position"]) == (3, 0)  # the end of a run always has a checkpoint


def test_a_log_without_all_epochs_raises(stopped, tmp_path):
    """Regression: such a run was resumed and never finished."""
    run = Run(shutil.copytree(stopped.folder, tmp_path / "run"))
    run.log_file.write_bytes(truncated(run.log_file.read_bytes()))
    with pytest.raises(RunError, match=r"log\.jsonl.*\b0 .*\b1\b.*checkpoint\.pt"):
        fit(RECIPES["fedlas_ls"], out=run.folder, resume=True)


def test_without_hard_links_the_previous_checkpoint_is_a_copy(tmp_path, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    stop_at(7, RECIPES["fedlas_ls"], tmp_path)
    run = Run(tmp_path)
    contents = [checkpoint.load(file) for file in (run.checkpoint_before, run.checkpoint)]
    assert [(content["epoch"], content["position"]) for content in contents] == [(0, 6), (0, 7)]


def test_no_epoch_waits_for_a_slow_disk(uninterrupted, tmp_path, monkeypatch):
    """The first checkpoint is written only in the third epoch, which a run that waits for it never reaches."""
    epochs, third_epoch, write = [], threading.Event(), checkpoint._write

    def write_slowly(path: Path, content: dict[str, Any]) -> None:
        assert third_epoch.wait(30), "the run waits for the disk"
        epochs.append(content["epoch"])
        write(path, content)

    monkeypatch.setattr(checkpoint, "_write", write_slowly)
    run = fit(RECIPES["mixed"], out=tmp_path, callbacks=[AtStep(15, lambda _: third_epoch.set())])
    assert epochs == [1, 3], "the third is the last, which has a checkpoint in any case"
    assert_equal_runs(run, uninterrupted("mixed"))


def test_checkpoint_every_writes_all_checkpoints_to_a_slow_disk(tmp_path, monkeypatch):
    """Each checkpoint is written only when the run waits for it, so none may be skipped."""
    waited, wait, write = threading.Semaphore(0), checkpoint.Writer.wait, checkpoint._write
    epochs = []

    def waiting(writer: checkpoint.Writer) -> None:
        if writer._last is not None:
            waited.release()
        wait(writer)

    def slowly(path: Path, content: dict[str, Any]) -> None:
        assert waited.acquire(timeout=30)
        epochs.append(content["epoch"])
        write(path, content)

    monkeypatch.setattr(checkpoint.Writer, "wait", waiting)
    monkeypatch.setattr(checkpoint, "_write", slowly)
    fit(short("ls", checkpoint_every=7), out=tmp_path)
    assert epochs == [1, 2, 3]
