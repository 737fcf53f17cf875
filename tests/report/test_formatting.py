"""Numbers as text: one rule, the same in Python and JavaScript, in the terminal, on the page and in tables."""

import itertools
import re

import pytest

from fedlas import formatting
from fedlas.comparison import compare_models
from fedlas.evaluation import evaluate
from fedlas.metrics import nll, paired_bootstrap
from fedlas.metrics.result import Comparison, Definition, Interval, Result
from fedlas.report.figures import reliability_data
from fedlas.report.html import report_page
from fedlas.report.summary_text import sentences
from fedlas.report.tables import Cell, Column, Row, Table
from report import pages


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.18359, 0.1692, 0.1981, "18.4 [16.9, 19.8]"),  # half-width 1.4 points
        (0.18359, 0.1502, 0.2171, "18.4 [15.0, 21.7]"),  # 3.3
        (0.18359, 0.1802, 0.1867, "18.36 [18.02, 18.67]"),  # 0.33
        (0.18359, 0.0, 0.4, "18 [0, 40]"),  # 20
        (0.18359, 0.183588, 0.183592, "18.35900 [18.35880, 18.35920]"),  # 0.0002
        (0.18359, 0.18359, 0.18359, "18.36 [18.36, 18.36]"),
        (0.18359, None, None, "18.36"),
    ],
)
def test_interval_width_determines_the_digits(value, low, high, text):
    assert formatting.cell(value, low, high) == text
    assert formatting.percent(value, low, high) == f"{text.split(' ')[0]} %"


def test_other_units_have_three_decimals_without_an_interval():
    assert formatting.cell(1.37914, percent=False) == "1.379"
    assert formatting.cell(1.37914, 1.3, 1.5, percent=False) == "1.38 [1.30, 1.50]"
    assert formatting.cell(12345678.0, percent=False) == "1.235e+07"


def test_formatting_never_shows_minus_zero_or_probability_0_or_1():
    assert formatting.fixed(-0.001, 2) == "0.00"
    assert formatting.probability(0.99999) == "> 99.99 %"
    assert formatting.probability(1e-9) == "< 0.01 %"
    assert formatting.p_value(1e-4) == "p < 0.001"


def test_p_values_that_more_resamples_would_lower_are_upper_bounds():
    first, second = pages.sample_predictions(200), pages.sample_predictions(200, scale=0.1)
    test = paired_bootstrap(nll, first, second, resamples=99)
    assert (test.p_value, test.p_value_is_bound) == (pytest.approx(0.02), True)
    assert "p < 0.02" in str(test)
    assert Comparison.from_dict(test.to_dict()).p_value_is_bound
    assert not paired_bootstrap(nll, first, first, resamples=99).p_value_is_bound
    corrected = compare_models({"a": first, "b": second, "c": pages.sample_predictions(200, scale=0.3)}, resamples=99)
    assert any("p < 0.0" in str(pair.comparison) and pair.comparison.p_value > 0.021 for pair in corrected)
    assert formatting.p_value(0.00242, is_bound=True) == "p < 0.003"
    assert formatting.p_value(1.0, is_bound=True) == "p = 1.000"


VALUES = (0.0, 1.0, 0.5, 0.125, 0.375, 0.18359, 0.96014996, 0.96125, 0.91875, 1e-5, 2.5e-4, 0.99995, -0.0525, -1e-7)
LARGE_VALUES = (2.316, 4_987.0, 4_985.0, 12.5, 0.0625, 1e-7, 999.95, 1_234_500.0, 1_235_500.0, 8.5e12, 29.5, 1234.25)
INTERVALS = [
    (None, None),
    (0.1, 0.2),
    (0.17, 0.19),
    (0.5, 0.5),
    (0.0, 0.9),
    (0.1, 0.1 + 2e-7),
    (0.25, 0.75),
    (0.1, 0.69),
]
JAVASCRIPT_NAMES = {
    "cell": "formatCell",
    "number": "formatNumber",
    "percent": "formatPercent",
    "interval": "formatInterval",
    "probability": "formatProbability",
    "count": "formatCount",
    "significant": "formatSignificant",
    "edge": "formatEdge",
    "p_value": "formatPValue",
    "level": "formatLevel",
    "fixed": "formatFixed",
    "decimals": "decimalsOf",
}


def cases():
    """Return calls of all functions: the name in Python, and the arguments, with `percent` last where there is one."""
    all_values = (*VALUES, *LARGE_VALUES)
    for value, (low, high), percent in itertools.product(all_values, INTERVALS, (True, False)):
        yield from ((name, (value, low, high, percent)) for name in ("cell", "number"))
        if percent:
            yield "percent", (value, low, high)
    for (low, high), percent in itertools.product(INTERVALS, (True, False)):
        yield "decimals", (low, high, percent)
        if low is not None and percent:
            yield "interval", (low, high)
    for value in all_values:
        yield from ((name, (value,)) for name in ("significant", "edge"))
        yield from (("fixed", (value, digits)) for digits in (0, 1, 2, 8))
        yield from (("count", (abs(value),)), ("level", (abs(value),)))
    for value in (value for value in VALUES if 0 <= value <= 1):
        yield "probability", (value,)
        yield from (("p_value", (value, is_bound)) for is_bound in (True, False))


def call_python(name, arguments):
    option = {"p_value": "is_bound"} | dict.fromkeys(("cell", "number", "decimals"), "percent")
    if name not in option:
        return getattr(formatting, name)(*arguments)
    return getattr(formatting, name)(*arguments[:-1], **{option[name]: arguments[-1]})


def test_javascript_rounds_as_python(modules):
    calls = list(cases())
    javascript_texts = modules.evaluate(
        """async (calls) => {
            const format = await import("./format.js");
            return calls.map(([name, args]) => String(format[name](...args)).replaceAll("\\u00a0", " "));
        }""",
        [[JAVASCRIPT_NAMES[name], list(arguments)] for name, arguments in calls],
    )
    assert {name for name, _ in calls} == set(JAVASCRIPT_NAMES)
    python_texts = [str(call_python(name, arguments)) for name, arguments in calls]
    assert [(*call, text) for call, text in zip(calls, javascript_texts, strict=True)] == [
        (*call, text) for call, text in zip(calls, python_texts, strict=True)
    ]


def report_with_ece(ece: Result):
    """Return a report with this ECE."""
    report = evaluate(pages.sample_predictions(60), intervals=False)
    results = {**report.before.results, "ece": ece}
    signed = Result(0.1, report["signed_ece"].definition, Interval(0.05, 0.15))
    return report.__class__(
        report.before.__class__("uncalibrated", results | {"signed_ece": signed}, report.before.bins), {}, 60, 10
    )


DEFINITION = Definition("ECE", bins=15, n=60)
ECE = {
    "with an interval": Result(0.18359, DEFINITION, Interval(0.17, 0.197)),
    "without one": Result(0.18359, DEFINITION),
}


@pytest.mark.parametrize("name", ECE)
def test_summary_page_and_figures_show_equal_numbers(name, open_tab, tmp_path):
    ece = ECE[name]
    text = {"with an interval": "18.4", "without one": "18.36"}[name]
    report = report_with_ece(ece)
    assert f"ECE is {text} %" in " ".join(sentences(report))
    (tmp_path / "page.html").write_text(report_page(report), encoding="utf-8")
    tab = open_tab(tmp_path / "page.html")
    row = [cell.strip() for cell in tab.page.locator(".numbers tbody td").all_inner_texts()]
    assert text in [cell.split()[0] for cell in row]
    assert f"ECE {text}\u00a0%" in tab.text("#reliability figcaption")
    assert reliability_data(report.before.bins["width"], ece, "").ece_text == f"{text} %"
    if name == "without one":  # columns of a table have one number of decimals
        table = Table("one", "", (Column("ECE %"),), (Row("ce", "CE", (Cell((float(ece),)),)),))
        assert text in table.text()


@pytest.mark.parametrize("name", ECE)
def test_terminal_table_shows_equal_numbers(name):
    ece = ECE[name]
    bounds = () if ece.interval is None else (ece.interval.low, ece.interval.high)
    assert ece.cell() == formatting.cell(float(ece), *bounds)
    assert re.search(rf"(^| ){re.escape(ece.cell())}( |$)", str(report_with_ece(ece)), re.MULTILINE)
