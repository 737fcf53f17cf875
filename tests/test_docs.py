"""The documentation: generated parts are up to date, and the site builds; mkdocs --strict checks the links."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def load_script(script: str) -> ModuleType:
    """Import a script, which may have no file extension."""
    name = Path(script).stem
    loader = SourceFileLoader(name, str(ROOT / "scripts" / script))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def prose(text: str) -> str:
    """Return the text without code, which may contain something like a link or a heading."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].replace("[", "").replace("]", ""), text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_docs_contain_no_latex_math(document):
    """Formulas are code or plain text, because rendering LaTeX needs a script from the network."""
    text = prose(document.read_text(encoding="utf-8"))
    assert not re.findall(r"(?<![\w$])\$[^$\n`]*[\\_^{][^$\n`]*\$", re.sub(r"`[^`\n]*`", "", text))


@pytest.mark.parametrize("all_pages", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_generated_parts_are_up_to_date(all_pages):
    """The pages with all tables of the ledger take most of the time."""
    script, comparison = load_script("pages"), Path("docs") / "paper_comparison.md"
    if not all_pages:
        script.reproduction_page = lambda _: (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
        script.FINDINGS, script.PARTLY = {}, [path for path in script.PARTLY if Path(path) != comparison]
    pages = script.pages()
    assert {path.relative_to(ROOT).as_posix() for path in pages} >= {"README.md", "docs/losses.md", "docs/reproduce.md"}
    assert (ROOT / comparison in pages) == all_pages
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date; run scripts/pages"


def test_runs_of_the_closed_loop_protocol_do_not_change_paired_comparisons():
    from fedlas.experiments.ledger import Ledger
    from fedlas.training import recipe_for

    script, ledger = load_script("pages"), Ledger(ROOT / "results")
    before, line = script._fingerprint(ledger), next(line for line in ledger.lines.values() if line.method == "ls")
    for protocol, changes in (("standard", False), ("fast", True)):
        recipe = recipe_for("cifar100", None, "ls", protocol=protocol, seed=9)
        ledger.lines[recipe.name] = replace(line, id=recipe.name, recipe=recipe, protocol=protocol)
        assert (script._fingerprint(ledger) != before) == changes


def test_losses_page_lists_every_loss():
    import fedlas

    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    for record in fedlas.list_losses():
        assert f"\n## {record.name}\n" in page
        assert record.citation in page
        assert f"[`{record.name}`](#{record.name}) | {record.summary} |" in page


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_slurm_script_starts_ray_on_every_node(nodes, tmp_path):
    text = (ROOT / "docs" / "cluster.md").read_text()
    (script,) = [code for code in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "#SBATCH" in code]
    logging_stubs = "\n".join(f'{name}() {{ echo {name} "$@" >> calls; }}' for name in ("srun", "fedlas"))
    other_stubs = "source() { :; }\nsleep() { wait; }\nscontrol() { printf 'first\\nsecond\\n'; }\n"
    environment = {"SLURM_JOB_NUM_NODES": str(nodes), "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NODELIST": "x"}
    command = ["bash", "-euc", f"{logging_stubs}\n{other_stubs}{script}"]
    subprocess.run(command, cwd=tmp_path, env={"PATH": os.environ["PATH"], **environment}, check=True)
    *started, last = (tmp_path / "calls").read_text().splitlines()
    node_counts = [int(number) for line in started for number in re.findall(r"--nodes=(\d+)", line)]
    assert node_counts == ([1] if nodes == 1 else [1, nodes - 1])
    assert last.startswith("fedlas reproduce")


def test_generated_parts_are_replaced_and_the_rest_is_unchanged():
    fill = load_script("pages").filled
    text = "a\n<!-- scripts/pages: x -->\nold\n<!-- end of x -->\nb\n<!-- scripts/pages: y -->\n<!-- end of y -->\n"
    replaced = fill(text, {"x": "new", "y": "more"})
    assert re.sub(r"<!--.*?-->|\s", "", replaced) == "anewbmore"
    assert fill(replaced, {"x": "new", "y": "more"}) == replaced
    with pytest.raises(KeyError):
        fill(text, {"x": "new"})


class Page(HTMLParser):
    """The URLs that a built page loads, and its paragraphs without code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.paragraphs: list[str] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        resources = {"stylesheet", "preload", "icon"}
        fetches = tag in {"script", "img", "iframe", "source"} or attributes.get("rel") in resources
        if fetches and (attributes.get("src") or attributes.get("href")):
            self.fetched.append(attributes.get("src") or attributes["href"])
        if tag == "p":
            self.paragraphs.append("")
        self.inside += [tag] if tag in {"p", "code"} else []

    def handle_endtag(self, tag):
        if tag in self.inside:
            del self.inside[len(self.inside) - 1 - self.inside[::-1].index(tag)]

    def handle_data(self, data):
        if self.inside and self.inside[-1] == "p":
            self.paragraphs[-1] += data


def build_site(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site. With --quiet, mkdocs would not count warnings, so --strict would have no effect."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=root,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = build_site(ROOT, folder)
    assert build.returncode == 0, build.stdout
    assert "WARNING" not in build.stdout
    return folder


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        ("[a](other.md#gone)", 1),
        pytest.param("[a](other.md#there)", 0, marks=pytest.mark.campaign),
        pytest.param("[a](gone.md)", 1, marks=pytest.mark.campaign),
        pytest.param("[a](../scripts/gone.py)", 1, marks=pytest.mark.campaign),
        pytest.param("[a](../scripts/docs_site.py)", 0, marks=pytest.mark.campaign),
    ],
)
def test_broken_link_fails_the_docs_build(tmp_path, text, exit_code):
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md"):
        (tmp_path / name).write_text(
            (ROOT / name).read_text(encoding="utf-8") if name == "mkdocs.yml" else "# A page\n"
        )
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "docs_site.py").symlink_to(ROOT / "scripts" / "docs_site.py")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{text}\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## There\n")
    build = build_site(tmp_path, tmp_path / "site")
    assert build.returncode == exit_code, build.stdout


def test_every_docs_page_is_built_and_in_the_menu(site):
    menu = (site / "index.html").read_text(encoding="utf-8")
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert len(pages) > 15
    for page in [*pages, "readme.html", "contributing.html"]:
        assert (site / page).exists()
        assert f'href="{page}"' in menu


def test_api_reference_contains_every_public_name(site):
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md")}
    packages = {name: path for path, text in pages.items() for name in re.findall(r"<!-- api: ([\w.]+) -->", text)}
    assert {"fedlas", "fedlas.losses", "fedlas.metrics", "fedlas.posthoc", "fedlas.ood"} <= set(packages)
    for package, path in packages.items():
        built_page = (site / "reference" / path.with_suffix(".html").name).read_text(encoding="utf-8")
        names = load_script("docs_site.py").public_names(package)
        assert [name for name in names if f'id="{package}.{name}"' not in built_page] == [], package


def test_manually_documented_name_is_not_repeated_in_the_reference():
    text = "::: fedlas.ood.auroc\n\n<!-- api: fedlas.ood -->\n"
    assert load_script("docs_site.py").with_api(text).count("::: fedlas.ood.auroc\n") == 1


def test_docs_site_has_no_external_resources(site):
    for path in site.rglob("*.html"):
        fetched = Page(path.read_text(encoding="utf-8")).fetched
        assert fetched
        assert not [url for url in fetched if re.match(r"(https?:)?//", url)], path
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()[^)]{0,9}https?:", styles)


def test_docs_site_renders_all_lists_and_tables(site):
    """mkdocs needs four spaces of indentation where GitHub accepts two, and otherwise shows lists as text."""
    for path in site.rglob("*.html"):
        unrendered = [
            p
            for p in Page(path.read_text(encoding="utf-8")).paragraphs
            if re.search(r"^\s*([-*|]|\d\.) ", p, re.MULTILINE)
        ]
        assert unrendered == [], path
    assert Page("<p>Text:\n- one\n- <code>two</code></p>").paragraphs == ["Text:\n- one\n- "]


def test_menu_follows_the_index_and_includes_every_page():
    site = load_script("docs_site.py")
    index = "# T\n[z](z.md)\n## Use\n- [b](b.md#x), [r](../README.md)\n## How\n- [c](howto/c.md)\n"
    nav = site.ordered(["a.md", "b.md", "howto/c.md", "howto/d.md", "index.md", "readme.md", "z.md"], index)
    assert nav == [
        {"Start": ["index.md", "z.md"]},
        {"Use": ["b.md", "readme.md"]},
        {"How": ["howto/c.md", "howto/d.md"]},
        {"More": ["a.md"]},
    ]


def test_links_out_of_docs_are_relinked_or_become_text():
    relinked = load_script("docs_site.py").relinked
    assert relinked("[r](../../README.md#use) [s](../../src/x.py)", "howto/a.md") == "[r](../readme.md#use) s"
    assert relinked("[m](docs/metrics.md#files) ![p](docs/demo/p.png)", "readme.md") == (
        "[m](metrics.md#files) ![p](demo/p.png)"
    )
    code = "```text\n[s](../src/x.py)\n```"
    assert (
        relinked(f"[s](../src/x.py) [w](https://example.org)\n{code}", "a.md") == f"s [w](https://example.org)\n{code}"
    )
