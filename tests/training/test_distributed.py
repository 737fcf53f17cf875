"""Two processes give the numbers of one, also after a stop and with images from files."""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs_of import assert_equal_runs, large, natural_images, short, stop_at
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fedlas.training import AbstractCallback, Recipe, Run, fit, recipe_for
from fedlas.training.build import check_batch_size, with_sync_batchnorm
from fedlas.training.distributed import decide_on_rank_zero, process_group
from fedlas.training.run_folder import RunError
from start_method import START_METHOD

OPTIONS = {
    "epochs": "2",
    "batch_size": "50",
    "deterministic": "true",
    "model_options.norm": "group",
    "model_options.width": "8",
    "data_options.train_samples": "330",
}
FOLDER = Path(__file__).parent
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
TIMEOUT = 180  # seconds: six times the duration on a busy machine
# All runs in one start of two processes, because the start takes longer than the runs.
RUNS = """
import faulthandler, os, signal, sys
from pathlib import Path
faulthandler.dump_traceback_later(120, repeat=True)  # shows where it hangs; its thread lives until the process ends
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from runs_of import AtStep, large
from fedlas.__main__ import main
from fedlas.training import RunError, StoppedError, fit, recipe_for

def send_signals(_):
    say(f"while it trains {'more' if threads() > threads_before else 'no more'} threads")
    # torchrun forwards a signal that the terminal has sent to all processes
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGINT)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)

def say(message):  # in one call, so that lines of the two processes do not mix
    os.write(1, f"{message}\\n".encode())

def threads():
    return len(os.listdir("/proc/self/task"))

folder, images, changes, threads_before = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:], threads()
recipe = recipe_for("digits", loss="fedlas_ls").with_settings(dict(change.split("=") for change in changes))
arguments = ["--data", "digits", "--loss", "fedlas_ls", "--out", str(folder / "uninterrupted")]
sys.argv[1:] = ["train", *arguments, *(argument for change in changes for argument in ("--set", change))]
try:
    main()
except SystemExit as end:
    assert not end.code
try:
    fit(recipe, out=folder / "stopped", callbacks=[AtStep(10, send_signals)])
except StoppedError as error:
    say(f"stopped by {error.signal_number} and {threads() - threads_before} threads are left")
fit(recipe, out=folder / "stopped", resume=True)
natural_images = large(images, model_options={"in_channels": 3, "norm": "group", "width": 8}, workers=1)
fit(natural_images, out=folder / "natural_images")
sync = natural_images.replace(sync_batchnorm=True)
for changed, name in ((sync, "sync"), (recipe, "uninterrupted/log.jsonl/run")):
    try:
        fit(changed, out=folder / name)
    except (RunError, NotADirectoryError) as error:
        say(error)
say(f"in the end {threads() - threads_before} threads are left")
"""


@pytest.fixture(scope="module")
def torchrun_result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """The folder of the runs of two processes of torchrun, their output, and the images that they have read."""
    folder = tmp_path_factory.mktemp("processes")
    images, script = natural_images(folder / "images"), folder / "runs.py"
    script.write_text(RUNS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    changes = [f"{name}={value}" for name, value in OPTIONS.items()]
    with subprocess.Popen(
        [*command, script, FOLDER, folder, images, *changes],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers, which would survive if it were killed
            stdout, stderr = process.communicate(timeout=60)
            pytest.fail(f"two processes hang:\n{stdout}{stderr}")
    assert process.returncode == 0, stderr
    assert "Grad strides" not in stderr
    return folder, stdout, images


@pytest.fixture(scope="module")
def single_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of a single process."""
    recipe = recipe_for("digits", loss="fedlas_ls").with_settings(OPTIONS)
    return fit(recipe, out=tmp_path_factory.mktemp("single"))


def assert_equal_numbers(distributed_run: Run, single_run: Run) -> None:
    for record, expected in zip(distributed_run.log, single_run.log, strict=True):
        for part in ("train", "val"):
            for name, value in expected[part].items():
                assert record[part][name] == pytest.approx(value, rel=1e-3, abs=1e-4), (part, name)
        assert record["gate"]["gamma_histogram"] == expected["gate"]["gamma_histogram"]
        for name in ("positive", "negative", "flip_rate", "alpha_ratio", "against_gamma"):
            assert record["gate"][name] == pytest.approx(expected["gate"][name], abs=0.01), name
    for name in ("best-val", "best-test", "last-val", "last-test"):
        predictions, expected = distributed_run.predictions(name), single_run.predictions(name)
        # Each sample once, in order, also where ranks have unequal parts.
        assert torch.equal(predictions.index, expected.index)
        assert torch.equal(predictions.labels, expected.labels)
        torch.testing.assert_close(predictions.logits, expected.logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(predictions.features, expected.features, rtol=1e-3, atol=1e-3)
    assert (distributed_run.folder / "environment.json").read_text().count('"processes": 2') == 1


def assert_predictions_of_one_network(batch_norm_run: Run) -> None:
    """Let one process repeat the predictions of two: both must have had the same statistics of batch norm."""
    logits = {name: batch_norm_run.predictions(name).logits for name in ("best-val", "last-test")}
    fit(batch_norm_run.recipe.replace(splits=("train", "val", "test")), out=batch_norm_run.folder)
    for name, expected_logits in logits.items():
        torch.testing.assert_close(batch_norm_run.predictions(name).logits, expected_logits, rtol=1e-5, atol=1e-5)


def run_on_two_ranks(work: Callable[..., None], *arguments: object) -> None:
    """Call a function in two processes, with their rank and the arguments.

    They are no children of torchrun, which takes ten times as long to start as such runs take.
    """
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    context = multiprocessing.get_context(START_METHOD)
    processes = [context.Process(target=run_as_rank, args=(rank, port, work, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


def run_as_rank(rank: int, port: int, work: Callable[..., None], *arguments: object) -> None:
    """Call a function with the environment that torchrun gives to one of two processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    work(rank, *arguments)


def stop_and_resume(_: int, recipe: Recipe, folder: Path) -> None:
    """Train a run that is stopped in its second epoch, and one with batch norm."""
    stop_at(10, recipe, folder / "stopped")
    fit(recipe, out=folder / "stopped", resume=True)
    with pytest.raises(RunError, match="lr"):  # the error reaches both
        fit(recipe.replace(lr=1.0), out=folder / "stopped")
    fit(recipe.replace(model_options={"width": 8}, epochs=1), out=folder / "norms")


@forks
def test_two_stopped_processes_equal_one(single_run, tmp_path):
    """Sums of the epoch and statistics of batch norm used to be those of one rank."""
    run_on_two_ranks(stop_and_resume, single_run.recipe, tmp_path)
    stopped = Run(tmp_path / "stopped")
    assert_equal_numbers(stopped, single_run)
    assert stopped.log[1]["machine"]["continued_at_step"] == 3
    assert_predictions_of_one_network(Run(tmp_path / "norms"))


class CountReductions(AbstractCallback):
    """Counts the steps of a run, and how often their gradients are reduced."""

    def on_train_start(self, run: Run, session: Any, epoch: int) -> None:
        self.steps = self.reductions = 0
        session.step.parallel_module.register_comm_hook(self, count_reduction)

    def on_step_dispatched(self, step: int) -> None:
        self.steps = step


def count_reduction(counter: CountReductions, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    counter.reductions += 1
    return default_hooks.allreduce_hook(None, bucket)


def accumulate_and_count(_: int, folder: Path) -> None:
    for parts in (1, 2):
        counter = CountReductions()
        fit(short("ce", epochs=1, batch_size=60, accumulate=parts), out=folder / str(parts), callbacks=[counter])
        assert counter.reductions == counter.steps == 6


@forks
def test_gradients_of_an_accumulated_step_are_reduced_once(tmp_path):
    run_on_two_ranks(accumulate_and_count, tmp_path)


def fail_on_rank_zero(rank: int) -> None:
    with process_group(torch.device("cpu")), pytest.raises(KeyError if rank == 0 else RuntimeError, match="missing"):
        decide_on_rank_zero(lambda: {}["missing"])


@forks
def test_every_rank_raises_if_rank_zero_fails():
    run_on_two_ranks(fail_on_rank_zero)


@pytest.mark.campaign
def test_two_torchrun_processes_stop_resume_bit_for_bit_and_read_images(torchrun_result, single_run):
    """The sums of the epoch used to be those of one rank, restored on both; and a second signal used to kill."""
    folder, stdout, images = torchrun_result
    # Both agree on the highest signal. A thread that still needs Python while Python exits aborts the process.
    assert stdout.count("while it trains more threads") == 2
    assert stdout.count("stopped by 15 and 0 threads are left") == 2
    assert stdout.count("in the end 0 threads are left") == 2
    stopped, uninterrupted = Run(folder / "stopped"), Run(folder / "uninterrupted")
    assert stopped.log[1]["machine"]["continued_at_step"] == 3
    assert_equal_runs(stopped, uninterrupted)
    assert_equal_numbers(uninterrupted, single_run)
    for message in ("sync_batchnorm", "Not a directory"):
        assert stdout.count(message) == 2  # errors reach both
    recipe = large(images, model_options={"in_channels": 3, "norm": "group", "width": 8}, workers=0)
    distributed_run, single_run = Run(folder / "natural_images"), fit(recipe, out=folder / "one")
    for record, expected in zip(distributed_run.log, single_run.log, strict=True):
        assert record["train"] == pytest.approx(expected["train"], rel=1e-3)
    for name in ("best-test", "last-val"):
        predictions, expected = distributed_run.predictions(name), single_run.predictions(name)
        assert torch.equal(predictions.index, expected.index)  # none is seen twice
        torch.testing.assert_close(predictions.logits, expected.logits, rtol=1e-3, atol=1e-3)


def test_batch_norm_statistics_can_be_synchronised():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    converted = with_sync_batchnorm(net, torch.device("cuda"))
    assert isinstance(converted[1], nn.SyncBatchNorm)
    assert converted.state_dict().keys() == net.state_dict().keys()  # a checkpoint fits both


def test_batch_sizes_that_cannot_be_divided_raise():
    with pytest.raises(RunError, match=r"2 .*\b51\b.*batch_size"):
        check_batch_size(recipe_for("digits", batch_size=51), 330, 2)
    with pytest.raises(RunError, match=r"2 .*\b5\b.*\b25\b"):
        check_batch_size(recipe_for("digits", batch_size=25, accumulate=5), 330, 2)
    with pytest.raises(RunError, match=r"\b15\b.*drop_last=true"):
        check_batch_size(recipe_for("digits", batch_size=50), 315, 2)
    check_batch_size(recipe_for("digits", batch_size=50, drop_last=True), 315, 2)
