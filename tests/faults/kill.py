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

from zygote import PHASES, SHOWN, differences, ended, finish, fork, lines, parts, table, train_and_record, warm

from fedlas.experiments.ledger import Ledger
from fedlas.experiments.stored_predictions import problems
from fedlas.training import Recipe, Run, recipe_for

LOSSES = ("fedlas_ls", "ce", "adafocal", "crl")  # three kinds of state, and none
STEPS = 28
AIMED = 5  # every fifth kill aims at a checkpoint write
MOST = 1.5  # maximal steps relative to the uninterrupted run
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
        wrong: what is not as it should be.
    """

    run: int
    phase: str
    code: int
    steps: int
    wrong: list[str] = field(default_factory=list)


def hit(child: int, number: int, moment: float, aim: tuple[int, float] | None) -> tuple[str, int] | None:
    """Signal a child at a given time, or during a checkpoint write; return None if it had finished."""
    began = time.monotonic()
    while time.monotonic() - began < moment if aim is None else SHOWN.written < aim[0]:
        if (code := ended(child, 0.001)) is not None:
            return None if code == 0 else (TOO_EARLY, code)
    if aim is not None:
        time.sleep(aim[1])
    seen = SHOWN.phase
    os.kill(child, number)
    code = finish(child)
    if code == 0:
        return None
    return (SHOWN.phase if number == signal.SIGKILL else seen), code


def one(number: int, what: int, folder: Path, dice: random.Random) -> Kill:
    """Train a recipe with and without a kill and compare the results."""
    recipe, words = recipe_of(number), folder / "words.txt"
    job = partial(train_and_record, recipe)
    SHOWN.clear()
    began = time.monotonic()
    if finish(fork(partial(job, folder / "unbroken", folder / "ledger-unbroken"), words)):
        raise RuntimeError(words.read_text())
    lasted, steps, written = time.monotonic() - began, SHOWN.steps, SHOWN.written
    assert steps == STEPS, steps
    broken, own, shared = folder / "broken", folder / "ledger", folder.parent / "ledger"
    result = None
    while result is None:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.rmtree(own, ignore_errors=True)
        SHOWN.clear()
        aim = (dice.randint(1, written), dice.uniform(0, 0.005)) if number % AIMED == 0 else None
        result = hit(fork(partial(job, broken, own), words), what, dice.uniform(0, lasted), aim)
    kill = Kill(number, *result, steps=0)
    if kill.phase == TOO_EARLY:
        kill.wrong.append(words.read_text())
    SHOWN.begin_again()
    for ledger in (own, own, shared):  # resume, record again, and record in a ledger shared by all runs
        code = finish(fork(partial(job, broken, ledger), words))
        if code:
            kill.wrong.append(f"resumed, it ended with {code}: {words.read_text()[-2000:]}")
            return kill
    kill.steps = SHOWN.steps
    kill.wrong += differences(Run(broken), Run(folder / "unbroken"))
    kill.wrong += [] if STEPS <= kill.steps < MOST * STEPS else [f"it took {kill.steps} steps"]
    for ledger in (own, shared):
        count = lines(ledger, recipe.name)
        kill.wrong += [f"{ledger} has it {count} times"] * (count != 1)
    kill.wrong += [f"{path} was left" for path in parts(folder)]
    kill.wrong += problems(Ledger(own))
    return kill


def campaign(runs: int, seed: int, what: int, folder: Path, shown: bool = False) -> list[Kill]:
    """Kill the given number of runs."""
    dice = random.Random(seed)
    warm(recipe_of(0), folder)
    kills = []
    for number in range(runs):
        run_folder = folder / f"run {number}"
        run_folder.mkdir()
        kills.append(one(number, what, run_folder, dice))
        if shown:
            print(number, kills[-1].phase, kills[-1].steps, *kills[-1].wrong, file=sys.stderr, flush=True)
        if not kills[-1].wrong:
            shutil.rmtree(run_folder)
    return kills


def rows(kills: list[Kill]) -> list[dict[str, Any]]:
    """Count kills by phase."""
    result = []
    named = Counter(kill.phase for kill in kills)
    for name in [*(phase for phase in PHASES if phase in named), *(named.keys() - set(PHASES)), "all"]:
        held = [kill for kill in kills if name in (kill.phase, "all")]
        extra = [kill.steps / STEPS for kill in held]
        result.append({
            "killed in": name,
            "runs": len(held),
            "finished, equal, once in the ledger": sum(not kill.wrong for kill in held),
            "steps, mean": f"{sum(extra) / len(held):.2f}",
            "steps, most": f"{max(extra):.2f}",
        })  # fmt: skip
    return result


def wrongs(kills: list[Kill], asked: int) -> list[str]:
    """Return all problems, including too few kills in total or during checkpoint writes."""
    wrong = [f"run {kill.run}: {name}" for kill in kills for name in kill.wrong]
    wrong += [f"{len(kills)} runs were killed, and {asked} should have been"] * (len(kills) != asked)
    writing = sum(kill.phase == "checkpoint writing" for kill in kills)
    return wrong + [f"only {writing} of {len(kills)} kills came during checkpoint writing"] * (writing < asked // 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signal", default="SIGKILL", choices=["SIGKILL", "SIGTERM", "SIGINT"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills = campaign(given.runs, given.seed, getattr(signal, given.signal), Path(folder), shown=True)
    print(f"{given.signal}, seed {given.seed}, {time.monotonic() - began:.0f} s\n\n{table(rows(kills))}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(kill) for kill in kills], indent=1) + "\n")
    wrong = wrongs(kills, given.runs)
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
