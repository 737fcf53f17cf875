"""On a GPU, losses equal the CPU, also compiled by Inductor and in a CUDA graph, without synchronisation."""

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import fedlas
from waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Inductor warns about its own choices and uses deprecated functions of torch.
    pytest.mark.filterwarnings(
        "ignore:\\nOnline softmax is disabled", "ignore:.*torch.jit:DeprecationWarning", "ignore:TensorFloat32"
    ),
]
CLASSES, SAMPLES, ROWS = 7, 300, 128
KEYWORDS = {record.name: record.keywords for record in fedlas.list_losses()}
NAMES = list(KEYWORDS)


def build(name: str, device: str = "cuda") -> Any:
    sizes = {"num_samples": SAMPLES, "epochs": 5}
    options: dict[str, Any] = {option: size for option, size in sizes.items() if option in KEYWORDS[name]}
    torch.manual_seed(0)
    return fedlas.build_loss(name, num_classes=CLASSES, **options).to(device)


def batch(step: int, device: str = "cuda") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    labels[step] = -100
    data = {
        "logits": 3 * torch.randn(ROWS, CLASSES, generator=generator),
        "labels": labels,
        "features": torch.rand(ROWS, 64, generator=generator),
        "index": torch.randperm(SAMPLES, generator=generator)[:ROWS],
    }
    data = {name: tensor.to(device) for name, tensor in data.items()}
    data["logits"].requires_grad_()
    return data


@pytest.mark.parametrize("name", NAMES)
def test_gpu_loss_equals_cpu_without_synchronisation(name: str) -> None:
    gpu_loss, cpu_loss = build(name), build(name, "cpu")
    for step in range(2):
        gpu_batch, cpu_batch = batch(step), batch(step, "cpu")
        with no_waiting():
            value = gpu_loss(**gpu_batch)
            value.backward()
        expected = cpu_loss(**cpu_batch)
        expected.backward()
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gpu_batch["logits"].grad.cpu(), cpu_batch["logits"].grad, rtol=1e-4, atol=1e-6)
    for key, state in gpu_loss.state_dict().items():
        torch.testing.assert_close(state.cpu(), cpu_loss.state_dict()[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_inductor_and_graph_capture_equal_eager(name: str) -> None:
    torch._dynamo.reset()
    eager, compiled_loss = build(name), build(name)
    compiled = torch.compile(compiled_loss, fullgraph=True)
    static_batch = batch(0)

    def step() -> Tensor:
        static_batch["logits"].grad = None
        value: Tensor = compiled(**static_batch)
        value.backward()
        return value

    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        step()
        with no_waiting():
            step()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = step()
    graph.replay()
    for _ in range(3):  # two steps before the capture, which computes nothing, and one replay
        eager_batch = batch(0)
        expected = eager(**eager_batch)
        expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(static_batch["logits"].grad, eager_batch["logits"].grad, rtol=1e-4, atol=1e-6)
    for key, state in compiled_loss.state_dict().items():
        torch.testing.assert_close(state, eager.state_dict()[key], rtol=1e-5, atol=1e-6)


def test_values_are_checked_on_a_gpu_only_on_request() -> None:
    data = batch(0)
    data["labels"][3] = CLASSES
    with fedlas.checks(True), pytest.raises(ValueError, match=rf"label {CLASSES} .*{CLASSES} classes"):
        build("ce")(**data)
