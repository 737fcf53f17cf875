"""FeDLaS in custom training loops: mixed precision with a scaler, accumulation, averaged weights, sharded parameters.

Compiled steps and DistributedDataParallel are tested with every loss in `tests/contract`.
"""

import copy
from pathlib import Path
from typing import Any

import digit_batches
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fedlas
from start_method import START_METHOD

LOSSES = ["fedlas_ls", "fedlas_mbls"]
STEPS = 6


def net_and_loss(name: str = "fedlas_ls", **options: Any) -> tuple[fedlas.WithFeatures, Any]:
    torch.manual_seed(0)
    return fedlas.WithFeatures(digit_batches.network()), fedlas.build_loss(name, num_classes=10, **options)


def optimizer_of(net: nn.Module, loss: nn.Module, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": net.parameters()}, {"params": loss.parameters()}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, **options)


def accuracy(net: nn.Module) -> float:
    x, labels = digit_batches.validation()
    with torch.no_grad():
        return float((net(x).logits.argmax(1) == labels).float().mean())


@pytest.mark.parametrize("name", LOSSES)
def test_mixed_precision_with_a_scaler(name):
    """Network and gate learn in bfloat16 with a scaler, and unscaled gradients equal those without one."""
    net, loss = net_and_loss(name)
    optimizer, scaler = optimizer_of(net, loss), torch.amp.GradScaler("cpu", init_scale=1024.0)
    gate = copy.deepcopy(loss.smoothing.bcg.state_dict())
    for epoch in range(3):
        for x, labels, _ in digit_batches.batches(epoch):
            with torch.autocast("cpu", torch.bfloat16):
                logits, features = net(x)
                value = loss(logits, labels, features)
            assert (logits.dtype, features.dtype, value.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
            optimizer.zero_grad()
            parameters = [*net.parameters(), *loss.parameters()]
            expected_gradients = torch.autograd.grad(value, parameters, retain_graph=True)
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            for parameter, expected in zip(parameters, expected_gradients, strict=True):
                torch.testing.assert_close(parameter.grad, expected, rtol=0.02, atol=1e-4)
            scaler.step(optimizer)
            scaler.update()
    assert accuracy(net) > 0.8
    for key, value in loss.smoothing.bcg.state_dict().items():
        assert not torch.equal(value, gate[key]), f"{key} has not moved"


@pytest.mark.parametrize("name", LOSSES)
def test_accumulated_parts_equal_the_whole_batch(name):
    """Parts are weighted by their size. A tiny theta fixes mu and sigma, which otherwise differ between parts."""
    (reference_net, reference_loss), (net, loss) = net_and_loss(name, theta=1e-12), net_and_loss(name, theta=1e-12)
    x, labels, _ = digit_batches.batches(0)[0]
    logits, features = reference_net(x)
    reference_loss(logits, labels, features).backward()
    for rows in torch.arange(len(x)).split([5, 30, 15]):
        logits, features = net(x[rows])
        (loss(logits, labels[rows], features) * len(rows) / len(x)).backward()
    parameters = [*net.parameters(), *loss.parameters()]
    reference_parameters = [*reference_net.parameters(), *reference_loss.parameters()]
    for parameter, expected in zip(parameters, reference_parameters, strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
        assert expected.grad.abs().sum() > 0


def test_averaged_weights_of_network_and_loss():
    net, loss = net_and_loss()
    task = fedlas.WithLoss(net, loss)
    averaged = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = optimizer_of(net, loss)
    expected: dict[str, Tensor] = {}
    for epoch in range(3):
        for x, labels, index in digit_batches.batches(epoch):
            optimizer.zero_grad()
            task(x, labels, index)[0].backward()
            optimizer.step()
            averaged.update_parameters(task)
            current_state = {name: value.detach().clone() for name, value in task.state_dict().items()}
            expected = (
                {
                    name: torch.lerp(expected[name], value, 0.1) if value.is_floating_point() else value
                    for name, value in current_state.items()
                }
                if expected
                else current_state
            )
    for name, value in averaged.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")
    assert accuracy(averaged.module.net) > 0.8
    x, labels = digit_batches.validation()
    value, output = averaged.module.eval()(x, labels)  # with its own features, not those of the original
    torch.testing.assert_close(output.logits, averaged.module.net.model[-1](output.features))
    assert torch.isfinite(value)


def steps(net: nn.Module, loss: nn.Module, rank: int = 0, world: int = 1) -> list[Tensor]:
    """Train a few steps on this rank's part of every batch, with the network's gradients clipped."""
    optimizer = optimizer_of(net, loss, foreach=True)
    values = []
    for x, labels, _ in digit_batches.batches(0)[:STEPS]:
        rows = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
        logits, features = net(x[rows])
        value = loss(logits, labels[rows], features)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        values.append(value.detach())
    return values


def shard(rank: int, folder: str) -> None:
    """Train with the network's parameters sharded over two processes and a replica of the loss in each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for name in LOSSES:
        net, loss = net_and_loss(name)
        for layer in (net.model[0], net.model):
            fully_shard(layer, mesh=mesh)
        values = steps(net, loss, rank, 2)
        full_state = {key: value.full_tensor() for key, value in net.model.state_dict().items()}
        results[name] = {"values": values, "net": full_state, "loss": loss.state_dict()}
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_sharded_parameters_equal_one_process(tmp_path: Path):
    """FSDP2 averages the gradients of sharded parameters; the loss averages its own gradients."""
    mp.start_processes(shard, args=(str(tmp_path),), nprocs=2, start_method=START_METHOD)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for name in LOSSES:
        net, loss = net_and_loss(name)
        gate = copy.deepcopy(loss.smoothing.bcg.state_dict())
        values = steps(net, loss)
        mean = (torch.stack(first[name]["values"]) + torch.stack(second[name]["values"])) / 2
        torch.testing.assert_close(mean, torch.stack(values), rtol=1e-4, atol=1e-5)
        for part, expected_state in (("net", net.model.state_dict()), ("loss", loss.state_dict())):
            for key, value in expected_state.items():
                assert torch.equal(first[name][part][key], second[name][part][key]), key
                torch.testing.assert_close(first[name][part][key], value, rtol=1e-3, atol=1e-5)
        assert not torch.equal(loss.smoothing.bcg.fc_in.weight, gate["fc_in.weight"])
