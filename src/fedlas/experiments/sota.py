"""The main table: all losses and temperature scaling on small images."""

from fedlas.experiments.base import Choice
from fedlas.experiments.epochs import epoch_table
from fedlas.experiments.grid import AbstractGrid
from fedlas.experiments.ledger import Ledger, epoch_ledger
from fedlas.report.tables import Table


class Sota(AbstractGrid):
    """Accuracy, ECE and AECE of all losses on Tiny-ImageNet, CIFAR-10 and CIFAR-100, with mean ranks."""

    name = "sota"
    title = "Accuracy and calibration of all losses"
    ranked = ("ECE %", "AECE %")

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        rows = {
            (row, self.methods[row]): {
                benchmark.heading: self.lines(ledger, choice, benchmark, row) for benchmark in self.benchmarks(choice)
            }
            for row in self.rows(choice)
        }
        name, epochs = f"{self.name}-{choice.protocol}-epochs", {"best": ledger, "last": epoch_ledger(ledger, "last")}
        note = "Best epoch: highest accuracy on the validation split."
        return [*super().tables(ledger, choice), *epoch_table(name, rows, epochs, len(choice.seeds), note)]
