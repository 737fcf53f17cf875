"""The command `fedlas`, and `python -m fedlas`: the command line, or a line that says what it needs."""

import sys


def main() -> None:
    """Run the command line, which needs more than the library does."""
    try:
        from fedlas.cli import main as run  # noqa: PLC0415 - it may be missing what it needs
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "click", "rich"}:
            raise
        sys.exit(f"fedlas: the command line needs {error.name}: pip install 'fedlas[train,report]'")
    run()


if __name__ == "__main__":
    main()
