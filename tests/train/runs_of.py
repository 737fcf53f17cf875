"""What the tests of training share: short recipes, and a callback that stops a run where a test wants it."""

import os
from pathlib import Path
from typing import Any

from fedlas.train import AbstractCallback, Recipe, Run, recipe_for
from fedlas.train.runs import MACHINE

SHORT = {
    "epochs": 3,
    "batch_size": 50,
    "deterministic": True,
    "data_options": {"train_samples": 330, "label_noise": 0.1},
}


def short(loss: str = "fedlas_ls", **changes: Any) -> Recipe:
    """A run of 3 epochs with 7 steps each, the last one of 30 samples."""
    return recipe_for("digits", loss=loss, **{**SHORT, **changes})


class SignalAt(AbstractCallback):
    """Sends this process a signal after some step."""

    def __init__(self, step: int, number: int, wait_for: Path | None = None) -> None:
        self.step, self.number, self.wait_for = step, number, wait_for

    def stepped(self, bench: Any, step: int) -> None:
        if step == self.step:
            while self.wait_for is not None and not self.wait_for.exists():
                pass
            os.kill(os.getpid(), self.number)


def log_without_times(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != MACHINE} for record in run.log]


def prediction_bytes(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run.folder / "predictions").iterdir())}
