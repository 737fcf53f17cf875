"""On a GPU, batches equal the CPU, also in a CUDA graph, without synchronisation."""

import warnings

import pytest
import torch

from data import synthetic
from fedlas.data import Resident, Transform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:TensorFloat32"),
]
CIFAR = Transform(size=32, channels=3, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010), pad=4, flip=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_batch_follows_the_epoch_and_equals_the_cpu(compiled):
    split = synthetic.split_of(CIFAR, 500)
    on_cpu = Resident(split, CIFAR, train=True, seed=1)
    on_gpu = Resident(split, CIFAR, train=True, seed=1, device="cuda")
    batch = torch.compile(on_gpu.batch, fullgraph=True) if compiled else on_gpu.batch
    index = torch.zeros(64, dtype=torch.int64, device="cuda")
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        batch(index)
        on_gpu.set_epoch(0)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph, epoch = torch.cuda.CUDAGraph(), torch.zeros((), dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        on_gpu.set_epoch(epoch)  # even the draws may be part of the graph
        images = batch(index)
    for number in range(3):
        on_cpu.set_epoch(number)
        epoch.fill_(number)
        index.copy_(on_cpu.order()[:64])
        graph.replay()
        torch.testing.assert_close(images.cpu(), on_cpu.batch(index.cpu()), rtol=0, atol=1e-6)
        assert torch.equal(on_gpu.order().cpu(), on_cpu.order())


def test_resident_batches_do_not_synchronise():
    data = Resident(synthetic.split_of(CIFAR, 500), CIFAR, train=True, device="cuda")
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        data.set_epoch(3)
        for _ in data.batches(64):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
