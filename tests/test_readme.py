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
NO_TEST_COMMENT = re.compile(r"<!-- no test:(?P<reason>.*?)-->\s*\Z", re.DOTALL)


class Block(NamedTuple):
    """One fenced block: its language, its text, the line it starts on, and why it is not run."""

    language: str
    code: str
    line: int
    skip_reason: str | None


def blocks(text: str) -> list[Block]:
    result = []
    for fence in FENCE.finditer(text):
        code = re.sub(f"^{fence['indent']}", "", fence["code"], flags=re.MULTILINE)
        skip_reason = NO_TEST_COMMENT.search(text[: fence.start()])
        line = text[: fence.start("code")].count("\n") + 1
        result.append(Block(fence["language"], code, line, skip_reason and skip_reason["reason"].strip()))
    return result


def run_python(document: str, text: str) -> None:
    """Run the Python blocks of a document as one module, with its own line numbers in tracebacks."""
    module = ModuleType("snippets")
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up
    try:
        for block in blocks(text):
            if block.language != "python":
                continue
            if block.skip_reason == "":
                raise AssertionError(f"{document}:{block.line} is left out without a reason")
            if block.skip_reason is None:
                exec(compile("\n" * (block.line - 1) + block.code, document, "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]


def make_targets(text: str) -> set[str]:
    """The targets that the shell blocks of a document name."""
    targets: set[str] = set()
    for block in blocks(text):
        if block.language in {"bash", "sh", "shell", "console"}:
            commands = re.sub(r"#.*", "", block.code)
            for arguments in re.findall(r"(?:^|[\s;&|])make((?: +[\w=./-]+)+)", commands):
                targets |= {argument for argument in arguments.split() if re.fullmatch(r"[a-z][\w-]*", argument)}
    return targets


def known_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def relative_path(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def languages(document: Path) -> set[str]:
    return {block.language for block in blocks(document.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(p, marks=pytest.mark.campaign if relative_path(p) in LONG else ())
        for p in RUN
        if "python" in languages(p)
    ],
    ids=relative_path,
)
def test_documented_python_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(str(document), document.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative_path)
def test_documented_make_targets_exist(document):
    assert make_targets(document.read_text(encoding="utf-8")) <= known_targets()


def test_readme_and_pages_in_subfolders_of_the_docs_are_run():
    assert {ROOT / "README.md", ROOT / "docs" / "howto" / "sklearn.md"} <= set(RUN)
    assert {relative_path(document) for document in RUN} >= LONG


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


@pytest.mark.parametrize("skip_reason", ["<!-- no test: -->", "<!-- no test:-->"])
def test_no_test_comment_needs_a_reason(skip_reason):
    with pytest.raises(AssertionError, match=r"made_up\.md:3"):
        run_python("made_up.md", f"{skip_reason}\n```python\npass\n```\n")


def test_no_test_comment_covers_only_the_next_block():
    with pytest.raises(ZeroDivisionError):
        run_python("made_up.md", "<!-- no test: slow -->\n```python\npass\n```\n```python\n1 / 0\n```\n")


def test_unknown_make_target_is_detected():
    text = (
        "```bash\ncd fedlas && make test\nPYTHON=python3.12 make nonsense  # a comment\nmake PYTHON=python3 help\n```\n"
    )
    assert make_targets(text) == {"test", "nonsense", "help"}
    assert make_targets(text) - known_targets() == {"nonsense"}
