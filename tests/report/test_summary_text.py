"""Summary text claims no more than the intervals support."""

import dataclasses
import re
from functools import cache

import pytest
import torch

from fedlas import formatting, metrics
from fedlas.evaluation import evaluate
from fedlas.evaluation_report import Report, State
from fedlas.metrics import bin_statistics, equal_width_edges
from fedlas.metrics.bin_sums import EdgeRule
from fedlas.metrics.result import Comparison, Definition, Interval, Result
from fedlas.posthoc import build_calibrator
from fedlas.predictions import Predictions
from fedlas.report.recalibration import recommendations
from fedlas.report.summary_text import direction, effect, headline, sentences, typical_bin, worst_bin


def sample_predictions(n: int, classes: int = 10, scale: float = 1.0, seed: int = 0) -> Predictions:
    """Predictions whose logits are `scale` times those that the labels were drawn from."""
    random = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(n, classes, generator=random)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    return Predictions(scale * logits, labels, split="val")


def report_of(predictions: Predictions, posthoc: tuple[str, ...] = (), **options: object) -> Report:
    return evaluate(predictions, posthoc=posthoc, resamples=300, **options)


@cache
def cached_report(n: int, classes: int = 10, scale: float = 1.0, posthoc: tuple[str, ...] = ()) -> Report:
    return report_of(sample_predictions(n, classes, scale), posthoc)


@pytest.fixture
def report() -> Report:
    """Return the report of an over-confident model, with two calibrators."""
    return cached_report(3_000, scale=2.0, posthoc=("temperature", "isotonic"))


def percent(result: Result) -> str:
    bounds = () if result.interval is None else (result.interval.low, result.interval.high)
    return formatting.percent(float(result), *bounds)


def summary(report: Report) -> str:
    return " ".join([headline(report), *sentences(report)])


@pytest.mark.parametrize(
    ("classes", "scale", "expected_direction"),
    [
        (2, 2.0, "over"),
        (10, 0.5, "under"),
        pytest.param(100, 2.0, "over", marks=pytest.mark.campaign),
        pytest.param(100, 0.5, "under", marks=pytest.mark.campaign),
    ],
)
def test_headline_states_over_or_under_confidence(classes, scale, expected_direction):
    report = cached_report(3_000, classes, scale)
    assert direction(report.before) == expected_direction
    gap = f"{expected_direction}-confident by {100 * abs(float(report['signed_ece'])):.1f} "
    assert headline(report).startswith(gap)
    assert any(gap in line for line in sentences(report))
    opposite = {"over": "under", "under": "over"}[expected_direction]
    assert f"{opposite}-confident" not in summary(report)


@pytest.mark.parametrize("classes", [pytest.param(2, marks=pytest.mark.campaign), 10])
def test_a_calibrated_model_is_not_called_miscalibrated(classes):
    report = cached_report(3_000, classes, posthoc=("temperature",))
    assert direction(report.before) == "none"
    assert "-confident" not in summary(report)
    floor = f"{100 * report['ece'].details['noise_floor']:.1f} %"
    assert floor in headline(report)
    assert "T = " not in headline(report)
    (line,) = [line for line in sentences(report) if "T = " in line]
    ece_match = re.search(r" (\d+\.\d+) % to ", line)
    assert ece_match is not None
    assert float(ece_match[1]) == pytest.approx(100 * float(report["ece"]), abs=0.05)


@pytest.mark.campaign
@pytest.mark.parametrize("n", [5, 60])
def test_calibrated_models_are_rarely_called_miscalibrated(n):
    """At 95 %, about 2 of 40 calibrated models may be; the probability of more than 7 is below 0.002."""
    flagged = 0
    for seed in range(40):
        predictions = sample_predictions(n, 4, seed=seed)
        results = {
            name: metrics.bootstrap(getattr(metrics, name), predictions, resamples=300)
            for name in ("ece", "signed_ece")
        }
        results |= {"over_ece": metrics.over_ece(predictions), "under_ece": metrics.under_ece(predictions)}
        flagged += direction(State("uncalibrated", results, {})) != "none"
    assert flagged <= 7


@pytest.mark.parametrize("n", [1, 5])
def test_summary_of_few_samples_gives_a_wide_interval(n):
    predictions = sample_predictions(2_000)
    correct_predictions = predictions[predictions.correct]
    report = report_of(correct_predictions[:n])
    assert direction(report.before) == "none"
    text = " ".join(sentences(report))
    low, high = report["ece"].interval.low, report["ece"].interval.high
    assert f" 0 to {formatting.percent(high, low, high)}" in text
    assert text.lower().count(f"{n} sample") == 1 + (high >= 0.1)  # mentioned again if there are too few
    assert headline(report)


def test_errors_of_both_signs_have_no_direction():
    random = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(4_000, generator=random)
    accuracy = torch.where(confidence > 0.75, confidence - 0.12, confidence + 0.12)
    correct = (torch.rand(4_000, generator=random) < accuracy).long()
    report = report_of(Predictions.from_probs(confidence, correct))
    assert direction(report.before) == "both"
    assert f"(ECE {100 * float(report['ece']):.1f} %)" in headline(report)
    parts = [percent(report[name]) for name in ("over_ece", "under_ece")]
    assert re.search(f"O-ECE {parts[0]}.*U-ECE {parts[1]}", " ".join(sentences(report)))


def test_miscalibrated_positive_class_is_reported_for_binary_models():
    """A positive class that is always underestimated: the confidence of the predicted class is right on average."""
    generator = torch.Generator().manual_seed(0)
    positive = 0.1 + 0.8 * torch.rand(3000, generator=generator, dtype=torch.float64)
    labels = (torch.rand(3000, generator=generator, dtype=torch.float64) < positive + 0.06).long()
    report = evaluate(Predictions(torch.stack([1 - positive, positive], 1).log(), labels))
    assert direction(report.before) == "none"
    classwise_ece = percent(report.before["classwise_ece"])
    assert classwise_ece == "6.2 %"
    assert classwise_ece in headline(report)
    assert any(classwise_ece in sentence for sentence in sentences(report))


def test_probability_and_frequency_of_a_rare_class_are_reported():
    """Regression: a risk that is too high everywhere was reported as under-confidence alone."""
    generator = torch.Generator().manual_seed(0)
    risk = 0.4 * torch.rand(3000, generator=generator, dtype=torch.float64)
    labels = (torch.rand(3000, generator=generator, dtype=torch.float64) < risk / 8).long()
    report = evaluate(Predictions.from_probs(torch.stack([1 - risk, risk], 1), labels), resamples=100)
    mean, rate = (f"{100 * float(values.double().mean()):.3g} %" for values in (risk, labels))
    assert any(f"second class is {mean}; {rate} of the samples" in line for line in sentences(report))
    reversed_classes = evaluate(Predictions.from_probs(torch.stack([risk, 1 - risk], 1), 1 - labels), resamples=100)
    assert any(f"first class is {mean}; {rate} of the samples" in line for line in sentences(reversed_classes))
    assert re.match("under-confident by .* predicted class", headline(report))
    assert not any("second class" in line for line in sentences(cached_report(300)))


def test_summary_without_intervals_claims_no_significance():
    report = evaluate(sample_predictions(2_000, scale=2.0), posthoc="temperature", intervals=False)
    assert direction(report.before) == "unknown"
    text = summary(report)
    assert "over-confident" not in text
    assert text.count("interval") == 2
    assert effect(report.before, report.after["temperature"]) == "untested"


def test_accuracy_at_a_confidence_is_taken_from_its_bin(report):
    predictions = sample_predictions(3_000, scale=2.0)
    confidence, correct = predictions.confidence, predictions.correct
    in_bin = (confidence > 13 / 15) & (confidence <= 14 / 15)
    reliability_bin = typical_bin(report.before.bins["width"])
    assert reliability_bin is not None
    assert reliability_bin.samples == int(in_bin.sum())
    assert reliability_bin.accuracy == pytest.approx(float(correct[in_bin].double().mean()))
    assert f" {formatting.percent(reliability_bin.accuracy, reliability_bin.low, reliability_bin.high)}" in headline(
        report
    )
    assert typical_bin(evaluate(predictions[:8], intervals=False).before.bins["width"]) is None


def test_worst_bin_is_reported_if_its_gap_is_significant(report):
    worst = worst_bin(report.before)
    assert worst is not None
    assert worst.confidence > worst.high
    gaps = report.before.bins["width"].weighted_gap
    assert worst.weighted_gap == pytest.approx(float(gaps.max()))
    edges = r" \d\.\d\d to \d\.\d\d"
    assert re.search(edges, " ".join(sentences(report)))[0] == f" {worst.lower:.2f} to {worst.upper:.2f}"
    calibrated = cached_report(300)
    assert worst_bin(calibrated.before) is None
    assert not re.search(edges, " ".join(sentences(calibrated)))


def test_summary_names_the_temperature_that_removes_miscalibration(report):
    temperature = report.after["temperature"].parameters["temperature"]
    assert effect(report.before, report.after["temperature"]) in {"all", "most"}
    assert f"T = {temperature:.3g} " in headline(report)
    lines = sentences(report)
    assert any(f"T = {temperature:.3g} (" in line for line in lines)
    assert any("isotonic" in line for line in lines)
    assert sum("cross-fitted in 5 " in line for line in lines) == 1


def test_doubtful_fit_is_reported_instead_of_its_effect(report):
    after = report.after["temperature"]
    fits = tuple(dataclasses.replace(fit, doubt="autre chose") for fit in after.fits)
    doubtful = dataclasses.replace(after, fits=fits)
    changed = dataclasses.replace(report, after={"temperature": doubtful})
    assert headline(changed) != headline(report)
    (line,) = [line for line in sentences(changed) if "autre chose" in line]
    assert re.search("temperature.* 5 of 5 ", line)
    assert "ECE" not in line


def test_summary_names_the_split_a_calibrator_was_fitted_on():
    predictions = sample_predictions(2_000, scale=2.0)
    calibration = sample_predictions(2_000, scale=2.0, seed=1)
    held_out = Predictions(calibration.logits, calibration.labels, split="held-out")
    lines = sentences(evaluate(predictions, posthoc="temperature", calibration=held_out, intervals=False))
    assert re.search('2,000 samples.*"held-out"', lines[-1])


def state(ece: float, low: float, high: float, noise_floor: float = 0.0, *, by_class: float = 0.0) -> State:
    definition = Definition("ECE", n=100)
    result = Result(ece, definition, Interval(low, high), {"noise_floor": noise_floor})
    classwise = Result(by_class + 0.01, definition, Interval(by_class, by_class + 0.02))
    bins = bin_statistics(torch.rand(9), torch.ones(9), equal_width_edges(3), EdgeRule.RIGHT)
    return State("temperature", {"ece": result, "classwise_ece": classwise}, {"width": bins})


def calibrated_state(
    after: tuple[float, float, float], tests: dict[str, str | None], *, by_class: float = 0.0
) -> State:
    """Return a state after calibration whose paired tests, against an ECE of 10 %, have the given outcomes."""
    before, calibrated = state(0.1, 0.08, 0.12, 0.01), state(*after, 0.002, by_class=by_class)
    interval = Interval(-1, 1)
    comparisons = {
        name: Comparison(before["ece"], calibrated["ece"], interval, 0.5, better) for name, better in tests.items()
    }
    return dataclasses.replace(calibrated, comparisons=comparisons)


@pytest.mark.parametrize(
    ("after", "tests", "expected"),
    [
        ((0.002, 0.0, 0.01), {"ece": "second"}, "all"),
        ((0.02, 0.015, 0.03), {"ece": "second"}, "most"),
        ((0.06, 0.05, 0.085), {"ece": "second"}, "part"),  # the intervals overlap, but the test is significant
        ((0.06, 0.055, 0.07), {"ece": None}, "unchanged"),  # they do not overlap, but the test is not significant
        ((0.12, 0.1, 0.14), {"ece": None}, "unchanged"),
        ((0.102, 0.09, 0.11), {"ece": "first"}, "worse"),
        ((0.002, 0.0, 0.01), {"ece": "second", "nll": "first"}, "harm"),
        ((0.002, 0.0, 0.01), {"ece": "second", "accuracy": "first"}, "harm"),
        ((0.002, 0.0, 0.01), {}, "untested"),
    ],
)
def test_effect_of_a_calibrator_follows_the_paired_tests(after, tests, expected):
    assert effect(state(0.1, 0.08, 0.12), calibrated_state(after, tests)) == expected


@pytest.mark.parametrize(
    ("before", "after", "better", "expected"),
    [(0.0, 0.03, "second", "predicted"), (0.03, 0.0, None, "classes"), (0.03, 0.02, None, "unchanged")],
)
def test_effect_on_single_classes_follows_the_classwise_ece(before, after, better, expected):
    calibrated = calibrated_state((0.002, 0.0, 0.01), {"ece": better}, by_class=after)
    assert effect(state(0.1, 0.08, 0.12, by_class=before), calibrated) == expected


def test_miscalibration_of_single_classes_after_calibration_is_reported():
    """Regression: a temperature was said to remove all miscalibration of a model with a wrong class prior."""
    generator = torch.Generator().manual_seed(2)
    prior = torch.tensor([0.9, 0.08, 0.02], dtype=torch.float64).log()
    logits = torch.randn(3000, 3, generator=generator, dtype=torch.float64) * 1.3 + prior
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    report = evaluate(Predictions(logits - 0.35 * prior, labels), posthoc=("temperature", "vector_scaling"))
    by_temperature, by_vector = report.after.values()
    assert effect(report.before, by_temperature) == "predicted"
    assert effect(report.before, by_vector) == "all"
    assert "not that of single classes" in headline(report)
    of_temperature, of_vector = (line for line in sentences(report) if "class-wise ECE goes" in line)
    assert f"to {percent(by_temperature['classwise_ece'])} (" in of_temperature
    assert "vector_scaling" in of_temperature
    assert f"to {percent(by_vector['classwise_ece'])} (not significantly above 0)" in of_vector


def test_a_calibrator_of_single_classes_is_recommended_though_the_ece_is_low():
    """Regression: recalibration was "not needed" for a positive class with an ECE of 26 %."""
    generator = torch.Generator().manual_seed(0)
    positive = 0.1 + 0.8 * torch.rand(3000, generator=generator, dtype=torch.float64)
    labels = (torch.rand(3000, generator=generator, dtype=torch.float64) < positive + 0.06).long()
    report = evaluate(Predictions(torch.stack([1 - positive, positive], 1).log(), labels), posthoc="vector_scaling")
    assert direction(report.before) == "none"
    assert effect(report.before, report.after["vector_scaling"]) == "classes"
    (recommendation,) = recommendations(report)
    assert recommendation.code
    assert "not needed" not in recommendation.title
    assert "single classes" in recommendation.verdict


@pytest.mark.parametrize(("scale", "n", "seed"), [(1.15, 1_000, 0), (1.0, 1_000, 1), (0.8, 400, 2)])
def test_calibrator_comparison_equals_a_comparison_of_two_models(scale, n, seed):
    predictions, calibration = (sample_predictions(n, scale=scale, seed=start) for start in (seed, seed + 100))
    calibrator = build_calibrator("temperature").fit(calibration.with_split(None))
    report = evaluate(predictions, posthoc=calibrator, resamples=300)
    tests = report.after["temperature"].comparisons
    assert set(tests) == {"accuracy", "ece", "nll", "brier", "aurc"}
    for name in ("ece", "nll"):
        comparison = metrics.paired_bootstrap(
            getattr(metrics, name), predictions, calibrator.transform(predictions), resamples=300
        )
        assert tests[name].better == comparison.better
        assert tests[name].p_value == pytest.approx(comparison.p_value)
    assert tests["accuracy"].better is None
    (line,) = [line for line in sentences(report) if "T = " in line]
    assert line.count("p = ") == 2


def test_paired_tests_of_calibrators_are_saved(report, tmp_path):
    report.save(tmp_path / "report.json")
    loaded = Report.load(tmp_path / "report.json")
    assert {name: effect(loaded.before, after) for name, after in loaded.after.items()} == {
        name: effect(report.before, after) for name, after in report.after.items()
    }
    assert sentences(loaded) == sentences(report)


def test_summary_truncates_long_untrusted_names():
    predictions = sample_predictions(400, 4, scale=2.0)
    soft = 0.9 * torch.nn.functional.one_hot(predictions.labels, 4).float() + 0.025
    long_name = "x" * 5_000
    report = report_of(Predictions(predictions.logits, soft, split=long_name), posthoc=("temperature",))
    lines = sentences(report)
    assert all(len(line) < 400 for line in lines)
    renamed_report = dataclasses.replace(
        report, after={long_name: dataclasses.replace(report.after["temperature"], name=long_name)}
    )
    assert all(len(line) < 400 for line in (headline(renamed_report), *sentences(renamed_report)))


def with_temperature(report: Report, temperature: float, standard_error: float, fits: int = 5) -> Report:
    """Return a report with one calibrator, of this temperature."""
    state = report.after["temperature"]
    parameters = {"temperature": temperature, "standard_error": standard_error}
    after = dataclasses.replace(state, parameters=parameters, fits=state.fits[:1] * fits)
    return dataclasses.replace(report, after={"temperature": after})


@pytest.mark.parametrize(("temperature", "expected_text"), [(4_987.0, "4990"), (2.316, "2.32")])
def test_temperature_is_formatted_consistently_without_exponent(report, temperature, expected_text):
    report = with_temperature(report, temperature, standard_error=0.02)
    assert f"; T = {expected_text} " in headline(report)
    assert any(f"T = {expected_text} (" in line for line in sentences(report))
    assert "e+" not in summary(report)


@pytest.mark.parametrize(("standard_error", "is_shown"), [(0.9, True), (1.1, False)])
def test_temperature_interval_is_shown_unless_it_is_uninformative(report, standard_error, is_shown):
    """With a standard error of log T above 1, the range spans more than a factor of 50."""
    lines = sentences(with_temperature(report, 2.0, standard_error))
    assert any("T = 2 (" in line for line in lines) == is_shown


def test_temperature_interval_of_cross_fitting_is_that_of_all_samples(report):
    """Each fold's fit has seen a part of the samples; their mean varies like one fit to all of them."""
    for fits, expected_range in ((1, "1.64 to 2.43"), (5, "1.68 to 2.38")):
        lines = sentences(with_temperature(report, 2.0, 0.1, fits))
        assert any(f"T = 2 ({expected_range})" in line for line in lines)


def test_a_calibrator_that_costs_accuracy_or_likelihood_is_harmful(report):
    kind = "temperature"
    calibrated = report.after[kind]
    results, tests = dict(calibrated.results), dict(calibrated.comparisons)
    for name, value in {"accuracy": 0.5, "nll": 9.0}.items():
        results[name] = Result(value, calibrated[name].definition)
        tests[name] = dataclasses.replace(tests[name], second=results[name], better="first")
    harmful = dataclasses.replace(calibrated, results=results, comparisons=tests)
    assert effect(report.before, harmful) == "harm"
    text = " ".join(sentences(dataclasses.replace(report, after={kind: harmful})))
    loss = report["nll"]
    nll = formatting.number(loss, loss.interval.low, loss.interval.high, percent=False)
    assert re.search(rf" NLL .*{nll} to 9\.000.*accuracy .*{percent(report['accuracy'])} to 50\.00 %", text)


def test_summary_counts_labels_of_probability_zero():
    probs = torch.tensor([[1.0, 0.0], [0.6, 0.4]]).repeat(20, 1)
    labels = torch.tensor([0, 0] * 18 + [1, 1] * 2)
    lines = sentences(evaluate(Predictions.from_probs(probs, labels), intervals=False))
    assert any(re.match("2 labels .*zero.* NLL", line) for line in lines)
    assert not any("zero" in line for line in sentences(cached_report(300)))
