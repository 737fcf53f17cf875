"""The plugin `no_silent_skips` reports unexpected skips as failures."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from no_silent_skips import fail_silent_skip

SKIPPED = """
import pytest

def test_package():
    pytest.importorskip("a_package_that_is_not_there")

@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_device():
    pass
"""
MODULE = 'import pytest\npytest.importorskip("a_package_that_is_not_there")\n'


@pytest.mark.parametrize(
    ("env_value", "reason", "expected"),
    [("1", "could not import 'x'", "failed"), ("1", "needs a CUDA device", "skipped"), ("0", "no x", "skipped")],
)
def test_a_skip_fails_unless_a_gpu_or_a_browser_is_missing(monkeypatch, env_value, reason, expected):
    monkeypatch.setenv("FEDLAS_WHOLE", env_value)
    report = fail_silent_skip(SimpleNamespace(skipped=True, outcome="skipped", longrepr=reason))
    assert report.outcome == expected
    assert reason in report.longrepr
    expected_failure = SimpleNamespace(skipped=True, outcome="skipped", longrepr="x", wasxfail="reason")
    assert fail_silent_skip(expected_failure).outcome == "skipped"


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("env_value", "source", "expected"),
    [
        ("1", SKIPPED, "1 failed, 1 skipped"),
        ("0", SKIPPED, "2 skipped"),
        ("1", MODULE, "1 error"),
        ("0", MODULE, "1 skipped"),
    ],
)
def test_the_plugin_sees_skipped_tests_and_modules(tmp_path, env_value, source, expected):
    (tmp_path / "test_made_up.py").write_text(source)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no_silent_skips", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "FEDLAS_WHOLE": env_value, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert expected in completed.stdout, completed.stdout
