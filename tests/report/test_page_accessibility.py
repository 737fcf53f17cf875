"""Accessibility of the report page: the main rules by hand, which always run, and axe-core."""

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
        add("input", {});
        add("button", {});
        add("img", {});
        add("h5", {}, "Too deep");
        add("fieldset", {});
        add("div", { className: "scroll" });
        add("p", { id: "main" }, "Twice");
        add("section", {});
        add("p", {}, "Too pale").style.setProperty("color", "rgb(170, 170, 170)");
        const table = add("table", {});
        table.insertRow().insertCell().textContent = "Without a head";
    }""")
    broken = {rule for rule, nodes in tab.page.evaluate(RULES).items() if nodes}
    assert broken >= {
        "labels",
        "buttons",
        "pictures",
        "headings",
        "groups",
        "scrolling",
        "ids",
        "regions",
        "contrast",
        "tables",
    }


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
