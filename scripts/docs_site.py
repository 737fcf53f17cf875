"""Hooks of mkdocs: the order of pages, README.md and CONTRIBUTING.md as pages, and links that leave docs/.

Pages are ordered like the links in docs/index.md, under its headings. A page that is not linked there comes at the end
of the section with the pages of its folder, or of a last section.

A link to another file of the repository becomes plain text, because the site is read on its own; if the file does not
exist, the build warns, which is an error with `--strict`.
"""

import inspect
import logging
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

ROOT = Path(__file__).parents[1]
REPOSITORY_PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md"}  # file: page of the site
START, REST = "Start", "More"
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^## (?P<title>.+)$")
log = logging.getLogger("mkdocs.hooks")
API = re.compile(r"^<!-- api: (?P<package>[\w.]+) -->$", re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name anchors as GitHub does, so that links to them work in both places; order the pages."""
    sys.path.insert(0, str(ROOT / "src"))  # of the API reference; mkdocs undoes it while it imports hooks
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    config.nav = ordered([*pages, *REPOSITORY_PAGES.values()], (docs / "index.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files are not in docs/."""
    for source, page in REPOSITORY_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page for the site, and add the API reference."""
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
            if page in pages and not any(page in listed_pages for listed_pages in sections.values()):
                sections.setdefault(title, []).append(page)
    listed = {page for listed_pages in sections.values() for page in listed_pages}
    for page in pages:
        if page not in listed:
            folder = posixpath.dirname(page)
            homes = [
                name
                for name, listed_pages in sections.items()
                if folder and posixpath.dirname(listed_pages[0]) == folder
            ]
            sections.setdefault(homes[0] if homes else REST, []).append(page)
    return [{name: listed_pages} for name, listed_pages in sections.items()]


def page_of(target: str, folder: str) -> str | None:
    """Return the page of the site that a path, relative to a folder of the repository, refers to, or None."""
    path = posixpath.normpath(posixpath.join(folder, target))
    if path in REPOSITORY_PAGES:
        return REPOSITORY_PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def relinked(markdown: str, page: str) -> str:
    """Point the links of a page to pages of the site; other links become text. Code is not changed."""
    file = next((source for source, name in REPOSITORY_PAGES.items() if name == page), None)
    folder = "." if file else posixpath.dirname(f"docs/{page}")

    def replaced(link: re.Match[str]) -> str:
        path, sharp, anchor = link["target"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        aim = page_of(path, folder)
        if aim is None:
            if not (ROOT / folder / path).exists():
                log.warning("%s: the link %s leads to no file of the repository", page, link["target"])
            return link["text"]
        return (
            f"{link['image']}[{link['text']}]({posixpath.relpath(aim, posixpath.dirname(page) or '.')}{sharp}{anchor})"
        )

    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replaced, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(replaced, markdown[at:])])
