"""One contract for every loss: what its docstrings say."""

import inspect
import re
import sys

from loss_cases import every_loss


@every_loss
def test_a_summary_and_a_citation(case):
    summary = case.record.summary
    assert summary == inspect.getdoc(case.cls).splitlines()[0]
    assert re.fullmatch(r"[A-Z].{15,}\.", summary)
    citation = case.record.citation
    assert citation == case.cls.citation
    assert re.search(r"\w.*(, .* (19|20)\d\d|paper)\.$", citation)


@every_loss
def test_a_formula_in_the_docstring_of_the_module(case):
    text = sys.modules[case.cls.__module__].__doc__
    assert re.search(r"\w\s+=\s|\bL\s{2,}\(", text), "no formula"
