"""Shape checks for a package under test: jaxtyping and beartype check its annotations when it is called.

Of each function the first calls in every test are checked, not those of a loop that runs thousands of times: checks of
all calls took half of the time of all tests.

Dynamo cannot trace jaxtyping's wrapper (it refuses `isinstance` against `Float[Tensor, "n c"]`), so under the plain
import hook no `torch.compile(fullgraph=True)` succeeds. Ours steps aside while torch compiles.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
import torch

jaxtyped = jaxtyping.jaxtyped
CALLS = 8  # that are checked of each function in every test


class Turns:
    """How many calls of a function are still to be checked in this test."""

    test = 0  # grows by one with every test

    def __init__(self) -> None:
        self.seen, self.left = Turns.test, CALLS

    def take(self) -> bool:
        """Take one, if there is one left."""
        if self.seen != Turns.test:
            self.seen, self.left = Turns.test, CALLS
        self.left -= 1
        return self.left >= 0


def next_test() -> None:
    """Check the first calls of every function again."""
    Turns.test += 1


inner: dict[Any, Turns] = {}  # of functions inside of functions, which are made anew at every call


def typechecked(target: Any) -> Any:
    """Check as mypy does: an int is a float."""
    from beartype import BeartypeConf, beartype

    return beartype(conf=BeartypeConf(is_pep484_tower=True))(target)


def install(package: str) -> None:
    """Check the annotations of everything that is imported from a package from now on."""
    # The import hook writes `@jaxtyping.jaxtyped(...)` over each function, so this name is where we can step in.
    jaxtyping.jaxtyped = jaxtyped_in_eager
    jaxtyping.install_import_hook(package, f"{__name__}.typechecked")


def jaxtyped_in_eager(target: Any = None, *, typechecker: Any) -> Any:
    """Decorate as `jaxtyping.jaxtyped` does, with the way back to the plain function kept open."""
    if target is None:
        return functools.partial(jaxtyped_in_eager, typechecker=typechecker)
    if torch.compiler.is_compiling():  # a function defined inside a function that is being traced
        return target
    if inspect.isclass(target):
        plain = target.__init__
        jaxtyped(target, typechecker=typechecker)
        if target.__init__ is not plain:  # only dataclasses are wrapped
            checked = target.__init__
            target.__init__ = unless_compiling(plain, lambda: checked)
        return target
    if "<locals>" in target.__qualname__ and not inner.setdefault(target.__code__, Turns()).take():
        return target
    return unless_compiling(target, functools.partial(jaxtyped, target, typechecker=typechecker))


def unless_compiling(plain: Callable[..., Any], check: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Choose between a function and its checked twin at each call; `check` makes the twin, at the first one."""
    turns, checked = Turns(), functools.cache(check)

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return checked()(*args, **kwargs) if turns.take() else plain(*args, **kwargs)

    @functools.wraps(plain)
    def choose(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():  # a constant to Dynamo, which therefore traces only the plain function
            return plain(*args, **kwargs)
        return sometimes(*args, **kwargs)

    return choose
