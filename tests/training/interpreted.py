"""Run a comparison in Triton's interpreter, in a separate process, because Triton selects it on import."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run_interpreted(case: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run a script of this folder on the CPU and parse its last line; test processes share the result."""
    own_folder = tmp_path_factory.getbasetemp()
    shared_folder = own_folder.parent if "PYTEST_XDIST_WORKER" in os.environ else own_folder
    with (shared_folder / f"{case}.json").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the first runs it, the others wait and read
        file.seek(0)
        line = file.read()
        if not line:
            line = _last_line_of(case)
            file.write(line)
    result: dict[str, Any] = json.loads(line)
    return result


def _last_line_of(case: str) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name(case)), "cpu"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]
