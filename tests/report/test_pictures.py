"""The figures of the documentation are small and up to date."""

import importlib.util
import json
import re
import shutil
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def script():
    loader = SourceFileLoader("pictures_script", str(ROOT / "scripts" / "pictures"))
    spec = importlib.util.spec_from_loader("pictures_script", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.campaign
def test_pictures_of_the_docs_are_up_to_date(script):
    assert script.check(PICTURES) == []


def test_outdated_or_missing_pictures_are_detected(script, tmp_path, monkeypatch):
    copy = tmp_path / "pictures"
    shutil.copytree(PICTURES, copy)
    (copy / "confidence.svg").unlink()
    numbers = json.loads((copy / "over_under.json").read_text())
    numbers["data"][0]["over"] += 0.01
    (copy / "over_under.json").write_text(json.dumps(numbers))

    def copy_pictures(folder):
        return [Path(shutil.copy(path, folder)) for path in sorted(PICTURES.iterdir())]

    monkeypatch.setattr(script, "draw", copy_pictures)
    differences = script.check(copy)
    assert "confidence.svg" in differences[0]
    assert re.match(r"over_under\.json data 0 over .*0\.12", differences[1])
    assert len(differences) == 2


def test_pictures_are_small_and_every_one_is_shown():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names_by_page = (re.findall(r"pictures/([\w.]+\.svg)\)", page.read_text(encoding="utf-8")) for page in pages)
    shown_names = {name for names in names_by_page for name in names}
    assert shown_names == {path.name for path in PICTURES.glob("*.svg")}
    assert all(path.stat().st_size < 160_000 for path in PICTURES.iterdir())
