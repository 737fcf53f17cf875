"""Recommendations of a report page: how to recalibrate the model, with code to copy."""

import re
import shlex
from dataclasses import dataclass

from fedlas.evaluation_report import Report, State
from fedlas.formatting import significant
from fedlas.predictions import AnyPredictions
from fedlas.report.summary_text import EFFECTS, class_error, direction, effect

VERDICTS = {change: f"On these samples this {words}." for change, words in EFFECTS.items()} | {
    "worse": "It makes the ECE significantly worse.",
    "harm": "It makes accuracy or NLL significantly worse.",
    "untested": "Its effect was not tested for significance.",
}
UNRELIABLE = "Its fit is unreliable."
CALIBRATED = "No miscalibration is detectable, so recalibration is not needed."


@dataclass(frozen=True)
class Recommendation:
    """A way to recalibrate a model.

    Args:
        title: the action in one line.
        verdict: its effect on the evaluated samples.
        code: lines of code to copy, by language; empty if it is not recommended.
    """

    title: str
    verdict: str
    code: tuple[tuple[str, str], ...]


def recommendations(report: Report, predictions: AnyPredictions | None = None) -> list[Recommendation]:
    """Return one recommendation for each calibrator of a report.

    Args:
        report: the evaluation of a model.
        predictions: predictions of the model; they decide whether the code divides logits or log-probabilities.
    """
    of_probs = getattr(predictions, "given_probs", None) is not None
    return [_recommend(report, state, of_probs) for state in report.after.values()]


def _recommend(report: Report, state: State, of_probs: bool) -> Recommendation:
    name = re.sub(r" \d+$", "", state.name)  # remove the number of calibrators with equal names
    is_temperature = name == "temperature" and "temperature" in state.parameters and "log_floor" not in state.parameters
    if is_temperature:
        temperature = significant(state.parameters["temperature"])
        inputs = "logarithms of the probabilities" if of_probs else "logits"
        action = f"Divide the {inputs} by {temperature} (temperature scaling)"
        method = f"temperature scaling (T = {temperature})"
        note = f" T is the mean of {len(state.fits)} cross-fitted temperatures." if len(state.fits) > 1 else ""
        code = _temperature_code(temperature, of_probs, report.classes == 2)
    else:
        action, method, note = f"Fit and apply the calibrator {state.name}", f"the calibrator {state.name}", ""
        code = _calibrator_code(name, of_probs)
    change = effect(report.before, state)
    if any(fit.doubt for fit in state.fits):
        return Recommendation(f"Do not use {method}", UNRELIABLE + note, ())
    if change in {"worse", "harm"}:
        return Recommendation(f"Do not use {method}", VERDICTS[change] + note, ())
    if direction(report.before) == "none" and class_error(report.before) is None:
        return Recommendation(f"{_capitalized(method)} is not needed", CALIBRATED + note, ())
    title = f"{_capitalized(method)} is optional" if change == "unchanged" else action
    tested = "nll" in state.comparisons and float(state["nll"]) > float(report.before["nll"])
    cost = " It raises the NLL, though not significantly." if tested else ""
    return Recommendation(title, VERDICTS[change] + cost + note, code)


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _temperature_code(temperature: str, of_probs: bool, binary: bool) -> tuple[tuple[str, str], ...]:
    """Return code that divides logits by a temperature; for two classes also those of a single column."""
    torch_logits, numpy_logits = ("torch.log(probs)", "np.log(probs)") if of_probs else ("logits", "logits")
    shape = ", one column per class" if binary else ""
    code = (
        (f"PyTorch{shape}", f"probs = torch.softmax({torch_logits} / {temperature}, dim=1)"),
        (
            f"NumPy{shape}",
            f"z = {numpy_logits} / {temperature}\n"
            "z = np.exp(z - z.max(axis=1, keepdims=True))\n"
            "probs = z / z.sum(axis=1, keepdims=True)",
        ),
    )
    if not binary:
        return code
    logit = "(np.log(probs) - np.log1p(-probs))" if of_probs else "logits"
    what = "probability" if of_probs else "logit"
    return *code, (f"NumPy, {what} of the second class alone", f"probs = 1 / (1 + np.exp(-{logit} / {temperature}))")


def _calibrator_code(name: str, of_probs: bool) -> tuple[tuple[str, str], ...]:
    """Return code that fits a calibrator on held-out predictions, saves it and applies it."""
    load = 'load_calibrator("calibrator.safetensors")'
    python = f"from fedlas.posthoc import load_calibrator\n\ncalibrated_logits = {load}.transform(logits)"
    if of_probs:
        python = (
            "from fedlas import Predictions\nfrom fedlas.posthoc import load_calibrator\n\n"
            f"calibrated_probs = {load}.transform(Predictions.from_probs(probs)).probs"
        )
    return (
        (
            "Command line",
            f"fedlas calibrate fit validation.npz --posthoc {shlex.quote(name)} --out calibrator.safetensors\n"
            "fedlas calibrate apply calibrator.safetensors test.npz --out calibrated.npz",
        ),
        ("Python, with the saved calibrator", python),
    )
