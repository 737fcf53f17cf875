"""Architecture rules, checked on the source: import directions, names of files and classes, no lists kept by hand.

A rule is a function from `{module name: source}` to a list of violations. Each rule is applied to the package, to a
small made-up package that follows all rules, and to one that breaks the rule. Relative imports, star imports and
`print` are left to ruff.
"""

import ast
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = "fedlas"
SOURCE = Path(__file__).parents[1] / "src" / ROOT

# What each package or module may import besides itself and `errors`. The public API (`fedlas/__init__.py`) and `cli`
# may import anything; `__main__` only calls `cli`.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "formatting": set(),
    "extras": set(),
    "progress": {"extras"},
    "lazy_imports": set(),
    "predictions": set(),
    "io": {"progress", "extras", "predictions", "catalog"},
    "alignment": {"predictions"},
    "catalog": set(),
    "ranks": set(),
    "https": set(),
    "records": {"extras"},
    "losses": {"predictions", "catalog", "ranks", "metrics.bin_sums"},
    "metrics": {"extras", "formatting", "catalog", "predictions", "alignment", "ranks"},
    "posthoc": {"extras", "predictions", "io", "alignment", "catalog", "metrics"},
    "ood": {"formatting", "predictions", "metrics"},
    "comparison": {"progress", "formatting", "predictions", "io", "alignment", "metrics"},
    "evaluation_report": {"extras", "formatting", "io", "catalog", "metrics", "posthoc", "ood"},
    "evaluation": {"progress", "predictions", "io", "alignment", "metrics", "posthoc", "ood", "evaluation_report"},
    "data": {"progress", "extras", "catalog", "https"},
    "models": {"extras", "io", "catalog", "https"},
    "training": {
        "progress", "lazy_imports", "extras", "predictions", "io", "catalog", "ranks", "records", "losses", "metrics",
        "posthoc", "ood", "evaluation", "data", "models",
    },
    "report": {
        "progress", "extras", "formatting", "predictions", "io", "metrics", "comparison", "evaluation",
        "evaluation_report", "ood",
    },
    "experiments": {
        "extras", "formatting", "catalog", "predictions", "io", "alignment", "metrics", "posthoc", "ood", "training",
        "comparison", "evaluation", "evaluation_report", "report",
    },
    "integrations": {
        "extras", "io", "predictions", "ranks", "losses", "metrics", "posthoc", "models.base", "evaluation",
        "evaluation_report", "report", "records",
    },
}  # fmt: skip
CATALOGUES = {"losses", "data", "models", "posthoc", "integrations"}
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "core", "tool", "tools"}

Modules = Mapping[str, str]


class Import(NamedTuple):
    """The name and line of an imported module."""

    target: str
    line: int


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def imports(name: str, modules: Modules) -> list[Import]:
    """All imports of the package in one module, including those in functions and for the type checker."""
    result = []
    for node in nodes(modules[name]):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [path if path in modules else node.module for path in paths]
        elif isinstance(node, ast.Call) and identifier(node.func) in {"import_module", "__import__"}:
            targets = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        result += [Import(target, getattr(node, "lineno", 0)) for target in targets if within(target, ROOT)]
    return result


def identifier(node: ast.AST) -> str:
    """The last identifier of `a`, `x.a`, `a[...]` or `a(...)`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return identifier(inner)
    return ""


def package(name: str) -> str:
    """The package below `fedlas` that a module is in; empty for `fedlas` itself."""
    return f"{name}.".split(".")[1]


def within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def classes(source: str) -> list[ast.ClassDef]:
    return [node for node in nodes(source) if isinstance(node, ast.ClassDef)]


def no_import_of_an_enclosing_package(modules: Modules) -> list[str]:
    return [
        f"{name}:{i.line} imports the enclosing package {i.target}; import the file you need"
        for name in modules
        for i in imports(name, modules)
        if name.startswith(f"{i.target}.")
    ]


def imports_follow_the_table(modules: Modules) -> list[str]:
    violations = []
    for name in modules:
        importer = package(name)
        if importer in {"", "cli", "__main__"}:
            continue
        if importer not in ALLOWED:
            violations.append(f"{name}: {importer} is missing in ALLOWED and in CONTRIBUTING.md")
            continue
        allowed = [f"{ROOT}.{row}" for row in ALLOWED[importer] | {importer, "errors"}]
        violations += [
            f"{name}:{i.line} imports {i.target}; {importer} may import {sorted(ALLOWED[importer])}"
            for i in imports(name, modules)
            if i.target != ROOT and not any(within(i.target, row) for row in allowed)
        ]
    return violations


def catalogue_entries_import_their_base_and_no_sibling(modules: Modules) -> list[str]:
    """The base may have several files, but imports no entry."""
    entries = catalogue_entries(modules)
    violations = []
    for name in modules:
        catalogue = package(name)
        if catalogue not in CATALOGUES or name.count(".") < 2:
            continue
        base, leaf = f"{ROOT}.{catalogue}.base", ".".join(name.split(".")[:3])
        for i in imports(name, modules):
            sibling = within(i.target, f"{ROOT}.{catalogue}") and i.target.count(".") > 1 and not within(i.target, base)
            if leaf == base:
                sibling = sibling and i.target in entries[catalogue].values()
            if sibling and not within(i.target, leaf):
                violations.append(f"{name}:{i.line} imports its sibling {i.target}; share code through {base}")
    return violations


def file_names_say_what_is_inside(modules: Modules) -> list[str]:
    return [
        f"{name}: {part!r} says nothing"
        for name in modules
        for part in name.split(".")
        if part.strip("_") in EMPTY_NAMES
    ]


def no_list_is_kept_by_hand(modules: Modules) -> list[str]:
    """Three entries of one catalogue in one literal are a list that will lack the next entry."""
    entries = catalogue_entries(modules)
    violations = []
    for name, source in modules.items():
        for node in nodes(source):
            if not isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
                continue
            candidates = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            candidates |= {identifier(n) for n in ast.walk(node)}
            for catalogue, modules_of in entries.items():
                listed = sorted(candidate for candidate in candidates if modules_of.get(candidate, name) != name)
                if len(listed) >= 3:
                    violations.append(f"{name}:{node.lineno} lists {catalogue} by hand: {', '.join(listed)}")
    return violations


def catalogue_entries(modules: Modules) -> dict[str, dict[str, str]]:
    """For each catalogue, the module of every entry, by the name and by the class of the entry."""
    result: dict[str, dict[str, str]] = defaultdict(dict)
    for module, source in modules.items():
        for cls in classes(source) if package(module) in CATALOGUES else ():
            for line in cls.body:
                match line:
                    case (
                        ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(entry)))
                        | ast.AnnAssign(target=ast.Name(id="name"), value=ast.Constant(value=str(entry)))
                    ):
                        result[package(module)] |= {entry: module, cls.name: module}
    return result


def no_cycles(modules: Modules) -> list[str]:
    """Imports inside functions count, because they hide a cycle. No module imports `fedlas/__init__.py`."""
    edges = {
        name: {i.target for i in imports(name, modules) if i.target in modules} for name in modules if name != ROOT
    }
    return sorted(
        f"{name} imports itself through {target}"
        for name, targets in edges.items()
        for target in targets
        if name in reachable(target, edges)
    )


def reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    visited: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in visited:
            visited.add(name)
            waiting += edges.get(name, set())
    return visited


def abstract_classes_are_called_abstract(modules: Modules) -> list[str]:
    violations = []
    for name, source in modules.items():
        for cls in classes(source):
            methods = [m for m in cls.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            abstract = "ABC" in map(identifier, cls.bases)
            abstract |= any("abstract" in identifier(d) for method in methods for d in method.decorator_list)
            if abstract and not cls.name.startswith("Abstract"):
                violations.append(f"{name}:{cls.lineno} {cls.name} is abstract; call it Abstract{cls.name}")
    return violations


def concrete_classes_are_never_subclassed(modules: Modules) -> list[str]:
    """Classes are matched by name. TypedDicts, Protocols and exceptions may derive from each other."""
    bases = {
        cls.name: [identifier(base) for base in cls.bases] for source in modules.values() for cls in classes(source)
    }

    def is_type_description(name: str) -> bool:
        return name in {"TypedDict", "Protocol"} or any(
            is_type_description(base) for base in bases.get(name, ()) if base != name
        )

    return [
        f"{name}:{cls.lineno} {cls.name} derives from the concrete class {base}"
        for name, source in modules.items()
        for cls in classes(source)
        for base in map(identifier, cls.bases)
        if base in bases
        and not base.startswith("Abstract")
        and not base.endswith("Error")
        and not is_type_description(base)
    ]


@cache
def modules_in(folder: Path) -> dict[str, str]:
    """The source of every module of the package, by its dotted name."""
    sources = {}
    for file in sorted(folder.rglob("*.py")):
        path = (ROOT, *file.relative_to(folder).with_suffix("").parts)
        sources[".".join(path).removesuffix(".__init__")] = file.read_text(encoding="utf-8")
    return sources


# A package that follows all rules.
GOOD = {
    "fedlas": "def build():\n    from fedlas.losses import build_loss",
    "fedlas.catalog": "class Catalog(Generic[Entry]): ...",
    "fedlas.metrics.bin_sums": "import fedlas.predictions",
    "fedlas.losses": "from fedlas.catalog import Catalog\nfrom fedlas.losses.base import AbstractLoss",
    "fedlas.losses.base": "from fedlas.metrics import bin_sums\nclass AbstractLoss(nn.Module, ABC): ...",
    "fedlas.losses.ce": "class CE(AbstractLoss):\n    name = 'ce'",
    "fedlas.losses.ls": "class LS(AbstractLoss):\n    name: ClassVar[str] = 'ls'",
    "fedlas.losses.mbls": "class MbLS(AbstractLoss):\n    name = 'mbls'",
    "fedlas.losses.acls": "from fedlas.losses.base import AbstractLoss\nclass ACLS(AbstractLoss): two = 'ce', 'ls'",
    "fedlas.training.step": "class A(TypedDict): ...\nclass B(A): ...\nclass C(B): ...",
    "fedlas.training.loop": "import fedlas.training.step\ndef fit(): ...",
}

# For every rule: modules that break it when they are added, and a part of the violation.
BREAKING: list[tuple[Callable[[Modules], list[str]], dict[str, str], str]] = [
    (no_import_of_an_enclosing_package, {"fedlas.cli": "import fedlas"}, "fedlas.cli:1"),
    (imports_follow_the_table, {"fedlas.losses.base": "from fedlas.metrics import calibration"}, "losses may import"),
    (imports_follow_the_table, {"fedlas.data.digits": "def f():\n    import fedlas.training.loop"}, "digits:2"),
    (imports_follow_the_table, {"fedlas.report.text": "import_module('fedlas.training.loop')"}, "fedlas.report.text:1"),
    (imports_follow_the_table, {"fedlas.unknown.file": ""}, "missing in ALLOWED"),
    (
        catalogue_entries_import_their_base_and_no_sibling,
        {"fedlas.losses.acls": "from fedlas.losses import base, mbls"},
        "acls:1 imports its sibling fedlas.losses.mbls",
    ),
    (catalogue_entries_import_their_base_and_no_sibling, {"fedlas.losses.base": "import fedlas.losses.ce"}, "base:1"),
    (file_names_say_what_is_inside, {"fedlas.training._utils": ""}, "'_utils'"),
    (no_list_is_kept_by_hand, {"fedlas.cli": "Name = Literal['ce', 'ls', 'mbls']"}, "ce, ls, mbls"),
    (no_list_is_kept_by_hand, {"fedlas.cli": "ALL = [losses.CE, LS, MbLS]"}, "CE, LS, MbLS"),
    (no_cycles, {"fedlas.training.step": "def f():\n    import fedlas.training.loop"}, "through fedlas.training.loop"),
    (abstract_classes_are_called_abstract, {"fedlas.data.base": "class Data(ABC): ..."}, "AbstractData"),
    (
        abstract_classes_are_called_abstract,
        {"fedlas.data.base": "class Data(Thing):\n    @abstractmethod\n    def split(self): ..."},
        "AbstractData",
    ),
    (concrete_classes_are_never_subclassed, {"fedlas.losses.x": "class X(ce.CE[int]): ..."}, "x:1 X derives"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in BREAKING))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_follows_the_architecture_rule(rule):
    modules = modules_in(SOURCE)
    assert {"fedlas", "fedlas.catalog", "fedlas.losses.base"} <= set(modules)
    assert not rule(modules)


@pytest.mark.parametrize(("rule", "modules", "expected"), BREAKING)
def test_broken_architecture_rule_is_reported(rule, modules, expected):
    assert rule(GOOD) == []
    assert any(expected in violation for violation in rule(GOOD | modules))


def test_allowed_imports_have_no_cycle():
    packages = {name: {row.split(".")[0] for row in rows} for name, rows in ALLOWED.items()}
    assert not [name for name, rows in packages.items() for row in rows if name in reachable(row, packages)]
