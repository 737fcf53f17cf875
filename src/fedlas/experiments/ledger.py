"""The ledger: two lines for every finished run, as trained and after temperature scaling.

    results/<data>-<protocol>.jsonl           the lines, one below the other
    results/predictions/<id>.npz              the stored predictions from which both lines were computed

No number enters a table except from here or, marked as printed, from the paper. A line is valid if its predictions are
there, have the checksum it names, and give its numbers again: `stored_predictions.py` computes them, and says what is
wrong. One
process writes at a time. Older runs stored no validation logits; they have one line, or a file for each of two.
"""

import fcntl
import hashlib
import json
import math
import os
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from fedlas.errors import UserError
from fedlas.io.atomic import remove_partial_files, write_atomic
from fedlas.io.untrusted import check_file, path_inside
from fedlas.training.recipe import Recipe

FORMAT = "fedlas.ledger/1"
TEST = "test"
V2 = "V2"  # the half of the validation split that temperature and hyperparameters are chosen on
TEMPERATURE = "temperature"  # the calibrator of the second line, and the number that it learns
SHOWN = ("accuracy", "ece", "aece", "over_ece", "under_ece")  # metrics that tables show: no line is without them
ADVICE = "put back a copy of the file, or remove the line, and `fedlas reproduce` writes it anew"
Measure: TypeAlias = tuple[float, float | None, float | None]  # value, and the ends of its interval


@dataclass(frozen=True)
class Line:
    """One finished run, evaluated as trained or after a calibrator.

    Args:
        id: name of the run folder, the calibrator's name behind a plus, another split than "test" behind an at sign.
        recipe: what was trained.
        protocol: the recipe's protocol.
        posthoc: the calibrator and what it learned on the validation split; None as trained.
        split: what was evaluated: "test", "test-published", normalised as in the published code, or "V2" in a search.
        metrics: value and interval of each metric, as fractions.
        ood: AUROC of each score on each OOD data set.
        curve: for each epoch what the log says, shortened.
        best_epoch: the epoch with the best validation accuracy.
        seconds: of training and validation.
        images_per_second: in the median epoch.
        environment: versions, device and commit, and titles of the OOD data sets.
        data: checksums of the splits, and of OOD data.
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

    @property
    def own_id(self) -> str:
        """The id that the line must have, by its recipe, calibrator and split."""
        return line_id(self.recipe, None if self.posthoc is None else self.posthoc["name"], self.split)

    def to_json(self) -> str:
        """Return the line as JSON."""
        values = {"format": FORMAT, **asdict(self), "recipe": self.recipe.to_dict()}
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> "Line":
        """Parse a line written by `to_json`; errors name `where`."""
        not_finite: list[str] = []

        def no_number(word: str) -> float:
            not_finite.append(word)
            return math.nan

        try:
            values = _fields(json.loads(text, parse_constant=no_number))
            values["recipe"] = Recipe.from_dict(values["recipe"])
            values["metrics"] = _measures(values["metrics"], "its metrics", SHOWN)
            held = _table(values.get("ood", {}), "ood")
            values["ood"] = {place: _measures(scores, f"ood of {place}") for place, scores in held.items()}
            values["curve"] = tuple(values.get("curve", ()))
            _check_rest(values)
            _check(not not_finite, "every number", not_finite, "finite")
            line = cls(**values)
            _check(line.id == line.own_id, "id", line.id, f"what its recipe is called, {line.own_id}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{where} is no line of a ledger: {error}; {ADVICE}") from error
        return line


class Ledger:
    """The lines of a folder.

    Args:
        folder: where the files lie; it need not exist before the first line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is no folder; a ledger is one")

    @cached_property
    def lines(self) -> dict[str, Line]:
        """All lines by their id."""
        found: dict[str, Line] = {}
        for where, text in self._texts():
            line = Line.from_json(text, where)
            if line.id in found:
                raise UserError(f"{where}: the run {line.id} is in the ledger twice; remove one of its lines")
            found[line.id] = line
        return found

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield each line of text with its file and line number."""
        for path in sorted(self.folder.glob("*.jsonl")):
            for number, text in enumerate(_text_of(self.own(path.name)).splitlines(), start=1):
                yield f"{path}:{number}", text

    def find(self, recipe: Recipe, posthoc: str | None = None, split: str = TEST) -> Line | None:
        """Return the line of a recipe, if any."""
        return self.lines.get(line_id(recipe, posthoc, split))

    def add(self, lines: Sequence[Line], content: bytes) -> None:
        """Write the lines of a run, and the stored predictions that they share.

        Nothing changes if all of them are there already, with the same OOD data or more; otherwise all are replaced.
        """
        with self._alone():
            self.__dict__.pop("lines", None)  # another process may have added some
            there = {line.id: self.lines[line.id] for line in lines if line.id in self.lines}
            if all(line.id in there and set(line.ood) <= set(there[line.id].ood) for line in lines):
                return
            file = self.own(f"{lines[0].recipe.data}-{lines[0].protocol}.jsonl")
            write_atomic(self.file_of(lines[0]), content)
            held = _text_of(file).splitlines() if file.exists() else []
            before = [text for text in held if Line.from_json(text, str(file)).id not in there]
            write_atomic(file, "".join(f"{text}\n" for text in [*before, *(one.to_json() for one in lines)]).encode())
            for path in {self.file_of(line) for line in there.values()} - {self.file_of(lines[0])}:
                path.unlink(missing_ok=True)
            self.__dict__.pop("lines", None)

    def file_of(self, line: Line) -> Path:
        """Return the file of the stored predictions of a line; raise if it is not inside the ledger."""
        name = Path(line.predictions["file"])
        if name.is_absolute() or ".." in name.parts:
            raise UserError(f"{self.where(line)}: predictions lie outside of the ledger ({name}); {ADVICE}")
        return self.own(name)

    def content_of(self, line: Line) -> bytes:
        """Read the stored predictions of a line; raise if their checksum differs."""
        path = self.file_of(line)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{self.where(line)}: its predictions {path} are not there; {ADVICE}") from None
        if hashlib.sha256(content).hexdigest() != line.predictions["sha256"]:
            raise UserError(
                f"{self.where(line)}: its predictions {path} are damaged, or others: they do not have the checksum "
                f"that the line names; {ADVICE}"
            )
        return content

    def where(self, line: Line) -> str:
        """Return file and number of a line, for errors."""
        return next((where for where, text in self._texts() if Line.from_json(text, where).id == line.id), line.id)

    def own(self, name: str | Path) -> Path:
        """Return the path of a ledger file; raise if it is a link, a pipe or a device."""
        path = path_inside(self.folder, name, "a ledger")
        check_file(path)
        return path

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.own(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for folder in (self.folder, self.own("predictions/any").parent):
                remove_partial_files(folder)
            yield


def line_id(recipe: Recipe, posthoc: str | None, split: str = TEST) -> str:
    """Return the id of the line of a recipe."""
    name = recipe.name if posthoc is None else f"{recipe.name}+{posthoc}"
    return name if split == TEST else f"{name}@{split}"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error})") from error


def _fields(values: Any) -> dict[str, Any]:
    """Raise if a line has another format, lacks a field or has an unknown one."""
    found = dict(_table(values, "line"))
    if found.pop("format", None) != FORMAT:
        raise UserError("it has another format")
    known = fields(Line)
    unknown = set(found) - {one.name for one in known}
    if unknown:
        raise UserError(f"it has unknown fields: {', '.join(sorted(unknown))}")
    needed = [one.name for one in known if one.default is MISSING and one.default_factory is MISSING]
    if lacking := [name for name in needed if name not in found]:
        raise UserError(f"it has no {', '.join(lacking)}")
    return found


def _table(value: Any, name: str) -> dict[str, Any]:
    _check(isinstance(value, dict), name, value, "an object with names")
    return dict(value)


def _measures(given: Any, name: str, needed: tuple[str, ...] = ()) -> dict[str, Measure]:
    """Raise unless each value is a number and the ends of its interval, which may be null."""
    found = _table(given, name)
    lacking = [word for word in needed if word not in found]
    if lacking or not found:
        raise UserError(f"{name} lack {', '.join(lacking) or 'every number'}")
    for word, measure in found.items():
        right = isinstance(measure, list) and len(measure) == 3 and _is_number(measure[0])
        right = right and all(end is None or _is_number(end) for end in measure[1:])
        _check(right, f"{word} of {name}", measure, "a finite number and the two ends of its interval")
        if word in needed or not needed:  # AUROC too
            _check(0 <= measure[0] <= 1, f"{word} of {name}", measure[0], "a share, from 0 to 1")
    return {word: tuple(measure) for word, measure in found.items()}


def _check_rest(values: Mapping[str, Any]) -> None:
    """Check the types of the other fields of a line."""
    for name in ("id", "protocol", "split", "date"):
        _check(isinstance(values.get(name, ""), str), name, values.get(name), "a text")
    for name in ("best_epoch", "seconds", "images_per_second"):
        value = values.get(name, 0)
        _check(_is_number(value) and value >= 0, name, value, "a number, at least 0")
    for name in ("environment", "data"):
        _table(values.get(name, {}), name)
    words = {"predictions": ("file", "sha256")} | ({} if values.get("posthoc") is None else {"posthoc": ("name",)})
    for name, needed in words.items():
        held = _table(values[name], name)
        for word in needed:
            _check(isinstance(held.get(word), str), f"{word} of {name}", held.get(word), "a text")
    for record in values["curve"]:
        _check_epoch(_table(record, "an epoch of its curve"))


def _check_epoch(record: Mapping[str, Any]) -> None:
    """Check the fields of an epoch that figures use."""
    number = record.get("epoch")
    _check(type(number) is int and number >= 0, "epoch of its curve", number, "a whole number")
    for word, value in _table(record.get("gate", {}), "gate of its curve").items():
        _check(value is None or _is_number(value), f"{word} of its gate", value, "a number, or null")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check(good: bool, name: str, value: Any, wanted: str) -> None:
    if not good:
        raise UserError(f"{name} must be {wanted}, not {reprlib.repr(value)}")
