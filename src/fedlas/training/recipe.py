"""Recipes: all settings of a training run as plain values, and the key that names its folder.

Two runs of one recipe in deterministic mode write equal bytes. The key is a hash of the values that differ from their
defaults, so a field that a later version adds does not change old keys. Fields that affect the execution of a run but
not its results are marked `execution_field` and are not part of the key.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from dataclasses import replace as dataclass_replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_type_hints

from fedlas.catalog import Catalog, keywords, nearest
from fedlas.errors import UserError
from fedlas.losses import CATALOG as LOSSES
from fedlas.training.recipe_text import (
    Kind,
    Plain,
    check_field,
    convert,
    kind_of,
    parse_field,
    to_canonical_json,
    to_plain,
    value_of,
)

Optimizer: TypeAlias = Literal["sgd", "adamw"]
Schedule: TypeAlias = Literal["constant", "multi_step", "cosine", "one_cycle", "triangle"]
Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16"]

# Suffix of a test split with the preprocessing of the official code. Stored recipes, results and file names have it.
OFFICIAL_SUFFIX = "-published"
SPLITS = ("train", "val", "test", f"test{OFFICIAL_SUFFIX}")
OPTIONS = ("data_options", "model_options", "loss_options")
# Options that a run sets itself, and where their values come from.
RESERVED_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "data_options": {"progress": "fit(..., progress=...)", "root": "--data-root, or fit(..., data_root=...)"},
    "model_options": {"num_classes": "the data"},
    "loss_options": {"num_classes": "the data"},
}
MAX_COUNT = 2**31 - 1
# Fields that have an effect only for some values of another field.
REQUIRES: Mapping[str, tuple[str, tuple[Plain, ...]]] = {
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


def execution_field(default: Any) -> Any:
    """Return a field that does not affect the results."""
    return field(default=default, metadata={"execution": True})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run.

    Args:
        data: name of a data set in `fedlas.list_data()`.
        model: name of a network for `fedlas.build_model`.
        loss: name of a loss in `fedlas.list_losses()`.
        data_options: options of the data set.
        model_options: options of the network.
        loss_options: options of the loss.
        head: path of the network's last linear layer, if `WithFeatures` finds none or several.
        seed: seed of the split, the weights, the order of the samples and their augmentation.
        epochs: passes over the training split.
        batch_size: samples per step, over all processes together.
        accumulate: number of parts in which the gradient of a batch is accumulated, to save memory.
        drop_last: drop the last batch if it is incomplete.
        optimizer: "sgd" or "adamw".
        lr: maximum learning rate.
        momentum: momentum of SGD.
        nesterov: use Nesterov momentum.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        weight_decay: weight decay.
        decay_all: apply weight decay to all parameters, as in the official code; or to matrices and kernels only.
        gate_lr_factor: factor of the learning rate for the parameters of the loss.
        gate_weight_decay: weight decay of the parameters of the loss; by default that of the network.
        schedule: learning-rate schedule; `fedlas.training.schedule` draws them.
        milestones: epochs after which "multi_step" multiplies the learning rate by `decay`.
        decay: factor of "multi_step".
        warmup: epochs in which the learning rate rises from 0.
        peak_at: fraction of the steps after which "one_cycle" and "triangle" have their maximum.
        start_factor: first learning rate of these two, as a fraction of the maximum.
        end_factor: last learning rate of these two and of "cosine", as a fraction of the maximum.
        clip: maximum gradient norm; None for no clipping.
        clip_loss: clip the parameters of the loss together with those of the network, unlike the official code.
        mixup: alpha of mixup; 0 disables it.
        cutmix: alpha of CutMix; 0 disables it. With both, each step uses one of them at random.
        precision: "fp32", "tf32", "bf16" or "fp16"; the loss always computes in float32.
        channels_last: use the channels-last memory layout for images and kernels.
        deterministic: same recipe, same machine, same bytes.
        compile: compile network and loss on a GPU.
        sync_batchnorm: compute batch norm statistics over all processes.
        halve_validation: use only one half of the validation split (V1) for feedback and the best epoch; the other half
            (V2, `fedlas.training.validation.halves`) is reserved for temperature and hyperparameters.
        train_on_v1: train on V1 too, for losses without feedback; V2 then selects the best epoch.
        feedback: predictions that the loss learns from between epochs: of the validation split, or, as an ablation,
            of as many training samples ("train"), in evaluation mode and not augmented.
        eval_batch_size: samples per batch in evaluation.
        splits: splits to predict at the end; a finished run adds the predictions of new splits. "test-published" is the
            test split with the preprocessing of the official code, if that differs.
        ood: OOD data sets to predict at the end.
        evaluated: weights that reports and tables evaluate, "best" (the epoch with the best validation accuracy) or
            "last"; predictions of both are written, so it may change when a run is finished.
        capture: capture the step in a CUDA graph on a GPU.
        custom_kernels: use the custom kernels of `accelerators` where they apply: torchvision-style ResNets in
            channels-last layout, and SGD, in one process on one GPU. False uses `torch.compile` for everything;
            the last digits of results differ.
        checkpoint_every: steps between checkpoints; 0 writes one after each epoch, but skips an epoch while the
            previous checkpoint is being written. The end of a run always has one.
        workers: processes that read large images; None for one per processor.
        cache: folder for decoded large images.
        tensorboard: also write the log for TensorBoard.
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
    splits: tuple[str, ...] = execution_field(("val", "test"))
    ood: tuple[str, ...] = execution_field(())
    evaluated: Literal["best", "last"] = execution_field("best")
    capture: bool = execution_field(True)
    custom_kernels: bool = execution_field(True)
    checkpoint_every: int = execution_field(0)
    workers: int | None = execution_field(None)
    cache: str | None = execution_field(None)
    tensorboard: bool = execution_field(False)
    head: str | None = None

    def __post_init__(self) -> None:
        for name, kind in _kinds().items():
            object.__setattr__(self, name, convert(name, kind, getattr(self, name)))
        self._check_numbers()
        self._check_options()
        check_field(self.batch_size % self.accumulate == 0, "accumulate", self.accumulate, "a divisor of batch_size")
        check_field(bool(self.splits), "splits", self.splits, f"at least one of {', '.join(SPLITS)}")
        for name in self.splits:
            check_field(name in SPLITS, "splits", name, f"of {', '.join(SPLITS)}")
        for name in _unused(vars(self)):
            other, _ = REQUIRES[name]
            raise UserError(f"{name} has no effect with {other}={getattr(self, other)}; leave it out")
        check_field(bool(self.milestones) or self.schedule != "multi_step", "milestones", (), "given for multi_step")
        check_field(
            self.halve_validation or not self.train_on_v1, "train_on_v1", True, "false without halve_validation"
        )
        check_field(self.clip is not None or not self.clip_loss, "clip_loss", True, "false where clip is none")
        if self.halve_validation and self.data_options.get("selection") == "official":
            raise UserError(
                "halve_validation needs a validation split, and data_options.selection=official selects on test data; "
                "leave one of them out"
            )

    def _check_numbers(self) -> None:
        """Raise if a number is out of range."""
        for name in ("epochs", "batch_size", "accumulate", "eval_batch_size"):
            check_field(1 <= getattr(self, name) <= MAX_COUNT, name, getattr(self, name), f"1 to {MAX_COUNT}")
        for name in ("lr", "weight_decay", "warmup", "mixup", "cutmix", "checkpoint_every", "seed", "gate_lr_factor"):
            check_field(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("gate_weight_decay", "workers"):
            value = getattr(self, name)
            check_field(value is None or value >= 0, name, value, "at least 0, or none")
        for name in ("momentum", "beta1", "beta2"):
            check_field(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        without = self.nesterov and not self.momentum
        check_field(not without, "momentum", self.momentum, "above 0 with nesterov=true; set nesterov=false too")
        for name in ("peak_at", "start_factor", "end_factor", "decay"):
            check_field(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        check_field(self.clip is None or self.clip > 0, "clip", self.clip, "above 0, or none")
        increasing = all(earlier < later for earlier, later in pairwise((0, *self.milestones)))
        check_field(increasing, "milestones", self.milestones, "epochs from 1 on, each later than the one before")

    def _check_options(self) -> None:
        """Raise for options that the run sets itself, and for loss options that training does not support."""
        for name in OPTIONS:
            options = getattr(self, name)
            if "seed" in options:
                raise UserError(f"{name} has a seed; set the seed of the recipe instead: seed=...")
            for option, owner in RESERVED_OPTIONS[name].items():
                if option in options:
                    raise UserError(f"{name} has {option!r}, which is set by {owner}; leave it out")
        if self.loss in LOSSES.entries:
            reserved = RESERVED_OPTIONS["loss_options"]
            known = [name for name in keywords(LOSSES.entries[self.loss]) if name not in reserved]
            for name in self.loss_options:
                if name not in known:
                    raise UserError(f"the loss {self.loss!r} has no option {name!r}; {nearest(name, known)}")
        if self.loss_options.get("reduction", "mean") in ("none", None):  # the command line parses "none" as None
            raise UserError('loss_options has reduction="none", but a step needs a scalar loss: use "mean" or "sum"')
        if self.accumulate > 1:
            # A part of a batch does not have the sum of the weights of the whole batch.
            for option in ("weight", "ignore_index"):
                if self.loss_options.get(option) is not None:
                    raise UserError(
                        f"accumulate={self.accumulate} with {option!r} in loss_options is not the mean over the batch, "
                        "because each part would be divided by its own weights; set accumulate=1"
                    )

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def key(self) -> str:
        """Hash of the values that affect the results and differ from their defaults."""
        changed = {name: getattr(self, name) for name in _result_names() if getattr(self, name) != _defaults()[name]}
        return hashlib.sha256(to_canonical_json(changed)).hexdigest()[:10]

    @property
    def name(self) -> str:
        """Default name of the run folder."""
        parts = (self.data, self.model, self.loss, self.key)
        return "-".join("".join(c if c.isalnum() or c in "_." else "_" for c in part) for part in parts)

    def replace(self, **changes: Plain) -> "Recipe":
        """Return a copy with changes; fields that have no effect with the changes get their defaults."""
        _check_names(changes)
        unused = _unused({**vars(self), **changes})
        return dataclass_replace(
            self, **{name: value for name, value in unused.items() if name not in changes}, **changes
        )

    def with_settings(self, settings: Mapping[str, str]) -> "Recipe":
        """Return a copy with settings given as text: {"epochs": "10", "loss_options.alpha": "0.1"}.

        Lists are separated by commas; "none" means no value; options of data, network and loss follow after a dot.
        """
        changes: dict[str, Plain] = {}
        for name, text in settings.items():
            first, dot, option = name.partition(".")
            if dot and first in OPTIONS:
                changes[first] = {**changes.get(first, getattr(self, first)), option: value_of(text)}
                continue
            self._check_setting(name)
            changes[name] = parse_field(name, _kinds()[name], text)
        return self.replace(**changes)

    def _check_setting(self, name: str) -> None:
        """Raise if a setting is not a field; point to `..._options` if it is an option of loss, network or data."""
        if name in _kinds():
            return
        from fedlas.data import CATALOG as DATA  # noqa: PLC0415 - a recipe can be created and read without data sets
        from fedlas.models import CATALOG as MODELS  # noqa: PLC0415

        catalogues: dict[str, Catalog[Any]] = {"loss": LOSSES, "model": MODELS, "data": DATA}
        for kind, catalog in catalogues.items():
            entry = getattr(self, kind)
            if entry in catalog.entries and name in keywords(catalog.entries[entry]):
                description = f"a keyword of the {catalog.kind} {entry!r}"
                raise UserError(f"a recipe has no field {name!r}, which is {description}: set {kind}_options.{name}")
        _check_names([name])

    def to_dict(self) -> dict[str, Plain]:
        """Return every field as a JSON value."""
        return {item.name: to_plain(getattr(self, item.name), item.name) for item in fields(self)}

    def to_json(self) -> str:
        """Return canonical JSON."""
        return to_canonical_json(self.to_dict()).decode()

    @classmethod
    def from_dict(cls, values: Mapping[str, Plain]) -> "Recipe":
        """Return the recipe of a `to_dict` dictionary; ignore fields without effect, which older versions wrote."""
        _check_names(values)
        fields_given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**fields_given | _unused(fields_given))


def differences(stored: Recipe, requested: Recipe) -> list[str]:
    """List the fields that affect results and differ between the stored recipe of a folder and a requested one."""
    return [
        f"{name}: {getattr(stored, name)!r} in the folder, {getattr(requested, name)!r} requested"
        for name in _result_names()
        if getattr(stored, name) != getattr(requested, name)
    ]


def _unused(values: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return the fields that are set but have no effect with the other fields, with their defaults."""
    defaults = _defaults()
    return {
        name: defaults[name]
        for name, (other, allowed) in REQUIRES.items()
        if values.get(other, defaults[other]) not in allowed and values.get(name, defaults[name]) != defaults[name]
    }


def _check_names(names: Any) -> None:
    for name in names:
        if name not in _defaults():
            raise UserError(f"a recipe has no field {name!r}; {nearest(str(name), list(_defaults()))}")


def _result_names() -> list[str]:
    """Return the names of the fields that affect the results."""
    return [item.name for item in fields(Recipe) if not item.metadata.get("execution")]


@cache  # a ledger is searched by building many recipes
def _kinds() -> dict[str, Kind]:
    """Return the type of each field."""
    return {name: kind_of(annotation) for name, annotation in get_type_hints(Recipe).items()}


@cache
def _defaults() -> Mapping[str, Plain]:
    """Return the default of each field; those that are dictionaries are only compared."""
    return {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(Recipe)
    }
