"""The command line: each command parses its options, calls one function and prints the result.

Results go to standard output, everything else to standard error. `commands.py` lists the commands, `errors.py` has the
exit codes.
"""

from fedlas.cli.commands import app, main

__all__ = ["app", "main"]
