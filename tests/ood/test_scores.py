"""OOD scores: reference formulas in float64, extreme floating-point values, invalid inputs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlas import ood
from fedlas.predictions import Predictions, TopLabelPredictions

OF_LOGITS = [ood.max_probability, ood.entropy, ood.max_logit, ood.energy, ood.generalised_entropy]
EXTREME = torch.tensor(
    [[3e38, -3e38, 0.0], [200.0, 0.0, 0.0], [0.0, 0.0, 0.0], [-1e30, -1e30, 5.0], [40.0, 39.0, -90.0]]
)


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


@pytest.mark.parametrize("score", OF_LOGITS)
def test_probabilities_given_as_logits_warn(score):
    probs = torch.randn(200, 4).softmax(1)
    with pytest.warns(UserWarning, match="every row of the logits lies between 0 and 1"):
        score(probs)
    ood.score_of(Predictions.from_probs(probs), "entropy")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_match_their_formulas(dtype):
    logits = (3 * torch.randn(50, 7)).to(dtype)
    z = logits.double().numpy()
    p = softmax(z)
    sorted_probs = np.sort(p, 1)[:, ::-1]
    tolerance = {"rtol": 1e-12}
    np.testing.assert_allclose(ood.max_probability(logits), 1 - p.max(1), **tolerance)
    np.testing.assert_allclose(ood.entropy(logits), -(p * np.log(p)).sum(1), **tolerance)
    np.testing.assert_allclose(ood.max_logit(logits), -z.max(1), **tolerance)
    np.testing.assert_allclose(ood.energy(logits), -np.log(np.exp(z).sum(1)), **tolerance)
    np.testing.assert_allclose(ood.energy(logits, 2.5), -2.5 * np.log(np.exp(z / 2.5).sum(1)), **tolerance)
    for top in (1, 3, 7, 100):
        expected = ((sorted_probs * (1 - sorted_probs)) ** 0.1)[:, :top].sum(1)
        np.testing.assert_allclose(ood.generalised_entropy(logits, top=top), expected, **tolerance)
    expected_of_root = ((p * (1 - p)) ** 0.5).sum(1)
    np.testing.assert_allclose(ood.generalised_entropy(logits, gamma=0.5), expected_of_root, **tolerance)


@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_feature_norm_is_the_negative_norm(p):
    features = torch.randn(20, 6).bfloat16()
    expected = -np.linalg.norm(features.double().numpy(), p, axis=1)
    np.testing.assert_allclose(ood.feature_norm(features, p), expected, rtol=1e-12)


@pytest.mark.parametrize("score", OF_LOGITS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_give_finite_scores(score, dtype):
    result = score(EXTREME.to(dtype))
    assert result.shape == (5,)
    assert bool(torch.isfinite(result).all())


def test_entropy_and_max_probability_at_extreme_logits():
    result = ood.entropy(EXTREME)
    assert result[0] == 0
    assert result[2].item() == pytest.approx(math.log(3))
    assert ood.max_probability(EXTREME)[0] == 0
    assert ood.max_probability(EXTREME)[2].item() == pytest.approx(2 / 3)
    assert ood.energy(EXTREME, 1e-30)[1] == -200


def test_confident_predictions_are_not_tied():
    """Softmax gives 1.0 for all of these, and log_softmax 0.0: all scores would be tied."""
    lead = torch.arange(18.0, 700.0)
    logits = torch.stack([lead, torch.zeros_like(lead), torch.zeros_like(lead)], 1)
    assert bool((logits.softmax(1).amax(1) == 1).all())
    s = 2 * np.exp(-lead.double().numpy())
    np.testing.assert_allclose(ood.max_probability(logits), s / (1 + s), rtol=1e-10)
    np.testing.assert_allclose(ood.entropy(logits), np.log1p(s) + s * lead.numpy() / (1 + s), rtol=1e-10)
    expected = (s / (1 + s) ** 2) ** 0.1 + 2 * (s / 2 / (1 + s) * (1 - s / 2 / (1 + s))) ** 0.1
    np.testing.assert_allclose(ood.generalised_entropy(logits), expected, rtol=1e-10)
    for score in (ood.max_probability, ood.entropy, ood.generalised_entropy):
        assert bool((score(logits).diff() < 0).all())


@given(st.lists(st.lists(st.floats(-50, 50), min_size=4, max_size=4), min_size=1, max_size=8), st.floats(-20, 20))
def test_scores_are_invariant_to_a_shift_of_logits(rows, shift):
    logits = torch.tensor(rows, dtype=torch.float64)
    for score in (ood.max_probability, ood.entropy, ood.generalised_entropy):
        torch.testing.assert_close(score(logits + shift), score(logits), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ood.energy(logits + shift), ood.energy(logits) - shift)
    assert bool((ood.entropy(logits) <= math.log(4) * (1 + 1e-12)).all())
    assert bool((ood.max_probability(logits) <= 0.75 * (1 + 1e-12)).all())


@pytest.mark.parametrize("score", OF_LOGITS, ids=lambda f: f.__name__)
def test_rows_are_processed_in_blocks(score, monkeypatch):
    logits = torch.randn(23, 4)
    expected = score(logits)
    monkeypatch.setattr("fedlas.ood.scores.AT_ONCE", 20)
    assert torch.equal(score(logits), expected)


@pytest.mark.parametrize("score", OF_LOGITS, ids=lambda f: f.__name__)
def test_a_single_logit_is_a_binary_head(score):
    logits = torch.randn(9)
    two_columns = torch.stack([torch.zeros(9), logits], 1)
    assert torch.equal(score(logits), score(two_columns))
    assert torch.equal(score(logits[:, None]), score(two_columns))


@pytest.mark.parametrize("score", OF_LOGITS, ids=lambda f: f.__name__)
def test_numpy_arrays_are_accepted_and_equal_rows_have_equal_scores(score):
    logits = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    logits[3] = logits[1]
    result = score(logits)
    assert result.dtype == torch.float64
    assert result[3] == result[1]
    assert torch.equal(result, score(torch.from_numpy(logits)))


def brute_force(features: np.ndarray, train: np.ndarray, k: int) -> np.ndarray:
    unit, reference = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (features, train))
    return np.sort(np.linalg.norm(unit[:, None] - reference[None], axis=2), axis=1)[:, k - 1]


@pytest.mark.parametrize("k", [1, 5, 300])
def test_knn_matches_brute_force(k, monkeypatch):
    monkeypatch.setattr("fedlas.ood.scores.QUERIES", 17)
    monkeypatch.setattr("fedlas.ood.scores.NEIGHBOURS", 64)
    features, train = torch.randn(40, 8), torch.randn(300, 8)
    result = ood.knn(features, train, k)
    np.testing.assert_allclose(result, brute_force(features.double().numpy(), train.double().numpy(), k), rtol=1e-10)
    assert result.dtype == torch.float64


def test_knn_distance_of_near_duplicates_is_accurate():
    """In float32, 2 - 2 cos loses distances below 3e-4."""
    train = torch.randn(200, 16, dtype=torch.float64)
    features = train[:10] + 1e-6 * torch.randn(10, 16, dtype=torch.float64)
    expected = brute_force(features.numpy(), train.numpy(), 1)
    np.testing.assert_allclose(ood.knn(features, train, 1), expected, rtol=0.02)


def test_knn_ignores_norms_and_accepts_zero_rows():
    features, train = torch.rand(5, 4).half(), torch.rand(60, 4)
    torch.testing.assert_close(ood.knn(features, train, 7), ood.knn(8 * features, 1e20 * train, 7))
    assert ood.knn(torch.zeros(1, 4), train, 7).item() == pytest.approx(1)


@pytest.mark.parametrize("score", [*OF_LOGITS, ood.feature_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_bad_row_is_named(score, value):
    table = torch.zeros(5, 3)
    table[2, 1] = table[4, 0] = value
    with pytest.raises(ValueError, match="row 2"):
        score(table)


@pytest.mark.parametrize("score", [*OF_LOGITS, ood.feature_norm], ids=lambda f: f.__name__)
def test_inputs_that_are_not_a_matrix_of_floats_raise(score):
    with pytest.raises(ValueError, match="rows"):
        score(torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"shape|columns"):
        score(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        score(torch.zeros(2, 3, 4))
    with pytest.raises(TypeError, match="floating-point"):
        score(torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ood.energy(x, 0), "temperature.*0"),
        (lambda x: ood.generalised_entropy(x, gamma=0), "gamma.*0"),
        (lambda x: ood.generalised_entropy(x, top=0), "top.*0"),
        (lambda x: ood.feature_norm(x, 0), r"\bp\b.*0"),
        (lambda x: ood.knn(x, torch.zeros(4, 2)), "features.*3.*train_features.*2"),
        (lambda x: ood.knn(x, x, 6), r"\bk\b.*6.*5"),
        (lambda x: ood.knn(x, x, 0), r"\bk\b.*0"),
        (lambda x: ood.knn(x, x + math.nan, 1), "train_features.*row 0"),
        (lambda x: ood.feature_norm(x[:, 0]), r"\(5,\)"),
    ],
)
def test_invalid_options_raise_an_error_with_their_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(5, 3))


def test_score_of_matches_the_functions():
    logits, features = torch.randn(8, 4), torch.randn(8, 6)
    predictions = Predictions(logits, torch.zeros(8, dtype=torch.long), features=features)
    expected = {score.__name__: score(logits) for score in OF_LOGITS}
    expected |= {"l1_norm": ood.feature_norm(features), "l2_norm": ood.feature_norm(features, 2)}
    assert set(expected) == set(ood.score_names())
    for name, values in expected.items():
        assert torch.equal(ood.score_of(predictions, name), values)


def test_probabilities_are_used_as_given():
    """Equal confidences stay equal; a logarithm would make them differ by rounding."""
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.15, 0.15], [1.0, 0.0, 0.0], [0.1, 0.2, 0.7]])
    predictions = Predictions.from_probs(probs, [0, 0, 0, 0])
    confidence = ood.score_of(predictions, "max_probability")
    assert confidence[0] == confidence[1] == confidence[3]
    assert confidence[2] == 0
    p = probs.double().numpy()
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1)
    np.testing.assert_allclose(ood.score_of(predictions, "entropy"), entropy, rtol=1e-6)
    generalised_entropy = ood.score_of(predictions, "generalised_entropy")
    np.testing.assert_allclose(generalised_entropy, ((p * (1 - p)) ** 0.1).sum(1), rtol=1e-6)
    for name in ("max_logit", "energy"):
        with pytest.raises(ValueError, match=f"{name}.*logits"):
            ood.score_of(predictions, name)


def test_a_missing_input_of_a_score_raises_an_error_that_names_it():
    without_features = Predictions(torch.randn(3, 2), [0, 1, 0])
    with pytest.raises(ValueError, match=r"l1_norm.*features"):
        ood.score_of(without_features, "l1_norm")
    with pytest.raises(ValueError, match=r"'odin'.*max_probability, entropy"):
        ood.score_of(without_features, "odin")
    top_label = TopLabelPredictions([0.6], [True])
    assert ood.score_of(top_label, "max_probability").item() == pytest.approx(0.4)
    with pytest.raises(ValueError, match=r"entropy.*\btop\b"):
        ood.score_of(top_label, "entropy")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gpu_scores_match_the_cpu(dtype):
    logits, features, train = 9 * torch.randn(300, 40), torch.randn(300, 64), torch.randn(900, 64)
    logits, features, train = (x.to(dtype) for x in (logits, features, train))
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    for score in OF_LOGITS:
        torch.testing.assert_close(score(logits.cuda()).cpu(), score(logits), **tolerance)
    torch.testing.assert_close(ood.feature_norm(features.cuda()).cpu(), ood.feature_norm(features), **tolerance)
    expected = ood.knn(features, train)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        for reference in (train, train.cuda()):
            result = ood.knn(features.cuda(), reference)
            assert result.device.type == "cuda"
            torch.testing.assert_close(result.cpu(), expected, **tolerance)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
