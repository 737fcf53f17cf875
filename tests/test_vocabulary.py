"""Ban private terms; the failure message names the term of the field to write instead.

The source, documentation, scripts, and the names of test files and test functions are checked. A term is found in
prose, also across lines, in snake_case and in CamelCase. Patterns leave out ordinary technical meanings of a word.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TERMS = {  # term: (pattern, what to write instead)
    "foreign data": (r"foreign(?!Object)", "out-of-distribution (OOD) data"),
    "known data": (r"known data(?!\s?sets?|\s?types?)", "in-distribution (ID) data"),
    "too sure": (r"too sure", "over-confident"),
    "sure enough": (r"sure enough", "under-confident"),
    "how sure": (r"how sure", "confidence"),
    "right answers": (r"(?:right|wrong) answers?", "correct / incorrect predictions"),
    "share that is right": (r"shares? that (?:is|are) right", "accuracy"),
    "fixed share": (r"fixed shares?", "fraction"),
    "told": (r"told", "logged, printed, or significantly different"),
    "tell apart": (r"tells? (?:\w+ ){0,3}apart", "differ significantly, distinguish, detect"),
    "tell from chance": (r"tells? (?:\w+ ){0,3}from (?:chance|others?|those)", "differ significantly, distinguish"),
    "beyond chance": (r"beyond chance", "statistically significant"),
    "shown to differ": (r"shown to differ", "differ significantly"),
    "judge": (r"judg(?:e[ds]?|ing)", "evaluate"),
    "repair": (r"repair(?:s|ed|ing)?", "recalibrate; after temperature scaling"),
    "error that is shown": (r"error that is shown", "detectable miscalibration"),
    "leaves no error": (r"leaves? no error", "no detectable miscalibration"),
    "price": (r"price[sd]?", "penalty"),
    "length of a gradient": (r"lengths? of (?:a|an|the|its|their) (?:gradients?|features?)", "norm"),
    "dealt": (r"dealt", "shuffled across samples"),
    "by heart": (r"by heart", "memorised, overfitted"),
    "unanswered": (r"unanswered", "selective prediction, risk-coverage"),
    "house": (r"(?:the|this|our) house(?! numbers?)|house style", "architecture, contributor guide, repository"),
    "stranger": (r"strange(?:rs?|ly)?", "untrusted input"),
    "sealed": (r"(?:un)?sealed", "checksummed"),
    "whole or not at all": (r"whole,? or not at all", "written atomically"),
    "onlooker": (r"onlookers?", "callback"),
    "bench": (r"(?<!make\x20)(?:work)?bench(?!-|:|\x20bench-)", "session, trainer state; in full: benchmark"),
    "rehearsal": (r"rehears(?:als?|e[ds]?|ing)", "warm-up, parallel pre-compilation"),
    "descent": (r"(?<!gradient\x20)descents?", "fused optimizer step, optimizer step"),
    "memory of an optimizer": (r"memory of (?:an|the|its) optimizers?", "optimizer state"),
    "skipped the layers": (r"skipped the layers?", "residual (skip) connection"),
    "cut off the negative": (r"cuts? off (?:what is|the) negative", "ReLU"),
    "forth and back": (r"(?:forth|there) and back", "forward and backward"),
    "of our own": (r"of (?:our|one's) own", "custom, user-defined"),
    "owed": (r"owed", "deferred gradient"),
    "crew": (r"crews?", "executor (worker pool)"),
    "farewell": (r"farewells?", "shutdown timeout"),
    "duel": (r"duels?", "paired comparison"),
    "subjects": (r"subjects", "models under comparison"),
    "tally": (r"tall(?:y|ies|ied)", "metric accumulator, counts"),
    "worlds": (r"worlds", "bootstrap distribution"),
    "photograph": (r"photographs?", "natural images"),
    "gate history": (r"gate histor(?:y|ies)", "gate statistics, flip rate"),
    "say whether": (r"says? whether", 'the imperative, such as "Return whether"'),
    "give that": (r"gives? that", 'the imperative, such as "Return the"'),
    "refuse what": (r"refuses? what", 'the imperative, such as "Raise if"'),
    "what is no": (r"what is no", 'the noun; "Raise if ... is not"'),
    "no end of": (r"no end of", "infinite"),
    "those who": (r"those who|that of which|those of which", "the noun"),
}


class Use(NamedTuple):
    """Text that is checked, and the place of its first line."""

    path: str
    line: int
    text: str


def find(pattern: str, text: str) -> Iterator[int]:
    """Yield the positions of a term as whole words, also across lines and inside identifiers."""
    spaced = pattern.replace(" ", r"[\s_-]+").lower()
    for match in re.finditer(spaced, text.lower()):  # three times as fast as ignoring case
        start, end = match.span()
        begins = not text[start - 1 : start].isalpha() or (text[start - 1].islower() and text[start].isupper())
        if begins and not text[end : end + 1].islower():
            yield start


def names_of_tests(path: str, text: str) -> Iterator[Use]:
    """Yield the name of a test file and those of its test functions and classes."""
    yield Use(path, 1, Path(path).stem)
    for match in re.finditer(r"^ *(?:async )?(?:def|class) (test_\w+|Test\w+)", text, re.MULTILINE):
        yield Use(path, text.count("\n", 0, match.start(1)) + 1, match[1])


@pytest.fixture(scope="module")
def checked() -> list[Use]:
    source = [path for path in ROOT.glob("src/**/*.*") if path.suffix in {".py", ".js", ".css", ".jinja", ".json"}]
    scripts = [path for path in ROOT.glob("scripts/**/*") if path.is_file() and path.suffix != ".pyc"]
    other_files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    files = [*source, *ROOT.glob("docs/**/*.md"), *scripts, *other_files]
    uses = [Use(str(path.relative_to(ROOT)), 1, path.read_text(encoding="utf-8")) for path in files]
    assert len(uses) > 100
    for path in ROOT.glob("tests/**/*.py"):
        uses += names_of_tests(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    return uses


@pytest.mark.parametrize("term", TERMS)
def test_private_terms_are_not_used(checked, term):
    pattern, instead = TERMS[term]
    uses = [
        f"{use.path}:{use.line + use.text.count(chr(10), 0, start)}"
        for use in checked
        for start in find(pattern, use.text)
    ]
    assert not uses, f"{term!r} is a private term; write {instead!r} instead:\n" + "\n".join(uses)


def test_private_terms_are_found_in_prose_and_identifiers():
    line = "Judged: ForeignSet, local_crews, LocalCrew of our\n    own; too_sure. Say whether strangers told it apart."
    counts = {term: number for term, (pattern, _) in TERMS.items() if (number := len(list(find(pattern, line))))}
    assert counts == {
        "foreign data": 1, "stranger": 1, "judge": 1, "crew": 2, "too sure": 1, "say whether": 1, "told": 1,
        "of our own": 1,
    }  # fmt: skip


def test_ordinary_technical_meanings_are_allowed():
    ordinary = (
        "<foreignObject> foreach, judgement, gradient descent, make bench, benchmark, bench-train, house numbers, "
        "world_size, unknown data, known data sets, how surely, memory of the device"
    )
    assert not [term for term, (pattern, _) in TERMS.items() if list(find(pattern, ordinary))]


def test_names_of_test_files_and_functions_are_checked():
    text = "x = 1\n\ndef test_it_is_judged():\n    judged = 1\n\nclass TestCrew:\n    def test_a(self): ...\n"
    uses = list(names_of_tests("tests/test_duels.py", text))
    assert [use.line for use in uses] == [1, 3, 6, 7]
    assert [term for use in uses for term, (pattern, _) in TERMS.items() if list(find(pattern, use.text))] == [
        "duel", "judge", "crew",
    ]  # fmt: skip
