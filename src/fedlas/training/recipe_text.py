"""Values of recipe fields: type checks, conversion, and parsing from text such as command-line settings."""

import json
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from fedlas.errors import UserError, UserTypeError

Plain: TypeAlias = Any  # a JSON value: None, bool, int, float, str, list, dict


def check_field(valid: bool, name: str, value: Plain, expected: str) -> None:
    """Raise an error with the name, value and expected value of a field, unless it is valid."""
    if not valid:
        raise UserError(f"{name} must be {expected}, not {value!r}")


def check_finite(name: str, value: Plain) -> None:
    """Raise if a number, also in nested lists and mappings, is NaN or infinite, which JSON does not support."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_finite(f"{name}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_finite(name, item)
    elif isinstance(value, float):
        check_field(math.isfinite(value), name, value, "finite")


@cache  # a ledger is searched by building many recipes
def _origin(kind: Any) -> Any:
    return get_origin(kind)


@cache
def _arguments(kind: Any) -> tuple[Any, ...]:
    return get_args(kind)


def convert(name: str, kind: Any, value: Plain) -> Plain:
    """Convert a value to the type of its field without loss, or raise."""
    if _origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        kind = next(item for item in _arguments(kind) if item is not type(None))
    if _origin(kind) is Literal:
        if value not in _arguments(kind):
            raise UserError(f"{name} must be one of {', '.join(_arguments(kind))}, not {value!r}")
        return value
    if _origin(kind) is tuple:
        inner = _arguments(kind)[0]
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise UserTypeError(f"{name} must be a list, not {value!r}")
        return tuple(convert(name, inner, item) for item in value)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        check_field(math.isfinite(value), name, value, "finite")
        return float(value)
    if isinstance(kind, type):
        matches = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not matches:
            raise UserTypeError(f"{name} must be of type {kind.__name__}, not {value!r}")
        return value
    if not isinstance(value, Mapping):
        raise UserTypeError(f"{name} must be a dictionary, not {value!r}")
    return to_plain(value)


def parse_field(name: str, kind: Any, text: str) -> Plain:  # noqa: PLR0911 (one for each type)
    """Parse the text of a setting by the type of its field."""
    if get_origin(kind) in (Union, types.UnionType):
        if text.lower() in ("none", ""):
            return None
        kind = next(item for item in get_args(kind) if item is not type(None))
    if get_origin(kind) is tuple:
        parts = [part.strip() for part in text.strip("[]()").split(",")]
        return tuple(parse_field(name, get_args(kind)[0], part) for part in parts if part)
    if kind is bool:
        booleans = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
        if text.lower() not in booleans:
            raise UserError(f"{name} must be true or false, not {text!r}")
        return booleans[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise UserError(f"{name} must be {expected}, not {text!r}") from None
    if get_origin(kind) is Literal:
        return convert(name, kind, text)
    if kind is str:
        return text
    value = value_of(text)
    if not isinstance(value, dict):
        raise UserTypeError(
            f'{name} must be JSON such as {{"word": 1}}, or set one keyword: {name}.word=1; not {text!r}'
        )
    return value


def value_of(text: str) -> Plain:
    """Parse a value of unknown type: as JSON if valid, otherwise as text."""
    constants = {"none": None, "true": True, "false": False}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def to_plain(value: Plain) -> Plain:
    """Convert to JSON values with sorted keys."""
    if isinstance(value, Mapping):
        return {str(name): to_plain(value[name]) for name in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if value is not None and not isinstance(value, (bool, int, float, str)):
        if hasattr(value, "__fspath__"):
            return str(value)
        raise UserTypeError(f"a recipe holds plain values, not {value!r}")
    return value


def to_canonical_json(value: Plain) -> bytes:
    """Return JSON with sorted keys and without spaces, so that equal values have equal bytes."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
