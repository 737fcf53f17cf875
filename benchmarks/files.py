"""Time and peak memory of `fedlas evaluate` on large files of predictions, each in a process of its own.

    python benchmarks/files.py --rows 1000000 --classes 100

Every kind of file holds the same predictions. Memory is the largest resident size that the process reached, and beside
it how many copies of the numbers that is, in the type that the file is read in. Needs Linux.
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

WIDE = {".csv", ".jsonl"}  # text becomes float64


def main() -> None:
    """Measure every kind of file that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--kinds", default="safetensors,npz,parquet,csv")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    kinds = [f".{kind}" for kind in asked.kinds.split(",")]
    for kind in kinds:
        if kind not in WRITERS:
            parser.error(f"--kinds holds {kind}; known: {', '.join(WRITERS)}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder) / f"p{kind}"
            write_predictions(drawn(asked.rows, asked.classes), path)
            idle, peak, seconds = measured(path)
            size, copy = path.stat().st_size / 1e6, asked.rows * asked.classes * (8 if kind in WIDE else 4) / 1e6
            found.append({"kind": kind, "file_mb": size, "idle_mb": idle, "peak_mb": peak, "seconds": seconds})
            print(f"{kind:13} file {size:7.0f} MB  {seconds:6.1f} s  peak {peak:6.0f} MB", end="")
            print(f"  ({(peak - idle) / copy:.1f} copies above {idle:.0f} MB)", flush=True)
            path.unlink()
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


def drawn(rows: int, classes: int) -> Predictions:
    """Draw predictions whose best temperature is 0.5."""
    make = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=make)
    labels = torch.multinomial((2 * logits).softmax(1), 1, generator=make)[:, 0]
    return Predictions(4 * logits, labels)


def measured(path: Path) -> tuple[float, float, float]:
    """Run the command: give its memory in MB for a hundred samples and for the file, and its seconds."""
    small = path.with_name(f"small{path.suffix}")
    write_predictions(drawn(100, 10), small)
    idle, _ = peak_and_seconds(small)
    peak, seconds = peak_and_seconds(path)
    return idle, peak, seconds


def peak_and_seconds(path: Path) -> tuple[float, float]:
    """Run `fedlas evaluate` in a process of its own; give its largest resident size in MB, and its seconds."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom fedlas.cli import app\n"
        f"try:\n    app(['evaluate', {str(path)!r}])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        # Not ru_maxrss: that begins with what the process which started this one held.
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stderr.split()[-1]) / 1e3, time.perf_counter() - start


if __name__ == "__main__":
    main()
