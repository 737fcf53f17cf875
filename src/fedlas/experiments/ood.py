"""The table of foreign data: how well networks tell images apart that they were not trained on."""

from collections.abc import Sequence
from dataclasses import replace

from fedlas.experiments import paper
from fedlas.experiments.base import FOR, Choice
from fedlas.experiments.grid import AbstractGrid, Measured
from fedlas.experiments.ledger import TEST, Ledger
from fedlas.report.tables import Table
from fedlas.training import official_preprocessing_differs
from fedlas.training.recipe import PUBLISHED


class OutOfDistribution(AbstractGrid):
    """AUROC of entropy and of the largest probability, CIFAR-10 and CIFAR-100 against SVHN and each other."""

    name = "ood"
    title = "Detection of foreign data"
    one_network = True  # the paper does not say; ResNet-50 is presumed

    def measured(self, data: str, choice: Choice) -> Sequence[Measured]:
        scores = {"entropy": "entropy", "max_probability": "largest probability"}
        return tuple(
            Measured(
                "auroc", f"AUROC % {paper.data_name(ood)}, {shown}", higher_is_better=True, score=score,
                ood=self._looked_at(ood, choice), printed_as=ood, printed=score == "entropy",
            )
            for ood in paper.foreign_data(self.name, data)
            for score, shown in scores.items()
        )  # fmt: skip

    def _looked_at(self, ood: str, choice: Choice) -> str:
        """Name a foreign data set as the published code looks at it, where that was asked for and it does otherwise."""
        return f"{ood}{PUBLISHED}" if choice.split != TEST and official_preprocessing_differs(ood) else ood

    def foreign(self, data: str, choice: Choice) -> tuple[str, ...]:
        """List the foreign data sets; those that are looked at as published also as they should be.

        So a line of the ledger that is written anew knows all that the one before knew.
        """
        names = super().foreign(data, choice)
        return tuple(sorted({*names, *(name.removesuffix(PUBLISHED) for name in names)}))

    def sees_otherwise(self, data: str, choice: Choice) -> bool:
        return any(name.endswith(PUBLISHED) for name in self.foreign(data, choice))

    def tables(self, ledger: Ledger, choice: Choice) -> list[Table]:
        said = {
            f"{FOR}{paper.data_name(name)}: {title}."
            for wanted in self.plan(choice, ledger)
            if (line := ledger.find(wanted.recipe, None, wanted.split)) is not None
            for name, title in line.environment.get("titles", {}).items()
            if title != paper.data_name(name)
        }
        made = super().tables(ledger, choice)
        return [replace(table, notes=(*table.notes, *sorted(said))) for table in made]

    def notes(self, choice: Choice) -> tuple[str, ...]:
        theirs = "Every data set is normalised by itself, as in the published code: CIFAR-100 by other constants."
        ours = "Foreign images pass through the transform of the data that the network was trained on."
        return (*super().notes(choice), ours if choice.split == TEST else theirs)
