"""The vocabulary of source and documentation: terms of a private language may only become fewer.

Each term has a pattern and the number of its present uses. A term is counted in prose, in snake_case and in CamelCase;
a pattern leaves out the ordinary technical meaning of its word.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TERMS = {
    "foreign data": (r"foreign(?!Object)", 222),
    "onlooker": (r"onlookers?", 0),
    "rehearsal": (r"rehears(?:als?|e[ds]?|ing)", 0),
    "stranger": (r"strange(?:rs?|ly)?", 16),
    "judge": (r"judg(?:e[ds]?|ing)", 73),
    "duel": (r"duels?", 16),
    "crew": (r"crews?", 30),
    "dealt": (r"dealt", 6),
    "too sure": (r"too sure", 24),
    "sure enough": (r"sure enough", 12),
    "say whether": (r"says? whether", 27),
    "give that": (r"gives? that", 1),
    "refuse what": (r"refuses? what", 4),
    "told": (r"told", 51),
    "tell apart": (r"tells? (?:\w+ ){0,3}apart", 19),
    "beyond chance": (r"beyond chance", 4),
    "by heart": (r"by heart", 8),
    "repair": (r"repair(?:s|ed|ing)?", 71),
    "bench": (r"(?<!make\x20)(?:work)?bench(?!-)", 0),
    "descent": (r"(?<!gradient\x20)descents?", 0),
    "tally": (r"tall(?:y|ies|ied)", 0),
    "worlds": (r"worlds", 3),
    "photograph": (r"photographs?", 19),
    "unanswered": (r"unanswered", 3),
    "house": (r"(?:the|this|our) house(?! numbers?)|house style", 11),
    "of our own": (r"of (?:our|one's) own", 9),
    "owed": (r"owed", 0),
    "those who": (r"those who", 3),
    "whole or not at all": (r"whole,? or not at all", 8),
    "error that is shown": (r"error that is shown", 0),
    "forth and back": (r"(?:forth|there) and back", 0),
    "sealed": (r"(?:un)?sealed", 0),
    "price": (r"price[sd]?", 7),
    "subjects": (r"subjects", 8),
    "right answers": (r"(?:right|wrong) answers?", 24),
    "share that is right": (r"shares? that (?:is|are) right", 0),
}


def count(pattern: str, text: str) -> int:
    """Count a term as whole words, also across lines and inside identifiers."""
    spaced = pattern.replace(" ", r"[\s_-]+").lower()
    matches = [match.span() for match in re.finditer(spaced, text.lower())]  # three times as fast as ignoring case
    return sum(
        not text[end : end + 1].islower()
        and (not text[start - 1 : start].isalpha() or (text[start - 1].islower() and text[start].isupper()))
        for start, end in matches
    )


@pytest.fixture(scope="module")
def text() -> str:
    source = [path for path in ROOT.glob("src/**/*.*") if path.suffix in {".py", ".js", ".css", ".jinja", ".json"}]
    return "\n".join(
        path.read_text(encoding="utf-8") for path in [*source, *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    )


@pytest.mark.parametrize("term", TERMS)
def test_a_private_term_is_used_no_more_often(text, term):
    pattern, bound = TERMS[term]
    found = count(pattern, text)
    assert found <= bound, f"{term!r}: {found} uses, at most {bound}; write the term of the field"
    assert found == bound, f"{term!r}: {found} uses; lower its bound from {bound}"


def test_a_made_up_line_is_counted():
    line = "Judged: OODSet, local_crews, LocalCrew of our\n    own; too_sure. Say whether strangers told it apart."
    ordinary = "<foreignObject> foreach, judgement, gradient descent, make bench, benchmark, house numbers, world_size"
    counted = {term: count(pattern, line) for term, (pattern, _) in TERMS.items() if count(pattern, line)}
    assert counted == {
        "foreign data": 1, "stranger": 1, "judge": 1, "crew": 2, "too sure": 1, "say whether": 1, "told": 1,
        "of our own": 1,
    }  # fmt: skip
    assert not any(count(pattern, ordinary) for pattern, _ in TERMS.values())
