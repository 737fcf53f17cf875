"""The page about reproduction, written from the ledger: what has been run of each experiment, and what is missing."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from fedlas.experiments import closed_loop_design
from fedlas.experiments.base import CHANGED, SUBSTITUTED, TEST_SPLITS, Choice
from fedlas.experiments.grid import AbstractGrid
from fedlas.experiments.ledger import TEST, Ledger
from fedlas.experiments.planning import CATALOG, Plan, experiment_named, make_plan
from fedlas.report.tables import RANKS, Table
from fedlas.training import protocol_named
from fedlas.training.recipe import OFFICIAL_SUFFIX

PAPER_PROTOCOLS = ("paper", "official")  # protocols whose numbers can be compared with the paper's
LOOP_PROTOCOL = closed_loop_design.PROTOCOL  # its runs are on the pages of `closed_loop` alone
HEAD = """\
# Reproduction

`fedlas reproduce NAME` trains the runs of an experiment that the ledger in `results/` lacks and prints its table. This
page, written by `scripts/pages`, lists what has been run; the tables are in the
[comparison with the paper](paper_comparison.md) and in the [results of the closed loop](closed_loop_results.md).

```sh
fedlas list experiments
fedlas reproduce sota --data cifar10 --protocol fast             # short: 20 epochs of ResNet-18
fedlas reproduce sota --data cifar10 --model resnet50_cifar      # as in the paper: 350 epochs of ResNet-50
fedlas reproduce sota --data cifar10 --protocol fast --dry-run   # the plan and the table; trains nothing
fedlas compare cifar10/fast/fedlas_ls cifar10/fast/ls            # paired, on the same test samples, over seeds
```

The command can be stopped at any time and continues where it stopped. A run writes two lines to the ledger, as
trained and after temperature scaling (`cifar10/fast/ce+temperature`); runs stored without validation logits have only
the first, except those of cross-entropy. In tables a value is the mean over seeds ± its standard deviation, and an
interval the mean of the seeds' 95 % bootstrap intervals.
"""
TABLE = """\
| experiment | what it measures | protocol | runs | in the ledger | to train | estimated time |
| --- | --- | --- | ---: | ---: | ---: | --- |
"""


def reproduction_page(ledger: Ledger) -> str:
    """Write the page."""
    protocols = sorted({line.protocol for line in ledger.lines.values()})
    rows = {name: _rows(name, ledger, protocols) for name in CATALOG.entries}
    parts = [HEAD, _summary(ledger)]
    if any(rows.values()):
        parts.append(TABLE + "".join(line for lines in rows.values() for line in lines))
    missing = [f"`{name}` ({_about(name)})" for name, lines in rows.items() if not lines and _needs_runs(name)]
    if missing and ledger.lines:
        parts.append(f"Not run yet: {', '.join(missing)}.")
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
    for protocol, data, model in sorted(
        benchmarks, key=lambda benchmark: (benchmark[0] not in PAPER_PROTOCOLS, benchmark)
    ):
        if protocol == LOOP_PROTOCOL or (named is not None and data not in named):
            continue
        choice = replace(like or Choice(), protocol=protocol, data=(data,), models=(model,))
        for number, table in enumerate(experiment.tables(ledger, choice)):
            shown = [n for n, column in enumerate(table.columns) if column.group != RANKS]
            if not shown:  # the experiment says nothing about such data
                continue
            every = [replace(row, cells=tuple(row.cells[n] for n in shown)) for row in (*table.rows, *table.left_out)]
            rows = tuple(row for row in every if any(cell.values for cell in row.cells))
            others = tuple(row for row in every if row not in rows)
            columns = tuple(replace(table.columns[n], group="") for n in shown)
            title = f"{table.columns[0].group}, {protocol} protocol" + (f": {table.title.lower()}" if number else "")
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


def _rows(name: str, ledger: Ledger, protocols: Sequence[str]) -> list[str]:
    """Write a row for each protocol and test split of which something was run."""
    experiment = experiment_named(name)
    splits: dict[str, set[str]] = {TEST: set()}  # and the data that was evaluated on another one
    known = experiment.data_sets() if isinstance(experiment, AbstractGrid) else ()
    for line in ledger.lines.values():
        if line.recipe.data in known and line.split in TEST_SPLITS:
            splits.setdefault(line.split, set()).add(line.recipe.data)
    rows: list[str] = []
    for protocol, (split, data) in product(protocols, splits.items()):
        if isinstance(experiment, AbstractGrid) and protocol == LOOP_PROTOCOL:
            continue
        choice = Choice(protocol=protocol, split=split, seeds=experiment.seeds)
        if split != TEST and isinstance(experiment, AbstractGrid):
            official_ood = {
                ood for ood in known if any(n.endswith(OFFICIAL_SUFFIX) for n in experiment.ood_data(ood, choice))
            }
            choice = replace(choice, data=tuple(sorted(data | official_ood)))
        try:
            plan = make_plan(experiment, choice, ledger)
        except ValueError:  # the protocol has no network for this experiment
            continue
        if len(plan.missing) == len(plan.runs) or not any(planned.split == split for planned in plan.runs):
            continue
        if plan.protocols != protocol:  # it has a protocol of its own, whatever was asked for
            continue
        evaluated = "" if split == TEST else f", `--split {split}`"
        cells = [f"`{name}`", "" if rows else _about(name), protocol_named(protocol).name + evaluated, len(plan.runs)]
        cells += [len(plan.runs) - len(plan.missing) + plan.again, len(plan.missing), _time(plan)]
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
    return rows


def _time(plan: Plan) -> str:
    """Write how long the missing runs take, as far as similar runs of the ledger tell."""
    if not plan.missing:
        return ""
    if plan.minutes is None:
        return "unknown"
    device = f" on {plan.device}" if plan.device else ""
    known = f", for {len(plan.missing) - plan.unknown} of them" if plan.unknown else ""
    return f"{plan.minutes:.0f} min{device}{known}"


def _about(name: str) -> str:
    return (type(experiment_named(name)).__doc__ or "").split("\n", 1)[0].rstrip(".")


def _needs_runs(name: str) -> bool:
    return experiment_named(name).needs_runs
