"""AdaFocal between epochs: bins and gammas from validation predictions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlas
from fedlas import Predictions
from losses import plain


def build(**options: Any) -> Any:
    return fedlas.build_loss("adafocal", num_classes=4, **options).double()


def validation(n: int = 75, scale: float = 2.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, 4, dtype=torch.float64, generator=generator)
    return logits, torch.randint(4, (n,), generator=generator)


def assert_equal(values: Tensor, expected: list[float]) -> None:
    assert values.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_initial_gammas_and_edges() -> None:
    loss = build()
    gammas, edges = plain.adafocal_start()
    assert_equal(loss.gammas, gammas)
    assert_equal(loss.edges, edges)
    assert_equal(build(bins=4, gamma=-0.5).gammas, [-0.5] * 4)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_three_epochs_equal_plain_loops(bins: int) -> None:
    """Three epochs of gammas and edges, fewer samples than bins included."""
    for n in (1, 2, 14, 15, 40, 75):
        loss, gammas = build(bins=bins), [1.0] * bins
        for epoch in range(3):
            logits, labels = validation(n, seed=epoch)
            loss.end_epoch(Predictions(logits, labels))
            gammas, edges = plain.adafocal_update(gammas, logits.tolist(), labels.tolist())
            assert_equal(loss.gammas, gammas)
            assert_equal(loss.edges, edges)
            train_logits, train_labels = validation(20, seed=100 + epoch)
            value = loss(train_logits, train_labels).item()
            assert value == pytest.approx(plain.adafocal(train_logits.tolist(), train_labels.tolist(), gammas, edges))


def test_tied_confidences_share_a_bin() -> None:
    """Equal confidences share the first bin whose upper edge reaches them; the following bins are empty."""
    rows = [[0.0, 0.0, 0.0, 0.0]] * 10 + [[40.0, 0.0, 0.0, 0.0]] * 50 + [[1.0, 0.0, 0.0, 0.0]] * 15
    labels = [0, 1] * 30 + [0] * 15
    loss = build(bins=5)
    loss.end_epoch(Predictions(torch.tensor(rows, dtype=torch.float64), torch.tensor(labels)))
    gammas, edges = plain.adafocal_update([1.0] * 5, rows, labels)
    assert_equal(loss.gammas, gammas)
    assert_equal(loss.edges, edges)
    assert edges[2:] == [1.0] * 4
    # Bin 1 holds the 50 saturated samples, half of them correct: the gap is 1/2. Bins 2 to 4 are empty, their gap is 0.
    # Bin 0 holds the 15 samples in the middle; the least confident ones are in no bin.
    middle = math.exp(1) / (math.exp(1) + 3)
    assert_equal(loss.gammas, [math.exp(middle - 1), math.exp(0.5), 1.0, 1.0, 1.0])


def test_bins_use_confidence_and_samples_the_probability_of_their_label() -> None:
    loss = build(bins=2)
    loss.edges.copy_(torch.tensor([0.0, 0.5, 1.0]))
    loss.gammas.copy_(torch.tensor([2.0, -1.0]))
    confident_and_wrong = torch.tensor([[3.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    p = confident_and_wrong.softmax(1)[0]
    assert p[0] > 0.5 > p[1]
    assert loss(confident_and_wrong, torch.tensor([1])).item() == pytest.approx(((1 - p[1]) ** 2 * -p[1].log()).item())
    assert loss(confident_and_wrong, torch.tensor([0])).item() == pytest.approx(((1 + p[0]) * -p[0].log()).item())


def test_a_probability_on_an_edge_belongs_to_the_bin_above() -> None:
    loss = fedlas.build_loss("adafocal", bins=2)
    loss.gammas.copy_(torch.tensor([2.0, -1.0]))
    assert loss.edges[1] == 0.5
    value = loss(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0]))
    assert value.item() == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize(
    ("gamma", "gap", "expected"),
    [
        (1.0, 0.0, 1.0),
        (1.0, 0.5, math.exp(0.5)),
        (1.0, -0.5, math.exp(-0.5)),
        (1.0, -2.0, -0.2),  # below the switch: turns negative
        (-1.0, 0.5, -math.exp(-0.5)),
        (-1.0, 2.0, 0.2),  # and back
        (-1.0, -1.0, -2.0),  # the lower limit
        (10.0, 1.0, 20.0),  # the upper limit
        (0.0, 0.3, 0.2),
    ],
)
def test_update_of_one_bin(gamma: float, gap: float, expected: float) -> None:
    loss = build(bins=1, gamma=gamma)
    loss.update(torch.tensor([gap]).double())
    assert loss.gammas.item() == pytest.approx(expected, rel=1e-14)
    assert plain.adafocal_next([gamma], [gap]) == pytest.approx([expected], rel=1e-14)


def test_switch_is_applied_in_float64() -> None:
    """A switch of 0.2 once became the float32 nearest to it, in gammas that are kept in float64."""
    loss = build(bins=2)
    loss.update(torch.tensor([-3.0, -3.0]).double())
    assert loss.gammas.tolist() == [-0.2, -0.2]


def test_step_limits_and_switch_are_configurable() -> None:
    options = {"step": 0.5, "switch": 0.7, "gamma_min": -1.0, "gamma_max": 1.5}
    loss = build(bins=15, **options)
    logits, labels = validation(60)
    loss.end_epoch(Predictions(logits, labels))
    loss.end_epoch(Predictions(logits, labels))
    gammas = [1.0] * 15
    for _ in range(2):
        gammas, _ = plain.adafocal_update(gammas, logits.tolist(), labels.tolist(), **options)
    assert_equal(loss.gammas, gammas)
