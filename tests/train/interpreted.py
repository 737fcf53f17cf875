"""Runs a comparison in Triton's interpreter, in a process of its own: Triton decides on import if it interprets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def found_by(case: str) -> dict[str, Any]:
    """Run a file of this folder on the CPU, and give what its last line says."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(Path(__file__).with_name(case)), "cpu"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
