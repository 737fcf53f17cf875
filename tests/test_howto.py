"""The example file of each how-to page passes the contract tests of its package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_readme import blocks

ROOT = Path(__file__).parents[1]
PAGES = {
    "losses/poly1.py": "add_a_loss.md",
    "data/kmnist.py": "add_a_data_set.md",
    "posthoc/bcts.py": "add_a_calibrator.md",
}
CONTRACTS = ["data/test_data_contract.py", "posthoc/test_contract_calibrators.py"]
CONTRACTS += [f"contract/test_contract_{what}.py" for what in ("documents", "errors", "labels", "numbers", "state")]
# Expensive imports: compiler, data loaders
EXPENSIVE_TESTS = ("both_ways_to_a_batch", "refused_batch", "index_of_the_data_set")


def python_of(page: str) -> list[str]:
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    return [block.code for block in blocks(text) if block.language == "python"]


@pytest.mark.parametrize(("file", "page"), PAGES.items(), ids=PAGES.values())
def test_howto_page_names_the_file_of_its_example(file, page):
    text = (ROOT / "docs" / "howto" / page).read_text(encoding="utf-8")
    assert f"`src/fedlas/{file}`" in text
    assert f'name = "{Path(file).stem}"' in python_of(page)[0]


@pytest.mark.campaign
def test_howto_examples_pass_the_contract_tests(tmp_path):
    for file, page in PAGES.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(python_of(page)[0], encoding="utf-8")
    (synthetic_data_code,) = (code for code in python_of("add_a_data_set.md") if "def kmnist(" in code)
    (tmp_path / "synthetic").mkdir()
    (tmp_path / "synthetic" / "kmnist.py").write_text(synthetic_data_code, encoding="utf-8")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n0", "-p", "added_entries", "-p", "no:cacheprovider"),
            *("-k", f"({' or '.join(Path(file).stem for file in PAGES)}) and not {' and not '.join(EXPENSIVE_TESTS)}"),
            *(f"tests/{file}" for file in CONTRACTS),
        ],
        cwd=ROOT,
        env=os.environ | {"FEDLAS_ADDED": str(tmp_path), "PYTHONPATH": paths, "FEDLAS_WHOLE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None
    assert int(passed[1]) > 60, "most contract tests were not selected"
