"""Modules of the page's script: each is parsed and linked by the browser, and uses what it imports."""

import re

import pytest

from fedlas.report.page_script import EXPORT, FOLDER, IMPORT, join_modules

MODULES = sorted(path.stem for path in FOLDER.glob("*.js"))
SOURCES = {name: (FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in MODULES}
# JavaScript versions of Python functions that the page itself does not call.
UNUSED_BY_PAGE = {"formatCell", "formatNumber", "formatEdge"}


def test_modules_are_valid_and_their_imports_exist(modules):
    names = [name for name in MODULES if name != "main"]  # importing it draws a page; tested below
    exports = modules.evaluate(
        "async (names) => Promise.all(names.map(async (name) => Object.keys(await import(`./${name}.js`))))", names
    )
    assert list(map(sorted, exports)) == [sorted(EXPORT.findall(SOURCES[name])) for name in names]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_uses_every_import(name):
    body = re.sub(r'"[^"\n]*"|//.*', "", IMPORT.sub("", SOURCES[name]))  # without texts and comments
    imported = {each for match in IMPORT.finditer(SOURCES[name]) for each in re.split(r",\s*", match[1])}
    assert imported <= set(re.findall(r"(?:(?<!\.)|(?<=\.\.\.))\b\w+", body))


def test_every_export_is_imported_somewhere():
    lists = [match[1] for source in SOURCES.values() for match in IMPORT.finditer(source)]
    imported = {name for names in lists for name in re.split(r",\s*", names)}
    exported = {name for source in SOURCES.values() for name in EXPORT.findall(source)}
    assert exported - imported <= UNUSED_BY_PAGE
    assert imported <= exported


def test_the_script_has_every_module_once_after_its_imports():
    script = join_modules()
    assert script.startswith('"use strict";')
    positions = {name: script.index(f"const {name}_module = ") for name in MODULES}
    for name, source in SOURCES.items():
        assert script.count(f"const {name}_module = ") == 1
        assert all(positions[match[2]] < positions[name] for match in IMPORT.finditer(source))
    assert not re.search(r"^(import|export) ", script, re.MULTILINE)


def test_cyclic_imports_are_refused(tmp_path):
    for name, other in (("main", "second"), ("second", "main")):
        (tmp_path / f"{name}.js").write_text(f'import {{ x }} from "./{other}.js";\n')
    with pytest.raises(AssertionError, match=r"main\.js"):
        join_modules("main", tmp_path)


@pytest.mark.campaign
def test_separate_modules_draw_the_same_page(modules, three_model_page):
    """The page runs one joined script; the separate modules draw the same page."""
    text = three_model_page.read_text(encoding="utf-8")
    modules.goto("http://page.test/empty.html")
    modules.set_content(re.sub(r"<meta http-equiv[^>]*>|<script>.*?</script>", "", text, flags=re.DOTALL))
    modules.evaluate('() => import("/main.js")')
    modules.wait_for_selector("html[data-ready]")
    assert modules.locator("figure svg[role=group]").count() >= 12
