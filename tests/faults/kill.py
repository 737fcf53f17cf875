"""Campaign on killed runs: kill trainings at random times and resume them without losing or repeating steps.

    python tests/faults/kill.py --runs 100 --seed 1 --json build/kill.json
    python tests/faults/kill.py --runs 100 --seed 1 --signal SIGTERM

Every run has its own recipe and is trained twice: uninterrupted, and with a kill. The time of the kill is uniform over
the duration of the uninterrupted run; every fifth kill aims at a checkpoint write, which random times rarely hit. A run
that ends before its kill is discarded and repeated with another time. The resumed run is compared with the
uninterrupted one: checkpoint, predictions, log, ledger, temporary files and number of steps. At least a tenth of the
kills must have happened during a checkpoint write.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from zygote import (
    PHASES,
    PROGRESS,
    count_lines,
    differences,
    finish,
    fork,
    table,
    temporary_files,
    train_and_record,
    wait_for,
    warm,
)

from fedlas.experiments.ledger import Ledger
from fedlas.experiments.stored_predictions import problems
from fedlas.training import Recipe, Run, recipe_for

LOSSES = ("fedlas_ls", "ce", "adafocal", "crl")  # three with different state, and one without state
STEPS = 28
AIM_EVERY = 5  # every fifth kill aims at a checkpoint write
MAX_STEP_RATIO = 1.5  # maximal steps relative to the uninterrupted run
TOO_EARLY = "nothing: it failed by itself"
NETWORK: dict[str, Any] = {}  # network options; a short campaign trains a narrow network


def recipe_of(number: int) -> Recipe:
    """Return the recipe of a run: four epochs of seven steps, and a checkpoint every third step."""
    options = {"train_samples": 330}
    return recipe_for(
        "digits", "small_cnn", LOSSES[number % len(LOSSES)], epochs=4, batch_size=50, deterministic=True,
        checkpoint_every=3, seed=number, data_options=options, model_options=NETWORK,
    )  # fmt: skip


@dataclass
class Kill:
    """The result of one killed run.

    Args:
        run: its number.
        phase: what it was doing when the signal came.
        code: with which the first attempt ended.
        steps: that both attempts have begun.
        failures: what is not as it should be.
    """

    run: int
    phase: str
    code: int
    steps: int
    failures: list[str] = field(default_factory=list)


def send_signal(child: int, signal_number: int, moment: float, aim: tuple[int, float] | None) -> tuple[str, int] | None:
    """Signal a child at a given time, or during a checkpoint write; return None if it had finished."""
    start = time.monotonic()
    while time.monotonic() - start < moment if aim is None else PROGRESS.written < aim[0]:
        if (code := wait_for(child, 0.001)) is not None:
            return None if code == 0 else (TOO_EARLY, code)
    if aim is not None:
        time.sleep(aim[1])
    phase_before = PROGRESS.phase
    os.kill(child, signal_number)
    code = finish(child)
    if code == 0:
        return None
    return (PROGRESS.phase if signal_number == signal.SIGKILL else phase_before), code


def kill_and_resume(number: int, signal_number: int, folder: Path, rng: random.Random) -> Kill:
    """Train a recipe with and without a kill and compare the results."""
    recipe, output_file = recipe_of(number), folder / "words.txt"
    job = partial(train_and_record, recipe)
    PROGRESS.clear()
    start = time.monotonic()
    if finish(fork(partial(job, folder / "uninterrupted", folder / "ledger-uninterrupted"), output_file)):
        raise RuntimeError(output_file.read_text())
    duration, steps, written = time.monotonic() - start, PROGRESS.steps, PROGRESS.written
    assert steps == STEPS, steps
    killed, own_ledger, shared = folder / "killed", folder / "ledger", folder.parent / "ledger"
    result = None
    while result is None:
        shutil.rmtree(killed, ignore_errors=True)
        shutil.rmtree(own_ledger, ignore_errors=True)
        PROGRESS.clear()
        aim = (rng.randint(1, written), rng.uniform(0, 0.005)) if number % AIM_EVERY == 0 else None
        result = send_signal(
            fork(partial(job, killed, own_ledger), output_file), signal_number, rng.uniform(0, duration), aim
        )
    kill = Kill(number, *result, steps=0)
    if kill.phase == TOO_EARLY:
        kill.failures.append(output_file.read_text())
    PROGRESS.reset_phase()
    for ledger in (own_ledger, own_ledger, shared):  # resume, record again, and record in a ledger shared by all runs
        code = finish(fork(partial(job, killed, ledger), output_file))
        if code:
            kill.failures.append(f"resumed, it ended with {code}: {output_file.read_text()[-2000:]}")
            return kill
    kill.steps = PROGRESS.steps
    kill.failures += differences(Run(killed), Run(folder / "uninterrupted"))
    kill.failures += [] if STEPS <= kill.steps < MAX_STEP_RATIO * STEPS else [f"it took {kill.steps} steps"]
    for ledger in (own_ledger, shared):
        count = count_lines(ledger, recipe.name)
        kill.failures += [f"{ledger} has it {count} times"] * (count != 1)
    kill.failures += [f"{path} was left" for path in temporary_files(folder)]
    kill.failures += problems(Ledger(own_ledger))
    return kill


def campaign(runs: int, seed: int, signal_number: int, folder: Path, verbose: bool = False) -> list[Kill]:
    """Kill the given number of runs."""
    rng = random.Random(seed)
    warm(recipe_of(0), folder)
    kills = []
    for number in range(runs):
        run_folder = folder / f"run {number}"
        run_folder.mkdir()
        kills.append(kill_and_resume(number, signal_number, run_folder, rng))
        if verbose:
            print(number, kills[-1].phase, kills[-1].steps, *kills[-1].failures, file=sys.stderr, flush=True)
        if not kills[-1].failures:
            shutil.rmtree(run_folder)
    return kills


def rows(kills: list[Kill]) -> list[dict[str, Any]]:
    """Count kills by phase."""
    result = []
    counts = Counter(kill.phase for kill in kills)
    for name in [*(phase for phase in PHASES if phase in counts), *(counts.keys() - set(PHASES)), "all"]:
        selected = [kill for kill in kills if name in (kill.phase, "all")]
        step_ratios = [kill.steps / STEPS for kill in selected]
        result.append({
            "killed in": name,
            "runs": len(selected),
            "finished, equal, once in the ledger": sum(not kill.failures for kill in selected),
            "steps, mean": f"{sum(step_ratios) / len(selected):.2f}",
            "steps, most": f"{max(step_ratios):.2f}",
        })  # fmt: skip
    return result


def all_failures(kills: list[Kill], runs: int) -> list[str]:
    """Return all problems, including too few kills in total or during checkpoint writes."""
    failures = [f"run {kill.run}: {name}" for kill in kills for name in kill.failures]
    failures += [f"{len(kills)} runs were killed, and {runs} should have been"] * (len(kills) != runs)
    writing = sum(kill.phase == "checkpoint writing" for kill in kills)
    return failures + [f"only {writing} of {len(kills)} kills came during checkpoint writing"] * (writing < runs // 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signal", default="SIGKILL", choices=["SIGKILL", "SIGTERM", "SIGINT"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills = campaign(arguments.runs, arguments.seed, getattr(signal, arguments.signal), Path(folder), verbose=True)
    print(f"{arguments.signal}, seed {arguments.seed}, {time.monotonic() - start:.0f} s\n\n{table(rows(kills))}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(kill) for kill in kills], indent=1) + "\n")
    failures = all_failures(kills, arguments.runs)
    print(*failures, sep="\n", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
