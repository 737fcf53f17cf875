"""Progress of long computations: the type of `progress` arguments, and bars in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from fedlas.extras import optional_module

# Called with the name of a step, and the fraction of it that is done; None if its length is unknown.
Progress: TypeAlias = Callable[[str, float | None], None]


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show a bar for each step on standard error, and yield the callback that moves the bars."""
    rich = optional_module("rich.progress", "train")
    escape = optional_module("rich.markup", "train").escape
    console = optional_module("rich.console", "train").Console(stderr=True)
    bars = rich.Progress(console=console, transient=True)
    tasks: dict[str, Any] = {}

    def update(step: str, fraction: float | None) -> None:
        if step not in tasks:
            bars.start()  # not earlier: while bars are shown, rich redirects standard output and error
            tasks[step] = bars.add_task(escape(step), total=None)  # file names may look like markup
        bars.update(tasks[step], completed=fraction, total=None if fraction is None else 1.0)

    try:
        yield update
    finally:
        if tasks:
            bars.stop()
