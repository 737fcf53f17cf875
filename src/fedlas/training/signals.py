"""Signals that stop a run after the current step."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REPEATS = 3.0  # seconds in which a repeated signal is ignored: a terminal and a launcher both forward Ctrl-C


class StopSignals:
    """Remembers that a signal came, so that a run can end after the step that it is in.

    SIGINT and SIGTERM are heard, and SIGHUP, which comes when a terminal is closed, unless `nohup` has it ignored.

    Args:
        patient: hear one signal only, as one of several processes: each may get its own and the others', and whoever
            dies of the second takes the checkpoint with it. Alone, a second one acts as usual after some seconds.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.caught: int | None = None
        self.patient = patient
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator["StopSignals"]:
        """Listen while a run lasts."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        hung_up = getattr(signal, "SIGHUP", None)  # not on Windows
        asked = [signal.SIGINT, signal.SIGTERM]
        if hung_up is not None and signal.getsignal(hung_up) != signal.SIG_IGN:
            asked.append(hung_up)
        self._before = {number: signal.signal(number, self._catch) for number in asked}
        try:
            yield self
        finally:
            self._put_back()

    def _catch(self, number: int, _frame: Any) -> None:
        self.caught = number
        heard = time.monotonic()

        # Not a method: who looks for a listener that has heard nothing yet shall not take this for one.
        def again(repeated: int, _frame: Any) -> None:
            if not self.patient and time.monotonic() - heard > REPEATS:
                self._put_back()
                signal.raise_signal(repeated)

        for one in self._before:
            signal.signal(one, again)

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class StoppedError(Exception):
    """A run was asked to stop; it has written a checkpoint, or is finished.

    Args:
        message: for the user.
        signal_number: what asked it to.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
