"""Losses with past predictions as targets, `closed_loop` and `pskd`: the table, the strengths, the feedback."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlas
from fedlas import Predictions
from fedlas.losses.base import loss as base_loss
from losses import plain

LABELS = torch.tensor([0, 1, 2, 0])
INDEX = torch.tensor([5, 0, 2, 3])
BOTH = ["closed_loop", "pskd"]


def build(name: str, num_samples: int = 6, **options: Any) -> Any:
    if name == "pskd":
        options.setdefault("epochs", 4)
    return fedlas.build_loss(name, num_classes=3, num_samples=num_samples, **options).double()


def logits_of(step: int) -> Tensor:
    return 2 * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def distilled(logits: Tensor, labels: Tensor, alphas: list[float], targets: list[list[float]]) -> float:
    """Compute the mean of (1 - a) CE + a CE(target, p) in plain Python."""
    total = 0.0
    for row, label, alpha, target in zip(logits.tolist(), labels.tolist(), alphas, targets, strict=True):
        log_probs = plain.log_softmax(row)
        past = -sum(prob * log_prob for prob, log_prob in zip(target, log_probs, strict=True))
        total += (1 - alpha) * -log_probs[label] + alpha * past
    return total / len(labels)


def held_out(confidences: list[float], correct: list[bool], features: Tensor | None = None) -> Predictions:
    """Make predictions of class 0 of three classes with given confidences."""
    probs = torch.tensor([[c, (1 - c) / 2, (1 - c) / 2] for c in confidences], dtype=torch.float64)
    return Predictions(probs.log(), torch.tensor([0 if c else 1 for c in correct]), features=features)


# The table of past predictions


@pytest.mark.parametrize("indicator", ["none", "confidence"])
def test_closed_loop_reads_the_previous_prediction_and_then_replaces_it(indicator: str) -> None:
    loss = build("closed_loop", indicator=indicator, start=0.3, step=0.0)
    table = [[1 / 3] * 3 for _ in range(6)]
    for step in range(3):
        logits, index = logits_of(step), INDEX.roll(step)
        expected = distilled(logits, LABELS, [0.3] * 4, [table[i] for i in index.tolist()])
        assert loss(logits, LABELS, index=index).item() == pytest.approx(expected, rel=1e-6)
        for i, row in zip(index.tolist(), logits.tolist(), strict=True):
            table[i] = plain.softmax(row)
        torch.testing.assert_close(loss.past, torch.tensor(table))
        loss.end_epoch(held_out([0.6, 0.7], [True, False]))


@pytest.mark.parametrize(("schedule", "alphas"), [("linear", [0.2, 0.4, 0.6, 0.8, 0.8]), ("constant", [0.8] * 5)])
def test_pskd_schedules(schedule: str, alphas: list[float]) -> None:
    """A sample without a past prediction has its label alone; the linear schedule ends at its final value."""
    loss = build("pskd", schedule=schedule)
    first = loss(logits_of(0), LABELS, index=INDEX).item()
    assert first == pytest.approx(plain.ce(logits_of(0).tolist(), LABELS.tolist()))
    loss.end_epoch()
    for epoch, alpha in enumerate(alphas[1:], start=1):
        targets = [plain.softmax(row) for row in logits_of(epoch - 1).tolist()]
        expected = distilled(logits_of(epoch), LABELS, [alpha] * 4, targets)
        assert loss(logits_of(epoch), LABELS, index=INDEX).item() == pytest.approx(expected, rel=1e-6)
        loss.end_epoch()
    assert loss.finished_epochs == 5


@pytest.mark.parametrize("name", BOTH)
def test_no_gradient_flows_through_the_target(name: str) -> None:
    loss = build(name)
    loss(logits_of(0), LABELS, index=INDEX)
    logits = logits_of(1).requires_grad_()
    alpha = 0.2 if name == "closed_loop" else 0.8 / 4
    loss(logits, LABELS, index=INDEX).backward()
    target = (1 - alpha) * torch.eye(3)[LABELS] + alpha * logits_of(0).softmax(1)
    torch.testing.assert_close(logits.grad, (logits_of(1).softmax(1) - target) / 4, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", BOTH)
def test_ignored_samples_and_predictions_that_are_not_finite_do_not_change_the_table(name: str) -> None:
    loss = build(name)
    before = loss.past.clone()
    labels, logits = LABELS.clone(), logits_of(0)
    labels[1] = -100
    logits[2] = math.nan
    loss(logits, labels, index=INDEX)
    changed = (loss.past != before).any(1)
    assert changed.tolist() == [False, False, False, True, False, True]


@pytest.mark.parametrize("name", BOTH)
def test_the_last_usable_prediction_of_a_repeated_sample_is_stored(name: str) -> None:
    loss = build(name)
    labels = LABELS.clone()
    labels[3] = -100
    loss(logits_of(0), labels, index=torch.tensor([4, 4, 1, 1]))
    torch.testing.assert_close(loss.past[[4, 1]], logits_of(0).softmax(1)[[1, 2]].float())


@pytest.mark.parametrize("invalid_index", [-1, 6])
@pytest.mark.parametrize("name", BOTH)
def test_out_of_range_index_raises_even_without_value_checks(name: str, invalid_index: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(base_loss, "checked_index", lambda index, _: index)
    loss = build(name)
    before = loss.past.clone()
    with pytest.raises((IndexError, RuntimeError), match=r"index"):
        loss(logits_of(0), LABELS, index=torch.tensor([0, 1, invalid_index, 2]))
    assert torch.equal(loss.past, before)


@pytest.mark.parametrize("name", BOTH)
def test_a_class_with_a_logit_of_minus_infinity_gives_no_nan(name: str) -> None:
    loss = build(name)
    for step in range(2):
        logits = logits_of(step)
        logits[:, 2] = -math.inf
        value = loss(logits, LABELS % 2, index=INDEX)
    assert value.isfinite()


@pytest.mark.parametrize("name", BOTH)
def test_eval_mode_equals_cross_entropy(name: str) -> None:
    loss = build(name)
    loss(logits_of(0), LABELS, index=INDEX)
    value = loss.eval()(logits_of(1), LABELS)
    assert value.item() == pytest.approx(plain.ce(logits_of(1).tolist(), LABELS.tolist()))


@pytest.mark.parametrize("name", BOTH)
def test_class_weights_act_on_the_soft_target(name: str) -> None:
    """As `F.cross_entropy` with probabilities as labels, divided by the weights of the hard labels."""
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    options = {"start": 0.3} if name == "closed_loop" else {"schedule": "constant", "alpha": 0.3}
    loss = build(name, weight=weight, **options)
    loss(logits_of(0), LABELS, index=INDEX)
    target = 0.7 * torch.eye(3, dtype=torch.float64)[LABELS] + 0.3 * logits_of(0).softmax(1)
    total = nn.functional.cross_entropy(logits_of(1), target, weight=weight, reduction="sum")
    expected = total / weight[LABELS].sum()
    torch.testing.assert_close(loss(logits_of(1), LABELS, index=INDEX), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", BOTH)
def test_a_bfloat16_table_has_normalised_targets(name: str) -> None:
    options = {"epochs": 4, "schedule": "constant"} if name == "pskd" else {}
    loss, exact = build(name, table_dtype="bfloat16", **options), build(name, **options)
    for tolerance in (1e-7, 2e-3):  # a uniform row is exact in any type once it is normalised
        value, expected = (criterion(logits_of(0), LABELS, index=INDEX) for criterion in (loss, exact))
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casting_the_loss_does_not_cast_the_table(dtype: torch.dtype) -> None:
    loss = build("pskd", table_dtype=str(dtype).removeprefix("torch."))
    loss(logits_of(0), LABELS, index=INDEX)
    before = loss.past.clone()
    for cast in (nn.Module.double, nn.Module.half, nn.Module.bfloat16, lambda m: m.type(torch.float64)):
        cast(nn.ModuleList([loss]))
        assert loss.past.dtype == dtype
        assert torch.equal(loss.past, before)
    assert loss.to("meta").past.is_meta


@pytest.mark.parametrize("name", BOTH)
def test_table_that_does_not_fit_in_memory_raises_with_its_size(name: str) -> None:
    options = {"epochs": 4} if name == "pskd" else {}
    with pytest.raises(MemoryError, match=rf"{name}.*400,000\.0 GB.*table_dtype='bfloat16'"):
        fedlas.build_loss(name, num_classes=10**5, num_samples=10**9, **options)


def test_failed_move_to_a_device_has_a_note_about_the_table() -> None:
    def fail(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError) as error_info:
        build("pskd")._apply(fail)
    assert "6 x 3" in error_info.value.__notes__[0]


def test_ddp_does_not_broadcast_the_table() -> None:
    """With all other buffers it would be sent in every step; all ranks write the same rows."""
    task = fedlas.WithLoss(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3)), build("pskd"))
    names = dict(task.named_buffers())
    assert set(task._ddp_params_and_buffers_to_ignore) == {"loss.past"} < names.keys()


# Feedback from held-out data


def test_feedback_moves_each_bin_by_its_gap() -> None:
    """Two bins of two samples each: over-confident by 0.85, under-confident by 0.35."""
    loss = build("closed_loop", bins=2, step=0.4, start=0.2)
    loss.end_epoch(held_out([0.6, 0.7, 0.8, 0.9], [True, True, False, False]))
    torch.testing.assert_close(loss.gaps, torch.tensor([-0.35, 0.85], dtype=torch.float64))
    torch.testing.assert_close(loss.alphas, torch.tensor([0.06, 0.54], dtype=torch.float64))
    assert loss.edges[1].item() == pytest.approx(0.7)
    loss.end_epoch(held_out([0.6, 0.7, 0.8, 0.9], [True, True, False, False]))
    torch.testing.assert_close(loss.alphas, torch.tensor([0.0, 0.88], dtype=torch.float64))  # limited below
    loss.end_epoch(held_out([0.6, 0.7, 0.8, 0.9], [True, True, False, False]))
    torch.testing.assert_close(loss.alphas, torch.tensor([0.0, 0.9], dtype=torch.float64))  # limited above


def test_an_empty_bin_keeps_its_strength() -> None:
    loss = build("closed_loop", bins=3, start=0.2)
    loss.end_epoch(held_out([0.8, 0.8, 0.8], [True, False, False]))  # equal confidences share a bin
    torch.testing.assert_close(loss.alphas.sort().values[:2], torch.tensor([0.2, 0.2], dtype=torch.float64))


def test_without_an_indicator_all_samples_share_one_strength() -> None:
    loss = build("closed_loop", indicator="none", bins=7, step=1.0, start=0.2)
    loss.end_epoch(held_out([0.6, 0.7, 0.8, 0.9], [True, True, False, False]))
    torch.testing.assert_close(loss.alphas, torch.tensor([0.2 + 0.25], dtype=torch.float64))


@pytest.mark.parametrize("indicator", ["confidence", "norm"])
def test_a_sample_has_the_strength_of_its_bin(indicator: str) -> None:
    loss = build("closed_loop", indicator=indicator, bins=2)
    loss.alphas.copy_(torch.tensor([0.1, 0.7]))
    loss.edges.copy_(torch.tensor([0.0, 0.6 if indicator == "confidence" else 3.0, 9.0]))
    logits = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.1, 0.0, 0.0], [0.0, 9.0, 0.0]], dtype=torch.float64)
    features = torch.tensor([[-1.0, 1.0], [-3.0, 3.0], [1.0, -2.0], [2.0, 4.0]])  # a norm on the edge is below it
    expected = distilled(logits, LABELS, [0.1, 0.7, 0.1, 0.7], [[1 / 3] * 3] * 4)
    assert loss(logits, LABELS, features, INDEX).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("as_norms", [True, False])
def test_the_norm_is_that_of_the_validation_features(as_norms: bool) -> None:
    """Features, or their norms as one column, which the training engine stores."""
    features = torch.tensor([[-4.0, 5.0], [1.0, 0.0], [-1.0, 1.0], [3.0, 2.0]])
    features = features.abs().sum(1, keepdim=True) if as_norms else features
    loss = build("closed_loop", indicator="norm", bins=2, step=1.0)
    loss.end_epoch(held_out([0.6, 0.7, 0.8, 0.9], [True, True, False, False], features))
    assert loss.edges.tolist() == [1, 2, 9]
    torch.testing.assert_close(loss.gaps, torch.tensor([(0.7 + 0.8 - 1) / 2, (0.6 + 0.9 - 1) / 2]).double())


def test_the_norm_indicator_requires_validation_features() -> None:
    loss = build("closed_loop", indicator="norm")
    with pytest.raises(ValueError, match=r"closed_loop.*norm.*features="):
        loss.end_epoch(held_out([0.6, 0.7], [True, False]))


@pytest.mark.parametrize("training", [True, False])
def test_the_uniform_target_is_label_smoothing(training: bool) -> None:
    weight = torch.tensor([1.0, 2.0, 0.5])
    loss = build("closed_loop", target="uniform", start=0.25, weight=weight).train(training)
    assert "past" not in loss.state_dict()
    expected = fedlas.build_loss("ls", alpha=0.25, weight=weight)(logits_of(0), LABELS)
    torch.testing.assert_close(loss(logits_of(0), LABELS), expected)


@pytest.mark.parametrize("name", BOTH)
def test_a_compiled_backward_pass_uses_the_rows_from_before_the_update(name: str) -> None:
    """The partitioner of Inductor may recompute what it does not save; reading the table again gives the new rows."""
    eager, compiled = build(name), build(name)
    step = torch.compile(compiled, fullgraph=True, backend="aot_eager_decomp_partition")
    for number in range(2):
        compiled_logits, eager_logits = logits_of(number).requires_grad_(), logits_of(number).requires_grad_()
        step(compiled_logits, LABELS, index=INDEX).backward()
        eager(eager_logits, LABELS, index=INDEX).backward()
        torch.testing.assert_close(compiled_logits.grad, eager_logits.grad)
    assert torch.equal(compiled.past, eager.past)


# Ablations


def test_recorded_strengths_replace_feedback() -> None:
    """Each epoch has its own, the last ones stay, and a saved state continues at the right epoch."""
    replay = [{"strengths": [0.1 * epoch, 0.2 * epoch], "edges": [0.0, 0.5 + 0.1 * epoch, 1.0]} for epoch in range(3)]
    loss = build("closed_loop", bins=2, replay=replay)
    assert not loss.needs_validation
    for epoch in (0, 1, 2, 2):
        torch.testing.assert_close(loss.alphas, torch.tensor(replay[epoch]["strengths"], dtype=torch.float64))
        torch.testing.assert_close(loss.edges, torch.tensor(replay[epoch]["edges"], dtype=torch.float64))
        restored = build("closed_loop", bins=2, replay=replay)
        restored.load_state_dict(loss.state_dict())
        for criterion in (loss, restored):
            criterion(logits_of(epoch), LABELS, index=INDEX)
            criterion.end_epoch()
        assert restored.alphas.tolist() == loss.alphas.tolist()
    assert "3 epochs" in repr(loss)
    for invalid_replay in ([], [{"strengths": [0.1], "edges": [0.0, 1.0]}], [{"strengths": [0.1, 0.2]}]):
        with pytest.raises(ValueError, match="replay"):
            build("closed_loop", bins=2, replay=invalid_replay)


def test_without_a_target_samples_are_only_weighted() -> None:
    loss = build("closed_loop", target="none", start=0.3)
    logits = logits_of(0)
    expected = nn.functional.cross_entropy(logits, LABELS)
    torch.testing.assert_close(loss(logits, LABELS), 0.7 * expected)
    torch.testing.assert_close(loss.eval()(logits, LABELS), expected)
