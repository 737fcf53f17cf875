"""Measure time and peak memory of `fedlas evaluate` on large prediction files, each in its own process.

    python benchmarks/files.py --rows 1000000 --classes 100

All files hold the same predictions. Memory is the peak resident size of the process, also given as the number of copies
of the table in the type in which the file is read. Needs Linux.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fedlas.io import WRITERS, write_predictions
from fedlas.predictions import Predictions

FLOAT64 = {".csv", ".jsonl"}  # numbers in text are read as float64


def main() -> None:
    """Measure each requested file format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--kinds", default="safetensors,npz,parquet,csv")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kinds = [f".{kind}" for kind in arguments.kinds.split(",")]
    for kind in kinds:
        if kind not in WRITERS:
            parser.error(f"--kinds holds {kind}; known: {', '.join(WRITERS)}")
    measurements = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder) / f"p{kind}"
            write_predictions(draw_predictions(arguments.rows, arguments.classes), path)
            idle, peak, seconds = measure(path)
            size, copy = (
                path.stat().st_size / 1e6,
                arguments.rows * arguments.classes * (8 if kind in FLOAT64 else 4) / 1e6,
            )
            measurements.append({"kind": kind, "file_mb": size, "idle_mb": idle, "peak_mb": peak, "seconds": seconds})
            print(f"{kind:13} file {size:7.0f} MB  {seconds:6.1f} s  peak {peak:6.0f} MB", end="")
            print(f"  ({(peak - idle) / copy:.1f} copies above {idle:.0f} MB)", flush=True)
            path.unlink()
    if arguments.json:
        arguments.json.write_text(json.dumps(measurements, indent=1))


def draw_predictions(rows: int, classes: int) -> Predictions:
    """Draw predictions whose best temperature is 0.5."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator)
    labels = torch.multinomial((2 * logits).softmax(1), 1, generator=generator)[:, 0]
    return Predictions(4 * logits, labels)


def measure(path: Path) -> tuple[float, float, float]:
    """Return the memory of the command in MB for a hundred samples and for the file, and its seconds for the file."""
    small = path.with_name(f"small{path.suffix}")
    write_predictions(draw_predictions(100, 10), small)
    idle, _ = peak_and_seconds(small)
    peak, seconds = peak_and_seconds(path)
    return idle, peak, seconds


def peak_and_seconds(path: Path) -> tuple[float, float]:
    """Run `fedlas evaluate` in a new process; return its peak resident size in MB, and its seconds."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom fedlas.cli import app\n"
        f"try:\n    app(['evaluate', {str(path)!r}])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        # Not ru_maxrss, which starts at the memory of the parent process.
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stderr.split()[-1]) / 1e3, time.perf_counter() - start


if __name__ == "__main__":
    main()
