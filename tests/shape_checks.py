"""Check the annotations of a package with jaxtyping and beartype when its functions are called.

Only the first calls of each function in each test are checked; checking all calls took half of the time of the tests.

Dynamo cannot trace the wrapper of jaxtyping (`isinstance` with `Float[Tensor, "n c"]` is unsupported), so with its
import hook `torch.compile(fullgraph=True)` always fails. This wrapper is bypassed while torch compiles.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
import torch

jaxtyped = jaxtyping.jaxtyped
CALLS = 2  # checked calls of each function per test


class CallBudget:
    """Count the calls of a function that remain to be checked in the current test."""

    test = 0  # number of the current test

    def __init__(self) -> None:
        self.counted_test, self.remaining = CallBudget.test, CALLS

    def consume(self) -> bool:
        """Return whether this call is to be checked."""
        if self.counted_test != CallBudget.test:
            self.counted_test, self.remaining = CallBudget.test, CALLS
        self.remaining -= 1
        return self.remaining >= 0


def next_test() -> None:
    """Reset the call budgets of all functions."""
    CallBudget.test += 1


inner_budgets: dict[Any, CallBudget] = {}  # by code object: nested functions are created anew in each call


def typechecked(target: Any) -> Any:
    """Apply beartype with the rule of mypy that an int is a float."""
    from beartype import BeartypeConf, beartype

    return beartype(conf=BeartypeConf(is_pep484_tower=True))(target)


def install(package: str) -> None:
    """Check the annotations of all modules of a package that are imported from now on."""
    # The import hook decorates each function with `@jaxtyping.jaxtyped(...)`, so replacing this name is enough.
    jaxtyping.jaxtyped = jaxtyped_in_eager
    jaxtyping.install_import_hook(package, f"{__name__}.typechecked")


def jaxtyped_in_eager(target: Any = None, *, typechecker: Any) -> Any:
    """Decorate like `jaxtyping.jaxtyped`, but call the unchecked function while torch compiles."""
    if target is None:
        return functools.partial(jaxtyped_in_eager, typechecker=typechecker)
    if torch.compiler.is_compiling():  # a nested function of a function that is being traced
        return target
    if inspect.isclass(target):
        unchecked = target.__init__
        jaxtyped(target, typechecker=typechecker)
        if target.__init__ is not unchecked:  # only dataclasses are wrapped
            checked = target.__init__
            target.__init__ = unless_compiling(unchecked, lambda: checked)
        return target
    if "<locals>" in target.__qualname__ and not inner_budgets.setdefault(target.__code__, CallBudget()).consume():
        return target
    return unless_compiling(target, functools.partial(jaxtyped, target, typechecker=typechecker))


def unless_compiling(unchecked: Callable[..., Any], check: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a function that calls the checked version in eager mode; `check` creates it at the first call."""
    budget, checked = CallBudget(), functools.cache(check)

    def call_eagerly(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return checked()(*args, **kwargs) if budget.consume() else unchecked(*args, **kwargs)

    @functools.wraps(unchecked)
    def choose(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():  # a constant for Dynamo, so it traces only the plain function
            return unchecked(*args, **kwargs)
        return call_eagerly(*args, **kwargs)

    return choose
