"""Words say what the intervals carry, and no more."""

import dataclasses

import pytest
import torch

from fedlas import metrics
from fedlas.evaluation import Report, State, evaluate
from fedlas.metrics import bin_statistics, equal_width_edges
from fedlas.metrics.bins import EdgeRule
from fedlas.metrics.result import Definition, Interval, Result
from fedlas.predictions import Predictions
from fedlas.report.places import filled_places
from fedlas.report.words import at_confidence, direction, in_words, repair, sentences, worst_place


def sampled(n: int, classes: int = 10, scale: float = 1.0, seed: int = 0) -> Predictions:
    """A model whose logits are `scale` times those that the labels were drawn from."""
    random = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(n, classes, generator=random)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    return Predictions(scale * logits, labels, split="val")


def report_of(predictions: Predictions, posthoc: tuple[str, ...] = (), **options: object) -> Report:
    return evaluate(predictions, posthoc=posthoc, resamples=300, **options)


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize(("scale", "way"), [(2.0, "over"), (0.5, "under")])
def test_a_clear_direction_is_said(classes, scale, way):
    report = report_of(sampled(3_000, classes, scale))
    assert direction(report.before) == way
    said = in_words(report)
    gap = abs(float(report["signed_ece"]))
    assert said.startswith(f"{way}-confident by {100 * gap:.1f} points")
    other = {"over": "under", "under": "over"}[way]
    assert f"{other}-confident" not in " ".join([said, *sentences(report)])
    assert any(f"It is {way}-confident by {100 * gap:.1f} points" in line for line in sentences(report))


@pytest.mark.parametrize("classes", [2, 10])
def test_a_calibrated_model_is_not_accused(classes):
    report = report_of(sampled(3_000, classes), posthoc=("temperature",))
    assert direction(report.before) == "none"
    said = " ".join([in_words(report), *sentences(report)])
    assert "confident by" not in said
    assert "no miscalibration is shown" in said
    assert "by chance" in said
    assert "repairs" not in said
    assert "has nothing to repair that is shown" in said


@pytest.mark.parametrize("n", [5, 60])
def test_false_accusations_of_calibrated_models_are_rare(n):
    """At 95 %, of 40 calibrated models about 2 may be accused; the chance of more than 7 is below 0.002."""
    accused = 0
    for seed in range(40):
        given = sampled(n, 4, seed=seed)
        found = {
            name: metrics.bootstrap(getattr(metrics, name), given, resamples=300) for name in ("ece", "signed_ece")
        }
        found["over_ece"], found["under_ece"] = metrics.over_under(given)
        accused += direction(State("as given", found, {})) != "none"
    assert accused <= 7


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_samples_say_how_little_is_known(n):
    every = sampled(2_000)
    right = every[every.correct]
    report = report_of(right[:n])
    assert direction(report.before) == "none"
    said = " ".join(sentences(report))
    assert "No miscalibration is shown" in said
    high = report["ece"].interval.high
    assert f"anywhere from 0 to {100 * high:.1f} %" in said
    assert ("cannot tell more" in said) == (high >= 0.1)
    assert in_words(report)


def test_errors_that_cancel_are_no_direction():
    random = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(4_000, generator=random)
    true = torch.where(confidence > 0.75, confidence - 0.12, confidence + 0.12)
    hits = (torch.rand(4_000, generator=random) < true).long()
    report = report_of(Predictions.from_probs(confidence, hits))
    assert direction(report.before) == "both"
    assert in_words(report).startswith("too sure in some places and too unsure in others")
    assert "on average the two cancel" in " ".join(sentences(report))


def test_without_intervals_nothing_is_claimed():
    report = evaluate(sampled(2_000, scale=2.0), posthoc="temperature", intervals=False)
    assert direction(report.before) == "unknown"
    said = " ".join([in_words(report), *sentences(report)])
    assert "over-confident" not in said
    assert said.count("no interval was computed") == 2
    assert "may repair some of it" in said


def test_what_a_confidence_is_worth_is_that_of_its_bin():
    given = sampled(4_000, scale=2.0)
    report = report_of(given)
    confidence, correct = given.confidence, given.correct
    near = (confidence > 13 / 15) & (confidence <= 14 / 15)
    place = at_confidence(report.before.bins["width"])
    assert place is not None
    assert place.samples == int(near.sum())
    assert place.accuracy == pytest.approx(float(correct[near].double().mean()))
    assert f"it is right {100 * place.accuracy:.0f} % of the time" in in_words(report)
    assert at_confidence(report_of(given[:8]).before.bins["width"]) is None


def test_the_place_of_the_error_has_to_be_more_than_chance():
    report = report_of(sampled(4_000, scale=2.0))
    place = worst_place(report.before)
    assert place is not None
    assert place.confidence > place.high
    gaps = report.before.bins["width"].weighted_gap
    assert place.weighted_gap == pytest.approx(float(gaps.max()))
    assert worst_place(report_of(sampled(300)).before) is None
    assert not any("of the error lies" in line for line in sentences(report_of(sampled(300))))


def test_a_temperature_that_repairs_is_praised():
    report = report_of(sampled(4_000, scale=2.0), posthoc=("temperature", "isotonic"))
    found = report.after["temperature"].parameters["temperature"]
    assert repair(report.before, report.after["temperature"]) in {"all", "most"}
    assert f"T = {found:.2g}" in in_words(report)
    lines = sentences(report)
    assert any(line.startswith(f"A temperature of T = {found:.3g} (") for line in lines)
    assert any(line.startswith("The calibrator isotonic") for line in lines)
    assert sum("cross-fitted in 5 parts" in line for line in lines) == 1


def test_a_calibrator_fitted_elsewhere_is_named_with_its_split():
    held_out = sampled(2_000, scale=2.0, seed=1)
    other = Predictions(held_out.logits, held_out.labels, split="held-out")
    lines = sentences(report_of(sampled(2_000, scale=2.0), posthoc=("temperature",), calibration=other))
    assert lines[-1] == 'Calibrators were fitted on 2,000 samples of the split "held-out".'


def state(ece: float, low: float, high: float, chance: float = 0.0, **parameters: float) -> State:
    definition = Definition("ECE", n=100)
    result = Result(ece, definition, Interval(low, high), {"noise_floor": chance})
    bins = bin_statistics(torch.rand(9), torch.ones(9), equal_width_edges(3), EdgeRule.RIGHT)
    return State("temperature", {"ece": result}, {"width": bins}, parameters=parameters)


@pytest.mark.parametrize(
    ("after", "effect"),
    [
        ((0.002, 0.0, 0.01), "all"),
        ((0.02, 0.015, 0.03), "most"),
        ((0.06, 0.055, 0.07), "part"),
        ((0.06, 0.05, 0.085), "unclear"),
        ((0.095, 0.08, 0.11), "little"),
        ((0.102, 0.09, 0.11), "little"),
        ((0.12, 0.1, 0.14), "worse"),
    ],
)
def test_how_much_is_repaired(after, effect):
    assert repair(state(0.1, 0.08, 0.12, 0.01), state(*after, 0.002)) == effect


def test_soft_labels_and_names_that_someone_else_gave():
    given = sampled(1_500, 4, scale=2.0)
    soft = 0.9 * torch.nn.functional.one_hot(given.labels, 4).float() + 0.025
    long = "x" * 5_000
    report = report_of(Predictions(given.logits, soft, split=long), posthoc=("temperature",))
    lines = sentences(report)
    assert all(len(line) < 400 for line in lines)
    named = dataclasses.replace(report, after={long: dataclasses.replace(report.after["temperature"], name=long)})
    assert all(len(line) < 400 for line in (in_words(named), *sentences(named)))


def test_places_hold_every_sample_and_leave_empty_bins_out():
    given = sampled(500)
    bins = evaluate(given, intervals=False).before.bins["width"]
    places = filled_places(bins)
    assert sum(place.samples for place in places) == 500
    assert len(places) == int((bins.counts > 0).sum()) < 15
    assert all(place.low <= place.accuracy <= place.high for place in places)
    assert sum(abs(place.weighted_gap) for place in places) == pytest.approx(
        float(evaluate(given, intervals=False)["ece"])
    )


@pytest.mark.parametrize(("temperature", "brief", "long"), [(4_987.0, "5000", "4990"), (2.316, "2.3", "2.32")])
def test_numbers_are_written_plainly(temperature, brief, long):
    report = report_of(sampled(3_000, scale=2.0), posthoc=("temperature",))
    learned = {"temperature": temperature, "standard_error": 0.02}
    after = dataclasses.replace(report.after["temperature"], parameters=learned)
    report = dataclasses.replace(report, after={"temperature": after})
    assert f"; T = {brief} " in in_words(report)
    assert any(f"T = {long} (" in line for line in sentences(report))
    assert "e+" not in " ".join([in_words(report), *sentences(report)])


def test_what_a_repair_costs_is_said():
    """Of 200 classes, isotonic regression made the ECE small, and accuracy and NLL much worse."""
    report = report_of(sampled(2_000, 10, 2.0), ("temperature",))
    kind = "temperature"
    assert "; but " not in " ".join(sentences(report))
    held = report.after[kind].results
    costs = {
        "accuracy": Result(0.5, held["accuracy"].definition, Interval(0.48, 0.52)),
        "nll": Result(9.0, held["nll"].definition, Interval(8.5, 9.5)),
    }
    worse = dataclasses.replace(report.after[kind], results={**held, **costs})
    said = " ".join(sentences(dataclasses.replace(report, after={kind: worse})))
    accuracy, loss = float(report["accuracy"]), float(report["nll"])
    assert "is no repair: the ECE goes from" in said
    assert "repairs" not in in_words(dataclasses.replace(report, after={kind: worse}))
    assert f"; but accuracy falls from {100 * accuracy:.1f} % to 50.0 % and the NLL rises from {loss:.3g} to 9." in said


def test_probabilities_of_zero_are_said():
    probs = torch.tensor([[1.0, 0.0], [0.6, 0.4]]).repeat(20, 1)
    labels = torch.tensor([0, 0] * 18 + [1, 1] * 2)
    lines = sentences(evaluate(Predictions.from_probs(probs, labels), resamples=100))
    assert any(line.startswith("2 labels have probability zero, which makes the true NLL infinite") for line in lines)
    assert not any("probability zero" in line for line in sentences(report_of(sampled(200))))
