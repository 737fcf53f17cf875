"""The script of the HTML page, joined from the modules in `page/`.

Each module is a standard ES module that exports functions and constants by name and imports them by name from its
neighbours. `join_modules` turns every module into a function that returns its exports, in the order of the imports.
The result is one inline script, which works in a local file, where browsers do not load modules.
"""

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "page"
IMPORT = re.compile(r'^import \{\s*([\w\s,]+?),?\s*\} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:function|const) (\w+))", re.MULTILINE)


@cache
def join_modules(entry: str = "main", folder: Path = FOLDER) -> str:
    """Return a module and all modules that it imports as one script."""
    order: list[str] = []

    def add(name: str, importers: tuple[str, ...]) -> None:
        assert name not in importers, f"cyclic import of {name}.js"
        if name in order:
            return
        for match in IMPORT.finditer(_read(folder, name)):
            add(match[2], (*importers, name))
        order.append(name)

    add(entry, ())
    parts = [_wrap(name, _read(folder, name)) for name in order]
    return "\n".join(['"use strict";', "(() => {", *parts, "})();", ""])


def _read(folder: Path, name: str) -> str:
    return (folder / f"{name}.js").read_text(encoding="utf-8")


def _wrap(name: str, source: str) -> str:
    """Wrap a module in a function call that returns its exports."""
    exports = ", ".join(EXPORT.findall(source))
    body = EXPORT.sub("", IMPORT.sub(r"const { \1 } = \2_module;\n", source))
    return f"const {name}_module = (() => {{\n{body}return {{ {exports} }};\n}})();"
