"""The ledger: one line for every finished run, with everything that is needed to believe it.

    results/<data>-<protocol>.jsonl           one line per run and calibrator
    results/predictions/<id>.npz              what the numbers of the line were computed from

No number enters a table except from here or, marked as printed, from the paper. A line is valid if its predictions are
there, have the checksum it names, and give its numbers again: `kept.py` computes them, and says what is wrong. A run
has one line; one process writes at a time.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from fedlas.storage import check_file, clear_parts, own_file, write_whole
from fedlas.train.recipe import Recipe

FORMAT = "fedlas.ledger/1"
TEST = "test"
Measure: TypeAlias = tuple[float, float | None, float | None]  # value, and the ends of its interval


@dataclass(frozen=True)
class Line:
    """One finished run, judged as trained or after a calibrator.

    Args:
        id: name of the run folder, the calibrator's name behind a plus, another split than "test" behind an at sign.
        recipe: what was trained.
        protocol: the recipe's protocol.
        posthoc: the calibrator and what it learned on the validation split; None as trained.
        split: what was judged: "test", or "test-published", normalised as in the published code.
        metrics: value and interval of each metric, as fractions.
        ood: AUROC of each score on each foreign data set.
        curve: for each epoch what the log says, shortened.
        best_epoch: whose weights were judged.
        seconds: of training and validation.
        images_per_second: in the median epoch.
        environment: versions, device and commit, and what foreign data sets call themselves.
        data: checksums of the splits, and of foreign data.
        predictions: file and checksum.
        date: the day.
    """

    id: str
    recipe: Recipe
    protocol: str
    metrics: Mapping[str, Measure]
    predictions: Mapping[str, str]
    posthoc: Mapping[str, Any] | None = None
    split: str = TEST
    ood: Mapping[str, Mapping[str, Measure]] = field(default_factory=dict)
    curve: tuple[Mapping[str, Any], ...] = ()
    best_epoch: int = 0
    seconds: float = 0.0
    images_per_second: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def seed(self) -> int:
        """The seed of the recipe."""
        return self.recipe.seed

    @property
    def method(self) -> str:
        """The row of a table that the line belongs to, such as "ce" or "ce+temperature"."""
        return self.recipe.loss if self.posthoc is None else f"{self.recipe.loss}+{self.posthoc['name']}"

    def to_json(self) -> str:
        """Write the line."""
        values = {"format": FORMAT, **asdict(self), "recipe": self.recipe.to_dict()}
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> "Line":
        """Read what `to_json` wrote; `where` is named in errors."""
        try:
            values = _fields(json.loads(text))
            values["recipe"] = Recipe.from_dict(values["recipe"])
            values["metrics"] = {name: tuple(measure) for name, measure in values["metrics"].items()}
            values["ood"] = {
                place: {score: tuple(measure) for score, measure in held.items()}
                for place, held in values["ood"].items()
            }
            return cls(**values | {"curve": tuple(values["curve"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{where} is no line of a ledger: {error}") from error


class Ledger:
    """The lines of a folder.

    Args:
        folder: where the files lie; it need not exist before the first line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is no folder; a ledger is one")

    @cached_property
    def lines(self) -> dict[str, Line]:
        """All lines by their id."""
        found: dict[str, Line] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for number, text in enumerate(_text_of(self.own(path.name)).splitlines(), start=1):
                line = Line.from_json(text, f"{path}:{number}")
                if line.id in found:
                    raise ValueError(f"{path}:{number}: the run {line.id} is in the ledger twice")
                found[line.id] = line
        return found

    def find(self, recipe: Recipe, posthoc: str | None = None, split: str = TEST) -> Line | None:
        """Look up the line of a recipe."""
        return self.lines.get(line_id(recipe, posthoc, split))

    def add(self, line: Line, content: bytes) -> Line:
        """Write a line and its predictions.

        A line that is there already stays as it is, and is given back, unless the new one knows more foreign data.
        """
        with self._alone():
            self.__dict__.pop("lines", None)  # another process may have added some
            there = self.lines.get(line.id)
            if there is not None and set(line.ood) <= set(there.ood):
                return there
            predictions = self.file_of(line)
            file = self.own(f"{line.recipe.data}-{line.protocol}.jsonl")
            write_whole(predictions, content)
            held = _text_of(file).splitlines() if file.exists() else []
            before = [text for text in held if Line.from_json(text, str(file)).id != line.id]
            write_whole(file, "".join(f"{text}\n" for text in [*before, line.to_json()]).encode())
            self.__dict__.pop("lines", None)
            return line

    def file_of(self, line: Line) -> Path:
        """Say where the predictions of a line lie; nowhere but in the ledger."""
        name = Path(line.predictions["file"])
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"{line.id}: predictions lie outside of the ledger ({name})")
        return self.own(name)

    def own(self, name: str | Path) -> Path:
        """Give the path of one of the ledger's files; one that is a link, a pipe or a device is refused."""
        path = own_file(self.folder, name, "a ledger")
        check_file(path)
        return path

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.own(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for folder in (self.folder, self.own("predictions/any").parent):
                clear_parts(folder)
            yield


def line_id(recipe: Recipe, posthoc: str | None, split: str = TEST) -> str:
    """Name the line of a recipe."""
    name = recipe.name if posthoc is None else f"{recipe.name}+{posthoc}"
    return name if split == TEST else f"{name}@{split}"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error})") from error


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Check that a line has our format, and no field that we do not know."""
    if values.pop("format") != FORMAT:
        raise ValueError("it has another format")
    unknown = set(values) - {one.name for one in fields(Line)}
    if unknown:
        raise ValueError(f"it has unknown fields: {', '.join(sorted(unknown))}")
    return values
