"""The notebooks run from top to bottom and contain no outputs."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells_of(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


@pytest.fixture
def run_notebook(monkeypatch, tmp_path):
    """Run all cells in one module; expressions at the end of a cell are evaluated but not displayed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(name: str) -> ModuleType:
        for number, cell in enumerate(cells_of(EXAMPLES / name)):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), vars(module))
        return module

    return run


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_has_no_outputs_or_execution_counts(notebook):
    cells = cells_of(notebook)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_notebook_for_predictions_runs_from_top_to_bottom(run_notebook):
    module = run_notebook("predictions.ipynb")
    assert module.report.after["temperature"]["ece"] < module.report["ece"]
    assert "<!doctype html>" in module.page.read_text(encoding="utf-8")


@pytest.mark.campaign
def test_the_notebook_for_training_runs_from_top_to_bottom(run_notebook, capsys):
    module = run_notebook("calibration.ipynb")
    ce_report, fedlas_report = module.reports["ce"], module.reports["fedlas_ls"]
    assert min(ce_report["accuracy"], fedlas_report["accuracy"]) > 0.8
    assert ce_report["signed_ece"].interval.low > 0, "the model is not over-confident: train on fewer images"
    assert ce_report.after["temperature"]["nll"] < ce_report["nll"]
    assert (module.folder / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert "<!doctype html>" in module.page.read_text(encoding="utf-8")
    stdout = capsys.readouterr().out
    assert "over-confident" in stdout


@pytest.mark.parametrize("text", ["http://", "https://", "!pip", "%"])
def test_notebook_uses_no_network_and_no_magic_commands(text):
    cells = [cell for notebook in NOTEBOOKS for cell in cells_of(notebook)]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    assert not any(line.startswith(text) if text in "!pip%" else text in line for line in lines)
