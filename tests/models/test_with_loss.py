"""`WithLoss`: a network and its loss in one module, alone, compiled and in DistributedDataParallel."""

import copy
from collections import UserDict

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from fedlas.losses import build_loss
from fedlas.models.base import Output, WithFeatures, WithLoss


class Gated(nn.Module):
    """A loss with a parameter and a buffer that looks at all it is given."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 1)
        self.register_buffer("norm", torch.zeros(()))

    def forward(self, logits, labels, features=None, index=None):
        norms = features.detach().norm(dim=1)
        self.norm.lerp_(norms.mean(), 0.5)
        weights = torch.sigmoid(self.gate(logits.detach())[:, 0] + norms - self.norm.clone())
        if index is not None:
            weights = weights * (index >= 0)
        return (weights * functional.cross_entropy(logits, labels, reduction="none")).mean()


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self):
        super().__init__()
        self.body, self.dropout, self.fc = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, image, scale=1.0):
        return self.fc(self.dropout(self.body(image * scale)))


def batch():
    return torch.randn(4, 6), torch.tensor([0, 4, 2, 1])


def test_value_and_output_equal_network_and_loss():
    net, loss = WithFeatures(Two()).eval(), Gated()
    x, labels = batch()
    task = WithLoss(net, copy.deepcopy(loss))
    value, output = task(x, labels, torch.arange(4))
    assert isinstance(output, Output)
    torch.testing.assert_close(output, net(x))
    torch.testing.assert_close(value, loss(*net(x)[:1], labels, features=net(x).features, index=torch.arange(4)))
    torch.testing.assert_close(task(x, labels, index=-torch.ones(4))[0], torch.tensor(0.0))
    assert task.net is net


def test_a_plain_network_is_wrapped():
    task = WithLoss(Two(), Gated())
    assert isinstance(task.net, WithFeatures)
    assert {name.split(".")[0] for name in task.state_dict()} == {"net", "loss"}
    with pytest.raises(ValueError, match="Flatten"):
        WithLoss(nn.Flatten(), Gated())


def test_a_loss_without_features_raises_in_the_constructor():
    """Regression: the first step failed with an unexpected keyword argument of CrossEntropyLoss.forward."""
    with pytest.raises(TypeError, match=r'CrossEntropyLoss.*fedlas\.build_loss\("ce"\)'):
        WithLoss(Two(), nn.CrossEntropyLoss())
    x, labels = batch()
    value, output = WithLoss(Two(), build_loss("ce"))(x, labels)
    torch.testing.assert_close(value, functional.cross_entropy(output.logits, labels))
    WithLoss(Two(), torch.compile(build_loss("ce")))


@pytest.mark.parametrize("container", [dict, UserDict, tuple, list], ids=lambda kind: kind.__name__)
def test_inputs_are_unpacked(container):
    task = WithLoss(Two().eval(), Gated())
    x, labels = batch()
    packed = container([("image", x), ("scale", 2.0)]) if container in (dict, UserDict) else container([x, 2.0])
    torch.testing.assert_close(task(packed, labels)[1], task(2 * x, labels)[1])


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_with_loss_compiles_in_one_graph_without_recompilation(training):
    torch.compiler.reset()
    task = WithLoss(Two(), Gated()).train(training)
    task_copy = copy.deepcopy(task)
    compiled = torch.compile(task_copy, fullgraph=True, backend="aot_eager")
    x, labels = batch()
    for step in range(3):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            torch.manual_seed(step)
            expected, _ = task({"image": x}, labels, index=labels)
            torch.manual_seed(step)
            value, output = compiled({"image": x}, labels, index=labels)
        assert isinstance(output, Output)
        torch.testing.assert_close(value, expected)
        value.backward()
        expected.backward()
    for parameter, expected_parameter in zip(task_copy.parameters(), task.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_parameter.grad)


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["eager", "compiled"])
@pytest.mark.parametrize("find_unused", [False, True])
def test_distributed_data_parallel_sees_network_and_loss(find_unused, compiled):
    torch.compiler.reset()
    task = WithLoss(Two(), Gated())
    task_copy = copy.deepcopy(task)
    parallel = DistributedDataParallel(task_copy, find_unused_parameters=find_unused)
    if compiled:
        parallel = torch.compile(parallel, backend="aot_eager")
    x, labels = batch()
    for step in range(2):
        torch.manual_seed(step)
        expected, _ = task(x, labels)
        torch.manual_seed(step)
        value, output = parallel(x, labels)
        torch.testing.assert_close(value, expected)
        assert output.features.shape == (4, 8)
        value.backward()
        expected.backward()
    for parameter, expected_parameter in zip(task_copy.parameters(), task.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_parameter.grad)
    torch.testing.assert_close(task_copy.loss.norm, task.loss.norm)


@pytest.mark.usefixtures("one_process")
def test_with_features_alone_works_in_distributed_data_parallel():
    net = WithFeatures(Two())
    logits, features = DistributedDataParallel(net)(torch.randn(4, 6))
    (logits.sum() + features.sum()).backward()
    assert all(p.grad is not None for p in net.parameters())
