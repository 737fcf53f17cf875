"""Sessions on a GPU: training with and without capture, and comparisons of their state."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedlas.training import Recipe
from fedlas.training.backend_flags import backend_flags, raise_compile_limit
from fedlas.training.build import select_device
from fedlas.training.capture import WARM_UP_STEPS
from fedlas.training.session import Session
from waiting import no_waiting


@contextmanager
def gpu_session(recipe: Recipe, *, capture: bool = True) -> Iterator[Session]:
    """Start a session on a stream of its own."""
    device = select_device("cuda")
    stream = torch.cuda.Stream(device)
    with backend_flags(recipe, device), raise_compile_limit(recipe, device), torch.cuda.stream(stream):
        session = Session(recipe, device, capture=capture)
        session.net.train()
        yield session
        torch.cuda.synchronize()


def trained(recipe: Recipe, *, capture: bool, epochs: int = 3) -> Session:
    with gpu_session(recipe, capture=capture) as session:
        for epoch in range(epochs):
            for inputs in session.batches(epoch):
                session.runner.run(*inputs)
    return session


def tensors(session: Session) -> dict[str, Any]:
    state = session.state_dict()
    optimizer_state = {
        f"{n} {name}": value for n, item in enumerate(state["optimizer"]) for name, value in item.items()
    }
    return state["model"] | {f"loss {k}": v for k, v in state["loss"].items()} | optimizer_state


def assert_equal_tensors(session: Session, expected: Session) -> None:
    values = tensors(session)
    for name, value in tensors(expected).items():
        assert torch.equal(value, values[name]), name


def assert_captured_is_eager(recipe: Recipe, epochs: int = 3) -> tuple[Session, Session]:
    """Train captured and eager steps, compare them bit for bit, and return both sessions."""
    captured, eager = (trained(recipe, capture=capture, epochs=epochs) for capture in (True, False))
    assert captured.runner.graphs, "nothing was captured"
    assert captured.runner.capture, "the last batch of an epoch could not be captured"
    assert_equal_tensors(captured, eager)
    assert captured.step.metrics.read() == eager.step.metrics.read()
    assert captured.step.gate.end_epoch() == eager.step.gate.end_epoch()
    assert int(captured.step.count) == int(eager.step.count) == epochs * captured.steps_per_epoch
    assert float(captured.step.scaler.value) == float(eager.step.scaler.value)
    return captured, eager


def assert_never_waits(recipe: Recipe, *, capture: bool) -> Session:
    """Train steps without host synchronisation, and return the session."""
    with gpu_session(recipe, capture=capture) as session:
        batches = list(session.batches(0))
        for inputs in batches[: WARM_UP_STEPS + 2]:  # the capture itself may wait
            session.runner.run(*inputs)
        with no_waiting():
            for inputs in batches[: WARM_UP_STEPS + 2]:
                session.runner.run(*inputs)
    assert bool(session.runner.graphs) == capture
    return session
