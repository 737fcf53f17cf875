"""Options that several commands share, and how they are parsed."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.errors import UserError

LARGEST_SEED = 2**63 - 1  # of random number generators

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any field of the recipe; may be repeated.")
]
Root = Annotated[
    Path | None, typer.Option("--data-root", help="Where data lies; else $FEDLAS_DATA, else the user's cache.")
]
Level = Annotated[float, typer.Option(help="Confidence level of intervals.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")]


def words(text: str | None) -> tuple[str, ...] | None:
    """Split a text at commas; an empty text or a repeated word is an error."""
    if text is None:
        return None
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise UserError(f"{text!r} names nothing; leave the option out, or give words separated by commas")
    if twice := sorted({word for word in found if found.count(word) > 1}):
        raise UserError(f"{', '.join(twice)}: named twice in {text!r}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Parse integers separated by commas."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UserError(f"--seeds takes whole numbers separated by commas, not {text!r}") from None
    if len(set(found)) < len(found):
        raise UserError(f"--seeds {text}: a seed that counts twice makes the spread too small")
    return found


def parsed(settings: Sequence[str] | None) -> dict[str, str]:
    """Parse FIELD=VALUE."""
    found: dict[str, str] = {}
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--set takes FIELD=VALUE, not {text!r}")
        if name.strip() in found:
            raise UserError(f"--set {name.strip()} is given twice: {found[name.strip()]!r} and {value.strip()!r}")
        found[name.strip()] = value.strip()
    return found


def parsed_fields(settings: Sequence[str] | None) -> dict[str, str]:
    """Parse fields of a recipe; those that select the recipe are an error."""
    found = parsed(settings)
    for name in ("data", "model", "loss"):
        if name in found:
            raise UserError(f"give --{name} {found[name]} and not --set {name}: it decides about the other fields")
    return found


Column = str | None
COLUMNS: dict[str, tuple[Any, Any]] = {
    "label_column": (Annotated[Column, typer.Option(help="Column of the labels.")], None),
    "prob_columns": (
        Annotated[
            Column, typer.Option(help="Columns of the classes: names separated by commas, or such as 'score_*'.")
        ],
        None,
    ),
    "confidence_column": (Annotated[Column, typer.Option(help="Column of the confidence of the prediction.")], None),
    "prediction_column": (Annotated[Column, typer.Option(help="Column of the predicted class.")], None),
    "correct_column": (Annotated[Column, typer.Option(help="Column of correctness: 0 or 1, true or false.")], None),
    "labels": (Annotated[Path | None, typer.Option(help="Labels from another file, such as labels.npy.")], None),
    "logits": (Annotated[bool, typer.Option("--logits", help="The scores are logits.")], False),
    "no_header": (
        Annotated[bool, typer.Option("--no-header", help="A text file has no header; columns: 0, 1, ...")],
        False,
    ),
    "normalize": (Annotated[bool, typer.Option("--normalize", help="Divide probabilities by their sum.")], False),
}


def with_columns(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of columns of files to a command, which takes them as `columns`."""
    given = inspect.signature(command)
    own = [one for name, one in given.parameters.items() if name != "columns"]
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=value, annotation=hint) for name, (hint, value) in COLUMNS.items()]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in COLUMNS}
        columns = {name: value for name, value in chosen.items() if value and name != "no_header"}
        if chosen["no_header"]:
            columns["header"] = False
        command(**options, columns=columns)

    run.__signature__ = given.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in [*own, *added]}
    return run
