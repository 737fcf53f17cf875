"""Trainings that are killed at random moments and resumed: nothing is lost, and nothing is done twice.

    python tests/faults/kill.py --runs 100 --seed 1 --json build/kill.json
    python tests/faults/kill.py --runs 100 --seed 1 --signal SIGTERM

Every run has a recipe of its own and is trained twice: unbroken, and with a kill. The moment is drawn evenly from the
time that the unbroken run took; every fifth kill aims at a checkpoint that is being written, which else few would hit.
A run that ends before its kill comes is thrown away, and another moment is drawn. Then the run is resumed, and compared
with the unbroken one: weights and all else that a checkpoint holds, predictions, log, ledger, temporary files, steps.
At least a tenth of the kills have to have come while a checkpoint was being written.
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

LOSSES = ("fedlas_ls", "ce", "adafocal", "crl")  # without a state, and with states of three kinds
STEPS = 28
AIMED = 5  # every fifth kill
MOST = 1.5  # times the steps of an unbroken run
TOO_EARLY = "nothing: it failed by itself"
NETWORK: dict[str, Any] = {}  # its options; a short campaign trains a narrow one


def recipe_of(number: int) -> Recipe:
    """The recipe of a run: four epochs of seven steps, and a checkpoint every third step."""
    options = {"train_samples": 330}
    return recipe_for(
        "digits", "small_cnn", LOSSES[number % len(LOSSES)], epochs=4, batch_size=50, deterministic=True,
        checkpoint_every=3, seed=number, data_options=options, model_options=NETWORK,
    )  # fmt: skip


@dataclass
class Kill:
    """What became of one run.

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
    """Send a child a signal at a moment, or some time after it began to write a checkpoint; None where it was done."""
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
    """Train a recipe unbroken and broken, and compare."""
    recipe, words = recipe_of(number), folder / "words.txt"
    job = partial(train_and_record, recipe)
    SHOWN.clear()
    began = time.monotonic()
    if finish(fork(partial(job, folder / "unbroken", folder / "ledger-unbroken"), words)):
        raise RuntimeError(words.read_text())
    lasted, steps, written = time.monotonic() - began, SHOWN.steps, SHOWN.written
    assert steps == STEPS, steps
    broken, own, shared = folder / "broken", folder / "ledger", folder.parent / "ledger"
    found = None
    while found is None:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.rmtree(own, ignore_errors=True)
        SHOWN.clear()
        aim = (dice.randint(1, written), dice.uniform(0, 0.005)) if number % AIMED == 0 else None
        found = hit(fork(partial(job, broken, own), words), what, dice.uniform(0, lasted), aim)
    kill = Kill(number, *found, steps=0)
    if kill.phase == TOO_EARLY:
        kill.wrong.append(words.read_text())
    SHOWN.begin_again()
    for ledger in (own, own, shared):  # resumed, offered to the same ledger again, and to one of all runs
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
    """Kill so many runs."""
    dice = random.Random(seed)
    warm(recipe_of(0), folder)
    kills = []
    for number in range(runs):
        place = folder / f"run {number}"
        place.mkdir()
        kills.append(one(number, what, place, dice))
        if shown:
            print(number, kills[-1].phase, kills[-1].steps, *kills[-1].wrong, file=sys.stderr, flush=True)
        if not kills[-1].wrong:
            shutil.rmtree(place)
    return kills


def rows(kills: list[Kill]) -> list[dict[str, Any]]:
    """Count kills by phase."""
    found = []
    named = Counter(kill.phase for kill in kills)
    for name in [*(phase for phase in PHASES if phase in named), *(named.keys() - set(PHASES)), "all"]:
        held = [kill for kill in kills if name in (kill.phase, "all")]
        extra = [kill.steps / STEPS for kill in held]
        found.append({
            "killed in": name,
            "runs": len(held),
            "finished, equal, once in the ledger": sum(not kill.wrong for kill in held),
            "steps, mean": f"{sum(extra) / len(held):.2f}",
            "steps, most": f"{max(extra):.2f}",
        })  # fmt: skip
    return found


def wrongs(kills: list[Kill], asked: int) -> list[str]:
    """Name all that is wrong, also that too few kills came, or too few while a checkpoint was being written."""
    wrong = [f"run {kill.run}: {word}" for kill in kills for word in kill.wrong]
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
