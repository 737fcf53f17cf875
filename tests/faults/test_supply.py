"""What fedlas stands on is listed, and the release check notices what it looks for."""

import http.server
import importlib.machinery
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from serving import serving

ROOT = Path(__file__).parents[2]


def script(name: str):
    """Load a script as a module; some have no ending."""
    loader = importlib.machinery.SourceFileLoader(f"script_{Path(name).stem}", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(ROOT / "scripts"))  # as where it is run: one script may import another
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
        sys.path.remove(str(ROOT / "scripts"))
    return module


supply, release = script("supply.py"), script("release_check")


def test_the_page_of_licences_has_every_pinned_version_and_no_other():
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([0-9]\S*) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert {name: version for name, version, _, _ in rows} == supply.pins()
    direct = {supply.canonicalize_name(one.name) for held in supply.groups(supply.project()).values() for one in held}
    assert direct <= {name for name, _, _, _ in rows}
    assert {name for name, _, licence, _ in rows if licence == "not stated"} <= {"cuda-toolkit"}
    assert {name for name, _, _, asking in rows if asking == "build"} >= {"pip", "hatchling", "editables"}


def test_a_pinned_package_that_is_installed_nowhere_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(supply, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / "constraints.txt").write_text("Nobody_Has.This==1.5\natheris==3.0.0\n")
    monkeypatch.setattr(supply, "listed", cache(supply.listed))
    found = supply.listed()
    assert (found["nobody-has-this"].version, found["nobody-has-this"].licence) == ("1.5", "not stated")
    assert found["atheris"].groups == {"fuzz"}
    (tmp_path / "docs").mkdir()
    supply.licences()
    page = (tmp_path / "docs" / "licences.md").read_text()
    assert "| nobody-has-this | 1.5 | not stated | - |\n" in page
    supply.sbom()
    made = json.loads((tmp_path / "build" / "fedlas.cdx.json").read_text())
    assert "pkg:pypi/nobody-has-this@1.5" in {one["bom-ref"] for one in made["components"]}


def test_the_table_of_licences_holds_pinned_packages_alone():
    assert set(supply.ELSEWHERE) <= set(supply.pins())


def test_versions_are_written_down_with_those_of_tools_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(supply, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling>=1.27"]\n'
        '[project]\ndependencies = ["torch>=2.6"]\n'
        "optional-dependencies.fuzz = [\"atheris>=3; python_version < '9'\"]\n"
    )
    asked = []

    def pip(*words):
        asked.append(words)
        if words[0] == "freeze":
            return "torch==2.6.0+cu124\nPip==26.3\nsetuptools==84\nx @ file:///home/me/x\n-e /home/me/y\nast_s==1\n"
        found = [("hatchling", "1.33"), ("Editables", "0.6"), ("atheris", "3.0"), ("torch", "9"), ("tomlkit", "0.15")]
        return json.dumps({"install": [{"metadata": {"name": one, "version": version}} for one, version in found]})

    monkeypatch.setattr(supply, "pip", pip)
    assert supply.constraints() == 0
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    assert lines[1:] == [
        *("ast_s==1", "atheris==3.0", "Editables==0.6", "hatchling==1.33"),
        *("Pip==26.3", "setuptools==84", "tomlkit==0.15", "torch==2.6.0"),
    ]
    assert [word.partition(">=")[0] for word in asked[1][-3:]] == ["atheris", "editables", "hatchling"]
    before = (tmp_path / "constraints.txt").read_bytes()

    def offline(*words):
        return pip(*words) if words[0] == "freeze" else supply.subprocess.run(["false"], check=True)

    monkeypatch.setattr(supply, "pip", offline)
    assert supply.constraints() == 1
    assert (tmp_path / "constraints.txt").read_bytes() == before


def test_licences_are_found_wherever_a_package_states_them():
    from email.message import Message

    def of(**fields: str) -> str:
        message = Message()
        for name, value in fields.items():
            message[name.replace("_", "-")] = value
        return supply.licence_of(message)

    assert of(License_Expression="MIT", License="long text") == "MIT"
    assert of(Classifier="License :: OSI Approved :: BSD License") == "BSD License"
    assert of(License="Apache 2.0\nand more") == "Apache 2.0"
    assert of() == "not stated"


def test_the_bill_of_materials_is_whole(tmp_path, monkeypatch):
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(supply, "ROOT", tmp_path)
    monkeypatch.setattr(supply, "listed", cache(supply.listed))
    supply.sbom()
    made = json.loads((tmp_path / "build" / "fedlas.cdx.json").read_text())
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    known = [one["bom-ref"] for one in made["components"]]
    assert len(set(known)) == len(known) > 20
    assert {"torch", "numpy", "jaxtyping"} <= {one["name"] for one in made["components"] if one["scope"] == "required"}
    assert set(supply.pins()) <= {one["name"] for one in made["components"]}
    refs = {made["metadata"]["component"]["bom-ref"], *known}
    assert all({edge["ref"], *edge["dependsOn"]} <= refs for edge in made["dependencies"])
    again = (tmp_path / "build" / "fedlas.cdx.json").read_bytes()
    supply.sbom()
    assert (tmp_path / "build" / "fedlas.cdx.json").read_bytes() == again


class Advisories(http.server.BaseHTTPRequestHandler):
    """A source of made-up advisories, by package and version."""

    def do_POST(self):
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        self.server.asked = [(one["package"]["name"], one["version"], one["package"]["ecosystem"]) for one in queries]
        reply = self.server.reply
        if reply is None:
            found = [self.server.known.get((name, version)) for name, version, _ in self.server.asked]
            reply = json.dumps(
                {"results": [{} if one is None else {"vulns": [{"id": one, "modified": "2026"}]} for one in found]}
            ).encode()
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *words):
        pass


@pytest.fixture
def source():
    with serving(Advisories, known={}, asked=[], reply=None, status=200) as made:
        yield made


def audited(address: str) -> subprocess.CompletedProcess:
    """Run the audit as `make audit` does, with another source of advisories."""
    surroundings = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "supply.py"), "audit"],
        env=surroundings | {"ADVISORIES": address, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_audit_names_what_is_known_against_a_pinned_version(source):
    version = supply.pins()["jinja2"]
    source.known = {("jinja2", version): "MADE-UP-2026-0001", ("jinja2", "0.1"): "MADE-UP-OF-ANOTHER-VERSION"}
    ran = audited(f"{source.url}/v1/querybatch")
    assert ran.returncode == 1
    named, summary = ran.stdout.splitlines()
    assert named == f"jinja2 {version}: MADE-UP-2026-0001"
    assert re.search(rf"\b{len(supply.pins())}\b.*\b1\b", summary)
    assert source.asked == [(name, pinned, "PyPI") for name, pinned in supply.pins().items()]


def test_an_audit_that_finds_nothing_says_how_much_it_asked_about(source, monkeypatch, capsys):
    monkeypatch.setattr(supply, "ADVISORIES", f"{source.url}/")
    assert supply.audit() == 0
    assert re.search(rf"\b{len(supply.pins())}\b.*\b0\b", capsys.readouterr().out)


REPLIES = [
    *((500, b""), (404, b"{}"), (200, b"<html>please log in</html>"), (200, b"[]"), (200, b"{}")),
    *((200, b'{"results": [{}]}'), (200, b'{"results": null}'), (200, b'{"results": [7]}')),
]


@pytest.mark.parametrize(("status", "reply"), REPLIES)
def test_an_audit_without_an_answer_for_every_version_is_none(source, status, reply, monkeypatch, capsys):
    source.status, source.reply = status, reply
    monkeypatch.setattr(supply, "ADVISORIES", f"{source.url}/")
    assert supply.audit() == 3
    said = capsys.readouterr()
    assert f"{len(supply.pins())}" in said.err
    assert said.out == ""  # above all not: 0 advisories


def test_an_audit_without_a_source_fails(monkeypatch, capsys):
    monkeypatch.setattr(supply, "ADVISORIES", "http://127.0.0.1:9/none")
    assert supply.audit() == 3
    assert capsys.readouterr().out == ""


NAMES = ["src/fedlas/__init__.py", "src/fedlas/py.typed", "src/fedlas/experiments/paper.json", "tests/test_x.py"]
NAMES += [f"src/fedlas/report/page/{name}" for name in ("main.js", "page.css", "page.html.jinja")]
NAMES += ["pyproject.toml", "LICENSE", "README.md"]
PROJECT = {
    "project": {
        "name": "fedlas",
        "version": "1.2",
        "requires-python": ">=3.11",
        "license": "MIT",
        "dependencies": ["torch>=2.6", "numpy >=1.26"],
        "optional-dependencies": {
            "train": ["timm>=1.0.3"],
            "fuzz": ["atheris>=3; sys_platform == 'linux' or python_version < '3.14'"],
            "all": ["fedlas[train]"],
        },
    }
}
METADATA = """Metadata-Version: 2.4
Name: fedlas
Version: 1.2
License-Expression: MIT
Requires-Python: >=3.11
Requires-Dist: numpy>=1.26
Requires-Dist: torch>=2.6
Provides-Extra: all
Requires-Dist: timm>=1.0.3; extra == 'all'
Provides-Extra: fuzz
Requires-Dist: atheris>=3; (sys_platform == 'linux' or python_version < '3.14') and extra == 'fuzz'
Provides-Extra: train
Requires-Dist: timm>=1.0.3; extra == 'train'

The words of the README, such as
Version: 9
"""
WRONG = [
    ("Version: 1.2\n", "Version: 1.1\n", ("Version", "1.2", "1.1")),
    ("Name: fedlas", "Name: fedlass", ("Name", "fedlass")),
    ("Requires-Python: >=3.11\n", "", ("Requires-Python", ">=3.11")),
    ("Expression: MIT", "Expression: GPL-3.0-only", ("License-Expression", "GPL-3.0-only")),
    ("Requires-Dist: torch>=2.6\n", "", ("Requires-Dist", "torch>=2.6")),
    ("torch>=2.6", "torch>=2.5", ("Requires-Dist", "torch>=2.5")),
    ("torch>=2.6", "torch>=2.6\nRequires-Dist: left-pad", ("Requires-Dist", "left-pad")),
    ("Provides-Extra: all\n", "", ("Provides-Extra", "all")),
    ("timm>=1.0.3; extra == 'all'", "timm>=1.0.3; extra == 'fuzz'", ("Requires-Dist", 'timm>=1.0.3; extra == "all"')),
    ("'linux'", "'darwin'", ("Requires-Dist", "atheris>=3; ")),
]


@pytest.fixture
def tree(tmp_path):
    """The files of a small project, each with content of its own."""
    for name in NAMES:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(f"this is {name}\n")
    return tmp_path / "tree"


def in_wheel(tree: Path) -> dict[str, str]:
    """What belongs into a wheel of it."""
    info = "fedlas-1.2.dist-info"
    own = {name.removeprefix("src/"): (tree / name).read_text() for name in NAMES if name.startswith("src/")}
    about = {"METADATA": METADATA, "RECORD": "", "entry_points.txt": "", "licenses/LICENSE": ""}
    about["WHEEL"] = f"Wheel-Version: 1.0\nGenerator: hatchling {supply.pins()['hatchling']}\n"
    return own | {f"{info}/{name}": text for name, text in about.items()}


def in_sdist(tree: Path) -> dict[str, str]:
    """What belongs into an sdist of it."""
    return {f"fedlas-1.2/{name}": (tree / name).read_text() for name in NAMES} | {"fedlas-1.2/PKG-INFO": METADATA}


def check_wheel(tree: Path, content: dict[str, str], name: str = "fedlas-1.2-py3-none-any.whl") -> str:
    with zipfile.ZipFile(tree.parent / name, "w") as packed:
        for one, text in content.items():
            packed.writestr(one, text)
    return release.check_wheel(tree.parent / name, set(NAMES), PROJECT, tree)


def check_sdist(tree: Path, content: dict[str, str], name: str = "fedlas-1.2.tar.gz", **kinds: bytes) -> str:
    with tarfile.open(tree.parent / name, "w:gz") as packed:
        for one, text in content.items():
            about = tarfile.TarInfo(one)
            about.type, about.linkname = kinds.get(Path(one).name, tarfile.REGTYPE), "LICENSE"
            about.size = len(text) if about.isfile() else 0
            packed.addfile(about, io.BytesIO(text.encode()))
    return release.check_sdist(tree.parent / name, set(NAMES), PROJECT, tree)


def refused(*facts: str):
    return pytest.raises(SystemExit, match=f": fedlas-.*{'.*'.join(map(re.escape, facts))}")


def test_a_whole_wheel_passes(tree):
    assert re.search("6 files.*5 requirements", check_wheel(tree, in_wheel(tree)))


def test_a_wheel_that_lacks_any_file_does_not_pass(tree):
    whole = in_wheel(tree)
    for name in whole:
        with refused(name):
            check_wheel(tree, {one: text for one, text in whole.items() if one != name})


OUTSIDE = ["../evil.py", "fedlas/../../evil.py", "/etc/evil", "C:/evil"]


@pytest.mark.parametrize(
    "name",
    ["fedlas/notes.txt", "tests/x.py", "fedlas/x/x.pyc", "fedlas-1.1.dist-info/METADATA",
     "fedlas-1.2.dist-info/licenses/ours", *OUTSIDE],
)  # fmt: skip
def test_a_wheel_with_a_stray_file_does_not_pass(tree, name):
    assert release.outside(name) == (name in OUTSIDE)
    with refused(name):
        check_wheel(tree, in_wheel(tree) | {name: "x"})


def test_a_wheel_with_another_content_name_or_maker_does_not_pass(tree):
    whole = in_wheel(tree)
    with refused("fedlas/py.typed", "src/"):
        check_wheel(tree, whole | {"fedlas/py.typed": "changed"})
    with refused("name", "fedlas-1.2"):
        check_wheel(tree, whole, "fedlas-1.3-py3-none-any.whl")
    with refused("Generator: hatchling"):
        check_wheel(tree, whole | {"fedlas-1.2.dist-info/WHEEL": "Generator: hatchling 0.1\n"})
    with zipfile.ZipFile(tree.parent / "fedlas-1.2-twice.whl", "w") as packed:
        for one, text in whole.items():
            packed.writestr(one, text)
        with pytest.warns(UserWarning, match="Duplicate name"):
            packed.writestr("fedlas/py.typed", whole["fedlas/py.typed"])
    with refused("fedlas/py.typed", "twice"):
        release.check_wheel(tree.parent / "fedlas-1.2-twice.whl", set(NAMES), PROJECT, tree)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("src/") and "__init__" not in name])
def test_what_the_package_cannot_do_without_must_be_tracked(tree, name):
    whole = in_wheel(tree)
    del whole[name.removeprefix("src/")]
    with zipfile.ZipFile(tree.parent / "fedlas-1.2-x.whl", "w") as packed:
        for one, text in whole.items():
            packed.writestr(one, text)
    with pytest.raises(SystemExit, match=rf"{name}|{re.escape(''.join(Path(name).suffixes))}"):
        release.check_wheel(tree.parent / "fedlas-1.2-x.whl", set(NAMES) - {name}, PROJECT, tree)


@pytest.mark.parametrize(("right", "wrong", "facts"), WRONG)
def test_archives_that_ask_for_something_else_do_not_pass(tree, right, wrong, facts):
    assert METADATA.count(right) == 1
    other = METADATA.replace(right, wrong)
    with refused(*facts):
        check_wheel(tree, in_wheel(tree) | {"fedlas-1.2.dist-info/METADATA": other})
    with refused(*facts):
        check_sdist(tree, in_sdist(tree) | {"fedlas-1.2/PKG-INFO": other})


def test_a_whole_sdist_passes(tree):
    assert "11 files" in check_sdist(tree, in_sdist(tree))


def test_an_sdist_that_lacks_any_file_does_not_pass(tree):
    whole = in_sdist(tree)
    for name in whole:
        with refused(name.removeprefix("fedlas-1.2/")):
            check_sdist(tree, {one: text for one, text in whole.items() if one != name})


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("fedlas-1.2/secrets.txt", ["secrets.txt"]),
        ("fedlas-1.2/src/fedlas/__pycache__/x.pyc", ["src/fedlas/__pycache__/x.pyc"]),
        ("fedlas-1.1/README.md", ["fedlas-1.1/README.md", "fedlas-1.2"]),
        ("README.md", ["README.md", "fedlas-1.2"]),
        *((one, [one]) for one in ("fedlas-1.2/../evil", "../evil", "/etc/evil")),
    ],
)
def test_an_sdist_with_a_stray_file_does_not_pass(tree, name, facts):
    with refused(*facts):
        check_sdist(tree, in_sdist(tree) | {name: "x"})


def test_an_sdist_with_a_link_another_content_or_name_does_not_pass(tree):
    whole = in_sdist(tree)
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
        with refused("py.typed"):
            check_sdist(tree, whole, **{"py.typed": kind})
    with refused("README.md"):
        check_sdist(tree, whole | {"fedlas-1.2/README.md": "changed"})
    with refused("fedlas-1.2.tar.gz"):
        check_sdist(tree, whole, "fedlas-1.3.tar.gz")


def test_the_real_requirements_can_be_compared():
    asked = release.asked_for(supply.project())
    assert {"torch>=2.6", 'timm>=1.0.3; extra == "train"', 'timm>=1.0.3; extra == "all"'} <= asked
    assert not any(one.startswith("fedlas") for one in asked)
    assert not any(one.endswith('extra == "all"') and one.startswith("atheris") for one in asked)


def test_an_environment_gets_what_is_asked_for_and_nothing_else(tmp_path):
    asked = release.requirements(["safetensors>=0.4", "jaxtyping; python_version > '3'", "pytest; extra == 'dev'"])
    assert {"safetensors", "jaxtyping", "wadler-lindig"} <= asked
    assert not {"pytest", "torch", "numpy"} & asked  # of safetensors, only its extras ask for the last two
    assert "numpy" in release.requirements(["safetensors[numpy]"])
    release.link(asked, tmp_path)
    there = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert {"safetensors", "jaxtyping"} <= there
    assert not {"pytest", "torch"} & there


def test_a_build_tool_that_is_not_pinned_ends_the_check():
    assert release.pin("hatchling") == supply.pins()["hatchling"]
    assert release.pins.__module__ == "supply"  # what a pin looks like is said once
    with pytest.raises(SystemExit, match="nothing-of-this-name"):
        release.pin("nothing-of-this-name")
