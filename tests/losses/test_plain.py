"""Every loss against the same equation in plain Python loops, values and gradients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlas
from losses import plain

SHAPES = [(1, 2), (1, 5), (2, 3), (3, 2), (7, 5), (16, 12), (40, 10)]
BATCHES = [(seed, *shape) for shape in SHAPES for seed in range(3)]

Plain = Callable[..., float]
STATELESS: list[tuple[str, dict[str, Any], Plain]] = [
    ("ce", {}, plain.ce),
    ("ls", {}, plain.ls),
    ("ls", {"alpha": 0.3}, plain.ls),
    ("ecp", {}, plain.ecp),
    ("ecp", {"alpha": 0.7, "class_reduction": "sum"}, plain.ecp),
    ("mbls", {}, plain.mbls),
    ("mbls", {"lambda_": 0.4, "margin": 1.5}, plain.mbls),
    ("acls", {}, plain.acls),
    ("acls", {"lambda_": 0.3, "lambda_pos": 0.5, "lambda_neg": 2.0, "margin": 0.5}, plain.acls),
    ("focal", {}, plain.focal),
    ("focal", {"gamma": 0.5}, plain.focal),
    ("flsd", {}, plain.flsd),
    ("dual_focal", {}, plain.dual_focal),
    ("dual_focal", {"gamma": 2.3}, plain.dual_focal),
    ("mmce", {}, plain.mmce),
    ("mmce", {"variant": "w", "lambda_": 2.0}, plain.mmce),
    ("mmce", {"variant": "w", "double_normalise": False}, plain.mmce),
    ("mdca", {}, plain.mdca),
    ("mdca", {"base": "focal", "beta": 3.0}, plain.mdca),
    ("mdca", {"base": "focal", "gamma": 2.0}, plain.mdca),
    ("cpc", {}, plain.cpc),
    ("cpc", {"lambda_bdc": 2.0, "lambda_bec": 0.3}, plain.cpc),
]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}".rstrip("-") for name, options, _ in STATELESS]


def batch(seed: int, n: int, classes: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Random logits, and labels that agree with them about half of the time."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * n + classes)
    logits = scale * torch.randn(n, classes, dtype=torch.float64, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    return logits, torch.where(torch.rand(n, generator=generator) < 0.4, logits.argmax(1), labels)


def numerical_gradient(function: Callable[[plain.Rows], float], rows: plain.Rows, step: float = 1e-6) -> Tensor:
    """Central differences of a plain function."""
    gradient = torch.zeros(len(rows), len(rows[0]), dtype=torch.float64)
    for i, row in enumerate(rows):
        for k, value in enumerate(row):
            row[k] = value + step
            value_above = function(rows)
            row[k] = value - step
            gradient[i, k] = (value_above - function(rows)) / (2 * step)
            row[k] = value
    return gradient


def assert_equal(value: Tensor, expected: float, rel: float = 1e-12) -> None:
    assert value.item() == pytest.approx(expected, rel=rel, abs=rel)


def assert_equal_gradient(gradient: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-8)


def gradient_of(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits)[0]


def test_every_published_loss_has_a_plain_version() -> None:
    """All fifteen have a reference implementation; those with state are compared in separate tests."""
    names = {name for name, _, _ in STATELESS} | {"crl", "adafocal", "fedlas_ls", "fedlas_mbls"}
    assert len(names) == 15
    assert names <= {record.name for record in fedlas.list_losses()}


@pytest.mark.parametrize(("name", "options", "function"), STATELESS, ids=IDS)
def test_value_equals_plain_loops(name: str, options: dict[str, Any], function: Plain) -> None:
    for seed, n, classes in BATCHES:
        loss = fedlas.build_loss(name, num_classes=classes, **options)
        logits, labels = batch(seed, n, classes)
        assert_equal(loss(logits, labels), function(logits.tolist(), labels.tolist(), **options), 1e-10)


@pytest.mark.parametrize(("name", "options", "function"), STATELESS, ids=IDS)
def test_gradient_equals_plain_loops(name: str, options: dict[str, Any], function: Plain) -> None:
    logits, labels = batch(7, 6, 4)
    logits.requires_grad_()
    loss = fedlas.build_loss(name, num_classes=4, **options)
    if name == "acls":  # the negative part sees the largest logit as a constant
        options = options | {"frozen_maxima": logits.amax(1).tolist()}
    gradient = gradient_of(loss(logits, labels), logits)
    assert_equal_gradient(
        gradient, numerical_gradient(lambda rows: function(rows, labels.tolist(), **options), logits.tolist())
    )


def test_tied_logits_equal_plain_loops() -> None:
    """Rows with equal entries: several largest logits, no probability strictly below, kernel distances of 0."""
    logits = torch.tensor([[2.0, 2.0, 2.0], [9.0, 9.0, 0.0], [9.0, 9.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 2])
    for name, options, function in STATELESS:
        if name == "dual_focal":
            continue  # its result depends on the last digit of equal probabilities; exact rows below
        loss = fedlas.build_loss(name, num_classes=3, **options)
        assert_equal(loss(logits, labels), function(logits.tolist(), labels.tolist(), **options))
    exact = torch.tensor([[2.0, 2.0, 2.0], [9.0, 9.0, 0.0]], dtype=torch.float64)
    for label in range(3):
        labels = torch.full((2,), label)
        assert_equal(fedlas.build_loss("dual_focal")(exact, labels), plain.dual_focal(exact.tolist(), labels.tolist()))


@pytest.mark.parametrize("p", [0.01, 0.199, 0.201, 0.24, 0.4, 0.6])
def test_flsd_switches_gamma_at_its_threshold(p: float) -> None:
    logits = torch.tensor([[math.log(p), math.log(1 - p)]], dtype=torch.float64)
    expected = (1 - p) ** (5 if p < 0.2 else 3) * -math.log(p)
    assert_equal(fedlas.build_loss("flsd")(logits, torch.tensor([0])), expected)


@pytest.mark.parametrize("variant", ["m", "w"])
def test_mmce_gradient_between_equal_confidences(variant: str) -> None:
    """|a - b| has no slope at 0, so equal confidences have no gradient through the kernel."""
    base, _ = batch(1, 3, 4)
    logits = torch.cat([base, base, base[:1]]).requires_grad_()
    labels = torch.cat([base.argmax(1), base.argmin(1), base[:1].argmax(1)])
    gradient = gradient_of(fedlas.build_loss("mmce", variant=variant, double_normalise=False)(logits, labels), logits)

    conf, prediction = logits.softmax(1).max(1)
    correct = (prediction == labels).double()
    kernel = torch.exp(-(conf[:, None] - conf).abs() / 0.4)
    if variant == "m":
        penalty = ((correct - conf)[:, None] * (correct - conf) * kernel).mean()
    else:
        m, n = correct.sum(), (1 - correct).sum()
        weighted_gap = correct * (1 - conf) / m - (1 - correct) * conf / n
        penalty = ((weighted_gap[:, None] * weighted_gap * kernel).sum() + 1e-10).sqrt()
    expected = gradient_of(torch.nn.functional.cross_entropy(logits, labels) + penalty, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("score", ["softmax", "margin", "entropy"])
def test_crl_value_equals_plain_loops(score: str) -> None:
    for seed, n, classes in BATCHES:
        logits, labels = batch(seed, n, classes)
        generator = torch.Generator().manual_seed(seed)
        loss = fedlas.build_loss("crl", num_classes=classes, num_samples=50, rank_weight=0.7, score=score)
        loss.correct_epochs.copy_(torch.randint(seed, 8, (50,), generator=generator))
        loss.finished_epochs.fill_(7)
        index = torch.randperm(50, generator=generator)[:n]
        history = loss.correct_epochs.tolist()
        expected = plain.crl(
            logits.tolist(),
            labels.tolist(),
            counts=[history[i] for i in index.tolist()],
            smallest=min(history),
            epochs=7,
            rank_weight=0.7,
            score=score,
        )
        assert_equal(loss(logits, labels, index=index), expected, 1e-6)


@pytest.mark.parametrize("score", ["softmax", "margin", "entropy"])
def test_crl_gradient_equals_plain_loops(score: str) -> None:
    logits, labels = batch(3, 6, 4)
    logits.requires_grad_()
    loss = fedlas.build_loss("crl", num_classes=4, num_samples=6, rank_weight=2.0, score=score)
    counts = [0, 3, 3, 1, 2, 0]
    loss.correct_epochs.copy_(torch.tensor(counts))
    loss.finished_epochs.fill_(3)
    gradient = gradient_of(loss(logits, labels, index=torch.arange(6)), logits)

    def function(rows: plain.Rows) -> float:
        return plain.crl(rows, labels.tolist(), counts=counts, smallest=0, epochs=3, rank_weight=2.0, score=score)

    assert_equal_gradient(gradient, numerical_gradient(function, logits.tolist()))


GAMMAS = [-2.0, -0.7, 0.2, 1.0, 3.5, 20.0, 1.0, -0.2]


def test_adafocal_value_equals_plain_loops() -> None:
    for seed, n, classes in BATCHES:
        logits, labels = batch(seed, n, classes)
        edges = [0.1, 0.2, 0.2, 0.3, 0.55, 0.55, 0.7, 0.9, 0.95]
        loss = fedlas.build_loss("adafocal", num_classes=classes, bins=8)
        assert_equal(
            loss(logits, labels),
            plain.adafocal(logits.tolist(), labels.tolist(), *plain.adafocal_start(8)),
            1e-10,
        )
        loss.gammas.copy_(torch.tensor(GAMMAS))
        loss.edges.copy_(torch.tensor(edges))
        gammas, loss_edges = loss.gammas.tolist(), loss.edges.tolist()
        assert_equal(loss(logits, labels), plain.adafocal(logits.tolist(), labels.tolist(), gammas, loss_edges), 1e-10)


def test_adafocal_gradient_equals_plain_loops() -> None:
    logits, labels = batch(5, 8, 4, scale=1.5)
    logits.requires_grad_()
    loss = fedlas.build_loss("adafocal", num_classes=4, bins=8)
    loss.gammas.copy_(torch.tensor(GAMMAS))
    gammas, edges = loss.gammas.tolist(), loss.edges.tolist()
    gradient = gradient_of(loss(logits, labels), logits)
    assert_equal_gradient(
        gradient, numerical_gradient(lambda r: plain.adafocal(r, labels.tolist(), gammas, edges), logits.tolist())
    )


def features_like(seed: int, n: int, width: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(n, width, dtype=torch.float64, generator=generator)


def gate_of(loss: Any) -> plain.Gate:
    bcg = loss.smoothing.bcg
    tensors = (bcg.fc_in.weight, bcg.fc_in.bias, bcg.fc_out.weight, bcg.fc_out.bias)
    return plain.Gate(*(tensor.tolist() for tensor in tensors))


def fedlas_value(loss: Any, rows: plain.Rows, labels: list[int], alphas: plain.Row) -> float:
    if loss.name == "fedlas_ls":
        return plain.fedlas_ls(rows, labels, alphas)
    return plain.fedlas_mbls(rows, labels, alphas, loss.margin, loss.margin_reduction)


FEDLAS_OPTIONS: list[dict[str, Any]] = [
    {},
    {"preset": "official"},
    {"preset": "paper"},
    {"theta": 0.1, "start": "first_batch"},
    {"norm": 2.0},
    {"norm": math.inf},
    {"norm": 1.5, "normalise": "batch"},
    {"normalise": "none"},
    {"theta": 1.0, "eps": 5.0},
    {"source": "max_prob"},
    {"source": "max_logit", "start": "first_batch", "theta": 0.5},
    {"gate": "positive"},
    {"gate": "negative"},
    {"gate": "soft", "gate_positive_index": 0},
    {"gate_width": 7, "gate_positive_index": 0},
    {"beta": 20.0, "alpha_min": 0.02, "alpha_max": 0.06},
]


@pytest.mark.parametrize("name", ["fedlas_ls", "fedlas_mbls"])
@pytest.mark.parametrize("options", FEDLAS_OPTIONS, ids=str)
def test_fedlas_value_over_three_steps_equals_plain_loops(name: str, options: dict[str, Any]) -> None:
    """State before, value, state after, three times over; then once more in eval mode."""
    for seed, (n, classes) in enumerate([(2, 3), (7, 5), (40, 10)]):
        torch.manual_seed(seed)
        loss: Any = fedlas.build_loss(name, num_classes=classes, **options).double()
        smoothing, nci = loss.smoothing, loss.smoothing.nci
        state = None if options.get("start") == "first_batch" else plain.PUBLISHED
        for step in range(4):
            logits, labels = batch(seed + step, n, classes)
            features = features_like(seed + step, n)
            loss.train(step < 3)
            value = loss(logits, labels, features)

            rows = logits.tolist()
            source, norm = options.get("source", "features"), options.get("norm", 1.0)
            gammas, state = plain.indicator(
                plain.confidences_of(rows, features.tolist(), source, norm),
                state,
                theta=options.get("theta", 0.95),
                normalise=options.get("normalise", "ema"),
                training=step < 3,
                eps=options.get("eps", 0.0 if options.get("preset") == "paper" else 1e-3),
            )
            kind = options.get("gate", "learned")
            positive = options.get("gate_positive_index", 0 if options.get("preset") == "paper" else 1)
            gate = None if kind in ("positive", "negative") else gate_of(loss)
            states = plain.gate_states(rows, gate, kind, positive_index=positive)
            limits = {"low": options.get("alpha_min", -math.inf), "high": options.get("alpha_max", math.inf)}
            alphas = plain.adaptive_alphas(smoothing.alpha, smoothing.beta, states, gammas, **limits)

            assert loss.gamma.tolist() == pytest.approx(gammas, rel=1e-9, abs=1e-9)
            assert loss.psi.tolist() == pytest.approx(states, rel=1e-9)
            assert loss.alpha_i.tolist() == pytest.approx(alphas, rel=1e-9)
            assert_equal(value, fedlas_value(loss, rows, labels.tolist(), alphas), 1e-9)
            if state is not None:
                assert (nci.mean.item(), nci.std.item()) == pytest.approx(state, rel=1e-12)


@pytest.mark.parametrize("name", ["fedlas_ls", "fedlas_mbls"])
def test_fedlas_gradient_equals_plain_loops(name: str) -> None:
    """The network's gradient is that of the loss with alpha_i held fixed."""
    logits, labels = batch(2, 6, 4)
    logits.requires_grad_()
    loss: Any = fedlas.build_loss(name, num_classes=4, start="first_batch").double()
    features = features_like(2, 6).requires_grad_()
    value = loss(logits, labels, features)
    assert torch.autograd.grad(value, features, retain_graph=True, allow_unused=True) == (None,)
    gradient = gradient_of(value, logits)
    alphas = loss.alpha_i.tolist()
    assert_equal_gradient(
        gradient, numerical_gradient(lambda rows: fedlas_value(loss, rows, labels.tolist(), alphas), logits.tolist())
    )


@pytest.mark.parametrize("name", ["fedlas_ls", "fedlas_mbls"])
def test_soft_gate_gradient_equals_plain_loops(name: str) -> None:
    """Without the sign the gate's gradient is an ordinary one, so central differences can find it."""
    logits, labels = batch(2, 6, 4)
    loss: Any = fedlas.build_loss(name, num_classes=4, start="first_batch", gate="soft").double()
    loss(logits, labels, features_like(2, 6)).backward()
    gate, gammas = gate_of(loss), loss.gamma.tolist()

    def value_with(changed_gate: plain.Gate) -> float:
        states = plain.gate_states(logits.tolist(), changed_gate, "soft")
        alphas = plain.adaptive_alphas(loss.smoothing.alpha, loss.smoothing.beta, states, gammas)
        return fedlas_value(loss, logits.tolist(), labels.tolist(), alphas)

    bcg = loss.smoothing.bcg
    for layer, (weight, bias) in {
        bcg.fc_in: (gate.weight_in, gate.bias_in),
        bcg.fc_out: (gate.weight_out, gate.bias_out),
    }.items():
        assert_equal_gradient(layer.weight.grad, numerical_gradient(lambda _: value_with(gate), weight))
        rows = [bias]  # changed in place: it is the list of the gate
        assert_equal_gradient(layer.bias.grad[None], numerical_gradient(lambda _: value_with(gate), rows))
