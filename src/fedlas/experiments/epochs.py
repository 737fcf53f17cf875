"""How much results depend on the selected epoch: the best epoch by validation accuracy, and the last one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedlas.experiments.grid import Measured
from fedlas.experiments.ledger import Ledger, Line
from fedlas.report.tables import Cell, Row, Table

METRICS = (
    Measured("accuracy", "accuracy %", higher_is_better=True),
    Measured("ece", "ECE %"),
    Measured("nll", "NLL", percent=False, digits=4),
)
Lines = Mapping[str, Sequence[Line]]  # of a row, by the heading of a group of columns


def epoch_table(
    name: str, rows: Mapping[tuple[str, str], Lines], epochs: Mapping[str, Ledger], planned: int, note: str
) -> list[Table]:
    """Return the table of the same runs at both epochs, which has only runs in both ledgers; no table without any.

    Args:
        name: name of the table.
        rows: ledger lines of each row, by its name and label.
        epochs: ledger of the "best" and of the "last" epoch, in the order of the rows.
        planned: number of seeds in the plan of the experiment.
        note: note below the table.
    """
    in_both = {
        row: {
            group: [line.id for line in lines if all(line.id in ledger.lines for ledger in epochs.values())]
            for group, lines in groups.items()
        }
        for row, groups in rows.items()
    }
    groups = [group for group in next(iter(rows.values()), {}) if any(ids[group] for ids in in_both.values())]
    columns = [
        replace(measured.column(group, compared=False), ranked=False) for group in groups for measured in METRICS
    ]
    filled = [
        Row(
            f"{row}/{epoch}",
            f"{label}, {epoch} epoch",
            tuple(
                Cell(tuple(ledger.lines[line].metrics[measured.metric][0] for line in ids[group]), planned=planned)
                for group in groups
                for measured in METRICS
            ),
        )
        for (row, label), ids in in_both.items()
        for epoch, ledger in epochs.items()
        if any(ids.values())
    ]
    notes = (f"{note} Both epochs are of the same runs.",)
    return [Table(name, "Last epoch and best epoch", tuple(columns), tuple(filled), notes)] if groups else []
