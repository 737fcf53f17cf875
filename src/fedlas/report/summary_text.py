"""Summary text of a report: only statements that its intervals and paired tests support.

A direction is stated only if the interval of the signed ECE excludes zero, and a bin only if the interval of its
accuracy, Bonferroni-corrected for the number of bins, excludes its confidence. Otherwise the text states that no
miscalibration is shown, and gives the noise floor with the error.
"""

import math
from statistics import NormalDist
from typing import Literal

from fedlas.evaluation_report import Report, State
from fedlas.formatting import count, decimals, fixed, interval, level, number, p_value, percent, significant
from fedlas.metrics.bin_sums import Bins
from fedlas.metrics.result import Result
from fedlas.report.reliability_bins import ReliabilityBin, non_empty_bins

Direction = Literal["over", "under", "both", "some", "none", "unknown"]
Effect = Literal["all", "predicted", "classes", "most", "part", "unchanged", "worse", "harm", "untested"]

EFFECTS: dict[Effect, str] = {
    "all": "removes all detectable miscalibration",
    "predicted": "removes all detectable miscalibration of the predicted class, not that of single classes",
    "classes": "removes the detectable miscalibration of single classes",
    "most": "removes most of the miscalibration",
    "part": "removes part of the miscalibration",
    "unchanged": "does not change the ECE significantly",
    "worse": "makes the calibration significantly worse",
    "harm": "does harm",
    "untested": "was not tested for significance",
}
TYPICAL_CONFIDENCE = 0.9  # confidence whose accuracy the summary states
MIN_SAMPLES = 10  # smallest number of samples of a bin in the text
LONGEST = 60  # largest number of characters of an untrusted name
TINY = 1e-30  # smaller floors of probabilities are not due to rounding to decimals
MUCH = 0.1  # if the upper end of the interval is larger, the ECE is not known to be small


def direction(state: State) -> Direction:
    """Return the direction of the miscalibration that is statistically significant.

    "over" and "under": mean confidence is above or below accuracy; "both": over-confident and under-confident bins
    cancel; "some": miscalibration without a direction; "none": no significant miscalibration; "unknown": no intervals.
    """
    signed, total = state["signed_ece"].interval, state["ece"].interval
    if signed is None or total is None:
        return "unknown"
    if signed.low > 0 or signed.high < 0:
        return "over" if signed.low > 0 else "under"
    if total.low > 0:
        ends = [state[name].interval for name in ("over_ece", "under_ece")]
        return "both" if all(end is not None and end.low > 0 for end in ends) else "some"
    return "none"


def class_error(state: State) -> Result | None:
    """Return the class-wise ECE if its interval excludes zero: probabilities of some classes are miscalibrated."""
    result = state.results.get("classwise_ece")
    return result if result is not None and result.interval is not None and result.interval.low > 0 else None


def effect(before: State, after: State) -> Effect:
    """Return the effect of a calibrator on the calibration error, by paired tests on the same samples.

    "all": the ECE is significantly lower, and no miscalibration is detectable any more; "predicted": the same, except
    that the class-wise ECE is above zero; "most", "part": the ECE is significantly lower, by more or less than half of
    its excess over the noise floor; "unchanged": no significant difference; "classes": the same, but the class-wise
    ECE was above zero and is not any more; "worse": the ECE is significantly higher; "harm": accuracy or NLL is
    significantly worse, regardless of the ECE; "untested": there is no paired test, for example without intervals.
    """
    if "ece" not in after.comparisons:
        return "untested"
    if _costs(after):
        return "harm"
    test, remains = after.comparisons["ece"], class_error(after)
    if test.better == "first":
        return "worse"
    if test.better is None:
        return "classes" if class_error(before) is not None and remains is None else "unchanged"
    start, end = _excess(test.first), max(_excess(test.second), 0.0)
    total = after["ece"].interval
    if total is None or total.low <= 0:
        return "all" if remains is None else "predicted"
    return "most" if end < start / 2 else "part"


def typical_bin(bins: Bins, level: float = 0.95) -> ReliabilityBin | None:
    """Return the bin of the typical confidence; None if it has too few samples."""
    for filled_bin in non_empty_bins(bins, level):
        if filled_bin.lower < TYPICAL_CONFIDENCE <= filled_bin.upper and filled_bin.samples >= MIN_SAMPLES:
            return filled_bin
    return None


def worst_bin(state: State, level: float = 0.95) -> ReliabilityBin | None:
    """Return the significantly miscalibrated bin with the largest contribution to the ECE."""
    miscalibration = direction(state)
    bins = state.bins["width"]
    tests = max(1, int((bins.counts > 0).sum()))
    signs = {"over": (1,), "under": (-1,)}.get(miscalibration, (1, -1))
    miscalibrated = [
        filled_bin
        for filled_bin in non_empty_bins(bins, 1 - (1 - level) / tests)
        if not filled_bin.is_calibrated and math.copysign(1, filled_bin.weighted_gap) in signs
    ]
    return max(miscalibrated, key=lambda filled_bin: abs(filled_bin.weighted_gap), default=None)


def headline(report: Report) -> str:
    """Return one line: direction, accuracy at 0.9 confidence, and the effect of calibration."""
    state, miscalibration = report.before, direction(report.before)
    hidden = _hidden_error(report, miscalibration)
    parts = [_headline(state, miscalibration, " of the predicted class" if report.classes == 2 or hidden else "")]
    parts += [hidden] if hidden else []
    example = typical_bin(state.bins["width"], level=_level(state))
    if example is not None and example.is_calibrated and miscalibration not in {"none", "unknown"}:
        example = worst_bin(state, _level(state))  # an example of the error
    if example is not None:
        accuracy = percent(example.accuracy, example.low, example.high)
        parts.append(f"at {_about(example)} confidence the accuracy is {accuracy}")
    done = _headline_calibrator(report)
    if done is not None and miscalibration not in {"none", "unknown"}:
        doubted, change = any(fit.doubt for fit in done.fits), effect(state, done)
        nll = _lowered_nll(done) if change == "unchanged" else ""
        parts.append(f"{_called(done)} {'cannot be relied on' if doubted else nll + EFFECTS[change]}")
    return "; ".join(parts)


def _hidden_error(report: Report, miscalibration: Direction) -> str:
    """Describe the class-wise ECE where readers may mistake a statement on the predicted class for one on a class."""
    if miscalibration != "none" or "classwise_ece" not in report.before.results:
        return ""
    error = report.before["classwise_ece"].text()
    if report.classes == 2:
        return f"for the probability of one class the ECE is {error}"
    return "" if class_error(report.before) is None else f"the class-wise ECE is {error}"


def sentences(report: Report) -> tuple[str, ...]:
    """Return the results of a report as sentences, with confidence intervals."""
    state, miscalibration = report.before, direction(report.before)
    confidence_level = _level(state)
    samples = f"{count(report.n)} {'sample' if report.n == 1 else 'samples'}"
    where = f' of the split "{_name(report.split)}"' if report.split else ""
    classes = f" in {count(report.classes)} classes" if report.classes else ""
    lines = [f"Accuracy is {_fraction(state['accuracy'])} on {samples}{where}{classes}."]
    lines += _direction_sentences(state, miscalibration, samples)
    hidden = _hidden_error(report, miscalibration)
    if hidden:
        lines.append(
            "That is about the confidence in the predicted class, where errors of classes can cancel; "
            f"{hidden}. Reliability diagrams of single classes show where."
        )
    lines += _rarer_class(report)
    near = typical_bin(state.bins["width"], level=confidence_level)
    if near is not None:
        agrees = ", which agrees with the confidence" if near.is_calibrated else ""
        lines.append(
            f"Where its confidence is about {_about(near)} ({count(near.samples)} samples, mean "
            f"{_with_digits_of(near, near.confidence)}), the accuracy is {_accuracy(near)}{agrees}."
        )
    worst = worst_bin(state, confidence_level) if miscalibration not in {"none", "unknown"} else None
    if worst is not None:
        most = abs(worst.weighted_gap) > float(state["ece"]) / 2
        lines.append(
            f"{'Most' if most else 'The largest part'} of the error lies at confidences from {fixed(worst.lower, 2)} "
            f"to {fixed(worst.upper, 2)}: {count(worst.samples)} samples, mean confidence "
            f"{_with_digits_of(worst, worst.confidence)}, accuracy {_with_digits_of(worst, worst.accuracy)}."
        )
    lines += _floored(state)
    lines += [_effect_sentence(state, after, miscalibration) for after in report.after.values()]
    lines += sorted({_fitted(after) for after in report.after.values() if after.fits})
    return tuple(lines)


def _rarer_class(report: Report) -> list[str]:
    """Return how the mean probability of the rarer of two classes differs from its frequency."""
    details = report.before["classwise_ece"].details if "classwise_ece" in report.before.results else {}
    if "mean_prob" not in details:
        return []
    mean, rate, which = float(details["mean_prob"]), float(details["rate"]), "second"
    if rate > 1 / 2:
        mean, rate, which = 1 - mean, 1 - rate, "first"
    return [
        f"The mean probability of the {which} class is {significant(100 * mean)} %; {significant(100 * rate)} % of the "
        "samples are of that class."
    ]


def _direction_sentences(state: State, miscalibration: Direction, samples: str) -> list[str]:
    signed, total = state["signed_ece"], state["ece"]
    mean = float(state["accuracy"]) + float(signed)
    compared = f"mean confidence is {state['accuracy'].text(mean)}, accuracy {state['accuracy'].text()}"
    error = f"The ECE is {_fraction(total)}{_chance(total)}."
    if signed.interval is None or total.interval is None:
        side = "above" if float(signed) >= 0 else "below"
        return [
            f"Mean confidence is {_points(signed)} {side} accuracy; no confidence interval was computed.",
            f"The ECE is {total.text()}.",
        ]
    if miscalibration in {"over", "under"}:
        low, high = sorted(abs(end) for end in (signed.interval.low, signed.interval.high))
        return [
            f"It is {miscalibration}-confident by {_points(signed)} ({number(low, low, high)} to "
            f"{number(high, low, high)} points at {level(signed.interval.level)}): {compared}.",
            error,
        ]
    if miscalibration == "both":
        return [
            f"It is over-confident in some bins (O-ECE {_fraction(state['over_ece'])}) and under-confident in others "
            f"(U-ECE {_fraction(state['under_ece'])}); on average the two cancel: {compared}.",
            error,
        ]
    if miscalibration == "some":
        return [f"Confidence and accuracy differ, but no single direction is shown: {compared}.", error]
    unknown = f" {samples.capitalize()} cannot tell more." if total.interval.high >= MUCH else ""
    return [
        f"No miscalibration is shown: the ECE is {total.text()}, and the true one may be anywhere from 0 to "
        f"{total.text(total.interval.high)}{_chance(total)}.{unknown}"
    ]


def _effect_sentence(before: State, after: State, miscalibration: Direction) -> str:
    if any(fit.doubt for fit in after.fits):
        return _doubt(after)
    change = effect(before, after)
    verdict = EFFECTS[change]
    if change == "harm":
        verdict += f" ({' and '.join(_costs(after))})"
    if miscalibration == "none":
        unchanged = "has no detectable miscalibration to remove"
        if class_error(before) is not None:
            unchanged = "does not remove the miscalibration of single classes"
        verdict = {
            "all": "lowers the ECE, though no miscalibration was detectable",
            "predicted": "lowers the ECE of the predicted class, but leaves miscalibration of single classes",
            "unchanged": unchanged,
        }.get(change, verdict)
    if change == "unchanged":
        verdict = _lowered_nll(after) + verdict
    zeros = " Probabilities of zero may be the reason: give logits, or probabilities with more digits."
    explanation = zeros if _zeros(before) and change in {"worse", "harm"} else ""
    if class_error(after) is not None and _temperature(after) is not None:
        explanation += " A calibrator with parameters for each class, such as vector_scaling, may lower it."
    return f"{_subject(after, brief=miscalibration == 'none')} {verdict}: {_changes(before, after)}.{explanation}"


def _changes(before: State, after: State) -> str:
    """Describe the change of the ECE and of the NLL, each with the p-value of its paired test."""
    total = after["ece"]
    start = before["ece"].text()
    parts = [f"the ECE goes from {start} to {_fraction(total)}{_p_value(after, 'ece')}{_chance(total)}"]
    if any(class_error(state) is not None for state in (before, after)):
        by_class = after["classwise_ece"]
        end = f"{by_class.text()} (not significantly above 0)" if class_error(after) is None else _fraction(by_class)
        parts.append(f"the class-wise ECE goes from {before['classwise_ece'].text()} to {end}")
    if "nll" in after.results:
        start, end = (state["nll"].text() for state in (before, after))
        least = "at least " if _is_lower_bound(before) else ""
        undecided = least and after.comparisons["nll"].better is None if "nll" in after.comparisons else False
        parts.append(f"the NLL goes from {least}{start} to {end}{'' if undecided else _p_value(after, 'nll')}")
    if "accuracy" in after.comparisons and after.comparisons["accuracy"].better is not None:
        start, end = (state["accuracy"].text() for state in (before, after))
        parts.append(f"accuracy goes from {start} to {end}{_p_value(after, 'accuracy')}")
    return "; ".join(parts)


def _lowered_nll(after: State) -> str:
    test = after.comparisons.get("nll")
    return "lowers the NLL but " if test is not None and test.better == "second" else ""


def _p_value(after: State, name: str) -> str:
    test = after.comparisons.get(name)
    if test is None:
        return ""
    significance = "no significant difference, " if test.better is None else ""
    return f" ({significance}{p_value(test.p_value, is_bound=test.p_value_is_bound)})"


def _costs(after: State) -> list[str]:
    """Return which metrics other than the ECE a calibrator makes significantly worse."""
    costs = {"accuracy": "a lower accuracy", "nll": "a higher NLL"}
    tests = after.comparisons
    return [words for name, words in costs.items() if name in tests and tests[name].better == "first"]


def _zeros(state: State) -> int:
    """Count the labels whose input probability was zero."""
    return int(state["nll"].details.get("floored", 0)) if "nll" in state.results else 0


def _is_lower_bound(state: State) -> bool:
    """Return whether the NLL is a lower bound.

    It is if zeros were replaced by half of the last decimal; the smallest float is below any true probability.
    """
    return _zeros(state) > 0 and float(state["nll"].details["floor"]) > TINY


def _floored(state: State) -> list[str]:
    """Return a note where the NLL depends on the number that stands for probabilities of zero."""
    zeros = _zeros(state)
    if not zeros:
        return []
    labels = "label has" if zeros == 1 else "labels have"
    floor = f"{float(state['nll'].details['floor']):.2g}"  # too small for fixed decimals
    bound = f"the NLL shown depends on the number that stands for zero, {floor}"
    if _is_lower_bound(state):
        bound = f"the true NLL is larger than the one shown, in which {floor} stands for zero"
    return [f"{count(zeros)} {labels} probability zero: {bound}. Give logits, or probabilities with more digits."]


def _fitted(after: State) -> str:
    if len(after.fits) > 1:
        parts = f"{len(after.fits)} parts"
        return f"Calibrators were cross-fitted in {parts}: each part is evaluated by a fit to the others."
    fit = after.fits[0]
    of_split = f' of the split "{_name(fit.split)}"' if fit.split else ""
    leaked = ""
    if after.leaked:
        leaked = f", {count(after.leaked)} of which are evaluated too: the results after calibration are optimistic"
    return f"Calibrators were fitted on {count(fit.n)} samples{of_split}{leaked}."


def _doubt(after: State) -> str:
    """Return why a fitted calibrator should not be relied on."""
    doubts = [fit.doubt for fit in after.fits if fit.doubt]
    parts = f" in {len(doubts)} of {len(after.fits)} parts" if len(after.fits) > 1 else ""
    end = "" if doubts[0].endswith((".", "?")) else "."
    return f"Do not rely on {_name(after.name)}{parts}: {doubts[0]}{end}"


def _headline_calibrator(report: Report) -> State | None:
    """Return the calibrator of the headline: a temperature if there is one."""
    states = list(report.after.values())
    return next((state for state in states if _temperature(state) is not None), states[0] if states else None)


def _temperature(state: State) -> float | None:
    return state.parameters.get("temperature") if state.name.startswith("temperature") else None


def _called(state: State) -> str:
    temperature = _temperature(state)
    return _name(state.name) if temperature is None else f"T = {significant(temperature)}"


def _subject(state: State, *, brief: bool = False) -> str:
    temperature, spread = _temperature(state), state.parameters.get("standard_error", math.inf)
    if temperature is None:
        return f"The calibrator {_name(state.name)}"
    if brief or not spread < 1:
        return f"A temperature of T = {significant(temperature)}"
    # The standard error is that of log T in one fold. The mean over k folds varies like a fit to all samples, of which
    # each fold's fit has seen (k - 1) / k.
    spread *= math.sqrt(1 - 1 / len(state.fits)) if len(state.fits) > 1 else 1
    reach = NormalDist().inv_cdf((1 + _level(state)) / 2) * spread
    low, high = (temperature * math.exp(side * reach) for side in (-1, 1))
    return f"A temperature of T = {significant(temperature)} ({significant(low)} to {significant(high)})"


def _headline(state: State, miscalibration: Direction, of: str = "") -> str:
    signed, total = state["signed_ece"], state["ece"]
    if miscalibration in {"over", "under"}:
        return f"{miscalibration}-confident by {_points(signed)}{of and f' in the confidence{of}'}"
    if miscalibration == "both":
        return f"over-confident in some bins and under-confident in others (ECE {total.text()})"
    if miscalibration == "some":
        return f"confidence and accuracy differ, in no single direction (ECE {total.text()})"
    if miscalibration == "none":
        floor = total.details.get("noise_floor")
        by_chance = "" if floor is None else f", {total.text(floor)} by chance"
        return f"no miscalibration{of} is shown (ECE {total.text()}{by_chance})"
    side = "above" if float(signed) >= 0 else "below"
    return f"mean confidence is {_points(signed)} {side} accuracy (no interval was computed)"


def _chance(result: Result) -> str:
    floor = result.details.get("noise_floor")
    return "" if floor is None else f"; a perfectly calibrated model would show {result.text(floor)} by chance"


def _excess(result: Result) -> float:
    return float(result) - float(result.details.get("noise_floor", 0.0))


def _level(state: State) -> float:
    interval = state["ece"].interval
    return 0.95 if interval is None else interval.level


def _fraction(result: Result) -> str:
    """Write a fraction with its confidence interval."""
    ends = _ends(result)
    return f"{result.text()} ({interval(*ends)})" if ends else result.text()


def _ends(result: Result) -> tuple[float, float] | tuple[()]:
    return () if result.interval is None else (result.interval.low, result.interval.high)


def _name(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _about(filled_bin: ReliabilityBin) -> str:
    return fixed(filled_bin.confidence, 2).removesuffix("0")


def _accuracy(filled_bin: ReliabilityBin) -> str:
    """Write the accuracy in a bin of confidence, with its confidence interval."""
    low, high = filled_bin.low, filled_bin.high
    return f"{percent(filled_bin.accuracy, low, high)} ({interval(low, high)})"


def _with_digits_of(filled_bin: ReliabilityBin, fraction: float) -> str:
    """Write a fraction with as many decimals as the accuracy in a bin of confidence."""
    return f"{fixed(100 * fraction, decimals(filled_bin.low, filled_bin.high))} %"


def _points(gap: Result) -> str:
    return f"{fixed(abs(100 * float(gap)), decimals(*_ends(gap)))} points"
