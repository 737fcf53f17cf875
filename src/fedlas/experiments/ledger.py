"""The ledger: two lines for every finished run, before and after temperature scaling.

    results/<data>-<protocol>.jsonl           the lines, in JSON Lines format
    results/predictions/<id>.npz              the stored predictions from which both lines were computed
    results/{best,last}_epoch/                a ledger of the same runs, evaluated with the weights of the other epoch

All measured numbers in tables come from the ledger. A line is valid if the file of its predictions exists, has the
stored checksum and yields the same numbers, which `stored_predictions.py` recomputes. A file lock allows one
writer at a time. Older runs have no validation logits; they have one line, or two lines with a file each.
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
V2 = "V2"  # the half of the validation split on which temperature and hyperparameters are selected
TEMPERATURE = "temperature"  # name of the calibrator of the second line, and of its parameter
SHOWN = ("accuracy", "ece", "aece", "over_ece", "under_ece")  # metrics of the paper's tables, required in every line
ADVICE = "put back a copy of the file, or remove the line, and `fedlas reproduce` writes it again"
Measure: TypeAlias = tuple[float, float | None, float | None]  # value, lower and upper end of its interval


@dataclass(frozen=True)
class Line:
    """One finished run, evaluated before or after calibration.

    Args:
        id: name of the run folder, then "+" and the calibrator, if any, and "@" and the split, unless it is "test".
        recipe: recipe of the run.
        protocol: protocol of the recipe.
        posthoc: the calibrator and its parameters, fitted on the validation split; None before calibration.
        split: evaluated split: "test", "test-published", normalised as in the official code, or "V2" in a search.
        metrics: value and interval of each metric, as fractions.
        ood: AUROC of each score on each OOD data set.
        curve: selected fields of the log for each epoch.
        best_epoch: epoch with the best validation accuracy.
        seconds: duration of training and validation.
        images_per_second: throughput of the median epoch.
        environment: versions, device and commit, and titles of the OOD data sets.
        data: checksums of the splits and of the OOD data.
        predictions: file and checksum of the stored predictions.
        date: day of the run.
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
        """The table row of the line, such as "ce" or "ce+temperature"."""
        return self.recipe.loss if self.posthoc is None else f"{self.recipe.loss}+{self.posthoc['name']}"

    @property
    def own_id(self) -> str:
        """The id computed from recipe, calibrator and split."""
        return line_id(self.recipe, None if self.posthoc is None else self.posthoc["name"], self.split)

    def to_json(self) -> str:
        """Return the line as JSON."""
        values = {"format": FORMAT, **asdict(self), "recipe": self.recipe.to_dict()}
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, where: str) -> "Line":
        """Parse a line written by `to_json`; errors name `where`."""
        not_finite: list[str] = []

        def record_constant(name: str) -> float:
            not_finite.append(name)
            return math.nan

        try:
            values = _fields(json.loads(text, parse_constant=record_constant))
            values["recipe"] = Recipe.from_dict(values["recipe"])
            values["metrics"] = _measures(values["metrics"], "its metrics", SHOWN)
            ood = _table(values.get("ood", {}), "ood")
            values["ood"] = {name: _measures(scores, f"ood of {name}") for name, scores in ood.items()}
            values["curve"] = tuple(values.get("curve", ()))
            _check_rest(values)
            _check(not not_finite, "every number", not_finite, "finite")
            line = cls(**values)
            _check(line.id == line.own_id, "id", line.id, f"the id of its recipe, {line.own_id}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{where} is no line of a ledger: {error}; {ADVICE}") from error
        return line


class Ledger:
    """A folder of ledger lines and stored predictions.

    Args:
        folder: folder of the files; created with the first line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is not a folder; a ledger is a folder")

    @cached_property
    def lines(self) -> dict[str, Line]:
        """All lines by their id."""
        lines: dict[str, Line] = {}
        for where, text in self._texts():
            line = Line.from_json(text, where)
            if line.id in lines:
                raise UserError(f"{where}: the run {line.id} is in the ledger twice; remove one of its lines")
            lines[line.id] = line
        return lines

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield each line of text with its file and line number."""
        for path in sorted(self.folder.glob("*.jsonl")):
            for number, text in enumerate(_text_of(self.own(path.name)).splitlines(), start=1):
                yield f"{path}:{number}", text

    def find(self, recipe: Recipe, posthoc: str | None = None, split: str = TEST) -> Line | None:
        """Return the line of a recipe, if any."""
        return self.lines.get(line_id(recipe, posthoc, split))

    def add(self, lines: Sequence[Line], content: bytes) -> None:
        """Add the lines of a run and the stored predictions that they share.

        If the ledger has all lines, with at least the same OOD data, nothing changes; otherwise all are replaced.
        """
        with self._locked():
            self.__dict__.pop("lines", None)  # another process may have added lines
            existing = {line.id: self.lines[line.id] for line in lines if line.id in self.lines}
            if all(line.id in existing and set(line.ood) <= set(existing[line.id].ood) for line in lines):
                return
            file = self.own(f"{lines[0].recipe.data}-{lines[0].protocol}.jsonl")
            write_atomic(self.file_of(lines[0]), content)
            old_texts = _text_of(file).splitlines() if file.exists() else []
            texts = [text for text in old_texts if Line.from_json(text, str(file)).id not in existing]
            texts += [line.to_json() for line in lines]
            write_atomic(file, "".join(f"{text}\n" for text in texts).encode())
            for path in {self.file_of(line) for line in existing.values()} - {self.file_of(lines[0])}:
                path.unlink(missing_ok=True)
            self.__dict__.pop("lines", None)

    def file_of(self, line: Line) -> Path:
        """Return the file of the stored predictions of a line; raise if it is not inside the ledger."""
        name = Path(line.predictions["file"])
        if name.is_absolute() or ".." in name.parts:
            raise UserError(f"{self.where(line)}: predictions are outside of the ledger ({name}); {ADVICE}")
        return self.own(name)

    def content_of(self, line: Line) -> bytes:
        """Read the stored predictions of a line; raise if their checksum differs."""
        path = self.file_of(line)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{self.where(line)}: its predictions {path} do not exist; {ADVICE}") from None
        if hashlib.sha256(content).hexdigest() != line.predictions["sha256"]:
            raise UserError(
                f"{self.where(line)}: its predictions {path} are damaged or replaced: they do not have the checksum "
                f"of the line; {ADVICE}"
            )
        return content

    def where(self, line: Line) -> str:
        """Return the file and line number of a line, for error messages."""
        return next((where for where, text in self._texts() if Line.from_json(text, where).id == line.id), line.id)

    def own(self, name: str | Path) -> Path:
        """Return the path of a ledger file; raise if it is a link, a pipe or a device."""
        path = path_inside(self.folder, name, "a ledger")
        check_file(path)
        return path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Acquire the lock of the ledger and remove partial files of interrupted writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.own(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for folder in (self.folder, self.own("predictions/any").parent):
                remove_partial_files(folder)
            yield


def other_epoch(recipe: Recipe) -> str:
    """Return the weights that a recipe does not evaluate, "best" or "last"."""
    return "last" if recipe.evaluated == "best" else "best"


def epoch_ledger(ledger: Ledger, epoch: str) -> Ledger:
    """Return the ledger of the same runs evaluated with the weights of the "best" or "last" epoch."""
    return Ledger(ledger.folder / f"{epoch}_epoch")


def line_id(recipe: Recipe, posthoc: str | None, split: str = TEST) -> str:
    """Return the id of the line of a recipe."""
    name = recipe.name if posthoc is None else f"{recipe.name}+{posthoc}"
    return name if split == TEST else f"{name}@{split}"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid UTF-8 text ({error})") from error


def _fields(parsed: Any) -> dict[str, Any]:
    """Return the fields of a line; raise if the format is different, or fields are missing or unknown."""
    values = dict(_table(parsed, "line"))
    if values.pop("format", None) != FORMAT:
        raise UserError("it has another format")
    known = fields(Line)
    unknown = set(values) - {f.name for f in known}
    if unknown:
        raise UserError(f"it has unknown fields: {', '.join(sorted(unknown))}")
    required = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        raise UserError(f"it has no {', '.join(missing)}")
    return values


def _table(value: Any, name: str) -> dict[str, Any]:
    _check(isinstance(value, dict), name, value, "an object with names")
    return dict(value)


def _measures(parsed: Any, name: str, required: tuple[str, ...] = ()) -> dict[str, Measure]:
    """Return measures; raise unless each is a number with both ends of its interval (or null)."""
    measures = _table(parsed, name)
    missing = [metric for metric in required if metric not in measures]
    if missing or not measures:
        raise UserError(f"{name} lack {', '.join(missing) or 'every number'}")
    for metric, measure in measures.items():
        valid = isinstance(measure, list) and len(measure) == 3 and _is_number(measure[0])
        valid = valid and all(end is None or _is_number(end) for end in measure[1:])
        _check(valid, f"{metric} of {name}", measure, "a finite number and the two ends of its interval")
        if metric in required or not required:  # without required metrics, all are AUROC values
            _check(0 <= measure[0] <= 1, f"{metric} of {name}", measure[0], "a fraction, from 0 to 1")
    return {metric: tuple(measure) for metric, measure in measures.items()}


def _check_rest(values: Mapping[str, Any]) -> None:
    """Check the types of the other fields of a line."""
    for name in ("id", "protocol", "split", "date"):
        _check(isinstance(values.get(name, ""), str), name, values.get(name), "a text")
    for name in ("best_epoch", "seconds", "images_per_second"):
        value = values.get(name, 0)
        _check(_is_number(value) and value >= 0, name, value, "a number, at least 0")
    for name in ("environment", "data"):
        _table(values.get(name, {}), name)
    required = {"predictions": ("file", "sha256")} | ({} if values.get("posthoc") is None else {"posthoc": ("name",)})
    for name, keys in required.items():
        table = _table(values[name], name)
        for key in keys:
            _check(isinstance(table.get(key), str), f"{key} of {name}", table.get(key), "a text")
    for record in values["curve"]:
        _check_epoch(_table(record, "an epoch of its curve"))


def _check_epoch(record: Mapping[str, Any]) -> None:
    """Check the fields of an epoch that figures use."""
    number = record.get("epoch")
    _check(type(number) is int and number >= 0, "epoch of its curve", number, "a whole number")
    for key, value in _table(record.get("gate", {}), "gate of its curve").items():
        _check(value is None or _is_number(value), f"{key} of its gate", value, "a number, or null")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check(valid: bool, name: str, value: Any, expected: str) -> None:
    if not valid:
        raise UserError(f"{name} must be {expected}, not {reprlib.repr(value)}")
