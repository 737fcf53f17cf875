"""Campaign on numbers: fuzz every loss and every metric with unusual inputs.

    python tests/faults/fuzz_numbers.py                          all targets, 100,000 executions each
    python tests/faults/fuzz_numbers.py ece nll --executions 5000

Each target runs in a separate process with atheris (the extra `fuzz`), which is guided by the branches of `fedlas` that
an input reaches, or without atheris with random bytes. The first finding ends a target: its input is printed and can be
called again with `target(bytes.fromhex(...))`. The checks are in `number_cases.py` and `more_cases.py`.
"""

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAX_BYTES = 160  # bytes of an input


def fuzz(name: str, executions: int, seconds: float) -> None:
    """Fuzz one target in this process, which ends with a non-zero exit code at a finding."""
    guided = importlib.util.find_spec("atheris") is not None
    if guided:
        import atheris

        with atheris.instrument_imports(include=["fedlas"]):
            import fedlas.losses
            import fedlas.metrics
            import fedlas.ood  # noqa: F401 (imported so that its branches are followed)
    sys.path.insert(0, str(HERE))
    import more_cases

    target = next(item for item in more_cases.targets() if item.name == name)
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds

    def execute(content: bytes) -> None:
        try:
            counts[target(content)] += 1
        except Exception:
            print(f"{name}: a finding in execution {counts.total() + 1:,}, from {content.hex()}", flush=True)
            raise
        if counts.total() == executions or time.monotonic() > deadline:
            print(f"{name}: {counts.total():,} executions, {dict(counts)}", flush=True)
            os._exit(0)  # libFuzzer has no other way to stop after some seconds

    if guided:
        atheris.Setup([sys.argv[0], "-seed=1", f"-max_len={MAX_BYTES}", "-len_control=0", "-verbosity=0"], execute)
        atheris.Fuzz()
    rng = random.Random(1)
    while True:
        execute(rng.randbytes(rng.choice((8, 40, 120, MAX_BYTES))))


def main() -> int:
    """Fuzz the targets one after the other; return a non-zero exit status after a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="*", help="names; all without")
    parser.add_argument("--executions", type=int, default=100_000, help="of each target")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for each target, at most")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    arguments = parser.parse_args()
    if arguments.here:
        fuzz(arguments.target[0], arguments.executions, arguments.seconds)
    sys.path.insert(0, str(HERE))
    import more_cases

    limits = ["--executions", str(arguments.executions), "--seconds", str(arguments.seconds)]
    names = arguments.target or [target.name for target in more_cases.targets()]
    codes = [
        subprocess.run([sys.executable, __file__, name, "--here", *limits], check=False).returncode for name in names
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
