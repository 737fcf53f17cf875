"""User environments: missing packages, unusual names of folders, other locales, no terminal, `python -O`."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import missing
import pytest

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
@pytest.mark.parametrize("options", [(), ("--extras",)])
def test_missing_packages_are_named_and_everything_else_works(options):
    """Children are forked from a process that has trained nothing."""
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


@dataclass(frozen=True)
class Environment:
    """How the tour is started.

    Args:
        variables: environment variables; those with an empty value are removed.
        python: options of the interpreter.
        options: of `tour.py`.
        detached: whether it runs in a new session with closed streams, without a terminal.
    """

    variables: dict[str, str] = field(default_factory=dict)
    python: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    detached: bool = False


C = {"LANG": "C", "LC_ALL": "C"}
# Python then cannot represent the folder names of the other environments.
ASCII = C | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
# Not even root can create a folder below /proc.
HOMELESS = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": "", "MPLCONFIGDIR": ""}
ENVIRONMENTS = {
    "python -O": Environment(python=("-O",)),
    "LANG=C": Environment(C),
    "LANG=C, and Python takes text for ASCII": Environment(ASCII, options=("--ascii",)),
    "home cannot be written": Environment(HOMELESS),
    "no terminal, streams closed": Environment({"TERM": ""}, detached=True),
    "processes are spawned": Environment(options=("--start-method", "spawn")),
    "processes are forked": Environment(options=("--start-method", "fork")),
    "all at once": Environment(C | HOMELESS | {"TERM": ""}, ("-O",), ("--start-method", "spawn"), detached=True),
}


def tour_results(environment: Environment, folder: Path) -> Any:
    """Run the tour, whose folders have spaces and letters of several alphabets in their names."""
    folder.mkdir()
    variables = {name: value for name, value in (os.environ | environment.variables).items() if value}
    command = [sys.executable, *environment.python, str(HERE / "tour.py"), str(folder), *environment.options]
    if environment.detached:
        command = ["/bin/sh", "-c", 'exec "$@" <&- >&-', "sh", *command]  # stderr stays open
    output = folder / "output.txt"
    with output.open("wb") as file:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.run(command, env=variables, check=False, start_new_session=environment.detached, **streams)
    assert process.returncode == 0, output.read_text(errors="replace")
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def normal_results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    result = tour_results(Environment(), tmp_path_factory.mktemp("tour") / "normal")
    assert result["table"]["copies_equal"] == [True, True]
    assert result["training"]["problems"] == []
    codes = {name: (item["code"], item["traceback"]) for name, item in result["command_line"].items()}
    assert codes == {"evaluate": (0, False), "missing": (1, False), "list": (0, False)}
    return result


@pytest.mark.campaign
@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_results_are_equal_in_each_environment(normal_results, tmp_path, environment):
    assert tour_results(environment, tmp_path / "folder") == normal_results
