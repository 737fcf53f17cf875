"""The same parameter has the same name and default in Python and in the commands."""

import inspect
from typing import Any

import pytest

import fedlas
from fedlas.cli.compare import compare_models as compare_command
from fedlas.cli.evaluation import detect_ood, evaluate_command
from fedlas.comparison import compare_models, compare_runs
from fedlas.ood import detect
from fedlas.report.html import report_page

# Parameters of commands that are about the command itself: files that it writes, and its exit code.
OF_COMMANDS = {"html", "json", "figures", "fail_if", "ledger", "overwrite"}
SHARED = ("bins", "level", "resamples", "seed", "folds", "posthoc", "calibration")


def defaults(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize(
    ("command", "function"),
    [
        (evaluate_command, fedlas.evaluate_files),
        (compare_command, fedlas.compare),
        (detect_ood, detect),
    ],
)
def test_commands_share_parameters_and_defaults_with_their_function(command, function):
    command_defaults, function_defaults = defaults(command.__wrapped__), defaults(function)
    names = command_defaults.keys() - OF_COMMANDS - {"columns"}
    assert names <= function_defaults.keys()
    assert {name: command_defaults[name] or None for name in names} == {
        name: function_defaults[name] or None for name in names
    }


def test_functions_share_defaults():
    """`evaluate` calibrates only on request; what starts from files or a `Model` tries a temperature."""
    functions = (
        fedlas.evaluate, fedlas.evaluate_files, fedlas.calibrate, fedlas.compare, fedlas.Model, fedlas.save_figures,
        compare_models, compare_runs, report_page,
    )  # fmt: skip
    values: dict[str, set[Any]] = {name: set() for name in SHARED}
    for function in functions:
        for name, value in defaults(function).items():
            if name in SHARED and not (function is fedlas.evaluate and name == "posthoc"):
                values[name].add(value or None)
    assert values.pop("bins") <= {15, None}  # a page takes the number of bins of the first report
    assert values == {
        "level": {0.95}, "resamples": {None}, "seed": {None}, "folds": {5}, "posthoc": {"temperature"},
        "calibration": {None},
    }  # fmt: skip


def test_output_paths_follow_the_other_parameters():
    for function in (fedlas.write_predictions, fedlas.save_page, fedlas.save_figures):
        assert list(inspect.signature(function).parameters)[1] in {"path", "folder"}
