"""The page recommends a recalibration, with code that works."""

import dataclasses
import html
import re

import numpy as np
import pytest
import torch

from fedlas.evaluation import evaluate
from fedlas.evaluation_report import Report, State
from fedlas.metrics import ece
from fedlas.posthoc import build_calibrator
from fedlas.predictions import Predictions
from fedlas.report.html import report_page
from fedlas.report.model import Model
from fedlas.report.recalibration import CALIBRATED, UNRELIABLE, VERDICTS, recommendations
from report import pages

pytest.importorskip("jinja2")


def calibrated_report(predictions: Predictions, posthoc: str = "temperature") -> Report:
    return evaluate(predictions, posthoc=posthoc, resamples=100)


def run(code: str, **names: object) -> object:
    """Execute a snippet; return the probabilities that it computes."""
    exec(code, names)
    return names["probs"]


@pytest.mark.parametrize("of_probs", [False, True])
def test_recommended_code_divides_logits_by_the_temperature(of_probs):
    predictions = pages.sample_predictions(2_000)
    if of_probs:
        predictions = Predictions.from_probs(predictions.probs.double(), predictions.labels)
    report = calibrated_report(predictions)
    [action] = recommendations(report, predictions)
    shown_temperature = float(re.search(r"by ([\d.]+) ", action.title)[1])
    assert shown_temperature == pytest.approx(report.after["temperature"].parameters["temperature"], rel=5e-3)
    assert action.verdict.startswith(VERDICTS["all"])
    code, expected = dict(action.code), torch.softmax(predictions.logits.double() / shown_temperature, dim=1)
    logits, probs = predictions.logits.double(), predictions.probs.double()
    by_torch = run(code["PyTorch"], torch=torch, logits=logits, probs=probs)
    by_numpy = run(code["NumPy"], np=np, logits=logits.numpy(), probs=probs.numpy())
    for computed in (by_torch, torch.from_numpy(by_numpy)):
        assert torch.allclose(computed, expected, atol=1e-9)
    assert float(ece(by_torch, predictions.labels)) < float(report["ece"]) / 2


@pytest.mark.parametrize("of_probs", [False, True])
def test_recommended_code_for_two_classes_takes_one_or_two_columns(of_probs):
    """Regression: the code for two columns turned every probability of a single column into one."""
    predictions = pages.sample_predictions(2_000, classes=2)
    if of_probs:
        predictions = Predictions.from_probs(predictions.logits.double().softmax(1), predictions.labels)
    [action] = recommendations(calibrated_report(predictions), predictions)
    temperature = float(re.search(r"by ([\d.]+) ", action.title)[1])
    expected = torch.softmax(predictions.logits.double() / temperature, dim=1)[:, 1]
    logits, probs = predictions.logits.double().numpy(), predictions.probs.double().numpy()
    two, one = (code for name, code in action.code if name.startswith("NumPy"))
    by_two = run(two, np=np, logits=logits, probs=probs)[:, 1]
    by_one = run(one, np=np, logits=logits[:, 1] - logits[:, 0], probs=probs[:, 1])
    for computed in (by_two, by_one):
        assert torch.allclose(torch.from_numpy(computed), expected, atol=1e-9)


@pytest.mark.parametrize("of_probs", [False, True])
def test_recommended_code_fits_saves_and_loads_other_calibrators(tmp_path, monkeypatch, of_probs):
    predictions = pages.sample_predictions(600)
    if of_probs:
        predictions = Predictions.from_probs(predictions.probs.double(), predictions.labels)
    [action] = recommendations(calibrated_report(predictions, "isotonic"), predictions)
    code = dict(action.code)
    assert "--posthoc isotonic" in code["Command line"]
    assert "calibrate apply calibrator.safetensors" in code["Command line"]
    monkeypatch.chdir(tmp_path)
    build_calibrator("isotonic").fit(predictions).save("calibrator.safetensors")
    names = {"probs": predictions.probs} if of_probs else {"logits": predictions.logits}
    exec(code["Python, with the saved calibrator"], names)
    result = names["calibrated_probs" if of_probs else "calibrated_logits"]
    calibrated = build_calibrator("isotonic").fit(predictions).transform(predictions)
    assert torch.allclose(result.double(), (calibrated.probs if of_probs else calibrated.logits).double())


def test_recalibration_that_does_not_help_is_not_recommended():
    calibrated = pages.sample_predictions(2_000, scale=1.0)
    [action] = recommendations(calibrated_report(calibrated), calibrated)
    assert action.verdict.startswith(CALIBRATED)
    assert "not needed" in action.title
    assert action.code == ()
    report = calibrated_report(pages.sample_predictions(600))
    state = report.after["temperature"]
    doubtful = dataclasses.replace(state, fits=tuple(dataclasses.replace(fit, doubt="x") for fit in state.fits))
    [action] = recommendations(dataclasses.replace(report, after={"temperature": doubtful}))
    assert action.verdict.startswith(UNRELIABLE)
    assert action.title.startswith("Do not use")
    assert action.code == ()


def test_recalibration_without_significant_effect_is_optional(monkeypatch):
    predictions = pages.sample_predictions(600)
    monkeypatch.setattr("fedlas.report.recalibration.effect", lambda *_: "unchanged")
    [action] = recommendations(calibrated_report(predictions), predictions)
    assert action.title.startswith("Temperature scaling (T = ")
    assert action.title.endswith(") is optional")
    assert dict(action.code).keys() == {"PyTorch", "NumPy"}


def test_recommended_code_quotes_calibrator_names():
    report = calibrated_report(pages.sample_predictions(200))
    name = "<b>; rm -rf '~'"
    renamed_state: State = dataclasses.replace(report.after["temperature"], name=name)
    text = report_page(Model(report=dataclasses.replace(report, after={name: renamed_state})))
    assert "<b>" not in text
    assert "--posthoc '<b>; rm -rf '\"'\"'~'\"'\"''" in html.unescape(text)


def test_a_report_without_calibrators_has_no_recommendation():
    predictions = pages.sample_predictions(200)
    assert 'id="recalibration"' not in report_page(Model(predictions=predictions, posthoc=()), resamples=50)


def test_copy_button_copies_or_selects_the_code(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    button = tab.page.locator("button.copy").first
    button.click()
    tab.page.wait_for_selector("button.copy:text-matches('Copied|Selected')")
    if button.inner_text() == "Selected":
        assert "torch.softmax" in tab.page.evaluate("window.getSelection().toString()")
    else:
        assert button.inner_text() == "Copied"
    button.blur()
    assert button.inner_text() == "Copy"
