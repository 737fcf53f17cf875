"""User environments: missing packages, unusual names of folders, other locales, no terminal, `python -O`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import missing
import pytest
from surroundings import PLACES, unlike, walked

from fedlas.extras import optional_module

HERE = Path(__file__).parent


@pytest.mark.parametrize(("content", "named"), [(None, "present"), ("import absent_one", "present.*absent_one")])
def test_missing_package_error_names_package_and_extra(tmp_path, monkeypatch, content, named):
    """Also for a package that is installed but lacks a dependency."""
    if content is not None:
        (tmp_path / "present.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=rf"{named}.*pip install 'fedlas\[search\]'"):
        optional_module("present", "search")


@pytest.mark.campaign
def test_every_package_of_an_extra_has_a_test_case():
    assert {item for held in missing.extras().values() for item in held} == set(missing.DEEDS)


@pytest.mark.campaign
def test_missing_package_errors_have_install_commands(tmp_path):
    names = ("optuna", "rich", "numba")
    words = [text for name in names for text in ("--package", name)]
    command = [sys.executable, str(HERE / "missing.py"), *words, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "found.json").read_text())
    assert re.search(r"optuna.*fedlas\[search\]", result[0]["says"])
    assert re.search(r"probmetrics.*numba.*fedlas\[posthoc\]", result[2]["says"])


@pytest.mark.campaign
@pytest.mark.parametrize("words", [(), ("--extras",)])
def test_everything_else_works_without_each_package_and_extra(words):
    done = subprocess.run(
        [sys.executable, str(HERE / "missing.py"), *words], capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.campaign
def test_check_requires_package_and_install_command_in_an_error():
    assert missing.named("ImportError: rich is needed for this: pip install 'fedlas[train]'", "rich")
    assert not missing.named("ImportError: No module named 'rich'", "rich")
    assert not missing.named("ImportError: optuna is needed for this: pip install 'fedlas[report]'", "optuna")
    assert not missing.named("", "rich")


@pytest.mark.campaign
def test_results_are_equal_in_a_restricted_environment(tmp_path):
    """No asserts, no terminal, no home, the locale C, and names with spaces and letters that ASCII lacks."""
    usual = walked(PLACES["usual"], tmp_path / "usual", "--quick")
    assert usual["table"]["again"] == [True, True]
    assert usual["training"]["problems"] == []
    codes = {name: (item["code"], item["traceback"]) for name, item in usual["command_line"].items()}
    assert codes == {"evaluate": (0, False), "missing": (1, False), "list": (0, False)}
    assert unlike(walked(PLACES["all at once"], tmp_path / "odd", "--quick"), usual) == []


@pytest.mark.campaign
def test_results_are_equal_in_each_environment(tmp_path):
    usual = walked(PLACES["usual"], tmp_path / "usual")
    result = {
        name: unlike(walked(position, tmp_path / name), usual) for name, position in PLACES.items() if name != "usual"
    }
    assert result == {name: [] for name in result}
