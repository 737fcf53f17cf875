"""The command line: parses, calls one function, prints.

Errors of the user end in one line and exit code 1, a wrong use of the command line ends in 2, and a condition of
`--fail-if` that holds in 3. What a command prints for a program to read goes to standard output, everything else to
standard error. Each file has the commands of one kind; `commands.py` lists them.
"""

from fedlas.cli.commands import app, main

__all__ = ["app", "main"]
