"""Pre-compilation compiles kernels and runs none; it does not change the step."""

import threading
import time
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from runs_of import short
from triton.runtime.jit import MockTensor

from fedlas.losses import CATALOG as LOSSES
from fedlas.models import build_model
from fedlas.training import compilation
from fedlas.training.accelerators import kernels, precompile
from fedlas.training.accelerators.batch_norm import kernel_available
from fedlas.training.accelerators.kernels import CustomKernels
from fedlas.training.accelerators.precompile import launch, precompilation, precompiling
from fedlas.training.accelerators.resnet import fuse
from fedlas.training.session import Session

CPU = torch.device("cpu")
QUICK = {"adafocal", "crl", "fedlas_mbls"}


class Kernel:
    """Records its calls."""

    def __init__(self) -> None:
        self.ran, self.compiled, self.ready = [], [], 0

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.ran.append((grid, args, kwargs))

    def warmup(self, *args, grid, **kwargs):
        self.compiled.append((grid, args, kwargs, threading.get_ident()))
        return self

    @property
    def run(self):
        self.ready += 1


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(precompile.torch.cuda, "device", lambda _: nullcontext())


@pytest.mark.usefixtures("without_cuda")
def test_each_specialisation_is_compiled_once_and_not_run():
    kernel, tensor = Kernel(), torch.zeros(3)
    with precompilation(CPU) as context, context.active():
        assert precompiling() is context
        launch(kernel, (7,), tensor, 48, (tensor.double(),), WIDTH=2)
        launch(kernel, (9,), torch.ones(5), 64, (tensor.double(),), WIDTH=2)  # the same specialisation
        launch(kernel, (7,), tensor, 49, (tensor.double(),), WIDTH=2)
        launch(kernel, (7,), tensor, 1, (tensor.double(),), WIDTH=2)
        launch(kernel, (7,), tensor.half(), 48, (tensor.double(),), WIDTH=2)
        launch(kernel, (7,), tensor, 48, (tensor.double(),), WIDTH=4)
        assert kernel.ready == 0  # nothing is loaded while cuDNN benchmarks
    assert not precompiling()
    assert not kernel.ran
    assert len(kernel.compiled) == kernel.ready == 5
    assert threading.get_ident() not in {thread for *_, thread in kernel.compiled}
    kinds = {(args[0].dtype, args[1], kwargs["WIDTH"]) for _, args, kwargs, _ in kernel.compiled}
    float32 = torch.float32
    assert kinds == {(float32, 48, 2), (float32, 49, 2), (float32, 1, 2), (torch.float16, 48, 2), (float32, 48, 4)}
    assert all(isinstance(value, MockTensor) for _, args, *_ in kernel.compiled for value in (args[0], args[2][0]))
    launch(kernel, (7,), tensor, 48, WIDTH=2)
    assert kernel.ran == [((7,), (tensor, 48), {"WIDTH": 2})]


@pytest.mark.usefixtures("without_cuda")
def test_a_kernel_that_cannot_be_compiled_raises_when_it_runs():
    class Broken(Kernel):
        def warmup(self, *args, **kwargs):
            raise RuntimeError("no")

        def __getitem__(self, grid):
            return self.warmup  # a launch compiles first

    broken = Broken()
    with pytest.warns(UserWarning, match="1 kernels.*no"), precompilation(CPU) as context, context.active():
        launch(broken, (1,))
    with pytest.raises(RuntimeError, match="no"):
        launch(broken, (1,))
    with pytest.raises(ZeroDivisionError), precompilation(CPU) as context, context.active():
        raise ZeroDivisionError
    assert not precompiling()


@pytest.mark.usefixtures("without_cuda")
def test_a_kernel_that_cannot_be_loaded_raises():
    class TooLarge(Kernel):
        @property
        def run(self):
            raise torch.OutOfMemoryError("no room for the kernel")

    with (
        pytest.raises(torch.OutOfMemoryError, match="no room"),
        precompilation(CPU) as context,
        context.active(),
    ):
        launch(TooLarge(), (1,))
    assert not precompiling()


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("fails", [False, True])
def test_background_work_is_awaited_and_may_fail(fails):
    kernel, threads = Kernel(), []

    def background_work():
        time.sleep(0.3)
        threads.append(threading.get_ident())
        if fails:
            raise RuntimeError("no")

    with precompilation(CPU, background_work) as context, context.active():
        launch(kernel, (1,))
    assert len(threads) == len(kernel.compiled) == 1
    assert threads != [threading.get_ident()]


@pytest.mark.usefixtures("without_cuda")
def test_other_devices_and_later_launches_are_not_part_of_a_precompilation():
    kernel = Kernel()
    with precompilation(CPU) as context:
        with context.active():
            launch(kernel, (1,), torch.zeros(1, device="meta"))
        launch(kernel, (1,), torch.zeros(1))
    assert len(kernel.ran) == 2
    assert not kernel.compiled
    any_gpu, second = (
        precompile.Precompilation(torch.device("cuda")),
        precompile.Precompilation(torch.device("cuda", 1)),
    )
    assert any_gpu.handles(())
    assert not any_gpu.handles((torch.zeros(1),))
    assert not second.handles((3, torch.zeros(1)))


@pytest.mark.usefixtures("without_cuda")
def test_pending_compilations_are_cancelled_after_an_error():
    started, release = threading.Event(), threading.Event()

    class Slow(Kernel):
        def warmup(self, *args, **kwargs):
            started.set()
            release.wait(20)
            super().warmup(*args, **kwargs)

    kernel = Slow()

    def launch_and_fail():
        for number in range(precompile._processors() + 3):
            launch(kernel, (1,), WIDTH=number)
        assert started.wait(20)
        threading.Timer(0.2, release.set).start()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), precompilation(CPU) as context, context.active():
        launch_and_fail()
    assert 1 <= len(kernel.compiled) <= precompile._processors()


@pytest.mark.usefixtures("without_cuda")
def test_trials_in_a_precompilation_are_repeated_afterwards():
    kernel, tried_devices = Kernel(), []

    @cache
    def can_run(device):
        tried_devices.append(device)
        launch(kernel, (1,))
        return False

    with precompilation(CPU) as context, context.active():
        assert kernel_available(can_run, CPU)
        assert kernel_available(can_run, CPU)
    assert len(kernel.compiled) == len(tried_devices) == 1
    assert not kernel.ran
    assert not kernel_available(can_run, CPU)
    assert not kernel_available(can_run, CPU)
    assert len(tried_devices) == 2
    assert len(kernel.ran) == 1


def state(session: Session) -> dict[str, torch.Tensor]:
    state_dict = session.state_dict()
    optimizer_state = {
        f"{n} {name}": value for n, item in enumerate(state_dict["optimizer"]) for name, value in item.items()
    }
    sums = {f"sum {name}": value for name, value in session.step.metrics.sums.items()}
    return state_dict["model"] | {f"loss {k}": v for k, v in state_dict["loss"].items()} | optimizer_state | sums


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        ("adafocal", {}),
        ("crl", {}),
        ("fedlas_mbls", {}),
        ("fedlas_ls", {"accumulate": 2, "mixup": 0.5}),
        *(pytest.param(loss, {}, marks=pytest.mark.campaign) for loss in LOSSES.entries if loss not in QUICK),
    ],
)
def test_pre_compilation_does_not_change_the_step(loss, changes, monkeypatch):
    """This pre-compilation computes, unlike a real one; its effects must be undone nevertheless."""
    complete_traces, states = [], []
    precompilation_that_computes = nullcontext(SimpleNamespace(active=nullcontext))

    def record_trace(step, inputs, trace=compilation.trace):
        trace(step, inputs)
        have_gradients = [parameter.grad is not None for parameter in step.module.parameters()]
        complete_traces.append(all(have_gradients) and len(have_gradients) > 0)

    monkeypatch.setattr(compilation, "trace", record_trace)
    for precompiles in (True, False):
        session = Session(short(loss, **changes), CPU)
        session.runner.precompile = (lambda: precompilation_that_computes) if precompiles else None
        session.net.train()
        for number, inputs in enumerate(session.batches(0)):
            if number < 2:
                session.runner.run(*inputs)
        states.append(state(session))
    assert complete_traces == [True]  # all of network and loss
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert torch.equal(value, states[0][name]), name


def test_a_failed_pre_compilation_is_a_warning():
    def broken():
        raise RuntimeError("no")

    session = Session(short("ce"), CPU)
    session.runner.precompile = broken
    session.net.train()
    with pytest.warns(UserWarning, match="pre-compiled: no"):
        session.runner.run(*next(iter(session.batches(0))))
    assert int(session.step.count) == 1


def test_an_out_of_memory_error_is_raised():
    def full():
        raise torch.OutOfMemoryError("full")

    session = Session(short("ce"), CPU)
    session.runner.precompile = full
    with pytest.raises(torch.OutOfMemoryError):
        session.runner.run(*next(iter(session.batches(0))))


def test_networks_with_custom_kernels_are_pre_compiled(monkeypatch):
    assert Session(short("ce"), CPU).runner.precompile is None
    model = build_model("resnet18_cifar", 10).to(memory_format=torch.channels_last)
    assert CustomKernels(CPU).precompile(model) is None
    loaded = []
    monkeypatch.setattr(kernels, "import_module", loaded.append)
    precompile_network = CustomKernels(CPU).precompile(fuse(model))
    assert precompile_network is not None
    with precompile_network() as context:
        assert isinstance(context, precompile.Precompilation)
    assert loaded == ["torch._inductor.compile_fx"]
