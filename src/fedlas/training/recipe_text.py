"""Values of recipe fields: type checks, conversion, and parsing from text such as command-line settings."""

import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin

from fedlas.errors import UserError, UserTypeError

Plain: TypeAlias = Any  # a JSON value: None, bool, int, float, str, list, dict


def check_field(valid: bool, name: str, value: Plain, expected: str) -> None:
    """Raise an error with the name, value and expected value of a field, unless it is valid."""
    if not valid:
        raise UserError(f"{name} must be {expected}, not {value!r}")


class Kind(NamedTuple):
    """The type of a field.

    Args:
        type: bool, int, float, str, Literal, tuple or Mapping.
        arguments: choices of a Literal, or the types of the items of a tuple.
        optional: whether the value may be None.
    """

    type: Any
    arguments: tuple[Any, ...]
    optional: bool


def kind_of(annotation: Any) -> Kind:
    """Return the type of a field from its annotation."""
    optional = get_origin(annotation) in (Union, types.UnionType)
    if optional:
        annotation = next(item for item in get_args(annotation) if item is not type(None))
    return Kind(get_origin(annotation) or annotation, get_args(annotation), optional)


def convert(name: str, kind: Kind, value: Plain) -> Plain:
    """Convert a value to the type of its field without loss, or raise."""
    if kind.optional and value is None:
        return None
    if kind.type is Literal:
        if value not in kind.arguments:
            raise UserError(f"{name} must be one of {', '.join(kind.arguments)}, not {value!r}")
        return value
    if kind.type is tuple:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise UserTypeError(f"{name} must be a list, not {value!r}")
        return tuple(convert(name, kind_of(kind.arguments[0]), item) for item in value)
    if kind.type is Mapping:
        if not isinstance(value, Mapping):
            raise UserTypeError(f"{name} must be a dictionary, not {value!r}")
        return to_plain(value, name)
    is_bool = isinstance(value, bool)
    if kind.type is float and isinstance(value, (int, float)) and not is_bool:
        return to_plain(float(value), name)
    if not isinstance(value, kind.type) or is_bool != (kind.type is bool):
        raise UserTypeError(f"{name} must be of type {kind.type.__name__}, not {value!r}")
    return value


def parse_field(name: str, kind: Kind, text: str) -> Plain:
    """Parse the text of a setting by the type of its field."""
    if kind.optional and text.lower() in ("none", ""):
        return None
    if kind.type is tuple:
        parts = [part.strip() for part in text.strip("[]()").split(",")]
        return tuple(parse_field(name, kind_of(kind.arguments[0]), part) for part in parts if part)
    if kind.type is bool:
        booleans = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
        if text.lower() not in booleans:
            raise UserError(f"{name} must be true or false, not {text!r}")
        return booleans[text.lower()]
    if kind.type in (int, float):
        try:
            return kind.type(text)
        except ValueError:
            expected = "a whole number" if kind.type is int else "a number"
            raise UserError(f"{name} must be {expected}, not {text!r}") from None
    if kind.type is not Mapping:
        return convert(name, kind, text)
    value = value_of(text)
    if not isinstance(value, Mapping):
        raise UserTypeError(
            f'{name} must be JSON such as {{"keyword": 1}}, or set one keyword: {name}.word=1; not {text!r}'
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


def to_plain(value: Plain, name: str) -> Plain:
    """Convert the value of a field to JSON values with sorted keys; raise for NaN and infinity, which JSON has not."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(value[key], f"{name}.{key}") for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, name) for item in value]
    if hasattr(value, "__fspath__"):
        return str(value)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise UserTypeError(f"a recipe holds plain values, not {value!r}")
    check_field(not isinstance(value, float) or math.isfinite(value), name, value, "finite")
    return value


def to_canonical_json(value: Plain) -> bytes:
    """Return JSON with sorted keys and without spaces, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
