"""The page about reproduction, written from the ledger: what was measured, beside what the paper prints.

Everything on it can be made again: tables from ledger lines, the list of runs that are missing, and the words, which
are the same whatever the numbers say.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from fedlas.experiments.base import CHANGED, SUBSTITUTED, TEST_SPLITS, Choice
from fedlas.experiments.grid import AbstractGrid
from fedlas.experiments.ledger import TEST, Ledger
from fedlas.experiments.planning import CATALOG, experiment_named, make_plan
from fedlas.report.tables import RANKS, Detail, Table
from fedlas.training import protocol_named

AS_PRINTED = ("paper", "official")  # protocols whose numbers can be compared with the paper's
HEAD = """\
# Reproduction

This page is written by `scripts/pages` from the ledger in `results/`: no number on it comes from anywhere else but,
where it says "paper", from the paper. A cell is empty until its runs are done. `fedlas reproduce NAME` trains what is
missing and prints the table as it fills; it can be stopped at any time and goes on where it stopped. Every run writes
two lines to the ledger, as trained and after temperature scaling (`fedlas compare cifar10/ls+temperature ...`); older
runs without validation logits have the first alone.

```sh
fedlas list experiments
fedlas reproduce sota --data cifar10 --protocol fast             # short: 20 epochs of ResNet-18
fedlas reproduce sota --data cifar10 --model resnet50_cifar      # as in the paper: 350 epochs of ResNet-50
fedlas reproduce sota --data cifar10 --protocol fast --dry-run   # the plan and the table, nothing is started
fedlas compare cifar10/fast/fedlas_ls cifar10/fast/ls            # paired, on the same test samples, over seeds
```

A value is the mean over seeds ± its standard deviation. An interval is the mean of the seeds' 95 % bootstrap intervals,
which is what another test set of the same size would change. A difference from the paper is "inside" noise if the
paper's number lies in the range of those intervals, or within two standard errors of the difference of two means, ours
and one of three seeds with the same standard deviation.
"""


def reproduction_page(ledger: Ledger) -> str:
    """Write the page."""
    done = {(line.protocol, line.recipe.data) for line in ledger.lines.values()}
    parts = [HEAD, _summary(ledger)]
    for name in CATALOG.entries:
        parts += _section(name, ledger, sorted({protocol for protocol, _ in done}))
    return "\n".join(parts).rstrip() + "\n"


def results_tables(ledger: Ledger, like: Choice | None = None, name: str = "sota") -> list[Table]:
    """Make a small table for each data set and network of which something was run, of the rows that were.

    Args:
        ledger: what was run.
        like: seeds and changes of the recipes that are looked for, and their data where not all of the paper is meant.
        name: of the experiment, by default that of the main table.
    """
    experiment, made = experiment_named(name), []
    benchmarks = {(line.protocol, line.recipe.data, line.recipe.model) for line in ledger.lines.values()}
    named = experiment.data_sets() if isinstance(experiment, AbstractGrid) else None
    if like is not None and like.data is not None:
        named = like.data
    for protocol, data, model in sorted(benchmarks, key=lambda benchmark: (benchmark[0] not in AS_PRINTED, benchmark)):
        if named is not None and data not in named:
            continue
        choice = replace(like or Choice(), protocol=protocol, data=(data,), models=(model,))
        for table in experiment.tables(ledger, choice):
            shown = [n for n, column in enumerate(table.columns) if column.group != RANKS]
            if not shown:  # the experiment says nothing about such data
                continue
            every = [replace(row, cells=tuple(row.cells[n] for n in shown)) for row in (*table.rows, *table.left_out)]
            rows = tuple(row for row in every if any(cell.values for cell in row.cells))
            others = tuple(row for row in every if row not in rows)
            columns = tuple(replace(table.columns[n], group="") for n in shown)
            title = f"{table.columns[0].group}, {protocol} protocol"
            if rows:
                small = replace(table, title=title, columns=columns, rows=rows, left_out=others, notes=_said(table))
                made.append(small)
    return made


def _said(table: Table) -> tuple[str, ...]:
    """Keep the notes that name what was measured, and what was changed; what a protocol is stands elsewhere."""
    return tuple(note for note in table.notes if note.startswith((SUBSTITUTED, CHANGED)))


def _summary(ledger: Ledger) -> str:
    # A training may have several lines: after a calibrator, and for each way to look at the test images.
    lines = list({line.recipe.name: line for line in ledger.lines.values()}.values())
    if not lines:
        return "The ledger is empty: nothing has been run yet.\n"
    hours = sum(line.seconds for line in lines) / 3600
    devices = sorted({str(line.environment.get("device_name", "")) for line in lines})
    return f"{len(lines)} trainings, {hours:.1f} hours on {', '.join(devices)}.\n"


def _section(name: str, ledger: Ledger, protocols: Sequence[str]) -> list[str]:
    experiment = experiment_named(name)
    splits: dict[str, set[str]] = {TEST: set()}  # and the data that was evaluated on another one
    known = experiment.data_sets() if isinstance(experiment, AbstractGrid) else ()
    for line in ledger.lines.values():
        if line.recipe.data in known and line.split in TEST_SPLITS:
            splits.setdefault(line.split, set()).add(line.recipe.data)
    written = []
    for protocol, (split, data) in product(protocols, splits.items()):
        choice = Choice(protocol=protocol, split=split, seeds=experiment.seeds)
        if split != TEST and isinstance(experiment, AbstractGrid):
            official_ood = {ood for ood in known if experiment.uses_official_ood(ood, choice)}
            choice = replace(choice, data=tuple(sorted(data | official_ood)))
        try:
            plan = make_plan(experiment, choice, ledger)
        except ValueError:  # the protocol has no network for this experiment
            continue
        if len(plan.missing) == len(plan.runs) or not any(planned.split == split for planned in plan.runs):
            continue
        if plan.protocols != protocol:  # it has a protocol of its own, whatever was asked for
            continue
        detail: Detail = "full" if protocol in AS_PRINTED else "both"
        evaluated = "" if split == TEST else f", {split}"
        written += [f"### {protocol_named(protocol).name} protocol{evaluated}: {plan}\n"]
        written += [table.markdown(detail) for table in experiment.tables(ledger, choice)]
    about = (type(experiment).__doc__ or "").split("\n", 1)[0]
    if experiment.needs_runs and not written:
        written = ["Nothing of it has been run yet.\n"]
    return [f"## {name}\n", f"{about}\n", *written]
