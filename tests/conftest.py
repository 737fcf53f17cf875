"""Configure all tests: run-time shape checks, fixed seeds and one thread per process.

The annotations of fedlas are checked at run time in the first calls of every function in each test, so each test that
calls a function also checks its shapes. `FEDLAS_SHAPE_CHECKS=0` disables the checks; they need beartype.
"""

import gc
import importlib.util
import os

# The pytest workers use all cores already: with two threads each, operations on small tensors took five times as long.
# Subprocesses inherit the variable. It also stops libraries of torch from starting threads, which would hang a forked
# process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import shape_checks
import start_method  # noqa: F401, before a test starts autograd threads

gc.disable()  # during imports and collection, where garbage collection took a tenth of the time

pytest_plugins = ["no_silent_skips"]

if os.environ.get("FEDLAS_SHAPE_CHECKS", "1") != "0" and importlib.util.find_spec("beartype"):
    shape_checks.install("fedlas")

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # Draw the same examples in every run, and do not fail on a slow machine.
    settings.register_profile("fedlas", derandomize=True, deadline=None, max_examples=40)
    settings.load_profile("fedlas")

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    """Restrict garbage collection to objects of the tests and run it less often; it took 5 % of the time."""
    gc.collect()
    gc.freeze()  # exclude half a million objects created by imports
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Collect all objects at the end, so that libraries can warn about unclosed resources."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Reset the shape checks and enable oneDNN before the fixtures of each test.

    A bfloat16 matrix product on a CPU without bfloat16 support disables oneDNN permanently, which changes last digits.
    """
    shape_checks.next_test()
    torch.backends.mkldnn.enabled = True


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state."""
    torch.random.default_generator.manual_seed(0)  # torch.manual_seed formats a stack trace for CUDA, which takes 1 ms
