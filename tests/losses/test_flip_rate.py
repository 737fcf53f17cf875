"""Gate fractions and flip rate, in cases that can be counted by hand."""

import math
from typing import Any

import pytest
import torch

import fedlas
from fedlas import GateHistory
from losses import plain


def update(history: GateHistory, states: dict[int, float]) -> None:
    history.update(torch.tensor(list(states), dtype=torch.int64), torch.tensor(list(states.values())))


def test_epoch_statistics_have_gate_fractions() -> None:
    history = GateHistory(10)
    update(history, {0: 1.0, 3: -1.0})
    update(history, {9: 1.0, 1: 1.0})
    epoch = history.end_epoch()
    assert (epoch.positive, epoch.negative, epoch.seen) == (0.75, 0.25, 4)
    assert math.isnan(epoch.flip_rate)  # nothing to compare with yet
    assert history.epochs == [epoch]


def test_flip_rate_counts_samples_seen_in_both_epochs() -> None:
    history = GateHistory(6)
    first = {0: 1.0, 1: 1.0, 2: -1.0, 3: -1.0, 4: 1.0}
    second = {0: 1.0, 1: -1.0, 2: 1.0, 3: -1.0, 5: 1.0}  # 4 is skipped, 5 is new
    update(history, first)
    history.end_epoch()
    update(history, second)
    epoch = history.end_epoch()
    assert epoch.flip_rate == 0.5
    assert epoch.flip_rate == plain.flip_rate(first, second)
    assert (epoch.positive, epoch.negative) == plain.state_shares(second) == (0.6, 0.4)
    assert epoch.seen == 5


def test_flip_rate_excludes_samples_skipped_in_the_previous_epoch() -> None:
    history = GateHistory(2)
    for states in ({0: 1.0, 1: 1.0}, {0: 1.0}, {0: -1.0, 1: -1.0}):
        update(history, states)
        last = history.end_epoch()
    assert last.flip_rate == 1.0  # sample 0 alone; sample 1 was not there an epoch ago
    assert last.seen == 2


def test_the_latest_state_of_an_epoch_counts() -> None:
    history = GateHistory(3)
    update(history, {1: 1.0})
    update(history, {1: -1.0})
    epoch = history.end_epoch()
    assert (epoch.positive, epoch.negative, epoch.seen) == (0.0, 1.0, 1)


def test_epoch_without_samples_gives_nan() -> None:
    history = GateHistory(3)
    update(history, {1: 1.0})
    history.end_epoch()
    empty = history.end_epoch()
    assert empty.seen == 0
    assert all(math.isnan(fraction) for fraction in (empty.positive, empty.negative, empty.flip_rate))
    update(history, {1: -1.0})
    assert math.isnan(history.end_epoch().flip_rate)


def test_only_psi_above_zero_counts_as_positive() -> None:
    """psi can be 0 under preset="official" and anything between -1 and 1 in the soft gate; the state is a sign."""
    history = GateHistory(4)
    update(history, {0: 0.0, 1: 0.3, 2: -0.3, 3: 1.0})
    epoch = history.end_epoch()
    assert (epoch.positive, epoch.negative) == (0.5, 0.5)


def test_random_epochs_equal_the_plain_count() -> None:
    history, previous = GateHistory(50), {}
    for number in range(4):
        index = torch.randperm(50)[: 40 + number]
        psi = torch.randint(2, index.shape) * 2.0 - 1
        history.update(index[:20], psi[:20])
        history.update(index[20:], psi[20:])
        epoch = history.end_epoch()
        current = dict(zip(index.tolist(), psi.tolist(), strict=True))
        assert (epoch.positive, epoch.negative) == pytest.approx(plain.state_shares(current))
        if previous:
            assert epoch.flip_rate == pytest.approx(plain.flip_rate(previous, current))
        previous = current


def test_update_accepts_psi_of_the_loss() -> None:
    loss: Any = fedlas.build_loss("fedlas_ls", num_classes=3)
    history = GateHistory(8)
    loss(torch.randn(8, 3), torch.randint(3, (8,)), torch.randn(8, 4))
    history.update(torch.arange(8), loss.psi)
    epoch = history.end_epoch()
    assert epoch.positive == pytest.approx((loss.psi > 0).double().mean().item())


def test_state_dict_round_trip_in_the_middle_of_an_epoch() -> None:
    history, restored = GateHistory(4), GateHistory(4)
    update(history, {0: 1.0, 1: -1.0, 2: 1.0})
    history.end_epoch()
    update(history, {0: -1.0})
    restored.load_state_dict(history.state_dict())
    assert restored.epochs[0].seen == 3
    for copy in (history, restored):
        update(copy, {1: -1.0, 3: 1.0})
    epoch, restored_epoch = history.end_epoch(), restored.end_epoch()
    assert epoch == restored_epoch
    assert (epoch.flip_rate, epoch.seen) == (0.5, 3)


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"num_samples.*0"):
        GateHistory(0)
    history = GateHistory(4)
    with pytest.raises((ValueError, TypeError)):  # TypeError: the shape checks of the tests come first
        history.update(torch.arange(3), torch.ones(2))
    for index in (4, -1):
        with pytest.raises(ValueError, match=rf"index.*{index}.*\b4 samples"):
            update(history, {index: 1.0})
    with pytest.raises(RuntimeError, match="size mismatch"):
        GateHistory(5).load_state_dict(history.state_dict())


def test_ignored_samples_are_skipped() -> None:
    loss = fedlas.build_loss("fedlas_ls", num_classes=3)
    labels = torch.tensor([0, -100, 2, -100])
    loss(torch.randn(4, 3), labels, torch.rand(4, 5))
    history = GateHistory(4)
    history.update(torch.arange(4), loss.psi)
    assert history.end_epoch().seen == 2
