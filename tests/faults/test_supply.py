"""What fedlas stands on is listed, and the release check notices what it looks for."""

import importlib.machinery
import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str):
    """Load a script as a module; some have no ending."""
    loader = importlib.machinery.SourceFileLoader(f"script_{Path(name).stem}", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


supply, release = script("supply.py"), script("release_check")


def test_the_page_of_licences_has_every_direct_requirement():
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    for group, needed in supply.groups(supply.project()).items():
        for one in needed:
            assert f"| {supply.canonicalize_name(one.name)} | " in page, (group, one.name)
    assert "| torch | " in page


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
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    monkeypatch.setattr(supply, "ROOT", tmp_path)
    supply.sbom()
    made = json.loads((tmp_path / "build" / "fedlas.cdx.json").read_text())
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    known = [one["bom-ref"] for one in made["components"]]
    assert len(set(known)) == len(known) > 20
    assert {"torch", "numpy", "jaxtyping"} <= {one["name"] for one in made["components"] if one["scope"] == "required"}
    refs = {made["metadata"]["component"]["bom-ref"], *known}
    assert all({edge["ref"], *edge["dependsOn"]} <= refs for edge in made["dependencies"])
    again = (tmp_path / "build" / "fedlas.cdx.json").read_bytes()
    supply.sbom()
    assert (tmp_path / "build" / "fedlas.cdx.json").read_bytes() == again


def test_an_audit_that_nobody_answers_says_so(monkeypatch, capsys):
    monkeypatch.setattr(supply, "ADVISORIES", "http://127.0.0.1:9/none")
    assert supply.audit() == 3
    assert "no advisory source could be reached" in capsys.readouterr().out


FILES = {"src/fedlas/__init__.py", "src/fedlas/py.typed", "src/fedlas/experiments/paper.json"}
FILES |= {f"src/fedlas/report/page/page.{ending}" for ending in ("js", "css", "html.jinja")}


def wheel(folder: Path, names: set[str]) -> Path:
    with zipfile.ZipFile(folder / "x.whl", "w") as packed:
        for name in names:
            packed.writestr(name, "")
    return folder / "x.whl"


def test_a_whole_wheel_passes_and_any_other_does_not(tmp_path):
    whole = {name.removeprefix("src/") for name in FILES} | {"x.dist-info/METADATA", "x.dist-info/licenses/LICENSE"}
    assert "all of them and no other" in release.check_wheel(wheel(tmp_path, whole), FILES)
    for name in sorted(whole - {"x.dist-info/METADATA"}):
        with pytest.raises(SystemExit, match=r"missing|no .* of the page"):
            release.check_wheel(wheel(tmp_path, whole - {name}), FILES)
    for stray in ("fedlas/notes.txt", "tests/test_x.py", "fedlas/__pycache__/x.pyc"):
        with pytest.raises(SystemExit, match="does not belong there"):
            release.check_wheel(wheel(tmp_path, whole | {stray}), FILES)
