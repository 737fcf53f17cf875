"""The cases of the contract tests: every registered loss with its options, and the batches that they are called with.

No loss is named here. A case is a loss with one choice of its `Literal` and `bool` options, read from its signature.
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
BUILD_SEED = 0  # its first parameters put the samples of a batch on both sides of a gate
TRAINED: dict[str, AbstractLoss] = {}


class Inputs(NamedTuple):
    """The arguments that a training loop passes to every loss."""

    logits: Tensor
    labels: Tensor
    features: Tensor
    index: Tensor

    def rows(self, which: Tensor | slice) -> "Inputs":
        return Inputs(*(tensor[which] for tensor in self))

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in self))


class LossResult(NamedTuple):
    """The value of a loss, and its gradients with respect to the logits and to its parameters."""

    value: Tensor
    grad_logits: Tensor
    grad_parameters: list[Tensor]


@dataclass(frozen=True)
class Case:
    """A loss with one choice of its options."""

    record: CatalogRecord[AbstractLoss]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.record.name, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def cls(self) -> type[AbstractLoss]:
        return self.record.cls

    def build(self, **common: Any) -> AbstractLoss:
        """Build the loss, always with the same initial parameters."""
        sizes = {"num_classes": CLASSES, "num_samples": SAMPLES, "epochs": 5}
        sizes = {name: size for name, size in sizes.items() if name in self.record.keywords}
        seed(BUILD_SEED)
        return fedlas.build_loss(self.record.name, **(sizes | dict(self.options) | common))

    def trained(self, **common: Any) -> AbstractLoss:
        """Build the loss with the state after a few training steps, in float64 and in training mode."""
        if str(self) not in TRAINED:
            TRAINED[str(self)] = train(self.build()).double()
        loss = self.build(**common).double()
        loss.load_state_dict(TRAINED[str(self)].state_dict(), strict=False)
        return loss

    # The following properties are read during collection, where a loss that raises must not stop the other tests.

    def has(self, condition: Callable[[AbstractLoss], Any]) -> bool:
        """Return whether a condition holds for the loss after it is built."""
        return bool(unless_broken(lambda: condition(self.build())))

    @cached_property
    def fingerprint(self) -> str:
        """The attributes and state of the loss as text: equal texts mean equal losses."""
        return unless_broken(lambda: _fingerprint(self.build())) or str(self)

    @cached_property
    def random(self) -> bool:
        """Whether the loss draws random numbers."""
        return bool(unless_broken(lambda: _draws_random_numbers(self.build())))

    @cached_property
    def depends_on_other_labels(self) -> bool:
        """Whether the loss of a sample depends on the labels of other samples."""
        return bool(unless_broken(lambda: _depends_on_other_labels(self.trained(reduction="none").eval())))


def unless_broken(function: Callable[[], Any]) -> Any:
    """Return the result of a function of a loss; None if the loss raises."""
    try:
        return function()
    except Exception:
        return None


def _fingerprint(loss: AbstractLoss) -> str:
    attributes = [{k: v for k, v in vars(module).items() if not k.startswith("_")} for module in loss.modules()]
    return f"{attributes} {loss.state_dict()}"


def _draws_random_numbers(loss: AbstractLoss) -> bool:
    before = torch.get_rng_state()
    loss(*batch())
    return not torch.equal(torch.get_rng_state(), before)


def _depends_on_other_labels(loss: AbstractLoss) -> bool:
    inputs = batch()
    labels = inputs.labels.clone()
    labels[0] = inputs.logits[0].argmin()
    return not torch.equal(loss(*inputs)[1:], loss(*inputs._replace(labels=labels))[1:])


def seed(number: int) -> None:
    """Seed the generator of the CPU; torch.manual_seed takes milliseconds to format a stack trace for CUDA."""
    torch.random.default_generator.manual_seed(number)


def keyword_types(record: CatalogRecord[AbstractLoss]) -> dict[str, Any]:
    """Return the annotation of each keyword of a loss."""
    result: dict[str, Any] = {}
    for ancestor in record.cls.__mro__:
        if "__init__" in vars(ancestor):
            for parameter in inspect.signature(vars(ancestor)["__init__"]).parameters.values():
                for options in get_args(parameter.annotation) if parameter.kind is parameter.VAR_KEYWORD else ():
                    result = options.__annotations__ | result
                result.setdefault(parameter.name, parameter.annotation)
    return {name: result.get(name, Any) for name in record.keywords}


def choices(annotation: Any) -> list[Any]:
    """Return the values that an annotation lists, except None."""
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in choices(part)]


def is_number(annotation: Any) -> bool:
    """Return whether a keyword takes any number."""
    return {*get_args(annotation)} - {NoneType} in ({float}, {int}) or annotation in (float, int)


def cases_of(record: CatalogRecord[AbstractLoss]) -> list[Case]:
    """Return the loss with its defaults, and with each combination of its options or, if many, each option."""
    types = {name: choices(kind) for name, kind in keyword_types(record).items() if name not in Common.__annotations__}
    types = {name: values for name, values in types.items() if values}
    default_case = Case(record)
    if math.prod(len(values) for values in types.values()) <= MOST_COMBINATIONS:
        combinations = [dict(zip(types, values, strict=True)) for values in itertools.product(*types.values())]
    else:
        combinations = [{name: value} for name, values in types.items() for value in values]
    result = {default_case.fingerprint: default_case}
    for options in combinations:
        case = Case(record, options)
        result.setdefault(case.fingerprint, case)
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
    """Draw a batch, half of it classified correctly, with gaps between logits on both sides of the margins."""
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(n, classes, *space, generator=generator, dtype=torch.float64)
    features = torch.randn(n, WIDTH, *space, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (n, *space), generator=generator)
    labels[::2] = logits.argmax(1)[::2]
    if soft:
        labels = torch.randn(logits.shape, generator=generator, dtype=torch.float64).softmax(1)
    index = torch.randperm(max(n, SAMPLES), generator=generator)[:n]
    return Inputs(logits, labels, features, index).to(dtype)


def as_rows(inputs: Inputs) -> Inputs:
    """Return maps as rows."""
    rows = [x.movedim(1, -1).flatten(0, -2) if x.is_floating_point() else x.flatten() for x in inputs[:3]]
    return Inputs(*rows, torch.arange(len(rows[0])))


def run(loss: AbstractLoss, inputs: Inputs, grad_output: Tensor | None = None, *, autocast: bool = False) -> LossResult:
    """Call the loss and differentiate it; values without reduction are summed, weighted by `grad_output` if given."""
    seed(0)
    logits = inputs.logits.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(logits, *inputs[1:])
    weighted_value = value if grad_output is None else value * grad_output
    grad_logits, *grad_parameters = torch.autograd.grad(
        weighted_value.sum(), [logits, *loss.parameters()], materialize_grads=True
    )
    return LossResult(value.detach(), grad_logits, grad_parameters)


def parts(loss: AbstractLoss, inputs: Inputs) -> tuple[dict[str, Tensor], Tensor]:
    """Return the named terms of each sample, and the logits with respect to which they can be differentiated."""
    seed(0)
    logits = inputs.logits.detach().requires_grad_()
    return loss.parts(logits, *inputs[1:]), logits


def state(loss: AbstractLoss) -> dict[str, Tensor]:
    return deepcopy(dict(loss.state_dict()))


def train(loss: AbstractLoss, epochs: int = 2) -> AbstractLoss:
    """Train a loss like a training loop: two steps per epoch, and `end_epoch`."""
    loss.train()
    for step in range(2 * epochs):
        index = torch.arange(SIZE) + step % 2 * SIZE  # each sample once in an epoch
        result = run(loss, batch(seed=step + 10)._replace(index=index))
        with torch.no_grad():
            for parameter, gradient in zip(loss.parameters(), result.grad_parameters, strict=True):
                parameter.sub_(0.1 * gradient)
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


def parametrize_cases(cases: list[Case], condition: Callable[[Case], bool] = lambda _: True) -> pytest.MarkDecorator:
    """Run a test with all cases, or with those that meet a condition.

    Options that several losses share are tested with one of these losses; with the others in the campaigns.
    """
    params, tested = [], set()
    for case in filter(condition, cases):
        options = frozenset(case.options.items())
        marks = [pytest.mark.campaign] if options and options in tested else []
        params.append(pytest.param(case, id=str(case), marks=marks))
        tested.add(options)
    return pytest.mark.parametrize("case", params)


every_loss = parametrize_cases(LOSSES)
every_case = parametrize_cases(CASES)
every_exact_case = parametrize_cases(EXACT_CASES)
