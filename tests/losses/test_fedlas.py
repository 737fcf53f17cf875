"""FeDLaS: indicator, gate, adaptive smoothing, both losses, and edge-case batches."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedlas
from fedlas.losses import BCG, NCI, AdaptiveSmoothing
from fedlas.losses.fedlas import GAMMA_LIMIT, PRESETS
from losses import plain

NAMES = ["fedlas_ls", "fedlas_mbls"]
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0], [-2.0, 0.1, 4.0], [1.0, 1.5, 0.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1, 2])
FEATURES = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.0, -0.5], [6.0, 8.0]], dtype=torch.float64)
NORMS = [3.0, 7.0, 0.5, 14.0]
ALL = torch.ones(4, dtype=torch.bool)


def build(name: str = "fedlas_ls", classes: int = 3, **options: Any) -> Any:
    return fedlas.build_loss(name, num_classes=classes, **options).double()


def statistics(module: Any) -> tuple[float, float]:
    nci = module if isinstance(module, NCI) else module.smoothing.nci
    return nci.mean.item(), nci.std.item()


# --- the indicator ---


def test_the_default_norm_is_the_sum_of_absolute_values() -> None:
    assert NCI(normalise="none")(LOGITS, FEATURES, ALL).tolist() == NORMS


@pytest.mark.parametrize("source", ["max_prob", "max_logit"])
def test_logit_sources_need_no_features(source: str) -> None:
    loss = build(source=source)
    assert not loss.needs_features
    with_features = build(source=source)
    with_features.load_state_dict(loss.state_dict())
    assert loss(LOGITS, LABELS).item() == with_features(LOGITS, LABELS, FEATURES).item()


def test_missing_features_raise() -> None:
    with pytest.raises(ValueError, match="features"):
        AdaptiveSmoothing(num_classes=3)(LOGITS)


@pytest.mark.parametrize(
    "options",
    [{}, {"start": "first_batch"}, {"theta": 0.0, "start": "first_batch"}, {"source": "max_prob"}, {"norm": 2.0}],
)
@pytest.mark.parametrize("scale", [1.0, 1e7, 0.0, 1e300, math.nan])
def test_eager_cpu_path_equals_the_general_path(options: Any, scale: float) -> None:
    """Without a mask all samples count, and on a CPU the statistics are numbers of Python."""
    unmasked, masked = NCI(**options), NCI(**options)
    for factor in (1.0, scale, 2.0):
        features = FEATURES * factor
        torch.testing.assert_close(
            unmasked(LOGITS, features, None), masked(LOGITS, features, ALL), rtol=1e-12, atol=1e-12
        )
        assert statistics(unmasked) == pytest.approx(statistics(masked), rel=1e-13)
        assert unmasked.started == masked.started
    with torch.no_grad():
        torch.testing.assert_close(unmasked(LOGITS, FEATURES), masked(LOGITS, FEATURES, ALL), rtol=1e-12, atol=1e-12)


def test_initial_statistics_are_the_published_ones() -> None:
    assert statistics(NCI()) == (20.0, 100.0)


def test_first_batch_start_takes_statistics_from_the_first_batch() -> None:
    """The first batch with two usable norms is taken whole, whatever theta; before it, gamma is 0."""
    nci = NCI(start="first_batch", theta=0.001)
    assert nci.eval()(LOGITS, FEATURES, ALL).tolist() == [0.0] * 4
    nci.train()
    assert nci(LOGITS[:1], FEATURES[:1], ALL[:1]).tolist() == [0.0]
    assert not nci.started
    norms = torch.tensor(NORMS, dtype=torch.float64)
    gamma = nci(LOGITS, FEATURES, ALL)
    assert statistics(nci) == pytest.approx((norms.mean().item(), norms.std().item()))
    torch.testing.assert_close(gamma, (norms - norms.mean()) / (norms.std() + 1e-3))
    nci(LOGITS, 100 * FEATURES, ALL)
    assert statistics(nci)[0] == pytest.approx(0.001 * 100 * norms.mean().item() + 0.999 * norms.mean().item())


@pytest.mark.parametrize("training", [True, False])
def test_normalise_batch_uses_only_the_batch(training: bool) -> None:
    nci = NCI(normalise="batch").train(training)
    norms = torch.tensor(NORMS, dtype=torch.float64)
    torch.testing.assert_close(nci(LOGITS, FEATURES, ALL), (norms - norms.mean()) / (norms.std() + 1e-3))
    assert nci(LOGITS[:1], FEATURES[:1], ALL[:1]).tolist() == [0.0]
    assert statistics(nci) == (20.0, 100.0)


def test_gamma_is_clamped() -> None:
    features = torch.tensor([[1e30], [1.0]], dtype=torch.float64)
    gamma = NCI(normalise="none")(LOGITS[:2], features, ALL[:2])
    assert gamma.tolist() == [GAMMA_LIMIT, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_low_precision_features_are_computed_in_float32(dtype: torch.dtype) -> None:
    features = torch.full((2, 8193), 0.5).to(dtype)  # the norm, 4096.5, cannot be represented in low precision
    assert NCI(normalise="none")(LOGITS[:2].float(), features, ALL[:2]).tolist() == [4096.5] * 2
    loss = fedlas.build_loss("fedlas_ls", num_classes=3).to(dtype)
    assert loss.smoothing.nci.mean.dtype == torch.float64
    assert loss(LOGITS.to(dtype), LABELS, FEATURES.to(dtype)).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": -0.1}, "theta"),
        ({"theta": 0.0}, "theta.*20 and 100.*first_batch"),  # the indicator would never follow the features
        ({"gate_zero": 1}, "gate_zero"),
        ({"gate_positive_index": 2}, "gate_positive_index"),
        ({"alpha": -0.1}, "alpha"),
    ],
    ids=str,
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):  # TypeError: the shape checks of the tests come first
        build(**options)


# --- the gate ---


def linears(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


@pytest.mark.parametrize(("classes", "size"), [(10, 67), (100, 5_152), (200, 20_302)])
@pytest.mark.parametrize("name", NAMES)
def test_gate_has_the_published_parameter_count(name: str, classes: int, size: int) -> None:
    loss = build(name, classes)
    assert sum(p.numel() for p in loss.parameters()) == size
    first, second = linears(loss)
    assert [first.in_features, first.out_features] == [classes, classes // 2]
    assert [second.in_features, second.out_features] == [classes // 2, 2]


@pytest.mark.parametrize(("classes", "width", "expected"), [(10, 3, 3), (3, None, 1), (2, None, 1)])
def test_gate_width_sets_the_hidden_width(classes: int, width: int | None, expected: int) -> None:
    first, second = linears(build(classes=classes, gate_width=width))
    assert (first.out_features, second.in_features) == (expected, expected)


@pytest.mark.parametrize("kind", ["learned", "soft", "shuffled", "positive", "negative"])
def test_gate_kinds_have_expected_parameters(kind: Any) -> None:
    gate = BCG(3, kind=kind).double()
    assert len(linears(gate)) == (0 if kind in ("positive", "negative") else 2)
    psi = gate(LOGITS, ALL)
    assert psi.shape == (4,)
    if kind == "soft":
        assert bool((psi.abs() < 1).all())
    else:
        assert set(psi.tolist()) <= {"positive": {1.0}, "negative": {-1.0}}.get(kind, {1.0, -1.0})


def tied_gate(**options: Any) -> BCG:
    """A gate whose two outputs are always equal."""
    gate = BCG(3, **options).double()
    for parameter in gate.parameters():
        nn.init.zeros_(parameter)
    return gate


@pytest.mark.parametrize("zero", [-1, 0])
@pytest.mark.parametrize("positive_index", [0, 1])
def test_gate_zero_sets_psi_for_a_tie(zero: Any, positive_index: Any) -> None:
    assert tied_gate(zero=zero, positive_index=positive_index)(LOGITS, ALL).tolist() == [float(zero)] * 4


@pytest.mark.parametrize("positive_index", [0, 1])
def test_positive_index_selects_the_positive_output(positive_index: Any) -> None:
    gate = tied_gate(positive_index=positive_index)
    with torch.no_grad():
        gate.fc_out.bias[positive_index] = 1e-9
    assert gate(LOGITS, ALL).tolist() == [1.0] * 4
    with torch.no_grad():
        gate.fc_out.bias[positive_index] = -1e-9
    assert gate(LOGITS, ALL).tolist() == [-1.0] * 4


def test_gradient_goes_straight_through_the_sign() -> None:
    """The gradient of psi is the gradient of the difference that the sign was taken of."""
    hard, soft = BCG(3, width=4).double(), BCG(3, width=4, kind="soft").double()
    soft.load_state_dict(dict(hard.state_dict()))
    weights = torch.tensor([1.0, -2.0, 0.5, 30.0], dtype=torch.float64)
    (hard(LOGITS, ALL) * weights).sum().backward()
    (soft(LOGITS, ALL) * weights).sum().backward()
    for hard_parameter, soft_parameter in zip(hard.parameters(), soft.parameters(), strict=True):
        assert hard_parameter.grad is not None
        assert hard_parameter.grad.abs().max() > 0
        torch.testing.assert_close(hard_parameter.grad, soft_parameter.grad, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["learned", "soft", "shuffled"])
def test_gate_sends_no_gradient_to_the_logits(kind: Any) -> None:
    logits = LOGITS.clone().requires_grad_()
    BCG(3, kind=kind).double()(logits, ALL).sum().backward()
    assert logits.grad is None


def test_shuffled_gate_permutes_valid_samples() -> None:
    logits = torch.randn(40, 3, dtype=torch.float64)
    valid = torch.rand(40) < 0.7
    learned, shuffled = BCG(3, width=5).double(), BCG(3, width=5, kind="shuffled").double()
    with torch.no_grad():
        learned.fc_in.weight.mul_(5)
        learned.fc_out.bias.zero_()
    shuffled.load_state_dict(dict(learned.state_dict()))
    psi, shuffles = learned(logits, valid), [shuffled(logits, valid) for _ in range(5)]
    assert 0 < (psi[valid] > 0).sum() < valid.sum()
    for shuffle in shuffles:
        assert sorted(shuffle[valid].tolist()) == sorted(psi[valid].tolist())
        assert shuffle[~valid].tolist() == psi[~valid].tolist()
    assert any(shuffle.tolist() != psi.tolist() for shuffle in shuffles)


def test_shuffled_gate_learns() -> None:
    loss = build(gate="shuffled", start="first_batch")
    loss(LOGITS, LABELS, FEATURES).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in loss.parameters())


# --- adaptive smoothing ---


@pytest.mark.parametrize("gate", ["positive", "negative"])
def test_positive_psi_increases_smoothing_with_the_norm(gate: Any) -> None:
    """In positive mode a larger norm means more smoothing, in negative mode less."""
    smoothing = AdaptiveSmoothing(num_classes=3, gate=gate, start="first_batch").double()
    by_norm = smoothing(LOGITS, FEATURES)[torch.tensor(NORMS).argsort()]
    steps = by_norm.diff()
    assert bool((steps > 0).all()) if gate == "positive" else bool((steps < 0).all())


@pytest.mark.parametrize(("low", "high"), [(0.04, None), (None, 0.06), (0.04, 0.06)])
def test_alpha_i_is_clamped_to_its_limits(low: float | None, high: float | None) -> None:
    options: dict[str, Any] = {"num_classes": 3, "gate": "positive", "start": "first_batch"}
    unlimited = AdaptiveSmoothing(**options).double()(LOGITS, FEATURES)
    limited = AdaptiveSmoothing(alpha_min=low, alpha_max=high, **options).double()(LOGITS, FEATURES)
    assert unlimited.min() < 0.04
    assert unlimited.max() > 0.06
    assert limited.tolist() == [min(max(a, low or 0.0), high or 1.0) for a in unlimited.tolist()]


def test_clamped_samples_give_the_gate_no_gradient() -> None:
    smoothing = AdaptiveSmoothing(num_classes=3, alpha_min=0.05, alpha_max=0.05, start="first_batch").double()
    smoothing(LOGITS, FEATURES).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in smoothing.parameters())


def test_adaptive_smoothing_works_with_a_custom_base_loss() -> None:
    """FeDLaS on ACLS: its parts in a convex combination with alpha_i."""
    logits = (3 * LOGITS).requires_grad_()
    acls = fedlas.build_loss("acls", num_classes=3, margin=2.0, lambda_=1.0)
    smoothing = AdaptiveSmoothing(num_classes=3, alpha=0.1, beta=0.5, start="first_batch").double()
    alpha_i = smoothing(logits, FEATURES)
    parts = acls.parts(logits, LABELS)
    assert set(parts) == {"classification", "positive", "negative"}
    value = ((1 - alpha_i) * parts["classification"] + alpha_i * (parts["positive"] + parts["negative"])).mean()

    rows, labels = logits.tolist(), LABELS.tolist()
    ce_values = plain.cross_entropies(rows, labels)
    acls_values = [plain.acls([row], [label], margin=2.0, lambda_=1.0) for row, label in zip(rows, labels, strict=True)]
    penalties = [total - ce for total, ce in zip(acls_values, ce_values, strict=True)]
    assert value.item() == pytest.approx(plain.convex(ce_values, penalties, alpha_i.tolist()))

    value.backward()
    assert logits.grad is not None
    assert all(p.grad is not None and p.grad.any() for p in smoothing.parameters())


# --- presets ---


@pytest.mark.parametrize(
    ("preset", "margin_reduction", "positive_index", "zero", "eps"),
    [("default", "mean", 1, -1, 1e-3), ("official", "mean", 1, 0, 1e-3), ("paper", "sum", 0, -1, 0.0)],
)
def test_presets_set_each_option(
    preset: str, margin_reduction: str, positive_index: int, zero: int, eps: float
) -> None:
    for name in NAMES:
        loss = build(name, preset=preset)
        gate, nci = loss.smoothing.bcg, loss.smoothing.nci
        assert (gate.positive_index, gate.zero, nci.eps) == (positive_index, zero, eps)
        if name == "fedlas_mbls":
            assert loss.margin_reduction == margin_reduction
        # Options that no preset changes: paper and code agree, or the paper does not specify them.
        assert (nci.theta, nci.norm, nci.source, nci.normalise) == (0.95, 1.0, "features", "ema")
        assert (*statistics(nci), bool(nci.started)) == (20.0, 100.0, True)
        assert (loss.smoothing.alpha_min, loss.smoothing.alpha_max) == (None, None)
        assert gate.kind == "learned"


def test_no_preset_is_the_default_preset() -> None:
    assert set(PRESETS) == {"default", "official", "paper"}
    for name in NAMES:
        no_preset, default_preset = build(name), build(name, preset="default")
        default_preset.load_state_dict(no_preset.state_dict())
        assert no_preset(LOGITS, LABELS, FEATURES).item() == default_preset(LOGITS, LABELS, FEATURES).item()


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_keyword_overrides_the_preset(preset: str) -> None:
    for eps in (0.0, 1e-3, 0.5):
        assert build(preset=preset, eps=eps).smoothing.nci.eps == eps
    for zero in (-1, 0):
        assert build(preset=preset, gate_zero=zero).smoothing.bcg.zero == zero
    for index in (0, 1):
        assert build(preset=preset, gate_positive_index=index).smoothing.bcg.positive_index == index
    for reduction in ("mean", "sum"):
        assert build("fedlas_mbls", preset=preset, margin_reduction=reduction).margin_reduction == reduction
    # One keyword leaves the rest of the preset alone.
    gate = build(preset=preset, eps=0.5).smoothing.bcg
    chosen = PRESETS[preset]
    assert (gate.zero, gate.positive_index) == (chosen["gate_zero"], chosen["gate_positive_index"])


# --- the losses ---


@pytest.mark.parametrize("name", NAMES)
def test_statistics_updates_between_passes_do_not_break_backward(name: str) -> None:
    """In gradient accumulation, in-place updates of statistics between passes must not break the gradients."""
    joint, separate = build(name), build(name)
    separate.load_state_dict(joint.state_dict())
    batches = [(LOGITS, FEATURES), (-LOGITS, 3 * FEATURES)]
    sum(joint(logits, LABELS, features) for logits, features in batches).backward()
    for logits, features in batches:
        separate(logits, LABELS, features).backward()
    for joint_parameter, separate_parameter in zip(joint.parameters(), separate.parameters(), strict=True):
        torch.testing.assert_close(joint_parameter.grad, separate_parameter.grad)
    assert statistics(joint) == statistics(separate)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_diagnostics_are_detached_values_of_the_last_call(name: str, reduction: str) -> None:
    loss = build(name, reduction=reduction)
    assert (loss.psi, loss.gamma, loss.alpha_i) == (None, None, None)
    loss(LOGITS.clone().requires_grad_(), LABELS, FEATURES)
    for diagnostic in (loss.psi, loss.gamma, loss.alpha_i):
        assert diagnostic.shape == (4,)
        assert not diagnostic.requires_grad
    assert set(loss.psi.tolist()) <= {1.0, -1.0}
    expected = plain.adaptive_alphas(loss.smoothing.alpha, loss.smoothing.beta, loss.psi.tolist(), loss.gamma.tolist())
    assert loss.alpha_i.tolist() == pytest.approx(expected)
    first_gamma = loss.gamma
    loss(LOGITS, LABELS, 2 * FEATURES)
    assert not torch.equal(first_gamma, loss.gamma)
    assert not any("psi" in key or "alpha" in key or "gamma" in key for key in loss.state_dict())


# --- edge-case batches ---


def features_with(row: float | list[float]) -> Tensor:
    features = FEATURES.float().clone()
    features[1] = torch.tensor(row)
    return features


UNUSABLE = {
    "nan": features_with(math.nan),
    "one nan": features_with([math.nan, 1.0]),
    "inf": features_with(math.inf),
    "-inf": features_with(-math.inf),
    "inf - inf": features_with([math.inf, -math.inf]),
    "beyond float32": features_with(3e38),  # each entry is finite, their sum is not
}
HARD = UNUSABLE | {
    "zeros": torch.zeros(4, 2),
    "constant": torch.ones(4, 2),
    "1e30": features_with(1e30),
    "all 1e30": torch.full((4, 2), 1e30),
    "3e38": features_with([3e38, 0.0]),
    "all 3e38": torch.tensor([[3e38, 0.0]] * 3 + [[0.0, 0.0]]),
    "1e-45": torch.full((4, 2), 1e-45),
    "all nan": torch.full((4, 2), math.nan),
}


def assert_healthy(loss: Any) -> None:
    state = loss.state_dict()
    assert all(bool(value.isfinite().all()) for value in state.values())
    for parameter in loss.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedlas_ls", {}),
        ("fedlas_mbls", {"norm": 2.0, "theta": 0.5}),
        ("fedlas_ls", {"preset": "paper", "start": "first_batch"}),
        ("fedlas_mbls", {"normalise": "none"}),
    ],
    ids=str,
)
def test_extreme_features_give_no_nan(name: str, options: dict[str, Any]) -> None:
    for kind, extreme_features in HARD.items():
        loss: Any = fedlas.build_loss(name, num_classes=3, **options)
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9)
        for features in (extreme_features, FEATURES.float()):
            logits = LOGITS.float().requires_grad_()
            optimizer.zero_grad()
            value = loss(logits, LABELS, features)
            value.backward()
            optimizer.step()
            assert bool(value.isfinite()), kind
            assert bool(logits.grad.isfinite().all()), kind  # type: ignore[union-attr]
            assert bool((loss.gamma.abs() <= GAMMA_LIMIT).all()), kind
            limit = 2 * loss.smoothing.alpha + 1e-6
            assert bool(((loss.alpha_i >= 0) & (loss.alpha_i <= limit)).all()), kind
            assert_healthy(loss)


@pytest.mark.parametrize("start", ["paper", "first_batch"])
def test_nonfinite_norm_is_excluded_from_the_statistics(start: str) -> None:
    """That sample gets gamma 0 and alpha_i = alpha; the others get what they would have got without it."""
    for kind, features in UNUSABLE.items():
        loss, reference = (fedlas.build_loss("fedlas_ls", num_classes=3, start=start) for _ in range(2))
        reference.load_state_dict(loss.state_dict())
        usable = torch.tensor([0, 2, 3])
        loss(LOGITS.float(), LABELS, features)
        reference(LOGITS[usable].float(), LABELS[usable], FEATURES[usable].float())
        assert statistics(loss) == pytest.approx(statistics(reference)), kind
        assert loss.gamma[1] == 0, kind
        assert loss.alpha_i[1] == torch.tensor(0.05), kind
        torch.testing.assert_close(loss.gamma[usable], reference.gamma)
        torch.testing.assert_close(loss.alpha_i[usable], reference.alpha_i)


@pytest.mark.parametrize("name", NAMES)
def test_batch_of_one_does_not_update_statistics(name: str) -> None:
    """One sample has no deviation: the statistics stay, and gamma comes from what is known already."""
    loss = build(name)
    loss(LOGITS[:1], LABELS[:1], FEATURES[:1]).backward()
    assert statistics(loss) == (20.0, 100.0)
    assert loss.gamma.item() == pytest.approx((NORMS[0] - 20) / 100.001)
    assert_healthy(loss)

    first_batch_loss = build(name, start="first_batch")
    first_batch_loss(LOGITS[:1], LABELS[:1], FEATURES[:1]).backward()
    assert first_batch_loss.gamma.item() == 0
    assert first_batch_loss.alpha_i.item() == first_batch_loss.smoothing.alpha
    assert_healthy(first_batch_loss)


@pytest.mark.parametrize("name", NAMES)
def test_single_valid_sample_does_not_update_statistics(name: str) -> None:
    loss = build(name)
    loss(LOGITS, torch.tensor([-100, 1, -100, -100]), FEATURES)
    assert statistics(loss) == (20.0, 100.0)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_constant_norms_give_gamma_zero(preset: str) -> None:
    """No deviation at all: gamma is 0 where mu is the norm itself, and never NaN while sigma shrinks to 0."""
    loss = build(preset=preset, start="first_batch")
    loss(LOGITS, LABELS, torch.ones_like(FEATURES))
    assert statistics(loss) == (2.0, 0.0)
    assert loss.gamma.tolist() == [0.0] * 4
    assert loss.alpha_i.tolist() == [0.05] * 4

    loss = build(preset=preset)
    for _ in range(300):
        gamma = loss.smoothing.nci(LOGITS, torch.ones_like(FEATURES), ALL)
        assert bool(gamma.isfinite().all())
    assert statistics(loss) == pytest.approx((2.0, 0.0))


def test_zero_features_update_statistics() -> None:
    loss = build(theta=0.5)
    loss(LOGITS, LABELS, torch.zeros_like(FEATURES))
    assert statistics(loss) == (10.0, 50.0)
    assert loss.gamma.tolist() == pytest.approx([-10 / 50.001] * 4)


def test_statistics_recover_from_an_outlier_of_1e30() -> None:
    loss: Any = fedlas.build_loss("fedlas_ls", num_classes=3)
    loss(LOGITS.float(), LABELS, HARD["1e30"])
    assert statistics(loss)[1] > 1e29
    for _ in range(40):
        loss.smoothing.nci(LOGITS.float(), FEATURES.float(), ALL)
    norms = torch.tensor(NORMS)
    assert statistics(loss) == pytest.approx((norms.mean().item(), norms.std().item()), rel=1e-6)


def test_gate_learns_to_lower_the_training_loss() -> None:
    """As docs/decisions.md says: where samples are fitted well, psi becomes -sign(gamma), alpha_i shrinks."""
    labels = torch.arange(16) % 4
    logits = 8 * nn.functional.one_hot(labels, 4).double()
    features = (1.0 + labels).double()[:, None].expand(-1, 3)  # classes 0 and 1 have small norms, 2 and 3 large ones
    loss = build(classes=4, start="first_batch", gate_width=8)
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0, momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        loss(logits, labels, features).backward()
        optimizer.step()
    assert torch.equal(loss.psi, -loss.gamma.sign())
    assert loss.alpha_i.max() < 0.05
