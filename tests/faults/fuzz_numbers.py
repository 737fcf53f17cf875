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
LONGEST = 160  # bytes of an input
KEPT = 20  # recorded findings
# The memory of atheris grows with every execution of instrumented code and reaches 8 GB before these targets finish:
# they run in several processes one after the other, each with its own seed.
IN_PARTS = {"paired_bootstrap": 50_000}
OFTEN = 5_000  # executions between two writes of the results
SLOW = {"bootstrap", "paired_bootstrap", "smooth_curve", "smooth_ece", "kde_ece"}  # milliseconds each


class Counts:
    """Count the outcomes of executions and record the first findings."""

    def __init__(self, target: Any, limit: int, seconds: float) -> None:
        self.target, self.limit, self.until = target, limit, time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.findings: dict[str, str] = {}
        self.engines: Counter[str] = Counter()

    @property
    def asked(self) -> int:
        return sum(self.engines.values())

    @property
    def full(self) -> bool:
        return self.asked >= self.limit or time.monotonic() > self.until

    def ask(self, content: bytes, engine: str) -> None:
        self.engines[engine] += 1
        try:
            self.counts[self.target(content)] += 1
        except Exception as error:  # raised by the library or by a check: both are findings
            self.counts["findings"] += 1
            if len(self.findings) < KEPT:
                self.findings.setdefault(str(error)[:60], f"{type(error).__name__}: {error} <- {content.hex()}")

    def record(self, seconds: float) -> dict[str, Any]:
        about = {"name": self.target.name, "kind": self.target.kind, "seconds": round(seconds, 1)}
        return about | {
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
    @given(st.binary(max_size=LONGEST))
    def ask(content: bytes) -> None:
        if not counts.full:
            counts.ask(content, "hypothesis")

    ask()


def by_chance(counts: Counts, number: int) -> None:
    """Execute a target with seeded random bytes."""
    source = random.Random(number)
    while not counts.full:
        counts.ask(source.randbytes(source.choice((8, 40, 120, LONGEST))), "random")


def one_target(name: str, executions: int, seconds: float, number: int, result: Path) -> None:
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

    def ask(content: bytes) -> None:
        counts.ask(content, "atheris")
        if counts.full or counts.asked % OFTEN == 0:
            result.write_text(json.dumps(counts.record(time.monotonic() - start)))
        if counts.full:
            sys.stdout.flush()
            atheris_done()

    def atheris_done() -> None:
        import os

        os._exit(0)  # libFuzzer has no other way to stop after some seconds

    words = [f"-seed={number}", f"-max_len={LONGEST}", "-len_control=0", "-verbosity=0"]
    words.append("-rss_limit_mb=8192")
    atheris.Setup([sys.argv[0], *words], ask)
    atheris.Fuzz()


def names_of(kinds: list[str] | None) -> list[str]:
    sys.path.insert(0, str(HERE))
    import more_cases

    return [target.name for target in more_cases.targets() if not kinds or target.kind in kinds or target.name in kinds]


def in_a_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Fuzz a target, or read its earlier results."""
    result = given.out / f"numbers-{name}.json"
    if given.resume and result.exists():
        record = json.loads(result.read_text())
        if sum(record["engines"].values()) >= given.executions and not record["findings"]:
            return record
    result.unlink(missing_ok=True)
    whole: dict[str, Any] | None = None
    most = IN_PARTS.get(name, given.executions)
    for part in range(-(-given.executions // most)):
        record = of_a_part(name, given, part + 1, min(most, given.executions - part * most), result)
        whole = record if whole is None else together(whole, record)
        result.write_text(json.dumps(whole))
        if record["findings"]:
            break
    assert whole is not None
    return whole


def together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Add the results of two parts of a target."""
    counted = {name: dict(Counter(first[name]) + Counter(second[name])) for name in ("engines", "counts")}
    findings = [*first["findings"], *second["findings"]]
    return first | counted | {"seconds": first["seconds"] + second["seconds"], "findings": findings}


def of_a_part(name: str, given: argparse.Namespace, number: int, executions: int, result: Path) -> dict[str, Any]:
    """Fuzz a target in a separate process."""
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--one", name, "--executions", str(executions), "--seed", str(number)]
    command += ["--seconds", str(given.seconds), "--out", str(given.out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.exists():
        return {
            "name": name,
            "kind": "?",
            "engines": {},
            "counts": {},
            "findings": [ran.stderr[-2000:]],
            "seconds": 0.0,
        }
    record = json.loads(result.read_text())
    done = sum(record["engines"].values())
    if ran.returncode:
        record["findings"].append(f"the process ended with {ran.returncode} after {done:,}: {ran.stderr[-2000:]}")
    elif done < executions:
        print(f"{name}: only {done:,} executions in {given.seconds:g} s; --resume goes on with it", flush=True)
    return record


def table(records: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    rows = [
        "| target | kind | executions | right | refused clearly | taken, not compared | findings | by | seconds |",
        "|---|---|--:|--:|--:|--:|--:|---|--:|",
    ]
    for item in records:
        counts, engines = item["counts"], item["engines"]
        by = ", ".join(f"{engine} {count:,}" for engine, count in engines.items())
        shown = (sum(engines.values()), *(counts.get(name, 0) for name in ("right", "refused", "taken", "findings")))
        numbers = " | ".join(f"{number:,}" for number in shown)
        rows.append(f"| `{item['name']}` | {item['kind']} | {numbers} | {by} | {item['seconds']:.0f} |")
    total = sum(sum(item["engines"].values()) for item in records)
    bad = sum(item["counts"].get("findings", 0) for item in records)
    return "\n".join([*rows, "", f"{len(records)} targets, {total:,} executions, {bad:,} findings."])


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
    parser.add_argument("--resume", action="store_true", help="keep results that have enough and found nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.one:
        result = given.out / f"numbers-{given.one}.json"
        one_target(given.one, given.executions, given.seconds, given.seed, result)
        return 0
    names = names_of(given.target)
    with ThreadPoolExecutor(given.jobs) as pool:
        # Start with slow targets, so that no process is left with one at the end.
        waited = {pool.submit(in_a_process, name, given): name for name in sorted(names, key=lambda n: n not in SLOW)}
        results = {}
        for done in as_completed(waited):
            record = results[waited[done]] = done.result()
            print(record["name"], record["counts"], *record["findings"][:3], sep="\n  ", flush=True)
    records = [results[name] for name in names]
    (given.out / "numbers.md").write_text(table(records) + "\n", encoding="utf-8")
    print(table(records))
    short = any(sum(record["engines"].values()) < given.executions for record in records)
    return int(short or any(record["findings"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
