"""Every loss compiles once, as one graph, and equals the uncompiled loss."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import fedlas

CLASSES, SAMPLES, ROWS = 7, 40, 16
KEYWORDS = {record.name: record.keywords for record in fedlas.list_losses()}
NAMES = list(KEYWORDS)
FAST = {"fedlas_ls", "crl"}  # a gate and a table of samples; all others are in the campaigns


def campaign_except(values: list[str], fast: set[str]) -> list[Any]:
    return [value if value in fast else pytest.param(value, marks=pytest.mark.campaign) for value in values]


@pytest.fixture(autouse=True)
def one_graph() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def build(name: str, **options: Any) -> Any:
    sizes = {"num_samples": SAMPLES, "epochs": 5}
    options |= {option: size for option, size in sizes.items() if option in KEYWORDS[name]}
    torch.manual_seed(0)
    return fedlas.build_loss(name, num_classes=CLASSES, **options)


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    labels[step] = -100
    return {
        "logits": 3 * torch.randn(ROWS, CLASSES, generator=generator),
        "labels": labels,
        "features": torch.rand(ROWS, 5, generator=generator),
        "index": torch.randperm(SAMPLES, generator=generator)[:ROWS],
    }


def compiled(loss: torch.nn.Module) -> Any:
    return torch.compile(loss, fullgraph=True, backend="aot_eager")


@cache
def trained(name: str) -> tuple[Any, Any]:
    """Train a loss compiled and uncompiled for three steps, assert that they are equal, and return both."""
    eager, traced = build(name), build(name)
    step = compiled(traced)
    for number in range(3):
        compiled_batch, eager_batch = batch(number), batch(number)
        compiled_batch["logits"].requires_grad_()
        eager_batch["logits"].requires_grad_()
        value, expected = step(**compiled_batch), eager(**eager_batch)
        value.backward()
        expected.backward()
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(compiled_batch["logits"].grad, eager_batch["logits"].grad)
    return eager, traced


@pytest.mark.parametrize("name", campaign_except(NAMES, FAST))
def test_compiled_training_equals_eager(name: str) -> None:
    eager, traced = trained(name)
    for (key, state), expected_state in zip(traced.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(state, expected_state, msg=lambda m, key=key: f"{key}: {m}")
    for parameter, expected_parameter in zip(traced.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_parameter.grad)


@pytest.mark.parametrize("name", campaign_except(["fedlas_ls", "fedlas_mbls"], FAST))
def test_diagnostics_are_readable_after_a_compiled_step(name: str) -> None:
    eager, loss = trained(name)
    for kind in ("psi", "gamma", "alpha_i"):
        assert not getattr(loss, kind).requires_grad
        torch.testing.assert_close(getattr(loss, kind), getattr(eager, kind), equal_nan=True)
        assert getattr(loss, kind).isnan().nonzero().tolist() == [[2]], "only the ignored sample has none"


@pytest.mark.parametrize("gate", campaign_except(["soft", "shuffled", "positive", "negative"], set()))
def test_every_gate_compiles(gate: str) -> None:
    loss = build("fedlas_ls", gate=gate)
    assert compiled(loss)(**batch(0)).isfinite()


def test_checks_raise_inside_a_compiled_graph() -> None:
    loss = build("crl")
    wrong_label, wrong_index = batch(0), batch(0)
    wrong_label["labels"][3] = CLASSES
    wrong_index["index"][3] = SAMPLES
    with fedlas.checks(True):
        step = compiled(loss)
        assert step(**batch(0)).isfinite()
        with pytest.raises(ValueError, match=f"label {CLASSES} "):
            step(**wrong_label)
        with pytest.raises(ValueError, match=f"index {SAMPLES} "):
            step(**wrong_index)


@pytest.mark.parametrize(
    "name", campaign_except([name for name in NAMES if build(name).takes_soft_labels], {"fedlas_mbls"})
)
def test_soft_labels_can_be_compiled(name: str) -> None:
    data = batch(0)
    data["labels"] = torch.randn(ROWS, CLASSES).softmax(1)
    torch.testing.assert_close(compiled(build(name))(**data), build(name)(**data))


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore::UserWarning")  # reasons of Inductor, which differ between versions
@pytest.mark.parametrize("classes", [5, 7])
def test_compiled_dual_focal_excludes_the_label(classes: int) -> None:
    """Inductor computes a probability twice with another last digit; dual_focal must not take p_t for p_j."""
    loss = fedlas.build_loss("dual_focal", num_classes=classes, reduction="none")
    logits, labels = 3 * torch.randn(1024, classes), torch.randint(0, classes, (1024,))
    torch.testing.assert_close(torch.compile(loss, fullgraph=True)(logits, labels), loss(logits, labels))


@pytest.mark.parametrize("name", campaign_except(["ce", "fedlas_ls"], {"ce"}))
def test_compiled_loss_of_an_out_of_range_label_is_not_zero(name: str) -> None:
    """Compiled code checks labels only on request, but the loss of an invalid label must not be zero."""
    data = batch(1)
    data["labels"][3] = CLASSES
    assert compiled(build(name))(**data).isnan()


def test_smoothed_cross_entropy_compiles_with_class_weights() -> None:
    logits, labels, weight = torch.randn(8, 3), torch.arange(8) % 3, torch.tensor([1.0, 2.0, 0.5])
    step = torch.compile(fedlas.smoothed_cross_entropy, fullgraph=True, backend="aot_eager")
    expected = fedlas.smoothed_cross_entropy(logits, labels, 0.1, weight=weight)
    torch.testing.assert_close(step(logits, labels, 0.1, weight=weight), expected)
