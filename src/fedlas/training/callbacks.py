"""Callbacks of a run: base class, and checks of user-defined callbacks."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fedlas.catalog import nearest
from fedlas.errors import UserTypeError
from fedlas.training.run_folder import Run

if TYPE_CHECKING:
    from fedlas.training.session import Session


class AbstractCallback:
    """Base class of callbacks; override the methods that you need.

    Attributes:
        sees_steps: call `on_step_end` after each step. Steps are then not captured in a CUDA graph.
    """

    sees_steps: ClassVar[bool] = False

    def on_train_start(self, run: Run, session: "Session", epoch: int) -> None:
        """Handle the start of a run, new or resumed, at an epoch counted from 0."""

    def on_step_dispatched(self, step: int) -> None:
        """Handle a step that was dispatched to the device and may still run; do not synchronise here."""

    def on_step_end(self, session: "Session", step: int) -> None:
        """Handle the end of a step, with network, gradients and loss; needs `sees_steps = True`."""

    def on_epoch_end(self, record: Mapping[str, Any]) -> None:
        """Handle the end of an epoch, with its log record."""

    def on_train_end(self, run: Run) -> None:
        """Handle the end of a run, finished or stopped."""


HOOKS = tuple(name for name in vars(AbstractCallback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[AbstractCallback]) -> tuple[AbstractCallback, ...]:
    """Return the callbacks; raise if one is not a callback or has a public method that is never called."""
    if isinstance(callbacks, (AbstractCallback, type)) or not isinstance(callbacks, Iterable):
        raise UserTypeError(f"callbacks takes a list, such as callbacks=[MyCallback()], not {callbacks!r}")
    checked = tuple(callbacks)
    for callback in checked:
        kind = type(callback)
        if isinstance(callback, type):
            raise UserTypeError(
                f"callbacks takes objects, not classes: {callback.__name__}() instead of {callback.__name__}"
            )
        if not isinstance(callback, AbstractCallback):
            raise UserTypeError(
                f"callbacks takes objects of classes that derive from AbstractCallback, not {callback!r}"
            )
        for name in dir(kind):
            if not name.startswith("_") and name not in HOOKS and inspect.isroutine(getattr(kind, name)):
                hint = nearest(name, list(HOOKS))
                raise UserTypeError(f"{kind.__name__}.{name} would never be called; {hint} Begin other names with _.")
        if not callback.sees_steps and kind.on_step_end is not AbstractCallback.on_step_end:
            raise UserTypeError(
                f"{kind.__name__}.on_step_end would never be called; set sees_steps = True in the class"
            )
    return checked
