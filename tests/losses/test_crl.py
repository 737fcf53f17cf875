"""CRL over epochs: the history of each sample, the counter of epochs, the pairs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fedlas
from losses import plain

CORRECT = torch.tensor([[4.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0])
WRONG = CORRECT.roll(1, 1)


def build(num_samples: int = 4, **options: Any) -> Any:
    return fedlas.build_loss("crl", num_classes=3, num_samples=num_samples, **options).double()


def rows(*correct: bool) -> Tensor:
    """Logits whose predictions are correct for the given samples."""
    return torch.where(torch.tensor(correct)[:, None], CORRECT, WRONG)


def test_correct_counts_are_stored_by_index() -> None:
    loss = build(num_samples=6)
    loss(rows(True, False, True, False), LABELS, index=torch.tensor([5, 0, 2, 3]))
    assert loss.correct_epochs.tolist() == [0, 0, 1, 0, 0, 1]
    loss(rows(True, True, True, True), LABELS, index=torch.tensor([0, 1, 2, 3]))
    assert loss.correct_epochs.tolist() == [1, 1, 2, 1, 0, 1]


def test_ignored_samples_are_neither_counted_nor_ranked() -> None:
    loss = build(num_samples=5)
    loss.correct_epochs.copy_(torch.tensor([0, 2, 1, 2, 0]))
    loss.finished_epochs.fill_(2)
    logits, index = rows(True, True, True, True), torch.arange(4)
    labels = LABELS.clone()
    labels[1] = -100
    valid = [0, 2, 3]
    expected = plain.crl(
        logits[valid].tolist(), labels[valid].tolist(), counts=[0.0, 1.0, 2.0], smallest=0, epochs=2, rank_weight=1.0
    )
    assert loss(logits, labels, index=index).item() == pytest.approx(expected, rel=1e-7)
    assert loss.correct_epochs.tolist() == [1, 2, 2, 3, 0]


def test_normaliser_is_one_in_the_first_two_epochs() -> None:
    """During epoch e the normaliser K is max(1, e - 1)."""
    loss = build()
    history = [0.0, 0.0, 0.0, 0.0]
    correct_per_epoch = [(True, True, False, True), (True, False, False, True), (True, True, True, False), (True,) * 4]
    for epoch, correct_samples in enumerate(correct_per_epoch, start=1):
        normaliser = max(1, epoch - 1)
        logits = rows(*correct_samples)
        # Every epoch has one batch here, so the table at its start is what the ranking sees.
        expected = plain.crl(
            logits.tolist(), LABELS.tolist(), counts=history, smallest=min(history), epochs=normaliser, rank_weight=1.0
        )
        assert loss(logits, LABELS, index=torch.arange(4)).item() == pytest.approx(expected, rel=1e-7)
        history = [count + is_correct for count, is_correct in zip(history, correct_samples, strict=True)]
        assert loss.correct_epochs.tolist() == history
        loss.end_epoch()
        assert loss.finished_epochs == epoch


def test_correct_counts_are_updated_after_the_ranking_term() -> None:
    loss = build()
    loss.finished_epochs.fill_(1)
    loss(rows(True, False, True, False), LABELS, index=torch.arange(4))
    assert loss.last_terms["ranking"] == 0
    loss(rows(True, False, True, False), LABELS, index=torch.arange(4))
    assert loss.last_terms["ranking"] > 0


def test_ranking_is_zero_if_all_samples_are_always_correct() -> None:
    """k = K everywhere, where the published code divides 0 by 0."""
    loss = build()
    for _ in range(3):
        value = loss(CORRECT, LABELS, index=torch.arange(4))
        assert value.item() == pytest.approx(plain.ce(CORRECT.tolist(), LABELS.tolist()))
        loss.end_epoch()


@pytest.mark.parametrize("training", [True, False])
def test_eval_mode_has_no_ranking_term(training: bool) -> None:
    """A validation sample has no history; its position in the validation split must not be used as an index."""
    loss = build(rank_weight=100.0).train(training)
    loss.correct_epochs.copy_(torch.tensor([3, 0, 1, 2]))
    loss.finished_epochs.fill_(3)
    with torch.set_grad_enabled(not training):
        value = loss(CORRECT, LABELS, index=torch.arange(4))
    assert value.item() == pytest.approx(plain.ce(CORRECT.tolist(), LABELS.tolist()))
    assert loss.last_terms["ranking"] == 0
    assert loss.correct_epochs.tolist() == [3, 0, 1, 2]
