"""The notebook runs from top to bottom, and holds nothing that another run would change."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "calibration.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_holds_no_outputs_and_no_counts():
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_it_runs_from_top_to_bottom(monkeypatch, tmp_path, capsys):
    """All cells in one module; what a notebook shows at the end of a cell is computed and not shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), vars(module))
    ce, ours = module.reports["ce"], module.reports["fedlas_ls"]
    assert min(ce["accuracy"], ours["accuracy"]) > 0.8
    assert ce["signed_ece"].interval.low > 0, "the model is not over-confident: train on fewer images"
    assert ce.after["temperature"]["nll"] < ce["nll"]
    assert (module.folder / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert "<!doctype html>" in module.page.read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert "over-confident" in said


@pytest.mark.parametrize("word", ["http://", "https://", "!pip", "%"])
def test_it_needs_no_network_and_no_magic(word):
    lines = [line for cell in CELLS if cell["cell_type"] == "code" for line in cell["source"]]
    assert not any(line.startswith(word) if word in "!pip%" else word in line for line in lines)
