"""With `FEDLAS_WHOLE=1`, as `scripts/check` runs the tests, a skip is a failure unless a GPU or a browser is missing.

So may be the right to mount a file system, which few containers give.
A package that is not installed would otherwise turn its tests off, and nobody would know.
"""

import os
from collections.abc import Generator
from typing import Any

import pytest

MAY_BE_MISSING = ("CUDA", "GPU", "Chromium", "playwright", "no file system can be mounted")


def fail_silent_skip(report: Any) -> Any:
    """Turn a skip that is not allowed into a failure."""
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if os.environ.get("FEDLAS_WHOLE") == "1" and skipped:
        reason = str(report.longrepr)
        if not any(word in reason for word in MAY_BE_MISSING):
            report.outcome = "failed"
            report.longrepr = f"only what needs a GPU, a browser or a mount may be skipped: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return fail_silent_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return fail_silent_skip((yield))
