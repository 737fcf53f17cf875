"""From files of predictions to an answer: what `fedlas evaluate` does, for any caller.

    answer = judge_files(["resnet.csv"], ood=["svhn=svhn.npz"])
    for line in answer.lines():
        ...
    answer.failed(["ece>0.05"])

A model is called what stands before `=` in `NAME=FILE`, or what its file is called.
"""

import html
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlas.evaluation import AS_GIVEN, SHOWN, Report, State, evaluate
from fedlas.files import read_predictions
from fedlas.metrics.result import html_table
from fedlas.ood.detection import Detection
from fedlas.predictions import Predictions
from fedlas.report.duels import Duel, duels
from fedlas.report.subjects import Model
from fedlas.report.words import in_words, sentences

FORMAT = "fedlas.answer/1"
FOLDS = 2
BRIEFLY = ("accuracy", "ece", "over_ece", "under_ece", "nll")  # of several models
SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(%?)\s*")

Watch = Callable[[str, float], None]


@dataclass(frozen=True)
class Answer:
    """What is known about the models of some files.

    Args:
        models: what each file held, and its report.
        files: where each model was read from.
        compared: paired tests of models on the same samples, or why there is none.
        notes: what could not be done, and why.
    """

    models: Mapping[str, Model]
    files: Mapping[str, Path]
    compared: Sequence[Duel] = ()
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
            said += [f"{name}: {words}.", *(f"  {line}" for line in sentences(report)), ""]
        for one in self.compared:
            verdict = f": {one.found}" if one.found is not None else f" are not compared: {one.why}"
            said.append(f"{one.first} and {one.second}{verdict}")
        return [*said, *self.notes]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Lay the numbers out: of one model a column for each state, of several a row for each."""
        reports = self.reports
        first = next(iter(reports.values())).before
        states = [(model, state) for model, report in reports.items() for state in report.states]
        wanted = SHOWN if len(reports) == 1 else BRIEFLY
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
        return said + html_table([head, *rows]) + "".join(tables)

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
                    "file": str(self.files[name]),
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
            raise ValueError(f"{text!r} is no condition; it looks like ece>0.05, temperature.ece>=2% or accuracy<0.9")
        name, sign, number, percent = found.groups()
        *before, last = name.split(".")
        end = last if last in {"low", "high"} else ""
        parts = before if end else [*before, last]
        if not 1 <= len(parts) <= 2:
            raise ValueError(f"{text!r}: before {sign} stands METRIC, STATE.METRIC, or one of them with .low or .high")
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
            raise ValueError(f"{self.name}: there is no {self.state!r} here, only {', '.join(states)}")
        results = states[self.state].results
        if self.metric not in results:
            raise ValueError(f"{self.name}: {self.metric!r} is not known; known: {', '.join(results)}")
        result = results[self.metric]
        if self.end and result.interval is None:
            raise ValueError(f"{self.name}: {self.metric} has no interval")
        value = float(result) if not self.end else float(getattr(result.interval, self.end))
        if not math.isfinite(value):
            raise ValueError(f"{self.name} is {value}, which can be compared with nothing")
        return value


def judge_files(
    files: Sequence[str | Path],
    *,
    calibrate_on: Sequence[str | Path] = (),
    ood: Sequence[str] = (),
    posthoc: Sequence[str] = ("temperature",),
    folds: int = FOLDS,
    bins: int = 15,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> Answer:
    """Read files of predictions, and find out what their confidence is worth.

    Args:
        files: one for each model, FILE or NAME=FILE.
        calibrate_on: predictions of the same models on other samples, which calibrators are fitted on: FILE for a
            single model, MODEL=FILE for one of several. Without it calibrators are cross-fitted.
        ood: predictions on foreign data: NAME=FILE for a single model, MODEL/NAME=FILE for one of several.
        posthoc: the calibrators to try.
        folds: in how many parts they are cross-fitted.
        bins: how many bins calibration errors have.
        level: of all intervals.
        resamples: how many resamples intervals are made from; each method's own number by default.
        seed: of the random numbers of intervals and of cross-fitting.
        watch: called with what is being done and which share of it is done.
    """
    if not files:
        raise ValueError("no file of predictions is given")
    named = _named(files)
    others = _of_models(calibrate_on, list(named))
    foreign = _foreign(ood, list(named))
    for name, path in others.items():
        if path.resolve() == named[name].resolve():
            raise ValueError(f"{path} is the file that is judged; without --calibrate-on calibrators are cross-fitted")
    models, notes = {}, []
    for name, path in named.items():
        given = _read(path, watch)
        why = _no_calibrator(given, folds, calibrated=name in others)
        if why and posthoc:
            notes.append(f"{name}: no calibrator is tried: {why}")
        held = Model(
            predictions=given,
            calibration=_like(_read(others[name], watch), given, others[name]) if name in others else None,
            ood={word: _like(_read(one, watch), given, one) for word, one in foreign.get(name, {}).items()},
            posthoc=() if why else tuple(posthoc),
        )
        report = evaluate(
            given,
            ood=held.ood or None,
            posthoc=held.posthoc,
            calibration=held.calibration,
            folds=folds,
            bins=bins,
            level=level,
            resamples=resamples,
            seed=seed,
            watch=_stage(watch, f"evaluating {name}"),
        )
        models[name] = replace(held, report=report)
    held_by = {name: model.predictions for name, model in models.items() if model.predictions is not None}
    options: dict[str, Any] = {"bins": bins, "level": level, "resamples": resamples, "seed": seed}
    compared = duels(held_by, **options, watch=_stage(watch, "comparing models"))
    return Answer(models, named, list(compared), notes)


def _no_calibrator(given: Predictions, folds: int, *, calibrated: bool) -> str:
    """Say why no calibrator can be fitted; nothing where it can."""
    if given.top_only:
        return "only the top class of each sample is known"
    if not calibrated and len(given) < 2 * folds:
        return f"{len(given)} samples are too few to cross-fit one in {folds} parts; other ones can be given"
    return ""


def _detections(report: Report) -> list[Detection]:
    return [state.detection for state in report.states if state.detection is not None]


def _read(path: Path, watch: Watch | None) -> Predictions:
    found = read_predictions(path, watch=_stage(watch, f"reading {path.name}"))
    return found.with_paths_from(path.parent)


def _stage(watch: Watch | None, word: str) -> Callable[[float], None] | None:
    return None if watch is None else lambda share: watch(word, share)


def _named(files: Sequence[str | Path]) -> dict[str, Path]:
    """Name every file: as the user did, else by its own name, with its folder where two are called the same."""
    pairs = [_pair(one) for one in files]
    plain = [name or path.stem for name, path in pairs]
    found: dict[str, Path] = {}
    for (name, path), short in zip(pairs, plain, strict=True):
        called = short if name or plain.count(short) == 1 else path.with_suffix("").as_posix()
        if called in found:
            raise ValueError(f"two models are called {called!r}; name them: NAME=FILE")
        found[called] = path
    return found


def _pair(text: str | Path) -> tuple[str, Path]:
    """Take NAME=FILE apart; a file whose own name has a = in it needs no other name."""
    name, equals, path = str(text).partition("=")
    return ("", Path(text)) if not equals or Path(text).exists() else (name.strip(), Path(path))


def _of_models(files: Sequence[str | Path], models: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for one in files:
        name, path = _pair(one)
        model = name or (models[0] if len(models) == 1 else "")
        if model not in models:
            raise ValueError(f"--calibrate-on {one}: which model is it of? Write MODEL=FILE, with {', '.join(models)}")
        if model in found:
            raise ValueError(f"--calibrate-on names two files for {model}")
        found[model] = path
    return found


def _foreign(given: Sequence[str], models: Sequence[str]) -> dict[str, dict[str, Path]]:
    found: dict[str, dict[str, Path]] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"--ood takes NAME=FILE, not {text!r}")
        # The name of a model may hold a slash itself.
        fitting = [one for one in models if name.startswith(f"{one}/")]
        model = models[0] if len(models) == 1 else max(fitting, key=len, default="")
        word = name if len(models) == 1 else name.removeprefix(f"{model}/")
        if model not in models or not word:
            raise ValueError(f"--ood {text}: which model is it of? Write MODEL/NAME=FILE, with {', '.join(models)}")
        if word in found.setdefault(model, {}):
            raise ValueError(f"--ood names two files for {word}")
        found[model][word] = Path(path)
    return found


def _like(other: Predictions, given: Predictions, path: Path) -> Predictions:
    """Check that predictions of the same model know the same classes in the same order."""
    if other.num_classes != given.num_classes:
        raise ValueError(f"{path} has {other.num_classes} classes, the predictions that are judged {given.num_classes}")
    if None not in (other.class_names, given.class_names) and other.class_names != given.class_names:
        raise ValueError(f"{path} names other classes, or in another order, than the predictions that are judged")
    return other
