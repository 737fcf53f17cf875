"""The Python code in the documents runs, and the commands in them exist.

The Python blocks of one file run in order and share their names, as a reader would type them. A block that cannot run
here stands below `<!-- no test: reason -->`.
"""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if p.name != "CHANGELOG.md")
RUN = [p for p in DOCUMENTS if p.name == "README.md" or ROOT / "docs" in p.parents]
LONG = {  # seconds each: trainings, heavy packages, many figures
    "docs/cluster.md",
    "docs/figures.md",
    "docs/howto/choose_a_method.md",
    "docs/howto/export.md",
    "docs/howto/trackers.md",
    "docs/train.md",
}
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
EXCUSE = re.compile(r"<!-- no test:(?P<reason>.*?)-->\s*\Z", re.DOTALL)


class Block(NamedTuple):
    """One fenced block: its language, its text, the line it starts on, and why it is not run."""

    language: str
    code: str
    line: int
    excuse: str | None


def blocks(text: str) -> list[Block]:
    found = []
    for fence in FENCE.finditer(text):
        code = re.sub(f"^{fence['indent']}", "", fence["code"], flags=re.MULTILINE)
        excuse = EXCUSE.search(text[: fence.start()])
        line = text[: fence.start("code")].count("\n") + 1
        found.append(Block(fence["language"], code, line, excuse and excuse["reason"].strip()))
    return found


def run_python(document: str, text: str) -> None:
    """Run the Python blocks of a document as one module, with its own line numbers in tracebacks."""
    module = ModuleType("snippets")
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up
    try:
        for block in blocks(text):
            if block.language != "python":
                continue
            if block.excuse == "":
                raise AssertionError(f"{document}:{block.line} is left out without a reason")
            if block.excuse is None:
                exec(compile("\n" * (block.line - 1) + block.code, document, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]


def make_targets(text: str) -> set[str]:
    """The targets that the shell blocks of a document name."""
    found: set[str] = set()
    for block in blocks(text):
        if block.language in {"bash", "sh", "shell", "console"}:
            commands = re.sub(r"#.*", "", block.code)
            for words in re.findall(r"(?:^|[\s;&|])make((?: +[\w=./-]+)+)", commands):
                found |= {word for word in words.split() if re.fullmatch(r"[a-z][\w-]*", word)}
    return found


def known_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def called(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def languages(document: Path) -> set[str]:
    return {block.language for block in blocks(document.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    "document",
    [pytest.param(p, marks=pytest.mark.campaign if called(p) in LONG else ()) for p in RUN if "python" in languages(p)],
    ids=called,
)
def test_documented_python_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(str(document), document.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=called)
def test_documented_make_targets_exist(document):
    assert make_targets(document.read_text(encoding="utf-8")) <= known_targets()


def test_readme_and_pages_in_subfolders_of_the_docs_are_run():
    assert {ROOT / "README.md", ROOT / "docs" / "howto" / "sklearn.md"} <= set(RUN)
    assert {called(document) for document in RUN} >= LONG


def test_failing_block_is_reported_with_its_line():
    text = "Text.\n\n```python\nx = 1\n```\n\nMore.\n\n- item\n  ```python\n  y = x + 1\n  assert y == 3\n  ```\n"
    with pytest.raises(AssertionError) as failure:
        run_python("made_up.md", text)
    assert failure.traceback[-1].lineno + 1 == 12  # pytest counts lines from 0
    assert "snippets" not in sys.modules


def test_code_block_may_define_dataclasses():
    run_python(
        "made_up.md", "```python\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n```\n"
    )


def test_only_python_without_a_no_test_comment_is_run():
    run_python("made_up.md", "```text\nraise\n```\n\n<!-- no test: needs a GPU -->\n```python\nraise ValueError\n```\n")


@pytest.mark.parametrize("excuse", ["<!-- no test: -->", "<!-- no test:-->"])
def test_no_test_comment_needs_a_reason(excuse):
    with pytest.raises(AssertionError, match=r"made_up\.md:3"):
        run_python("made_up.md", f"{excuse}\n```python\npass\n```\n")


def test_no_test_comment_covers_only_the_next_block():
    with pytest.raises(ZeroDivisionError):
        run_python("made_up.md", "<!-- no test: slow -->\n```python\npass\n```\n```python\n1 / 0\n```\n")


def test_unknown_make_target_is_detected():
    text = (
        "```bash\ncd fedlas && make test\nPYTHON=python3.12 make nonsense  # a comment\nmake PYTHON=python3 help\n```\n"
    )
    assert make_targets(text) == {"test", "nonsense", "help"}
    assert make_targets(text) - known_targets() == {"nonsense"}
