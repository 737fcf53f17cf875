"""Which custom kernels a network uses on a device that cannot run all of them."""

import pytest
import torch

from fedlas.models import build_model
from fedlas.training.accelerators import batch_norm, conv1x1, stem, trial
from fedlas.training.accelerators.resnet import Support, fuse

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget():
    """Forget the results of earlier trials."""
    trial._runs.cache_clear()
    trial.batch_norm_failure.cache_clear()


def fused(name):
    return fuse(build_model(name, 10).to(memory_format=torch.channels_last))


def let_all_run(monkeypatch):
    """Let kernels return zeros without being launched."""
    y = torch.zeros(1, 64, 1, 1)
    for module, kernel in ((stem, "convolve"), (conv1x1, "multiply")):
        monkeypatch.setattr(module, kernel, lambda *_: (y, None))
    for module, kernel in ((batch_norm, "gradient_sums"), (stem, "gradient_of_filters"), (conv1x1, "gradient_sums")):
        monkeypatch.setattr(module, kernel, lambda *_: None)


def out_of_shared_memory(*_):
    raise RuntimeError("out of resource: shared memory\nRequired: 156672")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18_cifar", Support(stem=True, conv1x1=False, conv1x1_backward=False)),
        ("resnet50_cifar", Support()),
        ("resnet50", Support(stem=False, conv1x1=True, conv1x1_backward=True)),
    ],
)
def test_kernels_that_a_network_does_not_use_are_not_tried(name, expected, monkeypatch):
    let_all_run(monkeypatch)
    assert trial.resnet_support(fused(name), CPU) == expected


@pytest.mark.parametrize(
    ("module", "kernel", "expected", "layers"),
    [
        (stem, "convolve", Support(stem=False), "the first layer is"),
        (conv1x1, "multiply", Support(conv1x1=False), "1x1 convolutions are"),
        (conv1x1, "gradient_sums", Support(conv1x1_backward=False), "gradients of 1x1 convolutions are"),
    ],
)
def test_a_kernel_that_fails_is_computed_by_cudnn_and_the_others_are_used(
    module, kernel, expected, layers, monkeypatch
):
    let_all_run(monkeypatch)
    monkeypatch.setattr(module, kernel, out_of_shared_memory)
    with pytest.warns(UserWarning, match=f"^{layers} computed by cuDNN.*out of resource: shared memory$"):
        support = trial.resnet_support(fused("resnet50_cifar"), CPU)
    assert support == expected
    assert trial.resnet_support(fused("resnet50_cifar"), CPU) == expected  # and does not warn again


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is there can be used")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_there_is_a_reason_of_one_line(device):
    reason = trial.batch_norm_failure(torch.device(device))
    assert reason is not None
    assert "\n" not in reason


@pytest.mark.parametrize("message", ["Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_lack_of_memory_raises(message):
    def work():
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message.split()[-1]):
        trial.failure(work)
