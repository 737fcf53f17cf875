"""A pytest plugin: the catalogues also hold what lies in the folders of `FEDLAS_ADDED`, one folder for each room.

`tests/test_howto.py` starts the contract tests with it. Of the losses only the added ones are there: the contract makes
hundreds of cases of each, and nobody would select the others.
"""

import os
from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    import fedlas
    from data import twins

    added = Path(os.environ["FEDLAS_ADDED"])
    for room in (fedlas.losses, fedlas.data, fedlas.posthoc):
        here = added / room.__name__.rpartition(".")[2]
        room.__path__.append(str(here))
        names = {path.stem for path in here.glob("*.py")}
        assert names <= set(room.CATALOG.entries)
        if room is fedlas.losses:
            room.CATALOG.entries = {name: cls for name, cls in room.CATALOG.entries.items() if name in names}
    for path in (added / "twins").glob("*.py"):
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(twins))
        twins.TWINS[path.stem] = vars(twins)[path.stem]
