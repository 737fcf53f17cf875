"""What mkdocs is told beside mkdocs.yml: the order of pages, and what becomes of links that leave docs/.

The order is that of the links in docs/index.md, under its headings. A page that is not linked there stands at the end
of the section whose pages lie in its folder, or of a last one, so nothing is lost when a page is added.

README.md and CONTRIBUTING.md are pages of the site, too. Links to other files of the repository lead nowhere on a site
that is read alone, and become plain text.
"""

import inspect
import posixpath
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

HOUSE = Path(__file__).parents[1]
sys.path.insert(0, str(HOUSE / "src"))  # the API reference documents this checkout
GUESTS = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md"}  # of the repository, and what the site has
START, REST = "Start", "More"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^## (?P<title>.+)$")
API = re.compile(r"^<!-- api: (?P<package>[\w.]+) -->$", re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name anchors as GitHub does, so that a link to one works in both places; put pages in order."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    config.nav = ordered([*pages, *GUESTS.values()], (docs / "index.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Let the guests in."""
    for source, page in GUESTS.items():
        files.append(File.generated(config, page, content=(HOUSE / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where their targets are on the site."""
    return relinked(with_api(markdown), page.file.src_uri)


def with_api(markdown: str) -> str:
    """Replace `<!-- api: PACKAGE -->` by the public names of the package that the page does not document elsewhere."""

    def documented(marker: re.Match[str]) -> str:
        package = marker["package"]
        names = [name for name in public_names(package) if not _is_documented(f"{package}.{name}", markdown)]
        return "\n\n".join(documentation(package, name) for name in names)

    return API.sub(documented, markdown)


def _is_documented(path: str, markdown: str) -> bool:
    return re.search(rf"^(::: {re.escape(path)}|## {path.rpartition('.')[2]})$", markdown, re.MULTILINE) is not None


def public_names(package: str) -> list[str]:
    """Return the names in `__all__` of a package, without its modules."""
    module = import_module(package)
    return [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]


def documentation(package: str, name: str) -> str:
    """Write the directive that documents a class or function; objects, such as metrics, are documented here."""
    entry = getattr(import_module(package), name)
    if inspect.isclass(entry) or inspect.isroutine(entry):
        return f"::: {package}.{name}"
    parameters = ", ".join(
        ("*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else "")
        + parameter.name
        + ("" if parameter.default is parameter.empty else f"={parameter.default!r}")
        for parameter in inspect.signature(entry).parameters.values()
    )
    anchor = f'<a id="{package}.{name}"></a>'
    return f"### {name}\n\n{anchor}\n\n```python\n{name}({parameters})\n```\n\n{inspect.getdoc(type(entry))}"


def ordered(pages: list[str], index: str) -> list[Any]:
    """Put pages into the sections of the index, in the order of its links."""
    sections: dict[str, list[str]] = {START: ["index.md"]}
    title = START
    for line in index.splitlines():
        if heading := HEADING.match(line):
            title = heading["title"]
        for link in LINK.finditer(line):
            page = page_of(link["target"].partition("#")[0], "docs")
            if page in pages and not any(page in held for held in sections.values()):
                sections.setdefault(title, []).append(page)
    listed = {page for held in sections.values() for page in held}
    for page in pages:
        if page not in listed:
            folder = posixpath.dirname(page)
            homes = [name for name, held in sections.items() if folder and posixpath.dirname(held[0]) == folder]
            sections.setdefault(homes[0] if homes else REST, []).append(page)
    return [{name: held} for name, held in sections.items()]


def page_of(target: str, folder: str) -> str | None:
    """Say which page of the site a path means that is written in a folder of the repository; None if there is none."""
    path = posixpath.normpath(posixpath.join(folder, target))
    if path in GUESTS:
        return GUESTS[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def relinked(markdown: str, page: str) -> str:
    """Lead the links of a page to the site; those that leave it become text. Code stays as it is."""
    guest = next((source for source, name in GUESTS.items() if name == page), None)
    folder = "." if guest else posixpath.dirname(f"docs/{page}")

    def replaced(link: re.Match[str]) -> str:
        path, sharp, anchor = link["target"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        aim = page_of(path, folder)
        if aim is None:
            return link["text"]
        return (
            f"{link['image']}[{link['text']}]({posixpath.relpath(aim, posixpath.dirname(page) or '.')}{sharp}{anchor})"
        )

    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replaced, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(replaced, markdown[at:])])
