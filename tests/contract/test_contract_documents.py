"""Contract of every loss: documentation."""

import contextlib
import inspect
import re
import sys

import pytest
import torch
from loss_cases import CLASSES, choices, every_loss, keyword_types

import fedlas


@every_loss
def test_loss_has_a_summary_and_a_citation(case):
    summary = case.record.summary
    assert summary == inspect.getdoc(case.cls).splitlines()[0]
    assert re.fullmatch(r"[A-Z].{15,}\.", summary)
    citation = case.record.citation
    assert citation == case.cls.citation
    assert re.search(r"\w.*(, .* (19|20)\d\d|paper)\.$", citation)


@every_loss
def test_module_docstring_has_a_formula(case):
    text = sys.modules[case.cls.__module__].__doc__
    assert re.search(r"\w\s+=\s|\bL\s{2,}\(", text), "no formula"


def candidates(keyword, kind):
    """Return values of which a keyword takes at least one that is not its default."""
    if keyword == "weight":
        return [torch.ones(CLASSES)]
    if keyword == "replay":
        return [[{"strengths": [0.5] * bins, "edges": [*range(bins + 1)]}] for bins in (1, 5, 10)]
    return choices(kind) or [0.125, 0.25, 3, 7]


@every_loss
def test_repr_shows_every_constructor_keyword(case):
    missing_keywords, default_repr = [], repr(case.build())
    for keyword, kind in keyword_types(case.record).items():
        reprs = set()
        for value in candidates(keyword, kind):
            with contextlib.suppress(ValueError, TypeError):  # not every candidate is in range
                reprs.add(repr(case.build(**{keyword: value})))
        if not reprs - {default_repr}:
            missing_keywords.append(keyword)
    assert not missing_keywords


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("focal", {"gamma": 2.5}, "Focal(gamma=2.5)"),
        ("ce", {"num_classes": 3, "reduction": "sum"}, "CE(num_classes=3, reduction='sum')"),
    ],
)
def test_repr_has_the_format_of_torch_layers(name, options, expected):
    assert repr(fedlas.build_loss(name, **options)) == expected
