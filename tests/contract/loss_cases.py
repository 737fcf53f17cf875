"""The losses that the contract is asked of, found by themselves, and the batches they are asked about.

Nothing here names a loss. A case is a loss with one choice of its words and switches, read off its signature.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest
import torch
from torch import Tensor

import fedlas
from fedlas.catalog import CatalogRecord
from fedlas.losses import AbstractLoss
from fedlas.losses.base import Common

SIZE, CLASSES, WIDTH, SAMPLES = 6, 6, 7, 12
REDUCTIONS = ["mean", "sum", "none"]
WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
MOST_COMBINATIONS = 8
BUILT = 0  # a seed whose first parameters put samples of one batch on both sides of a gate
TRAINED: dict[str, AbstractLoss] = {}


class Inputs(NamedTuple):
    """What a training loop gives to every loss."""

    logits: Tensor
    labels: Tensor
    features: Tensor
    index: Tensor

    def rows(self, which: Tensor | slice) -> "Inputs":
        return Inputs(*(tensor[which] for tensor in self))

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in self))


class Outcome(NamedTuple):
    """What came out: the value, its gradient by the logits, and by the parameters of the loss."""

    value: Tensor
    by_logits: Tensor
    by_parameters: list[Tensor]


@dataclass(frozen=True)
class Case:
    """One loss with one choice of its words and switches."""

    record: CatalogRecord[AbstractLoss]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.record.name, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def cls(self) -> type[AbstractLoss]:
        return self.record.cls

    def build(self, **common: Any) -> AbstractLoss:
        """Build the loss, with the same first parameters every time."""
        sizes = {"num_classes": CLASSES, "num_samples": SAMPLES, "epochs": 5}
        sizes = {name: size for name, size in sizes.items() if name in self.record.keywords}
        seed(BUILT)
        return fedlas.build_loss(self.record.name, **(sizes | dict(self.options) | common))

    def trained(self, **common: Any) -> AbstractLoss:
        """Build the loss with state that a little training has moved, all of it in float64; in training mode."""
        if str(self) not in TRAINED:
            TRAINED[str(self)] = train(self.build()).double()
        loss = self.build(**common).double()
        loss.load_state_dict(TRAINED[str(self)].state_dict(), strict=False)
        return loss

    # What follows is asked while tests are collected; there a loss that fails must wait for its tests to say so.

    def has(self, fact: Callable[[AbstractLoss], Any]) -> bool:
        """Whether something is true of the loss as it is built."""
        return bool(unless_broken(lambda: fact(self.build())))

    @cached_property
    def makeup(self) -> str:
        """All that the loss was built with: equal texts are equal losses."""
        return unless_broken(lambda: _makeup(self.build())) or str(self)

    @cached_property
    def random(self) -> bool:
        """Whether the loss draws random numbers."""
        return bool(unless_broken(lambda: _draws_random_numbers(self.build())))

    @cached_property
    def sees_other_labels(self) -> bool:
        """Whether a sample's share of the loss depends on the labels of other samples."""
        return bool(unless_broken(lambda: _sees_other_labels(self.trained(reduction="none").eval())))


def unless_broken(question: Callable[[], Any]) -> Any:
    """Answer a question about a loss, or with None where the loss fails."""
    try:
        return question()
    except Exception:
        return None


def _makeup(loss: AbstractLoss) -> str:
    plain = [{k: v for k, v in vars(module).items() if not k.startswith("_")} for module in loss.modules()]
    return f"{plain} {loss.state_dict()}"


def _draws_random_numbers(loss: AbstractLoss) -> bool:
    before = torch.get_rng_state()
    loss(*batch())
    return not torch.equal(torch.get_rng_state(), before)


def _sees_other_labels(loss: AbstractLoss) -> bool:
    inputs = batch()
    labels = inputs.labels.clone()
    labels[0] = inputs.logits[0].argmin()
    return not torch.equal(loss(*inputs)[1:], loss(*inputs._replace(labels=labels))[1:])


def seed(number: int) -> None:
    """Seed the CPU alone; torch.manual_seed takes milliseconds to note its caller, for a GPU that may come."""
    torch.random.default_generator.manual_seed(number)


def keyword_types(record: CatalogRecord[AbstractLoss]) -> dict[str, Any]:
    """Give the annotation of every keyword that the catalogue says a loss takes."""
    result: dict[str, Any] = {}
    for ancestor in record.cls.__mro__:
        if "__init__" in vars(ancestor):
            for parameter in inspect.signature(vars(ancestor)["__init__"]).parameters.values():
                for options in get_args(parameter.annotation) if parameter.kind is parameter.VAR_KEYWORD else ():
                    result = options.__annotations__ | result
                result.setdefault(parameter.name, parameter.annotation)
    return {name: result.get(name, Any) for name in record.keywords}


def choices(annotation: Any) -> list[Any]:
    """Give the values that an annotation lists, None apart."""
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in choices(part)]


def is_number(annotation: Any) -> bool:
    """Whether a keyword takes any number."""
    return {*get_args(annotation)} - {NoneType} in ({float}, {int}) or annotation in (float, int)


def cases_of(record: CatalogRecord[AbstractLoss]) -> list[Case]:
    """Give the loss as it is built by default, and with its choices: all together, or one by one if they are many."""
    types = {name: choices(kind) for name, kind in keyword_types(record).items() if name not in Common.__annotations__}
    types = {name: values for name, values in types.items() if values}
    plain = Case(record)
    if math.prod(len(values) for values in types.values()) <= MOST_COMBINATIONS:
        together = [dict(zip(types, values, strict=True)) for values in itertools.product(*types.values())]
    else:
        together = [{name: value} for name, values in types.items() for value in values]
    result = {plain.makeup: plain}
    for options in together:
        case = Case(record, options)
        result.setdefault(case.makeup, case)
    return list(result.values())


def batch(
    n: int = SIZE,
    classes: int = CLASSES,
    space: tuple[int, ...] = (),
    *,
    soft: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
) -> Inputs:
    """Draw a batch, half of it classified rightly, with gaps between logits on both sides of the margins."""
    draw = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(n, classes, *space, generator=draw, dtype=torch.float64)
    features = torch.randn(n, WIDTH, *space, generator=draw, dtype=torch.float64)
    labels = torch.randint(classes, (n, *space), generator=draw)
    labels[::2] = logits.argmax(1)[::2]
    if soft:
        labels = torch.randn(logits.shape, generator=draw, dtype=torch.float64).softmax(1)
    index = torch.randperm(max(n, SAMPLES), generator=draw)[:n]
    return Inputs(logits, labels, features, index).to(dtype)


def as_rows(inputs: Inputs) -> Inputs:
    """Lay maps out as rows."""
    rows = [x.movedim(1, -1).flatten(0, -2) if x.is_floating_point() else x.flatten() for x in inputs[:3]]
    return Inputs(*rows, torch.arange(len(rows[0])))


def run(loss: AbstractLoss, inputs: Inputs, pull: Tensor | None = None, *, autocast: bool = False) -> Outcome:
    """Call the loss and differentiate it; values that are not reduced are summed, or weighted by `pull`."""
    seed(0)
    logits = inputs.logits.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(logits, *inputs[1:])
    pulled = value if pull is None else value * pull
    by_logits, *by_parameters = torch.autograd.grad(pulled.sum(), [logits, *loss.parameters()], materialize_grads=True)
    return Outcome(value.detach(), by_logits, by_parameters)


def parts(loss: AbstractLoss, inputs: Inputs) -> tuple[dict[str, Tensor], Tensor]:
    """Give the named terms of each sample, and the logits to differentiate them by."""
    seed(0)
    logits = inputs.logits.detach().requires_grad_()
    return loss.parts(logits, *inputs[1:]), logits


def state(loss: AbstractLoss) -> dict[str, Tensor]:
    return deepcopy(dict(loss.state_dict()))


def train(loss: AbstractLoss, epochs: int = 2) -> AbstractLoss:
    """Train a loss as a loop does, which asks nobody's type: two steps an epoch, and the end of the epoch."""
    loss.train()
    for step in range(2 * epochs):
        once = torch.arange(SIZE) + step % 2 * SIZE  # each sample once in an epoch
        outcome = run(loss, batch(seed=step + 10)._replace(index=once))
        with torch.no_grad():
            for parameter, slope in zip(loss.parameters(), outcome.by_parameters, strict=True):
                parameter.sub_(0.1 * slope)
        if step % 2:
            logits, labels, features, _ = batch(40, seed=step + 20)
            loss.end_epoch(fedlas.Predictions(logits, labels, features=features))
    return loss


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_finite(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.isfinite().all(), tensor


LOSSES = [Case(record) for record in fedlas.list_losses()]
CASES = [case for record in fedlas.list_losses() for case in cases_of(record)]
EXACT_CASES = [case for case in CASES if not case.random]


def every(cases: list[Case], condition: Callable[[Case], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Ask a test of all cases, or of those that meet a condition."""
    return pytest.mark.parametrize("case", [case for case in cases if condition(case)], ids=str)


every_loss = every(LOSSES)
every_case = every(CASES)
every_exact_case = every(EXACT_CASES)
