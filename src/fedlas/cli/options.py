"""Options that several commands share, and functions that parse them."""

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.errors import UserError


def check_seed(seed: int) -> int:
    """Raise unless random number generators accept the seed."""
    if not 0 <= seed < 2**63:
        raise typer.BadParameter(f"{seed} is not a whole number from 0 to 2**63 - 1")
    return seed


def seed_option(text: str) -> Any:
    """Return the option of a random seed; a callback checks it, because Typer would print the range of an integer."""
    return typer.Option(callback=check_seed, help=text)


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Set a field of the recipe, such as epochs=10 or loss_options.alpha=0.1; may be repeated.",
    ),
]
Root = Annotated[
    Path | None, typer.Option("--data-root", help="Data folder; by default $FEDLAS_DATA, or the user's cache.")
]
Json = Annotated[str | None, typer.Option(help="Write all results as JSON to this file; - is standard output.")]
Level = Annotated[float, typer.Option(help="Confidence level of intervals.")]
Seed = Annotated[int, seed_option("Random seed for bootstrap intervals.")]
ProtocolName = Annotated[
    str | None,
    typer.Option(
        "--protocol",
        help="Training protocol: paper, official, fast, small or standard; by default the first that defines the data "
        "set (see: fedlas list recipes).",
    ),
]
LedgerFolder = Annotated[Path, typer.Option("--ledger", help="Folder of the ledger, the results of finished runs.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU, if there is one.")]


def split_list(text: str | None) -> tuple[str, ...] | None:
    """Split a text at commas; raise for an empty text or a repeated item."""
    if text is None:
        return None
    items = tuple(item.strip() for item in text.split(",") if item.strip())
    if not items:
        raise UserError(f"{text!r} names nothing; leave the option out, or give names separated by commas")
    if twice := sorted({item for item in items if items.count(item) > 1}):
        raise UserError(f"{', '.join(twice)}: named twice in {text!r}")
    return items


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse comma-separated integers; raise for a repeated integer."""
    try:
        seeds = tuple(int(item) for item in text.split(","))
    except ValueError:
        raise UserError(f"--seeds takes whole numbers separated by commas, not {text!r}") from None
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text}: a seed that counts twice makes the spread too small")
    return seeds


def parse_settings(settings: Sequence[str] | None) -> dict[str, str]:
    """Parse FIELD=VALUE; raise for a repeated field."""
    parsed: dict[str, str] = {}
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--set takes FIELD=VALUE, not {text!r}")
        if name.strip() in parsed:
            raise UserError(f"--set {name.strip()} is given twice: {parsed[name.strip()]!r} and {value.strip()!r}")
        parsed[name.strip()] = value.strip()
    return parsed


def parse_recipe_fields(settings: Sequence[str] | None) -> dict[str, str]:
    """Parse fields of a recipe; raise for fields that select the recipe (data, model, loss)."""
    fields = parse_settings(settings)
    for name in ("data", "model", "loss"):
        if name in fields:
            raise UserError(f"give --{name} {fields[name]} and not --set {name}: it decides about the other fields")
    return fields


def _column_option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="How to read the files")


COLUMNS: dict[str, tuple[Any, Any]] = {
    "label_column": (Annotated[str | None, _column_option("Column of the labels.")], None),
    "prob_columns": (
        Annotated[
            str | None,
            _column_option("Columns of the probabilities or logits: names separated by commas, or a pattern: 'p_*'."),
        ],
        None,
    ),
    "confidence_column": (Annotated[str | None, _column_option("Column of the confidence.")], None),
    "prediction_column": (Annotated[str | None, _column_option("Column of the predicted class.")], None),
    "correct_column": (Annotated[str | None, _column_option("Column of correctness: 0 or 1, true or false.")], None),
    "labels": (Annotated[Path | None, _column_option("File of the labels, such as labels.npy.")], None),
    "logits": (Annotated[bool, _column_option("The values are logits, not probabilities.", "--logits")], False),
    "no_header": (
        Annotated[bool, _column_option("Read text files without a header; columns are 0, 1, ...", "--no-header")],
        False,
    ),
    "normalize": (Annotated[bool, _column_option("Divide probabilities by their sum.", "--normalize")], False),
}


def with_columns(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for reading files to a command, which receives them as the argument `columns`."""
    signature = inspect.signature(command)
    own_parameters = [parameter for name, parameter in signature.parameters.items() if name != "columns"]
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=value, annotation=hint) for name, (hint, value) in COLUMNS.items()]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in COLUMNS}
        columns = {name: value for name, value in chosen.items() if value and name != "no_header"}
        if chosen["no_header"]:
            columns["header"] = False
        command(**options, columns=columns)

    run.__signature__ = signature.replace(parameters=[*own_parameters, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own_parameters, *added]}
    return run
