"""On a GPU: captured, compiled and eager steps agree, and none synchronises with the host."""

import gc
import math
import signal
import subprocess
import sys

import pytest
import torch
from devices import CUDA_MARKS
from gpu_sessions import assert_captured_is_eager, assert_never_waits, gpu_session, trained
from runs_of import log_without_times, prediction_bytes, short

import fedlas
from fedlas.training import AbstractCallback, Run, StoppedError, fit, recipe_for

pytestmark = CUDA_MARKS
NAMES = [record.name for record in fedlas.list_losses()]


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        *((loss, {}) for loss in NAMES),
        ("fedlas_ls", {"precision": "bf16", "channels_last": True}),
        ("fedlas_ls", {"precision": "fp16"}),
        ("fedlas_ls", {"optimizer": "adamw", "lr": 0.003}),
        ("fedlas_ls", {"accumulate": 2, "nesterov": True}),
        ("fedlas_ls", {"mixup": 0.3, "cutmix": 1.0}),
        ("fedlas_ls", {"clip": None, "schedule": "cosine"}),
    ],
    ids=str,
)
def test_capture_equals_eager_bit_for_bit(loss, changes):
    assert_captured_is_eager(short(loss, compile=False, **changes))


@pytest.mark.parametrize("loss", ["ce", "fedlas_ls", "fedlas_mbls", "crl"])
def test_compiled_capture_is_close_to_eager(loss):
    torch._dynamo.reset()
    recipe = short(loss, drop_last=True, lr=0.02)
    eager = trained(recipe.replace(compile=False), capture=False, epochs=2)
    compiled = trained(recipe, capture=True, epochs=2)
    assert compiled.runner.graphs
    assert compiled.step.module.calls[0].active
    for name, value in eager.net.model.state_dict().items():
        torch.testing.assert_close(value, compiled.net.model.state_dict()[name], rtol=2e-2, atol=2e-3, msg=name)
    metrics, expected_metrics = compiled.step.metrics.read(), eager.step.metrics.read()
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-2)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("loss", NAMES)
def test_a_step_does_not_synchronise(loss, capture):
    assert_never_waits(short(loss, deterministic=False, compile=False, drop_last=True), capture=capture)


class StopAt(AbstractCallback):
    """Sends this process a signal after some step, without reading from the device: steps stay captured."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_dispatched(self, step: int) -> None:
        if step == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_on_a_gpu_resumes_and_repeats_bit_for_bit(tmp_path):
    recipe = short("fedlas_ls", compile=False)
    first, two = fit(recipe, out=tmp_path / "1"), fit(recipe.replace(capture=False), out=tmp_path / "2")
    with pytest.raises(StoppedError):
        fit(recipe, out=tmp_path / "3", callbacks=[StopAt(12)])
    three = fit(recipe, out=tmp_path / "3", resume=True)
    assert three.log[1]["machine"]["continued_at_step"] == 5
    for run in (two, three):
        assert prediction_bytes(run) == prediction_bytes(first)
        assert log_without_times(run) == log_without_times(first)


def test_the_log_has_the_peak_memory_of_its_run(tmp_path):
    gc.collect()  # networks of other tests may still be there
    memory_before = torch.cuda.memory_allocated() / 2**20
    torch.empty(2**30, dtype=torch.uint8, device="cuda").zero_()
    run = fit(short("ce", epochs=1, compile=False), out=tmp_path)
    assert 0 < run.log[0]["machine"]["memory_mib"] - memory_before < 900


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_synchronised_batch_norm_over_two_gpus_equals_one_gpu(tmp_path):
    settings = {
        "epochs": "1",
        "batch_size": "50",
        "compile": "false",
        "sync_batchnorm": "true",
        "lr": "0.01",
        "deterministic": "true",
        "data_options.train_samples": "330",
        "data_options.label_noise": "0.1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fedlas"]
    command += ["train", "--data", "digits", "--loss", "fedlas_ls", "--out", str(tmp_path / "two")]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    subprocess.run(command, check=True, timeout=300)
    recipe = recipe_for("digits", loss="fedlas_ls").with_settings(settings)
    two_gpus, one_gpu = Run(tmp_path / "two"), fit(recipe, out=tmp_path / "one")
    assert two_gpus.log[0]["train"] == pytest.approx(one_gpu.log[0]["train"], rel=1e-2)
    torch.testing.assert_close(two_gpus.predictions().logits, one_gpu.predictions().logits, rtol=2e-2, atol=2e-2)


def test_a_bad_gate_gradient_is_detected_in_a_captured_run():
    with gpu_session(short("fedlas_ls", compile=False, drop_last=True)) as session:
        factor = torch.ones((), device=session.device)
        next(session.loss.parameters()).register_hook(lambda gradient: gradient * factor)
        for epoch in range(2):
            for number, inputs in enumerate(session.batches(epoch)):
                if (epoch, number) == (1, 2):
                    factor.fill_(math.nan)
                session.runner.run(*inputs)
        assert session.runner.graphs
        assert session.step.bad_step() == session.steps_per_epoch + 2
        assert all(value.isfinite().all() for value in session.loss.parameters())


def test_a_bad_step_is_detected_in_a_captured_run():
    recipe = short("ce", lr=1e30, clip=None, schedule="constant", compile=False, drop_last=True)
    session = trained(recipe, capture=True)
    assert session.step.bad_step() is not None
    assert session.step.bad_step() < 18
