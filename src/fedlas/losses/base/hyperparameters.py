"""Checks of hyperparameters in the constructors of losses: each function returns a valid value and raises otherwise."""

import math

from fedlas.errors import UserError, UserTypeError


def at_least(name: str, value: float, lowest: float) -> float:
    """Return a number; raise if it is too small, not finite or not a number."""
    _check_number(name, value)
    if not (value >= lowest and math.isfinite(value)):
        raise UserError(f"{name} must be at least {lowest}, not {value}")
    return value


def whole(name: str, value: int, lowest: int = 1) -> int:
    """Return a number as an integer; raise if it is too small or not a whole number."""
    at_least(name, value, lowest)
    if value != int(value):
        raise UserError(f"{name} must be a whole number, not {value}")
    return int(value)


def within(name: str, value: float, lowest: float, highest: float) -> float:
    """Return a number; raise if it is outside of a closed interval or not a number."""
    _check_number(name, value)
    if not lowest <= value <= highest:
        raise UserError(f"{name} must lie between {lowest} and {highest}, not {value}")
    return value


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserTypeError(f"{name} must be a number, not {value!r}")
