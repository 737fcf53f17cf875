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


def temperature_by_search(logits: np.ndarray, labels: np.ndarray) -> float:
    """The optimum by another method: a bounded search in log T."""
    minimum = minimize_scalar(
        lambda u: nll_at(logits, labels, math.exp(u)), bounds=(-9, 9), method="bounded", options={"xatol": 1e-10}
    )
    return math.exp(minimum.x)


# The scales at which other code fails: LBFGS with a small step stops near 1.8, others return 0 or stop at 10.
@pytest.mark.parametrize("scale", [0.01, 0.05, 0.3, 1, 3, 30, 300, 1000])
def test_the_temperature_is_exact_at_every_scale(scale: float):
    logits, labels = problem(4000, 10, scale=1.0)
    at_one = Temperature().fit(logits, labels).temperature
    assert at_one == pytest.approx(1, abs=0.05)
    assert at_one == pytest.approx(temperature_by_search(logits.numpy(), labels.numpy()), rel=1e-5)
    temperature = Temperature().fit(scale * logits, labels).temperature
    assert temperature == pytest.approx(scale * at_one, rel=1e-9)
    float32_temperature = Temperature().fit((scale * logits).float(), labels).temperature
    assert float32_temperature == pytest.approx(scale * at_one, rel=1e-6)


# probmetrics takes probabilities, which are rounded to zero at larger scales.
@pytest.mark.parametrize("scale", [0.05, 1, 3])
def test_temperature_matches_probmetrics(scale: float):
    pytest.importorskip("probmetrics")
    from fedlas.posthoc import Probmetrics

    logits, labels = problem(2000, 5, scale=scale)
    probmetrics_logits = Probmetrics(method="temp-scaling", floor=1e-30).fit(logits, labels).transform(logits)
    torch.testing.assert_close(
        Temperature().fit(logits, labels).transform(logits).softmax(1),
        probmetrics_logits.softmax(1),
        atol=1e-4,
        rtol=1e-4,
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 6), st.floats(-3, 3))
def test_temperature_is_a_local_minimum_and_no_worse_than_one(seed: int, n: int, classes: int, log_scale: float):
    random = np.random.default_rng(seed)
    logits = random.standard_normal((n, classes)) * 10**log_scale
    labels = random.integers(classes, size=n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # such few samples are often separable
        temperature = Temperature().fit(logits, labels).temperature
    minimum = nll_at(logits, labels, temperature)
    assert 1e-3 <= temperature <= 1e4
    assert minimum <= nll_at(logits, labels, 1.0) * (1 + 1e-12)
    for nearby in (temperature * 0.99, temperature * 1.01):
        if 1e-3 <= nearby <= 1e4:
            assert minimum <= nll_at(logits, labels, nearby) + 1e-12


def test_derivatives_match_autograd():
    logits, labels = problem(50)
    for targets in (labels, functional.one_hot(labels, 4).double() * 0.8 + 0.05):
        factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        loss = functional.cross_entropy(factor * logits, targets)
        (slope,) = torch.autograd.grad(loss, factor, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, factor)
        derivatives = scaled_nll(Samples(logits, targets), 0.7)
        assert derivatives == pytest.approx((loss.item(), slope.item(), curvature.item()), rel=1e-10)


@pytest.mark.parametrize("margin", [1e-3, 0.2, 1.5, 40.0])
def test_correct_samples_give_the_lower_bound(margin: float):
    """Regression: steps became ever shorter, and 100 of them ended at T = 0.0096 without a warning."""
    logits = torch.tensor([[margin, 0.0, 0.0]] * 20)
    with pytest.warns(UserWarning, match=r"20.*0\.001.*correct"):
        calibrator = Temperature().fit(logits, torch.zeros(20, dtype=torch.long))
    assert calibrator.temperature == calibrator.low


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0, 50.0])
def test_solver_needs_few_evaluations(scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Regression: a last step of length zero was treated as leaving the bracket, and 26 bisections followed."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2_000, 5, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    calls = []
    monkeypatch.setattr(solvers, "scaled_nll", lambda *args: (calls.append(args), scaled_nll(*args))[1])
    inverse_temperature = solvers.best_inverse_temperature(Samples((scale * logits).to(dtype), labels), 1e-4, 1e4)
    assert inverse_temperature * scale == pytest.approx(1, rel=0.1)
    assert len(calls) <= 12


def test_separable_samples_give_the_lower_bound_that_was_set():
    logits = torch.randn(100, 3, dtype=torch.float64)
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
        calibrator = Temperature().fit(logits, labels)
    assert calibrator.temperature == pytest.approx(1e-3)
    assert calibrator.fitted.after == pytest.approx(math.log(2) / 2)
    assert calibrator.transform(logits).isfinite().all()
    assert calibrator.transform(logits.float().clamp(-3e38, 3e38)).isfinite().all()


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
    errors = {
        t / 10: float(metrics.ece((logits / (t / 10)).softmax(1).float(), labels, compat="official"))
        for t in range(1, 101)
    }
    smallest_error = min(errors.values())
    expected = min(t for t, value in errors.items() if value == smallest_error)
    assert Temperature(objective="ece", search="grid").fit(logits, labels).temperature == expected
    # A constant confidence: every temperature leaves the classes equal, and all have the same error.
    constant_logits = torch.zeros(10, 2)
    assert Temperature(objective="ece", search="grid").fit(constant_logits, torch.zeros(10).long()).temperature == 0.1


def test_grid_search_of_the_ece_accepts_soft_labels():
    logits, _ = problem(500)
    calibrator = Temperature(objective="ece", search="grid").fit(logits, (logits / 3).softmax(1))
    assert calibrator.temperature == pytest.approx(3.0, abs=0.2)


def test_standard_error_matches_repeated_samples():
    log_temperatures, errors = [], []
    for seed in range(200):
        calibrator = Temperature().fit(*problem(300, scale=2.0, seed=seed))
        log_temperatures.append(math.log(calibrator.temperature))
        errors.append(calibrator.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(log_temperatures), rel=0.15)
    with pytest.raises(RuntimeError, match=r"nll.*solve"):
        _ = Temperature(search="grid").fit(*problem()).standard_error


def test_binary_logits_match_their_two_columns():
    score, labels = binary_problem()
    calibrator = Temperature().fit(score, labels)
    assert calibrator.temperature == pytest.approx(
        temperature_by_search(np.stack([0 * score, score], 1), labels.numpy()), rel=1e-5
    )
    torch.testing.assert_close(calibrator.transform(score), score / calibrator.temperature)


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


TRUE_TEMPERATURE = 2.3  # factor by which the logits of `over_confident` are too large


def over_confident(n: int = 6_000) -> Predictions:
    """Return logits of an over-confident network: four fifths of the labels are the top class, T is `TRUE`."""
    generator = torch.Generator().manual_seed(4)
    logits = 1.2 * torch.randn(n, 10, generator=generator, dtype=torch.float64)
    logits[torch.arange(n), torch.randint(10, (n,), generator=generator)] += (
        2 + 6 * torch.rand(n, generator=generator).double()
    )
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return Predictions(TRUE_TEMPERATURE * logits, labels)


def rounded(predictions: Predictions, decimals: int) -> Predictions:
    return Predictions.from_probs(predictions.probs.round(decimals=decimals), predictions.labels)


@pytest.mark.filterwarnings("ignore:.*normalized")
@pytest.mark.parametrize(("decimals", "tolerance"), [(2, 0.3), (3, 0.3), (4, 0.1), (6, 0.1)])
@pytest.mark.parametrize("soft", [False, True])
def test_rounded_probabilities_match_their_logits(decimals, tolerance, soft):
    """Regression: zeros became the logarithm of the smallest float64, and T exceeded 100."""
    predictions = over_confident()
    if soft:
        labels = functional.one_hot(predictions.labels, 10).double()
        predictions = Predictions(predictions.logits, labels)
    exact_temperature = Temperature().fit(predictions).temperature
    rounded_predictions = rounded(predictions, decimals)
    assert rounded_predictions.decimals == decimals
    calibrator = Temperature().fit(rounded_predictions)
    assert not calibrator.fitted.doubt
    assert calibrator.temperature == pytest.approx(exact_temperature, rel=tolerance)
    assert metrics.nll(calibrator.transform(predictions)) < metrics.nll(predictions)
    assert metrics.ece(calibrator.transform(rounded_predictions)) < 0.5 * metrics.ece(rounded_predictions)
    assert torch.equal(calibrator.transform(predictions).logits, predictions.logits / calibrator.temperature)


@pytest.mark.filterwarnings("ignore:.*normalized")
def test_rounding_that_leaves_the_temperature_undetermined_warns():
    predictions = over_confident(300)
    sharpened = Predictions(2 * predictions.logits, predictions.labels)
    with pytest.warns(DoubtfulFit, match="300 samples.*logits.*digits"):
        calibrator = Temperature().fit(rounded(sharpened, 1))
    assert calibrator.fitted.doubt
    one_hot = Predictions.from_probs(functional.one_hot(predictions.prediction, 10).double(), predictions.labels)
    with pytest.warns(DoubtfulFit, match="0 of 300 samples.*logits.*digits"):
        assert Temperature().fit(one_hot).temperature == 1


def test_log_floor_is_saved_with_the_temperature(tmp_path):
    rounded_predictions = rounded(over_confident(2_000), 3)
    calibrator = Temperature().fit(rounded_predictions)
    calibrator.save(tmp_path / "t.safetensors")
    assert torch.equal(
        Temperature.load(tmp_path / "t.safetensors").transform(rounded_predictions).logits,
        calibrator.transform(rounded_predictions).logits,
    )


def test_other_calibrators_warn_if_labels_have_probability_zero():
    """Rounded probabilities of an over-confident network: on the true logits these fits raised the NLL."""
    generator = torch.Generator().manual_seed(0)
    true_logits = 3 * torch.randn(3_000, 10, generator=generator)
    labels = true_logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    rounded_probs = ((2.3 * true_logits).softmax(1, dtype=torch.float64) * 100).round() / 100
    rounded_probs[torch.arange(3_000), rounded_probs.argmax(1)] += 1 - rounded_probs.sum(1)
    predictions = Predictions.from_probs(rounded_probs, labels)
    for name in ("ensemble_temperature", "vector_scaling"):
        with pytest.warns(DoubtfulFit, match="probability zero"):
            build_calibrator(name).fit(predictions)
    temperature = Temperature(objective="ece", search="grid").fit(predictions).temperature
    assert temperature == pytest.approx(2.3, rel=0.3)
