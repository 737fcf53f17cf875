"""Accessibility of the report page: axe-core, and rules that it does not have."""

from pathlib import Path
from typing import Any

import pytest

from report.pages import NARROW, WIDE

RULES = (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_page_passes_accessibility_rules(open_tab: Any, three_model_page: Path, width: int, scheme: str) -> None:
    tab = open_tab(three_model_page, width, scheme)
    tab.open_all()
    broken = tab.page.evaluate(RULES)
    assert {rule: nodes for rule, nodes in broken.items() if nodes} == {}


def test_accessibility_rules_detect_violations(open_tab: Any, three_model_page: Path) -> None:
    tab = open_tab(three_model_page)
    tab.page.evaluate("""() => {
        const add = (tag, attributes, text) => {
            const node = Object.assign(document.createElement(tag), attributes);
            if (text) node.textContent = text;
            document.querySelector("main").append(node);
            return node;
        };
        document.querySelector("figure svg").removeAttribute("aria-label");
        add("section", {});
        add("fieldset", {});
        const table = add("table", {});
        table.insertRow().append(document.createElement("th"));
        add("div", { className: "scroll" }).setAttribute("aria-describedby", "nowhere");
        add("p", { id: "main" }, "Twice");
        add("h1", {}, "Twice");
    }""")
    broken = tab.page.evaluate(RULES)
    assert {rule for rule, nodes in broken.items() if nodes} == broken.keys()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.campaign)])
def test_axe_finds_no_violation(open_tab: Any, three_model_page: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="needs axe-core: pip install axe-playwright-python")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    tab = open_tab(three_model_page, WIDE, scheme, bypass_csp=True)
    tab.open_all()
    tab.page.evaluate(script)
    axe_results = tab.page.evaluate("axe.run(document, { resultTypes: ['violations', 'passes'] })")
    assert len(axe_results["passes"]) > 20
    violations = {
        violation["id"]: [node["html"][:200] for node in violation["nodes"]] for violation in axe_results["violations"]
    }
    assert violations == {}
