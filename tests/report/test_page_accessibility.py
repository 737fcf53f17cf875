"""Accessibility of the report page: the main rules by hand, which always run, and axe-core."""

from pathlib import Path
from typing import Any

import pytest

from report.pages import NARROW, WIDE

RULES = (Path(__file__).parent / "accessibility.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_page_passes_accessibility_rules(visit: Any, several: Path, width: int, scheme: str) -> None:
    here = visit(several, width, scheme)
    here.open_all()
    broken = here.page.evaluate(RULES)
    assert {rule: nodes for rule, nodes in broken.items() if nodes} == {}


def test_accessibility_rules_detect_violations(visit: Any, several: Path) -> None:
    here = visit(several)
    here.page.evaluate("""() => {
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
    broken = {rule for rule, nodes in here.page.evaluate(RULES).items() if nodes}
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(visit: Any, several: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="needs axe-core: pip install axe-playwright-python")
    script = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    here = visit(several, WIDE, scheme, bypass_csp=True)
    here.open_all()
    here.page.evaluate(script)
    found = here.page.evaluate("axe.run(document, { resultTypes: ['violations', 'passes'] })")
    assert len(found["passes"]) > 20
    violations = {one["id"]: [node["html"][:200] for node in one["nodes"]] for one in found["violations"]}
    assert violations == {}
