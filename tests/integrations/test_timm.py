"""A timm network trains with fedlas losses in the tasks of timm, and its checkpoints include the loss."""

import copy
from typing import Any

import digit_batches
import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fedlas
from start_method import START_METHOD

# timm takes seconds to import, so it is imported in the functions that use it.


def network() -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model("test_resnet", in_chans=1, num_classes=10)


def calibration_task(net: nn.Module, loss: nn.Module) -> Any:
    from fedlas.integrations.timm import CalibrationTask

    return CalibrationTask(net, loss, verbose=False)


def build_task(loss: str = "fedlas_ls", **options: Any) -> Any:
    return calibration_task(network(), fedlas.build_loss(loss, num_classes=10, **options))


def images(x: Tensor) -> Tensor:
    return x.reshape(-1, 1, 8, 8)


def optimizer_of(task: Any) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(task.get_trainable_module(), opt="adamw", lr=1e-2, weight_decay=0.01)


def epoch_of(
    task: Any, optimizer: torch.optim.Optimizer, epoch: int, mixup: Any = None, steps: int | None = None
) -> list[float]:
    """Train for an epoch, or some steps of it, as timm's script does, and return the loss of each step."""
    task.train()
    values = []
    for x, labels, _ in digit_batches.batches(epoch)[:steps]:
        batch = images(x), labels
        result = task(*(batch if mixup is None else mixup(images(x).clone(), labels)))
        optimizer.zero_grad()
        result["loss"].backward()
        torch.nn.utils.clip_grad_norm_(task.get_clip_parameters(), 2.0)
        optimizer.step()
        task.update_ema()
        values.append(float(result["loss"].detach()))
    return values


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    x, labels = digit_batches.validation()
    return float((model.eval()(images(x)).argmax(1) == labels).float().mean())


@pytest.mark.parametrize(
    ("loss", "mixed"),
    [
        ("fedlas_ls", True),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in [("fedlas_ls", False), ("fedlas_mbls", False), ("fedlas_mbls", True)]
        ),
    ],
)
def test_network_and_gate_train(loss, mixed):
    from timm.data import Mixup

    np.random.seed(0)  # noqa: NPY002  # timm's mixup uses the global generator, which is not seeded elsewhere
    task = build_task(loss)
    optimizer = optimizer_of(task)
    gate = {name: p.detach().clone() for name, p in task.joined.loss.named_parameters()}
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=0.0, num_classes=10, label_smoothing=0.0) if mixed else None
    values = [epoch_of(task, optimizer, epoch, mixup) for epoch in range(2)]
    assert sum(values[-1]) < 0.8 * sum(values[0])
    # Chance is 0.1. With mixup, two epochs gave 0.52 to 0.83 with other seeds, too near to 0.6 for another machine.
    assert accuracy(task.get_eval_model()) > (0.4 if mixed else 0.6)
    for name, parameter in task.joined.loss.named_parameters():
        assert not torch.equal(parameter, gate[name]), f"{name} has not moved"


def test_step_loss_equals_loss_of_network_outputs():
    task, loss = build_task(), fedlas.build_loss("fedlas_ls", num_classes=10)
    loss.load_state_dict(task.joined.loss.state_dict())
    x, labels, _ = digit_batches.batches(0)[0]
    net = fedlas.WithFeatures(network())
    logits, features = net(images(x))
    expected = loss(logits, labels, features)
    expected.backward()
    result = task(images(x), labels)
    result["loss"].backward()
    assert torch.equal(result["loss"], expected)
    assert torch.equal(result["output"], logits)
    assert torch.equal(result["classification"], expected.detach())
    for parameter, expected_parameter in zip(task.joined.net.parameters(), net.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected_parameter.grad)


def test_checkpoints_hold_network_loss_and_averages(tmp_path):
    from timm.task import resume_task_checkpoint
    from timm.utils import CheckpointSaver

    task = build_task()
    task.setup_ema(decay=0.9)
    optimizer = optimizer_of(task)
    epoch_of(task, optimizer, 0, steps=3)
    saver = CheckpointSaver(task.get_eval_model(), optimizer, task=task, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0)
    checkpoint = torch.load(tmp_path / "last.pth.tar", weights_only=True)
    assert checkpoint["state_dict"].keys() == network().state_dict().keys()  # any program of timm can read it

    torch.manual_seed(1)
    resumed = build_task()
    resumed.setup_ema(decay=0.9)
    resumed_optimizer = optimizer_of(resumed)
    assert resume_task_checkpoint(resumed, str(tmp_path / "last.pth.tar"), resumed_optimizer, log_info=False) == 1
    resumed.load_checkpoint_state(checkpoint["state_dict_ema"], checkpoint["task_state_ema"], ema=True)
    assert_equal_states(resumed, task)
    assert not torch.equal(task.joined.loss.smoothing.nci.mean, torch.tensor(20.0).double())
    assert epoch_of(task, optimizer, 1, steps=3) == epoch_of(resumed, resumed_optimizer, 1, steps=3)
    assert_equal_states(resumed, task)


def assert_equal_states(first: Any, second: Any) -> None:
    for ema in (False, True):
        state, expected_state = (task.get_trainable_module(ema=ema).state_dict() for task in (first, second))
        assert state.keys() == expected_state.keys()
        for name, value in state.items():
            torch.testing.assert_close(
                value, expected_state[name], rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}"
            )


def test_averages_are_those_of_network_and_gate():
    task = build_task()
    averages = task.setup_ema(decay=0.5)
    before = {name: value.clone() for name, value in averages.module.state_dict().items()}
    epoch_of(task, optimizer_of(task), 0, steps=3)
    moved = [name for name, value in averages.module.state_dict().items() if not torch.equal(value, before[name])]
    assert {"loss.smoothing.bcg.fc_in.weight", "loss.smoothing.nci.mean", "net.model.fc.weight"} <= {*moved}
    assert task.get_eval_model(ema=True) is averages.module.net.model


def test_a_compiled_task_computes_the_same():
    torch._dynamo.reset()
    x, labels, _ = digit_batches.batches(0)[0]
    torch.manual_seed(0)
    model, loss = digit_batches.network(), fedlas.build_loss("fedlas_ls", num_classes=10)
    eager, compiled = calibration_task(copy.deepcopy(model), copy.deepcopy(loss)), calibration_task(model, loss)
    validated = compiled.compile(backend="eager", fullgraph=True)
    assert compiled.get_eval_model() is validated
    for _ in range(2):
        first, second = eager(x, labels), compiled(x, labels)
        second["loss"].backward()
        torch.testing.assert_close(first, second)
    torch.testing.assert_close(validated(x), second["output"])
    state = compiled.get_checkpoint_state()
    assert state["state_dict"].keys() == digit_batches.network().state_dict().keys()
    torch.testing.assert_close(state["task_state"], eager.get_task_state())


def task_without_batch_norm() -> Any:
    """Return a task without batch norm, whose statistics would differ between processes."""
    torch.manual_seed(0)
    return calibration_task(digit_batches.network(), fedlas.build_loss("fedlas_ls", num_classes=10))


def steps(task: Any, rank: int = 0, world: int = 1) -> list[Tensor]:
    """Train on this process's part of every batch, as timm's script does."""
    optimizer = torch.optim.SGD(task.get_trainable_module().parameters(), lr=0.1, momentum=0.9)
    values = []
    for x, labels, _ in digit_batches.batches(0)[:6]:
        rows = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
        value = task(x[rows], labels[rows])["loss"]
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(task.get_clip_parameters(), 2.0)
        optimizer.step()
        values.append(value.detach())
    return values


def train_as_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    task = task_without_batch_norm().prepare_distributed()
    assert isinstance(task.trainable_module, nn.parallel.DistributedDataParallel)
    values = steps(task, rank, 2)
    state = task.get_checkpoint_state()
    torch.save({"values": values, **{part: state[part] for part in ("state_dict", "task_state")}}, f"{folder}/{rank}")
    with task.no_sync():
        assert task(digit_batches.training()[0][:4], torch.arange(4))["loss"].requires_grad
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_processes_equal_one(tmp_path):
    mp.start_processes(train_as_rank, args=(str(tmp_path),), nprocs=2, start_method=START_METHOD)
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    reference = task_without_batch_norm()
    start = {name: value.clone() for name, value in reference.get_task_state()["loss"].items()}
    values = steps(reference)
    mean = (torch.stack(first["values"]) + torch.stack(second["values"])) / 2
    torch.testing.assert_close(mean, torch.stack(values), rtol=1e-4, atol=1e-5)
    state = reference.get_checkpoint_state()
    for first_state, second_state, expected in (
        (first["state_dict"], second["state_dict"], state["state_dict"]),
        (first["task_state"]["loss"], second["task_state"]["loss"], state["task_state"]["loss"]),
    ):
        assert first_state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(first_state[name], second_state[name]), name
            torch.testing.assert_close(
                first_state[name], value, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert not torch.equal(
        start["smoothing.bcg.fc_in.weight"], first["task_state"]["loss"]["smoothing.bcg.fc_in.weight"]
    )


def test_losses_without_features_are_plain_criteria():
    from timm.task import ClassificationTask

    task = ClassificationTask(network(), fedlas.build_loss("mbls", num_classes=10), verbose=False)
    optimizer = optimizer_of(task)
    values = epoch_of(task, optimizer, 0)
    assert sum(values[-4:]) < sum(values[:4])


def test_losses_with_index_are_updated_between_epochs():
    task = build_task("crl", num_samples=digit_batches.TRAINING)
    for x, labels, index in digit_batches.batches(0)[:3]:
        task(images(x), labels, index)["loss"].backward()
    before = {name: value.clone() for name, value in task.get_task_state()["loss"].items()}
    task.end_epoch()
    assert any(not torch.equal(value, before[name]) for name, value in task.get_task_state()["loss"].items())


def test_the_head_of_the_network_is_left_out_of_clipping_on_request():
    task = build_task()
    all_parameters, without_head = task.get_clip_parameters(), task.get_clip_parameters(exclude_head=True)
    head = {id(p) for p in task.joined.net.model.fc.parameters()}
    assert {id(p) for p in all_parameters} - {id(p) for p in without_head} == head
