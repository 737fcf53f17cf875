"""Which custom kernels a network and a session use, also on a device that cannot run all of them."""

import copy

import pytest
import torch
import triton.language as tl
from devices import needs_cuda
from runs_of import short

from fedlas.models import build_model, resnet
from fedlas.training import build
from fedlas.training.accelerators import batch_norm, conv1x1, kernels, metric_sums, optimizer_step, stem, trial
from fedlas.training.accelerators.optimizer_step import FusedOptimizerStep
from fedlas.training.accelerators.resnet import FusedResNet, Support
from fedlas.training.session import Session

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget():
    """Forget the results of earlier trials."""
    trial.can_run.cache_clear()
    trial.batch_norm_failure.cache_clear()


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
    assert trial.resnet_support(build_model(name, 10), CPU) == expected


@needs_cuda
@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet50_cifar"])
def test_all_kernels_run_on_a_gpu(name):
    is_bottleneck = name == "resnet50_cifar"
    assert trial.resnet_support(build_model(name, 10), torch.device("cuda")) == Support(
        conv1x1=is_bottleneck, conv1x1_backward=is_bottleneck
    )


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
        support = trial.resnet_support(build_model("resnet50_cifar", 10), CPU)
    assert support == expected
    assert trial.resnet_support(build_model("resnet50_cifar", 10), CPU) == expected  # and does not warn again


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
        trial.run_trial(work)


class PretendedGPU:
    """Lets sessions on the CPU choose custom kernels and compile as on a GPU, without launching anything."""

    def __init__(self, monkeypatch):
        self.compiled, self.failure = [], None
        monkeypatch.setattr(resnet, "BLOCKS", dict.fromkeys(resnet.BLOCKS, (1, 1, 1, 1)))
        monkeypatch.setattr(build, "is_compiled", lambda recipe, _: recipe.compile)
        monkeypatch.setattr(build, "CompiledCall", lambda module, **_: self.compiled.append(module) or module)
        monkeypatch.setattr(kernels, "batch_norm_failure", lambda _: self.failure)
        monkeypatch.setattr(kernels, "resnet_support", lambda *_: Support())
        monkeypatch.setattr(optimizer_step, "run_trial", lambda _: None)

    def start(self, **changes):
        self.compiled.clear()
        options = {"model": "resnet18_cifar", "model_options": {"in_channels": 1}, "channels_last": True}
        return Session(short("ce", **{**options, "compile": True, **changes}), CPU)

    def fuses_or_compiles(self, **changes):
        """Return whether a session fuses the network, and whether it compiles it."""
        net = self.start(**changes).net
        return isinstance(net.model, FusedResNet), net in self.compiled


@pytest.fixture
def pretended_gpu(monkeypatch):
    return PretendedGPU(monkeypatch)


def test_a_session_fuses_networks_that_it_would_compile(pretended_gpu):
    assert pretended_gpu.fuses_or_compiles() == (True, False)
    # A callback that sees steps disables capture; that must not change the result of training.
    assert pretended_gpu.fuses_or_compiles(capture=False) == (True, False)
    assert pretended_gpu.fuses_or_compiles(channels_last=False) == (False, True)
    assert pretended_gpu.fuses_or_compiles(compile=False) == (False, False)


def test_without_kernels_the_network_is_compiled(pretended_gpu):
    pretended_gpu.failure = "RuntimeError: no C compiler"
    with pytest.warns(UserWarning, match="no C compiler"):
        assert pretended_gpu.fuses_or_compiles() == (False, True)


@pytest.mark.skipif(not hasattr(tl, "tuple"), reason="needs a Triton that has tuples")
def test_a_session_that_compiles_uses_the_fused_optimizer_step(pretended_gpu):
    session = pretended_gpu.start()
    fused_step = session.step.fused_step
    assert isinstance(fused_step, FusedOptimizerStep)
    assert not session.net.model.gradient_slots
    with fused_step.gradient_slots():
        assert session.net.model.gradient_slots is fused_step.slots
    assert not session.net.model.gradient_slots
    assert session.step.metrics.kernels is session.step.gate.kernels is metric_sums
    addresses = [parameter.data_ptr() for parameter in fused_step.slots]
    assert addresses == fused_step.addresses[: len(addresses)]
    copy.deepcopy(session.net)  # a callback may keep one
    with_adam = pretended_gpu.start(optimizer="adamw", lr=0.001)
    assert with_adam.step.fused_step is None
    assert with_adam.step.metrics.kernels is None
    assert pretended_gpu.start(compile=False).step.fused_step is None
