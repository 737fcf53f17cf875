"""A recipe: every number that decides a training run, as plain values, and the key that names its folder.

Two runs of one recipe in deterministic mode give equal bytes. The key is a hash of the values that differ from their
defaults, so a field that a later version adds leaves old keys as they are. A few fields decide how a run is carried
out, not what comes out of it; they are marked `carried_out` and are no part of the key.
"""

import hashlib
import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from dataclasses import replace as dataclass_replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from fedlas.catalog import Catalog, keywords, nearest

Plain: TypeAlias = Any  # what JSON knows: None, bool, int, float, str, list, dict
Optimizer: TypeAlias = Literal["sgd", "adamw"]
Schedule: TypeAlias = Literal["constant", "multi_step", "cosine", "one_cycle", "triangle"]
Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16"]

PUBLISHED = "-published"  # a test split as the published code looks at it
SPLITS = ("train", "val", "test", f"test{PUBLISHED}")
OPTIONS = ("data_options", "model_options", "loss_options")
# Keywords that a run fills in by itself, and who decides them.
FILLED_IN: Mapping[str, Mapping[str, str]] = {
    "data_options": {"progress": "fit(..., progress=...)", "root": "--data-root, or fit(..., data_root=...)"},
    "model_options": {"num_classes": "the data"},
    "loss_options": {"num_classes": "the data"},
}
MOST = 2**31 - 1  # of what is counted
# Fields that do nothing unless another one has one of some values.
ACTS_WITH: Mapping[str, tuple[str, tuple[Plain, ...]]] = {
    "momentum": ("optimizer", ("sgd",)),
    "nesterov": ("optimizer", ("sgd",)),
    "beta1": ("optimizer", ("adamw",)),
    "beta2": ("optimizer", ("adamw",)),
    "milestones": ("schedule", ("multi_step",)),
    "decay": ("schedule", ("multi_step",)),
    "warmup": ("schedule", ("constant", "multi_step", "cosine")),
    "peak_at": ("schedule", ("one_cycle", "triangle")),
    "start_factor": ("schedule", ("one_cycle", "triangle")),
    "end_factor": ("schedule", ("one_cycle", "triangle", "cosine")),
}


def carried_out(default: Any) -> Any:
    """Mark a field that no result depends on."""
    return field(default=default, metadata={"carried_out": True})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides a run.

    Args:
        data: a data set, by its name in `fedlas.list_data()`.
        model: a network, by its name for `fedlas.build_model`.
        loss: a loss, by its name in `fedlas.list_losses()`.
        data_options: keywords of the data set.
        model_options: keywords of the network.
        loss_options: keywords of the loss.
        head: the path of the network's last linear layer, where `WithFeatures` does not find it or finds several.
        seed: decides the split, the weights, the order of the samples and their augmentation.
        epochs: passes over the training split.
        batch_size: samples in one step, over all processes together.
        accumulate: parts in which a batch is computed, one after the other, to save memory.
        drop_last: leave out a last batch that is not full.
        optimizer: "sgd" or "adamw".
        lr: the largest learning rate.
        momentum: of SGD.
        nesterov: whether SGD looks ahead.
        beta1: decay of AdamW's mean.
        beta2: decay of AdamW's squares.
        weight_decay: strength.
        decay_all: decay every parameter, as published; otherwise only weight matrices and kernels.
        gate_lr_factor: learning rate of the loss's own parameters, as a multiple.
        gate_weight_decay: weight decay of the loss's own parameters; by default that of the others.
        schedule: how the learning rate changes; `fedlas.train.optim` draws them.
        milestones: epochs after which "multi_step" multiplies the learning rate by `decay`.
        decay: factor of "multi_step".
        warmup: epochs in which the learning rate rises from 0.
        peak_at: share of the steps after which "one_cycle" and "triangle" are highest.
        start_factor: where they start, as a share of the highest.
        end_factor: where they, and "cosine", end.
        clip: largest gradient norm; None clips nothing.
        clip_loss: clip the parameters of the loss together with those of the network; published: the network alone.
        mixup: alpha of mixup; 0 is without.
        cutmix: alpha of CutMix; 0 is without. With both, a coin decides in every step.
        precision: "fp32", "tf32", "bf16" or "fp16"; the loss computes in float32 in any case.
        channels_last: memory layout of images and kernels.
        deterministic: same recipe, same machine, same bytes.
        compile: compile network and loss, where there is a GPU.
        sync_batchnorm: statistics of BatchNorm over all processes.
        halve_validation: learn between epochs and select the best epoch on one half of the validation split (V1) only;
            the other half (V2, `fedlas.train.validation.halves`) is left for temperature and hyperparameters.
        train_on_v1: train on V1 too, for losses without feedback; V2 then selects the best epoch.
        feedback: predictions that the loss learns from between epochs: of the validation split, or, as an ablation,
            of as many training samples ("train"), in evaluation mode and not augmented.
        eval_batch_size: samples in one step of an evaluation.
        splits: which splits predictions are made for at the end; a finished run makes up for one it lacks.
            "test-published" are the test images as the published code normalises them, where it does that otherwise.
        ood: the same for foreign data sets.
        evaluated: weights that reports and tables evaluate, "best" (the epoch with the best validation accuracy) or
            "last"; predictions of both are written.
        capture: capture the step in a CUDA graph, where there is a GPU.
        checkpoint_every: steps between checkpoints; 0 writes one after each epoch, or as many as the disk can follow
            without the run waiting for it. The end of a run has one anyway.
        workers: processes that read large images; None for one per processor.
        cache: a folder that keeps decoded large images.
        tensorboard: write the log for TensorBoard too.
    """

    data: str
    model: str
    loss: str
    data_options: Mapping[str, Plain] = field(default_factory=dict)
    model_options: Mapping[str, Plain] = field(default_factory=dict)
    loss_options: Mapping[str, Plain] = field(default_factory=dict)
    seed: int = 1
    epochs: int = 20
    batch_size: int = 128
    accumulate: int = 1
    drop_last: bool = False
    optimizer: Optimizer = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 5e-4
    decay_all: bool = True
    gate_lr_factor: float = 1.0
    gate_weight_decay: float | None = None
    schedule: Schedule = "constant"
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    warmup: float = 0.0
    peak_at: float = 0.3
    start_factor: float = 0.04
    end_factor: float = 0.0
    clip: float | None = None
    clip_loss: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    precision: Precision = "fp32"
    channels_last: bool = False
    deterministic: bool = False
    compile: bool = True
    sync_batchnorm: bool = False
    halve_validation: bool = False
    train_on_v1: bool = False
    feedback: Literal["validation", "train"] = "validation"
    eval_batch_size: int = 1000
    splits: tuple[str, ...] = carried_out(("val", "test"))
    ood: tuple[str, ...] = carried_out(())
    evaluated: Literal["best", "last"] = carried_out("best")
    capture: bool = carried_out(True)
    checkpoint_every: int = carried_out(0)
    workers: int | None = carried_out(None)
    cache: str | None = carried_out(None)
    tensorboard: bool = carried_out(False)
    head: str | None = None

    def __post_init__(self) -> None:
        for name, kind in _types().items():
            object.__setattr__(self, name, _fitting(name, kind, getattr(self, name)))
        self._check_numbers()
        self._check_options()
        _check(self.batch_size % self.accumulate == 0, "accumulate", self.accumulate, "a divisor of batch_size")
        _check(bool(self.splits), "splits", self.splits, f"at least one of {', '.join(SPLITS)}")
        for name in self.splits:
            _check(name in SPLITS, "splits", name, f"of {', '.join(SPLITS)}")
        for name in _idle(vars(self)):
            other, _ = ACTS_WITH[name]
            raise ValueError(f"{name} does nothing with {other}={getattr(self, other)}; leave it out")
        _check(bool(self.milestones) or self.schedule != "multi_step", "milestones", (), "given for multi_step")
        _check(self.halve_validation or not self.train_on_v1, "train_on_v1", True, "false without halve_validation")
        _check(self.clip is not None or not self.clip_loss, "clip_loss", True, "false where clip is none")
        if self.halve_validation and self.data_options.get("selection") == "official":
            raise ValueError(
                "halve_validation needs a validation split, and data_options.selection=official selects on test data; "
                "leave one of them out"
            )

    def _check_numbers(self) -> None:
        """Refuse numbers that no run can mean."""
        for name in ("epochs", "batch_size", "accumulate", "eval_batch_size"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
            _check(getattr(self, name) <= MOST, name, getattr(self, name), f"at most {MOST}")
        for name in ("lr", "weight_decay", "warmup", "mixup", "cutmix", "checkpoint_every", "seed", "gate_lr_factor"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("gate_weight_decay", "workers"):
            value = getattr(self, name)
            _check(value is None or value >= 0, name, value, "at least 0, or none")
        for name in ("momentum", "beta1", "beta2"):
            _check(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        for name in ("peak_at", "start_factor", "end_factor", "decay"):
            _check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        _check(self.clip is None or self.clip > 0, "clip", self.clip, "above 0, or none")
        rising = all(before < after for before, after in pairwise((0, *self.milestones)))
        _check(rising, "milestones", self.milestones, "epochs from 1 on, each later than the one before")

    def _check_options(self) -> None:
        """Refuse keywords that the run fills in by itself, and those of a loss that no run can use."""
        for name in OPTIONS:
            options = getattr(self, name)
            if "seed" in options:
                raise ValueError(f"{name} has a seed; the recipe's own seed decides: seed=...")
            for word, decides in FILLED_IN[name].items():
                if word in options:
                    raise ValueError(f"{name} has {word!r}, which is decided by {decides}; leave it out")
            _check_finite(name, options)
        if self.loss_options.get("reduction", "mean") in ("none", None):  # None is what "none" means on a command line
            raise ValueError('loss_options has reduction="none", but a step needs one number: take "mean" or "sum"')
        if self.accumulate > 1:
            # The parts of a batch do not know the denominator of the whole.
            for word in ("weight", "ignore_index"):
                if self.loss_options.get(word) is not None:
                    raise ValueError(
                        f"accumulate={self.accumulate} with {word!r} in loss_options is not the mean over the batch, "
                        "because each part would be divided by its own weights; set accumulate=1"
                    )

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def key(self) -> str:
        """A short name that no other recipe has."""
        return hashlib.sha256(_json(self.deciding())).hexdigest()[:10]

    @property
    def name(self) -> str:
        """What the folder of the run is called where nobody gives it another name."""
        words = (self.data, self.model, self.loss, self.key)
        return "-".join("".join(c if c.isalnum() or c in "_." else "_" for c in word) for word in words)

    def replace(self, **changes: Plain) -> "Recipe":
        """Make a variant of the recipe; what can do nothing beside the changes goes back to its default."""
        _known(changes)
        idle = _idle({**vars(self), **changes})
        return dataclass_replace(
            self, **{name: value for name, value in idle.items() if name not in changes}, **changes
        )

    def with_settings(self, settings: Mapping[str, str]) -> "Recipe":
        """Make a variant from text, as it comes from the command line: {"epochs": "10", "loss_options.alpha": "0.1"}.

        Lists are separated by commas; "none" means no value; keywords of data, network and loss stand behind a dot.
        """
        changes: dict[str, Plain] = {}
        for name, text in settings.items():
            first, dot, option = name.partition(".")
            if dot and first in OPTIONS:
                changes[first] = {**changes.get(first, getattr(self, first)), option: value_of(text)}
                continue
            self._check_field(name)
            changes[name] = _parsed(name, _types()[name], text)
        return self.replace(**changes)

    def _check_field(self, name: str) -> None:
        """Refuse a setting that is no field; a keyword of the loss, the network or the data has a field before it."""
        from fedlas.data import CATALOG as DATA  # noqa: PLC0415 - a recipe is made and read without data sets
        from fedlas.losses import CATALOG as LOSSES  # noqa: PLC0415
        from fedlas.models import CATALOG as MODELS  # noqa: PLC0415

        catalogues: dict[str, Catalog[Any]] = {"loss": LOSSES, "model": MODELS, "data": DATA}
        for kind, catalog in catalogues.items() if name not in _types() else ():
            called = getattr(self, kind)
            if called in catalog.entries and name in keywords(catalog.entries[called]):
                of = f"a keyword of the {catalog.kind} {called!r}"
                raise ValueError(f"a recipe has no field {name!r}, which is {of}: set {kind}_options.{name}")
        _known([name])

    def deciding(self) -> dict[str, Plain]:
        """Give the values that a result depends on, where they are not the default."""
        defaults = _defaults()
        return {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if not one.metadata.get("carried_out") and getattr(self, one.name) != defaults[one.name]
        }

    def to_dict(self) -> dict[str, Plain]:
        """Give every field as a value that JSON knows."""
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    def to_json(self) -> str:
        """Write the recipe in the one way there is."""
        return _json(self.to_dict()).decode()

    @classmethod
    def from_dict(cls, values: Mapping[str, Plain]) -> "Recipe":
        """Read back what `to_dict` wrote, also before fields that do nothing were refused."""
        _known(values)
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**given | _idle(given))


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Name the fields in which two recipes would give other results; the first is that of a folder."""
    mine, theirs = one.deciding(), other.deciding()
    names = [f.name for f in fields(Recipe) if mine.get(f.name, MISSING) != theirs.get(f.name, MISSING)]
    return [f"{name}: {getattr(one, name)!r} there, {getattr(other, name)!r} here" for name in names]


def _idle(values: Mapping[str, Plain]) -> dict[str, Plain]:
    """Name the fields that were set and do nothing beside the others, with their defaults."""
    defaults = _defaults()
    return {
        name: defaults[name]
        for name, (other, wanted) in ACTS_WITH.items()
        if values.get(other, defaults[other]) not in wanted and values.get(name, defaults[name]) != defaults[name]
    }


def _known(names: Any) -> None:
    known = _defaults()
    for name in names:
        if name not in known:
            raise ValueError(f"a recipe has no field {name!r}; {nearest(str(name), list(known))}")


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(Recipe)


@cache
def _defaults() -> Mapping[str, Plain]:
    """Return the default of each field; those that are dictionaries are only compared."""
    return {one.name: _default(one) for one in fields(Recipe)}


# Cached, because many recipes are made to find a few in a ledger, and each has fifty fields.
_origin: Callable[[Any], Any] = cache(get_origin)
_arguments: Callable[[Any], tuple[Any, ...]] = cache(get_args)


def _default(one: Any) -> Plain:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _check(good: bool, name: str, value: Plain, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def _check_finite(name: str, value: Plain) -> None:
    """Refuse a number in a keyword that is none; JSON would not hold it."""
    if isinstance(value, Mapping):
        for word, one in value.items():
            _check_finite(f"{name}.{word}", one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _check_finite(name, one)
    elif isinstance(value, float):
        _check(math.isfinite(value), name, value, "finite")


def _fitting(name: str, kind: Any, value: Plain) -> Plain:
    """Bring a value to its field's type without changing what it says, or refuse it."""
    origin = _origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        kind = next(one for one in _arguments(kind) if one is not type(None))
        origin = _origin(kind)
    if origin is Literal:
        if value not in _arguments(kind):
            raise ValueError(f"{name} must be one of {', '.join(_arguments(kind))}, not {value!r}")
        return value
    if origin is tuple:
        inner = _arguments(kind)[0]
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise TypeError(f"{name} must be a list, not {value!r}")
        return tuple(_fitting(name, inner, one) for one in value)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        _check(math.isfinite(value), name, value, "finite")
        return float(value)
    if isinstance(kind, type):
        right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if not right:
            raise TypeError(f"{name} must be of type {kind.__name__}, not {value!r}")
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dictionary, not {value!r}")
    return _plain(value)


def _parsed(name: str, kind: Any, text: str) -> Plain:  # noqa: PLR0911 (one for each type)
    """Read the text of one setting by the type of its field."""
    if get_origin(kind) in (Union, types.UnionType):
        if text.lower() in ("none", ""):
            return None
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        parts = [part.strip() for part in text.strip("[]()").split(",")]
        return tuple(_parsed(name, get_args(kind)[0], part) for part in parts if part)
    if kind is bool:
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if text.lower() not in words:
            raise ValueError(f"{name} must be true or false, not {text!r}")
        return words[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name} must be {wanted}, not {text!r}") from None
    if get_origin(kind) is Literal:
        return _fitting(name, kind, text)
    if kind is str:
        return text
    value = value_of(text)
    if not isinstance(value, dict):
        raise TypeError(f'{name} must be JSON such as {{"word": 1}}, or set one keyword: {name}.word=1; not {text!r}')
    return value


def value_of(text: str) -> Plain:
    """Read a value whose type nobody knows: JSON where it is JSON, otherwise the text itself."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _plain(value: Plain) -> Plain:
    if isinstance(value, Mapping):
        return {str(name): _plain(value[name]) for name in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is not None and not isinstance(value, (bool, int, float, str)):
        if hasattr(value, "__fspath__"):
            return str(value)
        raise TypeError(f"a recipe holds plain values, not {value!r}")
    return value


def _json(value: Plain) -> bytes:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
