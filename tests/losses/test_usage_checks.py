"""Incomplete training loops warn once; correct loops never warn."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlas
from fedlas.losses.base import usage_checks

CLASSES, WIDTH, SAMPLES = 3, 4, 8
LOSSES = [record.name for record in fedlas.list_losses()]
GATED = ["fedlas_ls", "fedlas_mbls"]


def build(name: str) -> Any:
    sizes = {"num_classes": CLASSES, "num_samples": SAMPLES, "epochs": 5}
    known = {record.name: record.keywords for record in fedlas.list_losses()}[name]
    return fedlas.build_loss(name, **{option: size for option, size in sizes.items() if option in known})


def network() -> fedlas.WithFeatures:
    return fedlas.WithFeatures(nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)))


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return one epoch of two batches."""
    x, labels, index = torch.randn(SAMPLES, 5), torch.arange(SAMPLES) % CLASSES, torch.arange(SAMPLES)
    return [(x[rows], labels[rows], index[rows]) for rows in (slice(0, 4), slice(4, 8))]


def step(net: Any, loss: Any, optimizer: torch.optim.Optimizer, batch: Any, with_index: bool = True) -> None:
    x, labels, index = batch
    logits, features = net(x)
    optimizer.zero_grad()
    loss(logits, labels, features, index if with_index or loss.needs_index else None).backward()
    optimizer.step()


def train(net: Any, loss: Any, optimizer: torch.optim.Optimizer, epochs: int, with_index: bool = True) -> None:
    """Train without reporting the ends of epochs."""
    for _ in range(epochs):
        for batch in batches():
            step(net, loss, optimizer, batch, with_index)


def validate(net: Any, loss: Any) -> fedlas.Predictions:
    """Validate with the loss in evaluation mode."""
    net.eval()
    loss.eval()
    with torch.no_grad():
        logits, features = net(torch.randn(20, 5))
        labels = torch.arange(20) % CLASSES
        loss(logits, labels, features)
    net.train()
    loss.train()
    return fedlas.Predictions(logits, labels)


def optimizer_of(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(fedlas.parameters(*modules), lr=0.01)


@pytest.mark.parametrize("name", LOSSES)
def test_a_correct_loop_does_not_warn(name):
    net, loss = network(), build(name)
    optimizer = optimizer_of(net, loss)
    for _ in range(60):
        for batch in batches():
            step(net, loss, optimizer, batch)
        loss.end_epoch(validate(net, loss))


def test_parameters_lists_each_parameter_of_network_and_loss_once():
    net, loss = network(), build("fedlas_ls")
    listed = fedlas.parameters(net, loss)
    assert [id(p) for p in listed] == [id(p) for p in (*net.parameters(), *loss.parameters())]
    assert len(fedlas.parameters(net, loss, net, loss)) == len(listed)


# Parameters of the loss that are in no optimizer


@pytest.mark.parametrize("name", GATED)
def test_a_gate_that_is_not_in_the_optimizer_warns_once(name):
    net, loss = network(), build(name)
    with pytest.warns(UserWarning, match=rf"{name}.*fedlas\.parameters\(net, loss\)") as warning_records:
        train(net, loss, optimizer_of(net), epochs=usage_checks.STEPS_WITHOUT_UPDATE)  # of two steps
    assert len(warning_records) == 1


def test_a_gate_that_is_not_in_the_optimizer_warns_at_the_end_of_an_epoch():
    net, loss = network(), build("fedlas_ls")
    train(net, loss, optimizer_of(net), epochs=1)
    loss.end_epoch()
    train(net, loss, optimizer_of(net), epochs=1)
    with pytest.warns(UserWarning, match="optimizer") as warning_records:
        loss.end_epoch()
    assert "src/fedlas" not in warning_records[0].filename  # the warning names the caller


def test_accumulated_gradients_fused_updates_and_cleared_gradients_are_not_mistaken():
    """Regression: accumulation gave false warnings, and gradients cleared by the module gave none."""
    net, loss = network(), build("fedlas_ls")
    optimizer = optimizer_of(net, loss)
    for number in range(usage_checks.STEPS_WITHOUT_UPDATE + 20):
        x, labels, _ = batches()[0]
        logits, features = net(x)
        loss(logits, labels, features).backward()
        if number % 128 == 127:
            optimizer.step()
            optimizer.zero_grad()
    net, loss = network(), build("fedlas_ls")
    optimizer = torch.optim.AdamW(fedlas.parameters(net, loss), fused=True)
    train(net, loss, optimizer, epochs=usage_checks.STEPS_WITHOUT_UPDATE)
    assert loss._update_check.finished
    net, loss = network(), build("fedlas_ls")
    optimizer = optimizer_of(net)

    def clear_and_step() -> None:
        net.zero_grad()
        loss.zero_grad()
        step(net, loss, optimizer, batches()[0])

    for _ in range(usage_checks.STEPS_WITHOUT_UPDATE):
        clear_and_step()
    with pytest.warns(UserWarning, match="optimizer"):
        clear_and_step()


def test_a_compiled_loss_warns_at_the_end_of_an_epoch():
    loss = build("fedlas_ls")
    loss.compile(fullgraph=True, backend="eager")
    logits, labels, features = (
        torch.randn(4, CLASSES).requires_grad_(),
        torch.arange(4) % CLASSES,
        torch.randn(4, WIDTH),
    )
    loss(logits, labels, features).backward()
    loss.end_epoch()
    loss(logits, labels, features).backward()
    with pytest.warns(UserWarning, match="optimizer"):
        loss.end_epoch()


def test_a_frozen_gate_and_updates_that_torch_does_not_see_do_not_warn(monkeypatch):
    monkeypatch.setattr(usage_checks, "STEPS_WITHOUT_UPDATE", 3)
    net, frozen, custom = network(), build("fedlas_ls").requires_grad_(False), build("fedlas_ls")
    for _ in range(6):
        step(net, frozen, optimizer_of(net), batches()[0])
        step(net, custom, optimizer_of(net), batches()[0])
        for parameter in custom.parameters():
            parameter.data.add_(0.1)  # as a custom kernel does, without a new version


# Ends of epochs that are not reported


@pytest.mark.parametrize("name", ["crl", "adafocal", "closed_loop", "pskd"])
def test_repeated_samples_without_the_end_of_an_epoch_warn_once(name):
    net, loss = network(), build(name)
    optimizer = optimizer_of(net, loss)
    train(net, loss, optimizer, epochs=2)
    with pytest.warns(UserWarning, match=rf"{name}.*3 times.*loss\.end_epoch\(") as warning_records:
        train(net, loss, optimizer, epochs=3)
    assert len(warning_records) == 1


def test_evaluations_without_the_end_of_an_epoch_warn():
    """Without indices, the switch from training to evaluation shows that epochs pass."""
    net, loss = network(), build("adafocal")
    optimizer = optimizer_of(net, loss)

    def epoch() -> None:
        train(net, loss, optimizer, epochs=1, with_index=False)
        validate(net, loss)

    for _ in range(usage_checks.EVALUATIONS_WITHOUT_END - 1):
        epoch()
    with pytest.warns(UserWarning, match=r"adafocal.*30 evaluations.*validation="):
        epoch()


@pytest.mark.parametrize(("steps", "warns"), [(10, True), (2, False)])
def test_a_smaller_last_batch_shows_the_end_of_an_epoch(steps, warns):
    """Without indices and evaluations; alternating sizes are the parts of a batch."""
    loss = build("adafocal")

    def epoch() -> None:
        for rows in [4] * (steps - 1) + [3]:
            loss(torch.randn(rows, CLASSES).requires_grad_(), torch.arange(rows) % CLASSES).backward()

    for _ in range(2):
        epoch()
    with pytest.warns(UserWarning, match=r"adafocal.*10 steps.*validation=") if warns else nullcontext():
        epoch()


def test_samples_drawn_with_replacement_are_not_taken_for_epochs():
    loss = fedlas.build_loss("crl", num_samples=200)
    for _ in range(10):  # more than an epoch of 200 samples, a few of which are drawn far more often than the others
        index = torch.where(torch.rand(32) < 0.5, torch.randint(3, (32,)), torch.randint(200, (32,)))
        loss(torch.randn(32, CLASSES).requires_grad_(), torch.arange(32) % CLASSES, index=index).backward()
    assert not loss._epoch_check.finished


def test_samples_counted_more_often_than_there_were_epochs_warn():
    loss = build("crl")
    logits, labels, index = 5 * torch.eye(CLASSES), torch.arange(CLASSES), torch.arange(CLASSES)
    loss(logits, labels, index=index)
    loss.end_epoch()
    for _ in range(3):
        loss(logits, labels, index=index)
    with pytest.warns(UserWarning, match=r"crl.*4 times in 2 epochs"):
        loss.end_epoch()


def test_probabilities_given_as_logits_warn_in_the_first_step():
    loss, logits, labels = build("focal"), torch.randn(40, CLASSES), torch.arange(40) % CLASSES
    with pytest.warns(UserWarning, match="softmax"):
        loss(logits.softmax(1), labels)
    loss(logits.softmax(1), labels)
    build("focal")(logits, labels)


# What a loss declares


def test_losses_declare_what_they_need_between_epochs():
    records = {record.name: record.cls for record in fedlas.list_losses()}
    assert [name for name, cls in records.items() if cls.needs_validation] == ["adafocal", "closed_loop"]
    assert [name for name, cls in records.items() if cls.learns_between_epochs] == [
        "adafocal",
        "closed_loop",
        "crl",
        "pskd",
    ]
