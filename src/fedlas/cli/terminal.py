"""What a person sees: lines that cannot steer a terminal, tables of which nothing is cut off, and progress.

A table that does not go to a terminal is as wide as it has to be.
"""

import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer


def show(text: object, *, err: bool = False) -> None:
    """Print a text; what files say cannot steer the terminal."""
    typer.echo(harmless(str(text)), err=err)


def harmless(text: str) -> str:
    """Replace letters that would steer a terminal, such as those that begin a colour or set its title."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in {"Cc", "Cf"} else "\ufffd" for letter in text
    )


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print a table; nothing in it is cut off."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    terminal = (sys.stderr if err else sys.stdout).isatty()
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for name in head:
        table.add_column(harmless(name), overflow="fold", no_wrap=not terminal)
    for row in rows:
        table.add_row(*map(harmless, row))
    widest = sum(max(len(row[n]) for row in [head, *rows]) + 4 for n in range(len(head)))
    width = None if terminal else widest
    console = Console(width=width, highlight=False, markup=False, stderr=err)
    # Rich ends the process by itself where nobody reads on, so it only draws.
    with console.capture() as drawn:
        console.print(table)
    typer.echo(drawn.get(), nl=False, err=err)


def command_line() -> str:
    """Write the command that was given, as one would type it."""
    return shlex.join(["fedlas", *sys.argv[1:]])


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show how far something is, on a terminal only; a program that reads the output sees nothing of it."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def watch(word: str, share: float) -> None:
            if word not in tasks:
                tasks[word] = bar.add_task(escape(harmless(word)), total=1.0)  # names of files may look like markup
            bar.update(tasks[word], completed=share)

        yield watch
