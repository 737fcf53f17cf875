"""The ledger: one line for every finished run, with everything that is needed to believe it.

    results/<data>-<protocol>.jsonl           one line per run and calibrator
    results/predictions/<id>.npz              what the numbers of the line were computed from

No number enters a table except from here or, marked as printed, from the paper. A line is valid if its predictions are
there, have the checksum it names, and give its numbers again; `problems` says what is wrong. A run has one line; one
process writes at a time.
"""

import fcntl
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from fedlas.experiments.kept import Kept, Measure, sha256
from fedlas.metrics.digest import Intervals
from fedlas.posthoc import build_calibrator
from fedlas.predictions import Predictions, write_whole
from fedlas.train.recipe import Recipe
from fedlas.train.runs import MACHINE, Run

FORMAT = "fedlas.ledger/1"
STATE = "best"  # the weights of the epoch with the best validation accuracy, as published
SAME = 1e-6  # numbers that differ by less are equal: sums of floats depend on the machine's order
SAME_ENDS = 2e-3  # ends of intervals: draws that fall on the other side of a tie
DIGITS = 5  # of what is kept of a run's log


@dataclass(frozen=True)
class Line:
    """One finished run, judged as trained or after a calibrator.

    Args:
        id: name of the run folder, and the calibrator's name behind a plus.
        recipe: what was trained.
        protocol: the recipe's protocol.
        posthoc: the calibrator and what it learned on the validation split; None as trained.
        metrics: value and interval of each metric, as fractions.
        ood: AUROC of each score on each foreign data set.
        curve: for each epoch what the log says, shortened.
        best_epoch: whose weights were judged.
        seconds: of training and validation.
        images_per_second: in the median epoch.
        environment: versions, device and commit.
        data: checksums of the splits.
        predictions: file and checksum.
        date: the day.
    """

    id: str
    recipe: Recipe
    protocol: str
    metrics: Mapping[str, Measure]
    predictions: Mapping[str, str]
    posthoc: Mapping[str, Any] | None = None
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
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{where} is no line of a ledger: {error}") from error


class Ledger:
    """The lines of a folder.

    Args:
        folder: where the files lie; it need not exist before the first line.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @cached_property
    def lines(self) -> dict[str, Line]:
        """All lines by their id."""
        found: dict[str, Line] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                line = Line.from_json(text, f"{path}:{number}")
                if line.id in found:
                    raise ValueError(f"{path}:{number}: the run {line.id} is in the ledger twice")
                found[line.id] = line
        return found

    def find(self, recipe: Recipe, posthoc: str | None = None) -> Line | None:
        """Look up the line of a recipe."""
        return self.lines.get(line_id(recipe, posthoc))

    def kept(self, line: Line) -> Kept:
        """Read the predictions of a line."""
        path = self._file(line)
        return Kept.unpack(path.read_bytes(), str(path))

    def add(self, run: Run, protocol: str, posthoc: str | None = None) -> Line:
        """Judge a finished run, and write its line.

        A line that is there already stays as it is, unless it lacks foreign data that the run has.
        """
        recipe = run.recipe
        with self._alone():
            self.__dict__.pop("lines", None)  # another process may have added some
            there = self.find(recipe, posthoc)
            if there is not None and set(recipe.ood) <= set(there.ood):
                return there
            predictions, foreign, learned = _judged(run, posthoc)
            kept = Kept.of(predictions, foreign, calibrated=posthoc is not None)
            name = line_id(recipe, posthoc)
            path = self.folder / "predictions" / f"{name}.npz"
            write_whole(path, kept.pack())
            line = Line(
                id=name,
                recipe=recipe,
                protocol=protocol,
                metrics=kept.metrics(Intervals()),
                ood=kept.detection(),
                posthoc=learned,
                predictions={"file": f"predictions/{name}.npz", "sha256": sha256(path)},
                date=datetime.now(UTC).date().isoformat(),
                **_about(run),
            )
            file = self.folder / f"{recipe.data}-{protocol}.jsonl"
            held = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            before = [text for text in held if Line.from_json(text, str(file)).id != name]
            write_whole(file, "".join(f"{text}\n" for text in [*before, line.to_json()]).encode())
            self.__dict__.pop("lines", None)
            return line

    def problems(self, *, intervals: bool = False) -> Iterator[str]:
        """Compute the numbers of every line again, and name what does not agree.

        Args:
            intervals: whether to compute intervals too, which takes longer.
        """
        named = {line.predictions.get("file") for line in self.lines.values()}
        for path in sorted((self.folder / "predictions").glob("*")):
            if f"predictions/{path.name}" not in named:
                yield f"{path} belongs to no line"
        for line in self.lines.values():
            yield from (f"{line.id}: {problem}" for problem in self._problems_of(line, intervals))

    def _problems_of(self, line: Line, intervals: bool) -> Iterator[str]:
        if line.id != line_id(line.recipe, None if line.posthoc is None else line.posthoc["name"]):
            yield "its recipe makes another id"
        if not self._file(line).is_file():
            yield f"its predictions are not there ({line.predictions.get('file')})"
            return
        if sha256(self._file(line)) != line.predictions["sha256"]:
            yield "its predictions have another checksum"
            return
        kept = self.kept(line)
        now = {"": kept.metrics(Intervals() if intervals else None), **kept.detection()}
        for place, found in now.items():
            written = line.metrics if not place else line.ood.get(place, {})
            if set(found) != set(written):
                yield f"it has other metrics: {sorted(set(found) ^ set(written))}"
            for name in set(found) & set(written):
                pairs = list(zip(found[name], written[name], strict=True))
                if not _agree(*pairs[0], SAME) or (intervals and not all(_agree(*p, SAME_ENDS) for p in pairs[1:])):
                    yield f"{place} {name} is {written[name]} in the ledger and {found[name]} now".strip()

    def _file(self, line: Line) -> Path:
        name = Path(line.predictions["file"])
        if name.is_absolute() or ".." in name.parts:
            raise ValueError(f"{line.id}: predictions lie outside of the ledger ({name})")
        return self.folder / name

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def line_id(recipe: Recipe, posthoc: str | None) -> str:
    """Name the line of a recipe."""
    return recipe.name if posthoc is None else f"{recipe.name}+{posthoc}"


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Check that a line has our format, and no field that we do not know."""
    if values.pop("format") != FORMAT:
        raise ValueError("it has another format")
    unknown = set(values) - {one.name for one in fields(Line)}
    if unknown:
        raise ValueError(f"it has unknown fields: {', '.join(sorted(unknown))}")
    return values


def _judged(run: Run, posthoc: str | None) -> tuple[Predictions, dict[str, Predictions], dict[str, Any] | None]:
    """Give the predictions of a run on known and foreign data, repaired where a calibrator is named."""
    known = run.predictions(f"{STATE}-test")
    foreign = {name: run.predictions(f"{STATE}-ood-{name}") for name in run.recipe.ood}
    if posthoc is None:
        return known, foreign, None
    calibrator = build_calibrator(posthoc).fit(run.predictions(f"{STATE}-val"))
    fixed = {name: calibrator.transform(one) for name, one in {"": known, **foreign}.items()}
    learned = {name: float(value) for name, value in calibrator.learned.items() if value.numel() == 1}
    return fixed.pop(""), fixed, {"name": posthoc, "fitted_on": "val", **learned}


def _about(run: Run) -> dict[str, Any]:
    """Take from a run folder what a line tells about the run."""
    log, environment = run.log, dict(run.environment)
    speeds = [record[MACHINE]["images_per_second"] for record in log if not record[MACHINE]["continued_at_step"]]
    return {
        "curve": tuple(_shortened(record) for record in log),
        "best_epoch": log[-1]["best_epoch"],
        "seconds": round(sum(record[MACHINE]["seconds"] for record in log), 2),
        "images_per_second": round(median(speeds), 1) if speeds else 0.0,
        "data": environment.pop("data", {}),
        "environment": environment,
    }


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of an epoch what figures show."""
    gate = {name: value for name, value in record["gate"].items() if not isinstance(value, Mapping)}
    kept = {"epoch": record["epoch"], "lr": record["lr"], "train": record["train"], "val": record["val"], "gate": gate}
    return {name: _rounded(value) for name, value in kept.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _agree(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
