"""Temperature scaling: exact at every scale, never harmful, and equal to correct reference implementations."""

import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from calibrator_cases import binary_problem, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from torch.nn import functional

from fedlas import metrics
from fedlas.posthoc import Temperature, build_calibrator
from fedlas.posthoc.base import DoubtfulFit, Samples, solvers
from fedlas.posthoc.base.solvers import scaled_nll
from fedlas.predictions import Predictions


def nll_at(logits: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    scaled = logits / temperature
    return float((logsumexp(scaled, axis=1) - scaled[np.arange(len(labels)), labels]).mean())


def searched(logits: np.ndarray, labels: np.ndarray) -> float:
    """The optimum by another method: a bounded search in log T."""
    found = minimize_scalar(
        lambda u: nll_at(logits, labels, math.exp(u)), bounds=(-9, 9), method="bounded", options={"xatol": 1e-10}
    )
    return math.exp(found.x)


# The scales at which other code fails: LBFGS with a small step stops near 1.8, others return 0 or stop at 10.
@pytest.mark.parametrize("scale", [0.01, 0.05, 0.3, 1, 3, 30, 300, 1000])
def test_the_temperature_is_exact_at_every_scale(scale: float):
    logits, labels = problem(4000, 10, scale=1.0)
    at_one = Temperature().fit(logits, labels).temperature
    assert at_one == pytest.approx(1, abs=0.05)
    assert at_one == pytest.approx(searched(logits.numpy(), labels.numpy()), rel=1e-5)
    found = Temperature().fit(scale * logits, labels).temperature
    assert found == pytest.approx(scale * at_one, rel=1e-9)
    single = Temperature().fit((scale * logits).float(), labels).temperature
    assert single == pytest.approx(scale * at_one, rel=1e-6)


@pytest.mark.parametrize("scale", [0.05, 1, 3, 30, 300])
def test_temperature_matches_scikit_learn(scale: float):
    calibration = pytest.importorskip("sklearn.calibration")
    frozen = pytest.importorskip("sklearn.frozen")
    from sklearn.base import BaseEstimator, ClassifierMixin

    logits, labels = problem(2000, 5, scale=scale)

    class Given(ClassifierMixin, BaseEstimator):
        def fit(self, x, y):
            self.classes_ = np.arange(5)
            return self

        def decision_function(self, x):
            return x

        def predict(self, x):
            return x.argmax(1)

    x, y = logits.numpy(), labels.numpy()
    theirs = calibration.CalibratedClassifierCV(frozen.FrozenEstimator(Given().fit(x, y)), method="temperature")
    probs = theirs.fit(x, y).predict_proba(x)
    ours = Temperature().fit(logits, labels).transform(logits).softmax(1)
    np.testing.assert_allclose(ours.numpy(), probs, atol=2e-5)


# It sees probabilities, which are rounded to zero where logits are larger.
@pytest.mark.parametrize("scale", [0.05, 1, 3])
def test_temperature_matches_probmetrics(scale: float):
    pytest.importorskip("probmetrics")
    from fedlas.posthoc import Probmetrics

    logits, labels = problem(2000, 5, scale=scale)
    theirs = Probmetrics(method="temp-scaling", floor=1e-30).fit(logits, labels).transform(logits)
    torch.testing.assert_close(
        Temperature().fit(logits, labels).transform(logits).softmax(1), theirs.softmax(1), atol=1e-4, rtol=1e-4
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 6), st.floats(-3, 3))
def test_temperature_is_a_local_minimum_and_no_worse_than_one(seed: int, n: int, classes: int, log_scale: float):
    random = np.random.default_rng(seed)
    logits = random.standard_normal((n, classes)) * 10**log_scale
    labels = random.integers(classes, size=n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # such few samples are often separable
        found = Temperature().fit(logits, labels).temperature
    best = nll_at(logits, labels, found)
    assert 1e-3 <= found <= 1e4
    assert best <= nll_at(logits, labels, 1.0) * (1 + 1e-12)
    for nearby in (found * 0.99, found * 1.01):
        if 1e-3 <= nearby <= 1e4:
            assert best <= nll_at(logits, labels, nearby) + 1e-12


def test_derivatives_match_autograd():
    logits, labels = problem(50)
    for truth in (labels, functional.one_hot(labels, 4).double() * 0.8 + 0.05):
        factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        value = functional.cross_entropy(factor * logits, truth)
        (slope,) = torch.autograd.grad(value, factor, create_graph=True)
        (bend,) = torch.autograd.grad(slope, factor)
        found = scaled_nll(Samples(logits, truth), 0.7)
        assert found == pytest.approx((value.item(), slope.item(), bend.item()), rel=1e-10)


@pytest.mark.parametrize("margin", [1e-3, 0.2, 1.5, 40.0])
def test_correct_samples_give_the_lower_bound(margin: float):
    """Steps grew shorter and shorter: 100 of them ended at T = 0.0096, without a warning."""
    logits = torch.tensor([[margin, 0.0, 0.0]] * 20)
    with pytest.warns(UserWarning, match=r"20.*0\.001.*correct"):
        found = Temperature().fit(logits, torch.zeros(20, dtype=torch.long))
    assert found.temperature == found.low


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0, 50.0])
def test_solver_needs_few_evaluations(scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """A last step of zero length was taken for a step out of the bracket: 26 bisections followed."""
    make = torch.Generator().manual_seed(1)
    logits = torch.randn(2_000, 5, generator=make)
    labels = torch.multinomial(logits.softmax(1), 1, generator=make)[:, 0]
    asked = []
    monkeypatch.setattr(solvers, "scaled_nll", lambda *given: (asked.append(given), scaled_nll(*given))[1])
    found = solvers.best_inverse_temperature(Samples((scale * logits).to(dtype), labels), 1e-4, 1e4)
    assert found * scale == pytest.approx(1, rel=0.1)
    assert len(asked) <= 12


def test_separable_samples_give_the_lower_bound_and_a_warning():
    logits = torch.randn(100, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"100.*0\.001.*correct"):
        assert Temperature().fit(logits, logits.argmax(1)).temperature == pytest.approx(1e-3)
    with pytest.warns(UserWarning, match=r"100.*0\.05"):
        assert Temperature(low=0.05).fit(logits, logits.argmax(1)).temperature == pytest.approx(0.05)


def test_logits_that_contradict_the_labels_give_the_upper_bound():
    logits = torch.randn(100, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"100.*10000"):
        assert Temperature().fit(logits, logits.argmin(1)).temperature == pytest.approx(1e4)


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e308, -1e308], [1e308, 1e308]] * 10, dtype=torch.float64)
    labels = torch.tensor([0, 1] * 10)
    with pytest.warns(UserWarning, match=r"20.*0\.001.*correct"):
        found = Temperature().fit(logits, labels)
    assert found.temperature == pytest.approx(1e-3)
    assert found.fitted.after == pytest.approx(math.log(2) / 2)
    assert found.transform(logits).isfinite().all()
    assert found.transform(logits.float().clamp(-3e38, 3e38)).isfinite().all()


def test_constant_logits_have_temperature_one():
    assert Temperature().fit(torch.zeros(10, 3), torch.arange(10) % 3).temperature == 1.0


def test_grid_search_matches_the_official_code():
    random = np.random.RandomState(0)
    logits = (2 * random.randn(1000, 5)).astype(np.float32)
    labels = random.randint(0, 5, 1000)
    logits[np.arange(1000), labels] += 1.5
    by_ece = Temperature(objective="ece", search="grid").fit(logits, labels)
    assert by_ece.temperature == 2.8
    after = by_ece.transform(Predictions(logits, labels))
    assert metrics.ece(after, compat="official") == pytest.approx(0.021758, abs=1e-6)
    by_nll = Temperature(search="grid").fit(logits, labels)
    assert by_nll.temperature == 2.4
    assert by_nll.fitted.after == pytest.approx(1.365112, abs=1e-6)
    exact = Temperature().fit(logits, labels)
    assert exact.fitted.after <= by_nll.fitted.after
    assert exact.temperature == pytest.approx(2.4, abs=0.06)


def test_grid_search_takes_the_smallest_temperature_on_ties():
    logits, labels = problem(300)
    tried = {
        t / 10: float(metrics.ece((logits / (t / 10)).softmax(1).float(), labels, compat="official"))
        for t in range(1, 101)
    }
    best = min(tried.values())
    wanted = min(t for t, value in tried.items() if value == best)
    assert Temperature(objective="ece", search="grid").fit(logits, labels).temperature == wanted
    # A constant confidence: every temperature leaves the classes equal, and all have the same error.
    flat = torch.zeros(10, 2)
    assert Temperature(objective="ece", search="grid").fit(flat, torch.zeros(10).long()).temperature == 0.1


def test_grid_search_of_the_ece_accepts_soft_labels():
    logits, _ = problem(500)
    found = Temperature(objective="ece", search="grid").fit(logits, (logits / 3).softmax(1))
    assert found.temperature == pytest.approx(3.0, abs=0.2)


def test_standard_error_matches_repeated_samples():
    found, errors = [], []
    for seed in range(200):
        fit = Temperature().fit(*problem(300, scale=2.0, seed=seed))
        found.append(math.log(fit.temperature))
        errors.append(fit.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.15)
    with pytest.raises(RuntimeError, match=r"nll.*solve"):
        _ = Temperature(search="grid").fit(*problem()).standard_error


def test_binary_logits_match_their_two_columns():
    score, labels = binary_problem()
    found = Temperature().fit(score, labels)
    assert found.temperature == pytest.approx(searched(np.stack([0 * score, score], 1), labels.numpy()), rel=1e-5)
    torch.testing.assert_close(found.transform(score), score / found.temperature)


def test_invalid_options_raise():
    with pytest.raises(ValueError, match='search="grid"'):
        Temperature(objective="ece")
    unchecked = inspect.unwrap(Temperature.__init__)  # as users have it, without the shape checks of the tests
    with pytest.raises(ValueError, match=r"objective.*'brier'"):
        unchecked(object.__new__(Temperature), objective="brier")
    with pytest.raises(ValueError, match=r"search.*'lbfgs'"):
        unchecked(object.__new__(Temperature), search="lbfgs")
    with pytest.raises(ValueError, match=r"low.*2"):
        Temperature(low=2.0)
    with pytest.raises(RuntimeError, match=r"fit\("):
        _ = Temperature().temperature


TRUE = 2.3  # how much too far apart the logits of `over_confident` are


def over_confident(n: int = 6_000) -> Predictions:
    """Return logits of an over-confident network: four fifths of the labels are the top class, T is `TRUE`."""
    make = torch.Generator().manual_seed(4)
    logits = 1.2 * torch.randn(n, 10, generator=make, dtype=torch.float64)
    logits[torch.arange(n), torch.randint(10, (n,), generator=make)] += 2 + 6 * torch.rand(n, generator=make).double()
    labels = torch.multinomial(logits.softmax(1), 1, generator=make)[:, 0]
    return Predictions(TRUE * logits, labels)


def rounded(given: Predictions, decimals: int) -> Predictions:
    return Predictions.from_probs(given.probs.round(decimals=decimals), given.labels)


@pytest.mark.filterwarnings("ignore:.*normalized")
@pytest.mark.parametrize(("decimals", "within"), [(2, 0.3), (3, 0.3), (4, 0.1), (6, 0.1)])
@pytest.mark.parametrize("soft", [False, True])
def test_rounded_probabilities_match_their_logits(decimals, within, soft):
    """Regression: zeros became the logarithm of the smallest float64, and T exceeded 100."""
    given = over_confident()
    if soft:
        labels = functional.one_hot(given.labels, 10).double()
        given = Predictions(given.logits, labels)
    exactly = Temperature().fit(given).temperature
    table = rounded(given, decimals)
    assert table.decimals == decimals
    found = Temperature().fit(table)
    assert not found.fitted.doubt
    assert found.temperature == pytest.approx(exactly, rel=within)
    assert metrics.nll(found.transform(given)) < metrics.nll(given)
    assert metrics.ece(found.transform(table)) < 0.5 * metrics.ece(table)
    assert torch.equal(found.transform(given).logits, given.logits / found.temperature)


@pytest.mark.filterwarnings("ignore:.*normalized")
def test_rounding_that_leaves_the_temperature_undetermined_warns():
    given = over_confident(300)
    sure = Predictions(2 * given.logits, given.labels)
    with pytest.warns(DoubtfulFit, match="300 samples.*logits.*digits"):
        found = Temperature().fit(rounded(sure, 1))
    assert found.fitted.doubt
    certain = Predictions.from_probs(functional.one_hot(given.prediction, 10).double(), given.labels)
    with pytest.warns(DoubtfulFit, match="0 of 300 samples.*logits.*digits"):
        assert Temperature().fit(certain).temperature == 1


def test_log_floor_is_saved_with_the_temperature(tmp_path):
    table = rounded(over_confident(2_000), 3)
    fitted = Temperature().fit(table)
    fitted.save(tmp_path / "t.safetensors")
    assert torch.equal(
        Temperature.load(tmp_path / "t.safetensors").transform(table).logits, fitted.transform(table).logits
    )


def test_other_calibrators_warn_if_labels_have_probability_zero():
    """Rounded probabilities of an over-confident network: on the true logits these fits raised the NLL."""
    make = torch.Generator().manual_seed(0)
    true = 3 * torch.randn(3_000, 10, generator=make)
    labels = true.softmax(1).multinomial(1, generator=make)[:, 0]
    rounded = ((2.3 * true).softmax(1, dtype=torch.float64) * 100).round() / 100
    rounded[torch.arange(3_000), rounded.argmax(1)] += 1 - rounded.sum(1)
    given = Predictions.from_probs(rounded, labels)
    for name in ("ensemble_temperature", "vector_scaling"):
        with pytest.warns(DoubtfulFit, match="probability zero"):
            build_calibrator(name).fit(given)
    found = Temperature(objective="ece", search="grid").fit(given).temperature
    assert found == pytest.approx(2.3, rel=0.3)
