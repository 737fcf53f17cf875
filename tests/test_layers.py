"""Architecture rules, checked on the source: import directions, names of files, forbidden constructs.

A rule is a function from `{module name: source}` to a list of complaints. Each one is applied to the package, and to
small made-up packages that break it, so that no rule can pass by accident.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

HOUSE = "fedlas"
SOURCE = Path(__file__).parents[1] / "src" / HOUSE

# What each room may import besides itself and `errors`. The front door (`fedlas/__init__.py`) and `cli` may import
# anything; `__main__` only calls `cli`.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "formatting": set(),
    "extras": set(),
    "predictions": set(),
    "io": {"extras", "predictions"},
    "alignment": {"predictions"},
    "catalog": set(),
    "ranks": set(),
    "https": set(),
    "records": {"extras"},
    "losses": {"predictions", "catalog", "ranks", "metrics.bins"},
    "metrics": {"extras", "formatting", "catalog", "predictions", "alignment", "ranks"},
    "posthoc": {"extras", "predictions", "io", "catalog", "metrics"},
    "ood": {"predictions", "metrics.result"},
    "comparison": {"predictions", "io", "alignment", "metrics"},
    "evaluation": {"extras", "predictions", "io", "alignment", "catalog", "metrics", "posthoc", "ood"},
    "data": {"extras", "catalog", "https"},
    "models": {"extras", "io", "catalog", "https"},
    "training": {
        "extras", "predictions", "io", "catalog", "ranks", "records", "losses", "metrics", "posthoc", "ood",
        "evaluation", "data", "models",
    },
    "report": {"extras", "formatting", "predictions", "io", "alignment", "metrics", "comparison", "evaluation", "ood"},
    "experiments": {
        "extras", "formatting", "catalog", "predictions", "io", "alignment", "metrics", "posthoc", "ood", "training",
        "comparison", "evaluation", "report",
    },
    "integrations": {
        "extras", "io", "predictions", "losses", "metrics", "posthoc", "models.base", "evaluation", "report",
        "records",
    },
}  # fmt: skip
CATALOGUES = {"losses", "data", "models", "posthoc", "integrations"}
DRAWERS = {"util", "utils", "helper", "helpers", "common", "misc", "core", "tool", "tools"}

Modules = Mapping[str, str]


class Import(NamedTuple):
    """One module that another one names, and where."""

    target: str
    line: int


@cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a module; rules share them."""
    return tuple(ast.walk(parse(source)))


def imports(name: str, modules: Modules) -> list[Import]:
    """All imports of the house inside one module: lazy ones and those for the type checker too."""
    found = []
    for node in nodes(modules[name]):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [path if path in modules else node.module for path in inside]
        elif isinstance(node, ast.Call) and last_word(node.func) in {"import_module", "__import__"}:
            targets = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        line = getattr(node, "lineno", 0)
        found += [Import(target, line) for target in targets if within(target, HOUSE)]
    return found


def last_word(node: ast.AST) -> str:
    """The last identifier of `a`, `x.a`, `a[...]` or `a(...)`."""
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return last_word(inner)
    return ""


def room(name: str) -> str:
    """The room of a module; empty for the front door."""
    return f"{name}.".split(".")[1]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def graph(modules: Modules) -> dict[str, set[str]]:
    """Who imports whom. The front door is left out: it may import anything, and nobody imports it."""
    return {
        name: {i.target for i in imports(name, modules) if i.target in modules} for name in modules if name != HOUSE
    }


def a_module_never_imports_a_package_it_lives_inside(modules: Modules) -> list[str]:
    return [
        f"{name}:{i.line} imports {i.target}, which it lives inside; import the file you need"
        for name in modules
        for i in imports(name, modules)
        if name.startswith(f"{i.target}.")
    ]


def a_room_imports_only_its_row(modules: Modules) -> list[str]:
    complaints = []
    for name in modules:
        here = room(name)
        if here in {"", "cli", "__main__"}:
            continue
        if here not in ROOMS:
            complaints.append(f"{name} is in no room of the plan; give {here} a row in ROOMS and in CONTRIBUTING.md")
            continue
        allowed = {f"{HOUSE}.{row}" for row in ROOMS[here] | {here, "errors"}}
        complaints += [
            f"{name}:{i.line} imports {i.target}; {here} may import {sorted(ROOMS[here])}"
            for i in imports(name, modules)
            # The front door is no row of the table; another rule complains about whoever imports it.
            if i.target != HOUSE and not any(within(i.target, row) for row in allowed)
        ]
    return complaints


def a_leaf_imports_its_base_and_never_a_sibling(modules: Modules) -> list[str]:
    """A base may be spread over files of its own, but it knows no entry."""
    entries = catalogue_entries(modules)
    complaints = []
    for name in modules:
        if room(name) not in CATALOGUES or name.count(".") < 2:
            continue
        base = f"{HOUSE}.{room(name)}.base"
        leaf = ".".join(name.split(".")[:3])
        for i in imports(name, modules):
            sibling = i.target.startswith(f"{HOUSE}.{room(name)}.") and not within(i.target, base)
            if leaf == base:
                sibling = sibling and i.target in entries[room(name)].values()
            if sibling and not within(i.target, leaf):
                complaints.append(f"{name}:{i.line} imports its sibling {i.target}; share through {base}")
    return complaints


def no_relative_or_star_imports(modules: Modules) -> list[str]:
    return [
        f"{name}:{node.lineno} has a relative or star import"
        for name, source in modules.items()
        for node in nodes(source)
        if isinstance(node, ast.ImportFrom) and (node.level or any(alias.name == "*" for alias in node.names))
    ]


def no_file_is_a_drawer(modules: Modules) -> list[str]:
    return [
        f"{name} is called {word!r}, which says nothing about what is inside"
        for name in modules
        for word in name.split(".")[1:]
        if word.strip("_") in DRAWERS
    ]


def no_list_is_kept_by_hand(modules: Modules) -> list[str]:
    """Three names of one catalogue in one literal are a list that the next entry will be missing from."""
    entries = catalogue_entries(modules)
    complaints = []
    for name, source in modules.items():
        for node in nodes(source):
            if not isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
                continue
            words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            words |= {last_word(n) for n in ast.walk(node)}
            for here, homes in entries.items():
                listed = sorted(word for word in words if homes.get(word, name) != name)
                if len(listed) >= 3:
                    complaints.append(f"{name}:{node.lineno} lists {here} by hand: {', '.join(listed)}")
    return complaints


def catalogue_entries(modules: Modules) -> dict[str, dict[str, str]]:
    """The name and the class of every catalogue entry, and the module it is defined in, room by room."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for module, source in modules.items():
        for cls in classes(source) if room(module) in CATALOGUES else ():
            for line in cls.body:
                match line:
                    case (
                        ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(entry)))
                        | ast.AnnAssign(target=ast.Name(id="name"), value=ast.Constant(value=str(entry)))
                    ):
                        found[room(module)] |= {entry: module, cls.name: module}
    return found


def classes(source: str) -> list[ast.ClassDef]:
    return [node for node in nodes(source) if isinstance(node, ast.ClassDef)]


def only_the_command_line_prints(modules: Modules) -> list[str]:
    return [
        f"{name}:{node.lineno} prints; only cli does"
        for name, source in modules.items()
        if room(name) != "cli"
        for node in nodes(source)
        if isinstance(node, ast.Name) and node.id == "print"
    ]


def no_cycles(modules: Modules) -> list[str]:
    """Imports inside functions count: they hide a cycle, they do not undo it."""
    edges = graph(modules)
    return sorted(
        f"{name} imports itself by way of {target}"
        for name, targets in edges.items()
        for target in targets
        if name in reachable(target, edges)
    )


def reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += edges[name]
    return seen


def no_module_has_the_name_of_an_exported_function(modules: Modules) -> list[str]:
    """`fedlas.evaluate` cannot be a function and a file. Exported is what a package's `__init__` speaks of by name."""
    callables = ast.FunctionDef | ast.ClassDef  # a class in lower case is used like a function
    functions = {n.name for s in modules.values() for n in parse(s).body if isinstance(n, callables)}
    packages = [p for p in modules if p == HOUSE or any(other.startswith(f"{p}.") for other in modules)]
    exported = set().union(*(spoken_names(modules[p]) for p in packages)) & functions
    return [f"{name} has the name of an exported function" for name in modules if name.split(".")[-1] in exported]


def spoken_names(source: str) -> set[str]:
    """Every name that a package defines, imports, or has in a string, as in `__all__` or a table of lazy imports."""
    names: set[str] = set()
    for node in nodes(source):
        match node:
            case ast.Constant(value=str(word)):
                names.add(word)
            case ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.FunctionDef(name=word) | ast.ClassDef(name=word):
                names.add(word)
    return names


def abstract_classes_are_called_abstract(modules: Modules) -> list[str]:
    complaints = []
    for name, source in modules.items():
        for cls in classes(source):
            heads = [*cls.bases, *(k.value for k in cls.keywords if k.arg == "metaclass")]
            methods = [m for m in cls.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            abstract = any(last_word(head) in {"ABC", "ABCMeta"} for head in heads)
            abstract |= any("abstract" in last_word(d) for method in methods for d in method.decorator_list)
            if abstract and not cls.name.startswith("Abstract"):
                complaints.append(f"{name}:{cls.lineno} {cls.name} is abstract; call it Abstract{cls.name}")
    return complaints


def abstract_classes_are_never_instantiated(modules: Modules) -> list[str]:
    return [
        f"{name}:{node.lineno} instantiates {last_word(node.func)}"
        for name, source in modules.items()
        for node in nodes(source)
        if isinstance(node, ast.Call) and re.match(r"Abstract[A-Z]", last_word(node.func))
    ]


def concrete_classes_are_never_subclassed(modules: Modules) -> list[str]:
    """A TypedDict or a Protocol describes types, and an exception a kind of error: these may build on each other."""
    homes = {(name, cls.name): cls for name, source in modules.items() for cls in classes(source)}

    def describes(home: str, word: str) -> bool:
        if (home, word) not in homes:
            return word in {"TypedDict", "Protocol"}
        return any(describes(*resolve(base, home, modules)) for base in homes[home, word].bases)

    complaints = []
    for name, source in modules.items():
        for cls in classes(source):
            for base in cls.bases:
                home, word = resolve(base, name, modules)
                abstract = word.startswith("Abstract") or word.endswith("Error")
                if (home, word) in homes and not abstract and not describes(home, word):
                    complaints.append(f"{name}:{cls.lineno} {cls.name} derives from the concrete class {home}.{word}")
    return complaints


def resolve(base: ast.expr, name: str, modules: Modules) -> tuple[str, str]:
    """Where the class behind a base is defined, followed through imports and packages that pass it on."""
    if isinstance(base, ast.Subscript):
        return resolve(base.value, name, modules)
    first, _, rest = ast.unparse(base).partition(".")
    seen: set[tuple[str, str]] = set()
    while name in modules and (name, first) not in seen:
        seen.add((name, first))
        if rest:  # a class that is reached through its module, as in `ce.CE` or `fedlas.losses.ce.CE`
            path = {HOUSE: HOUSE, **names_from(name, modules)}.get(first, first)
            name, _, first = f"{path}.{rest}".rpartition(".")
            rest = ""
        else:
            came_from = names_from(name, modules).get(first)
            if came_from is None:
                break
            name, _, first = came_from.rpartition(".")
    return name, first


def names_from(name: str, modules: Modules) -> dict[str, str]:
    """What the names that a module imports stand for."""
    return {
        alias.asname or alias.name: alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        for node in nodes(modules[name])
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.asname or isinstance(node, ast.ImportFrom)
    }


@cache
def modules_in(folder: Path) -> dict[str, str]:
    """Every module of the package in a folder, by its dotted name."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        path = (HOUSE, *file.relative_to(folder).with_suffix("").parts)
        found[".".join(path).removesuffix(".__init__")] = file.read_text(encoding="utf-8")
    return found


LOSSES = {
    "fedlas.losses.base": "class AbstractLoss(nn.Module): ...",
    "fedlas.losses.ce": "class CE(AbstractLoss):\n    name = 'ce'",
    "fedlas.losses.ls": "class LS(AbstractLoss):\n    name: ClassVar[str] = 'ls'",
    "fedlas.losses.mbls": "class MbLS(AbstractLoss):\n    name = 'mbls'",
}
ABSTRACT = "from abc import ABC, abstractmethod\n"

# For every rule: packages that break it, and what the complaint has to name.
OFFENDERS: list[tuple[Callable[[Modules], list[str]], dict[str, str], str]] = [
    (
        a_module_never_imports_a_package_it_lives_inside,
        {"fedlas": "", "fedlas.cli": "import fedlas"},
        "fedlas.cli:1",
    ),
    (
        a_module_never_imports_a_package_it_lives_inside,
        LOSSES | {"fedlas.losses": "def build(): ...", "fedlas.losses.ce": "from fedlas.losses import build"},
        "fedlas.losses.ce:1",
    ),
    (a_room_imports_only_its_row, {"fedlas.metrics.bins": "import fedlas.losses.base"}, "fedlas.metrics.bins:1"),
    (
        a_room_imports_only_its_row,
        {"fedlas.losses.base": "from fedlas.metrics import calibration"},
        "losses may import",
    ),
    (a_room_imports_only_its_row, {"fedlas.ranks": "", "fedlas.ood": "from fedlas import ranks"}, "fedlas.ranks"),
    (a_room_imports_only_its_row, {"fedlas.data.digits": "def f():\n    import fedlas.training.loop"}, "digits:2"),
    (
        a_room_imports_only_its_row,
        {"fedlas.models.base": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fedlas.losses.base"},
        "fedlas.models.base:3",
    ),
    (
        a_room_imports_only_its_row,
        {"fedlas.report.tables": "import importlib\nimportlib.import_module('fedlas.training.loop')"},
        "fedlas.report.tables:2",
    ),
    (a_room_imports_only_its_row, {"fedlas.attic.box": ""}, "no room of the plan"),
    (
        a_leaf_imports_its_base_and_never_a_sibling,
        LOSSES | {"fedlas.losses.acls": "from fedlas.losses.mbls import MbLS"},
        "fedlas.losses.acls:1",
    ),
    (
        a_leaf_imports_its_base_and_never_a_sibling,
        LOSSES | {"fedlas.losses.acls": "from fedlas.losses import base, mbls"},
        "fedlas.losses.mbls",
    ),
    (
        a_leaf_imports_its_base_and_never_a_sibling,
        LOSSES | {"fedlas.losses.base": "import fedlas.losses.ce"},
        "fedlas.losses.base:1",
    ),
    (no_relative_or_star_imports, {"fedlas.losses.ce": "from .base import AbstractLoss"}, "fedlas.losses.ce:1"),
    (no_relative_or_star_imports, {"fedlas.losses.ce": "from torch.nn import *"}, "fedlas.losses.ce:1"),
    (no_file_is_a_drawer, {"fedlas.training._utils": ""}, "'_utils'"),
    (no_file_is_a_drawer, {"fedlas.core.step": ""}, "'core'"),
    (no_list_is_kept_by_hand, LOSSES | {"fedlas.cli": "NAMES = ('ce', 'ls', 'mbls')"}, "ce, ls, mbls"),
    (no_list_is_kept_by_hand, LOSSES | {"fedlas.cli": "BY = {'ce': 1, 'ls': 2, 'mbls': 3}"}, "fedlas.cli:1"),
    (no_list_is_kept_by_hand, LOSSES | {"fedlas.losses": "ALL = [losses.CE, LS, MbLS]"}, "CE, LS, MbLS"),
    (no_list_is_kept_by_hand, LOSSES | {"fedlas.cli": "Name = Literal['ce', 'ls', 'mbls']"}, "fedlas.cli:1"),
    (
        only_the_command_line_prints,
        {"fedlas.training.loop": "def fit():\n    print('epoch')"},
        "fedlas.training.loop:2",
    ),
    (only_the_command_line_prints, {"fedlas.training.loop": "def fit(log=print): ..."}, "fedlas.training.loop:1"),
    (
        no_cycles,
        {
            "fedlas.training.a": "import fedlas.training.b",
            "fedlas.training.b": "def f():\n    import fedlas.training.a",
        },
        "fedlas.training.a imports itself by way of fedlas.training.b",
    ),
    (
        no_module_has_the_name_of_an_exported_function,
        {"fedlas": "__all__ = ['evaluate']", "fedlas.evaluate": "def evaluate(): ..."},
        "fedlas.evaluate",
    ),
    (
        no_module_has_the_name_of_an_exported_function,
        {"fedlas.training": "from fedlas.training.fit import fit", "fedlas.training.fit": "def fit(): ..."},
        "fedlas.training.fit",
    ),
    (
        no_module_has_the_name_of_an_exported_function,
        {
            "fedlas": "HOMES = {'fit': 'fedlas.training.loop'}",
            "fedlas.training.loop": "def fit(): ...",
            "fedlas.ood.fit": "",
        },
        "fedlas.ood.fit",
    ),
    (
        no_module_has_the_name_of_an_exported_function,
        {"fedlas": "__all__ = ['checks']", "fedlas.losses.checks": "class checks: ..."},
        "fedlas.losses.checks",
    ),
    (abstract_classes_are_called_abstract, {"fedlas.data.base": ABSTRACT + "class Data(ABC): ..."}, "AbstractData"),
    (
        abstract_classes_are_called_abstract,
        {"fedlas.data.base": ABSTRACT + "class Data(Thing):\n    @abstractmethod\n    def split(self): ..."},
        "fedlas.data.base:2",
    ),
    (
        abstract_classes_are_never_instantiated,
        {"fedlas.losses.ce": "loss = base.AbstractLoss(num_classes=10)"},
        "AbstractLoss",
    ),
    (
        concrete_classes_are_never_subclassed,
        LOSSES | {"fedlas.losses.ls": "from fedlas.losses.ce import CE as Parent\nclass LS(Parent): ..."},
        "fedlas.losses.ls:2 LS derives from the concrete class fedlas.losses.ce.CE",
    ),
    (
        concrete_classes_are_never_subclassed,
        LOSSES | {"fedlas.losses.ls": "import fedlas.losses.ce\nclass LS(fedlas.losses.ce.CE[int]): ..."},
        "fedlas.losses.ce.CE",
    ),
    (
        concrete_classes_are_never_subclassed,
        LOSSES | {"fedlas.losses.ls": "from fedlas.losses import ce\nclass LS(ce.CE): ..."},
        "fedlas.losses.ce.CE",
    ),
    (concrete_classes_are_never_subclassed, {"fedlas.ood.scores": "class A: ...\nclass B(A): ..."}, "scores:2 B"),
    (
        concrete_classes_are_never_subclassed,
        LOSSES
        | {
            "fedlas.losses": "from fedlas.losses.ce import CE",
            "fedlas.integrations.timm": "from fedlas.losses import CE\nclass Timm(CE): ...",
        },
        "fedlas.losses.ce.CE",
    ),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in OFFENDERS))

# A package that is as the plan wants it; no rule may complain.
GOOD = LOSSES | {
    "fedlas": "def build():\n    from fedlas.losses import build_loss\n\nHOMES = {'fit': 'fedlas.training.loop'}",
    "fedlas.predictions": "from typing import NamedTuple\nclass Predictions(NamedTuple): ...",
    "fedlas.ranks": "def count(): ...",
    "fedlas.catalog": "class Catalog(Generic[Entry]): ...",
    "fedlas.metrics.bins": "import fedlas.predictions",
    "fedlas.losses": "from fedlas.catalog import Catalog\nfrom fedlas.losses.base import AbstractLoss",
    "fedlas.losses.base": "from abc import ABC\nfrom fedlas import ranks\nfrom fedlas.metrics import bins\n"
    "from fedlas.losses.checks import checks\n"
    "class AbstractExact(nn.Module, ABC): ...\nclass AbstractLoss(AbstractExact): ...",
    "fedlas.losses.checks": "class checks: ...",
    "fedlas.losses.mdca": "from typing import TypedDict\nclass A(TypedDict): ...\nclass B(A): ...\nclass C(B): ...",
    "fedlas.losses.acls": "from fedlas.losses.base import AbstractLoss\nclass ACLS(AbstractLoss): two = 'ce', 'ls'",
    "fedlas.training": "",
    "fedlas.training.loop": "import fedlas.training.step\ndef fit(): ...",
    "fedlas.training.step": "from fedlas.losses.base import Batch",
    "fedlas.cli": "from fedlas.training.loop import fit\nprint(fit)",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule):
    assert not rule(modules_in(SOURCE))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_package_gets_no_complaint_from(rule):
    assert rule(GOOD) == []


@pytest.mark.parametrize(
    ("rule", "modules", "named"), OFFENDERS, ids=[f"{n}-{rule.__name__}" for n, (rule, _, _) in enumerate(OFFENDERS)]
)
def test_an_offence_is_reported_by(rule, modules, named):
    assert any(named in complaint for complaint in rule(modules))


def test_every_module_is_read():
    read = modules_in(SOURCE)
    assert {"fedlas", "fedlas.catalog", "fedlas.predictions", "fedlas.losses", "fedlas.losses.base"} <= set(read)
    assert "class Catalog" in read["fedlas.catalog"]


def test_the_plan_itself_has_no_cycle():
    rooms = {here: {row.split(".")[0] for row in rows} for here, rows in ROOMS.items()}
    assert not [here for here, rows in rooms.items() for row in rows if here in reachable(row, rooms)]
