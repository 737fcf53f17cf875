"""Campaign on numbers: fuzz every loss and every metric with unusual inputs.

    python tests/faults/fuzz_numbers.py                       all targets, 100,000 executions each
    python tests/faults/fuzz_numbers.py --target ece nll      some of them
    python tests/faults/fuzz_numbers.py --executions 5000 --jobs 2
    python tests/faults/fuzz_numbers.py --resume              skip targets that finished without a finding

Each target runs in a separate process, first with hypothesis, then with atheris (the extra `fuzz`), which is guided by
the branches of `fedlas` that an input reaches. Without atheris, random bytes are used and the table notes it. Seeds are
fixed. A target stops after `--seconds`; the table has the actual number of executions. The checks are in
`number_cases.py` and `more_cases.py`.
"""

import argparse
import gc
import importlib.util
import json
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MAX_BYTES = 160  # bytes of an input
MAX_FINDINGS = 20  # recorded findings
# The memory of atheris grows with every execution of instrumented code and reaches 8 GB before these targets finish:
# they run in several processes one after the other, each with its own seed.
IN_PARTS = {"paired_bootstrap": 50_000}
WRITE_EVERY = 5_000  # executions between two writes of the results
SLOW = {"bootstrap", "paired_bootstrap", "smooth_curve", "smooth_ece", "kde_ece"}  # milliseconds each


class Counts:
    """Count the outcomes of executions and record the first findings."""

    def __init__(self, target: Any, limit: int, seconds: float) -> None:
        self.target, self.limit, self.deadline = target, limit, time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.findings: dict[str, str] = {}
        self.engines: Counter[str] = Counter()

    @property
    def executed(self) -> int:
        return sum(self.engines.values())

    @property
    def finished(self) -> bool:
        return self.executed >= self.limit or time.monotonic() > self.deadline

    def execute(self, content: bytes, engine: str) -> None:
        self.engines[engine] += 1
        try:
            self.counts[self.target(content)] += 1
        except Exception as error:  # raised by the library or by a check: both are findings
            self.counts["findings"] += 1
            if len(self.findings) < MAX_FINDINGS:
                self.findings.setdefault(str(error)[:60], f"{type(error).__name__}: {error} <- {content.hex()}")

    def record(self, seconds: float) -> dict[str, Any]:
        header = {"name": self.target.name, "kind": self.target.kind, "seconds": round(seconds, 1)}
        return header | {
            "engines": dict(self.engines),
            "counts": dict(self.counts),
            "findings": [*self.findings.values()],
        }


def by_hypothesis(counts: Counts, executions: int, number: int) -> None:
    """Execute a target with bytes drawn by hypothesis, which prefers small and repeated values."""
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    @seed(number)
    @settings(
        max_examples=executions,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(max_size=MAX_BYTES))
    def execute(content: bytes) -> None:
        if not counts.finished:
            counts.execute(content, "hypothesis")

    execute()


def by_chance(counts: Counts, number: int) -> None:
    """Execute a target with seeded random bytes."""
    rng = random.Random(number)
    while not counts.finished:
        counts.execute(rng.randbytes(rng.choice((8, 40, 120, MAX_BYTES))), "random")


def fuzz_target(name: str, executions: int, seconds: float, number: int, result: Path) -> None:
    """Fuzz one target in this process and write the results."""
    guided = importlib.util.find_spec("atheris") is not None
    if guided:
        import atheris

        with atheris.instrument_imports(include=["fedlas"]):
            import fedlas.losses
            import fedlas.metrics
            import fedlas.ood  # noqa: F401 (imported so that its branches are followed)
    sys.path.insert(0, str(HERE))
    import more_cases
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # exclude half a million objects created by imports,
    gc.set_threshold(50_000, 20, 100)  # and collect new objects rarely
    target = next(item for item in more_cases.targets() if item.name == name)
    start = time.monotonic()
    counts = Counts(target, executions, seconds)
    by_hypothesis(counts, max(1, executions // 50), number)
    if not guided:
        by_chance(counts, number)
        result.write_text(json.dumps(counts.record(time.monotonic() - start)))
        return

    def execute(content: bytes) -> None:
        counts.execute(content, "atheris")
        if counts.finished or counts.executed % WRITE_EVERY == 0:
            result.write_text(json.dumps(counts.record(time.monotonic() - start)))
        if counts.finished:
            sys.stdout.flush()
            atheris_done()

    def atheris_done() -> None:
        import os

        os._exit(0)  # libFuzzer has no other way to stop after some seconds

    options = [f"-seed={number}", f"-max_len={MAX_BYTES}", "-len_control=0", "-verbosity=0"]
    options.append("-rss_limit_mb=8192")
    atheris.Setup([sys.argv[0], *options], execute)
    atheris.Fuzz()


def names_of(kinds: list[str] | None) -> list[str]:
    sys.path.insert(0, str(HERE))
    import more_cases

    return [target.name for target in more_cases.targets() if not kinds or target.kind in kinds or target.name in kinds]


def fuzz_in_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fuzz a target, or read its earlier results."""
    result = arguments.out / f"numbers-{name}.json"
    if arguments.resume and result.exists():
        record = json.loads(result.read_text())
        if sum(record["engines"].values()) >= arguments.executions and not record["findings"]:
            return record
    result.unlink(missing_ok=True)
    total: dict[str, Any] | None = None
    part_size = IN_PARTS.get(name, arguments.executions)
    for part in range(-(-arguments.executions // part_size)):
        record = fuzz_part(name, arguments, part + 1, min(part_size, arguments.executions - part * part_size), result)
        total = record if total is None else merged(total, record)
        result.write_text(json.dumps(total))
        if record["findings"]:
            break
    assert total is not None
    return total


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Add the results of two parts of a target."""
    counted = {name: dict(Counter(first[name]) + Counter(second[name])) for name in ("engines", "counts")}
    findings = [*first["findings"], *second["findings"]]
    return first | counted | {"seconds": first["seconds"] + second["seconds"], "findings": findings}


def fuzz_part(name: str, arguments: argparse.Namespace, number: int, executions: int, result: Path) -> dict[str, Any]:
    """Fuzz a target in a separate process."""
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", name, "--executions", str(executions), "--seed", str(number)]
    command += ["--seconds", str(arguments.seconds), "--out", str(arguments.out)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.exists():
        return {
            "name": name,
            "kind": "?",
            "engines": {},
            "counts": {},
            "findings": [process.stderr[-2000:]],
            "seconds": 0.0,
        }
    record = json.loads(result.read_text())
    executed = sum(record["engines"].values())
    if process.returncode:
        record["findings"].append(
            f"the process ended with {process.returncode} after {executed:,}: {process.stderr[-2000:]}"
        )
    elif executed < executions:
        print(f"{name}: only {executed:,} executions in {arguments.seconds:g} s; --resume goes on with it", flush=True)
    return record


def table(records: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    rows = [
        "| target | kind | executions | right | refused clearly | taken, not compared | findings | by | seconds |",
        "|---|---|--:|--:|--:|--:|--:|---|--:|",
    ]
    for item in records:
        counts, engines = item["counts"], item["engines"]
        engine_counts = ", ".join(f"{engine} {count:,}" for engine, count in engines.items())
        values = (sum(engines.values()), *(counts.get(name, 0) for name in ("right", "refused", "taken", "findings")))
        numbers = " | ".join(f"{number:,}" for number in values)
        rows.append(f"| `{item['name']}` | {item['kind']} | {numbers} | {engine_counts} | {item['seconds']:.0f} |")
    total = sum(sum(item["engines"].values()) for item in records)
    findings = sum(item["counts"].get("findings", 0) for item in records)
    return "\n".join([*rows, "", f"{len(records)} targets, {total:,} executions, {findings:,} findings."])


def main() -> int:
    """Run the campaign; return a non-zero exit status if it found anything or did not finish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", nargs="*", help="names of targets, or loss, metric, stream, detection, score, interval"
    )
    parser.add_argument("--executions", type=int, default=100_000, help="of each target")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target, at most")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "faults")
    parser.add_argument("--resume", action="store_true", help="skip targets that finished without a finding")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        result = arguments.out / f"numbers-{arguments.one}.json"
        fuzz_target(arguments.one, arguments.executions, arguments.seconds, arguments.seed, result)
        return 0
    names = names_of(arguments.target)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        # Start with slow targets, so that no process is left with one at the end.
        futures = {
            pool.submit(fuzz_in_process, name, arguments): name for name in sorted(names, key=lambda n: n not in SLOW)
        }
        results = {}
        for future in as_completed(futures):
            record = results[futures[future]] = future.result()
            print(record["name"], record["counts"], *record["findings"][:3], sep="\n  ", flush=True)
    records = [results[name] for name in names]
    (arguments.out / "numbers.md").write_text(table(records) + "\n", encoding="utf-8")
    print(table(records))
    incomplete = any(sum(record["engines"].values()) < arguments.executions for record in records)
    return int(incomplete or any(record["findings"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
