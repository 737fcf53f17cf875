"""Pytest plugin: add the entries in the folder `FEDLAS_ADDED` (subfolders losses, data, posthoc) to the catalogues.

`tests/test_howto.py` runs the contract tests with it. The catalogue of losses then contains only the added ones,
because the contract tests have hundreds of cases for each loss.
"""

import os
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    import fedlas
    from data import synthetic

    added = Path(os.environ["FEDLAS_ADDED"])
    for package in (fedlas.losses, fedlas.data, fedlas.posthoc):
        folder = added / package.__name__.rpartition(".")[2]
        package.__path__.append(str(folder))
        names = {path.stem for path in folder.glob("*.py")}
        assert names <= set(package.CATALOG.entries)
        if package is fedlas.losses:
            package.CATALOG.entries = {name: cls for name, cls in package.CATALOG.entries.items() if name in names}
    for path in (added / "synthetic").glob("*.py"):
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(synthetic))
        synthetic.WRITERS[path.stem] = vars(synthetic)[path.stem]
