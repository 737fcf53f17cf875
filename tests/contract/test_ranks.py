"""Two processes with half of the batch each equal one process with all of it, for every loss."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fedlas
from fedlas import ranks
from fedlas.training.distributed import FUNCTIONAL
from start_method import START_METHOD

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CLASSES, SAMPLES, STEPS = 5, 12, 3
KEYWORDS = {record.name: record.keywords for record in fedlas.list_losses()}
NAMES = list(KEYWORDS)
WRAPPED, MODEL_ONLY, COMPILED, SUM = "network and loss wrapped", "only the network wrapped", "loss compiled", "sum"
COLLECTIVES = ("fedlas_ls", "crl", "mmce", "mdca", "closed_loop")  # every kind of collective
Cases = tuple[tuple[str, str], ...]
FAST: Cases = (*((name, WRAPPED) for name in NAMES), ("fedlas_ls", MODEL_ONLY), ("fedlas_ls", SUM))
ALL = [(name, mode) for name in NAMES for mode in (WRAPPED, MODEL_ONLY, SUM)]
CAMPAIGN: Cases = (*(case for case in ALL if case not in FAST), *((name, COMPILED) for name in COLLECTIVES))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double()


def build(name: str, reduction: str = "mean") -> nn.Module:
    sizes = {"num_samples": SAMPLES, "epochs": 5}
    options: dict[str, Any] = {option: size for option, size in sizes.items() if option in KEYWORDS[name]}
    weight = [1.0, 2.0, 0.5, 1.0, 3.0]
    return fedlas.build_loss(name, num_classes=CLASSES, weight=weight, reduction=reduction, **options).double()


def step_data(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator) * 3
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    labels[[0, 1, 8]] = -100  # two ignored in the first half, one in the second
    return x, labels, torch.randperm(SAMPLES, generator=generator)


def forward_of(net: nn.Module, loss: nn.Module, mode: str) -> Callable[..., Tensor]:
    """Combine network and loss in one of the common ways."""
    if mode in (MODEL_ONLY, COMPILED):
        loss_function = torch.compile(loss, fullgraph=True, backend="aot_eager") if mode == COMPILED else loss
        wrapped = DistributedDataParallel(fedlas.WithFeatures(net))

        def forward(x: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            logits, features = wrapped(x)
            return loss_function(logits, labels, features, index)

        return forward
    task: nn.Module = fedlas.WithLoss(net, loss)
    if mode != "one process":
        task = DistributedDataParallel(task)
    return lambda *batch: task(*batch)[0]


def train(name: str, mode: str, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Train a few steps on this rank's part of every batch; return values, gradients and final state."""
    torch.manual_seed(0)
    net, loss = network(), build(name, "sum" if mode == SUM else "mean")
    if rank and mode == MODEL_ONLY:  # different seeds give each rank another gate
        for parameter in loss.parameters():
            nn.init.normal_(parameter)
    forward = forward_of(net, loss, mode if world > 1 else "one process")
    parameters = [*net.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    rows = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    values, gradients = [], []
    for step in range(STEPS):
        if step == 1:
            loss.end_epoch(fedlas.Predictions(logits=torch.eye(CLASSES) * 3, labels=torch.arange(CLASSES) // 2))
        optimizer.zero_grad()
        value = forward(*(part[rows] for part in step_data(step)))
        value.backward()
        values.append(value.detach())
        gradients.append([parameter.grad.clone() for parameter in parameters])
        optimizer.step()
    return {"values": values, "gradients": gradients, "net": net.state_dict(), "loss": loss.state_dict()}


def evaluate(name: str) -> Tensor:
    """Compute the loss in eval mode, as validation on one rank does."""
    torch.manual_seed(0)
    x, labels, index = step_data(0)
    return fedlas.WithLoss(network(), build(name)).eval()(x, labels, index)[0].detach()


def uneven(name: str, rank: int) -> Tensor | str:
    """Compute the loss of one third of the batch on rank 0 and two thirds on rank 1."""
    torch.manual_seed(0)
    rows = slice(0, 4) if rank == 0 else slice(4, SAMPLES)
    try:
        return fedlas.WithLoss(network(), build(name))(*(part[rows] for part in step_data(0)))[0].detach()
    except ValueError as error:
        return str(error)


def work(rank: int, world: int, folder: str, cases: Cases) -> None:
    torch.set_num_threads(1)
    importlib.import_module(FUNCTIONAL)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ranks.functional = ranks._gather = None  # over gloo they abort the process, see docs/reliability.md
    results: dict[Any, Any] = {(name, mode): train(name, mode, rank, world) for name, mode in cases}
    results["uneven"] = {name: uneven(name, rank) for name in NAMES}
    if rank == 0:
        results["eval"] = {name: evaluate(name) for name in NAMES}
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cases], list[dict[Any, Any]]]:
    """Return a function that trains cases on two processes and returns the results of both, each group once."""

    @cache
    def run(cases: Cases) -> list[dict[Any, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        mp.start_processes(
            work, args=(2, str(folder), cases), nprocs=2, start_method="spawn" if cases is CAMPAIGN else START_METHOD
        )
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]

    return run


@pytest.mark.parametrize(
    ("name", "mode"), [*FAST, *(pytest.param(*case, marks=pytest.mark.campaign) for case in CAMPAIGN)]
)
def test_two_processes_equal_one(two_ranks: Any, name: str, mode: str) -> None:
    single_process = train(name, mode)
    first, second = (results[name, mode] for results in two_ranks(FAST if (name, mode) in FAST else CAMPAIGN))
    for step in range(STEPS):
        mean = (first["values"][step] + second["values"][step]) / 2
        torch.testing.assert_close(mean, single_process["values"][step])
        for first_gradient, second_gradient, expected in zip(
            *(r["gradients"][step] for r in (first, second, single_process)), strict=True
        ):
            torch.testing.assert_close((first_gradient + second_gradient) / 2, expected)
    for part in ("net", "loss"):
        for key, expected in single_process[part].items():
            torch.testing.assert_close(first[part][key], expected, msg=lambda m, key=key: f"{key}: {m}")
            assert torch.equal(first[part][key], second[part][key]), f"{key} differs between ranks"


def test_gpu_tensors_use_the_collectives_of_torch() -> None:
    """Use meta tensors and a fake process group: only the collectives and their shapes are checked."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        x = torch.empty(4, 2, device="meta")
        result = [ranks.total(x), ranks.stacked(x), ranks.joined(x), ranks.own(ranks.joined(x))]
        assert [tuple(item.shape) for item in result] == [(4, 2), (3, 4, 2), (12, 2), (4, 2)]
    finally:
        dist.destroy_process_group()


def test_eval_mode_uses_no_collectives(two_ranks: Any) -> None:
    """Validation on rank 0 alone must not hang and uses only its own samples."""
    for name, value in two_ranks(FAST)[0]["eval"].items():
        torch.testing.assert_close(value, evaluate(name))


@pytest.mark.parametrize("name", NAMES)
def test_uneven_ranks_are_exact_or_raise(two_ranks: Any, name: str) -> None:
    """A loss that needs only sums accepts uneven batches; one that gathers the batch raises."""
    first, second = (results["uneven"][name] for results in two_ranks(FAST))
    if isinstance(first, str):
        assert first == second
        assert "[4, 8]" in first
        return
    torch.manual_seed(0)
    single_process, _ = fedlas.WithLoss(network(), build(name))(*step_data(0))
    torch.testing.assert_close((first + second) / 2, single_process.detach())
