"""User environments: missing packages, unusual names of folders, other locales, no terminal, `python -O`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import missing
import pytest
from surroundings import SURROUNDINGS, differences, run_tour

from fedlas.extras import optional_module

HERE = Path(__file__).parent


@pytest.mark.parametrize(("content", "message"), [(None, "present"), ("import absent_one", "present.*absent_one")])
def test_missing_package_error_names_package_and_extra(tmp_path, monkeypatch, content, message):
    """Also for a package that is installed but lacks a dependency."""
    if content is not None:
        (tmp_path / "present.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=rf"{message}.*pip install 'fedlas\[search\]'"):
        optional_module("present", "search")


@pytest.mark.campaign
def test_every_package_of_an_extra_has_a_test_case():
    assert {package for packages in missing.extras().values() for package in packages} == set(missing.EXAMPLES)


@pytest.mark.campaign
def test_missing_package_errors_have_install_commands(tmp_path):
    names = ("optuna", "rich", "numba")
    options = [text for name in names for text in ("--package", name)]
    command = [sys.executable, str(HERE / "missing.py"), *options, "--json", str(tmp_path / "found.json")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stdout
    result = json.loads((tmp_path / "found.json").read_text())
    assert re.search(r"optuna.*fedlas\[search\]", result[0]["says"])
    assert re.search(r"probmetrics.*numba.*fedlas\[posthoc\]", result[2]["says"])


@pytest.mark.campaign
@pytest.mark.parametrize("options", [(), ("--extras",)])
def test_everything_else_works_without_each_package_and_extra(options):
    process = subprocess.run(
        [sys.executable, str(HERE / "missing.py"), *options], capture_output=True, text=True, check=False, timeout=1800
    )
    assert process.returncode == 0, process.stdout


@pytest.mark.campaign
def test_check_requires_package_and_install_command_in_an_error():
    assert missing.names_package("ImportError: rich is needed for this: pip install 'fedlas[train]'", "rich")
    assert not missing.names_package("ImportError: No module named 'rich'", "rich")
    assert not missing.names_package("ImportError: optuna is needed for this: pip install 'fedlas[report]'", "optuna")
    assert not missing.names_package("", "rich")


@pytest.mark.campaign
def test_results_are_equal_in_a_restricted_environment(tmp_path):
    """No asserts, no terminal, no home, the locale C, and names with spaces and letters that ASCII lacks."""
    expected = run_tour(SURROUNDINGS["normal"], tmp_path / "normal", "--quick")
    assert expected["table"]["copies_equal"] == [True, True]
    assert expected["training"]["problems"] == []
    codes = {name: (item["code"], item["traceback"]) for name, item in expected["command_line"].items()}
    assert codes == {"evaluate": (0, False), "missing": (1, False), "list": (0, False)}
    assert differences(run_tour(SURROUNDINGS["all at once"], tmp_path / "odd", "--quick"), expected) == []


@pytest.mark.campaign
def test_results_are_equal_in_each_environment(tmp_path):
    expected = run_tour(SURROUNDINGS["normal"], tmp_path / "normal")
    found_differences = {
        name: differences(run_tour(surroundings, tmp_path / name), expected)
        for name, surroundings in SURROUNDINGS.items()
        if name != "normal"
    }
    assert found_differences == {name: [] for name in found_differences}
