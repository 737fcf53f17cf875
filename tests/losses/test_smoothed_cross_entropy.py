"""`smoothed_cross_entropy`: torch's label smoothing with one alpha per sample."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedlas import smoothed_cross_entropy

WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 1.3], dtype=torch.float64)
REDUCTIONS = ["mean", "sum", "none"]


def batch(*extent: int) -> tuple[Tensor, Tensor]:
    return 3 * torch.randn(12, 5, *extent, dtype=torch.float64), torch.randint(5, (12, *extent))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["", "weight"])
def test_scalar_alpha_equals_torch_label_smoothing(reduction: str, weight: Tensor | None) -> None:
    for alpha, extent in itertools.product([0.0, 0.05, 0.3, 1.0], [(), (3,), (2, 4)]):
        logits, labels = batch(*extent)
        labels[3] = -100
        fedlas_logits, torch_logits = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        value = smoothed_cross_entropy(fedlas_logits, labels, alpha, weight=weight, reduction=reduction)
        expected = functional.cross_entropy(
            torch_logits, labels, weight=weight, label_smoothing=alpha, reduction=reduction
        )
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        value.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(fedlas_logits.grad, torch_logits.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["", "weight"])
@pytest.mark.parametrize("extent", [(), (3,)], ids=str)
def test_tensor_alpha_is_applied_per_label(weight: Tensor | None, extent: tuple[int, ...]) -> None:
    logits, labels = batch(*extent)
    alpha = torch.rand(labels.shape, dtype=torch.float64)
    losses = smoothed_cross_entropy(logits, labels, alpha, weight=weight, reduction="none")
    assert losses.shape == labels.shape
    rows, flat = logits.movedim(1, -1).reshape(-1, 5), labels.flatten()
    for row, label, a, value in zip(rows, flat, alpha.flatten(), losses.flatten(), strict=True):
        expected = functional.cross_entropy(
            row[None], label[None], weight=weight, label_smoothing=a.item(), reduction="sum"
        )
        assert value.item() == pytest.approx(expected.item())
    label_weights = 1 if weight is None else weight[labels]
    mean = smoothed_cross_entropy(logits, labels, alpha, weight=weight)
    assert mean.item() == pytest.approx(
        (losses.sum() / (labels.numel() if weight is None else label_weights.sum())).item()
    )
    assert smoothed_cross_entropy(logits, labels, alpha, weight=weight, reduction="sum").item() == pytest.approx(
        losses.sum().item()
    )


def test_ignored_samples_are_excluded() -> None:
    logits, labels = batch()
    alpha = torch.rand(12, dtype=torch.float64)
    valid = torch.arange(12) % 3 > 0
    partly_ignored = torch.where(valid, labels, 7)
    partly_nan_logits = torch.where(valid[:, None], logits, math.nan).requires_grad_()
    partly_nan_alpha = torch.where(valid, alpha, math.nan).requires_grad_()
    value = smoothed_cross_entropy(partly_nan_logits, partly_ignored, partly_nan_alpha, ignore_index=7)
    assert value.item() == pytest.approx(smoothed_cross_entropy(logits[valid], labels[valid], alpha[valid]).item())
    value.backward()
    assert partly_nan_logits.grad is not None
    assert not partly_nan_logits.grad[~valid].any()
    assert partly_nan_alpha.grad is not None
    assert not partly_nan_alpha.grad[~valid].any()


def test_loss_of_only_ignored_samples_is_zero() -> None:
    logits, labels = batch()
    logits.requires_grad_()
    value = smoothed_cross_entropy(logits, torch.full_like(labels, -100), 0.1)
    value.backward()
    assert value.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
    assert smoothed_cross_entropy(logits[:0], labels[:0], 0.1).item() == 0


def test_alpha_has_a_gradient() -> None:
    """dL/dalpha_i = (E_i - CE_i) / n."""
    logits, labels = batch()
    alpha = torch.rand(12, dtype=torch.float64, requires_grad=True)
    smoothed_cross_entropy(logits, labels, alpha).backward()
    log_probs = logits.log_softmax(1)
    expected = (log_probs.gather(1, labels[:, None]).squeeze(1) - log_probs.mean(1)) / 12
    torch.testing.assert_close(alpha.grad, expected)
    assert torch.autograd.gradcheck(
        lambda x, a: smoothed_cross_entropy(x, labels, a, weight=WEIGHT), (logits.requires_grad_(), alpha)
    )


def test_alpha_may_be_a_scalar_tensor() -> None:
    logits, labels = batch()
    alpha = torch.tensor(0.2, requires_grad=True)
    value = smoothed_cross_entropy(logits, labels, alpha)
    assert value.item() == pytest.approx(smoothed_cross_entropy(logits, labels, 0.2).item(), rel=1e-6)
    value.backward()
    assert alpha.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    logits, labels = batch()
    low_precision = logits.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = smoothed_cross_entropy(low_precision, labels, torch.full((12,), 0.1, dtype=dtype))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(smoothed_cross_entropy(low_precision.double(), labels, 0.1).item(), rel=1e-2)


def test_invalid_arguments_raise() -> None:
    logits, labels = batch()
    with pytest.raises(ValueError, match=r"alpha.*\(12,\).*\(5,\)"):
        smoothed_cross_entropy(logits, labels, torch.rand(5))
    with pytest.raises(ValueError, match=r"alpha.*\(12,\).*\(12, 1\)"):
        smoothed_cross_entropy(logits, labels, torch.rand(12, 1))
    with pytest.raises(ValueError, match="label 5 "):
        smoothed_cross_entropy(logits, labels.clone().fill_(5), 0.1)
    with pytest.raises(ValueError, match=r"labels.*\(12,\).*\(5,\)"):
        smoothed_cross_entropy(logits, labels[:5], 0.1)
    with pytest.raises(ValueError, match=r"weight.*3.*5 classes"):
        smoothed_cross_entropy(logits, labels, 0.1, weight=torch.ones(3))
    with pytest.raises(ValueError, match=r"soft labels.*row 0"):
        smoothed_cross_entropy(logits, logits, 0.1)
    with pytest.raises(ValueError, match=r"ignore_index.*soft labels"):
        smoothed_cross_entropy(logits, logits.softmax(1), 0.1, ignore_index=3)
    with pytest.raises((ValueError, TypeError), match="reduction"):
        smoothed_cross_entropy(logits, labels, 0.1, reduction="median")
