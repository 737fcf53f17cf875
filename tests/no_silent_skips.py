"""Pytest plugin: with `FEDLAS_WHOLE=1`, which `scripts/check` sets, unexpected skips fail.

Tests that need a GPU, a browser or the right to mount a file system may be skipped. Without this plugin, a missing
package would skip its tests unnoticed.
"""

import os
from collections.abc import Generator
from typing import Any

import pytest

MAY_BE_MISSING = ("CUDA", "GPU", "Chromium", "playwright", "no file system can be mounted")


def fail_silent_skip(report: Any) -> Any:
    """Report a skip that is not allowed as a failure."""
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if os.environ.get("FEDLAS_WHOLE") == "1" and skipped:
        reason = str(report.longrepr)
        if not any(resource in reason for resource in MAY_BE_MISSING):
            report.outcome = "failed"
            report.longrepr = f"only what needs a GPU, a browser or a mount may be skipped: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return fail_silent_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return fail_silent_skip((yield))
