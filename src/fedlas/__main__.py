"""Lets `python -m fedlas` do what the command `fedlas` does."""

from fedlas.cli import main

if __name__ == "__main__":
    main()
