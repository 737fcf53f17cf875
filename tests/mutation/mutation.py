"""Seeded mutation check: does a set of tests notice small errors in the source?

    python tests/mutation/mutation.py list --seed 1 --count 60 mutants.json     # choose mutants
    python tests/mutation/mutation.py probe mutants.json reached.txt            # add probes to src
    python tests/mutation/mutation.py run mutants.json reached.txt result.jsonl   # mutate src, run those tests

`probe` and `run` rewrite files below `src/`, so use a separate checkout with its own environment. Between `probe` and
`run`, run the tests to be examined with `--junitxml`, then restore `src/`.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "fedlas"
STRATA = {
    "losses": ["losses"],
    "metrics": ["metrics"],
    "posthoc": ["posthoc"],
    "ood": ["ood"],
    "io": ["predictions", "alignment.py", "io"],
    "training": ["training"],
    "experiments": ["experiments"],
    "report": ["report"],
}
TESTS = {"io": ["tests/test_predictions.py", "tests/io"]}  # strata whose tests are not in the folder of that name
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
PROBE = """
import os
import torch
SEEN = set()
def hit(number):
    if torch.compiler.is_compiling():
        return
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in SEEN:
        SEEN.add((number, test))
        with open({path!r}, "a", encoding="utf-8") as file:
            file.write(f"{{number}}\\t{{test}}\\n")
"""


def mutations(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kind and the replacement text of each mutation of one node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            yield "comparison", f"({ast.unparse(ast.Compare(node.left, [FLIPPED[type(op)]()], node.comparators))})"
        case ast.BinOp(op=ast.Sub() | ast.Div() | ast.FloorDiv() | ast.Mod() | ast.Pow() | ast.MatMult()):
            yield "operands", f"({ast.unparse(ast.BinOp(node.right, node.op, node.left))})"
        case ast.Constant(value=bool()):
            yield "constant", repr(not node.value)
        case ast.Constant(value=int()):
            yield "off by one", repr(node.value + 1)
        case ast.Constant(value=float()):
            yield "constant", repr(node.value * 1.5 + 0.1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "removed", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "removed", "pass"


def walk_mutable(node: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """Yield nodes whose mutation changes behaviour, each with the statement it is part of."""
    if isinstance(node, ast.stmt):
        statement = node
    if isinstance(node, ast.JoinedStr | ast.arg) or (
        isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ):
        return
    if statement is not None:
        yield node, statement
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or (isinstance(node, ast.Raise) and field == "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk_mutable(child, statement)


def candidates(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every mutation of a file that still compiles."""
    text = path.read_text(encoding="utf-8")
    lines = text.encode().splitlines(keepends=True)
    for node, statement in walk_mutable(ast.parse(text)):
        for kind, new in mutations(node):
            start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
            end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
            yield {
                "file": str(path.relative_to(ROOT)),
                "line": node.lineno,
                "statement": statement.lineno,
                "kind": kind,
                "span": [start, end],
                "old": text.encode()[start:end].decode(),
                "new": new,
            }


def choose_mutants(seed: int, count: int) -> list[dict[str, Any]]:
    """Choose mutants, balanced over strata and over kinds of mutation."""
    generator = random.Random(seed)
    result: list[dict[str, Any]] = []
    for number, (stratum, entries) in enumerate(STRATA.items()):
        paths = sorted(
            p
            for entry in entries
            for p in ([SOURCE / entry] if entry.endswith(".py") else (SOURCE / entry).rglob("*.py"))
        )
        kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for path in paths:
            for mutant in candidates(path):
                kinds[mutant["kind"]].append({"stratum": stratum, **mutant})
        mutant_count = (number + 1) * count // len(STRATA) - number * count // len(STRATA)
        order = sorted(kinds)
        generator.shuffle(order)
        result += [generator.choice(kinds[order[index % len(order)]]) for index in range(mutant_count)]
    return [{"number": 1000 * seed + number, **mutant} for number, mutant in enumerate(result)]


def apply_mutation(mutant: dict[str, Any], source: bytes) -> bytes:
    """Return the source with one mutation."""
    start, end = mutant["span"]
    assert source[start:end].decode() == mutant["old"], f"{mutant['file']} has changed since the mutants were chosen"
    result = source[:start] + mutant["new"].encode() + source[end:]
    compile(result, mutant["file"], "exec")
    return result


class Prober(ast.NodeTransformer):
    """Insert a call before each statement that holds a mutant."""

    def __init__(self, numbers: dict[int, list[int]]) -> None:
        self.numbers = numbers

    def visit(self, node: ast.AST) -> Any:
        if "jit" in map(ast.unparse, getattr(node, "decorator_list", [])) or "triton.jit" in map(
            ast.unparse, getattr(node, "decorator_list", [])
        ):
            return node  # Triton compiles the source of the function, which cannot contain a probe
        self.generic_visit(node)
        if isinstance(node, ast.stmt) and node.lineno in self.numbers:
            return [*(ast.parse(f"fedlas_reached.hit({n})").body[0] for n in self.numbers.pop(node.lineno)), node]
        return node


def probe(mutants: list[dict[str, Any]], out: Path) -> None:
    """Rewrite the source so that each mutated statement records the tests that reach it."""
    site = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (Path(site) / "fedlas_reached.py").write_text(PROBE.format(path=str(out.resolve())), encoding="utf-8")
    files: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants:
        files[mutant["file"]][mutant["statement"]].append(mutant["number"])
    for name, numbers in files.items():
        tree = Prober(dict(numbers)).visit(ast.parse((ROOT / name).read_text(encoding="utf-8")))
        first = next(k for k, node in enumerate(tree.body) if not isinstance(node, ast.Expr | ast.ImportFrom))
        tree.body.insert(first, ast.parse("import fedlas_reached").body[0])
        (ROOT / name).write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")


def read_reached(out: Path, known: set[str]) -> dict[int, set[str]]:
    """Return the tests that reached each mutant; if a fixture reached it, all tests of the file count.

    Tests that run in a nested pytest are not in `known` and are left out.
    """
    tests: dict[int, set[str]] = defaultdict(set)
    for line in out.read_text(encoding="utf-8").splitlines():
        number, _, test = line.partition("\t")
        name, _, phase = test.rpartition(" ")
        if name in known or not name:
            tests[int(number)].add(file_of(name) if phase == "(setup)" else name)
    return tests


def durations(report: Path) -> dict[str, float]:
    """Return the seconds of each test and of each test file in a JUnit report."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ET.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[file] += float(case.get("time", 0))
        seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    return seconds


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def group_by_duration(tests: list[str], seconds: dict[str, float]) -> list[list[str]]:
    """Split tests into groups of 10 s, 100 s and the rest; the first group catches most mutants."""
    groups: list[list[str]] = [[], [], []]
    total = 0.0
    for test in tests:
        groups[(total >= 10) + (total >= 110)].append(test)
        total += seconds[test]
    return [group for group in groups if group]


def run_tests(tests: list[str], limit: float, options: list[str]) -> tuple[str, str]:
    """Run tests until one fails; return `caught`, `survived` or `timeout`, and the test that failed."""
    test_list = ROOT / "build" / "mutation_tests.txt"
    test_list.parent.mkdir(exist_ok=True)
    test_list.write_text("\n".join(tests) + "\n", encoding="utf-8")
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "FEDLAS_WHOLE": "0"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *options, f"@{test_list}"]
    try:
        process = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout", ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", process.stdout, re.MULTILINE)
    if process.returncode == 0:
        return "survived", ""
    return ("caught", failed[1]) if failed else ("caught", f"exit {process.returncode}: {process.stdout[-300:]}")


def run(mutants: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Run each mutant against the tests that reach it, and write a line of JSON for each."""
    seconds = durations(args.junit)
    tests = read_reached(args.reached, set(seconds))
    for mutant in mutants:
        if args.only and mutant["number"] not in args.only:
            continue
        path = ROOT / mutant["file"]
        source = path.read_bytes()
        ids = tests[mutant["number"]]
        if "" in ids or not ids:  # executed at import or in a compiled kernel: run all tests of the package
            ids = {test for test in ids if test} | set(TESTS.get(mutant["stratum"], [f"tests/{mutant['stratum']}"]))
        groups = group_by_duration(
            sorted(ids, key=lambda test: (mutant["stratum"] not in test, seconds[file_of(test)], test)), seconds
        )
        start = time.monotonic()
        try:
            path.write_bytes(apply_mutation(mutant, source))
            remove_bytecode(path)
            for group in groups:
                result, test = run_tests(group, args.limit, args.pytest)
                if result != "survived":
                    break
        finally:
            path.write_bytes(source)
            remove_bytecode(path)
        line = {"number": mutant["number"], "tests": len(ids), "result": result, "test": test}
        line["seconds"] = round(time.monotonic() - start, 1)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(mutant["number"], mutant["file"], mutant["line"], mutant["kind"], result, test, flush=True)


def remove_bytecode(path: Path) -> None:
    """Remove the compiled files of a module."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def main() -> None:
    """Parse the arguments and run one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True, dest="step")
    listing = steps.add_parser("list", help="choose mutants")
    listing.add_argument("--seed", type=int, required=True)
    listing.add_argument("--count", type=int, default=60)
    probing = steps.add_parser("probe", help="rewrite src so that mutated statements record the tests that reach them")
    running = steps.add_parser("run", help="run each mutant against the tests that reach it")
    for step in (listing, probing, running):
        step.add_argument("mutants", type=Path)
    for step in (probing, running):
        step.add_argument("reached", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--junit", type=Path, required=True, help="JUnit report of the run with probes, for durations")
    running.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    running.add_argument("--limit", type=float, default=900, help="seconds for one mutant")
    running.add_argument("--pytest", nargs="*", default=[], help="further options of pytest")
    args = parser.parse_args()
    if args.step == "list":
        text = json.dumps(choose_mutants(args.seed, args.count), indent=1)
        args.mutants.write_text(text + "\n", encoding="utf-8")
        return
    mutants = json.loads(args.mutants.read_text(encoding="utf-8"))
    if args.step == "probe":
        probe(mutants, args.reached)
    else:
        run(mutants, args)


if __name__ == "__main__":
    main()
