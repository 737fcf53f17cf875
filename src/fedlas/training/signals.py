"""Signals that stop a run after the current step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REPEAT_WINDOW = 3.0  # seconds in which a repeated signal is ignored: a terminal and a launcher both forward Ctrl-C


class StopSignals:
    """Records a signal, so that a run can stop after the current step.

    Handles SIGINT, SIGTERM, and SIGHUP (closed terminal) unless it is ignored, as under `nohup`.

    Args:
        ignore_repeats: ignore all signals after the first: of several processes, each may receive the signals of all,
            and dying from the second one would lose the checkpoint. If False, a signal repeated after three seconds
            has its usual effect.
    """

    def __init__(self, *, ignore_repeats: bool = False) -> None:
        self.caught: int | None = None
        self.ignore_repeats = ignore_repeats
        self._previous: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator["StopSignals"]:
        """Handle signals within the context."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._previous = {number: signal.signal(number, self._catch) for number in numbers}
        try:
            yield self
        finally:
            self._restore()

    def _catch(self, number: int, _frame: Any) -> None:
        self.caught = number
        caught_at = time.monotonic()

        # A function, so that this handler is not mistaken for `_catch` of a listener without a signal.
        def handle_repeat(repeated: int, _frame: Any) -> None:
            if not self.ignore_repeats and time.monotonic() - caught_at > REPEAT_WINDOW:
                self._restore()
                signal.raise_signal(repeated)

        for other in self._previous:
            signal.signal(other, handle_repeat)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class StoppedError(Exception):
    """A signal stopped a run, which has written a checkpoint or is finished.

    Args:
        message: text for the user.
        signal_number: the signal.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
