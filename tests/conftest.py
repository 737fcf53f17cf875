"""What every test stands on: shapes that are checked, equal seeds, one thread for each process.

Annotations of fedlas are checked at run time, in the first calls of every function in each test, so a test that
reaches a function also proves its shapes.
`FEDLAS_SHAPE_CHECKS=0` turns this off, and without beartype it is off.
"""

import gc
import importlib.util
import os

# The workers already fill the cores: with two threads each, small tensors took five times as long. Processes that
# tests start read the variable, and so do libraries that torch loads, whose threads a forked process would wait for.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import shape_checks
import start_method  # noqa: F401, before any test can start threads of autograd

gc.disable()  # until all is imported, of which nothing is garbage: to look for some took a tenth of that time

pytest_plugins = ["no_silent_skips"]

if os.environ.get("FEDLAS_SHAPE_CHECKS", "1") != "0" and importlib.util.find_spec("beartype"):
    shape_checks.install("fedlas")

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # The same examples in every run, and no failure because a machine was busy.
    settings.register_profile("fedlas", derandomize=True, deadline=None)
    settings.load_profile("fedlas")

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_finish() -> None:
    """Let the collector of garbage look only at what tests make, and less often: it took a twentieth of the time."""
    gc.collect()
    gc.freeze()  # half a million objects of torch
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let it look at all in the end: libraries say what they find left over."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin every test alike, before its fixtures: with checks, and with oneDNN.

    A product in bfloat16 on a processor without it switches oneDNN off for good, and last digits change.
    """
    shape_checks.next_test()
    torch.backends.mkldnn.enabled = True


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.random.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for CUDA: 1 ms in each test
