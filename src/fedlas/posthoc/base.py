"""What every calibrator shares: shapes, checks, files, and where it was fitted.

A calibrator learns from the logits and labels of one split and maps logits to logits, so what follows cannot tell
whether predictions were calibrated. `fit` and `transform` take

    (n, classes)            rows of logits
    (n,) or (n, 1)          a one-logit head, which is a binary classifier: z means the logits [0, z]
    (n, classes, ...)       maps, each position of which is a sample
    Predictions             whose split is remembered; `transform` returns Predictions

as torch tensors or numpy arrays, and `transform` answers in the same form, in float32 or better. A calibrator that
makes probabilities returns their logarithms; probabilities below its `floor` are raised to it first.
"""

import hashlib
import json
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

import torch
from jaxtyping import Bool, Float, Float64, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedlas.catalog import keywords
from fedlas.errors import UserError, UserTypeError
from fedlas.io.atomic import write_atomic
from fedlas.io.safetensors import read_safetensors, to_safetensors
from fedlas.io.untrusted import check_file, file_errors
from fedlas.predictions import (
    AnyPredictions,
    Array,
    OptionalFields,
    Predictions,
    as_floats,
    as_tensor,
    check_labels,
    check_rows,
    slices_of,
    two_columns,
    with_every_class,
)

FORMAT = "fedlas.calibrator/1"
# What is not finite in a calibrator where samples did not determine it: a standard error, the value of an empty bin.
UNKNOWN: Mapping[str, Callable[[Tensor], Tensor]] = {"standard_error": torch.isposinf, "values": torch.isnan}
KIND = "a calibrator is a .safetensors file that `fedlas calibrate fit` or its own save() wrote"
CHECKSUM = "sha256"  # of the numbers, among the words of a file; `to_safetensors` adds one of the words too
Kind = TypeVar("Kind", bound="AbstractCalibrator")
EXACT_BELOW = 20_000_000  # this many numbers are copied to float64; larger tables keep their type
ENORMOUS = 1e100
MOST_ZEROS = 0.002  # fraction of labels whose probability was given as zero


class Samples(NamedTuple):
    """Checked rows to learn from.

    Args:
        logits: one row per sample.
        labels: class numbers, or rows of class probabilities.
        zeros: which logits stand for a probability that was given as zero, and are unknown; None where there are none.
    """

    logits: Float[Tensor, "n classes"]
    labels: Int64[Tensor, " n"] | Float[Tensor, "n classes"]
    zeros: Bool[Tensor, "n classes"] | None = None

    @property
    def shares(self) -> Float[Tensor, "n classes"]:
        """The labels as rows: one-hot, or as they came."""
        if self.labels.ndim == 2:
            return self.labels.to(self.logits.dtype)
        return torch.zeros_like(self.logits).scatter_(1, self.labels[:, None], 1)


class DoubtfulFit(UserWarning):
    """What a calibrator learned should not be relied on."""


@dataclass(frozen=True)
class Fit:
    """What is known about how a calibrator was fitted.

    Args:
        n: how many samples it saw.
        classes: how many classes they had.
        split: which split they were.
        before: mean negative log-likelihood of these samples as they came, in nats.
        after: the same after calibration.
        class_names: one name per class, where predictions that have them were fitted on; older files have none.
        doubt: why what was learned should not be relied on; empty where nothing speaks against it.
    """

    n: int
    classes: int
    split: str | None
    before: float
    after: float
    class_names: tuple[str, ...] | None = None
    doubt: str = ""

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Fit":
        """Read back what a file says, also one from before names were kept."""
        names, split, doubt = fields.get("class_names"), fields["split"], fields.get("doubt", "")
        if names is not None and not isinstance(names, list | tuple):
            raise UserError(f"class_names is {names!r:.100}; a list of words is expected")
        return cls(
            n=checked_number(fields["n"], "n"),
            classes=checked_number(fields["classes"], "classes"),
            split=None if split is None else checked_text(split, "split"),
            before=_checked_real(fields["before"], "before"),
            after=_checked_real(fields["after"], "after"),
            class_names=None if names is None else tuple(checked_text(name, "class_names") for name in names),
            doubt=checked_text(doubt, "doubt"),
        )


def checked_text(value: object, name: str) -> str:
    """Give back a word that a file holds; anything else is an error."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r:.100}; a text is expected")
    return value


def checked_number(value: object, name: str) -> int:
    """Give back a count that a file holds; anything else is an error."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{name} is {value!r:.100}; a whole number from 0 on is expected")
    return value


def _checked_real(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"{name} is {value!r:.100}; a number is expected")
    return value


class AbstractCalibrator(ABC):
    """A repair of logits, learned from some samples and their labels.

    A subclass keeps its keywords as attributes of the same names, and what it learns in `learned`; saving and loading
    need no more.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    keeps_order: ClassVar[bool] = False
    """Whether the order of classes, and so accuracy, stays as it is."""
    by_class: ClassVar[bool] = True
    """Whether it does to one class what it does not do to another, so that a fit belongs to one order of columns."""

    learned: dict[str, Tensor]
    fitted: Fit | None = None

    @abstractmethod
    def learn(self, samples: Samples) -> dict[str, Tensor]:
        """Find the numbers that `apply` needs."""

    @abstractmethod
    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        """Map rows of logits to calibrated ones, with the numbers in `learned`."""

    def fill_zeros(
        self, logits: Float[Tensor, "n classes"], zeros: Bool[Tensor, "n classes"] | None
    ) -> Float[Tensor, "n classes"]:
        """Return logits with the value that was learned for probabilities of zero; by default they stay as they are.

        Args:
            logits: one row per sample.
            zeros: which of them stand for a probability that was given as zero.
        """
        del zeros
        return logits

    def doubt(self, samples: Samples) -> str:
        """Return why what was learned from these samples should not be relied on; empty if there is no reason."""
        if samples.zeros is None:
            return ""
        labels = float((samples.shares * samples.zeros).sum())
        if labels <= MOST_ZEROS * len(samples.logits):
            return ""
        return (
            f"{labels:,.0f} of {len(samples.logits):,} labels have probability zero, and {self.name} depends on the "
            "number that stands for zero. Give logits, or probabilities with more digits; temperature needs no "
            "such number."
        )

    @property
    def options(self) -> dict[str, Any]:
        """The keywords it was built with."""
        return {word: getattr(self, word) for word in keywords(type(self))}

    def fit(
        self: Kind,
        logits: AnyPredictions | Array,
        labels: Array | None = None,
        *,
        split: str | None = None,
        ignore_index: int | None = None,
    ) -> Kind:
        """Learn from logits and their labels.

        Args:
            logits: predictions, or logits of any of the shapes in the module's text.
            labels: class numbers, or rows of class probabilities; not needed with predictions.
            split: where the samples come from; known for predictions.
            ignore_index: label of samples that do not count.
        """
        samples, split = _samples(logits, labels, split, ignore_index)
        if split is not None and re.search(r"(?<![a-z])test(?![a-z])", split.lower()):
            warnings.warn(
                f"{self.name} is fitted on the split {split!r}: what is measured there afterwards is too good. "
                "Fit on held-out validation data.",
                UserWarning,
                stacklevel=2,
            )
        before = mean_nll(samples.logits, samples.labels)
        self.learned = self.learn(samples)
        after = mean_nll(self.apply(self.fill_zeros(samples.logits, samples.zeros)), samples.labels)
        n, classes = samples.logits.shape
        names = logits.class_names if isinstance(logits, Predictions) else None
        doubt = self.doubt(samples)
        if doubt:
            warnings.warn(doubt, DoubtfulFit, stacklevel=2)
        self.fitted = Fit(n, classes, split, before, after, names, doubt)
        return self

    @overload
    def transform(self, logits: Predictions) -> Predictions: ...
    @overload
    def transform(self, logits: Tensor) -> Tensor: ...
    @overload
    def transform(self, logits: NDArray[Any]) -> NDArray[Any]: ...
    def transform(self, logits: AnyPredictions | Tensor | NDArray[Any]) -> Predictions | Tensor | NDArray[Any]:
        """Calibrate logits; the answer has the form and shape of what came in.

        Predictions whose classes have other names, or another order, than those it was fitted on are refused, unless
        all classes are treated alike (`by_class` is False) or one of the two has no names.
        """
        if isinstance(logits, AnyPredictions):
            logits = with_every_class(logits, "calibration")
            self.check_names(logits.class_names)
            return with_logits(logits, self.transform(self.fill_zeros(logits.logits, logits.zeros)))
        given = as_floats(logits, "logits")
        table = _table(given)
        if self.fitted is None:
            raise RuntimeError(f"{self.name} is not fitted yet; call fit(logits, labels) first, or load it from a file")
        if table.shape[1] != self.fitted.classes:
            raise UserError(f"logits have {table.shape[1]} classes; {self.name} was fitted on {self.fitted.classes}")
        check_rows("logits", table, torch.isfinite(table).all(1), "holds NaN or infinity")
        largest = torch.finfo(given.dtype).max  # what is enormous stays enormous, and finite
        calibrated = _as_given(self.apply(wide(table)).clamp(-largest, largest), given)
        return calibrated if isinstance(logits, Tensor) else calibrated.numpy()

    def check_names(self, names: Sequence[str] | None) -> None:
        """Raise an error where columns of logits are named otherwise than when it was fitted, and that matters."""
        known = None if self.fitted is None else self.fitted.class_names
        if not self.by_class or known is None or names is None or known == tuple(names):
            return
        if len(known) != len(names):
            raise UserError(f"there are {len(names)} classes; {self.name} was fitted on {len(known)}")
        place = next(k for k, (ours, theirs) in enumerate(zip(known, names, strict=True)) if ours != theirs)
        order = "the same classes in another order" if sorted(known) == sorted(names) else "other classes"
        raise UserError(
            f"{self.name} was fitted on {order}: class {place} was {known[place]!r} and is {names[place]!r} here. "
            "It treats each class in its own way; put the columns in the order that it was fitted on, or fit it again."
        )

    def save(self, path: str | Path) -> None:
        """Write what was learned to a safetensors file, whole or not at all."""
        if self.fitted is None:
            raise RuntimeError(f"{self.name} is not fitted yet; there is nothing to save")
        about = {"format": FORMAT, "name": self.name, "options": self.options, "fitted": asdict(self.fitted)}
        tensors = {key: value.cpu().contiguous() for key, value in self.learned.items()}
        words = {key: json.dumps(value) for key, value in (about | {CHECKSUM: _checksum(tensors)}).items()}
        write_atomic(Path(path), to_safetensors(words, tensors))

    @classmethod
    def load(cls: type[Kind], path: str | Path) -> Kind:
        """Read a file that `save` wrote; `fedlas.posthoc.load_calibrator` finds the class by itself."""
        about, tensors = read(path)
        if about.get("name") != cls.name:
            raise UserError(f"{path} holds a {about.get('name')!r} calibrator, not {cls.name!r}")
        with file_errors(path):
            return cls.restore(about, tensors)

    @classmethod
    def restore(cls: type[Kind], about: Mapping[str, Any], tensors: dict[str, Tensor]) -> Kind:
        """Make a fitted calibrator of what a file says."""
        for name, value in tensors.items():
            known = value.isfinite() | UNKNOWN[name](value) if name in UNKNOWN else value.isfinite()
            if name == "temperature":
                known &= value > 0
            if not bool(known.all()):
                above = " and above 0" if name == "temperature" else ""
                raise UserError(f"{name} is {float(value[~known].flatten()[0]):g}; it must be finite{above}")
        made = cls(**about["options"])
        made.learned, made.fitted = tensors, Fit.from_dict(about["fitted"])
        return made

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        state = "not fitted"
        if self.fitted is not None:
            numbers = {name: float(value) for name, value in self.learned.items() if value.numel() == 1}
            shown = "".join(f", {name}={value:.4g}" for name, value in numbers.items())
            state = f"fitted on {self.fitted.n:,} samples{shown}"
        return f"<{type(self).__name__}({options}), {state}>"


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what a calibrator's file says about it, and its numbers."""
    check_file(path)
    with Path(path).open("rb") as file:
        start = file.read(9)
    if start[8:] != b"{":  # behind the length of its words
        raise UserError(f"{path} is {'no calibrator' if start else 'empty'}; {KIND}")
    words, tensors = read_safetensors(path)
    if words.get("format") != json.dumps(FORMAT):
        what = " but holds predictions" if {"logits", "probs"} & set(tensors) else ""
        raise UserError(f"{path} is no calibrator{what}; {KIND}")
    with file_errors(path):
        about = {key: json.loads(value) for key, value in words.items()}
    if about.get(CHECKSUM, _checksum(tensors)) != _checksum(tensors):  # older files have none
        raise UserError(f"{path} is damaged: its numbers do not have the checksum that was written with them")
    return about, tensors


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def with_logits(predictions: Predictions, logits: Float[Tensor, "n classes"]) -> Predictions:
    """Return predictions with other logits and all other fields as they are."""
    fields: Any = {name: getattr(predictions, name) for name in OptionalFields.__annotations__}
    return Predictions(logits, predictions.given_labels, **fields)


def wide(logits: Tensor) -> Tensor:
    """Take logits in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mean_nll(logits: Float[Tensor, "n classes"], labels: Tensor) -> float:
    """Measure the mean negative log-likelihood of labels, in nats."""
    total = 0.0
    for rows in slices_of(logits):
        logs, truth = logits[rows].log_softmax(1), labels[rows]
        own = logs.gather(1, truth[:, None]) if truth.ndim == 1 else (logs * truth).sum(1)
        total -= float(own.sum(dtype=torch.float64))
    return total / len(logits)


def learned_like(value: Tensor, logits: Tensor) -> Tensor:
    """Bring a learned number to the type and device of the logits."""
    return value.to(device=logits.device, dtype=logits.dtype)


def log_probs_of(probs: Float[Tensor, "n classes"], fallback: Float[Tensor, "n classes"], floor: float) -> Tensor:
    """Normalise rows of non-negative numbers and take logarithms; a row of zeros becomes its fallback."""
    total = probs.sum(1, keepdim=True)
    normalised = torch.where(total > 0, probs / torch.where(total > 0, total, 1), fallback)
    raised = normalised.clamp_min(floor)
    return (raised / raised.sum(1, keepdim=True)).log()


def check_floor(floor: float) -> float:
    """Raise an error unless a floor can be the smallest probability."""
    if not 0 < floor < 0.1:
        raise UserError(f"floor is {floor}; a small positive probability is needed, such as 1e-7")
    return float(floor)


def scaled_nll(samples: Samples, inverse: float) -> tuple[float, float, float]:
    """Measure the mean NLL of logits times `inverse`, and its first and second derivative by `inverse`."""
    value = slope = bend = 0.0
    for rows in slices_of(samples.logits):
        logits, labels = samples.logits[rows], samples.labels[rows]
        top = logits.amax(1, keepdim=True)
        below = logits - top
        own = below.gather(1, labels[:, None])[:, 0] if labels.ndim == 1 else (below * labels).sum(1)
        weight = (below * inverse).exp_()
        total = weight.sum(1)
        pulled = weight.mul_(below)
        first = pulled.sum(1) / total
        second = torch.linalg.vecdot(pulled, below) / total
        parts = torch.stack([total.log() - inverse * own, first - own, second - first**2])
        sums = parts.sum(1, dtype=torch.float64).tolist()
        value, slope, bend = value + sums[0], slope + sums[1], bend + sums[2]
    n = len(samples.logits)
    return value / n, slope / n, bend / n


def best_inverse_temperature(samples: Samples, low: float, high: float) -> float:
    """Find the factor between two bounds that minimises the NLL of the logits.

    The NLL is convex in the factor, so its slope has one zero. Newton steps in the logarithm of the factor look for it,
    and bisection takes over whenever a step leaves the bracket.
    """
    if _separable(samples):
        return high
    left, right, at = math.log(low), math.log(high), 0.0
    tried_left = tried_right = False
    tolerance = 1e-13 if samples.logits.dtype == torch.float64 else 1e-6
    for _ in range(100):
        _, slope, bend = scaled_nll(samples, math.exp(at))
        if slope == 0 and bend == 0:
            # Either nothing depends on the factor, or every sample is right with a probability that rounds to one.
            return 1.0 if bool((samples.logits == samples.logits[:, :1]).all()) else high
        if (slope < 0 and at == math.log(high)) or (slope > 0 and at == math.log(low)):
            return high if slope < 0 else low
        if slope < 0:
            left, tried_left = at, True
        else:
            right, tried_right = at, True
        newton = -slope / (bend * math.exp(at)) if bend > 0 else math.copysign(math.inf, -slope)
        # Before the bracket is looked at: a step of nothing lands on its end, and would start a bisection.
        if abs(newton) <= tolerance:
            return math.exp(at)
        aim = min(right, max(left, at + min(2.0, max(-2.0, newton))))
        if (aim == left and tried_left) or (aim == right and tried_right):
            aim = (left + right) / 2
        if abs(aim - at) <= tolerance or (tried_left and tried_right and right - left <= tolerance):
            return math.exp(aim)
        at = aim
    return math.exp(at)


def _separable(samples: Samples) -> bool:
    """Say whether every label has the largest logit, and some other a smaller one: no factor is then large enough.

    Newton steps would grow ever shorter there, and end somewhere.
    """
    spread = False
    for rows in slices_of(samples.logits):
        logits, labels = samples.logits[rows], samples.labels[rows]
        top = logits.amax(1, keepdim=True)
        own = logits.gather(1, labels[:, None]) if labels.ndim == 1 else (logits * labels).sum(1, keepdim=True)
        if not bool((own == top).all()):
            return False
        spread |= bool((logits < top).any())
    return spread


def minimise(
    objective: Callable[..., Tensor], start: Mapping[str, Float64[Tensor, "..."]], steps: int = 500
) -> dict[str, Tensor]:
    """Minimise a smooth convex function of some tensors, from a start that the answer is never worse than."""
    values = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    method = torch.optim.LBFGS(
        values.values(),
        max_iter=steps,
        history_size=20,
        tolerance_grad=1e-8,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        method.zero_grad()
        loss = objective(**values)
        loss.backward()
        return loss

    with torch.enable_grad():
        method.step(closure)
    with torch.no_grad():
        found = {name: tensor.detach() for name, tensor in values.items()}
        better = float(objective(**found)) <= float(objective(**start))
    return found if better else dict(start)


def check_penalty(penalty: float) -> float:
    """Raise an error unless a penalty is zero or more."""
    if not 0 <= penalty < math.inf:
        raise UserError(f"penalty is {penalty}; zero or a positive number is needed")
    return float(penalty)


def nearest_affine(samples: Samples, penalty: float, *, mixes: bool) -> dict[str, Tensor]:
    """Find an affine map of the logits that minimises the NLL and stays near temperature scaling.

    Args:
        samples: what to learn from.
        penalty: strength of the pull towards temperature scaling.
        mixes: whether each class hears the logits of the others.
    """
    n, classes = samples.logits.shape
    factor = best_inverse_temperature(samples, 1e-4, 1e3)
    size = float(samples.logits.double().std(correction=0)) or 1.0
    unit = samples.logits / size  # logits of about one, so that one penalty fits any scale
    hard = samples.labels.ndim == 1

    def objective(scale: Tensor, offset: Tensor, mixing: Tensor | None = None) -> Tensor:
        moved = unit * scale + offset if mixing is None else torch.addmm(offset, unit, (mixing + scale.diag()).T)
        nll = functional.cross_entropy(moved, samples.labels if hard else samples.shares)
        bent = (scale - factor * size).square().sum() + offset.square().sum()
        if mixing is not None:
            bent = bent + classes * mixing.square().sum()
        return nll + penalty / n * bent

    start = {"scale": torch.full_like(unit[0], factor * size), "offset": torch.zeros_like(unit[0])}
    if mixes:
        start["mixing"] = unit.new_zeros(classes, classes)
    found = minimise(objective, start)
    learned = {"scale": found["scale"] / size, "offset": found["offset"]}
    if mixes:
        learned["mixing"] = found["mixing"] / size
    return learned


def apply_affine(inputs: Float[Tensor, "n classes"], learned: Mapping[str, Tensor]) -> Float[Tensor, "n classes"]:
    """Apply the map that `nearest_affine` found."""
    scale, offset, mixing = (learned_like(learned[name], inputs) for name in ("scale", "offset", "mixing"))
    return torch.addmm(offset, inputs, (mixing + scale.diag()).T)


def _samples(
    logits: AnyPredictions | Array, labels: Array | None, split: str | None, ignore_index: int | None
) -> tuple[Samples, str | None]:
    if isinstance(logits, AnyPredictions):
        logits = with_every_class(logits, "calibration")
        if labels is not None or ignore_index is not None:
            raise UserTypeError("Predictions carry their own labels; give neither labels nor ignore_index with them")
        return Samples(exact(logits.logits), logits.labels, logits.zeros), split or logits.split
    if labels is None:
        raise UserTypeError("labels are missing; only Predictions carry their own")
    given = as_floats(logits, "logits")
    table, truth = _table(given), as_tensor(labels, "labels").to(given.device)
    if given.ndim > 2 or truth.ndim > 2:
        soft = truth.is_floating_point()
        truth = truth.movedim(1, -1).reshape(-1, truth.shape[1]) if soft else truth.reshape(-1)
    if truth.is_floating_point() and truth.numel() == len(table) and table.shape[1] == 2:
        truth = two_columns(truth, "probs")  # the probability of class 1, beside a one-logit head
    elif not truth.is_floating_point():
        truth = truth.reshape(-1)
    if len(truth) != len(table):
        raise UserError(f"labels has {len(truth)} rows for {len(table)} samples")
    if ignore_index is not None and truth.ndim == 1:
        table, truth = table[truth != ignore_index], truth[truth != ignore_index]
    if len(table) == 0:
        raise UserError("no sample to fit on")
    check_rows("logits", table, torch.isfinite(table).all(1), "holds NaN or infinity")
    return Samples(exact(table), check_labels(truth, *table.shape)), split


def exact(logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
    """Take logits in float64 where that is affordable and the device has it, in float32 or better elsewhere.

    Those beyond every float32 are made smaller, so that they can be multiplied; probabilities stay zero and one.
    """
    if logits.dtype == torch.float64:
        logits = logits.clamp(-ENORMOUS, ENORMOUS)
    if logits.numel() > EXACT_BELOW or logits.device.type == "mps":
        return wide(logits)
    return logits.double()


def _table(logits: Float[Tensor, "..."]) -> Float[Tensor, "rows classes"]:
    if logits.ndim == 0:
        raise UserError("logits are a single number; one row per sample is expected")
    if logits.ndim <= 2:
        return two_columns(logits, "logits")
    if logits.shape[1] == 1:
        return two_columns(logits.reshape(-1), "logits")
    return logits.movedim(1, -1).reshape(-1, logits.shape[1])


def _as_given(table: Float[Tensor, "rows classes"], given: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    if given.ndim == 1 or given.shape[1] == 1:
        return (table[:, 1] - table[:, 0]).reshape(given.shape)
    if given.ndim == 2:
        return table
    return table.reshape(len(given), *given.shape[2:], given.shape[1]).movedim(-1, 1)
