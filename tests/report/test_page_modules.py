"""Modules of the page's script: each is parsed and linked by the browser, and names what it uses."""

import re

import pytest

from fedlas.report.page_script import EXPORT, FOLDER, IMPORT, join_modules

MODULES = sorted(path.stem for path in FOLDER.glob("*.js"))
SOURCES = {name: (FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in MODULES}
KEYWORDS = set(
    re.findall(
        r"\w+",
        """async await break case catch class const continue default delete do else export extends false finally for
        from function if import in instanceof let new null of return switch this throw true try typeof undefined void
        while""",
    )
)
GLOBALS = {
    "Array", "Blob", "Boolean", "Infinity", "IntersectionObserver", "Intl", "JSON", "Map", "Math", "Number", "Object",
    "ResizeObserver", "Set", "String", "URL", "XMLSerializer", "document", "encodeURIComponent",
    "navigator", "requestAnimationFrame", "window",
}  # fmt: skip
# JavaScript versions of Python functions that the page itself does not call.
UNUSED_BY_PAGE = {"formatCell", "formatNumber", "formatEdge"}


def code_of(source: str) -> str:
    """Return a module without comments, texts and regular expressions; expressions inside of templates are kept."""
    source = re.sub(r"^\s*//.*$|\s// .*$", "", source, flags=re.MULTILINE)
    source = re.sub(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'', '""', source)
    source = re.sub(r"(?<=[(,=] |.\()/(?:[^/\\\n]|\\.)+/[gimsu]*", '""', source)
    parts, brace_depths = [], [0]  # open braces of each template expression; a template itself is -1

    for piece in re.split(r"(`|\$\{|\{|\})", source):
        in_template = brace_depths[-1] == -1
        if piece == "`":
            brace_depths.pop() if in_template else brace_depths.append(-1)
        elif piece == "${" and in_template:
            brace_depths.append(0)
            parts.append(" (")
        elif in_template:
            continue
        elif piece == "}" and brace_depths[-1] == 0 and len(brace_depths) > 1:
            brace_depths.pop()
            parts.append(") ")
        else:
            brace_depths[-1] += {"{": 1, "}": -1}.get(piece, 0)
            parts.append(piece)
    return "".join(parts)


def names_used(code: str) -> set[str]:
    """Return the identifiers of a module that are neither properties nor keys of object literals."""
    code = re.sub(r"(?<=[{,\n])(\s*)[\w$]+(?=: )", r"\1", code)  # keys
    return set(re.findall(r"(?<![\w$.])(?<!\.\.\.)[A-Za-z_$][\w$]*|(?<=\.\.\.)[A-Za-z_$][\w$]*", code)) - KEYWORDS


def names_declared(code: str) -> set[str]:
    """Return the identifiers that a module imports or declares: variables, functions and parameters."""
    names = set(re.findall(r"\b(?:const|let|function) ([\w$]+)", code))
    patterns = re.findall(r"\b(?:const|let) ([\[{][^=]*?[\]}]) (?:=|of)", code)  # destructuring
    patterns += re.findall(r"\bfunction [\w$]+\(((?:[^()]|\([^()]*\))*)\) \{", code)  # parameters
    patterns += re.findall(r"\(((?:[^()]|\([^()]*\))*)\) =>", code) + re.findall(r"([\w$]+) =>", code)
    patterns += [match[1] for match in IMPORT.finditer(code)] + re.findall(r"import \{([^}]*)\}", code)
    for pattern in patterns:
        pattern_without_keys = re.sub(r"(?<![\w$])[\w$]+: (?=[\w$\[{])", "", pattern)  # a renamed or nested property
        names |= set(re.findall(r"[A-Za-z_$][\w$]*", re.sub(r"= [^,}\]]+", "", pattern_without_keys)))
    return names


def test_modules_are_valid_and_their_imports_exist(modules):
    names = [name for name in MODULES if name != "main"]  # importing it draws a page; tested below
    exports = modules.evaluate(
        "async (names) => Promise.all(names.map(async (name) => Object.keys(await import(`./${name}.js`))))", names
    )
    assert list(map(sorted, exports)) == [sorted(EXPORT.findall(SOURCES[name])) for name in names]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_uses_no_undeclared_name_and_every_import(name):
    code = code_of(SOURCES[name])
    used = names_used(code)
    assert used - names_declared(code) - GLOBALS == set()
    body = code.rpartition('from "";')[2]
    for match in IMPORT.finditer(SOURCES[name]):
        for imported in re.split(r",\s*", match[1]):
            assert re.search(rf"(?<![\w$.]){imported}\b", body.replace("...", " ")), f"{imported} is not used"


def test_undeclared_name_is_detected():
    code = code_of('import { a } from "./b.js";\nconst f = ({ x: y, z = 1 }) => `${a(y)} text ${typo + z}`; // note\n')
    assert names_used(code) - names_declared(code) - GLOBALS == {"typo"}


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
