"""From files of predictions to an answer: what `fedlas evaluate` does, for any caller.

    answer = judge_files(["resnet.csv"], ood=["svhn=svhn.npz"])
    for line in answer.lines():
        ...
    answer.failed(["ece>0.05"])

A model is called what stands before `=` in `NAME=FILE`, or what its file is called. Instead of files, a `Model` may be
given by its name: of a run folder, for example, which this room knows nothing of.
"""

import html
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from fedlas.errors import UserError
from fedlas.evaluation import AS_GIVEN, FOLDS, Report, State, evaluate
from fedlas.io import read_predictions, require_labels
from fedlas.io.columns import ReadOptions
from fedlas.metrics.registry import all_metrics, summary_metrics
from fedlas.metrics.result import html_table
from fedlas.ood.detection import Detection
from fedlas.predictions import AnyPredictions, TopLabelPredictions, check_every_class
from fedlas.report.duels import PairedTest, correction_note, duels
from fedlas.report.subjects import Model
from fedlas.report.words import in_words, sentences

FORMAT = "fedlas.answer/1"
BRIEFLY = ("accuracy", "ece", "over_ece", "under_ece", "nll")  # of several models
SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)\s*")

Watch = Callable[[str, float], None]
File = str | Path
Files = File | Sequence[File] | Mapping[str, File]


@dataclass(frozen=True)
class Answer:
    """What is known about the models of some files.

    Args:
        models: what each file held, and its report.
        files: where each model was read from; what came from no file is missing.
        compared: paired tests of models on the same samples, or why there is none.
        notes: what could not be done, and why.
    """

    models: Mapping[str, Model]
    files: Mapping[str, Path]
    compared: Sequence[PairedTest] = ()
    notes: Sequence[str] = ()

    @property
    def reports(self) -> dict[str, Report]:
        """The numbers of every model."""
        return {name: model.report for name, model in self.models.items() if model.report is not None}

    def lines(self) -> list[str]:
        """Say what a person needs first: in a sentence, then at more length."""
        said = []
        for name, report in self.reports.items():
            words = in_words(report)
            said += [f"{name}: {words}.", *(f"  {line}" for line in sentences(report)), *self._columns(name), ""]
        for one in self.compared:
            verdict = f": {one.found}" if one.found is not None else f" are not compared: {one.why}"
            said.append(f"{one.first} and {one.second}{verdict}")
        return [*said, *self.notes]

    def _columns(self, name: str) -> list[str]:
        """Return which columns of the file of a model were read as what."""
        given = self.models[name].predictions
        if given is None or given.columns is None or name not in self.files:
            return []
        return [f"  Read from {self.files[name].name}: {given.columns}."]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Lay the numbers out: of one model a column for each state, of several a row for each."""
        reports = self.reports
        first = next(iter(reports.values())).before
        states = [(model, state) for model, report in reports.items() for state in report.states]
        wanted = list(summary_metrics()) if len(reports) == 1 else BRIEFLY
        names = [name for name in wanted if any(name in state.results for _, state in states)]
        head = [first[name].heading() if name in first.results else name for name in names]
        cells = [[state[name].cell() if name in state.results else "" for name in names] for _, state in states]
        if len(reports) == 1:
            columns = zip(*cells, strict=True)
            return ["", *(state.name for _, state in states)], [[h, *row] for h, row in zip(head, columns, strict=True)]
        rows = [[model, state.name, *row] for (model, state), row in zip(states, cells, strict=True)]
        return ["model", "state", *head], rows

    def _repr_html_(self) -> str:
        """Show the answer in a notebook."""
        head, rows = self.table()
        said = "".join(f"<p>{html.escape(line)}</p>" for line in self.lines() if line)
        tables = [one._repr_html_() for report in self.reports.values() for one in _detections(report)]
        notes = "".join(f"<p><small>{html.escape(note)}</small></p>" for note in self.footnotes())
        return said + html_table([head, *rows]) + notes + "".join(tables)

    def footnotes(self) -> list[str]:
        """Explain the intervals of the table that need it."""
        several = len(self.reports) > 1
        return [
            f"{f'{name}: ' if several else ''}{note}" for name, report in self.reports.items() for note in report.notes
        ]

    def detections(self) -> dict[str, str]:
        """Write the tables of foreign data, by model and state."""
        return {
            f"{name}, {state.name}": str(state.detection)
            for name, report in self.reports.items()
            for state in report.states
            if state.detection is not None
        }

    def failed(self, conditions: Sequence[str]) -> list[str]:
        """Say which conditions hold that must not: `ece>0.05`, `temperature.ece>2%`, `ece.high>0.1`, `accuracy<0.9`."""
        found = []
        for text in conditions:
            condition = Condition.parse(text)
            for name, report in self.reports.items():
                value = condition.value(report)
                if SIGNS[condition.sign](value, condition.limit):
                    found.append(f"{name}: {condition.name} is {value:.6g}, so {text.strip()} holds")
        return found

    def to_dict(self) -> dict[str, Any]:
        """List everything as plain values that JSON knows."""
        return {
            "format": FORMAT,
            "models": {
                name: {
                    "file": str(self.files[name]) if name in self.files else None,
                    "columns": next(iter(self._columns(name)), None),
                    "in_words": in_words(report),
                    "sentences": list(sentences(report)),
                    "report": report.to_dict(),
                }
                for name, report in self.reports.items()
            },
            "compared": [
                {"models": [one.first, one.second], "metric": one.metric}
                | ({"why": one.why} if one.found is None else one.found.to_dict())
                for one in self.compared
            ],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Write everything as one JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)


@dataclass(frozen=True)
class Condition:
    """Something that must not hold, such as `ece>0.05`.

    Args:
        state: "as given", or the calibrator after which the number is taken.
        metric: the number.
        end: "low" or "high" for an end of its interval, or "".
        sign: how it is compared.
        limit: with what.
    """

    state: str
    metric: str
    end: str
    sign: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Take a condition apart."""
        found = CONDITION.fullmatch(text)
        if found is None:
            raise UserError(f"{text!r} is no condition; it looks like ece>0.05, temperature.ece>=2% or accuracy<0.9")
        name, sign, number, percent = found.groups()
        *before, last = name.split(".")
        end = last if last in {"low", "high"} else ""
        parts = before if end else [*before, last]
        if not 1 <= len(parts) <= 2:
            raise UserError(f"{text!r}: before {sign} stands METRIC, STATE.METRIC, or one of them with .low or .high")
        return cls(
            state=parts[0] if len(parts) == 2 else AS_GIVEN,
            metric=parts[-1],
            end=end,
            sign=sign,
            limit=float(number) / (100 if percent else 1),
        )

    @property
    def name(self) -> str:
        """What is compared."""
        return ".".join(
            [*([] if self.state == AS_GIVEN else [self.state]), self.metric, *([self.end] * bool(self.end))]
        )

    def value(self, report: Report) -> float:
        """Find the number in a report."""
        states: dict[str, State] = {state.name: state for state in report.states}
        if self.state not in states:
            raise UserError(f"{self.name}: there is no {self.state!r} here, only {', '.join(states)}")
        results = states[self.state].results
        if self.metric not in results:
            raise UserError(f"{self.name}: {self.metric!r} is not known; known: {', '.join(results)}")
        result = results[self.metric]
        if self.end and result.interval is None:
            raise UserError(f"{self.name}: {self.metric} has no interval")
        value = float(result) if not self.end else float(getattr(result.interval, self.end))
        if not math.isfinite(value):
            raise UserError(f"{self.name} is {value}, which can be compared with nothing")
        return value


def check_conditions(conditions: Sequence[str], posthoc: Sequence[str]) -> None:
    """Refuse conditions on numbers or calibrators that there will not be, before any work is done.

    Args:
        conditions: such as `ece>0.05`.
        posthoc: the calibrators that will be tried.
    """
    metrics = all_metrics()
    for condition in map(Condition.parse, conditions):
        if condition.state not in {AS_GIVEN, *posthoc}:
            there = ", ".join([AS_GIVEN, *posthoc])
            raise UserError(f"{condition.name}: there is no {condition.state!r} here, only {there}")
        if condition.metric not in metrics:
            raise UserError(f"{condition.name}: {condition.metric!r} is not known; known: {', '.join(metrics)}")
        if metrics[condition.metric].unit == "fraction" and condition.limit > 1:
            share = f"{condition.limit:g}% or {condition.limit / 100:g}"
            raise UserError(
                f"{condition.metric} is a share of at most 1, so {condition.limit:g} is no limit; write {share}"
            )


def judge_files(
    files: File | Sequence[File] | Mapping[str, File | Model],
    *,
    calibrate_on: Files = (),
    calibrate_labels: File | None = None,
    ood: Files = (),
    posthoc: str | Sequence[Any] = ("temperature",),
    folds: int = FOLDS,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    images: File | None = None,
    watch: Watch | None = None,
    **columns: Unpack[ReadOptions],
) -> Answer:
    """Read files of predictions, and find out what their confidence is worth.

    Args:
        files: one for each model: FILE or NAME=FILE; or, by their names, files or what is already known of models.
        calibrate_on: predictions of the same models on other samples, which calibrators are fitted on: FILE for a
            single model, MODEL=FILE or {MODEL: FILE} for several. Without it calibrators are cross-fitted.
        calibrate_labels: a file of the labels of these samples, where they are not in `calibrate_on`.
        ood: predictions on foreign data: NAME=FILE or {NAME: FILE} for a single model, MODEL/NAME in place of NAME for
            one of several.
        posthoc: the calibrators to try.
        folds: number of folds for cross-fitting them.
        bins: how many bins calibration errors have.
        level: of all intervals.
        resamples: how many resamples intervals are made from; each method's own number by default.
        seed: of the random numbers of intervals and of cross-fitting.
        images: a folder that image files may lie in; without it, a page shows those below the file that names them.
        watch: called with what is being done and which share of it is done.
        columns: which columns of the files hold what where their names do not say it, as in `read_predictions`.
    """
    named = files if isinstance(files, Mapping) else named_files([files] if isinstance(files, str | Path) else files)
    if not named:
        raise UserError("no file of predictions is given")
    others = _of_models(calibrate_on, list(named))
    if calibrate_labels is not None and not others:
        raise UserError(f"{calibrate_labels} holds labels of no file: give it with --calibrate-on (calibrate_on=)")
    foreign = _foreign(ood, list(named))
    sources = {name: one.source if isinstance(one, Model) else Path(one) for name, one in named.items()}
    for name, path in others.items():
        source = sources[name]
        if source is not None and path.resolve() == source.resolve():
            raise UserError(
                f"{path} is the file that is judged; without predictions to calibrate on, calibrators are cross-fitted"
            )
    tried = (posthoc,) if isinstance(posthoc, str) or not isinstance(posthoc, Sequence) else tuple(posthoc)
    options: dict[str, Any] = {"bins": bins, "level": level, "resamples": resamples, "seed": seed}
    models, notes = {}, []
    for name, one in named.items():
        held = one if isinstance(one, Model) else _model(Path(one), images, watch, columns)
        if held.report is None:
            held = _completed(
                held, name, others.get(name), foreign.get(name, {}), watch, columns=columns, labels=calibrate_labels
            )
            why = _no_calibrator(held, folds)
            if why and tried:
                notes.append(f"{name}: no calibrator is tried: {why}")
            held = replace(held, posthoc=() if why else tried, folds=folds)
            held = replace(held, report=_report(held, options, _stage(watch, f"evaluating {name}")))
        elif name in others or name in foreign:
            raise UserError(f"{name} has a report already, so no further predictions of it can be looked at")
        models[name] = held
    held_by = {name: model.predictions for name, model in models.items() if model.predictions is not None}
    compared = duels(held_by, **options, watch=_stage(watch, "comparing models"))
    if any(one.found is not None for one in compared) and (note := correction_note(len(held_by))):
        notes.append(note)
    return Answer(models, {name: path for name, path in sources.items() if path is not None}, compared, notes)


def named_files(files: Sequence[File]) -> dict[str, Path]:
    """Name every file: as the user did, else by its own name, with its folder where two are called the same."""
    pairs = [_pair(one) for one in files]
    plain = [name or (path.resolve().name if path.is_dir() else _stem(path)) for name, path in pairs]
    found: dict[str, Path] = {}
    for (name, path), short in zip(pairs, plain, strict=True):
        whole = path if path.is_dir() else path.with_suffix("")
        called = short if name or plain.count(short) == 1 else whole.as_posix()
        if called in found:
            raise UserError(f"two models are called {called!r}; name them: NAME=FILE")
        found[called] = path
    return found


def _stem(path: Path) -> str:
    return Path(path.stem).stem if path.suffix.lower() == ".gz" else path.stem


def _model(path: Path, images: File | None, watch: Watch | None, columns: ReadOptions) -> Model:
    # A stranger's file may name any file of this machine, which a page would then show to whoever it is sent to.
    folders = (path.parent, *([] if images is None else [Path(images)]))
    return Model(predictions=_truth(path, watch, columns), source=path, image_folders=folders)


def _completed(
    held: Model,
    name: str,
    calibration: Path | None,
    foreign: Mapping[str, Path],
    watch: Watch | None,
    *,
    columns: ReadOptions,
    labels: File | None,
) -> Model:
    """Add what was asked for beside the predictions."""
    if held.predictions is None:
        raise UserError(f"{name} has neither predictions nor a report")
    given = held.predictions
    # Labels of calibration data have an option of their own; OOD samples have no labels.
    unlabelled: Any = {word: value for word, value in columns.items() if word not in {"labels", "label_column"}}
    others: Any = {**columns, "labels": labels}
    read = {word: _like(_read(path, watch, unlabelled), given, path) for word, path in foreign.items()}
    other = (
        held.calibration
        if calibration is None
        else _like(
            require_labels(_read(calibration, watch, others), calibration, "calibrate_labels"), given, calibration
        )
    )
    return replace(held, calibration=other, ood={**held.ood, **read})


def _report(held: Model, options: Mapping[str, Any], watch: Callable[[float], None] | None) -> Report:
    assert held.predictions is not None
    return evaluate(held.predictions, **held.asked(), **options, watch=watch)


def _no_calibrator(held: Model, folds: int) -> str:
    """Say why no calibrator can be fitted; nothing where it can."""
    given = held.predictions
    assert given is not None
    if isinstance(given, TopLabelPredictions):
        return "only the top class of each sample is known"
    if held.calibration is None and len(given) < 2 * folds:
        have = "1 sample is" if len(given) == 1 else f"{len(given)} samples are"
        return f"{have} too few to cross-fit one in {folds} parts; other ones can be given"
    return ""


def _detections(report: Report) -> list[Detection]:
    return [state.detection for state in report.states if state.detection is not None]


def _read(path: Path, watch: Watch | None, columns: ReadOptions) -> AnyPredictions:
    stage = _stage(watch, f"reading {path.name}")
    if stage is None:
        return read_predictions(path, **columns)
    stage(0.0)
    found = read_predictions(path, watch=stage, **columns)
    stage(1.0)  # files that are read in one go tell nothing, and the others not the last bit
    return found


def _truth(path: Path, watch: Watch | None, columns: ReadOptions) -> AnyPredictions:
    return require_labels(_read(path, watch, columns), path)


def _stage(watch: Watch | None, word: str) -> Callable[[float], None] | None:
    return None if watch is None else lambda share: watch(word, share)


def _pair(text: str | Path) -> tuple[str, Path]:
    """Take NAME=FILE apart; a file whose own name has a = in it needs no other name."""
    name, equals, path = str(text).partition("=")
    return ("", Path(text)) if not equals or Path(text).exists() else (name.strip(), Path(path))


def _of_models(files: Files, models: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, path in _pairs(files):
        model = name or (models[0] if len(models) == 1 else "")
        if model not in models:
            raise UserError(f"calibrate on {path}: which model is it of? Write MODEL=FILE, with {', '.join(models)}")
        if model in found:
            raise UserError(f"two files to calibrate on are given for {model}")
        found[model] = path
    return found


def _foreign(files: Files, models: Sequence[str]) -> dict[str, dict[str, Path]]:
    found: dict[str, dict[str, Path]] = {}
    for name, path in _pairs(files, named=True):
        # The name of a model may hold a slash itself.
        fitting = [one for one in models if name.startswith(f"{one}/")]
        model = models[0] if len(models) == 1 else max(fitting, key=len, default="")
        word = name if len(models) == 1 else name.removeprefix(f"{model}/")
        if model not in models or not word:
            known = ", ".join(models)
            raise UserError(f"OOD data {name}={path}: which model is it of? Write MODEL/NAME=FILE, with {known}")
        if word in found.setdefault(model, {}):
            raise UserError(f"two files of OOD data are given for {word}")
        found[model][word] = path
    return found


def _pairs(files: Files, *, named: bool = False) -> list[tuple[str, Path]]:
    """Give name and file of each, whichever way they were given; with an error where one has to have a name."""
    if isinstance(files, Mapping):
        return [(str(name), Path(path)) for name, path in files.items()]
    found = []
    for one in [files] if isinstance(files, str | Path) else files:
        name, _, path = str(one).partition("=")
        if named and not (name and path):
            raise UserError(f"OOD data is given as NAME=FILE, not as {str(one)!r}")
        found.append((name, Path(path)) if named else _pair(one))
    return found


def _like(other: AnyPredictions, given: AnyPredictions, path: Path) -> AnyPredictions:
    """Check that predictions of the same model know the same classes in the same order."""
    tops = isinstance(other, TopLabelPredictions), isinstance(given, TopLabelPredictions)
    if all(tops):
        return other  # each names the classes that it mentions
    if any(tops):
        check_every_class(other, str(path), given, "the evaluated predictions")
    named = None not in (other.class_names, given.class_names)
    if other.num_classes != given.num_classes:
        raise UserError(f"{path} has {other.num_classes} classes, the evaluated predictions {given.num_classes}")
    if named and other.class_names != given.class_names:
        raise UserError(f"{path} names other classes, or in another order, than the evaluated predictions")
    return other
